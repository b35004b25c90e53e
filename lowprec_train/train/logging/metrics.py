"""Metrics of a step: FLOPs, time, memory and utilisation.

A linear layer with n inputs and m outputs computes three GEMMs per token, 2nm FLOPs each: fprop, dgrad, wgrad. Together
they are the 6N of the rule "6N FLOPs per token" for N weights in GEMMs. Attention is added; recomputed activations are
not counted (model FLOPs, not hardware FLOPs). GEMMs run in different precisions p, so there are two utilisations:

    mfu_bf16peak = sum_p F_p / peak_bf16 / time        comparable between recipes; may exceed 1 for FP8
    sol          = sum_p (F_p / peak_p) / time         share of the peak speed of exactly this mixture; at most 1

Peaks are the dense ones of NVIDIA's data sheets (sparse ones are twice as high). For an unknown GPU both metrics are
left out.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

GEMMS = ("fprop", "dgrad", "wgrad")
GIB = 2**30

_PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"GH200", {"bf16": 989.4, "fp8": 1978.9, "int8": 1978.9}),
    (r"H200 NVL", {"bf16": 835.5, "fp8": 1670.5, "int8": 1670.5}),
    (r"H200", {"bf16": 989.4, "fp8": 1978.9, "int8": 1978.9}),
    (r"H100 NVL", {"bf16": 835.5, "fp8": 1670.5, "int8": 1670.5}),
    (r"H100 PCIe", {"bf16": 756.0, "fp8": 1513.0, "int8": 1513.0}),
    (r"H100|H800", {"bf16": 989.4, "fp8": 1978.9, "int8": 1978.9}),
    (r"H20\b", {"bf16": 148.0, "fp8": 296.0, "int8": 296.0}),
    (r"A100|A800", {"bf16": 312.0, "int8": 624.0}),
    (r"L40S", {"bf16": 362.05, "fp8": 733.0, "int8": 733.0}),
    (r"L40\b", {"bf16": 181.05, "fp8": 362.0, "int8": 362.0}),
    (r"L4\b", {"bf16": 121.0, "fp8": 242.5, "int8": 242.5}),
    (r"A40\b", {"bf16": 149.7, "int8": 299.3}),
    (r"A10\b", {"bf16": 125.0, "int8": 250.0}),
    (r"GB200", {"bf16": 2500.0, "fp8": 5000.0, "fp4": 10000.0, "int8": 5000.0}),
    (r"B200", {"bf16": 2250.0, "fp8": 4500.0, "fp4": 9000.0, "int8": 4500.0}),
)
"""(pattern of the CUDA device name, dense TFLOP/s or TOP/s per precision); first match wins."""


def peak_flops(device_name: str) -> dict[str, float]:
    """Return the dense peak in FLOP/s per precision kind; empty for a GPU that is not in the table."""
    for pattern, peaks in _PEAK_TFLOPS:
        if re.search(pattern, device_name):
            return {kind: tera * 1e12 for kind, tera in peaks.items()}
    return {}


def flops_per_token(
    model: nn.Module, *, kinds: Mapping[str, Mapping[str, str]], attention_flops: float = 0.0
) -> dict[str, float]:
    """Return training FLOPs per token, forward and backward, per precision kind.

    kinds: {module name: {"fprop": kind, "dgrad": kind, "wgrad": kind}}; other modules compute in "bf16".
    attention_flops: FLOPs of the attention GEMMs per token, forward and backward; counted as "bf16".

    Raises ValueError if `kinds` names a module that is not a linear layer.
    """
    linears = {name: module for name, module in model.named_modules() if hasattr(module, "in_features")}
    unknown = sorted(set(kinds) - set(linears))
    if unknown:
        raise ValueError(f"precision kinds for modules that are not linear layers: {unknown}")
    total: dict[str, float] = {"bf16": float(attention_flops)}
    for name, linear in linears.items():
        for gemm in GEMMS:
            kind = kinds.get(name, {}).get(gemm, "bf16")
            total[kind] = total.get(kind, 0.0) + 2.0 * linear.in_features * linear.out_features
    return total


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Converts the time of a step to rates.

    later: (0-based first step, rates from that step on) of phases whose GEMMs compute in other precisions.
    """

    tokens_per_step: int  # of all GPUs
    flops_per_token: Mapping[str, float] = field(default_factory=dict)  # by kind; empty: no FLOP metrics
    peaks: Mapping[str, float] = field(default_factory=dict)  # FLOP/s by kind
    gpus: int = 1
    later: tuple[tuple[int, Throughput], ...] = ()

    def of_step(self, step: int) -> Throughput:
        """Return the rates of a 0-based step."""
        return [self, *(rates for first, rates in self.later if first <= step)][-1]

    def __call__(self, seconds: float) -> dict[str, float]:
        """Return the metrics of a step that took `seconds`."""
        tokens = self.tokens_per_step / seconds / self.gpus
        flops = sum(self.flops_per_token.values())
        metrics = {"perf/tokens_per_sec_per_gpu": tokens}
        if flops:
            metrics["perf/tflops_per_gpu"] = tokens * flops / 1e12
        if flops and "bf16" in self.peaks:
            metrics["perf/mfu_bf16peak"] = tokens * flops / self.peaks["bf16"]
        if flops and not self.without_peak():
            metrics["perf/sol"] = tokens * sum(f / self.peaks[kind] for kind, f in self.flops_per_token.items() if f)
        return metrics

    def without_peak(self) -> list[str]:
        """Return the kinds that have FLOPs but no known peak. If there is one, `perf/sol` is left out."""
        return sorted(kind for kind, flops in self.flops_per_token.items() if flops and kind not in self.peaks)


def memory(device: torch.device) -> dict[str, float]:
    """Return the peak memory so far in GiB: allocated by torch on a GPU, resident on a CPU. Does not synchronise."""
    if device.type != "cuda":
        unit = 1 if sys.platform == "darwin" else 1024
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"mem/peak_gib": resident / GIB, "mem/alloc_retries": 0.0}
    retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    return {"mem/peak_gib": torch.cuda.max_memory_allocated(device) / GIB, "mem/alloc_retries": float(retries)}


class Instant:
    """A point in a device's timeline: on a GPU when its stream reaches it, else now. Creating it waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has reached this point."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Instant) -> float:
        """Return the seconds between two instants that the device has reached."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._time - earlier._time


class AsyncHostCopy:
    """An asynchronous copy of device values to pinned host memory."""

    def __init__(self, values: Tensor, device: torch.device) -> None:
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=device.type == "cuda")
        self._values.copy_(values, non_blocking=True)
        self._copied = Instant(device)

    def read(self) -> list[float]:
        """Return the values. Waits until the copy is complete."""
        self._copied.wait()
        return self._values.tolist()


class DeferredMetrics:
    """The metrics of one step, copied to the host asynchronously; reading them a step later keeps the device busy.

    metrics: floats, and 0-dim tensors of `device`. begin: the end of the step before, or the start of this one.
    """

    def __init__(self, step: int, metrics: Mapping[str, Tensor | float], begin: Instant, device: torch.device) -> None:
        self.step = step
        self._floats = {name: float(value) for name, value in metrics.items() if not isinstance(value, Tensor)}
        tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
        self._names = list(metrics), list(tensors)
        self._begin, self.end = begin, Instant(device)
        self._values = AsyncHostCopy(torch.stack([tensor.detach().double() for tensor in tensors.values()]), device)

    def read(self) -> tuple[dict[str, float], float]:
        """Return the metrics in the order given, and the step's seconds. Waits until the device has finished it."""
        order, names = self._names
        values = self._floats | dict(zip(names, self._values.read(), strict=True))
        return {name: values[name] for name in order}, self.end.since(self._begin)
