"""SwiGLU between two linears: the product, its gradient, and what a per-tensor quantiser behind them wants to know.

    y = silu(gate) up          the columns of `gate_up` [m, 2 F] alternate gate, up
    amax                     the largest magnitude of each row of what comes out

FP32 inside, one rounding to the stream's dtype (arXiv 2002.05202). Nothing but `gate_up` is needed for the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.ops.producers import gated_silu as formula
from lowprec_train.ops.producers import gated_silu_gradients


def gated_silu(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up [m, 2 F] -> y [m, F] in its dtype, amax FP32 [m]."""
    gate, up = gate_up.float().unflatten(1, (-1, 2)).unbind(2)
    return _with_amax(formula(gate, up).to(gate_up.dtype))


def gated_silu_backward(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """dy [m, F] -> the gradient of `gate_up` [m, 2 F] in dy's dtype, amax FP32 [m]."""
    gate, up = gate_up.float().unflatten(1, (-1, 2)).unbind(2)
    gradients = gated_silu_gradients(dy.float(), gate, up)
    return _with_amax(torch.stack(gradients, dim=2).flatten(1).to(dy.dtype))


def _with_amax(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, y.abs().amax(dim=1).float()
