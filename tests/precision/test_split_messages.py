"""What ranks of a split linear layer send each other: codes where both GEMMs that need them share them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowprec_train.group import Group
from tests.groups import Recorded, among
from tests.precision.layers import heavy_tails, make
from tests.precision.split_layers import Ran, part_of, ran, tensors, whole
from tests.recipes import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_rows_travel_as_codes_where_nothing_else_of_them_is_needed(name):
    """A byte an element into the layer, BF16 out of it again; a scale a row where rows have their own."""
    x, w, dy = make(heavy_tails, "BF16", (128, 256, 256))
    of = whole(RECIPES[name], (x, w, dy), torch.bfloat16, watched=False)

    def body(group: Group) -> tuple[Ran, list[tuple[str, torch.dtype, int]]]:
        counted = Recorded(group)
        mine = [each.chunk(2, at)[group.rank] for each, at in zip(tensors((x, w, dy), torch.bfloat16), (0, 1))]
        return ran(part_of(RECIPES[name], w, 0, counted), *mine, watched=False), counted.sent

    results, sent = zip(*among(2, body))
    rows = [each for each in sent[0] if each[2] >= 64]
    if name in ("fp8", "mxfp4_fp8", "fp8_eden4", "fp4", "fp4_unclamped", "fp4_fold", "w4a8"):
        codes = [("all_gather", torch.float8_e4m3fn, 64 * 256), ("reduce_scatter", torch.bfloat16, 128 * 256)]
        scales = [("all_gather", torch.float32, 64)] if name.startswith("fp4") else []
        assert [each for each in rows if not each[0].startswith("all_reduce")] == scales + codes
    else:
        assert ("all_gather", torch.bfloat16, 64 * 256) in rows
    if not name.startswith("mxfp4"):  # folded carriers: scales leave the sum at another place
        assert torch.equal(torch.cat([each.y for each in results], 1), of.y)


@pytest.mark.parametrize("name", RECIPES)
def test_dy_of_a_row_parallel_layer_travels_as_codes_if_both_gemms_share_them(name):
    """A byte an element and one maximum instead of two bytes; y leaves in BF16 either way, and dX is the same."""
    x, w, dy = make(heavy_tails, "BF16", (128, 256, 256))
    of = whole(RECIPES[name], (x, w, dy), torch.bfloat16, watched=False)

    def body(group: Group) -> tuple[Ran, list[tuple[str, torch.dtype, int]]]:
        counted = Recorded(group)
        mine = [each.chunk(2, at)[group.rank] for each, at in zip(tensors((x, w, dy), torch.bfloat16), (1, 0))]
        return ran(part_of(RECIPES[name], w, 1, counted), *mine, watched=False), counted.sent

    results, sent = zip(*among(2, body))
    rows = [each for each in sent[0] if each[2] >= 64 * 256]
    dtype = torch.float8_e5m2 if name in ("fp8", "fp4_mixed") else torch.bfloat16
    assert rows == [("reduce_scatter", torch.bfloat16, 128 * 256), ("all_gather", dtype, 64 * 256)]
    if dtype is not torch.bfloat16:
        assert sent[0][sent[0].index(rows[1]) - 1] == ("all_reduce_max", torch.float32, 1)
        assert torch.equal(torch.cat([each.dx for each in results], 1), of.dx)
        assert torch.equal(torch.cat([each.dw for each in results], 1), of.dw)


@pytest.mark.parametrize("needed", ["x", "weight"])
def test_one_gradient_of_a_row_parallel_layer_without_the_other(needed):
    """Frozen weights, or an input that needs no gradient: the rows of dY are gathered for one GEMM."""
    x, w, dy = make(heavy_tails, "BF16", (128, 256, 256))
    of = whole(RECIPES["fp8"], (x, w, dy), torch.bfloat16, watched=False)

    def body(group: Group) -> Tensor:
        layer = part_of(RECIPES["fp8"], w, 1, group)
        layer.weight.requires_grad_(needed == "weight")
        mine, back = (each.chunk(2, at)[group.rank] for each, at in zip(tensors((x, w, dy), torch.bfloat16), (1, 0)))
        leaf = mine.contiguous().requires_grad_(needed == "x")
        y = layer(leaf)
        y.backward(back.view_as(y))
        found = leaf.grad if needed == "x" else layer.weight.grad
        assert found is not None and (leaf.grad is None) == (needed != "x")
        return found

    assert torch.equal(torch.cat(among(2, body), 1), of.dx if needed == "x" else of.dw)
