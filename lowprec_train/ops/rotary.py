"""The gradient of queries, keys and values before a rotary embedding (arXiv 2104.09864).

A head's columns i and i + H/2 are a pair, which was rotated by the angle of its token; its gradient is rotated back.
The columns of the projection are in groups, one per key-value head: the G query heads that share it, its key, and its
value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient [m, K (G + 2) H] of the projection, in the dtype of dq.

    dq [m, K G H]; dk, dv [m, K H]: of the rotated queries and keys, and of the values, for sequences of T tokens one
    after the other. cos, sin [T, H / 2]: FP32. Raises ValueError for other shapes.
    """
    head, groups, _ = rotary_shape(dq, dk, dv, cos, sin)
    tokens, half = cos.shape
    cosines, sines = (table.view(1, tokens, 1, 1, half) for table in (cos, sin))

    def rotated_back(x: Tensor) -> Tensor:
        low, high = x.view(-1, tokens, groups, x.shape[1] // (groups * head), head).float().chunk(2, dim=-1)
        both = torch.cat((low * cosines + high * sines, high * cosines - low * sines), dim=-1)
        return both.to(x.dtype).flatten(0, 1)

    values = dv.view(-1, groups, 1, head)
    return torch.cat((rotated_back(dq), rotated_back(dk), values), dim=2).flatten(1)


def rotary_shape(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[int, int, int]:
    """Return H, K, and the number of columns K (G + 2) H. Raises ValueError if shapes do not fit."""
    (tokens, half), (rows, width) = cos.shape, dk.shape
    fits = cos.shape == sin.shape and dv.shape == dk.shape and dq.shape[0] == rows and 0 not in (tokens, half, width)
    if not fits or rows % tokens or width % (2 * half) or dq.shape[1] % width:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("dq", dq), ("dk", dk), ("dv", dv)))
        raise ValueError(f"rotary_backward: {shapes} do not fit cos {list(cos.shape)} and sin {list(sin.shape)}")
    return 2 * half, width // (2 * half), dq.shape[1] + 2 * width
