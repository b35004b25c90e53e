"""The CUDA kernels of the ladder's steps against their meaning in plain PyTorch on the CPU: the same bits of codes,
rungs, rows' scales, sums and carriers; and a sharded operand, step by step, against the op that does all of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowprec_train.numerics.corrections import Candidates, Correction
from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops import ladder, library
from tests.ops.test_cuda_rotate import KINDS, SIGNS, assert_same, matrix

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
STEPS = ("quantize_ladder", "row_sums", "fold_ladder")


@pytest.fixture(autouse=True)
def live() -> None:
    kernels = library.live_kernels(CUDA)
    missing = {name for name in STEPS if kernels[name] != "CUDA"}
    if missing:
        pytest.skip(f"no CUDA kernel is built for {sorted(missing)} (make kernels)")


def both(op: str, *arguments: object) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the outputs of the kernel and of the reference."""
    moved = [each.to(CUDA) if isinstance(each, Tensor) else each for each in arguments]
    made = getattr(torch.ops.lowprec, op)(*moved), getattr(ladder, op)(*arguments)
    return tuple(each if isinstance(each, tuple) else (each,) for each in made)


def check(op: str, *arguments: object) -> tuple[Tensor, ...]:
    """Return the outputs of the reference, which those of the kernel equal."""
    got, want = both(op, *arguments)
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    return want


def check_steps(x: Tensor, tops: Tensor | None, width: int, by: str, span: int) -> None:
    """The sums of a row that is not finite have no meaning, but make its factor NaN."""
    codes, scale, row = check("quantize_ladder", x, tops, (1, width), by, span)
    (got,), (sums,) = both("row_sums", x, codes, scale, row, span)
    finite = row[:, 0].isfinite()
    assert_same(got.cpu()[finite], sums[finite])
    assert got.cpu()[~finite, 1].isnan().all()
    check("fold_ladder", codes, scale, row, ladder.row_factor(sums))
    check("fold_ladder", codes, scale, row, None)


HOW = (("mse", 11), ("none", 11), ("mae", 11), ("max", 3), ("mse", 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_and_span(kind, dtype):
    x = matrix(kind, 64, 256, dtype)
    amax = x.float().abs().amax(dim=1, keepdim=True)
    for by, span in HOW:
        check_steps(x, None, 16, by, span)
        check_steps(x, amax * 4, 16, by, span)
    for power in (-130, 100):
        check_steps(x * 2.0**power, None, 16, "mse", 11)


@pytest.mark.parametrize("width", [2, 4, 8, 32, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_other_widths(kind, width):
    for dtype in (torch.float32, torch.bfloat16):
        x = matrix(kind, 33, 512, dtype)
        for by, span in HOW:
            check_steps(x, None, width, by, span)


@pytest.mark.parametrize(
    "m, k", [(16, 16), (33, 48), (9, 528), (5, 4112), (3, 11008), (2, 28672), (1, 40960), (4999, 32)]
)
def test_shapes(m, k):
    for dtype in (torch.float32, torch.bfloat16):
        x = matrix("heavy", m, k, dtype)
        check_steps(x, None, 16, "mse", 11)
        check_steps(x, x.float().abs().amax(dim=1, keepdim=True), 16, "mse", 11)


def test_views():
    """Columns of a wider matrix, a transpose, and rows that begin beside a multiple of 16 bytes."""
    whole = matrix("wide", 64, 144)
    for x in (whole[:, 16:80], whole.t()[:, :32], whole.flatten()[1 : 1 + 64 * 128].view(64, 128)):
        check_steps(x.bfloat16(), None, 16, "mse", 11)
        moved = whole.to(CUDA).flatten()[x.storage_offset() :].as_strided(x.shape, x.stride())
        codes, scale, row = torch.ops.lowprec.quantize_ladder(moved, None, (1, 16), "mse", 11)
        want = ladder.quantize_ladder(x, None, (1, 16), "mse", 11)
        for a, b in zip((codes, scale, row), want, strict=True):
            assert_same(a, b)
        assert_same(torch.ops.lowprec.row_sums(moved, codes, scale, row, 11), ladder.row_sums(x, *want, 11))


def test_rows_of_zeros_and_rows_that_are_not_finite_elsewhere():
    x, tops = matrix("normal", 6, 64), torch.tensor([0.0, 1.0, torch.inf, torch.nan, 2.0**120, 2.0**-140])[:, None]
    x[0], x[5] = 0.0, 0.0
    for span in (0, 3, 11):
        check_steps(x, torch.maximum(tops, x.abs().amax(1, keepdim=True)), 16, "mse", span)


def test_codes_that_are_too_large_saturate():
    codes, scale = matrix("normal", 8, 64).to(torch.float8_e4m3fn), torch.full((8, 4), 2.0**10)
    check("fold_ladder", codes, scale, torch.exp2(torch.arange(8) * 30.0 - 100.0)[:, None], None)
    check("fold_ladder", codes[:, :60], torch.full((8, 5), 3.0), torch.ones(8, 1), torch.full((8, 1), 0.75))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["mae", "max"])
def test_the_op_that_does_all_steps_by_other_errors(by, kind):
    x = matrix(kind, 64, 256, torch.bfloat16)
    for transposed, rotation in ((False, 0), (False, 128), (True, 64)):
        signs = SIGNS if rotation else None
        check("rotate_fold_ladder", x, None, transposed, signs, rotation, 0.25, (1, 16), by, 11, True)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_parts_of_the_whole(kind):
    """Maxima and sums of two parts of each row, put together as ranks do: the bits of the op that does all steps."""
    how = Quantizer(
        E2M1, (1, 16), ScaleRule.LADDER, exponent_span=11, candidates=Candidates.MSE, correction=Correction.ROW
    )
    x, rule = matrix(kind, 256, 1024, torch.bfloat16).to(CUDA), ((1, 16), "mse", 11)
    ops, signs = torch.ops.lowprec, SIGNS.to(CUDA)
    carriers, row = ops.rotate_fold_ladder(x, None, False, signs, 128, 0.125, *rule, True)
    parts = [ops.hadamard_half(part.contiguous(), signs, 128, 0.125) for part in x.chunk(2, 1)]
    tops = torch.stack([how.local_amax(part, 1) for part in parts]).amax(0)
    made = [ops.quantize_ladder(part, tops, *rule) for part in parts]
    sums = sum(ops.row_sums(part, *of, 11) for part, of in zip(parts, made, strict=True))
    for of, part in zip(made, carriers.chunk(2, 1), strict=True):
        got = ops.fold_ladder(*of, ladder.row_factor(sums))
        finite = row[:, 0].isfinite().cpu()
        assert_same(got[1], row.cpu())
        assert_same(*(each.cpu().view(torch.uint8)[finite].view(each.dtype) for each in (got[0], part)))
