"""Norms by apex: what its kernels of mixed dtypes compute, by a stand-in, is what our own norms compute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lowprec_train import nvidia
from lowprec_train.model.apex_norms import ApexLayerNorm, ApexRMSNorm
from lowprec_train.model.layers import LayerNorm, RMSNorm
from tests.recipes import build, system

PAIRS = {"rms": (RMSNorm, ApexRMSNorm, {}), "layer": (LayerNorm, ApexLayerNorm, {})}
PAIRS["layer without bias"] = (LayerNorm, ApexLayerNorm, {"bias": False})


@pytest.fixture
def calls(monkeypatch):
    """Shapes that the stand-in was called with. It returns FP32, as the mixed kernels do."""
    seen = []

    def rms(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
        seen.append(tuple(input.shape))
        assert weight.dtype == torch.float32 and tuple(normalized_shape) == tuple(weight.shape)
        return F.rms_norm(input.float(), weight.shape, weight, eps)

    def layer(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
        seen.append(tuple(input.shape))
        return F.layer_norm(input.float(), weight.shape, weight, bias, eps)

    made = SimpleNamespace(mixed_dtype_fused_rms_norm_affine=rms, mixed_dtype_fused_layer_norm_affine=layer)
    monkeypatch.setattr(nvidia, "apex_norms", lambda: made)
    return seen


@pytest.mark.parametrize("kind", PAIRS)
def test_values_and_gradients(calls, kind):
    own, theirs, options = PAIRS[kind]
    ours, apex = (norm(32, 1e-5, **options) for norm in (own, theirs))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        ours.weight.normal_(generator=generator)
        apex.weight.copy_(ours.weight)
    assert {name: p.shape for name, p in ours.named_parameters()} == {n: p.shape for n, p in apex.named_parameters()}
    results = []
    for norm in (ours, apex):
        x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        y = norm(x)
        y.square().sum().backward()
        results.append((y, x.grad, norm.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and results[1][0].dtype == torch.bfloat16
    assert calls == [(2, 8, 32)]


def test_a_model_computes_with_it(calls):
    """All norms of blocks and the last one; a compiled model breaks its graphs there."""
    one, other = (system("bf16", "llama_tiny", f"model.norm_backend={name}") for name in ("own", "apex"))
    tokens = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(1))
    assert torch.equal(one.model.logits(tokens), other.model.logits(tokens))
    assert len(calls) == 2 * 2 + 1 and other.model.breaks_graphs and not one.model.breaks_graphs
    assert one.model.state_dict().keys() == other.model.state_dict().keys()


def test_an_unknown_backend_is_refused():
    from lowprec_train.recipes import bf16

    with pytest.raises(ValueError, match="unknown norm_backend 'banana'; one of: own, apex"):
        build(bf16.recipe(), norm_backend="banana")
