"""The format in which FSDP2 all-gathers the weights of linear layers, and its size in bytes.

    fp32        as stored: 4 bytes per element, or 2 with a reduced-precision master
    bf16        rounded once, as every layer would round after it: 2 bytes, the same bits of every loss and gradient
    quantized   codes of the layer's own GEMMs, with the scales that differ between ranks: 1 byte, or 1/2 in E2M1
    auto        quantized where every loss and gradient has the bits of bf16, else bf16

Codes are gathered if each GEMM uses the weight as fprop's codes (`precision.all_gathered_weight.weight_codes`), and if
the scales of a rank's rows depend on the rows of other ranks by at most one amax, which can be all-reduced before.
Otherwise the layer's weight is gathered in bf16. The codes are those of the BF16 rounding, so the GEMMs compute the
same numbers as with weights that are gathered in BF16 and quantised after it. Only the slope of an estimator is
multiplied into gradients elsewhere, so `auto` gathers such weights in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.all_gathered_weight import weight_codes
from lowprec_train.precision.estimators import StraightThrough
from lowprec_train.precision.recipe import LinearRecipe

PARAM_ALL_GATHER = ("auto", "fp32", "bf16", "quantized")
CODED = ("auto", "quantized")


@dataclass(frozen=True, kw_only=True)
class AllGatherFormat:
    """The format of one weight. rows, columns: of a rank's shard, padded if shards differ in size. quantizer: of codes.
    cut: dimensions of the weight that are divided among ranks, that of dp_shard first.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    quantizer: Quantizer | None = None
    cut: tuple[int, ...] = (0,)

    @property
    def packed(self) -> bool:
        """Whether a byte has two codes."""
        return self.quantizer is not None and self.quantizer.format is E2M1 and self.columns % 2 == 0

    @cached_property
    def amax_dims(self) -> tuple[int, ...]:
        """Dimensions over whose ranks an amax is all-reduced before quantising."""
        return tuple(dim for dim in self.cut if self.quantizer is not None and self.quantizer.crosses(dim))

    @property
    def amax_dim(self) -> int:
        """The one of `amax_dims` for the quantiser: a dimension along which a tile spans the whole, if there is one."""
        assert self.quantizer is not None
        return next((dim for dim in self.amax_dims if self.quantizer.tile[dim] == -1), self.amax_dims[0])

    @property
    def sends_scales(self) -> bool:
        """Whether scales differ between ranks."""
        return self.quantizer is not None and self.quantizer.tile[0] != -1

    @property
    def bytes(self) -> int:
        """Bytes that a rank sends to each of the others."""
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
    """Return the format of a weight's all-gather.

    recipe: of the layer; None for a matrix that is not in a linear layer. shape: of the tensor-parallel part. dtype: of
    the residual stream. stored: dtype that FSDP2 gathers by default. split: dimension that is divided over
    tensor-parallel ranks. param_all_gather: one of `PARAM_ALL_GATHER`.
    """
    rows, columns = -(-shape[0] // shards), shape[1]
    if param_all_gather == "fp32" or recipe is None:
        return AllGatherFormat(rows=rows, columns=columns, dtype=stored)
    plain = AllGatherFormat(rows=rows, columns=columns, dtype=dtype)
    same = param_all_gather == "quantized" or isinstance(recipe.estimator, StraightThrough)
    quantizer = weight_codes(recipe) if param_all_gather in CODED and same else None
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
    """Return whether the ranks along all divided dimensions need the same amax."""
    quantizer, crossed = format.quantizer, set(format.amax_dims)
    assert quantizer is not None
    spanned = {dim for dim in crossed if quantizer.tile[dim] == -1}
    return len(crossed) < 2 or not spanned or quantizer.tile == (-1, -1)
