"""Precision schedules: a run has phases, and each phase sets the recipe of every linear layer from a step on.

The target-precision schedule of arXiv 2502.11458 ends a run in BF16; arXiv 2509.25149 (appendix D) finds that the
forward pass alone recovers most of the gap. A new phase changes only what the GEMMs compute: master weights, optimizer
state and draws stay bit-equal.
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
    """The recipe of every linear layer, by name, and what norms and activations save, from a 0-based step on."""

    first_step: int
    recipes: Mapping[str, LinearRecipe]
    saved_activations: SavedActivationPolicy = field(default_factory=SavedActivationPolicy)

    @property
    def backend(self) -> Backend | None:
        """The library that runs some layers, or None. Raises ValueError for several: a pass can use only one."""
        found = list(dict.fromkeys(each.backend for each in self.recipes.values() if each.backend is not None))
        if len(found) > 1:
            raise ValueError(f"the policy names several backends, {' and '.join(map(str, found))}: use one")
        return found[0] if found else None


class PrecisionSchedule:
    """Sets a model to the phase of a step.

    phases: in ascending order of their first steps, the first at step 0. Raises ValueError otherwise.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        starts = [phase.first_step for phase in phases]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise ValueError(f"phases must begin at step 0 and then at ascending steps, not at {starts}")
        self.phases = tuple(phases)
        self._current: Phase | None = None

    def begin(self, model: nn.Module, step: int) -> None:
        """Set the model to the phase of `step`. Does nothing if the phase is already set."""
        phase = [each for each in self.phases if each.first_step <= step][-1]
        if phase is not self._current:
            assign(model, phase.recipes)
            apply_saved_activations(model, phase.saved_activations)
            self._current = phase

    @property
    def current(self) -> Phase | None:
        """The phase that `begin` has set last."""
        return self._current

    @property
    def one_graph(self) -> bool:
        """True if a block compiles to one graph. Layers of a library break graphs."""
        return all(phase.backend is None for phase in self.phases)

    @contextmanager
    def around_pass(self, model: nn.Module) -> Iterator[None]:
        """Enter the backend's context for a forward pass. Without gradients, the backend's state stays unchanged."""
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
        """Return the parts of a checkpoint that belong to a backend: {"backend": state}, or {}."""
        backend = None if self._current is None else self._current.backend
        return {"backend": BackendState(model)} if backend is not None and backend.stateful else {}


def forward_only(before: LinearRecipe, target: LinearRecipe) -> LinearRecipe:
    """Return `before` with the forward GEMM of `target`, and with its own backward GEMMs.

    If the target's forward pass is BF16, codes that the backward pass uses are still produced, and the weight's
    gradient uses the straight-through estimator. Raises ValueError for recipes of a library, which runs its three GEMMs
    together, and if the backward GEMMs cannot use the target's codes.
    """
    if before.backend is not None or target.backend is not None:
        raise ValueError(
            f"forward_only=true replaces one GEMM, but {before.backend or target.backend} runs all three together"
        )
    if not target.fprop.is_identity:
        coded = before.saved_input.of_fprop
        saved = target.saved_input if coded else before.saved_input
        return replace(before, fprop=target.fprop, estimator=target.estimator, saved_input=saved)
    reused = before.wgrad.b is Reuse.FPROP_CODES or before.needs_weight_codes
    if not before.saved_input.of_fprop and not reused:
        return replace(before, fprop=target.fprop, estimator=StraightThrough())
    return replace(before, fprop=replace(before.fprop, codes_only=True), estimator=StraightThrough())


def first_step(at: float, steps: int) -> int:
    """Return the 0-based step at a fraction of a run. Raises ValueError outside (0, 1) or if a phase has no steps."""
    if not 0 < at < 1:
        raise ValueError(f"a phase must begin at a fraction of the run between 0 and 1, not at {at}")
    step = round(at * steps)
    if not 0 < step < steps:
        raise ValueError(f"a phase at {at} of a run of {steps} steps would have no steps, or no steps before it")
    return step
