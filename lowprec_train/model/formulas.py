"""Norms and activations as formulas with their derivatives, for layers that keep codes of their inputs only.

A layer that keeps its input leaves the derivative to autograd; one that keeps codes has to say it. All in FP32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class RMS:
    """y = n w with n = x / sqrt(mean(x^2) + eps) (arXiv 1910.07467)."""

    eps: float

    def forward(self, inputs: Tensors, parameters: Tensors) -> Tensor:
        return F.rms_norm(inputs[0], parameters[0].shape, parameters[0], self.eps)

    def backward(self, dy: Tensor, inputs: Tensors, parameters: Tensors) -> Tensors:
        rate = (inputs[0].square().mean(-1, keepdim=True) + self.eps).rsqrt()
        n, g = inputs[0] * rate, dy * parameters[0]
        dx = rate * (g - n * (g * n).mean(-1, keepdim=True))
        return dx, _sum(dy * n)


@dataclass(frozen=True)
class Normal:
    """y = n w (+ b) with n = (x - mean) / sqrt(var + eps) (arXiv 1607.06450)."""

    eps: float

    def forward(self, inputs: Tensors, parameters: Tensors) -> Tensor:
        weight, bias = parameters[0], parameters[1] if len(parameters) > 1 else None
        return F.layer_norm(inputs[0], weight.shape, weight, bias, self.eps)

    def backward(self, dy: Tensor, inputs: Tensors, parameters: Tensors) -> Tensors:
        centred = inputs[0] - inputs[0].mean(-1, keepdim=True)
        rate = (centred.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        n, g = centred * rate, dy * parameters[0]
        dx = rate * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
        return dx, *(_sum(dy * n), _sum(dy))[: len(parameters)]


@dataclass(frozen=True)
class GatedSiLU:
    """y = silu(gate) up (arXiv 2002.05202)."""

    def forward(self, inputs: Tensors, parameters: Tensors) -> Tensor:
        gate, up = inputs
        return F.silu(gate) * up

    def backward(self, dy: Tensor, inputs: Tensors, parameters: Tensors) -> Tensors:
        gate, up = inputs
        sigma = torch.sigmoid(gate)
        return dy * up * (sigma * (1 + gate * (1 - sigma))), dy * (gate * sigma)


@dataclass(frozen=True)
class TanhGELU:
    """y = x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3) (arXiv 1606.08415)."""

    def forward(self, inputs: Tensors, parameters: Tensors) -> Tensor:
        return F.gelu(inputs[0], approximate="tanh")

    def backward(self, dy: Tensor, inputs: Tensors, parameters: Tensors) -> Tensors:
        x, slope = inputs[0], math.sqrt(2 / math.pi)
        t = torch.tanh(slope * (x + 0.044715 * x * x * x))
        return (dy * 0.5 * (1 + t + x * (1 - t * t) * slope * (1 + 3 * 0.044715 * x * x)),)


def _sum(each: Tensor) -> Tensor:
    """Over all tokens."""
    return each.flatten(end_dim=-2).sum(0)
