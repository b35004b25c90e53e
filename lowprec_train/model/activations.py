"""SwiGLU's product between its two linears, as one op forward and one backward, which leave the maxima of their results
to the quantisers of these linears: `down` takes them with its input, `gate_up` hears them with its gradient
(`precision.linear.Linear.heard`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def gated_silu(gate_up: Tensor, ear: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """gate_up [..., 2 F], whose columns alternate gate, up -> (silu(gate) up [..., F], maxima FP32, one a row).

    ear: of the linear that made `gate_up`; its gradient will be the maxima of gate_up's gradient.
    """
    rows = gate_up.flatten(end_dim=-2)
    if torch.is_grad_enabled():
        y, maxima = _GatedSiLU.apply(rows, ear)
    else:  # a compiled Function without gradients loses its context
        y, maxima = torch.ops.lowprec.gated_silu(rows)
    return y.unflatten(0, gate_up.shape[:-1]), maxima


class _GatedSiLU(torch.autograd.Function):
    """gate_up [m, 2 F], ear [m] -> y [m, F], maxima [m]; keeps gate_up alone."""

    @staticmethod
    def forward(ctx, gate_up, ear):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate_up)
        y, maxima = torch.ops.lowprec.gated_silu(gate_up)
        ctx.mark_non_differentiable(maxima)
        return y, maxima

    @staticmethod
    def backward(ctx, dy, _):  # type: ignore[no-untyped-def]
        (gate_up,) = ctx.saved_tensors
        gradient, maxima = torch.ops.lowprec.gated_silu_backward(dy.contiguous(), gate_up)
        return gradient, maxima if ctx.needs_input_grad[1] else None
