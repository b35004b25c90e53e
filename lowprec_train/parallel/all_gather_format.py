"""In which format FSDP2 gathers the weights of linear layers, and how many bytes that is.

    master   as they are stored: 4 bytes a number, or 2 of a reduced master
    bf16     rounded once, as every layer would after it: 2 bytes, the same bits of every loss and gradient
    codes    those of the layer's own GEMMs, with the scales that not every rank knows: 1 byte, or 1/2 in E2M1

Codes travel where each GEMM takes the weight as fprop's codes (`precision.all_gathered_weight.weight_codes`) and where
the scales of a rank's rows depend on other ranks' rows by one amax at most, which can be all-reduced before; otherwise
the layer's weight travels as bf16. They are the codes of the BF16 rounding, so the GEMMs compute what they would
compute with weights that are gathered in BF16 and rounded after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.all_gathered_weight import weight_codes
from lowprec_train.precision.recipe import LinearRecipe

PARAM_ALL_GATHER = ("fp32", "bf16", "quantized")


@dataclass(frozen=True, kw_only=True)
class AllGatherFormat:
    """Of one weight. rows, columns: of a rank's part, padded where ranks' parts differ. quantizer: of codes. cut:
    dimensions of the weight that lie on several ranks, those of dp_shard first.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    quantizer: Quantizer | None = None
    cut: tuple[int, ...] = (0,)

    @property
    def packed(self) -> bool:
        """Two codes a byte."""
        return self.quantizer is not None and self.quantizer.format is E2M1 and self.columns % 2 == 0

    @property
    def amax_dims(self) -> tuple[int, ...]:
        """Dimensions over whose ranks an amax is all-reduced before codes can be made."""
        return tuple(dim for dim in self.cut if self.quantizer is not None and self.quantizer.crosses(dim))

    @property
    def amax_dim(self) -> int:
        """Of `amax_dims`, the one that the quantiser is told of: along which a tile spans the whole, if any does."""
        assert self.quantizer is not None
        return next((dim for dim in self.amax_dims if self.quantizer.tile[dim] == -1), self.amax_dims[0])

    @property
    def sends_scales(self) -> bool:
        """True when scales differ between ranks."""
        return self.quantizer is not None and self.quantizer.tile[0] != -1

    @property
    def bytes(self) -> int:
        """That a rank sends to each of the others."""
        if self.quantizer is None:
            return self.rows * self.columns * self.dtype.itemsize
        codes = self.rows * self.columns // (2 if self.packed else 1)
        tall, wide = self.quantizer.tile
        tiles = self.rows // tall * (1 if wide == -1 else self.columns // wide) if self.sends_scales else 0
        return codes + tiles * (1 if self.quantizer.scale is ScaleRule.NVFP4 else 4)

    def __str__(self) -> str:
        form = str(self.dtype).removeprefix("torch.") if self.quantizer is None else f"codes {self.quantizer}"
        return f"{form}, {self.bytes / (self.rows * self.columns):.3g} bytes a number"


def all_gather_format(
    recipe: LinearRecipe | None,
    shape: tuple[int, int],
    *,
    shards: int,
    param_all_gather: str,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype = torch.float32,
    split: int | None = None,
) -> AllGatherFormat:
    """The format of a weight's all-gather.

    recipe: of the layer; None for a matrix that is no linear layer's. shape: of the tensor-parallel part. dtype: of the
    residual stream. stored: what FSDP2 gathers by itself. split: the dimension that is cut over tensor-parallel
    ranks. param_all_gather: one of `PARAM_ALL_GATHER`.
    """
    rows, columns = -(-shape[0] // shards), shape[1]
    if param_all_gather == "fp32" or recipe is None:
        return AllGatherFormat(rows=rows, columns=columns, dtype=stored)
    plain = AllGatherFormat(rows=rows, columns=columns, dtype=dtype)
    quantizer = weight_codes(recipe) if param_all_gather == "quantized" else None
    if quantizer is None or shards == 1 or shape[0] % shards:
        return plain
    cut = (0,) if split is None else (0, split)
    coded = AllGatherFormat(rows=rows, columns=columns, dtype=dtype, quantizer=quantizer, cut=cut)
    return coded if _tiles_fit(coded) and _one_amax(coded) else plain


def _tiles_fit(format: AllGatherFormat) -> bool:
    assert format.quantizer is not None
    sizes = zip((format.rows, format.columns), format.quantizer.tile, strict=True)
    return all(tile == -1 or size % tile == 0 for size, tile in sizes)


def _one_amax(format: AllGatherFormat) -> bool:
    """Whether the ranks along all cut dimensions need the same amax."""
    quantizer, crossed = format.quantizer, set(format.amax_dims)
    assert quantizer is not None
    spanned = {dim for dim in crossed if quantizer.tile[dim] == -1}
    return len(crossed) < 2 or not spanned or quantizer.tile == (-1, -1)
