"""The parts that the whole decoder's FP64 reference does not show by themselves."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lowprec_train.model.layers import GELU, LayerNorm, RMSNorm, Rotary, SwiGLU, positions_in_document
from lowprec_train.model.rotary import rotate


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_bf16_norm_rounds_once(kind: type) -> None:
    norm = kind(64, 1e-5)
    x = (3 * torch.randn(5, 7, 64) + 1).bfloat16()
    double = x.double()
    if kind is LayerNorm:
        double = double - double.mean(-1, keepdim=True)
    expected = double / (double.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    y = norm(x)
    assert y.dtype is torch.bfloat16
    assert ((y.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-7).all()


def test_swiglu_interleaves_gate_and_up() -> None:
    net = SwiGLU(16, 24, bias=False)
    x = torch.randn(2, 3, 16)
    gate, up = net.gate_up.weight[0::2], net.gate_up.weight[1::2]
    expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), net.down.weight)
    torch.testing.assert_close(net(x), expected)


@pytest.mark.parametrize("kind", [SwiGLU, GELU])
def test_a_shard_of_the_hidden_width_is_a_part_of_the_sum(kind: type) -> None:
    whole, x = kind(16, 24, bias=False), torch.randn(2, 3, 16)
    total = torch.zeros(2, 3, 16)
    for rank in range(3):
        part = kind(16, 8, bias=False)
        for name, weight in part.named_parameters():
            dim = 1 if name.startswith("down") else 0
            weight.data.copy_(whole.get_parameter(name).chunk(3, dim)[rank])
        total += part(x)
    torch.testing.assert_close(total, whole(x))


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotary_tables_are_correctly_rounded(theta: float) -> None:
    rotary = Rotary(4096, 256, 64, theta)
    assert rotary.cos.dtype is torch.float32 and not rotary.state_dict()
    for position, i in [(0, 0), (1, 31), (517, 3), (4095, 0), (4095, 17)]:
        angle = position * theta ** (-2 * i / 64)
        assert rotary.cos[position, i].item() == pytest.approx(math.cos(angle), abs=2.0**-24)
        assert rotary.sin[position, i].item() == pytest.approx(math.sin(angle), abs=2.0**-24)


def test_rotation_keeps_lengths_and_sees_only_differences() -> None:
    angles = Rotary(64, 32, 32, 10000.0).angles(64)
    q, k = torch.randn(32), torch.randn(32)
    turned_q, turned_k = (rotate(x.expand(1, 64, 1, 32), angles)[0, :, 0] for x in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(64))
    scores = turned_q @ turned_k.T
    torch.testing.assert_close(scores[:-5, :-5], scores[5:, 5:], rtol=1e-4, atol=1e-4)
    assert (scores[0] - scores[0, 0]).abs().max() > 0.1


def test_positions_start_again_at_each_document() -> None:
    documents = torch.tensor([[4, 4, 4, 9, 9, 4], [0, 1, 1, 1, 1, 1]])
    assert positions_in_document(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
