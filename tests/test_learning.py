"""A task that no dead or wrong network can pass: repeat the symbol seen eight positions ago.

64 symbols, drawn independently: nothing but attention over eight positions gets below log 64 = 4.16 nats.
"""

from __future__ import annotations

import pytest
import torch

from lowprec_train.optim.adamw import AdamW, parameter_groups
from tests.recipes import GPT, LLAMA, RECIPES, build

LAG, SYMBOLS, BATCH, LENGTH = 8, 64, 16, 64


def losses(recipe_name: str, family, steps: int, goal: float, **sizes):
    """Losses of up to `steps` steps; ends early once three in a row are below the goal."""
    model, draws = build(RECIPES[recipe_name], family, **sizes)
    optimizer = AdamW(parameter_groups(model, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    generator = torch.Generator().manual_seed(1)
    seen: list[float] = []
    for step in range(steps):
        tokens = torch.randint(0, SYMBOLS, (BATCH, LENGTH), generator=generator)
        targets = tokens.roll(LAG, dims=1)
        targets[:, :LAG] = -100
        draws.begin(step, 0)
        optimizer.set_lr(3e-3 * min(1.0, (step + 1) / 20))
        loss = model.loss(tokens, targets, float(BATCH * (LENGTH - LAG)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
        if max(seen[-3:]) < goal and len(seen) >= 3:
            break
    return seen


CASES = [(recipe, "llama") for recipe in RECIPES] + [(recipe, "gpt") for recipe in ("bf16", "fp8", "fp4", "mxfp4")]


@pytest.mark.parametrize(("recipe", "name"), CASES)
def test_recipe_learns_to_copy(recipe, name):
    family = {"llama": LLAMA, "gpt": GPT}[name]
    seen = losses(recipe, family, steps=150, goal=0.1)
    assert seen[0] > 4
    assert min(seen) < 0.1, f"{recipe}: {seen[-5:]} after {len(seen)} steps"


def test_model_without_blocks_cannot_copy():
    seen = losses("bf16", GPT, steps=60, goal=0.1, layers=0)
    assert min(seen) > 4
