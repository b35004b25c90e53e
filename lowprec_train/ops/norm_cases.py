"""Cases of ops that take the input of a norm and make its result first, for `ops.cases`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowprec_train.ops import reference
from lowprec_train.ops.case_inputs import values

Cases = dict[str, tuple[Any, ...]]


def _inputs(rows: int) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Return inputs [rows, 96] of norms by name, and rates and a weight."""
    x, rate, weight = values(rows, 96), values(rows, 8)[:, 0].abs(), values(8, 96)[0]
    bad = x.bfloat16()
    bad[2, 5], bad[7, 90] = torch.nan, torch.inf
    return {"norm in BF16": x.bfloat16(), "norm in FP32": x, "norm with Inf and NaN": bad}, (rate, weight)


def quantize_by() -> Cases:
    """Return cases that one kernel serves, and others."""
    given, norm = _inputs(9)
    draws, made = ("nearest", None, None), Cases()
    for name, x in given.items():
        y = reference.normalized(x, *norm)
        for rule in ("POW2", "FP32"):
            how = ("E4M3", [-1, -1], rule, 1.0, 0, *draws)
            made[f"{name}, {rule}"] = (x, reference.amax(y, [-1, -1]), None, *how, *norm)
        made[f"{name}, rows"] = (x, reference.amax(y, [1, -1]), None, "E5M2", [1, -1], *how[2:], *norm)
    return made


def _quantize_transposed() -> Cases:
    """Return cases that one kernel serves, multiples of 16 rows to E4M3, and others; with a norm and without."""
    made: Cases = {}
    for rows in (9, 144):
        given, norm = _inputs(rows)
        for name, x in given.items():
            amax = reference.amax(reference.normalized(x, *norm), [-1, -1])
            made[f"{name}, {rows} rows"] = (x, amax, "E4M3", "POW2", 1.0, *norm)
            made[f"{rows} rows, no {name}"] = (x, reference.amax(x, [-1, -1]), "E4M3", "FP32", 0.5)
            made[f"{name} to E2M1, {rows} rows"] = (x, amax, "E2M1", "FP32", 1.0, *norm)
    return made


BY_OP: dict[str, Callable[[], Cases]] = {"quantize_transposed": _quantize_transposed}
