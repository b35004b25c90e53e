"""Decide which steps are skipped, and when a run has failed.

With finite weights and moments, v >= 0 and eps > 0, AdamW's update is finite if the gradient's square is:

    m' = m + (1 - b1) (g - m),   v' = b2 v + (1 - b2) g^2,   w' = w (1 - r decay) - r m'^ / (sqrt(v'^) + eps)

So a step is skipped unless the loss is finite and the norm of the clipped gradient is at most 1e19, whose square fits
in FP32 and BF16. The device decides, updates and counts, and the host does not wait for it. Overflow from extreme
learning rates (1e30) is found before a checkpoint is saved (`finite`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LARGEST_NORM = 1e19
NAMED = 3  # maximum number of parameters in a message


class TrainingDiverged(RuntimeError):
    """The loss or the gradient was not finite for too many steps in a row.

    gradients: names of the parameters whose gradients were not finite in the last skipped step. saved: the step after
    which the state was saved; the host may find out when the device has done one more step. unsaved: why it could not
    be saved.
    """

    def __init__(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        skipped: int,
        lr: float,
        gradients: Sequence[str] = (),
        saved: int | None = None,
        unsaved: str = "",
    ) -> None:
        self.step, self.loss, self.grad_norm, self.skipped, self.lr = step, loss, grad_norm, skipped, lr
        self.gradients = tuple(gradients)
        more = f" and {len(gradients) - NAMED} more" if len(gradients) > NAMED else ""
        kept = f"The weights and optimizer states after step {saved} are saved; the skipped steps did not change them. "
        state = f"{unsaved} " if unsaved else "" if saved is None else kept
        where = f" (gradients not finite: {', '.join(gradients[:NAMED])}{more})" if gradients else ""
        super().__init__(
            f"training diverged at step {step}: loss {loss}, gradient norm {grad_norm}, "
            f"{skipped} steps in a row skipped as not finite{where}, learning rate {lr:.3g}.\n"
            f"{state}Try a lower peak learning rate or a longer warm-up, a smaller max_grad_norm, one GEMM "
            "in higher precision (precision.override) to find the one that overflows, or a larger max_nonfinite_steps."
        )
        if unsaved:
            self.add_note(unsaved)


class NothingTrained(RuntimeError):
    """The run has reached its last step, but its loss is not finite, most steps were skipped, or the last
    `max_nonfinite_steps` were.
    """

    def __init__(self, *, steps: int, skipped: int, in_row: int, loss: float, measured: int = 0) -> None:
        what = f"{skipped} of {steps} steps were skipped as not finite"
        so = "the weights are those from before these steps"
        if skipped >= steps:
            what, so = f"all {steps} steps were skipped as not finite", "no weight has moved"
        elif skipped + measured >= steps:
            what = f"{measured} of {steps} steps only measured norms, {skipped} were skipped as not finite"
            so = "no weight has moved"
        elif not math.isfinite(loss):
            so = f"valid/loss is {loss}"
        elif 2 * skipped <= steps:
            what = f"the last {in_row} of {steps} steps were skipped as not finite"
        super().__init__(f"the run has not trained: {what}, and {so}")


def usable(loss: Tensor, norm: Tensor, scale: Tensor) -> Tensor:
    """Return whether a step with gradients of this norm, divided by `scale`, keeps all numbers finite; 0-dim bool."""
    return loss.isfinite() & scale.isfinite() & (norm / scale <= LARGEST_NORM)


class Skips:
    """Counts of skipped steps, 0-dim int64 on the device. Also records which of the p gradients were not finite."""

    def __init__(self, device: torch.device, parameters: int) -> None:
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self.in_row = torch.zeros((), dtype=torch.int64, device=device)
        self._bad = torch.zeros(parameters, dtype=torch.bool, device=device)

    def count(self, taken: Tensor, squares: Tensor) -> None:
        """Count one step. taken: 0-dim bool. squares: of each parameter's gradient, FP64 [p], on this process."""
        self.total += ~taken
        self.in_row.add_(1).mul_(~taken)
        self._bad = torch.where(taken, self._bad, ~squares.isfinite())

    def gradients(self, names: Sequence[str], anywhere: Callable[[Tensor], Tensor]) -> list[str]:
        """Return the parameters whose gradients were not finite on any process in the last skipped step.

        anywhere: returns which flags are set on any process.
        """
        return [name for name, bad in zip(names, anywhere(self._bad).tolist(), strict=True) if bad]

    def judge(self, steps: int, max_nonfinite_steps: int, loss: float, *, measured: int = 0) -> None:
        """Raise NothingTrained at the end of a run that has not trained. loss: the last validation loss. measured:
        number of steps that only measured norms (`optim.in_backward`).
        """
        total, in_row = int(self.total), int(self.in_row)
        if 2 * total > steps or total + measured >= steps or in_row >= max_nonfinite_steps or not math.isfinite(loss):
            raise NothingTrained(steps=steps, skipped=total, in_row=in_row, loss=loss, measured=measured)
