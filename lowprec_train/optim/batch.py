"""One step of parameters with the same codecs, tensor by tensor, for any rule and codecs.

The RMS and the amax of whole tensors, of which a rank may have a shard, are computed before (`optim.tensor_stats`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from lowprec_train.group import Group
from lowprec_train.ops import updates
from lowprec_train.ops.codecs import Parts, StateCodecs, Values
from lowprec_train.ops.updates import Rule, Step
from lowprec_train.optim.param_state import ParamState

Observer = Callable[[nn.Parameter, str, Tensor, Tensor, Tensor], None]
"""Called for everything that is rounded: parameter, name of the moment or "master", its value before the step, the new
value, and the new value as stored; FP32; of this rank's shard, which may be empty. A skipped step is reported as if it
were taken."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Parameters with the same codecs and shards on the same ranks.

    rate: lr, 0-dim FP64 on the device. grad_scale: divisor of gradients, 0-dim FP32. found_inf: 1.0 leaves all bits
    unchanged; FP32, one number for all members or [members]. seed: of the run.
    """

    rule: Rule
    codecs: StateCodecs
    group: Group | None
    members: tuple[ParamState, ...]
    lr: float
    rate: Tensor
    weight_decay: float
    grad_scale: Tensor | None
    found_inf: Tensor | None
    seed: int

    def squares(self) -> Tensor:
        """Return `Rule.squares` of each shard, FP64 [p]."""
        found = []
        for member in self.members:
            old, gradient, step = self._given(member, None)
            found.append(self.rule.squares(self.rule.new_moments(old, gradient, step), gradient, step))
        return torch.stack(found)

    def amax(self, rms: Tensor | None) -> Tensor:
        """Return, for each shard, the amax of values that are stored with one scale, FP32 [p, names]."""
        found = []
        for place, member in enumerate(self.members):
            given = self._given(member, None if rms is None else rms[place])
            found.append(updates.amax(self.rule, self.codecs, *given))
        return torch.stack(found)

    def step(self, rms: Tensor | None, amax: Tensor | None) -> None:
        """Update parameters and states in place. rms [p], amax [p, names]: of the whole tensors, for shards."""
        skips = updates.skips(self.found_inf, len(self.members))
        for skip, (member, _, _, coded) in zip(skips, self._advanced(rms, amax), strict=True):
            for name, value in coded.items():
                updates.write(member.parameter if name == "parameter" else member.state[name], value, skip)
            updates.write(member.state["step"], member.state["step"] + 1.0, skip)

    def with_one_found_inf(self) -> Iterator[Self]:
        """Yield this batch, or its members one by one if each has its own `found_inf`."""
        if self.found_inf is None or self.found_inf.numel() == 1:
            yield self
            return
        for member, found_inf in zip(self.members, self.found_inf.unbind(), strict=True):
            yield replace(self, members=(member,), found_inf=found_inf)

    def report(self, observer: Observer, rms: Tensor | None, amax: Tensor | None) -> None:
        """Report the roundings of `step` to the observer."""
        if self.codecs.exact:
            return
        for member, old, new, coded in self._advanced(rms, amax):
            whole = member.parameter.numel() > 0  # of an empty shard there is nothing to decode
            stored = self.codecs.decode(coded["parameter"], coded, member.segments) if whole else new
            for name, codec in self.codecs.named:
                if not codec.exact:
                    observer(member.owner, name, old[name], new[name], stored[name])

    def seeds(self) -> Tensor | None:
        """Return the seeds for rounding master weights, int64 [p]; None without stochastic rounding."""
        if not self.codecs.master.stochastic:
            return None
        steps = torch.stack([member.state["step"] for member in self.members]) + 1.0
        return updates.seeds(self.seed, self.indices(), steps)

    def indices(self) -> Tensor:
        return torch.stack([member.index for member in self.members])

    def _advanced(self, rms: Tensor | None, amax: Tensor | None) -> Iterator[tuple[ParamState, Values, Values, Parts]]:
        """Yield, for each parameter, values before and after the step, and the stored values."""
        seeds = self.seeds()
        for place, member in enumerate(self.members):
            old, gradient, step = self._given(member, None if rms is None else rms[place])
            new = updates.advance(self.rule, old, gradient, step)
            coded = self.codecs.encode(
                new,
                old=old,
                decays=self.rule.decays,
                amax=None if amax is None else amax[place],
                seed=None if seeds is None else seeds[place],
                **member.where,
            )
            yield member, old, new, coded

    def _given(self, member: ParamState, rms: Tensor | None) -> tuple[Values, Tensor, Step]:
        """Return the inputs of the rule."""
        old = self.codecs.decode(member.parameter, member.state, member.segments)
        step = Step(
            lr=self.rate,
            weight_decay=self.weight_decay,
            count=member.state["step"] + 1.0,
            rms=rms,
            gather=member.gather,
            shard=member.own,
        )
        return old, updates.scaled(member.gradient, self.grad_scale), step
