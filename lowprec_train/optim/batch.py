"""One step of parameters that are stepped alike, tensor by tensor: any rule, any codecs.

What a shard cannot know by itself, the RMS and the amax of the whole tensor, is found before (`optim.tensor_stats`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowprec_train.group import Group
from lowprec_train.ops import updates
from lowprec_train.ops.codecs import Parts, StateCodecs, Values
from lowprec_train.ops.updates import Rule, Step
from lowprec_train.optim.param_state import ParamState

Observer = Callable[[nn.Parameter, str, Tensor, Tensor, Tensor], None]
"""Told of everything that is rounded: parameter, name of the moment or "master", its value before the step, the new
one, the new one as it was stored; FP32. A step that is skipped is reported as if it were taken."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Parameters with the same codecs, whose shards lie on the same ranks.

    grad_scale: gradients are divided by it. found_inf: 1.0 leaves every bit as it is. Both 0-dim FP32. seed: the run's.
    """

    rule: Rule
    codecs: StateCodecs
    group: Group | None
    members: tuple[ParamState, ...]
    lr: float
    weight_decay: float
    grad_scale: Tensor | None
    found_inf: Tensor | None
    seed: int

    def squares(self) -> Tensor:
        """Each shard's `Rule.squares`, FP64 [p]."""
        found = []
        for member in self.members:
            old, gradient, step = self._given(member, None)
            found.append(self.rule.squares(self.rule.new_moments(old, gradient, step), gradient, step))
        return torch.stack(found)

    def amax(self, rms: Tensor | None) -> Tensor:
        """Each shard's amax of what is stored under one scale, FP32 [p, names]."""
        found = []
        for place, member in enumerate(self.members):
            given = self._given(member, None if rms is None else rms[place])
            found.append(updates.amax(self.rule, self.codecs, *given))
        return torch.stack(found)

    def step(self, rms: Tensor | None, amax: Tensor | None) -> None:
        """Update parameters and states in place. rms [p], amax [p, names]: of the whole tensors, for shards."""
        skip = None if self.found_inf is None else self.found_inf == 1.0
        for member, _, _, coded in self._advanced(rms, amax):
            for name, value in coded.items():
                updates.write(member.parameter if name == "parameter" else member.state[name], value, skip)
            updates.write(member.state["step"], member.state["step"] + 1.0, skip)

    def report(self, observer: Observer, rms: Tensor | None, amax: Tensor | None) -> None:
        """Tell of the roundings that `step` will make."""
        if self.codecs.exact:
            return
        for member, old, new, coded in self._advanced(rms, amax):
            if member.parameter.numel():
                stored = self.codecs.decode(coded["parameter"], coded, member.segments)
                for name, codec in self.codecs.named:
                    if not codec.exact:
                        observer(member.owner, name, old[name], new[name], stored[name])

    def seeds(self) -> Tensor | None:
        """Of the masters' draws, int64 [p]; None where nothing is drawn."""
        if not self.codecs.master.stochastic:
            return None
        steps = torch.stack([member.state["step"] for member in self.members]) + 1.0
        return updates.seeds(self.seed, self.indices(), steps)

    def indices(self) -> Tensor:
        return torch.stack([member.index for member in self.members])

    def _advanced(self, rms: Tensor | None, amax: Tensor | None) -> Iterator[tuple[ParamState, Values, Values, Parts]]:
        """Of each member the values before and after the step, and these as they are stored."""
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
        """What the rule is given."""
        old = self.codecs.decode(member.parameter, member.state, member.segments)
        step = Step(
            lr=self.lr,
            weight_decay=self.weight_decay,
            count=member.state["step"] + 1.0,
            rms=rms,
            gather=member.gather,
            shard=member.own,
        )
        return old, updates.scaled(member.gradient, self.grad_scale), step
