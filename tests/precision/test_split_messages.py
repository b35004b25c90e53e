"""What the ranks of a tensor-parallel linear layer send: codes of X or dY if the GEMMs that need them share them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowprec_train.group import Group
from tests.groups import Recorded, among
from tests.precision.layers import heavy_tails, make
from tests.precision.split_layers import Ran, part_of, ran, tensors, whole
from tests.recipes import RECIPES

Message = tuple[str, torch.dtype, int]  # collective, dtype, elements


def on_two_ranks(name: str, dim: int) -> tuple[Ran, list[Ran], list[Message]]:
    """Run a layer whole and split along `dim` of its weight. Returns both results, and what rank 0 sent."""
    x, w, dy = make(heavy_tails, "BF16", (128, 256, 256))

    def body(group: Group) -> tuple[Ran, list[Message]]:
        recorded = Recorded(group)
        both = zip(tensors((x, w, dy), torch.bfloat16), (dim, 1 - dim))
        mine = [each.chunk(2, at)[group.rank] for each, at in both]
        return ran(part_of(RECIPES[name], w, dim, recorded), *mine, watched=False), recorded.sent

    results, sent = zip(*among(2, body))
    return whole(RECIPES[name], (x, w, dy), torch.bfloat16, watched=False), list(results), sent[0]


@pytest.mark.parametrize("name", RECIPES)
def test_x_is_gathered_as_codes_if_nothing_else_of_it_is_needed(name):
    """One byte per element into the layer, and BF16 out of it; one scale per row if rows have scales."""
    of, results, sent = on_two_ranks(name, 0)
    rows = [each for each in sent if each[2] >= 64]
    if name in ("fp8", "mxfp4_fp8", "fp8_eden4", "fp4", "fp4_unclamped", "fp4_fold", "w4a8"):
        codes = [("all_gather", torch.float8_e4m3fn, 64 * 256), ("reduce_scatter", torch.bfloat16, 128 * 256)]
        scales = [("all_gather", torch.float32, 64)] if name.startswith("fp4") else []
        assert [each for each in rows if not each[0].startswith("all_reduce")] == scales + codes
    else:
        assert ("all_gather", torch.bfloat16, 64 * 256) in rows
    if not name.startswith("mxfp4"):  # folded carriers: scales leave the sum at another place
        assert torch.equal(torch.cat([each.y for each in results], 1), of.y)


@pytest.mark.parametrize("name", RECIPES)
def test_dy_of_a_row_parallel_layer_is_gathered_as_codes_if_both_gemms_share_them(name):
    """One byte per element and an amax, instead of two bytes; Y is reduced in BF16 either way. dX, dW are the same."""
    of, results, sent = on_two_ranks(name, 1)
    rows = [each for each in sent if each[2] >= 64 * 256]
    dtype = torch.float8_e5m2 if name in ("fp8", "fp4_mixed") else torch.bfloat16
    assert rows == [("reduce_scatter", torch.bfloat16, 128 * 256), ("all_gather", dtype, 64 * 256)]
    if dtype is not torch.bfloat16:
        assert sent[sent.index(rows[1]) - 1] == ("all_reduce_max", torch.float32, 1)
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
