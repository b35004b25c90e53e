"""Profile two steps with torch's profiler; sum device time by class of kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from lowprec_train.tools.bench import timeline
from lowprec_train.tools.bench.contestant import Step
from lowprec_train.train.diagnostics.kernel_times import kernel_class, kernel_times

STEPS = 2
LONGEST = 12  # kernels listed by name


def profile(step: Step, device: torch.device) -> dict[str, Any]:
    """Return the milliseconds per step by class, the longest kernels, the times of `timeline.exposure` and, as
    `timeline`, the tracks of the last step. Without a GPU there are no kernels.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as watched:
        for _ in range(STEPS):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = watched.events() or []
    times = {kernel.name: kernel.ms / STEPS for kernel in kernel_times(events, on_gpu=True)}
    kernels = timeline.kernels(events)
    return summary(times) | timeline.exposure(kernels, STEPS) | {"timeline": timeline.tracks(kernels, STEPS)}


def summary(times: Mapping[str, float]) -> dict[str, Any]:
    """Sum times by class and list the longest kernels. times: milliseconds per step by kernel."""
    classes: dict[str, float] = defaultdict(float)
    for name, ms in times.items():
        classes[kernel_class(name)] += ms
    longest = sorted(times.items(), key=lambda item: -item[1])[:LONGEST]
    return {
        "ms": dict(sorted(classes.items(), key=lambda item: -item[1])),
        "total_ms": sum(classes.values()),
        "longest": [{"kernel": name[:120], "class": kernel_class(name), "ms": ms} for name, ms in longest],
    }
