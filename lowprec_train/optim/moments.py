"""Codecs of Adam's moments: how a matrix [n, k] of FP32 numbers is stored between two steps.

    plain      FP32, or its BF16 rounding                                            4 or 2 bytes a parameter
    scaled     codes * 2^e, one e a tensor: m in E4M3, v in FP16 (arXiv 2310.18313)  1 or 2 bytes
    expanded   sign(code) |code s|^(1/k) c, three FP32 numbers a group of 128: COAT's dynamic range expansion (arXiv
               2410.19313), see `ops.states`                                         1.094 bytes

A codec is a value without state: `encode` gives plain tensors by name, `codes` and what belongs to them, `decode` takes
them back. Nothing here draws: moments are rounded to nearest, but for first moments that would stay where they are
without gradients (`ops.updates.decaying`). A part of a matrix gets the codes that it has in the whole: where there is
one scale a tensor it is told the whole's largest magnitude, where rows have segments how many of them it holds.

Rows of an embedding whose tokens are not seen have no gradient for thousands of steps, beside rows that have one: one
scale for all of them is too coarse. Weights that are looked up by index take `of_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lowprec_train.numerics.formats import Format, parse_format
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops.schema import segment_groups
from lowprec_train.ops.updates import decaying

Parts = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Decay:
    """What a first moment x follows: old, FP32 like x, the moment before the step, and beta, its share that is kept."""

    old: Tensor
    beta: float


class Codec(Protocol):
    """Stores a matrix. seed: 0-dim int64, for codecs that round stochastically.

    amax: FP32 [1, 1], the largest magnitude of the whole matrix, and segments: those of a row of x, both for an x that
    is only a part of it. decay: of a first moment, which then never stays where it is for lack of codes.
    """

    @property
    def exact(self) -> bool:
        """True when decode(encode(x)) is x, bit for bit."""
        ...

    @property
    def one_scale(self) -> bool:
        """True when the largest magnitude of the whole matrix matters to every code."""
        ...

    def encode(
        self,
        x: Tensor,
        seed: Tensor | None = None,
        *,
        amax: Tensor | None = None,
        segments: int | None = None,
        decay: Decay | None = None,
    ) -> Parts:
        """x FP32 [n, k] -> `codes` [n, k] and their scales."""
        ...

    def decode(self, parts: Parts, *, segments: int | None = None) -> Tensor:
        """FP32 [n, k]."""
        ...

    def along(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts that lie along a matrix of `shape` and are cut with it. A part that is not named is the
        same wherever a part of the matrix is held.
        """
        ...

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        """What a matrix of `shape` takes, scales included."""
        ...


@dataclass(frozen=True)
class Plain:
    """A cast. format: FP32 or BF16, whose range needs no scale. Raises ValueError for any other."""

    format: str = "FP32"
    one_scale: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if parse_format(self.format).scaled:
            raise ValueError(f"{self.format} codes need a scale: Scaled or Expanded stores them, not Plain")

    @property
    def exact(self) -> bool:
        return self._format.name == "FP32"

    def encode(
        self,
        x: Tensor,
        seed: Tensor | None = None,
        *,
        amax: Tensor | None = None,
        segments: int | None = None,
        decay: Decay | None = None,
    ) -> Parts:
        return {"codes": _decaying(x.to(self._format.carrier), None, x, None if self.exact else decay)}

    def decode(self, parts: Parts, *, segments: int | None = None) -> Tensor:
        return parts["codes"].float()

    def along(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"codes": shape}

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        return torch.Size(shape).numel() * self._format.carrier.itemsize

    @property
    def _format(self) -> Format:
        return parse_format(self.format)


@dataclass(frozen=True)
class Scaled:
    """Codes under one power of two for the whole tensor, chosen anew at each step so that nothing saturates.

    format: E4M3, E5M2, FP16. Raises ValueError for formats without a scale and for grids with less range than those.
    """

    format: str
    exact: bool = field(default=False, init=False)
    one_scale: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if parse_format(self.format).name not in ("E4M3", "E5M2", "FP16"):
            raise ValueError(f"scaled moments are E4M3, E5M2 or FP16, not {self.format}")

    def encode(
        self,
        x: Tensor,
        seed: Tensor | None = None,
        *,
        amax: Tensor | None = None,
        segments: int | None = None,
        decay: Decay | None = None,
    ) -> Parts:
        codes, scale = under_one_scale(x, Quantizer(parse_format(self.format), scale=ScaleRule.POW2), amax)
        return {"codes": _decaying(codes, scale, x, decay), "scale": scale}

    def decode(self, parts: Parts, *, segments: int | None = None) -> Tensor:
        return torch.ops.lowprec.dequantize(parts["codes"], parts["scale"])

    def along(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"codes": shape}

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        return torch.Size(shape).numel() * parse_format(self.format).carrier.itemsize + 4


@dataclass(frozen=True)
class Expanded:
    """COAT's dynamic range expansion. format: E4M3 or E5M2; group: elements that share an exponent (128 in the paper).
    A group without gradients decays with its scale, so that its codes may stay.

    Raises ValueError for another format or a group below 1.
    """

    format: str = "E4M3"
    group: int = 128
    exact: bool = field(default=False, init=False)
    one_scale: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if parse_format(self.format).name not in ("E4M3", "E5M2") or self.group < 1:
            raise ValueError(f"expanded moments are groups of E4M3 or E5M2, not {self.group} of {self.format}")

    def encode(
        self,
        x: Tensor,
        seed: Tensor | None = None,
        *,
        amax: Tensor | None = None,
        segments: int | None = None,
        decay: Decay | None = None,
    ) -> Parts:
        how = self._how(x.shape[1], segments)
        return dict(zip(("codes", "scale", "exponent", "center"), torch.ops.lowprec.quantize_expanded(x, *how)))

    def decode(self, parts: Parts, *, segments: int | None = None) -> Tensor:
        tensors = (parts[name] for name in ("codes", "scale", "exponent", "center"))
        return torch.ops.lowprec.dequantize_expanded(*tensors, *self._how(parts["codes"].shape[1], segments))

    def along(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        rows, columns = shape
        groups = (rows, self._groups(columns))
        return {"codes": shape, "scale": groups, "exponent": groups, "center": groups}

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        numbers, columns = torch.Size(shape).numel(), shape[-1]
        return numbers + 3 * 4 * self._groups(columns) * (numbers // columns)

    def _groups(self, columns: int) -> int:
        """Groups of a whole row."""
        return segments(columns) * segment_groups(columns, self.group, segments(columns))

    def _how(self, columns: int, of_part: int | None) -> tuple[str, int, int]:
        return parse_format(self.format).name, self.group, segments(columns) if of_part is None else of_part


def of_rows(codec: Codec) -> Codec:
    """What stores the moment of a weight that is looked up by index: FP32 in place of one scale for all rows."""
    return Plain("FP32") if codec.one_scale else codec


def _decaying(codes: Tensor, scale: Tensor | None, x: Tensor, decay: Decay | None) -> Tensor:
    return codes if decay is None else decaying(codes, scale, x, decay.old, decay.beta)


def segments(columns: int) -> int:
    """Places of a whole row where groups restart: 8 where 8 divides it, so that any of 2, 4, 8 ranks holds its own."""
    return 1 if columns % 8 else 8


def under_one_scale(
    x: Tensor, how: Quantizer, amax: Tensor | None, seed: Tensor | None = None, origin: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scale [1, 1] of `how`, whose tile is everything. amax: as for a Codec."""
    if amax is None:
        rounded = how(x, seed, origin)
        return rounded.codes, rounded.scale
    given = (how.tile, how.scale.value, how.range_share, how.span, how.rounding.name, seed, origin)
    codes, scale = torch.ops.lowprec.quantize_by(x, amax, None, how.format.name, *given)
    return codes, scale
