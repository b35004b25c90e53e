"""What a linear layer saves of X and W for its backward pass: the form, which is part of the plan, and the tensors.

Autograd saves a flat tuple of tensors; `SavedForm.count` is the number that belongs to one operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowprec_train.group import kept
from lowprec_train.numerics.one_scale import quantize_transposed
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule
from lowprec_train.precision.gemm import carrier_of
from lowprec_train.precision.outliers import Residual
from lowprec_train.precision.split import Split


@dataclass(frozen=True, kw_only=True)
class SavedForm:
    """The form in which an operand is saved.

    quantizer: None if the matrix is saved unquantised. transposed: codes of the transposed matrix. packed: two E2M1
    codes a byte. folded: FOLD3's FP8 carriers under a scale per row; if also packed, E2M1 codes and E4M3 block scales.
    residual: includes the clamped outliers. scale_only: only the scale, for an estimator. rounded_again: the matrix
    itself, which the op that made it saves too, and the scale of its codes, for wgrad's op to round it again.
    from_norm: instead of that matrix, which is the result of an RMSNorm, its input, which the norm saves, its rates and
    its weight.
    """

    quantizer: Quantizer | None = None
    transposed: bool = False
    packed: bool = False
    folded: bool = False
    residual: bool = False
    scale_only: bool = False
    rounded_again: bool = False
    from_norm: bool = False

    @property
    def two_level(self) -> bool:
        """True for scales that are stored as E4M3 blocks under an FP32 number."""
        return self.quantizer is not None and self.quantizer.scale is ScaleRule.NVFP4

    @property
    def count(self) -> int:
        """Number of saved tensors."""
        if self.quantizer is None or self.scale_only:
            return 1
        if self.rounded_again:
            return 2 - self.folded + 2 * self.from_norm
        return 2 + self.two_level + 2 * self.residual + self.split_carriers

    @property
    def plain_codes(self) -> bool:
        """True if codes are saved as the op that rounds the untransposed matrix makes them, under one FP32 scale."""
        other = self.transposed or self.packed or self.folded or self.residual or self.scale_only or self.two_level
        return self.quantizer is not None and not other

    @property
    def split_carriers(self) -> bool:
        """True when carriers are saved as codes and block scales."""
        return self.folded and self.packed

    def __str__(self) -> str:
        if self.quantizer is None:
            return "as it is"
        if self.rounded_again:
            norm, op = "as the input of the norm before, normalised and", "as the op before saves it,"
            return f"{norm if self.from_norm else op} rounded again"
        what = "scale" if self.scale_only else "packed codes" if self.packed else "codes"
        what += " and scales of blocks" * self.split_carriers
        return what + " of the transpose" * self.transposed + ", outliers" * self.residual


@dataclass(frozen=True)
class SavedOperand:
    """A saved operand.

    tensors: the matrix; or codes, the scale or its two levels, then values and columns of the residual. Split carriers:
    codes, block scales, row scales. Rounded again: the matrix, or the norm's input; the scale of its codes, or if these
    are transposed its amax, or if they are folded nothing; the norm's rates and weight.
    """

    form: SavedForm
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, form: SavedForm, codes: Quantized, residual: Residual | None = None) -> SavedOperand:
        """Saves codes made by `form.quantizer`."""
        if form.scale_only:
            return cls(form, (codes.scale,))
        if form.split_carriers:
            return cls(form, (*torch.ops.lowprec.pack_ladder(codes.codes), codes.scale))
        stored = torch.ops.lowprec.pack_e2m1(codes.codes) if form.packed else codes.codes
        levels = (codes.parts["block"], codes.parts["tensor"]) if form.two_level else (codes.scale,)
        rest = (residual.values, residual.columns) if residual is not None and form.residual else ()
        return cls(form, (stored, *levels, *rest))

    def kept(self) -> SavedOperand:
        """The operand, which a recomputed block saves (`group.kept`)."""
        return replace(self, tensors=tuple(map(kept, self.tensors)))

    def codes(self) -> Quantized:
        """The codes, unpacked."""
        quantizer = self.form.quantizer
        assert quantizer is not None and not self.form.rounded_again
        stored, scale = self.tensors[:2]
        if self.form.split_carriers:
            return Quantized(torch.ops.lowprec.unpack_ladder(stored, scale), self.tensors[2])
        codes = torch.ops.lowprec.unpack_e2m1(stored) if self.form.packed else stored
        if not self.form.two_level:
            return quantizer.wrap(codes, scale)
        tensor = self.tensors[2]
        return quantizer.wrap(codes, scale.float() * tensor, {"block": scale, "tensor": tensor})

    def folded_transpose(self, split: Split | None, dy: Tensor) -> tuple[Quantized, Tensor]:
        """Codes of the transposed weight [k, n] with block scales folded in, and the weight's row scales, which are to
        be multiplied into dY. dy: not read.
        """
        assert self.form.quantizer is not None and not self.form.split_carriers
        stored, scale, *_ = self.tensors
        folded, row = torch.ops.lowprec.fold_transposed(
            stored, scale, carrier_of(self.form.quantizer.exponent_span), dy
        )
        if split is not None and split.dim == 1:  # a row's largest block may be on another rank
            whole = split.group.all_reduce_max(row)
            folded, row = torch.ops.lowprec.dequantize(folded, (row / whole).t()).to(folded.dtype), whole
        return Quantized(folded, torch.ones_like(row[:1])), row.t()

    def transposed_codes(self, after: Tensor | None = None) -> Quantized:
        """The codes of the transposed matrix. after: a gradient, if the forward pass could make them as well
        (ops/schema.py).
        """
        if self.form.rounded_again:
            assert self.form.quantizer is not None
            return quantize_transposed(self.form.quantizer, *self.tensors, after=after)
        return self.codes() if self.form.transposed else self.codes().t(after)

    def scale(self) -> Tensor:
        """FP32 scales of the untransposed matrix."""
        if self.form.scale_only:
            return self.tensors[0]
        scale = self.codes().scale
        return scale.t() if self.form.transposed else scale

    def residual(self, k: int) -> Residual:
        """The outliers of a matrix with k columns."""
        return Residual(self.tensors[-2], self.tensors[-1], k)


def flatten(*saved: SavedOperand | None) -> tuple[Tensor, ...]:
    """The tensors of all operands, for autograd to save."""
    return tuple(tensor for each in saved if each is not None for tensor in each.tensors)


def unflatten(tensors: Sequence[Tensor], *forms: SavedForm | None) -> tuple[SavedOperand | None, ...]:
    """Inverse of `flatten`, given the forms of a plan."""
    found: list[SavedOperand | None] = []
    for form in forms:
        count = 0 if form is None else form.count
        found.append(None if form is None else SavedOperand(form, tuple(tensors[:count])))
        tensors = tensors[count:]
    return tuple(found)
