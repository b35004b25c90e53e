"""Test cases of the ops of `ops.eden`, for `ops.cases`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowprec_train.ops import eden
from lowprec_train.ops.case_inputs import normal, spoilt, ties, values

Cases = dict[str, tuple[Any, ...]]


def _inputs() -> dict[str, tuple[Tensor, int]]:
    """Return matrices and rotations: rows of wide range, ties, zeros beside other values, Inf and NaN."""
    x = normal(33, 384) * 2.0 ** (torch.arange(33) % 7)[:, None].bfloat16()
    x[5, :128], x[6, 256:] = 0.0, 0.0
    return {
        "rotated": (x, 128),
        "FP32, short rotation": (x.float(), 32),
        "FP16, long rotation": (x[:, :256].half(), 256),
        "not rotated": (x, 0),
        "wide": (values(9, 256), 0),
        "ties": (ties("E2M1", 128)[3:7], 0),
        "one group": (values(1, 128).bfloat16(), 16),
        "zeros": (torch.zeros(3, 256), 128),
        "Inf and NaN": (spoilt(5, 256), 64),
        "Inf": (spoilt(5, 256)[:1].bfloat16(), 0),
    }


def rotated_amax() -> Cases:
    signs = torch.tensor(13)
    return {name: (x, signs if rotation > 16 else None, rotation) for name, (x, rotation) in _inputs().items()}


def quantize_eden() -> Cases:
    """Return cases with the matrix's amax and with that of a larger matrix; random bits with and without an origin."""
    seed, origin, made = torch.tensor(7 << 33 | 5), torch.tensor([3, 256]), {}
    for name, arguments in rotated_amax().items():
        top = eden.rotated_amax(*arguments)
        made[name] = (arguments[0], top, *arguments[1:], seed, None)
        made[f"{name}, a part"] = (arguments[0], top * 8.0, *arguments[1:], seed, origin)
    return made


BY_OP = {"rotated_amax": rotated_amax, "quantize_eden": quantize_eden, "round_eden": quantize_eden}
