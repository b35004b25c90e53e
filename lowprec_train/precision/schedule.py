"""Precision over time: a run is a list of phases, each of which gives every linear its recipe from a step on.

The target-precision schedule of arXiv 2502.11458 ends a run in BF16; arXiv 2509.25149 (appendix D) finds that the
forward pass alone recovers most of the gap. A switch changes what GEMMs compute and nothing else: master weights,
optimizer state and draws stay as they are, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn as nn

from lowprec_train.precision.backend import Backend, BackendState
from lowprec_train.precision.estimators import StraightThrough
from lowprec_train.precision.policy import assign
from lowprec_train.precision.recipe import LinearRecipe, Reuse
from lowprec_train.precision.saved_activations import SavedActivationPolicy, apply_saved_activations


@dataclass(frozen=True, kw_only=True)
class Phase:
    """From a 0-based step on: the recipe of every linear, by name, and what norms and activations save."""

    first_step: int
    recipes: Mapping[str, LinearRecipe]
    saved_activations: SavedActivationPolicy = field(default_factory=SavedActivationPolicy)

    @property
    def backend(self) -> Backend | None:
        """The library that runs some of its layers. Raises ValueError for several: a pass is in one of them."""
        found = list(dict.fromkeys(each.backend for each in self.recipes.values() if each.backend is not None))
        if len(found) > 1:
            raise ValueError(f"the policy names several backends, {' and '.join(map(str, found))}: one pass has one")
        return found[0] if found else None


class PrecisionSchedule:
    """Sets a model to the phase of a step. phases: by ascending first step, the first at 0; ValueError otherwise."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        starts = [phase.first_step for phase in phases]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise ValueError(f"phases begin at step 0 and at ascending steps after it, not at {starts}")
        self.phases = tuple(phases)
        self._current: Phase | None = None

    def begin(self, model: nn.Module, step: int) -> None:
        """Give the model the phase of `step`; nothing happens within a phase."""
        phase = [each for each in self.phases if each.first_step <= step][-1]
        if phase is not self._current:
            assign(model, phase.recipes)
            apply_saved_activations(model, phase.saved_activations)
            self._current = phase

    @property
    def one_graph(self) -> bool:
        """Whether blocks compile without a break: a library's layers stay outside of graphs."""
        return all(phase.backend is None for phase in self.phases)

    @contextmanager
    def around_pass(self, model: nn.Module) -> Iterator[None]:
        """What a forward pass of the model runs in. One without gradients leaves what a backend remembers as it was."""
        backend = None if self._current is None else self._current.backend
        if backend is None:
            yield
            return
        observed = backend.stateful and not torch.is_grad_enabled()
        states = BackendState(model) if observed else None
        before = {} if states is None else states.state_dict()
        with backend.around_pass():
            yield
        if states is not None:
            states.load_state_dict(before)

    def state_parts(self, model: nn.Module) -> dict[str, BackendState]:
        """What of a checkpoint belongs to a backend."""
        backend = None if self._current is None else self._current.backend
        return {"backend": BackendState(model)} if backend is not None and backend.stateful else {}


def forward_only(before: LinearRecipe, target: LinearRecipe) -> LinearRecipe:
    """`before` with its forward GEMM replaced by the target's; the backward GEMMs stay.

    Where the target's forward pass is BF16, codes that the backward pass takes are still made, and the weight's
    gradient passes straight through. ValueError where the backward pass cannot take the target's codes.
    """
    if before.backend is not None or target.backend is not None:
        raise ValueError(
            f"forward_only=true takes GEMMs apart, and {before.backend or target.backend} runs them together"
        )
    if not target.fprop.is_identity:
        coded = before.saved_input.of_fprop
        saved = target.saved_input if coded else before.saved_input
        return replace(before, fprop=target.fprop, estimator=target.estimator, saved_input=saved)
    reused = Reuse.FPROP_CODES in (before.dgrad.b, before.wgrad.b) or before.weight_from_codes
    if not before.saved_input.of_fprop and not reused:
        return replace(before, fprop=target.fprop, estimator=StraightThrough())
    return replace(before, fprop=replace(before.fprop, codes_only=True), estimator=StraightThrough())


def first_step(at: float, steps: int) -> int:
    """The 0-based step that a fraction of a run falls on. ValueError outside (0, 1), and for a phase without steps."""
    if not 0 < at < 1:
        raise ValueError(f"a phase begins at a fraction of the run between 0 and 1, not at {at}")
    step = round(at * steps)
    if not 0 < step < steps:
        raise ValueError(f"a phase at {at} of a run of {steps} steps would have no steps, or no steps before it")
    return step
