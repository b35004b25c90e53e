"""AdamW whose clipping and skipping happen on the device.

    g' = g / grad_scale,   m = b1 m + (1 - b1) g',   v = b2 v + (1 - b2) g'^2
    w  = w - lr * (weight_decay * w + m^ / (sqrt(v^) + eps))          unless found_inf

torch's fused kernels read `grad_scale` and `found_inf` from the device, the way GradScaler hands them over.
Global-norm clipping is a division by max(norm / clip, 1), and a non-finite step is a found_inf of 1: the kernel
leaves weights, moments and step counter as they were, and the host never waits to learn which it was (arXiv
1711.05101 for the decoupled decay).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW, also on CPU, with a device-side gradient divisor and skip flag.

    State exists from the start (a checkpoint of step 0 has it, and a lack of memory shows before the first step).

    Args:
        params: parameters or groups, see `parameter_groups`.
        lr: learning rate, a float; `set_lr` changes it between steps.
        betas, eps, weight_decay: as in torch; betas default to what language models use.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: Iterable[float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        beta1, beta2 = (float(beta) for beta in betas)
        super().__init__(params, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, fused=True)
        for parameter in self._parameters():
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> float | None:
        """One update.

        Args:
            grad_scale: 0-dim FP32 tensor on the parameters' device; gradients are divided by it, in place.
            found_inf: 0-dim FP32 tensor there; 1.0 leaves parameters and state bit for bit as they are.
        """
        self.grad_scale, self.found_inf = grad_scale, found_inf
        try:
            return super().step(closure)
        finally:
            del self.grad_scale, self.found_inf

    def _parameters(self) -> Iterable[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay for weights with two or more dimensions, embeddings among them, none for norms and biases.

    Raises:
        ValueError: a negative decay, a parameter that is not FP32 (master weights are), or one that is still on the
            meta device.
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay}")
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.is_meta:
            raise ValueError(f"AdamW keeps FP32 master weights; {name} is {parameter.dtype} on {parameter.device}")
        if parameter.requires_grad:
            (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
