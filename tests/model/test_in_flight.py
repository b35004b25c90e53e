"""Two micro-batches in flight, as a pipeline schedule has them: each backward pass and each recomputed forward pass
draws what its own first forward pass drew, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowprec_train.model.transformer import Transformer
from lowprec_train.numerics.draws import Draws, SeedTable
from lowprec_train.recipes import mxfp4, nvfp4
from tests.recipes import build

MICRO_BATCHES = [torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
RECIPES = {"mxfp4": mxfp4.recipe(), "nvfp4": nvfp4.recipe()}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def forward(model: Transformer, index: int, draws: Draws) -> Tensor:
    tokens = MICRO_BATCHES[index]
    return model.loss(tokens, tokens.roll(-1, 1), float(tokens.numel()), draws=draws)


def gradients(model: Transformer, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("recipe", "recompute", "compiled"),
    [
        *((recipe, recompute, False) for recipe in RECIPES for recompute in ("none", "selective", "full")),
        ("mxfp4", "full", True),
    ],
)
def test_interleaved_micro_batches_are_those_one_by_one(recipe: str, recompute: str, compiled: bool) -> None:
    model, seeds = build(RECIPES[recipe], layers=2, dim=64, ffn=64, heads=2, kv_heads=2, recompute=recompute)
    if compiled:
        model.compile_blocks(backend="aot_eager")
    draws = [seeds.at(3, first_token) for first_token in (0, 64)]
    apart = [gradients(model, forward(model, i, draws[i])) for i in range(2)]
    for order in ((0, 1), (1, 0)):
        losses = [forward(model, i, draws[i]) for i in range(2)]
        for i in order:
            assert same(gradients(model, losses[i]), apart[i]), (order, i)
    assert not same(gradients(model, forward(model, 0, draws[1])), apart[0]), "the draws change nothing"


def test_sites_are_rows_of_the_run_s_table() -> None:
    """Block by block and for the head, what a Linear draws from is the row that its place in the model gives it."""
    model, seeds = build(mxfp4.recipe(), layers=3, dim=64, ffn=64, heads=2, kv_heads=2)
    table, seen = seeds.at(5, 8), []
    for (first, count), block in zip(model.block_sites, model.blocks, strict=True):
        linears = [module for module in block.modules() if hasattr(module, "site")]
        assert len(linears) == count
        seen += [table.part(first, count).site(linear.site).seeds for linear in linears]
    seen.append(table.site(model.head.site).seeds)
    assert torch.equal(torch.stack(seen), table.seeds)


def test_a_run_s_model_is_not_called_without_draws() -> None:
    model, _ = build(mxfp4.recipe(), layers=1)
    tokens = MICRO_BATCHES[0]
    with pytest.raises(ValueError, match="needs draws"):
        model.loss(tokens, tokens, 1.0).backward()


def test_the_seeds_of_a_site_are_aligned_for_compiled_kernels() -> None:
    draws = SeedTable(1, 5).at(0, 0)
    assert {draws.site(i).seeds.data_ptr() % 16 for i in range(5)} == {draws.seeds.data_ptr() % 16}
