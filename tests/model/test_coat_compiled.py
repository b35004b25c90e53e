"""Kept codes under the compiler: the same codes, the same gradients, however much is computed again, and few graphs.

Blocks in BF16 under `fp8` and COAT's policy. The backend aot_eager traces and partitions as Inductor does and runs the
operations as they are, so equal means equal; tests/test_compiled.py has Inductor's own kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from lowprec_train.model.transformer import Transformer
from lowprec_train.numerics.draws import Draws
from lowprec_train.precision.block_keep import BlockKeep, apply_block_keep
from lowprec_train.recipes import coat, fp8
from tests.recipes import GPT, LLAMA, build
from tests.test_compiled import content, recorded

FAMILIES = pytest.mark.parametrize("family", [LLAMA, GPT], ids=["llama", "gpt"])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made(family: Mapping[str, Any], **sizes: Any) -> tuple[Transformer, Draws]:
    model, draws = build(fp8.recipe(), family, **sizes)
    apply_block_keep(model, coat.keep())
    return model, draws


def step(model: Transformer, draws: Draws) -> dict[str, Tensor]:
    """The loss and the gradients of every parameter."""
    model.zero_grad()
    draws.begin(0, 0)
    tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(2))
    loss = model.loss(tokens, tokens.roll(-1, 1), float(tokens.numel()))
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@FAMILIES
def test_compiled_is_eager_bit_for_bit(family: Mapping[str, Any], recompute: str) -> None:
    expected = step(*made(family))
    model, draws = made(family, recompute=recompute)
    model.compile_blocks(backend="aot_eager")
    found = step(model, draws)
    assert found.keys() == expected.keys() and len(found) > 10
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@FAMILIES
def test_codes_are_made_in_forward_only_and_are_the_same(family: Mapping[str, Any]) -> None:
    """Of every operand and kept input: compiled for training, the graph's codes are eager's, each made once."""
    seen: dict[bool, list[Tensor]] = {}
    for compiled in (False, True):
        model, draws = made(family, layers=1)
        if compiled:
            model.compile_blocks(backend="aot_eager")
        with recorded(seen.setdefault(compiled, [])):
            step(model, draws)
    assert Counter(map(content, seen[True])) == Counter(map(content, seen[False]))
    kept = 4 if family is LLAMA else 3  # two norms, gate and up or GELU's input
    assert len(seen[True]) == 2 * (kept + 4 * 3)  # codes and scales; x, w and dy of four linears


def test_32_layers_share_a_graph_and_a_switch_adds_one() -> None:
    model, draws = made(LLAMA, layers=32, dim=64, ffn=64, heads=2, kv_heads=2)
    counter = torch._dynamo.testing.CompileCounter()
    model.compile_blocks(backend=counter)
    counts = []
    for keep in (coat.keep(), coat.keep(), BlockKeep(), coat.keep(), BlockKeep(norm=coat.keep().norm)):
        apply_block_keep(model, keep)
        step(model, draws)
        counts.append(counter.frame_count)
    first, again, without, back, norms = counts
    assert first <= 6 and again == first, counts
    assert 1 <= without - first <= 2 and back == without, counts
    assert 1 <= norms - back <= 2, counts
