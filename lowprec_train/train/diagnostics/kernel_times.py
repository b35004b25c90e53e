"""Sum the times of torch's profiler by kernel, and by class of kernel.

The first pattern that matches a kernel's name gives its class. `quantise` is this package's kernels and the casts of
other libraries. Kernels that torch.compile generates are `norm, elementwise`, whatever they fuse. Without a GPU, CPU
operations are listed instead, each without the time of its inner operations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

CLASSES = {  # class -> pattern of kernel names; the first match counts
    "communication": r"nccl|gloo|c10d",
    "optimizer": r"adam|multi_tensor_apply|lowprec.*(step_(flat|groups|expanded)|write_table|squares|add_up)\b",
    "quantise": r"lowprec|transformer_engine.*(cast|quanti|transpose|amax|scale)|block_scaled",
    "attention": r"sdpa|flash|fmha|attention|cudnn",
    "gemm": r"gemm|nvjet|cutlass|cublas|xmma|splitk|matmul|aten::(mm|addmm|bmm|_int_mm)$",
    "norm, elementwise": r"triton|elementwise|norm|reduce|softmax|nll|embedding|transformer_engine|rope|cat",
    "copy": r"memcpy|memset|copy",
}
OTHER = "other"
COPIES = re.compile(r"memcpy|memset|direct_copy", re.IGNORECASE)
SPANS = re.compile(r"^(Optimizer|ProfilerStep|Torch-Compiled|CompiledFunction|## )")  # spans, which contain kernels


def kernel_class(name: str) -> str:
    """Return the class of a kernel from its name."""
    if COPIES.search(name):
        return "copy"
    return next((each for each, pattern in CLASSES.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """All calls of one kernel; `ms` is the sum of their times."""

    name: str
    calls: int
    ms: float

    @property
    def kind(self) -> str:
        """The kernel's class."""
        return kernel_class(self.name)


def kernel_times(events: Iterable[Any], *, on_gpu: bool) -> list[KernelTime]:
    """Return the kernels among a profile's events, the longest first; on a CPU the operations."""
    selected = (each for each in events if is_kernel(each, on_gpu=on_gpu))
    times = ((e.name, e.time_range.elapsed_us() if on_gpu else e.self_cpu_time_total) for e in selected)
    return _summed(KernelTime(name=name, calls=1, ms=us / 1e3) for name, us in times)


def is_kernel(event: Any, *, on_gpu: bool) -> bool:
    """Return whether an event of a profile is work of the GPU (or the CPU), not a span that contains work."""
    holds_work = event.is_user_annotation or SPANS.search(event.name)
    return not holds_work and str(event.device_type).endswith("CUDA") is on_gpu


def _summed(kernels: Iterable[KernelTime]) -> list[KernelTime]:
    """Sum kernels of the same name, the longest first."""
    found: dict[str, KernelTime] = {}
    for each in kernels:
        before = found.get(each.name, replace(each, calls=0, ms=0.0))
        found[each.name] = replace(before, calls=before.calls + each.calls, ms=before.ms + each.ms)
    return sorted(found.values(), key=lambda kernel: -kernel.ms)


def table(kernels: Sequence[KernelTime], *, steps: int) -> str:
    """Return a table of classes, then kernels, each with its share, milliseconds and calls per step."""
    total = sum(kernel.ms for kernel in kernels) or 1.0

    def lines(kernels: Iterable[KernelTime]) -> list[str]:
        rows = _summed(kernels)
        return [f"{row.ms / total:7.1%} {row.ms / steps:10.3f} {row.calls / steps:8.1f}  {row.name}" for row in rows]

    classes = (replace(kernel, name=kernel.kind) for kernel in kernels)
    head = f"{'share':>7} {'ms/step':>10} {'calls':>8}  "
    return "\n".join(
        [f"{total / steps:.3f} ms a step over {steps} steps", "", f"{head}class", *lines(classes), ""]
        + [f"{head}kernel", *lines(kernels), ""]
    )
