"""Where a step's time goes: torch's profiler over two steps, device time summed by class of kernel.

Classes go by the kernels' names, the first pattern that matches. `quantise` is our own kernels and the peers' casts;
what torch.compile generates is `norm, elementwise`, whatever it fused into it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from lowprec_train.tools.bench.contestant import Step

STEPS = 2
LONGEST = 12  # kernels listed by name
CLASSES = {  # class -> pattern over the name of a kernel; the first that matches
    "optimizer": r"adam|multi_tensor_apply",
    "quantise": r"lowprec|transformer_engine.*(cast|quanti|transpose|amax|scale)|block_scaled",
    "attention": r"sdpa|flash|fmha|attention|cudnn",
    "gemm": r"gemm|nvjet|cutlass|cublas|xmma|splitk|matmul",
    "norm, elementwise": r"triton|elementwise|norm|reduce|softmax|nll|embedding|transformer_engine|rope|cat",
    "copy": r"memcpy|memset|copy",
}
OTHER = "other"
COPIES = re.compile(r"memcpy|memset|direct_copy", re.IGNORECASE)
SPANS = re.compile(r"#|^(Optimizer|ProfilerStep|Torch-Compiled|CompiledFunction|## )")  # spans, which hold kernels


def kernel_class(name: str) -> str:
    """The class of a kernel by its name."""
    if COPIES.search(name):
        return "copy"
    return next((each for each, pattern in CLASSES.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def profile(step: Step, device: torch.device) -> dict[str, Any]:
    """Milliseconds a step by class, and the kernels that take longest. Without a GPU there are none."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as watched:
        for _ in range(STEPS):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    times: dict[str, float] = defaultdict(float)
    for event in watched.events() or []:
        annotation = event.is_user_annotation or SPANS.search(event.name)
        if str(event.device_type).endswith("CUDA") and not annotation:
            times[event.name] += event.time_range.elapsed_us() / 1e3 / STEPS
    return summary(times)


def summary(times: Mapping[str, float]) -> dict[str, Any]:
    """times: milliseconds a step, by kernel."""
    classes: dict[str, float] = defaultdict(float)
    for name, ms in times.items():
        classes[kernel_class(name)] += ms
    longest = sorted(times.items(), key=lambda item: -item[1])[:LONGEST]
    return {
        "ms": dict(sorted(classes.items(), key=lambda item: -item[1])),
        "total_ms": sum(classes.values()),
        "longest": [{"kernel": name[:120], "class": kernel_class(name), "ms": ms} for name, ms in longest],
    }
