"""AdamW on many tensors in a few launches: with our op, or with torch's kernel if everything is FP32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lowprec_train.ops.adamw import AdamWRule
from lowprec_train.ops.codecs import PARTS, flat
from lowprec_train.ops.library import SERVED
from lowprec_train.optim.batch import Batch


@dataclass(frozen=True, kw_only=True)
class FusedAdamW(Batch):
    """`lowprec::adamw` and the ops of its statistics: one call each for any number of parameters."""

    rule: AdamWRule

    @staticmethod
    def serves(batch: Batch) -> bool:
        """Return whether the ops support these: AdamW, row-major parameters, one group length."""
        groups = {codec.group for _, codec in batch.codecs.moments if codec.expanded}
        return isinstance(batch.rule, AdamWRule) and len(groups) < 2 and batch.members[0].parameter.is_contiguous()

    def squares(self) -> Tensor:
        return torch.ops.lowprec.adamw_squares(*self._tensors(None), *self._numbers())

    def amax(self, rms: Tensor | None) -> Tensor:
        return torch.ops.lowprec.adamw_amax(*self._tensors(rms), *self._numbers())

    def step(self, rms: Tensor | None, amax: Tensor | None) -> None:
        draws = self.codecs.master.stochastic
        origins = None if self.group is None or not draws else torch.stack([each.origin for each in self.members])
        *codecs, group, segments, lr, beta1, beta2, eps, weight_decay = self._numbers()
        torch.ops.lowprec.adamw(
            *self._tensors(rms),
            amax,
            origins,
            self.indices() if draws else None,
            self.found_inf,
            *codecs,
            draws,
            group,
            segments,
            self.seed,
            *(lr, beta1, beta2, eps, weight_decay),
            self.rule.clip_updates,
        )

    def _tensors(self, rms: Tensor | None) -> tuple[Any, ...]:
        """Return the tensors that all of the ops need."""
        gradients = [each.gradient.contiguous() for each in self.members]
        if gradients[0].dtype not in (torch.float32, torch.bfloat16):
            gradients = [gradient.float() for gradient in gradients]
        keys = {name: flat(name, dict.fromkeys(PARTS[codec.scaling])) for name, codec in self.codecs.kept}
        held = [
            [each.state[key] for each in self.members for key in keys.get(name, ())] for name, _ in self.codecs.named
        ]
        steps = [each.state["step"] for each in self.members]
        return [each.parameter for each in self.members], gradients, *held, steps, self.grad_scale, rms

    def _numbers(self) -> tuple[Any, ...]:
        fields = [field for _, codec in self.codecs.named for field in (codec.format, codec.scaling)]
        group = max(codec.group for _, codec in self.codecs.moments)
        segments = [each.segments for each in self.members]
        rule = self.rule
        return *fields, group, segments, self.rate, rule.beta1, rule.beta2, rule.eps, self.weight_decay


@dataclass(frozen=True, kw_only=True)
class TorchAdamW(FusedAdamW):
    """torch's fused kernel: FP32 throughout, no update clipping."""

    @staticmethod
    def serves(batch: Batch) -> bool:
        """Return whether our kernel is not compiled."""
        rule, device = batch.rule, batch.members[0].parameter.device.type
        exact = isinstance(rule, AdamWRule) and batch.codecs.exact and not rule.clip_updates
        return exact and "adamw" not in SERVED.get(device, ())

    def step(self, rms: Tensor | None, amax: Tensor | None) -> None:
        for part in self.with_one_found_inf():
            part._step()

    def _step(self) -> None:
        adamw(
            params=[each.parameter for each in self.members],
            grads=[each.gradient for each in self.members],
            exp_avgs=[each.state["exp_avg"] for each in self.members],
            exp_avg_sqs=[each.state["exp_avg_sq"] for each in self.members],
            max_exp_avg_sqs=[],
            state_steps=[each.state["step"] for each in self.members],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            maximize=False,
            beta1=self.rule.beta1,
            beta2=self.rule.beta2,
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=self.rule.eps,
        )
