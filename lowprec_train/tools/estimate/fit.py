"""Find settings with which a run fits a GPU, from fastest to smallest memory, each with its largest micro-batch.

A step of one micro-batch is tried first, because it accumulates no gradients. With several micro-batches, memory is
linear in their tokens, so two estimates give the largest that fits. It is estimated again before it is proposed. A
tenth of the GPU memory stays free for allocations that the estimate does not include (`memory`).

Keys that the user has set are not changed. An optimizer other than the default counts as set by the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

from lowprec_train.config import RunConfig
from lowprec_train.tools.estimate.device import Device
from lowprec_train.tools.estimate.report import GB, GIB, Estimate, estimate
from lowprec_train.tools.estimate.subject import grid, key
from lowprec_train.tools.markdown import table
from lowprec_train.train import checks, ranges
from lowprec_train.train.compose import composed

Estimates = Callable[[RunConfig], Estimate]
SHARE = 0.9  # usable fraction of the GPU memory
UNITS = {"GiB": 2**30, "GB": 10**9}
FREED = ("optim.in_backward=true",)
OPTIMIZER, MASTER = "optim=adamw_coat", "optim/master=bf16"
CODED = (OPTIMIZER, MASTER, *FREED)
RECOMPUTE, OFFLOAD_STATES, OFFLOAD_INPUTS = "model.recompute=full", "optim.offload=true", "model.offload=true"
CHOICES = (
    (),
    FREED,
    CODED,
    (*CODED, RECOMPUTE),
    (*CODED, RECOMPUTE, OFFLOAD_STATES),
    (*CODED, RECOMPUTE, OFFLOAD_STATES, OFFLOAD_INPUTS),
)
# Of `optim`: with another value of one, the optimizer is another, with its own codecs.
PARTS = ("first_moment", "second_moment", "rule", "backend", "clip_updates")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Settings in addition to the user's, and the estimate of their largest micro-batch.

    found: None if no micro-batch fits. refused: why the settings cannot be used, or "".
    """

    settings: tuple[str, ...]
    micro_batch: int
    found: Estimate | None
    refused: str = ""


def parse_size(text: str, option: str = "--fit") -> int:
    """Parse `24GiB` or `80GB` as bytes. Raises ValueError for other text. option: its option, for the error."""
    named = re.fullmatch(r"(\d+(?:\.\d+)?)(GiB|GB)", text)
    if named is None or not float(named[1]):
        raise ValueError(f"{option} {text} is not a size; write for example 24GiB or 80GB")
    return int(float(named[1]) * UNITS[named[2]])


def fits(overrides: Sequence[str], size: int, gpus: int | None, device: Device | None = None) -> list[Fit]:
    """Return a fit for each of `choices`. Raises ValueError if the run is refused without additional settings."""
    estimated, dp = partial(estimate, gpus=gpus, device=device), grid(composed(*overrides).parallel, gpus).dp
    return [_fit(overrides, settings, SHARE * size, estimated, dp) for settings in choices(overrides)]


def shorter(overrides: Sequence[str], size: int, gpus: int | None, device: Device | None = None) -> Fit | None:
    """Return a fit with fewer tokens a step, in one micro-batch, and the last of `choices`; None if none fits.

    Of halves of the run's tokens, the most that fit. For a run of which nothing fits, without a micro-batch of its own.
    """
    if names_micro_batch(overrides):
        return None
    settings, dp = choices(overrides)[-1], grid(composed(*overrides).parallel, gpus).dp
    try:
        run = composed(*overrides, *settings)
    except ValueError:  # `fits` reports it
        return None
    sequences = run.tokens_per_step // (run.data["seq_len"] * dp)
    while sequences := sequences // 2:
        tokens = sequences * run.data["seq_len"] * dp
        with suppress(ValueError):
            found = estimate(_with(run, sequences, tokens), gpus=gpus, device=device)
            if found["memory"]["total"] <= SHARE * size:
                return Fit(settings=(*settings, f"tokens_per_step={tokens}"), micro_batch=sequences, found=found)
    return None


def names_micro_batch(overrides: Sequence[str]) -> bool:
    """Return whether the user has set `micro_batch`, which is then not changed."""
    return "micro_batch" in {key(each) for each in overrides}


def choices(overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """Return CHOICES without the keys that `overrides` set, without duplicates."""
    named = {key(each) for each in overrides}
    chosen, default = composed(*overrides).optim, composed().optim
    if any(getattr(chosen, part) != getattr(default, part) for part in PARTS):
        named.add(key(OPTIMIZER))
    if chosen.master != default.master or chosen.backend == "apex":  # whose masters are FP32
        named.add(key(MASTER))
    return list(dict.fromkeys(tuple(each for each in settings if key(each) not in named) for settings in CHOICES))


def _fit(overrides: Sequence[str], settings: tuple[str, ...], room: float, estimated: Estimates, dp: int) -> Fit:
    try:
        return _largest(overrides, settings, room, estimated, dp)
    except ValueError as error:
        if not settings:
            raise
        return Fit(settings=settings, micro_batch=0, found=None, refused=str(error))


def _largest(overrides: Sequence[str], settings: tuple[str, ...], room: float, estimated: Estimates, dp: int) -> Fit:
    run = composed(*overrides, *settings)
    ranges.check(run)
    checks.sequence(run)
    if names_micro_batch(overrides):
        found = estimated(run)
        fitting = found["memory"]["total"] <= room
        return Fit(settings=settings, micro_batch=run.micro_batch * fitting, found=found if fitting else None)
    most, rest = divmod(run.tokens_per_step, run.data["seq_len"] * dp)
    if rest:
        raise ValueError(
            f"tokens_per_step={run.tokens_per_step} is not a multiple of data.seq_len={run.data['seq_len']} times "
            f"{dp} data-parallel processes: no micro_batch divides it"
        )
    whole = estimated(_with(run, most))  # one micro-batch per step: no gradients are accumulated
    if whole["memory"]["total"] <= room:
        return Fit(settings=settings, micro_batch=most, found=whole)
    for size, found in _below(run, most, room, estimated):
        if found["memory"]["total"] <= room:
            return Fit(settings=settings, micro_batch=size, found=found)
    return Fit(settings=settings, micro_batch=0, found=None)


def _below(run: RunConfig, most: int, room: float, estimated: Estimates) -> Iterator[tuple[int, Estimate]]:
    """Yield micro-batches that divide a step of `most` sequences, in descending order from about the largest that fits.

    Skips those that the recipe refuses: its tiles may divide the step but not the micro-batch.
    """

    def of(sizes: Iterable[int]) -> Iterator[tuple[int, Estimate]]:
        for size in sizes:
            with suppress(ValueError):
                yield size, estimated(_with(run, size))

    divisors = [size for size in range(1, most // 2 + 1) if most % size == 0]
    pair = list(islice(of(divisors), 2))
    if not pair or pair[0][1]["memory"]["total"] > room:
        return
    (small, base), (large, more) = pair[0], pair[-1]
    grown = more["memory"]["total"] - base["memory"]["total"]
    fitting = small + (large - small) * (room - base["memory"]["total"]) / grown if grown > 0 else most
    yield from of(size for size in reversed(divisors) if small < size <= fitting)
    yield small, base


def _with(run: RunConfig, micro_batch: int, tokens_per_step: int | None = None) -> RunConfig:
    tokens = tokens_per_step or run.tokens_per_step
    return RunConfig(**(vars(run) | {"micro_batch": micro_batch, "tokens_per_step": tokens}))


def text(found: Sequence[Fit], size: int, fewer: Fit | None = None) -> str:
    """Return a table of all settings, reasons of refusals, and the first settings that fit, which change the run least.

    fewer: what fits with fewer tokens a step, if nothing fits otherwise.
    """
    rows, reasons = [], list(dict.fromkeys(fit.refused for fit in found if fit.refused))
    for fit in [*found, *([fewer] if fewer else [])]:
        about = [f"refused ({reasons.index(fit.refused) + 1})" if fit.refused else "does not fit", "", "", "", ""]
        if fit.found is not None:
            host = fit.found["host"]
            gib = f"{fit.found['memory']['total'] / GIB:,.1f}"
            rate = f"{time['tokens_per_s']:,.0f}" if (time := fit.found["time"]) else ""
            sizes = (f"{host['pinned'] / GIB:,.1f}", f"{host['link_each_way'] / GB:,.1f}")
            about = [str(fit.micro_batch), gib, *sizes, rate]
        rows.append([" ".join(fit.settings) or "as asked for", *about])
    head = [
        "settings",
        "micro_batch",
        "GiB of the GPU",
        "GiB of the host",
        "GB a step over the link, each way",
        "tokens/s and GPU",
    ]
    chosen = next((fit for fit in found if fit.found is not None), fewer)
    advice = "nothing fits: take more GPUs or a smaller model"
    if chosen is not None:
        advice = " ".join(["take", *chosen.settings, f"micro_batch={chosen.micro_batch}"])
    room = f"{SHARE:.0%} of {size / GIB:,.1f} GiB; the rest is for what is not counted"
    notes = [f"({number}) {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*table(head, rows), "", *notes, f"{room}: {advice}"])
