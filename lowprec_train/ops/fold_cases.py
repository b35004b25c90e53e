"""Cases of ops that multiply block exponents into a carrier, for `ops.cases`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowprec_train.ops import reference
from lowprec_train.ops.case_inputs import e2m1
from lowprec_train.ops.philox import random_bits

Cases = dict[str, tuple[Any, ...]]


def _fold(rows: int = 6) -> Cases:
    """Return cases with blocks of 32 codes and scales of 25 binades."""
    codes, scale = e2m1(rows, 96), 2.0 ** (random_bits(torch.tensor(5), None, rows, 3) % 25 - 12).float()
    lost = scale.clone()
    lost[2, 1] = torch.nan
    return {
        "E4M3": (codes, scale, "E4M3"),
        "E5M2": (codes, scale, "E5M2"),
        "NaN": (codes, lost, "E4M3"),
        "blocks of 12": (codes[:, :36].contiguous(), scale, "E4M3"),
    }


def _fold_transposed() -> Cases:
    """Return cases that one kernel serves, multiples of 16 rows in whole vectors, and others; packed codes, too."""
    made = {f"{name}, {rows} rows": each for rows in (6, 144) for name, each in _fold(rows).items()}
    return made | {f"packed, {name}": (reference.pack_e2m1(c), *how) for name, (c, *how) in made.items()}


BY_OP: dict[str, Callable[[], Cases]] = {"fold": _fold, "fold_transposed": _fold_transposed}
