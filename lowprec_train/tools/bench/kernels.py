"""`lowprec bench kernels`: time and bandwidth of every op and of the optimizer's step, compared with a device copy.

The copy is measured first, in the same run. A kernel that moves only the necessary bytes at the copy's bandwidth cannot
be faster. Optimizers are measured by their `step`, on one matrix.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_train.ops.library import live_kernels
from lowprec_train.optim.optimizer import CodedOptimizer
from lowprec_train.tools.bench.case import SHAPES, Case, size
from lowprec_train.tools.bench.cases import CASES
from lowprec_train.tools.bench.result import cause
from lowprec_train.tools.bench.timing import Clock, copies
from lowprec_train.train import build_optimizer
from lowprec_train.train.compose import composed

COPY_BYTES = 8 << 30  # read and written together
OPTIMIZERS = {  # optim=... and overrides -> passes over gradient and state: a per-tensor scale needs the new amax first
    "adamw": 1,
    "adamw_coat": 1,
    "adamw_coat optim/master=bf16": 1,
    "adamw_fp8lm": 2,
    "adamw_fp4": 2,
}

Row = dict[str, Any]


def measure(
    device: torch.device,
    *,
    only: str = "*",
    shapes: Mapping[str, tuple[int, int]] = SHAPES,
    copy_bytes: int = COPY_BYTES,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Return rows of all cases whose "op name" matches the pattern `only`."""
    clock = clock or Clock(device)
    copy = copy_gbs(clock, copy_bytes)
    live = live_kernels(device)
    wanted = [(case, shape) for case in CASES if matches(f"{case.op} {case.name}", only) for shape in case.shapes]
    rows = [_row(clock, case, shapes[shape], copy, live.get(case.op, "")) for case, shape in wanted]
    weight = shapes["weight"]
    if matches("AdamW torch", only):
        rows.append(_torch_adamw(clock, weight, copy))
    rows += [_own_adamw(clock, name, weight, copy) for name in OPTIMIZERS if matches(f"AdamW {name}", only)]
    return {"copy_gbs": copy, "rows": rows}


def matches(name: str, pattern: str) -> bool:
    """Return whether a name matches a shell pattern or contains it."""
    return fnmatch.fnmatch(name, pattern) or pattern in name


def copy_gbs(clock: Clock, total: int) -> float:
    """Return the GB/s, read plus written, of a copy within the device."""
    source = torch.randint(-(2**31), 2**31 - 1, (total // 8,), dtype=torch.int32, device=clock.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.median_ms([lambda: target.copy_(source)]) / 1e6


def _row(clock: Clock, case: Case, shape: tuple[int, int], copy: float, kernel: str) -> Row:
    row: Row = {"op": case.op, "case": case.name, "shape": list(shape), "kernel": kernel}
    try:
        row["bytes"] = case.moved(*shape)
        first = case.inputs(*shape, clock.device)
        inputs = [first, *(case.inputs(*shape, clock.device) for _ in range(copies(size(first), clock.device) - 1))]
        ms = clock.median_ms([lambda each=each: case.call(*each) for each in inputs])  # type: ignore[misc]
    except Exception as error:  # the other kernels are still measured
        return row | {"error": cause(error)}
    return row | speed(row["bytes"], ms, copy)


def speed(moved: int, ms: float, copy: float) -> Row:
    """Return time, bandwidth by the necessary bytes, and its share of the copy's bandwidth."""
    gbs = moved / ms / 1e6
    return {"ms": ms, "gbs": gbs, "of_copy": gbs / copy}


def _torch_adamw(clock: Clock, shape: tuple[int, int], copy: float) -> Row:
    parameter = _parameter(shape, clock.device)
    fused = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    fused.step()
    kept = _kept(parameter, fused.state[parameter])
    return _step_row("torch, fused FP32", parameter, kept, 1, lambda: fused.step(), clock, copy)


def _own_adamw(clock: Clock, name: str, shape: tuple[int, int], copy: float) -> Row:
    run, weight = composed(*f"optim={name}".split()), _parameter(shape, clock.device)
    try:
        holder = nn.Module()
        holder.weight = weight
        gradient, weight.grad = weight.grad, None
        optimizer = build_optimizer.optimizer(run, holder, dp=1)
        assert gradient is not None
        weight.grad = gradient.to(weight.dtype)
        kept = _kept(weight, optimizer.state[weight])
        step = _stepping(optimizer)
    except Exception as error:
        return {"op": "AdamW", "case": name, "shape": list(shape), "kernel": "", "error": cause(error)}
    return _step_row(name, weight, kept, OPTIMIZERS[name], step, clock, copy)


def _stepping(optimizer: CodedOptimizer) -> Any:
    return lambda: optimizer.step()


def _step_row(name: str, parameter: nn.Parameter, kept: int, passes: int, step: Any, clock: Clock, copy: float) -> Row:
    """Return the row of an optimizer that reads gradient and state `passes` times and writes the state once."""
    row: Row = {"op": "AdamW", "case": name, "shape": list(parameter.shape), "kernel": ""}
    assert parameter.grad is not None
    row["bytes"] = passes * (parameter.grad.nbytes + kept) + kept
    try:
        ms = clock.median_ms([step])
    except Exception as error:
        return row | {"error": cause(error)}
    return row | speed(row["bytes"], ms, copy)


def _parameter(shape: tuple[int, int], device: torch.device) -> nn.Parameter:
    parameter = nn.Parameter(torch.randn(shape, device=device) * 0.02)
    parameter.grad = torch.randn(shape, device=device) * 1e-3
    return parameter


def _kept(parameter: Tensor, state: Mapping[str, Tensor]) -> int:
    return parameter.nbytes + size(state.values())
