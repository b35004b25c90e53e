"""Cases of ops that take the input of a norm and make its result first, for `ops.cases`."""

from __future__ import annotations

from typing import Any

import torch

from lowprec_train.ops import reference
from lowprec_train.ops.case_inputs import values

Cases = dict[str, tuple[Any, ...]]


def quantize_by() -> Cases:
    """Return cases that one kernel serves, and others."""
    x, rate, weight = values(9, 96), values(9, 8)[:, 0].abs(), values(8, 96)[0]
    amax, draws = torch.tensor([[3.0]]), ("nearest", None, None)
    bad = x.bfloat16()
    bad[2, 5], bad[7, 90] = torch.nan, torch.inf
    made: Cases = {}
    for name, given in {"norm in BF16": x.bfloat16(), "norm in FP32": x, "norm with Inf and NaN": bad}.items():
        for rule in ("POW2", "FP32"):
            made[f"{name}, {rule}"] = (given, amax, None, "E4M3", [-1, -1], rule, 1.0, 0, *draws, rate, weight)
    rows = reference.amax(x, [1, -1])
    made["norm by rows"] = (x.bfloat16(), rows, None, "E5M2", [1, -1], "POW2", 1.0, 0, *draws, rate, weight)
    return made
