"""COAT's table 2 (arXiv 2410.19313) for this code: what one block in the proportions of LLaMA 7B keeps.

A sixteenth of its widths and heads: D 4096, feed-forward 11008, 32 heads. U is a token in BF16: 2 D bytes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowprec_train.precision.saved_activations import SavedActivationPolicy, apply_saved_activations
from lowprec_train.recipes import coat, fp8
from tests.recipes import LLAMA, build

D, FFN, HEADS, TOKENS = 4096 // 16, 11008 // 16, 32 // 16, 64
U = 2 * D
SIZES = {"dim": D, "ffn": FFN, "heads": HEADS, "kv_heads": HEADS, "layers": 1}
CODED = 1 + 1 / 16  # bytes an element: E4M3, and an exponent for each group
PARTS = {
    "norms": 2 * D * CODED,
    "activation": 2 * FFN * CODED,
    "linears": 2 * D + FFN,  # none of the output projection, whose input attention saves
    "attention": 2 * 4 * D + 4 * HEADS,
}
COATS = {"norms": 1, "activation": 4, "linears": 3.33, "attention": 5}  # attention: RoPE 2, FlashAttention 3


def kept(keep: SavedActivationPolicy) -> float:
    """Bytes a token that autograd saved in the block, less parameters, rotary tables and weights' codes."""
    saved: list[Tensor] = []
    model, _ = build(fp8.recipe(), LLAMA, **SIZES)
    apply_saved_activations(model, keep)
    x = torch.randn(1, TOKENS, D).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        model.blocks[0](x, model.position.angles(TOKENS), None)
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    sizes = [size for pointer, size in storages.items() if pointer not in own]
    weights = sum(p.numel() for p in model.blocks[0].parameters() if p.ndim == 2)
    return (sum(size for size in sizes if size > 4) - weights) / TOKENS  # four bytes: the scale of a whole tensor


def test_a_block_keeps_the_sum_of_its_parts() -> None:
    assert kept(coat.saved_activations()) == sum(PARTS.values())


def test_the_policy_saves_what_it_takes() -> None:
    """Either role alone; eager layers without it keep two FP32 copies of a norm's input, and gate and up in BF16."""
    policy, rate = coat.saved_activations(), 4
    norms = 2 * (2 * 4 * D + rate) - PARTS["norms"]
    activation = 2 * 2 * FFN - PARTS["activation"]
    assert kept(SavedActivationPolicy(norm=policy.norm)) == sum(PARTS.values()) + activation
    assert kept(SavedActivationPolicy(activation=policy.activation)) == sum(PARTS.values()) + norms
    assert kept(SavedActivationPolicy()) == sum(PARTS.values()) + norms + activation


def test_it_is_less_than_coats_own() -> None:
    """Exponents are counted here and not there, hence 1.06 for the norms; silu is computed again, not kept."""
    units = {name: round(size / U, 2) for name, size in PARTS.items()}
    assert units == {"norms": 1.06, "activation": 2.86, "linears": 2.34, "attention": 4.02}
    assert sum(PARTS.values()) / U == pytest.approx(10.28, abs=0.01)
    assert sum(COATS.values()) == pytest.approx(13.33)
