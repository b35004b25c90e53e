"""Parts of newer decoders against formulas written out: scaled rotary frequencies, norms of queries and keys, norms
behind a layer, heads of a width of their own.
"""

import math

import numpy as np
import pytest
import torch

from lowprec_train.model.architecture import Architecture
from lowprec_train.model.attention import FullQKNorm, QKNorm
from lowprec_train.model.layers import Rotary, scaled_frequencies
from lowprec_train.model.transformer import Transformer

SIZES = {"vocab_size": 64, "dim": 48, "layers": 1, "heads": 6, "kv_heads": 2, "ffn": 64, "max_seq_len": 32}
LLAMA = SIZES | {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False, "tied": False}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


def test_frequencies_are_scaled_by_their_wavelengths():
    """Llama 3.1 8B, wave by wave: long ones by 8, short ones not, those between by their share."""
    frequencies = 500_000.0 ** -(torch.arange(64, dtype=torch.float64) / 64)
    expected = []
    for f in frequencies.tolist():
        wave = 2 * math.pi / f
        if wave > 8192 / 1.0:
            expected.append(f / 8)
        elif wave < 8192 / 4.0:
            expected.append(f)
        else:
            share = (8192 / wave - 1.0) / (4.0 - 1.0)
            expected.append((1 - share) * f / 8 + share * f)
    found = scaled_frequencies(frequencies, LLAMA3)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-14)
    assert len({round(float(r), 6) for r in found / frequencies}) > 5


def test_scaled_tables_survive_new_memory():
    rotary = Rotary(16, 48, 8, 500.0, LLAMA3 | {"original_max_position_embeddings": 16})
    before = rotary.cos.clone()
    rotary.cos.zero_()
    rotary.reset()
    assert torch.equal(rotary.cos, before) and not torch.equal(before, Rotary(16, 48, 8, 500.0).cos)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_type": "yarn"}, "rope_type=yarn: there is llama3"),
        ({"factor": 0.0}, "factor=0.0 must be a number above 0"),
        ({"factor": "eight"}, "factor=eight must be"),
        ({"beta_fast": 32}, "llama3 takes factor, low_freq_factor"),
        ({"high_freq_factor": 0.5}, "low_freq_factor=1.0 must be below high_freq_factor=0.5"),
    ],
)
def test_bad_scalings_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        Rotary(16, 48, 8, 500.0, LLAMA3 | change)


def normed(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def test_norms_of_queries_and_keys_go_over_a_head_or_over_all():
    torch.manual_seed(0)
    q, k = torch.randn(1, 3, 2, 3, 8, dtype=torch.float64), torch.randn(1, 3, 2, 1, 8, dtype=torch.float64)
    for kind, shapes in ((QKNorm, (8, 8)), (FullQKNorm, (48, 16))):
        attention = kind(48, 6, 2, False, norm_eps=1e-3).double()
        assert (attention.q_norm.weight.numel(), attention.k_norm.weight.numel()) == shapes
        for parameter in attention.parameters():
            parameter.data.uniform_(0.5, 2.0)
        for found, x, norm in zip(attention.queries_and_keys(q, k), (q, k), (attention.q_norm, attention.k_norm)):
            rows = x.numpy().reshape(1, 3, -1, norm.weight.numel())
            expected = normed(rows, norm.weight.detach().numpy(), 1e-3).reshape(x.shape)
            np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5)


def test_norms_behind_a_layer():
    """x + norm(attention(x)), then x + norm(mlp(x))."""
    model = Transformer(Architecture(**LLAMA, norm_placement="post"), dtype=torch.float32)
    model.init_weights(0)
    (block,) = model.blocks
    for norm in (block.attention_norm, block.mlp_norm):
        norm.weight.data.uniform_(0.5, 2.0)
    x, angles = torch.randn(2, 5, 48), model.position.angles(5)
    middle = x + block.attention_norm(block.attention(x, angles))
    assert torch.equal(block(x, angles, None), middle + block.mlp_norm(block.mlp(middle)))


def test_wide_heads_and_biases_of_queries_keys_and_values_alone():
    model = Transformer(Architecture(**LLAMA, head_dim=16, qkv_bias=True))
    shapes = {name: tuple(p.shape) for name, p in model.blocks[0].attention.named_parameters()}
    assert shapes == {"qkv.weight": (160, 48), "qkv.bias": (160,), "out.weight": (48, 96)}
    assert model.position.cos.shape[1] == 8 and model.attention_flops_per_token(10) == 3 * 2 * 2 * 6 * 16 * 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm_placement": "sandwich"}, "unknown norm_placement 'sandwich'; one of: pre, post"),
        ({"head_dim": -8}, "head width -8 must be a positive"),
        ({"head_dim": 12}, "head_dim 12: .* the head width 12 must be a positive multiple of 8"),
        ({"heads": 5}, "dim 48, heads 5, kv_heads 2, head_dim None: heads must divide dim"),
        ({"positions": "learned", "rope_scaling": LLAMA3}, "LearnedPositions takes no scaling"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        Transformer(Architecture(**LLAMA | change))
