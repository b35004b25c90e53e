"""Linear layers cut over 2 and 4 ranks against the whole layer: the codes and scales are its own, cut.

Ranks are threads (tests/groups.py). What may differ is the order of FP32 sums, and where partial products are
summed over ranks each of them is rounded to the stream's dtype before: 2^-8 of it for BF16, in all at most 2^-8 of the
sum of magnitudes. The oracle knows these magnitudes.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from lowprec_train.group import Group
from lowprec_train.numerics.draws import Gemms, Operand
from lowprec_train.precision.recipe import override
from lowprec_train.precision.split import Split
from lowprec_train.recipes import fp4_fold
from lowprec_train.tools.estimate.meta_group import MetaGroup
from tests.groups import among
from tests.oracle_linear import MX, Passes, linear_fp4, linear_fp8, linear_mxfp4, linear_mxfp4_fp8, linear_plain
from tests.oracle_recipes import (
    NV,
    UFP4,
    Quartet,
    linear_fp4_fold,
    linear_fp4_mixed,
    linear_fp8_block,
    linear_fp8_eden4,
    linear_fp8_rowwise,
    linear_int8_switchback,
    linear_mxfp8,
    linear_nvfp4,
    linear_quartet2,
    linear_reduced_mantissa,
    linear_ufp4,
    linear_w4a8,
    without_means,
)
from tests.precision.layers import (
    DTYPES,
    FIRST_TOKEN,
    assert_within,
    heavy_tails,
    linear,
    make,
    outlier_channels,
    plain_data,
    seeds,
)
from tests.precision.split_layers import Data, Ran, part_of, parts, tensors, whole
from tests.recipes import RECIPES, by_day, one_of_a_kind_by_day

SIZES = (128, 512, 512)  # a square of 128 for each of four ranks
M, K, N = SIZES
WHERE = {  # rows and columns of every operand
    (Gemms.FPROP, Operand.A): "MK",
    (Gemms.FPROP, Operand.B): "NK",
    (Gemms.DGRAD, Operand.A): "MN",
    (Gemms.DGRAD, Operand.B): "KN",
    (Gemms.WGRAD, Operand.A): "NM",
    (Gemms.WGRAD, Operand.B): "KM",
}
ORACLE = {
    "bf16": linear_plain,
    "fp8": linear_fp8,
    "fp8_rowwise": linear_fp8_rowwise,
    "fp8_block": linear_fp8_block,
    "mxfp8": linear_mxfp8,
    "fp4": linear_fp4,
    "fp4_residual": lambda *data, format: linear_fp4(*data, variant="residual", format=format),
    "fp4_unclamped": lambda *data, format: linear_fp4(*data, alpha=1.0, format=format),
    "fp4_mixed": linear_fp4_mixed,
    "mxfp4": lambda *data, format: linear_mxfp4(*data, MX(seeds, FIRST_TOKEN), format=format),
    "mxfp4_fp8": lambda *data, format: linear_mxfp4_fp8(*data, MX(seeds, FIRST_TOKEN), format=format),
    "fp4_fold": lambda *data, format: linear_fp4_fold(*data, seeds, format=format),
    "fp8_eden4": lambda *data, format: linear_fp8_eden4(*data, seeds, format=format),
    "nvfp4": lambda *data, format: linear_nvfp4(*data, NV(seeds, FIRST_TOKEN), format=format),
    "nvfp4_lines": lambda *data, format: linear_nvfp4(
        *data, NV(seeds, FIRST_TOKEN, square=False, row_scaled=True, selects=True), format=format
    ),
    "quartet2": partial(linear_quartet2, how=Quartet(seeds, FIRST_TOKEN)),
    "ufp4": partial(linear_ufp4, how=UFP4(seeds, FIRST_TOKEN)),
    "reduced_mantissa": linear_reduced_mantissa,
    "w4a8": linear_w4a8,
    "averis": partial(without_means, partial(linear_nvfp4, nv=NV(seeds, FIRST_TOKEN))),
    "int8_switchback": linear_int8_switchback,
}


def uneven(g: np.random.Generator, sizes: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every quarter of a row or a column is ten binades below the one before: no two ranks have the same maxima."""
    (x, w, dy), (_, k, n) = plain_data(g, sizes), sizes
    down = [2.0 ** -(10.0 * (4 * np.arange(size) // size)) for size in (k, n)]
    return x * down[0], w * down[0] * down[1][:, None], dy * down[1]


DATA = [uneven, heavy_tails, outlier_channels]


def assembled(ranks: list[Ran], dim: int) -> list[Tensor]:
    return [
        torch.cat([getattr(each, name) for each in ranks], at)
        for name, at in (("y", 1 - dim), ("dx", dim), ("dw", dim))
    ]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@cache
def given(name: str, index: int, format: str) -> tuple[Data, Ran, Passes]:
    data = make(DATA[index], format, SIZES)
    return data, whole(RECIPES[name], data, DTYPES[format]), ORACLE[name](*data, format=format)


def assert_cut(part: Ran, of: Ran, dim: int, index: int, count: int) -> None:
    """The same operands in the same order, each with the codes and scales of its part."""
    assert [operand for operand, _ in part.seen] == [operand for operand, _ in of.seen]
    for (operand, mine), (_, all_of_it) in zip(part.seen, of.seen):
        at = WHERE[operand].find("NK"[dim])
        every = {"codes": (mine.codes, all_of_it.codes), "scale": (mine.scale, all_of_it.scale)}
        every |= {name: (mine.parts[name], all_of_it.parts[name]) for name in all_of_it.parts}
        for what, (got, expected) in every.items():
            if at != -1 and expected.shape[at] > 1:
                expected = expected.chunk(count, at)[index]
            assert torch.equal(bits(got), bits(expected)), (operand, what)


DIMS = pytest.mark.parametrize("dim", [0, 1], ids=["column", "row"])


@DIMS
@pytest.mark.parametrize("count, format", [(2, "FP32"), (4, "BF16")])
@pytest.mark.parametrize("index", range(len(DATA)), ids=[f.__name__ for f in DATA])
@pytest.mark.parametrize("name", by_day(RECIPES))
def test_parts_are_the_whole_cut(name, index, count, format, dim):
    data, of, want = given(name, index, format)
    watched, fused = (parts(RECIPES[name], data, DTYPES[format], dim, count, each) for each in (True, False))
    for rank, part in enumerate(watched):
        assert_cut(part, of, dim, rank, count)
    summed, product = ("dX", want.dx) if dim == 0 else ("y", want.y)
    more = {summed: 2.0**-8 * (1 + 2.0**-7) * product.magnitude} if format == "BF16" else {}
    for results in (watched, fused):
        slack = 2.0**-20 if name.startswith("fp4") else 0.0
        plain = RECIPES[name].wgrad.is_identity
        assert_within(assembled(results, dim), want, format, slack=slack, more=more, plain_weight=plain)
    if name.startswith("mxfp4"):  # folded carriers: scales leave the sum at another place
        return
    for one, other in zip(fused, watched):
        assert all(torch.equal(a, b) for a, b in ((one.y, other.y), (one.dx, other.dx), (one.dw, other.dw)))


@DIMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_carriers_of_parts(dtype, dim):
    data = make(uneven, "BF16", (256, 256, 256))
    packed, plain = (parts(fp4_fold.recipe(packed=each), data, dtype, dim, 2, watched=False) for each in (True, False))
    for one, other in zip(packed, plain):
        assert all(torch.equal(a, b) for a, b in ((one.y, other.y), (one.dx, other.dx), (one.dw, other.dw)))


@pytest.mark.parametrize("watched", [True, False])
def test_a_block_far_below_its_row_on_another_rank(watched):
    """Its exponent hangs from the row's top, which is elsewhere, where W is zero: this block makes all of dX."""
    x, w, dy = make(plain_data, "FP32", (128, 128, 128))
    dy, w = dy * np.repeat([1, 2.0**-30], 64), w * np.repeat([0, 1], 64)[:, None]
    results = parts(RECIPES["mxfp4"], (x, w, dy), torch.float32, 0, 2, watched)
    assert_within(assembled(results, 0), ORACLE["mxfp4"](x, w, dy, format="FP32"), "FP32")


OUTLIERS = [(0.99, "carrier"), (0.6, "carrier"), (0.6, "residual"), (0.999, "residual")]


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("quantile, variant", OUTLIERS)
def test_quantiles_are_those_of_whole_rows(quantile, variant, spoilt):
    """More outliers than a part has columns, ties at the bound, outliers on one rank alone, NaN and infinity. Rows of
    zeros or faint numbers but for some on two ranks, and a row of zeros.
    """
    x, w, dy = make(heavy_tails, "BF16", (16, 64, 16))
    x[0], x[1, :16], x[2] = np.repeat([1.0, -1.0], 32), 1e3, np.round(x[2])
    x[8:10, 3:40], x[8:10, 42:], x[10] = 0.0, 0.0, 0.0
    x[11, 1:50] *= 2.0**-40
    x[11, 53:] *= 2.0**-40
    if spoilt:
        x[5, 3], x[6, 60], x[7, 20:30] = np.nan, np.inf, np.nan
    recipe = override(RECIPES["fp4"], {"fprop": {"outliers": {"quantile": quantile, "variant": variant}}})
    of = whole(recipe, (x, w, dy), torch.float32)
    for rank, part in enumerate(parts(recipe, (x, w, dy), torch.float32, 1, 4, watched=True)):
        for (operand, mine), (_, all_of_it) in zip(part.seen[:1], of.seen[:1]):
            wanted = all_of_it.codes.chunk(4, 1)[rank].float()
            numbers = all_of_it.scale.isfinite().flatten()
            assert operand == (Gemms.FPROP, Operand.A) and torch.equal(numbers, mine.scale.isfinite().flatten())
            exactly = {"rtol": 0, "atol": 0, "equal_nan": True}  # an infinite outlier is a NaN code in a finite row
            torch.testing.assert_close(mine.codes.float()[numbers], wanted[numbers], **exactly)
            assert torch.equal(mine.scale[numbers], all_of_it.scale[numbers])
        clean = of.y.isfinite()
        assert torch.equal(clean.all(1), part_rows(part, of, rank))


def part_rows(part: Ran, of: Ran, rank: int) -> Tensor:
    """Which rows of the whole y are numbers, with this rank's own answer for the rows that it holds."""
    rows = of.y.isfinite().all(1).clone()
    rows.chunk(4)[rank].copy_(part.y.isfinite().all(1))
    return rows


@DIMS
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "bf16"])
def test_what_is_no_number_on_one_rank_shows_on_all(name, dim):
    """A scale that is not finite in the whole is so in every part of its tile."""
    x, w, dy = make(plain_data, "BF16", SIZES)
    x[4, 9], w[6, 11], dy[5, 7] = np.nan, np.inf, np.nan
    of = whole(RECIPES[name], (x, w, dy), torch.float32)
    for rank, part in enumerate(parts(RECIPES[name], (x, w, dy), torch.float32, dim, 2, watched=True)):
        for (operand, mine), (_, all_of_it) in zip(part.seen, of.seen):
            at, expected = WHERE[operand].find("NK"[dim]), all_of_it.scale
            if at != -1 and expected.shape[at] > 1:
                expected = expected.chunk(2, at)[rank]
            assert torch.equal(mine.scale.isfinite(), expected.isfinite()), operand
    assert not of.dx.isfinite().all()


@DIMS
@pytest.mark.parametrize("name", ["bf16", "fp8", "fp4"])
def test_bias_and_leading_dimensions(name, dim):
    """A bias is cut with Y's columns, or added once to the sum; its gradient is the sum over the rows at hand."""
    x, w, dy = make(plain_data, "FP32", (32, 64, 64))
    b, (x_MK, dy_MN) = np.random.default_rng(1).standard_normal(64), tensors((x, w, dy), torch.float32)
    of = linear(RECIPES[name], w, b)
    want = of(x_MK)
    want.backward(dy_MN)

    def body(group: Group) -> tuple[Tensor, Tensor]:
        layer = linear(RECIPES[name], np.split(w, 2, dim)[group.rank], np.split(b, 2)[group.rank] if dim == 0 else b)
        layer.split = Split(dim=dim, group=group, whole=64)
        mine, back = x_MK.chunk(2, dim)[group.rank], dy_MN.chunk(2, 1 - dim)[group.rank]
        y = layer(mine.reshape((1, 16, 64) if dim == 0 else (4, 8, 32)))
        assert y.shape == ((1, 32, 32) if dim == 0 else (1, 16, 64))
        y.backward(back.view_as(y))
        assert layer.bias.grad is not None
        return y[0].detach(), layer.bias.grad

    made = among(2, body)
    gradient = torch.cat([g for _, g in made]) if dim == 0 else made[0][1] + made[1][1]
    torch.testing.assert_close(torch.cat([y for y, _ in made], 1 - dim), want.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, of.bias.grad, rtol=1e-5, atol=1e-5)


def test_maxima_that_were_left_are_taken_over_ranks():
    """The input's of a row-parallel layer, and those that a column-parallel layer hears of its gradient."""
    data = make(uneven, "BF16", (32, 64, 64))
    (x, dy), of = tensors(data, torch.bfloat16), whole(RECIPES["fp8"], data, torch.bfloat16, watched=False)

    def body(group: Group) -> tuple[Tensor, Tensor]:
        up = part_of(RECIPES["fp8"], data[1], 0, group)
        leaf = x.chunk(2)[group.rank].clone().requires_grad_()
        y, grad_amax = up.with_grad_amax(leaf)
        assert grad_amax is not None and grad_amax.shape == (32,)
        mine = dy.chunk(2, 1)[group.rank]
        torch.autograd.backward([y[0], grad_amax], [mine, mine.float().abs().amax(1)])
        down = part_of(RECIPES["fp8"], data[1], 1, group)
        row = x.chunk(2, 1)[group.rank]
        assert down.with_grad_amax(row)[1] is None
        left = down(row, row.float().abs().amax(1))
        assert torch.equal(left, down(row))
        assert up.weight.grad is not None
        return up.weight.grad, left[0].detach()

    dw, y = (torch.cat(each) for each in zip(*among(2, body)))
    assert torch.equal(dw, of.dw)
    torch.testing.assert_close(y, of.y, rtol=2e-2, atol=2e-2 * of.y.abs().max().item())


@DIMS
@pytest.mark.parametrize("name", one_of_a_kind_by_day(RECIPES))
def test_a_part_compiles_whole(name, dim):
    """One graph without a break, twice the same for two layers, and the bits of the eager pass. Some recipes
    by night.
    """
    torch._dynamo.reset()
    data = make(heavy_tails, "BF16", (128, 256, 256))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    x, dy = (each.chunk(2, cut)[1].contiguous() for each, cut in zip(tensors(data, torch.bfloat16), (dim, 1 - dim)))

    def passes(compiled: bool) -> Ran:
        layer = part_of(RECIPES[name], data[1], dim, MetaGroup(2, 1))
        run = torch.compile(layer, fullgraph=True, backend=counter) if compiled else layer
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.backward(dy.view_as(y))
        assert leaf.grad is not None and layer.weight.grad is not None
        return Ran(y.detach(), leaf.grad, layer.weight.grad, [])

    eager, *compiled = passes(False), passes(True), passes(True)
    assert counter.frame_count == 1
    for each in compiled:
        assert torch.equal(each.y, eager.y) and torch.equal(each.dx, eager.dx) and torch.equal(each.dw, eager.dw)
