"""Quantizer: rounds a matrix to a format, with one scale per tile.

    x[i, j] ~ codes[i, j] * scale[i // rows, j // columns]

GEMM operands, gradient communication, saved activations and optimizer moments use it. The granularity is a tile shape:
(-1, -1) is per tensor, (1, -1) per row, (1, 32) an MX block, (128, 128) a weight block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from lowprec_train.group import SINGLE, Group
from lowprec_train.numerics.corrections import Candidates, Correction
from lowprec_train.numerics.formats import E2M1, FORMATS, FP16, FP32, NEAREST, STOCHASTIC, Format, Rounding
from lowprec_train.ops import ladder, library
from lowprec_train.ops.eden import BLOCK as EDEN_BLOCK
from lowprec_train.ops.eden import GROUP as EDEN_GROUP
from lowprec_train.ops.rounding import ROUNDINGS
from lowprec_train.ops.schema import tile_shape


class ScaleRule(Enum):
    """Rules for a tile's scale from its largest magnitude amax (M: maximum of the format, e_M: exponent of M).

    FP32        amax / M
    POW2        2**ceil(log2(amax / M)): never saturates, and parallel layouts agree on it
    E8M0_FLOOR  2**(floor(log2 amax) - e_M), OCP MX v1.0: values beyond M saturate unless `headroom` is 3/4
    E8M0_CEIL   2**ceil(log2(amax / M)), arXiv 2506.08027: never saturates
    NVFP4       amax / M rounded to E4M3 relative to an FP32 scale of the outer tile, arXiv 2509.25149; E2M1 only
    LADDER      the smallest of {1, 1.25, 1.5} x 2**e that is at least amax / M; E2M1 to nearest in rows only
    """

    FP32 = "FP32"
    POW2 = "POW2"
    E8M0_FLOOR = "E8M0_FLOOR"
    E8M0_CEIL = "E8M0_CEIL"
    NVFP4 = "NVFP4"
    LADDER = "LADDER"


STOCHASTIC_HEADROOM = {
    ScaleRule.E8M0_FLOOR: 3 / 4,
    ScaleRule.NVFP4: 16 / 17,
}  # without it rounding up would saturate: bias
WHOLE, ROW = (-1, -1), (1, -1)
POWERS_OF_TWO = (ScaleRule.POW2, ScaleRule.E8M0_FLOOR, ScaleRule.E8M0_CEIL)
SPANNED = (*POWERS_OF_TWO, ScaleRule.LADDER)
OWN_OPS = (ScaleRule.NVFP4, ScaleRule.LADDER)  # rules that no op takes by name


@dataclass(frozen=True)
class Quantized:
    """Codes and scale as plain tensors. It is not a Tensor subclass, and autograd Functions use its tensors.

    codes: [m, k] in the format's carrier. scale: FP32 [m / rows, k / columns], the effective dequantisation multiplier.
    parts: stored parts of a scale with several levels. NVFP4: `block` in E4M3 and `tensor` in FP32, whose product is
    the scale of every non-zero tile; `tensor` is [1, 1], or [m, 1] with an outer scale per row. LADDER: `block`, the
    rungs; `row` [m, 1], the scale of the folded codes, if a span bounds the rungs; `factor` [m, 1], if rows are
    corrected. gain: scale / gain is a power of two for MX scales with head-room (4/3 for 3/4), else 1. exponent_span:
    range of the block exponents of a row in binades, 0 if unbounded.
    """

    codes: Tensor
    scale: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    gain: float = 1.0
    exponent_span: int = 0

    @property
    def granularity(self) -> str:
        """One of "tensor", "row" (one scale for all of k) and "block" (scales vary along k)."""
        if self.scale.numel() == 1:
            return "tensor"
        return "row" if self.scale.shape == (self.codes.shape[0], 1) else "block"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """codes * scale [m, k], FP32 or rounded once to BF16."""
        ops = torch.ops.lowprec
        return (ops.dequantize_bf16 if dtype is torch.bfloat16 else ops.dequantize)(self.codes, self.scale)

    def t(self, after: Tensor | None = None) -> Quantized:
        """Return the transposed matrix, with row-major codes. after: of the op (ops/schema.py)."""
        parts = {name: part.t() for name, part in self.parts.items()}
        wide = self.codes.element_size() > 1
        codes = self.codes.t().contiguous() if wide else torch.ops.lowprec.transpose(self.codes, after)
        return Quantized(codes, self.scale.t(), parts, self.gain)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A matrix whose rows (dim 0) or columns (dim 1) are sharded over the ranks of `group`.

    amax: the maximum of `Quantizer.local_amax` over all shards, if it is already known; this saves a collective.
    """

    dim: int
    group: Group = SINGLE
    amax: Tensor | None = None

    def global_amax(self, local: Tensor) -> Tensor:
        """Return the elementwise maximum of `local` over all ranks, FP32."""
        return self.group.all_reduce_max(local) if self.amax is None else self.amax


@dataclass(frozen=True)
class Quantizer:
    """Rounds a 2-D tensor to `format` with a scale per `tile` = (rows, columns), -1 meaning the whole extent.

    rounding: NEAREST, STOCHASTIC (needs a seed; E[dequantize()] = x) or another rule of `ops.rounding`.
    headroom: share of the format's range for amax; None: 3/4 for stochastic E8M0_FLOOR, 16/17 for stochastic NVFP4,
    else 1.
    exponent_span: MX exponents are raised before rounding to at least the row's largest minus this, so that the codes
    fold into an FP8 carrier (28 for E5M2, 14 for E4M3, 11 for LADDER) without underflow; 0: unchanged.
    outer: tile of NVFP4's FP32 scale: the whole matrix, or each row, (1, -1), as TransformerEngine's
    `row_scaled_activation`.
    candidates: choice among scales. correction: factor of scales after rounding.

    Raises ValueError for a format, tile or field that the scale rule does not support.
    """

    format: Format
    tile: tuple[int, int] = (-1, -1)
    scale: ScaleRule = ScaleRule.FP32
    rounding: Rounding = NEAREST
    headroom: float | None = None
    exponent_span: int = 0
    outer: tuple[int, int] = WHOLE
    candidates: Candidates = Candidates.NONE
    correction: Correction = Correction.NONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "tile", tuple(self.tile))
        object.__setattr__(self, "outer", tuple(self.outer))
        if len(self.tile) != 2 or any(n != -1 and n < 1 for n in self.tile):
            raise ValueError(f"a tile is (rows, columns), each positive or -1, not {self.tile}")
        if self.scale is ScaleRule.NVFP4 and self.format is not E2M1:
            raise ValueError(f"NVFP4 scales belong to E2M1, not {self.format}")
        if self.outer != WHOLE and (self.outer != ROW or self.tile[0] != 1 or self.scale is not ScaleRule.NVFP4):
            raise ValueError(
                f"outer is (-1, -1), or (1, -1) for NVFP4 tiles within a row; it is {self.outer} for {self.scale.name} "
                f"scales of {self.tile}"
            )
        if self.headroom is not None and not 0 < self.headroom <= 1:
            raise ValueError(f"headroom is a share of the range in (0, 1], not {self.headroom}")
        if not isinstance(self.rounding, Rounding):
            raise ValueError(f"rounding is one of {', '.join(ROUNDINGS)}, not {self.rounding!r}")
        for value, table in ((self.format, FORMATS), (self.rounding, ROUNDINGS)):
            if table.get(value.name) != value:
                raise ValueError(f"{value} is in no table: register_format or register_rounding puts it there")
        if self.rounding is not NEAREST and self.format is FP32:
            raise ValueError(f"FP32 is not rounded, so {self.rounding} rounding to it means nothing")
        if self.exponent_span < 0:
            raise ValueError(f"exponent_span counts binades, 0 for no bound, and is not {self.exponent_span}")
        if self.exponent_span and self.scale not in SPANNED:
            raise ValueError(f"exponent_span bounds power-of-two block exponents; {self.scale.name} scales have none")
        self._check_four_over_six()
        self._check_eden()
        self._check_ladder()
        self._pair_with_transposed()

    def _check_four_over_six(self) -> None:
        if self.scale is not ScaleRule.NVFP4 or self.candidates is Candidates.NONE:
            return
        if self.rounding is not NEAREST or self.range_share != 1:
            how = f"{self.rounding} in {self.range_share} of it"
            raise ValueError(f"candidates of NVFP4 are rounded to nearest in the whole range, not {how}")
        count = self.tile[0] * self.tile[1]
        if min(self.tile) < 1 or count & (count - 1):
            raise ValueError(f"candidates of NVFP4 belong to tiles of a power of two of elements, not to {self.tile}")

    def _check_eden(self) -> None:
        if self.correction is not Correction.GROUP:
            return
        if self.scale is not ScaleRule.NVFP4 or self.tile != (1, EDEN_BLOCK) or self.outer != WHOLE:
            where = f"{self.scale.name} scales of {self.tile} under one of {self.outer}"
            raise ValueError(
                f"correction=GROUP belongs to NVFP4 scales of (1, 16) under one of (-1, -1), not to {where}"
            )
        if self.rounding is not NEAREST or self.headroom is not None or self.candidates is not Candidates.NONE:
            how = f"rounding={self.rounding}, headroom={self.headroom}, candidates={self.candidates.name}"
            raise ValueError(f"correction=GROUP rounds to nearest in a range of its own; it is given {how}")

    def _check_ladder(self) -> None:
        nvfp4 = self.scale is ScaleRule.NVFP4
        if self.scale is not ScaleRule.LADDER:
            if self.candidates is not Candidates.NONE and not nvfp4:
                where = f"not to {self.scale.name} ones"
                raise ValueError(f"candidates={self.candidates.name} belongs to LADDER and NVFP4 scales, {where}")
            if self.correction is Correction.ROW:
                raise ValueError(f"correction=ROW belongs to LADDER scales, not to {self.scale.name} ones")
            return
        if self.format is not E2M1:
            raise ValueError(f"LADDER scales belong to E2M1, not {self.format}")
        width = self.tile[1]
        if self.tile[0] != 1 or not 2 <= width <= ladder.WIDEST or width & (width - 1):
            raise ValueError(
                f"LADDER tiles are a row of 2 to {ladder.WIDEST} columns, a power of two, such as 16, not {self.tile}"
            )
        if self.rounding is not NEAREST or self.range_share != 1:
            how = f"{self.rounding} in {self.range_share} of it"
            raise ValueError(f"LADDER codes are rounded to nearest in the whole range, not {how}")
        if self.exponent_span > ladder.SPAN:
            raise ValueError(
                f"LADDER codes fold within {ladder.SPAN} binades; exponent_span is {self.exponent_span} (0: no bound)"
            )

    def _pair_with_transposed(self) -> None:
        """Create the transposed quantiser in advance: torch 2.11 cannot trace its construction inside a graph."""
        transposed = self
        if self.tile[0] != self.tile[1] or self.outer != WHOLE:
            transposed = object.__new__(Quantizer)
            reverse = {"tile": self.tile[::-1], "outer": self.outer[::-1]}
            transposed.__dict__.update(self.__dict__, **reverse, _transposed=self)
        self.__dict__["_transposed"] = transposed

    @property
    def stochastic(self) -> bool:
        """Whether codes or scales are rounded stochastically, so that a seed is needed."""
        return self.rounding.stochastic or self.correction is Correction.GROUP

    @property
    def range_share(self) -> float:
        """The head-room, with the default resolved."""
        if self.headroom is not None:
            return self.headroom
        return STOCHASTIC_HEADROOM.get(self.scale, 1.0) if self.rounding.stochastic else 1.0

    def check(self, rows: int, columns: int) -> None:
        """Raises ValueError if the tile does not divide a rows x columns matrix."""
        tile_shape(rows, columns, self.tile)
        if self.correction is Correction.GROUP:
            tile_shape(rows, columns, (1, EDEN_GROUP))

    def __call__(
        self, x: Tensor, seed: Tensor | None = None, origin: Tensor | None = None, shared: Shared | None = None
    ) -> Quantized:
        """Quantise x [m, k], of any float dtype. seed: 0-dim int64, required if and only if stochastic. origin: int64
        [2], global row and column of x[0, 0]. shared: if x is a shard; the codes are then the shard of the whole's
        codes.
        """
        self._check_call(x, seed)
        if shared is not None and self.crosses(shared.dim) and self.correction is not Correction.GROUP:
            return self._part(x, seed, origin, shared)
        if self.correction is Correction.GROUP:
            return self.of_rotated(x, None, 0, seed, origin, shared)
        if self._takes_maxima:
            amax = torch.ops.lowprec.amax(x, self.tile)
            return self._under(x, amax, self._outer_amax(amax), seed, origin)
        if self.scale is ScaleRule.LADDER:
            return self._on_ladder(x, None, None)
        if self.scale is ScaleRule.NVFP4:
            how = (self.tile, self.range_share, self.rounding.name)
            codes, scale, block, tensor = self.kernel("quantize_nvfp4", x.device)(x, *how, seed, origin)
            return self.wrap(codes, scale, {"block": block, "tensor": tensor})
        codes, scale = self.kernel("quantize", x.device)(x, *self.arguments, seed, origin)
        return self.wrap(codes, scale)

    def of_rotated(
        self,
        x: Tensor,
        signs: Tensor | None,
        rotation: int,
        seed: Tensor | None = None,
        origin: Tensor | None = None,
        shared: Shared | None = None,
    ) -> Quantized:
        """Quantise x after a random Hadamard transform, for GROUP only, whose op rotates. signs: seed of the signs,
        None for +1. rotation: block size, 0 for none. Other arguments as in a call.
        """
        top = torch.ops.lowprec.rotated_amax(x, signs, rotation)
        top = top if shared is None else shared.global_amax(top)
        codes, scale, block, tensor = torch.ops.lowprec.quantize_eden(x, top, signs, rotation, seed, origin)
        return self.wrap(codes, scale, {"block": block, "tensor": tensor})

    def kernel(self, op: str, device: torch.device) -> Callable[..., Any]:
        """Return the overload of an op for this format and rounding on a device."""
        return library.kernel(op, device, *self._names)

    @property
    def _names(self) -> tuple[str, ...]:
        """Return the names that a compiled kernel must support."""
        chosen = () if self.candidates is Candidates.NONE else (self.candidates.value,)
        return self.format.name, self.rounding.name, *chosen

    def on_reference(self, device: torch.device) -> bool:
        """Return whether a device has a compiled kernel for this scale rule that lacks the format or rounding."""
        if self.correction is Correction.GROUP:
            return library.lacks("quantize_eden", "quantize_nvfp4", device)
        if self.candidates is not Candidates.NONE and self.scale is ScaleRule.NVFP4:
            return library.lacks("quantize_four_over_six", "quantize_nvfp4", device)
        if self._takes_maxima and library.lacks("quantize_nvfp4_by", "quantize_nvfp4", device):
            return True
        op = {ScaleRule.NVFP4: "quantize_nvfp4", ScaleRule.LADDER: "rotate_fold_ladder"}.get(self.scale, "quantize")
        return not library.knows(op, device, *self._names)

    @property
    def _takes_maxima(self) -> bool:
        """Whether this is NVFP4 with maxima that are computed before the rounding op."""
        return self.scale is ScaleRule.NVFP4 and (self.outer != WHOLE or self.candidates is not Candidates.NONE)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the ops of all scale rules except NVFP4 and LADDER."""
        name, tile, rule = self.format.name, self.tile, self.scale.value
        return name, tile, rule, self.range_share, self.exponent_span, self.rounding.name

    def crosses(self, dim: int) -> bool:
        """Return whether a scale depends on several shards of a matrix that is sharded along `dim`."""
        nvfp4 = self.scale is ScaleRule.NVFP4 and self.outer[dim] == -1
        rows = self.exponent_span > 0 or self.correction is Correction.ROW
        levels = nvfp4 or (rows and dim == 1)
        return self.format.scaled and (self.tile[dim] == -1 or levels)

    def _part(self, x: Tensor, seed: Tensor | None, origin: Tensor | None, shared: Shared) -> Quantized:
        spans = self.tile[shared.dim] == -1  # then the parts' tiles are the whole's, with one maximum
        amax = shared.amax if spans else None
        amax = torch.ops.lowprec.amax(x, self.tile) if amax is None else amax
        top = shared.global_amax(self._above_tiles(amax, shared.dim))
        amax = top if spans else amax
        if self.scale is ScaleRule.LADDER:
            return self._on_ladder(x, top, shared)
        if self.scale is ScaleRule.NVFP4:
            return self._under(x, amax, self._outer_amax(top), seed, origin)
        tops = None if spans else top
        codes, scale = self.kernel("quantize_by", x.device)(x, amax, tops, *self.arguments, seed, origin)
        return self.wrap(codes, scale)

    def _under(self, x: Tensor, amax: Tensor, top: Tensor, seed: Tensor | None, origin: Tensor | None) -> Quantized:
        """Return NVFP4 codes of x with outer scales from the maxima `top`."""
        if self.candidates is not Candidates.NONE:
            chosen = torch.ops.lowprec.quantize_four_over_six(x, amax, top, self.tile, self.candidates.value)
            return self.wrap(chosen[0], chosen[1], {"block": chosen[2], "tensor": chosen[3]})
        by, how = self.kernel("quantize_nvfp4_by", x.device), (self.tile, self.range_share, self.rounding.name)
        codes, scale, block, tensor = by(x, amax, top, *how, seed, origin)
        return self.wrap(codes, scale, {"block": block, "tensor": tensor})

    def _outer_amax(self, amax: Tensor) -> Tensor:
        """Return the maxima of outer tiles from those of tiles or of parts of outer tiles."""
        return amax.amax(dim=[dim for dim in (0, 1) if self.outer[dim] == -1], keepdim=True)

    def _on_ladder(self, x: Tensor, tops: Tensor | None, shared: Shared | None) -> Quantized:
        """tops, shared: of a part of the columns, what rows have in common."""
        how = (self.tile, self.candidates.value, self.exponent_span)
        codes, block, row = self.kernel("quantize_ladder", x.device)(x, tops, *how)
        parts = {"block": block} | ({"row": row} if self.exponent_span else {})
        if self.correction is Correction.NONE:
            return self.wrap(codes, block, parts)
        sums = torch.ops.lowprec.row_sums(x, codes, block, row, self.exponent_span)
        factor = ladder.row_factor(sums if shared is None else shared.group.all_reduce_sum(sums))
        return self.wrap(codes, block * factor, parts | {"factor": factor})

    def local_amax(self, x: Tensor, dim: int) -> Tensor:
        """Return this shard's contribution to the maximum over shards along `dim`, if `crosses`."""
        return self._above_tiles(torch.ops.lowprec.amax(x, self.tile), dim)

    def _above_tiles(self, amax: Tensor, dim: int) -> Tensor:
        """Return maxima of tiles that span several ranks, or of the outer tile: the matrix or a row."""
        if self.tile[dim] == -1:
            return amax
        return self._outer_amax(amax) if self.scale is ScaleRule.NVFP4 else amax.amax(dim=1, keepdim=True)

    def wrap(self, codes: Tensor, scale: Tensor, parts: dict[str, Tensor] | None = None) -> Quantized:
        """Combine tensors that this quantiser made to a Quantized."""
        gain = 1 / self.range_share if self.scale is ScaleRule.E8M0_FLOOR else 1.0
        return Quantized(codes, scale, parts or {}, gain, self.exponent_span)

    def transposed(self) -> Quantizer:
        """The quantiser that makes the same codes of the transposed matrix."""
        return self._transposed  # type: ignore[attr-defined,no-any-return]

    def _check_call(self, x: Tensor, seed: Tensor | None) -> None:
        if x.ndim != 2:
            raise ValueError(f"a Quantizer takes a matrix, not a tensor of shape {tuple(x.shape)}")
        if self.stochastic != (seed is not None):
            raise ValueError("a seed is required exactly when rounding is stochastic")
        if seed is not None and (seed.ndim != 0 or seed.dtype != torch.int64):
            raise ValueError(f"a seed is a 0-dim int64 tensor, not {seed.dtype} of shape {tuple(seed.shape)}")
        self.check(x.shape[0], x.shape[1])

    def __str__(self) -> str:
        tile = "x".join("*" if n == -1 else str(n) for n in self.tile)
        rule = "" if self.format is FP16 or not self.format.scaled else f" {self.scale.name}"
        rule += "" if self.outer == WHOLE else " a row"
        rule += "" if self.candidates is Candidates.NONE else f" {self.candidates.value}"
        corrected = "" if self.correction is Correction.NONE else f" {self.correction.value}-corrected"
        return f"{self.format.name}[{tile}]{rule}{self._rounding}{corrected}"

    @property
    def _rounding(self) -> str:
        if self.rounding is NEAREST:
            return ""
        return " SR" if self.rounding is STOCHASTIC else f" {self.rounding}"
