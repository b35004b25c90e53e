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
    draws, bad = ("nearest", None, None), x.bfloat16()
    bad[2, 5], bad[7, 90] = torch.nan, torch.inf
    made: Cases = {}
    for name, given in {"norm in BF16": x.bfloat16(), "norm in FP32": x, "norm with Inf and NaN": bad}.items():
        y = reference.normalized(given, rate, weight)
        for rule in ("POW2", "FP32"):
            how = ("E4M3", [-1, -1], rule, 1.0, 0, *draws)
            made[f"{name}, {rule}"] = (given, reference.amax(y, [-1, -1]), None, *how, rate, weight)
        made[f"{name}, rows"] = (given, reference.amax(y, [1, -1]), None, "E5M2", [1, -1], *how[2:], rate, weight)
    return made
