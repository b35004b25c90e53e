"""Norms and activations as formulas with their derivatives, for layers that keep codes of their inputs only.

A layer that keeps its input leaves the derivative to autograd; one that keeps codes has to say it. All in FP32; the
expressions are those of ops/producers.py, where they also are the meaning of the fused operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lowprec_train.ops import producers

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class RMS:
    """y = n w with n = x / sqrt(mean(x^2) + eps) (arXiv 1910.07467)."""

    eps: float

    def forward(self, inputs: Tensors, parameters: Tensors) -> Tensor:
        return producers.norm(inputs[0], parameters[0], None, self.eps, False)

    def backward(self, dy: Tensor, inputs: Tensors, parameters: Tensors) -> Tensors:
        return producers.norm_gradients(dy, inputs[0], parameters[0], self.eps, False)


@dataclass(frozen=True)
class Normal:
    """y = n w (+ b) with n = (x - mean) / sqrt(var + eps) (arXiv 1607.06450)."""

    eps: float

    def forward(self, inputs: Tensors, parameters: Tensors) -> Tensor:
        bias = parameters[1] if len(parameters) > 1 else None
        return producers.norm(inputs[0], parameters[0], bias, self.eps, True)

    def backward(self, dy: Tensor, inputs: Tensors, parameters: Tensors) -> Tensors:
        gradients = producers.norm_gradients(dy, inputs[0], parameters[0], self.eps, True)
        return gradients if len(parameters) == 1 else (*gradients, producers.over_tokens(dy))


@dataclass(frozen=True)
class GatedSiLU:
    """y = silu(gate) up (arXiv 2002.05202)."""

    def forward(self, inputs: Tensors, parameters: Tensors) -> Tensor:
        return producers.gated_silu(*inputs)

    def backward(self, dy: Tensor, inputs: Tensors, parameters: Tensors) -> Tensors:
        return producers.gated_silu_gradients(dy, *inputs)


@dataclass(frozen=True)
class TanhGELU:
    """y = x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3) (arXiv 1606.08415)."""

    def forward(self, inputs: Tensors, parameters: Tensors) -> Tensor:
        return producers.tanh_gelu(inputs[0])

    def backward(self, dy: Tensor, inputs: Tensors, parameters: Tensors) -> Tensors:
        return (producers.tanh_gelu_gradient(dy, inputs[0]),)
