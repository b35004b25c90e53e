"""The codes of a block under `fp8` and COAT's policy: a compiled graph makes eager's, each of them once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lowprec_train.model.transformer import Transformer
from lowprec_train.numerics.draws import SeedTable
from lowprec_train.precision.saved_activations import apply_saved_activations
from lowprec_train.recipes import coat, fp8
from tests.recipes import GPT, LLAMA, build
from tests.test_compiled import content, recorded


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(model: Transformer, seeds: SeedTable) -> None:
    tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(2))
    model.loss(tokens, tokens.roll(-1, 1), float(tokens.numel()), draws=seeds.at(0, 0)).backward()


@pytest.mark.parametrize("family", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_compiled_step_makes_the_same_codes(family: Mapping[str, Any]) -> None:
    seen: dict[bool, list[Tensor]] = {}
    for compiled in (False, True):
        model, seeds = build(fp8.recipe(), family, layers=1)
        apply_saved_activations(model, coat.saved_activations())
        if compiled:
            model.compile_blocks(backend="aot_eager")
        with recorded(seen.setdefault(compiled, [])):
            step(model, seeds)
    assert Counter(map(content, seen[True])) == Counter(map(content, seen[False]))
    kept = 4 if family is LLAMA else 3  # two norms, gate and up or GELU's input
    assert len(seen[True]) == 2 * (kept + 2 * 4 * 3)  # codes and scales; x, w and dy of four linears in both layouts
