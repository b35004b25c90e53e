"""Profile a window of steps with torch's profiler: a trace, and a table of times.

    profile/steps-10-12.rank-0.json.gz    Chrome trace, for ui.perfetto.dev or chrome://tracing
    profile/steps-10-12.rank-0.txt        time by class of kernel and by kernel

The profiler warms up in the step before the window, because its start takes seconds. Results stay bit-equal, and
profiled steps are slower. Outside the window there is no profiler, and a step costs one comparison.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from lowprec_train.train.diagnostics.kernel_times import kernel_times, table

log = logging.getLogger(__name__)


class Window:
    """Profiles the steps first, ..., first + steps - 1 of a run, counted from 1.

    With 0 steps it profiles nothing. A launch that begins after `first` profiles nothing and logs a warning. directory:
    of the files; created with the first one. record: further arguments of `torch.profiler.profile`.
    """

    def __init__(
        self, *, first: int, steps: int, directory: Path, device: torch.device, rank: int = 0, **record: Any
    ) -> None:
        self._first, self._last = first, first + steps - 1
        self._directory, self._rank = directory, rank
        self._device, self._record = device, record
        self._profiler: torch.profiler.profile | None = None
        self._seen = 0
        self._begun = steps < 1  # with 0 steps nothing begins

    def begin_step(self, step: int) -> None:
        """Call before every step, counted from 1."""
        self._seen = step
        if self._profiler is not None:
            self._advance(step)
        elif not self._begun and step >= self._first - 1:
            self._begin(step)

    def close(self) -> None:
        """Write the part of a window that was recorded before the run ended."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _begin(self, step: int) -> None:
        self._begun = True
        if step > self._first:
            log.warning("profile.first=%d is before step %d, the first of this launch: no profile", self._first, step)
            return
        on_gpu, steps = self._device.type == "cuda", self._last - self._first + 1
        with warnings.catch_warnings(action="ignore"):  # a window from the first step on has no warm-up
            schedule = torch.profiler.schedule(wait=0, warmup=self._first - step, active=steps, repeat=1)
        self._profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=schedule,
            on_trace_ready=self._write,
            acc_events=True,  # torch 2.11 warns without it; there is only one cycle
            **self._record,
        )
        self._profiler.start()

    def _advance(self, step: int) -> None:
        assert self._profiler is not None
        if step > self._last:
            self.close()
            return
        if step == self._first and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # pending work belongs to the step before
        self._profiler.step()

    def _write(self, profiler: torch.profiler.profile) -> None:
        last = min(self._seen, self._last)  # the run may have ended before the window
        stem = f"steps-{self._first}-{last}.rank-{self._rank}"
        self._directory.mkdir(parents=True, exist_ok=True)
        trace, text = self._directory / f"{stem}.json.gz", self._directory / f"{stem}.txt"
        profiler.export_chrome_trace(str(trace))
        kernels = kernel_times(profiler.events() or [], on_gpu=self._device.type == "cuda")
        text.write_text(table(kernels, steps=last - self._first + 1), encoding="utf-8")
        log.info("profile: %s and %s", trace, text.name)
