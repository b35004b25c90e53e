"""Checks of the libraries that run parts of a model in this project's place: TransformerEngine and apex."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowprec_train import nvidia
from lowprec_train.config import RunConfig
from lowprec_train.ops.updates import Rule
from lowprec_train.optim import apex
from lowprec_train.optim.codecs import Codecs
from lowprec_train.precision.schedule import Phase

OPTIM_BACKENDS = ("own", "apex")


def check(run: RunConfig, phases: Sequence[Phase], rule: Rule, codecs: Codecs, device: torch.device) -> None:
    """They are there, run on this device, and take what is asked of them: ValueError with what was found.

    rule, codecs: of the optimizer.
    """
    for backend in dict.fromkeys(phase.backend for phase in phases):
        if backend is not None:
            backend.check_machine(device)
    if run.optim.backend not in OPTIM_BACKENDS:
        raise ValueError(f"optim.backend={run.optim.backend!r} is none of {', '.join(OPTIM_BACKENDS)}")
    if run.optim.backend == "apex":
        apex.check(rule, codecs, device)
    if run.model.norm_backend == "apex":
        _norms(phases, device)


def _norms(phases: Sequence[Phase], device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"model.norm_backend=apex computes on CUDA GPUs, and this run is on {device}")
    for phase in phases:
        if (saved := phase.saved_activations.norm) is not None:
            raise ValueError(f"model.norm_backend=apex: norms that save {saved} are our own alone")
    nvidia.apex_norms()


def check_settings(run: RunConfig, phases: Sequence[Phase]) -> None:
    """What a library that runs linear layers cannot do in this project, whatever the machine."""
    for backend in filter(None, (phase.backend for phase in phases)):
        for key, value, allowed, why in (
            ("parallel.tp", run.parallel.tp, 1, "its layers hold whole weights"),
            ("telemetry_interval", run.telemetry_interval, 0, "its roundings are its own, and nobody else sees them"),
            ("model.recompute", run.model.recompute, "none", "a block that runs again would run outside of its pass"),
        ):
            if value != allowed:
                raise ValueError(f"{key}={value}: {backend} runs linear layers, and {why}; {key}={allowed}")
        if backend.stateful and len(phases) > 1:
            raise ValueError(
                f"precision.schedule: {backend} remembers earlier steps, which a checkpoint of another phase has not; "
                "scaling=current and scaling=block remember nothing"
            )
