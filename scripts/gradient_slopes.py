#!/usr/bin/env python
"""Effect of the format of dY on the size of gradients: slopes relative to BF16's, block by block.

    slope = sum over micro-batches of <g, g_BF16> / sum of <g_BF16, g_BF16>        1: same size

    python scripts/gradient_slopes.py [--layers 16] [--batches 8]

A LLaMA of random weights on random tokens, on the CPU, in about a minute. The recipe is `fp8`, with E5M2 and with E4M3
gradients (`+precision/gradient=e4m3`).
"""

from __future__ import annotations

import argparse

import torch

from lowprec_train.model.transformer import Architecture, Transformer
from lowprec_train.precision.policy import apply_policy
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.recipes import bf16, fp8

TOKENS, VOCABULARY = (4, 64), 256


def model(recipe: LinearRecipe, layers: int) -> Transformer:
    """Return the blocks under `recipe`, with the same weights each time."""
    sizes = Architecture(
        vocab_size=VOCABULARY, dim=128, layers=layers, heads=4, kv_heads=4, ffn=352, max_seq_len=TOKENS[1],
        norm="rmsnorm", activation="swiglu", positions="rotary", bias=False, tied=False,
    )  # fmt: skip
    made = Transformer(sizes)
    made.init_weights(0)
    apply_policy(made, {"blocks.*": recipe, "*": bf16.recipe()})
    return made


def gradients(recipe: LinearRecipe, layers: int, batch: int) -> list[torch.Tensor]:
    """Return the gradients of each block's weights, as one FP64 vector per block."""
    made = model(recipe, layers)
    tokens = torch.randint(0, VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(batch))
    made.loss(tokens, tokens.roll(-1, 1), float(tokens.numel())).backward()
    return [
        torch.cat([p.grad.flatten().double() for p in block.parameters() if p.grad is not None and p.ndim == 2])
        for block in made.blocks
    ]


def slopes(gradient: str, layers: int, batches: int) -> list[float]:
    """Return the slope of each block, and of all blocks last."""
    along, square = torch.zeros(layers, dtype=torch.float64), torch.zeros(layers, dtype=torch.float64)
    for batch in range(batches):
        exact = gradients(bf16.recipe(), layers, batch)
        for place, (g, e) in enumerate(
            zip(gradients(fp8.recipe(gradient=gradient), layers, batch), exact, strict=True)
        ):
            along[place] += g @ e
            square[place] += e @ e
    return [*(along / square).tolist(), (along.sum() / square.sum()).item()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batches", type=int, default=8)
    given = parser.parse_args()
    for gradient in ("E5M2", "E4M3"):
        *each, together = slopes(gradient, given.layers, given.batches)
        print(f"dY {gradient}: all {together:.4f}, first block {each[0]:.4f}, last block {each[-1]:.4f}")


if __name__ == "__main__":
    main()
