"""Comparison of compiled kernels with the reference on a few small tensors, at the start of a run.

A kernel built from other sources, for another GPU or by a compiler that contracts a * b + c may train smoothly with
wrong numbers. So each op that a shared library provides for the run's device is called on its cases (ops/cases.py), and
its outputs must equal those of the reference on the CPU, bit for bit; any NaN equals any other NaN. Norms and
activations have sums and exponentials: only their codes must be equal, other outputs within BOUND. FP64 sums are
compared as FP32 numbers. If a plan uses block-scaled GEMMs of torch, or GEMMs of decoded values on a GPU, they are
checked on cases with exact sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowprec_train.ops import kernels, library
from lowprec_train.ops.block_scaled import SWITCH
from lowprec_train.ops.block_scaled_cases import block_scaled_cases
from lowprec_train.ops.cases import BOUNDED, cases

BOUND = 2.0**-7  # of each value, for two roundings to BF16; plus BOUND / 16 of the largest value, for cancellation


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether shape, dtype, row-major layout and bits are equal; a NaN equals any NaN."""
    if (a.shape, a.dtype, a.is_contiguous()) != (b.shape, b.dtype, b.is_contiguous()):
        return False
    a, b = a.contiguous().flatten(), b.contiguous().flatten()
    differ = (a.view(torch.uint8) != b.view(torch.uint8)).view(a.numel(), a.element_size()).any(1)
    return not bool((differ & ~(a.float().isnan() & b.float().isnan())).any())


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether values of at least 16 bits differ by at most BOUND and have Inf and NaN in the same places; codes
    must be equal.
    """
    if a.itemsize == 1 or a.shape != b.shape or a.dtype != b.dtype:
        return same(a, b)
    a, b = a.float(), b.float()
    finite = b.isfinite()
    bound = BOUND * b.abs() + BOUND / 16 * b[finite].abs().amax() if finite.any() else b
    return bool(torch.where(finite, (a - b).abs() <= bound, a.isfinite() == finite).all())


def _order_independent(x: Tensor) -> Tensor:
    """Return an FP64 sum as FP32, which does not depend on the order of additions (`updates.wide_sum`); else x."""
    return x.float() if x.dtype == torch.float64 else x


def listed(output: Any) -> tuple[Tensor, ...]:
    """Return the outputs of an op as a tuple; empty if it writes to its arguments."""
    return (output,) if isinstance(output, Tensor) else tuple(output or ())


def written(op: str, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return the tensors among the arguments, alone and in lists, that the op writes to."""
    schema = getattr(torch.ops.lowprec, op).default._schema
    given = [each for each, about in zip(arguments, schema.arguments) if about.alias_info and about.alias_info.is_write]
    return tuple(x for each in given for x in (each if isinstance(each, list) else [each]) if isinstance(x, Tensor))


def _copied(argument: Any, device: torch.device) -> Any:
    """Return a copy on the device."""
    if isinstance(argument, list):
        return [_copied(each, device) for each in argument]
    return argument.to(device, copy=True) if isinstance(argument, Tensor) else argument


def check(
    op: str, case: str, arguments: tuple[Any, ...], device: torch.device, what: str = "", remedy: str = ""
) -> None:
    """Raise KernelError, with op, case and device, if the kernel fails or returns other bits than the reference. what,
    remedy: for messages about kernels that are not from our libraries.
    """
    what = f"{what or 'the compiled kernel'} of lowprec::{op} on {device}, case '{case}'"
    remedy = remedy or f"build it again with `make kernels`, or remove {kernels.FOLDER / kernels.FILES[device.type]}"
    moved = tuple(_copied(each, device) for each in arguments)
    try:
        got = [each.cpu() for each in (*listed(getattr(torch.ops.lowprec, op)(*moved)), *written(op, moved))]
    except Exception as error:
        raise kernels.KernelError(f"{what}, failed: {error}; {remedy}") from error
    agree = close if op in BOUNDED else same
    expected = (*listed(library.EAGER[op](*arguments)), *written(op, arguments))
    for index, (mine, wanted) in enumerate(zip(got, expected, strict=True)):
        if not agree(_order_independent(mine), _order_independent(wanted)):
            raise kernels.KernelError(f"{what}, output {index}, differs from the reference; {remedy}")


def self_test(
    device: torch.device,
    ops: Iterable[str] | None = None,
    *,
    block_formats: Iterable[str] = (),
    decoded: bool = False,
) -> None:
    """Check every op that a shared library provides for `device` (or `ops`), and torch's block-scaled GEMMs of
    `block_formats` (keys of `ops.block_scaled.BLOCKS`), in at most about a second. decoded: check `bf16_mm` too.
    Raises KernelError.
    """
    served = library.SERVED.get(device.type, frozenset())
    guard: AbstractContextManager = nullcontext()
    if device.type == "cuda" and served:
        kernels.check_architecture(device)
        guard = torch.cuda.device(device)
    with guard, torch.no_grad():
        for op in sorted(served if ops is None else ops):
            for case, arguments in cases(op).items():
                check(op, case, arguments, device)
        if decoded:
            for case, arguments in cases("bf16_mm").items():
                check("bf16_mm", case, arguments, device, "the GEMM of torch's cuBLAS", "use another build of torch")
        for format in sorted(block_formats):
            for case, arguments in block_scaled_cases(format).items():
                remedy = f"{SWITCH} runs these GEMMs without it"
                check("block_scaled_mm", case, arguments, device, f"torch's {format} GEMM", remedy)


@cache
def self_test_once(device: torch.device, *, block_formats: frozenset[str] = frozenset(), decoded: bool = False) -> None:
    """`self_test`, once in a process: its libraries stay as they are. What it raises is raised again."""
    self_test(device, block_formats=block_formats, decoded=decoded)
