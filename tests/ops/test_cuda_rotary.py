"""The CUDA kernels of the gradient of rotary positions against their meaning in plain PyTorch on the CPU: the same bits
of the gradient, of its codes and of its scales, for the head sizes of the fused kernel and others.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowprec_train.ops import library
from tests.ops.test_cuda_rotate import KINDS, SIGNS, assert_same, matrix

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
# tokens, sequences, H, K, G: one and several rows a block, rows of parts of a warp, and of 28672 columns and more
SHAPES = [
    (9, 1, 64, 1, 1),
    (7, 3, 64, 3, 2),
    (5, 2, 128, 2, 4),
    (3, 300, 128, 2, 1),
    (6, 2, 256, 1, 2),
    (8, 2, 128, 32, 1),
    (3, 3, 128, 8, 26),
    (3, 3, 128, 8, 27),
    (5, 2, 96, 2, 2),
    (5, 2, 16, 5, 3),
]


@pytest.fixture(autouse=True)
def live() -> None:
    if library.live_kernels(CUDA)["rotary_backward_ladder"] != "CUDA":
        pytest.skip("no CUDA kernel of rotary_backward_ladder is built (make kernels)")


def inputs(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> list[Tensor]:
    tokens, sequences, head, groups, queries = shape
    rows, width = tokens * sequences, groups * head
    turns = torch.outer(torch.arange(tokens), torch.linspace(1, 0.01, head // 2))
    gradients = [matrix(kind, rows, columns, dtype) for columns in (width * queries, width, width)]
    return [*gradients, turns.cos(), turns.sin()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_and_its_codes(shape, kind):
    for dtype in (torch.bfloat16, torch.float32):
        given = inputs(shape, kind, dtype)
        want = torch.ops.lowprec.rotary_backward(*given)
        moved = [each.to(CUDA) for each in given]
        assert_same(torch.ops.lowprec.rotary_backward(*moved), want)
        for rotation in (each for each in (0, 32, 128) if not each or want.shape[1] % each == 0):
            how = (rotation, 0.125 if rotation else 1.0, (1, 16), "mse", 11)
            for corrected in (True, False):
                signs = SIGNS if rotation else None
                codes = torch.ops.lowprec.rotate_fold_ladder(want, None, False, signs, *how, corrected)
                signs = None if signs is None else signs.to(CUDA)
                got = torch.ops.lowprec.rotary_backward_ladder(*moved, signs, *how, corrected)
                for a, b in zip(got, (want, *codes), strict=True):
                    assert_same(a, b)


def test_gradients_that_are_views():
    """A gradient of attention is [B, heads, T, H] in memory, or a part of a larger tensor."""
    dq, dk, dv, cos, sin = inputs((8, 2, 128, 2, 2), "normal", torch.bfloat16)
    want = torch.ops.lowprec.rotary_backward(dq, dk, dv, cos, sin)
    apart = torch.cat((dk, dv), 1).to(CUDA).split(dk.shape[1], dim=1)
    tables = (torch.cat((each, each)).to(CUDA)[8:] for each in (cos, sin))
    assert_same(torch.ops.lowprec.rotary_backward(dq.to(CUDA), *apart, *tables), want)


def test_shapes_that_do_not_fit_are_an_error():
    dq, dk, dv, cos, sin = (each.to(CUDA) for each in inputs((8, 2, 128, 2, 2), "normal", torch.bfloat16))
    for wrong in ((dq[:, :64], dk, dv, cos, sin), (dq, dk, dv[:8], cos, sin), (dq, dk, dv, cos[:3], sin[:3])):
        with pytest.raises(Exception, match="rotary_backward"):
            torch.ops.lowprec.rotary_backward(*wrong)
