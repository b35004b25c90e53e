"""SwiGLU's product between its two linears, as one op forward and one backward, which leave the amax of their results
to the quantisers of these linears: `down` takes them with its input, `gate_up` with its gradient
(`precision.linear.Linear.with_grad_amax`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def gated_silu(gate_up: Tensor, grad_amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """gate_up [..., 2 F], whose columns alternate gate, up -> (silu(gate) up [..., F], amax FP32, one a row).

    grad_amax: of the linear that made `gate_up`; its gradient will be the amax of gate_up's gradient.
    """
    rows = gate_up.flatten(end_dim=-2)
    if torch.is_grad_enabled():
        y, amax = _GatedSiLU.apply(rows, grad_amax)
    else:  # a compiled Function without gradients loses its context
        y, amax = torch.ops.lowprec.gated_silu(rows)
    return y.unflatten(0, gate_up.shape[:-1]), amax


class _GatedSiLU(torch.autograd.Function):
    """gate_up [m, 2 F], grad_amax [m] -> y [m, F], amax [m]; keeps gate_up alone."""

    @staticmethod
    def forward(ctx, gate_up, grad_amax):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate_up)
        y, amax = torch.ops.lowprec.gated_silu(gate_up)
        ctx.mark_non_differentiable(amax)
        return y, amax

    @staticmethod
    def backward(ctx, dy, _):  # type: ignore[no-untyped-def]
        (gate_up,) = ctx.saved_tensors
        gradient, amax = torch.ops.lowprec.gated_silu_backward(dy.contiguous(), gate_up)
        return gradient, amax if ctx.needs_input_grad[1] else None
