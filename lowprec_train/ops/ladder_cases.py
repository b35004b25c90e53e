"""Test cases of the ops of `ops.ladder`, for `ops.cases`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowprec_train.ops import ladder
from lowprec_train.ops.case_inputs import normal, spoilt, ties, values

Cases = dict[str, tuple[Any, ...]]


def _ladder_inputs() -> dict[str, Tensor]:
    """Return rows of wide range, and rows that are critical for rungs: similar scales, ties, one large block."""
    x, near = values(9, 96), normal(8, 160).float() * 2.0 ** torch.arange(-20, 20, 5)[:, None]
    beside = normal(4, 128, seed=45).float() * 2.0 ** -torch.arange(8).repeat_interleave(16) * 2.0**-4
    beside[:, 3] = 6.0
    tied = torch.stack([ties("E2M1", 64)[i] * m for i in (4, 60) for m in (1.0, 1.25, 1.5)])
    return {"wide": x, "near": near, "BF16": near.bfloat16(), "beside": beside, "ties": tied, "spoilt": spoilt(5, 64)}


def quantize_ladder() -> Cases:
    made: Cases = {}
    for name, x in _ladder_inputs().items():
        for by, exponent_span in (("mse", 11), ("none", 11), ("mae", 0), ("max", 3)):
            made[f"{name}, {by} within {exponent_span}"] = (x, None, [1, 16], by, exponent_span)
    x, large = values(5, 96), torch.full((5, 1), 2.0**20)
    for width in (2, 32):
        made |= {f"{width}, {by}": (x, None, [1, width], by, 11) for by in ("none", "mse", "mae", "max")}
    made |= {"a part": (x, large, [1, 32], "mse", 11), "one block": (x[:, :16], None, [1, 16], "mse", 11)}
    made["a part in 16"] = (x, large * 2.0 ** torch.arange(0.0, 20, 4)[:, None], [1, 16], "mse", 11)
    made["a spoilt row"] = (x, large * torch.tensor([[1.0], [torch.inf], [1.0], [torch.nan], [1.0]]), [1, 16], "mse", 3)
    return made | {"FP16": (normal(6, 208).half(), None, [1, 16], "mse", 11)}


def row_sums() -> Cases:
    """Return x and its codes and scales from the reference."""

    def of(x: Tensor, width: int, exponent_span: int) -> tuple[Any, ...]:
        return x, *ladder.quantize_ladder(x, None, (1, width), "mse", exponent_span), exponent_span

    made = {name: of(x, 16, 11) for name, x in _ladder_inputs().items()}
    made |= {f"blocks of {width}": of(values(5, 96), width, 11) for width in (2, 32)}
    return made | {"no span": of(values(5, 96), 16, 0), "spoilt, no span": of(spoilt(5, 96), 16, 0)}


def rotate_fold_ladder() -> Cases:
    signs, how = torch.tensor(13), ([1, 16], "mse", 11)
    x = normal(256, 128) * 2.0 ** (torch.arange(256) % 7)[:, None].bfloat16()
    codes = (x.float() / 4).clamp(-448, 448).to(torch.float8_e4m3fn)
    rows = 2.0 ** (torch.arange(256) % 5).float()[:, None]
    bad = x.clone()
    bad[3, 40], bad[200, 7] = torch.nan, torch.inf
    made: Cases = {
        f"{n}, not rotated": (x, None, False, None, 0, 1.0, *how, False) for n, x in _ladder_inputs().items()
    }
    for transposed in (False, True):
        way = "columns" if transposed else "rows"
        made[way] = (x, None, transposed, signs, 128, 2.0**-3, *how, True)
        made[f"{way}, plain"] = (x, None, transposed, None, 0, 1.0, *how, False)
        made[f"{way} of FP32, short rotation"] = (x.float(), None, transposed, signs, 32, 0.25, *how, True)
        made[f"{way} of codes"] = (codes, torch.tensor([[0.25]]), transposed, signs, 128, 2.0**-4, *how, True)
        made[f"{way} of rounded values"] = (x, torch.tensor([[0.25]]), transposed, signs, 128, 2.0**-4, *how, True)
        made[f"{way} of values under 0.3"] = (bad, torch.tensor([[0.3]]), transposed, signs, 128, 0.25, *how, True)
        made[f"{way} of FP32, rounded"] = (x.float(), torch.tensor([[2.0]]), transposed, None, 0, 1.0, *how, True)
        norm = None, 1.0 + rows.flip(0), values(8, 128)[0]
        made[f"{way} of a norm"] = (x, torch.tensor([[4.0]]), transposed, signs, 128, 2.0**-4, *how, True, *norm)
        made[f"{way} of a norm, plain"] = (x, None, transposed, None, 0, 1.0, *how, False, *norm)
        made[f"{way} of codes under rows"] = (codes, rows, transposed, signs, 128, 2.0**-4, *how, True)
        made[f"{way}, Inf and NaN"] = (bad, None, transposed, signs, 128, 2.0**-3, *how, True)
        made[f"{way}, one rung"] = (x, None, transposed, signs, 64, 0.125, [1, 16], "none", 11, True)
    for by in ("mae", "max"):
        made[f"rows by {by}"] = (x, None, False, signs, 128, 2.0**-3, [1, 16], by, 11, True)
    made["tiny rows"] = (x * 2.0**-120, None, False, signs, 128, 2.0**-4, *how, True)
    made["wide groups"] = (
        x * 2.0 ** (torch.arange(128) // 16 * 5 - 20).bfloat16(),
        None,
        False,
        signs,
        16,
        0.25,
        *how,
        True,
    )
    return made


def hadamard_half() -> Cases:
    """Return inputs of wide range, in every block length, and the smallest and largest numbers."""
    x, wide, signs = normal(9, 256).float(), values(9, 96), torch.tensor(17)
    made: Cases = {f"{n}": (x, signs, n, 2.0 ** -(n.bit_length() // 2)) for n in (2, 8, 16, 64, 128, 256)}
    return made | {
        "wide": (wide, signs, 32, 0.25),
        "BF16": (wide.bfloat16(), None, 16, 0.25),
        "spoilt": (spoilt(5, 64), signs, 16, 0.25),
        "tiny": (x * 2.0**-140, signs, 128, 2.0**-4),
        "huge": (x * 2.0**124, signs, 128, 2.0**-3),
        "zeros": (torch.zeros(3, 64), signs, 64, 0.125),
        "range within a block": (x * 2.0 ** (torch.arange(256) % 64 - 40.0), signs, 128, 2.0**-4),
    }


def fold_ladder() -> Cases:
    """Return codes and scales from the reference, with and without a factor."""
    made: Cases = {}
    for name, (_, *rest, _) in row_sums().items():
        made |= {name: (*rest, rest[-1].abs()), f"{name}, no factor": (*rest, None)}
    return made


def pack_ladder() -> Cases:
    """Return carriers from the reference, all codes with all scales, and blocks that have no factors."""
    made: Cases = {}
    for name, (_, codes, scale, row, _) in row_sums().items():
        made[name] = (ladder.fold_ladder(codes, scale, row, None)[0],)
    grid = torch.tensor([0.0, -0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0, -6.0, 0.5, 1.0, -1.5, 3.0, 4.0, -2.0])
    rungs = torch.tensor([m * 2.0**e for e in range(-6, 7) for m in (1.0, 1.25, 1.5)])[:-2]
    every = (grid * rungs[:, None]).view(1, -1)
    return made | {
        "every rung": (every.to(torch.float8_e4m3fn),),
        "no product": (torch.arange(256).byte().view(2, 128).view(torch.float8_e4m3fn),),
    }


def unpack_ladder() -> Cases:
    return {name: ladder.pack_ladder(*given) for name, given in pack_ladder().items()}


BY_OP = {
    "pack_ladder": pack_ladder,
    "unpack_ladder": unpack_ladder,
    "hadamard_half": hadamard_half,
    "quantize_ladder": quantize_ladder,
    "row_sums": row_sums,
    "fold_ladder": fold_ladder,
    "rotate_fold_ladder": rotate_fold_ladder,
}
