"""Master weights: the precision that updates are added in.

    FP32   the parameter itself                                                            4 bytes a parameter
    FP16   codes * 2^e, one e a tensor (FP8-LM, arXiv 2310.18313, section 2.2)              2 bytes and the parameter
    BF16   the parameter itself, rounded stochastically (arXiv 2010.06192)                  2 bytes

With the last two, a matrix's parameter is BF16: the rounding of its master that GEMMs take.

What becomes of an update that is small beside its weight, measured by adding 1e-4 of it 1,000 times (tests/optim/
test_master.py): rounding to nearest drops or doubles an update near half a step. FP16's step is 2^-11 to 2^-10 of a
normal number, so an update of 1e-4 is below half of it (2.4e-4 to 4.9e-4) always. Stochastic rounding keeps every
update on average and pays with a random walk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lowprec_train.numerics.formats import BF16, FP16, NEAREST, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops.updates import STREAM, seeds
from lowprec_train.optim.moments import Parts, under_one_scale

__all__ = ["STREAM", "BF16Master", "FP16Master", "FP32Master", "Master", "seeds"]


class Master(Protocol):
    """Stores a weight matrix w [n, k] between two steps, part of it in the parameter."""

    @property
    def parameter_dtype(self) -> torch.dtype:
        """dtype of a matrix's parameter."""
        ...

    @property
    def stochastic(self) -> bool:
        """Whether `encode` needs a seed."""
        ...

    @property
    def one_scale(self) -> bool:
        """Whether the largest magnitude of the whole matrix matters to every code."""
        ...

    def encode(
        self,
        w: Tensor,
        seed: Tensor | None = None,
        origin: Tensor | None = None,
        *,
        amax: Tensor | None = None,
    ) -> tuple[Tensor, Parts]:
        """w FP32 -> the parameter's new value, and what the optimizer keeps.

        seed: 0-dim int64. Where w is a part of the matrix: origin, int64 [2], global row and column of w[0, 0], the
        column a multiple of 8; amax, FP32 [1, 1], the largest magnitude of the whole.
        """
        ...

    def decode(self, parameter: Tensor, parts: Parts) -> Tensor:
        """FP32 [n, k]."""
        ...

    def along(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts that lie along a matrix of `shape` and are cut with it, as of a Codec."""
        ...

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        """What the optimizer keeps of a matrix of `shape`, beside the parameter."""
        ...


@dataclass(frozen=True)
class FP32Master:
    """The parameter is the master."""

    parameter_dtype: torch.dtype = field(default=torch.float32, init=False)
    stochastic: bool = field(default=False, init=False)
    one_scale: bool = field(default=False, init=False)

    def encode(
        self, w: Tensor, seed: Tensor | None = None, origin: Tensor | None = None, *, amax: Tensor | None = None
    ) -> tuple[Tensor, Parts]:
        return w, {}

    def decode(self, parameter: Tensor, parts: Parts) -> Tensor:
        return parameter

    def along(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {}

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        return 0


@dataclass(frozen=True)
class FP16Master:
    """FP16 codes under one power of two; the parameter is their BF16 rounding.

    stochastic: round the codes so; False is the published rounding to nearest.
    """

    stochastic: bool = True
    parameter_dtype: torch.dtype = field(default=torch.bfloat16, init=False)
    one_scale: bool = field(default=True, init=False)

    def encode(
        self, w: Tensor, seed: Tensor | None = None, origin: Tensor | None = None, *, amax: Tensor | None = None
    ) -> tuple[Tensor, Parts]:
        quantizer = Quantizer(FP16, scale=ScaleRule.POW2, rounding=STOCHASTIC if self.stochastic else NEAREST)
        codes, scale = under_one_scale(w, quantizer, amax, seed if self.stochastic else None, origin)
        rounded = torch.ops.lowprec.dequantize(codes, scale)
        return rounded.to(torch.bfloat16), {"codes": codes, "scale": scale}

    def decode(self, parameter: Tensor, parts: Parts) -> Tensor:
        return torch.ops.lowprec.dequantize(parts["codes"], parts["scale"])

    def along(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"codes": shape}

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        return 2 * torch.Size(shape).numel() + 4


@dataclass(frozen=True)
class BF16Master:
    """The parameter is the master, in BF16; stochastic rounding keeps updates below its step of 2^-8 on average."""

    parameter_dtype: torch.dtype = field(default=torch.bfloat16, init=False)
    stochastic: bool = field(default=True, init=False)
    one_scale: bool = field(default=False, init=False)

    def encode(
        self, w: Tensor, seed: Tensor | None = None, origin: Tensor | None = None, *, amax: Tensor | None = None
    ) -> tuple[Tensor, Parts]:
        return Quantizer(BF16, rounding=STOCHASTIC)(w, seed, origin).codes, {}

    def decode(self, parameter: Tensor, parts: Parts) -> Tensor:
        return parameter.float()

    def along(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {}

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        return 0
