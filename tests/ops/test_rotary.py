"""The gradient of rotary positions in one op is what autograd computes from the rotation."""

from __future__ import annotations

import pytest
import torch

from lowprec_train.model.rotary import queries_keys_values, rotate
from lowprec_train.ops import library  # noqa: F401

SIZES = [(2, 5, 2, 3, 8), (1, 4, 1, 1, 64), (3, 2, 4, 1, 6)]  # B, T, K, G, H


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_gradient_is_that_of_autograd(sizes, dtype):
    batch, tokens, groups, queries, head = sizes
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(batch, tokens, groups * (queries + 2) * head, generator=generator).to(dtype).requires_grad_()
    angles = torch.randn(2, tokens, head // 2, generator=generator).unbind()
    q, k, v = queries_keys_values(qkv, queries, head)
    outputs = rotate(q, angles), rotate(k, angles), v.contiguous()
    gradients = [torch.randn(each.shape, generator=generator).to(dtype) for each in outputs]
    torch.autograd.backward(outputs, gradients)
    dx = torch.ops.lowprec.rotary_backward(*(each.flatten(2).flatten(0, 1) for each in gradients), *angles)
    assert torch.equal(dx.view_as(qkv), qkv.grad)


@pytest.mark.parametrize(
    "part, cut",
    [
        (0, (slice(None), slice(4))),
        (2, slice(3)),
        (3, slice(2)),
        (4, slice(1)),
        (3, slice(0)),
        (1, (slice(None), slice(0))),
    ],
)
def test_shapes_that_do_not_fit_are_an_error(part, cut):
    given = [torch.ones(6, 16), torch.ones(6, 8), torch.ones(6, 8), torch.ones(3, 2), torch.ones(3, 2)]
    given[part] = given[part][cut]
    shape = str(list(given[part].shape)).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(ValueError, match=f"rotary_backward: .*{shape}"):
        torch.ops.lowprec.rotary_backward(*given)
