"""Parts of a decoder: norms, positions and feed-forward networks.

Each is an option of the configuration, a module that `Transformer` selects from a table by name. The residual stream is
BF16 (FP32 in tests); norms and activations compute in FP32 and round once to the stream's dtype, so that eager and
compiled runs give the same numbers to the following quantisers. Under a `SavedActivationPolicy` they compute from
rounded inputs and save the codes.

Shapes: B batch, T tokens, D model width, F feed-forward width, H head width, M maximal sequence length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.model.activations import (
    RMS,
    GatedSiLU,
    Normal,
    TanhGELU,
    gated_silu,
    quantized_gated_silu,
    quantized_gelu,
    quantized_norm,
)
from lowprec_train.model.rotary import Angles
from lowprec_train.numerics.draws import Draws
from lowprec_train.precision.linear import Linear, NormInput
from lowprec_train.precision.saved_activations import QuantizedSavedInput


class RMSNorm(QuantizedSavedInput):
    """y = x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467), in FP32, returned in x's dtype; without bias."""

    role, op = "norm", "quantized_norm"

    def __init__(self, dim: int, eps: float, bias: bool = False) -> None:
        super().__init__()
        self.eps, self.width = eps, dim
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.quantizer is not None:
            if self.fuses(x_BTD):
                return quantized_norm(x_BTD, self.weight, None, self.eps, False, self.quantizer, self.recomputes)[0]
            return self.through_codes(RMS(self.eps), (x_BTD,), (self.weight,))
        return F.rms_norm(x_BTD.float(), self.weight.shape, self.weight, self.eps).to(x_BTD.dtype)

    def norm_input(self, x_BTD: Tensor) -> NormInput:
        """Return what `forward` makes its result of, without gradients."""
        with torch.no_grad():
            rate_BT1 = torch.rsqrt(x_BTD.float().pow(2).mean(dim=-1, keepdim=True).add(self.eps))
        return NormInput(x_BTD, rate_BT1, self.weight.float())


class LayerNorm(QuantizedSavedInput):
    """y = (x - mean) / sqrt(var + eps) * weight + bias (arXiv 1607.06450), in FP32, returned in x's dtype."""

    role, op = "norm", "quantized_norm"

    def __init__(self, dim: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.eps, self.width = eps, dim
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.quantizer is not None:
            if self.fuses(x_BTD):
                return quantized_norm(x_BTD, self.weight, self.bias, self.eps, True, self.quantizer, self.recomputes)[0]
            parameters = (self.weight,) if self.bias is None else (self.weight, self.bias)
            return self.through_codes(Normal(self.eps), (x_BTD,), parameters)
        return F.layer_norm(x_BTD.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x_BTD.dtype)


class SwiGLU(QuantizedSavedInput):
    """down(silu(gate) * up) (arXiv 2002.05202). `gate_up` is one GEMM whose rows alternate gate, up: (F, 2).

    With interleaved rows, a tensor-parallel shard of the rows has whole (gate, up) pairs.
    """

    role, op, plain_op = "activation", "quantized_gated_silu", "gated_silu"
    fed_by, feeds = "gate_up", "down"
    fed_by_norm = fed_by

    def __init__(self, dim: int, ffn: int, bias: bool) -> None:
        super().__init__()
        self.width = ffn
        self.gate_up = Linear(dim, 2 * ffn, bias=bias)
        self.down = Linear(ffn, dim, bias=bias)

    def forward(self, x_BTD: Tensor, draws: Draws | None = None, *, norm_input: NormInput | None = None) -> Tensor:
        """norm_input: of x (`Linear.saves_norm_input`)."""
        given = x_BTD, draws, norm_input
        if self.quantizer is None:
            return self.down(*gated_silu(*self.gate_up.with_grad_codes_or_amax(*given)), draws=draws)
        if self.fuses(x_BTD):
            how = self.quantizer, self.recomputes
            return self.down(*quantized_gated_silu(*self.gate_up.with_grad_amax(*given), *how), draws=draws)
        gate_BTF, up_BTF = self.gate_up(x_BTD, draws=draws, norm_input=norm_input).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down(self.through_codes(GatedSiLU(), (gate_BTF, up_BTF), ()), draws=draws)


class GELU(QuantizedSavedInput):
    """down(gelu(up)) with the tanh form of GELU (arXiv 1606.08415), as GPT-2 and Megatron-LM train."""

    role, op = "activation", "quantized_gelu"
    fed_by, feeds = "up", "down"
    fed_by_norm = fed_by

    def __init__(self, dim: int, ffn: int, bias: bool) -> None:
        super().__init__()
        self.width = ffn
        self.up = Linear(dim, ffn, bias=bias)
        self.down = Linear(ffn, dim, bias=bias)

    def forward(self, x_BTD: Tensor, draws: Draws | None = None, *, norm_input: NormInput | None = None) -> Tensor:
        """norm_input: of x (`Linear.saves_norm_input`)."""
        if self.fuses(x_BTD):
            assert self.quantizer is not None
            how = self.quantizer, self.recomputes
            return self.down(*quantized_gelu(*self.up.with_grad_amax(x_BTD, draws, norm_input), *how), draws=draws)
        up_BTF = self.up(x_BTD, draws=draws, norm_input=norm_input)
        if self.quantizer is not None:
            return self.down(self.through_codes(TanhGELU(), (up_BTF,), ()), draws=draws)
        return self.down(F.gelu(up_BTF, approximate="tanh"), draws=draws)


class Rotary(nn.Module):
    """Rotary positions (arXiv 2104.09864): the pair (x_i, x_{i + H/2}) is rotated by t * theta^(-2i/H) at position t.

    scaling: of the frequencies, see `scaled_frequencies`.

    The tables are FP32, rounded from FP64 on the CPU, so they are equal on all devices. They are not saved; `reset`
    fills them after `to_empty`. Attention depends only on differences of positions, so packed documents need no
    restart.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, max_seq_len: int, dim: int, head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.theta, self.scaling = theta, scaling
        self.register_buffer("cos", torch.empty(max_seq_len, head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(max_seq_len, head_dim // 2), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        positions, half = self.cos.shape
        frequencies = self.theta ** -(torch.arange(half, dtype=torch.float64, device="cpu") / half)
        if self.scaling is not None:
            frequencies = scaled_frequencies(frequencies, self.scaling)
        turns = torch.outer(torch.arange(positions, dtype=torch.float64, device="cpu"), frequencies)
        self.cos.copy_(turns.cos())
        self.sin.copy_(turns.sin())

    def add(self, x_BTD: Tensor, documents_BT: Tensor | None, first: int = 0) -> Tensor:
        return x_BTD

    def angles(self, seq_len: int, first: int = 0) -> Angles:
        """Return the angles of positions first .. first + seq_len - 1."""
        return self.cos[first : first + seq_len], self.sin[first : first + seq_len]


ROPE_SCALINGS = {"llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}


def scaled_frequencies(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Return rotary frequencies f, FP64, scaled for longer sequences (Llama 3.1, arXiv 2407.21783).

    scaling: rope_type "llama3" and its parameters, named in `ROPE_SCALINGS`. A frequency with fewer than
    low_freq_factor turns within original_max_position_embeddings tokens is divided by `factor`, one with more than
    high_freq_factor turns is kept, and between them the two are interpolated linearly.

    Raises ValueError for another rope_type and for parameters that are missing, unknown or not positive.
    """
    if not isinstance(scaling, Mapping):
        raise ValueError(f"model.rope_scaling={scaling} must be a mapping, with a rope_type, or null")
    kind = scaling.get("rope_type")
    if kind not in ROPE_SCALINGS:
        raise ValueError(f"model.rope_scaling.rope_type={kind}: there is {', '.join(ROPE_SCALINGS)}")
    names = ROPE_SCALINGS[kind]
    if set(scaling) != {"rope_type", *names}:
        raise ValueError(f"model.rope_scaling={dict(scaling)}: {kind} takes {', '.join(names)}")
    if wrong := [name for name in names if not (isinstance(scaling[name], int | float) and scaling[name] > 0)]:
        raise ValueError(f"model.rope_scaling.{wrong[0]}={scaling[wrong[0]]} must be a number above 0")
    factor, low, high, length = (float(scaling[name]) for name in names)
    if not low < high:
        raise ValueError(f"model.rope_scaling: low_freq_factor={low} must be below high_freq_factor={high}")
    turns = length * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / factor)


class LearnedPositions(nn.Embedding):
    """One trained vector per position, added to the embedding. With documents, positions restart at each document."""

    def __init__(self, max_seq_len: int, dim: int, head_dim: int, theta: float) -> None:
        super().__init__(max_seq_len, dim)

    def add(self, x_BTD: Tensor, documents_BT: Tensor | None, first: int = 0) -> Tensor:
        """Add positions. first: position of the first token, if x is one document."""
        if documents_BT is None:
            return x_BTD + self.weight[first : first + x_BTD.shape[1]]
        return x_BTD + self(positions_in_document(documents_BT))

    def angles(self, seq_len: int, first: int = 0) -> None:
        return None


def positions_in_document(documents_BT: Tensor) -> Tensor:
    """Return the distance of each token to the first token of its document: [B, T] int64."""
    place_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = documents_BT.diff(dim=1, prepend=documents_BT[:, :1] - 1) != 0
    return place_T - torch.where(begins_BT, place_T, 0).cummax(dim=1).values
