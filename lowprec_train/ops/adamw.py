"""AdamW, and its step over many tensors at once: the definition of the fused CUDA kernels `adamw*`.

    m' = m + (1 - b1) (g - m),   v' = b2 v + (1 - b2) g^2
    w' = w (1 - r weight_decay) - r m'^ / (sqrt(v'^) + eps)
    r  = lr, or with `clip_updates` lr / max(1, RMS),   RMS^2 = mean(g^2 / max(v'^, eps^2)) over the tensor

m^ and v^ are the bias-corrected moments (arXiv 1711.05101: decoupled decay); update clipping is StableAdamW (arXiv
2304.13013, algorithm 2).

The ops take flat lists of tensors whose codecs are equal. `first` and `second` have the parts of each parameter's
moments (codes, scale, exponent, center, as far as the codec has them), `masters` has codes and scale if the master has
a scale. Codecs are passed as their fields. If parameters are shards, `adamw_squares` and `adamw_amax` return the
statistics of each rank's shards, and `adamw` takes them after reduction over ranks: rms FP32 [p] and amax FP32 [p, 3].
Without them tensors are whole, and `adamw` computes the statistics. origins, int64 [p, 2]: global row and column at
which each shard begins. lr: 0-dim FP64, on the device. found_inf = 1 leaves all bits unchanged: one number for all
parameters, or [p].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.ops import updates
from lowprec_train.ops.codecs import PARTS, Parts, StateCodec, StateCodecs, Values, flat
from lowprec_train.ops.reference import square_root
from lowprec_train.ops.updates import Rule, Step, wide_sum


@dataclass(frozen=True, kw_only=True)
class AdamWRule(Rule):
    """AdamW. clip_updates: use StableAdamW's update clipping. Raises ValueError for hyper-parameters out of range."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_updates: bool = False
    moments = ("exp_avg", "exp_avg_sq")

    def __post_init__(self) -> None:
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {value}")
        if not EPS[0] <= self.eps <= EPS[1]:
            raise ValueError(f"eps must lie in [{EPS[0]:g}, {EPS[1]:g}], got {self.eps}")

    @property
    def decays(self) -> Mapping[str, float]:
        return {"exp_avg": self.beta1}

    def new_moments(self, old: Values, gradient: Tensor, step: Step) -> Values:
        m, v = old["exp_avg"], old["exp_avg_sq"]
        return {
            "exp_avg": m + (gradient - m) * (1.0 - self.beta1),
            "exp_avg_sq": v * self.beta2 + gradient * gradient * (1.0 - self.beta2),
        }

    @property
    def needs_rms(self) -> bool:
        return self.clip_updates

    def squares(self, new: Values, gradient: Tensor, step: Step) -> Tensor:
        """Return the sum: about the number of elements in a steady state, large if the gradient jumps."""
        correction2 = 1.0 - self.beta2 ** step.count.double()
        second = (new["exp_avg_sq"] / correction2.float()).clamp_min(self.eps * self.eps)
        return wide_sum(gradient * gradient / second)

    def new_weight(self, old: Values, new: Values, gradient: Tensor, step: Step) -> Tensor:
        correction1, correction2 = (1.0 - beta ** step.count.double() for beta in (self.beta1, self.beta2))
        rate = torch.ones_like(correction1) * step.lr
        if step.rms is not None:
            rate = rate / step.rms.double().clamp_min(1.0)
        step_size, decay = (rate / correction1).float(), (1.0 - rate * step.weight_decay).float()
        denominator = square_root(new["exp_avg_sq"]) / correction2.sqrt().float() + self.eps
        return old["master"] * decay - new["exp_avg"] * step_size / denominator


EPS = (1e-18, 1.0)
"""Smallest and largest eps. Zero gives 0 / 0 in a row that never had a gradient; below 1e-18, eps^2, by which update
clipping divides, is not a normal FP32 number."""


def adamw(  # type: ignore[no-untyped-def]
    params, grads, first, second, masters, steps, grad_scale, rms, amax, origins, indices, found_inf,
    first_format, first_scaling, second_format, second_scaling, master_format, master_scaling, stochastic, group,
    segments, seed, lr, beta1, beta2, eps, weight_decay, clip,
):  # fmt: skip
    """Apply one step in place. steps: number of updates so far, 0-dim FP32 each. indices: of the parameters, int64 [p],
    for the random bits of master weights. segments: per row, for each parameter.
    """
    codecs = _codecs(first_format, first_scaling, second_format, second_scaling, master_format, master_scaling,
                     stochastic, group)  # fmt: skip
    rule = AdamWRule(beta1=beta1, beta2=beta2, eps=eps, clip_updates=clip)
    skips = updates.skips(found_inf, len(params))
    drawn = None if indices is None else updates.seeds(seed, indices, torch.stack(list(steps)) + 1.0)
    lists = (params, grads, first, second, masters, steps)
    for place, (state, old, gradient, step) in enumerate(
        _tensors(codecs, lists, grad_scale, rms, segments, lr, weight_decay)
    ):
        coded = codecs.encode(
            updates.advance(rule, old, gradient, step),
            old=old,
            decays=rule.decays,
            amax=None if amax is None else amax[place],
            segments=segments[place],
            seed=None if drawn is None else drawn[place],
            origin=None if origins is None else origins[place],
        )
        for name, value in coded.items():
            updates.write(params[place] if name == "parameter" else state[name], value, skips[place])
        updates.write(steps[place], step.count, skips[place])


def adamw_squares(  # type: ignore[no-untyped-def]
    params, grads, first, second, masters, steps, grad_scale, rms, first_format, first_scaling, second_format,
    second_scaling, master_format, master_scaling, group, segments, lr, beta1, beta2, eps, weight_decay,
):  # fmt: skip
    """Return the sum of squared updates of each shard, FP64 [p]."""
    codecs = _codecs(first_format, first_scaling, second_format, second_scaling, master_format, master_scaling,
                     False, group)  # fmt: skip
    rule = AdamWRule(beta1=beta1, beta2=beta2, eps=eps, clip_updates=True)
    lists = (params, grads, first, second, masters, steps)
    tensors = _tensors(codecs, lists, grad_scale, rms, segments, lr, weight_decay)
    return torch.stack([rule.squares(rule.new_moments(old, g, step), g, step) for _, old, g, step in tensors])


def adamw_amax(  # type: ignore[no-untyped-def]
    params, grads, first, second, masters, steps, grad_scale, rms, first_format, first_scaling, second_format,
    second_scaling, master_format, master_scaling, group, segments, lr, beta1, beta2, eps, weight_decay,
):  # fmt: skip
    """Return the amax of new moments and weights of each shard, FP32 [p, 3]; zero if not stored with one scale."""
    codecs = _codecs(first_format, first_scaling, second_format, second_scaling, master_format, master_scaling,
                     False, group)  # fmt: skip
    rule = AdamWRule(beta1=beta1, beta2=beta2, eps=eps)
    lists = (params, grads, first, second, masters, steps)
    tensors = _tensors(codecs, lists, grad_scale, rms, segments, lr, weight_decay)
    return torch.stack([updates.amax(rule, codecs, old, gradient, step) for _, old, gradient, step in tensors])


def _codecs(*fields) -> StateCodecs:  # type: ignore[no-untyped-def]
    first, first_scaling, second, second_scaling, master, master_scaling, stochastic, group = fields
    moments = ((first, first_scaling), (second, second_scaling))
    named = zip(AdamWRule.moments, (StateCodec(*each, group) for each in moments), strict=True)
    return StateCodecs(tuple(named), StateCodec(master, master_scaling, group, stochastic))


def _tensors(  # type: ignore[no-untyped-def]
    codecs, lists, grad_scale, rms, segments, lr, weight_decay
) -> Iterator[tuple[Parts, Values, Tensor, Step]]:
    """Yield, for each parameter, its state by flat names, old values, gradient, and the `Step` for the rule."""
    params, grads, *held, steps = lists
    for place, parameter in enumerate(params):
        state: Parts = {}
        for (name, codec), tensors in zip(codecs.named, held, strict=True):
            parts = PARTS[codec.scaling]
            mine = tensors[place * len(parts) : (place + 1) * len(parts)]
            state |= flat(name, dict(zip(parts, mine, strict=False)))
        step = Step(lr=lr, weight_decay=weight_decay, count=steps[place] + 1.0, rms=None if rms is None else rms[place])
        yield state, codecs.decode(parameter, state, segments[place]), updates.scaled(grads[place], grad_scale), step
