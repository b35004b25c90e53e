"""AdamW with the kernel of NVIDIA's apex, as in apex.optimizers.FusedAdam(adam_w_mode=True, capturable=True).

States have the same names and FP32 values as in our AdamW, so each resumes checkpoints of the other. The kernel
multiplies gradients by 1 / grad_scale, while ours divides, and has one step counter for all tensors of a launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train import nvidia
from lowprec_train.ops.adamw import AdamWRule
from lowprec_train.ops.updates import Rule
from lowprec_train.optim.batch import Batch
from lowprec_train.optim.codecs import Codecs

DECOUPLED, BIAS_CORRECTED = 1, 1


def check(rule: Rule, codecs: Codecs, device: torch.device) -> None:
    """Raises ValueError for settings or devices that the kernel does not support, and if apex lacks the kernel."""
    what = "optim.backend=apex"
    if not isinstance(rule, AdamWRule) or rule.clip_updates:
        raise ValueError(f"{what} is AdamW without update clipping (apex.optimizers.FusedAdam), not {rule}")
    stored = (*codecs.moments, codecs.master)
    if not all(codec.exact for codec in stored):
        raise ValueError(f"{what} keeps moments and weights in FP32, not as {', '.join(map(str, stored))}")
    if device.type != "cuda":
        raise ValueError(f"{what} needs a CUDA GPU, and this run is on {device}; use optim.backend=own")
    nvidia.apex_adam()


@dataclass(frozen=True, kw_only=True)
class ApexAdamW(Batch):
    """`amp_C.multi_tensor_adam_capturable`: a skipped step changes nothing, without a host synchronization."""

    rule: AdamWRule

    def step(self, rms: Tensor | None, amax: Tensor | None) -> None:
        for part in self.with_one_found_inf():
            part._step()

    def _step(self) -> None:
        applier, kernel = nvidia.apex_adam()
        device, steps = self.members[0].parameter.device, [each.state["step"] for each in self.members]
        skip = torch.zeros(1, device=device) if self.found_inf is None else self.found_inf.view(1)
        for step in steps:
            step += 1.0 - skip[0]
        one = torch.ones(1, device=device)
        lists = [
            [each.gradient.contiguous().float() for each in self.members],
            [each.parameter for each in self.members],
            [each.state["exp_avg"] for each in self.members],
            [each.state["exp_avg_sq"] for each in self.members],
        ]
        rule, lr = self.rule, one * self.lr
        applier(
            kernel,
            skip.to(torch.int32),
            lists,
            *(lr, rule.beta1, rule.beta2, rule.eps, steps[0].view(1).to(torch.int32)),
            *(DECOUPLED, BIAS_CORRECTED, self.weight_decay),
            one if self.grad_scale is None else one / self.grad_scale,
        )
