"""Attention on shards, the document mask, and which kernel runs."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowprec_train.model.attention import (
    Attention,
    _recorded_backend,
    attention_backend,
    document_mask,
    scaled_dot_product,
)
from lowprec_train.model.layers import Rotary


@pytest.mark.parametrize(("heads", "kv_heads", "shards"), [(8, 8, 4), (8, 4, 2), (8, 2, 2)])
def test_a_shard_of_the_groups_is_a_part_of_the_sum(heads: int, kv_heads: int, shards: int) -> None:
    whole = Attention(64, heads, kv_heads, bias=False)
    angles, x = Rotary(16, 64, 8, 10000.0).angles(16), torch.randn(2, 16, 64)
    qkv, out = whole.qkv.weight.data, whole.out.weight.data
    expected, total = whole(x, angles), torch.zeros(2, 16, 64)
    for rank in range(shards):  # as a tensor-parallel rank holds it: fewer rows of qkv, fewer columns of out
        whole.qkv.weight.data, whole.out.weight.data = qkv.chunk(shards, 0)[rank], out.chunk(shards, 1)[rank]
        total += whole(x, angles)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def test_document_mask_is_causal_within_documents() -> None:
    documents = torch.tensor([[5, 5, 2, 2], [1, 1, 1, 1]])
    expected = [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    ]
    assert document_mask(documents).int().tolist() == [[rows] for rows in expected]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_cpu_runs_its_flash_kernel(kv_heads: int, documents: bool) -> None:
    sizes = {"heads": 4, "kv_heads": kv_heads, "head_dim": 32, "seq_len": 64}
    assert attention_backend("cpu", **sizes, documents=documents) == "flash"


def test_the_reported_backend_is_what_ran_not_what_was_ranked() -> None:
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        plain = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert _recorded_backend(plain * 2) == "math"
    assert _recorded_backend(scaled_dot_product(q, q, q) * 2) == "flash"
    torch.testing.assert_close(scaled_dot_product(q, q, q), plain)


def test_the_ranking_does_not_leak() -> None:
    assert torch.backends.cuda.cudnn_sdp_enabled()
    before = torch._C._get_sdp_priority_order()
    attention_backend("cpu", heads=1, kv_heads=1, head_dim=8, seq_len=8)
    assert torch._C._get_sdp_priority_order() == before and torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [32, 8])
@pytest.mark.parametrize("compiled", [False, True])
def test_hopper_runs_cudnn(kv_heads: int, compiled: bool) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the preference is for compute capability 9.0")
    torch._dynamo.reset()
    assert attention_backend("cuda", heads=32, kv_heads=kv_heads, head_dim=128, seq_len=2048) == "cudnn"
    attention = Attention(4096, 32, kv_heads, bias=False).cuda()
    angles = tuple(table.cuda() for table in Rotary(256, 4096, 128, 10000.0).angles(256))
    forward = torch.compile(attention, fullgraph=True) if compiled else attention
    x = torch.randn(2, 256, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    forward(x, angles).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        forward(x, angles).sum().backward()
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if "cudnn" in event.key and "sdpa" in event.key]
    assert any("fprop" in name for name in kernels) and any("bprop" in name for name in kernels)
