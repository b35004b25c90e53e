"""The three GEMMs of one linear layer under its recipe, and what the first leaves for the other two.

    forward     Y  = X W^T, keeps X (or codes of it) and, where dgrad takes fprop's codes, those of W
    backward    dX = dY W,  dW = f'(dY^T X)

A scale that lies along the reduction of a backward GEMM, one per row of W or of X, is multiplied into dY before dY is
rounded (docs/numerics.md). Codes live between forward and backward only, as flat tensors by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.numerics.draws import Gemms, Purpose, SiteDraws
from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import Quantized, Quantizer
from lowprec_train.precision.estimators import StraightThrough
from lowprec_train.precision.gemm import accumulate, cast, multiply
from lowprec_train.precision.outliers import OutlierClamp, Residual
from lowprec_train.precision.recipe import Gemm, Keep, LinearRecipe, Reuse

Kept = dict[str, Tensor]

Observer = Callable[[Gemms, Purpose, Tensor, Quantized, Quantizer, OutlierClamp | None], None]
"""Told of every operand that is rounded: GEMM, side, the matrix as the quantiser saw it, what came out, how."""


@dataclass(frozen=True)
class Site:
    """One layer in one pass: its recipe, its draws and who watches. draws: None for a recipe that needs none."""

    recipe: LinearRecipe
    draws: SiteDraws | None = None
    observer: Observer | None = None

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Kept]:
        """x [m, k], weight [n, k] -> (y [m, n] in x's dtype, what `backward` needs besides the weight)."""
        gemm, w = self.recipe.fprop, cast(weight, x.dtype)
        a, b = self._rotated(Gemms.FPROP, x, w)
        codes_x, residual = self._input_codes(a)
        codes_w = self._rounded(Gemms.FPROP, Purpose.B, b) if self._needs_weight_codes else None
        kept = self._keep_weight(codes_w) | self._keep_input(x, codes_x, residual)
        if gemm.codes_only:
            return multiply(x, w, split_accumulation=False, dtype=x.dtype), kept
        left, right = a if codes_x is None else codes_x, b if codes_w is None else codes_w
        if residual is None:
            return multiply(left, right, split_accumulation=gemm.split_accumulation, dtype=x.dtype), kept
        y = multiply(left, right, split_accumulation=gemm.split_accumulation, dtype=torch.float32)
        return cast(y + accumulate(residual.dense(x.dtype), w), x.dtype), kept

    def backward(
        self, dy: Tensor, weight: Tensor, kept: Kept, dtype: torch.dtype, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """dy [m, n] -> (dx [m, k] in `dtype`, dw [n, k] in the weight's dtype), each where it is needed."""
        dx = dw = shared = None
        if all(needs) and self._shares_dy(kept):
            shared = self._rounded(Gemms.DGRAD, Purpose.A, dy)
        if needs[0]:
            dx = self._dgrad(dy if shared is None else shared, weight, kept, dtype)
        if needs[1]:
            dw = self._wgrad(dy, shared, kept, dtype)
            dw = cast(self.recipe.estimator(dw, cast(weight, dtype), kept.get("w_scale", dw)), weight.dtype)
        return dx, dw

    @property
    def _needs_weight_codes(self) -> bool:
        """False where fprop multiplies the weight as it is, and nothing else takes its codes."""
        reused = self.recipe.dgrad.b is Reuse.FPROP_CODES
        return isinstance(self.recipe.fprop.b, Quantizer) and (reused or not self.recipe.fprop.codes_only)

    def _input_codes(self, x: Tensor) -> tuple[Quantized | None, Residual | None]:
        gemm = self.recipe.fprop
        if gemm.a is None or (gemm.codes_only and not self.recipe.keeps_codes):
            return None, None
        if gemm.outliers is None:
            return self._rounded(Gemms.FPROP, Purpose.A, x), None
        codes, residual = gemm.outliers(x, gemm.a, *self._noise(gemm.a, Gemms.FPROP, Purpose.A))
        self._observe(Gemms.FPROP, Purpose.A, x, codes, gemm.a, gemm.outliers)
        return codes, residual

    def _keep_weight(self, codes: Quantized | None) -> Kept:
        if codes is None:
            return {}
        if self.recipe.dgrad.b is Reuse.FPROP_CODES:
            assert isinstance(self.recipe.fprop.b, Quantizer)
            return _stored("w", codes, packed=self.recipe.fprop.b.format is E2M1)
        return {} if isinstance(self.recipe.estimator, StraightThrough) else {"w_scale": codes.scale}

    def _keep_input(self, x: Tensor, codes: Quantized | None, residual: Residual | None) -> Kept:
        recipe = self.recipe
        if recipe.keep is Keep.OPERAND:
            _, operand = self._rotated(Gemms.WGRAD, None, x.t().contiguous())
            assert isinstance(recipe.wgrad.b, Quantizer)
            rounded = self._rounded(Gemms.WGRAD, Purpose.B, operand)
            return _stored("x", rounded, packed=recipe.wgrad.b.format is E2M1)
        if not recipe.keeps_codes:
            return {"x": x}
        assert codes is not None and recipe.fprop.a is not None
        outliers = recipe.fprop.outliers
        carried = outliers is not None and outliers.variant == "carrier"
        kept = _stored("x", codes, packed=recipe.fprop.a.format is E2M1 and not carried)
        return kept if residual is None else kept | {"residual": residual.values, "columns": residual.columns}

    def _dgrad(self, dy: Tensor | Quantized, weight: Tensor, kept: Kept, dtype: torch.dtype) -> Tensor:
        b: Tensor | Quantized
        if self.recipe.dgrad.b is Reuse.FPROP_CODES:
            b = _restored("w", kept, self.recipe.fprop.b).t()
        else:
            b = cast(weight, dtype).t().contiguous()
        return self._product(Gemms.DGRAD, dy, b, dtype)

    def _wgrad(self, dy: Tensor, shared: Quantized | None, kept: Kept, dtype: torch.dtype) -> Tensor:
        recipe = self.recipe
        if recipe.wgrad.is_identity and not recipe.keeps_codes:  # the very product that nn.Linear's backward makes
            return cast(dy.t() @ kept["x"], torch.float32)
        b: Tensor | Quantized
        if recipe.keep is Keep.OPERAND:
            b = _restored("x", kept, recipe.wgrad.b)
        elif not recipe.keeps_codes:
            b = kept["x"].t().contiguous()
        else:
            codes = _restored("x", kept, recipe.fprop.a)
            b = codes.t() if recipe.wgrad.b is Reuse.FPROP_CODES else cast(codes.dequantize(), dtype).t().contiguous()
        a = shared.t() if shared is not None else dy.t().contiguous()
        dw = self._product(Gemms.WGRAD, a, b, torch.float32)
        if "residual" in kept:
            rest = Residual(kept["residual"], kept["columns"], dw.shape[1]).dense(dtype)
            dw = dw + accumulate(dy.t().contiguous(), rest.t().contiguous())
        return dw

    def _product(self, which: Gemms, a: Tensor | Quantized, b: Tensor | Quantized, dtype: torch.dtype) -> Tensor:
        """a [m, k] (dY or dY^T, or its codes) times b [n, k]^T (weight or input, plain or in codes)."""
        gemm = self._gemm(which)
        if isinstance(b, Quantized) and _along_k(b):
            assert isinstance(a, Tensor)
            a, b = a.float() * b.scale, Quantized(b.codes, torch.ones_like(b.scale[:, :1]))
        if isinstance(a, Tensor):
            plain, b = self._rotated(which, a, b)
            a = plain if gemm.a is None else self._rounded(which, Purpose.A, plain)
        if isinstance(gemm.b, Quantizer) and isinstance(b, Tensor):
            b = self._rounded(which, Purpose.B, b)
        return multiply(a, b, split_accumulation=gemm.split_accumulation, dtype=dtype)

    def _rotated(self, which: Gemms, a, b):  # type: ignore[no-untyped-def]
        """Both operands under the GEMM's rotation, where it has one; codes have been through it before."""
        rotation = self._gemm(which).rotation
        if rotation is None:
            return a, b
        seed = self._seed(which, Purpose.ROTATION)
        return tuple(rotation(each, seed) if isinstance(each, Tensor) else each for each in (a, b))

    def _gemm(self, which: Gemms) -> Gemm:
        return self.recipe.gemms()[which.name.lower()]

    def _rounded(self, which: Gemms, purpose: Purpose, x: Tensor) -> Quantized:
        gemm = self._gemm(which)
        quantizer = gemm.a if purpose is Purpose.A else gemm.b
        assert isinstance(quantizer, Quantizer)
        codes = quantizer(x, *self._noise(quantizer, which, purpose))
        self._observe(which, purpose, x, codes, quantizer, None)
        return codes

    def _observe(
        self, which: Gemms, purpose: Purpose, x: Tensor, codes: Quantized, how: Quantizer, clamp: OutlierClamp | None
    ) -> None:
        if self.observer is not None:
            self.observer(which, purpose, x, codes, how, clamp)

    def _noise(self, quantizer: Quantizer, which: Gemms, purpose: Purpose) -> tuple[Tensor | None, Tensor | None]:
        """Seed and origin of a stochastic operand; (None, None) for one that is rounded to nearest."""
        if not quantizer.stochastic:
            return None, None
        return self._seed(which, purpose), self._token_origin(which, purpose)

    def _seed(self, which: Gemms, purpose: Purpose) -> Tensor:
        if self.draws is None:
            raise ValueError("a stochastic recipe needs draws: call precision.policy.attach_draws(model, draws) first")
        return self.draws.seed(which, purpose)

    def _token_origin(self, which: Gemms, purpose: Purpose) -> Tensor | None:
        """Where the operand's tokens lie: rows of X and dY, columns of dY^T and X^T, none in W."""
        assert self.draws is not None
        if which is Gemms.WGRAD:
            return self.draws.token_columns
        return self.draws.token_rows if purpose is Purpose.A else None

    def _shares_dy(self, kept: Kept) -> bool:
        """True when dgrad and wgrad see the same codes of dY: one tensor scale, nothing rotated, drawn or folded."""
        dgrad, wgrad = self.recipe.dgrad, self.recipe.wgrad
        a, plain = dgrad.a, dgrad.rotation is None and wgrad.rotation is None
        if a is None or a != wgrad.a or a.tile != (-1, -1) or a.stochastic or not plain:
            return False
        reuses = ((dgrad, "w_scale"), (wgrad, "x_scale"))
        return not any(gemm.b is Reuse.FPROP_CODES and kept[name].numel() > 1 for gemm, name in reuses if name in kept)


def _along_k(b: Quantized) -> bool:
    """One scale for each column of b: it lies along the reduction."""
    return b.scale.shape[0] == 1 and b.scale.shape[1] == b.codes.shape[1] > 1


def _stored(name: str, codes: Quantized, *, packed: bool) -> Kept:
    """Flat tensors to keep: codes, two E2M1 codes a byte where `packed`; the scale, or the levels that make it."""
    packed = packed and codes.codes.shape[1] % 2 == 0
    kept = {f"{name}_packed": torch.ops.lowprec.pack_e2m1(codes.codes)} if packed else {f"{name}_codes": codes.codes}
    levels = {f"{name}_{part}": value for part, value in codes.parts.items()}
    return kept | (levels or {f"{name}_scale": codes.scale})


def _restored(name: str, kept: Kept, quantizer: Quantizer | Reuse | None) -> Quantized:
    """What `_stored` took, rounded by `quantizer`."""
    assert isinstance(quantizer, Quantizer)
    packed = kept.get(f"{name}_packed")
    codes = kept[f"{name}_codes"] if packed is None else torch.ops.lowprec.unpack_e2m1(packed)
    if f"{name}_block" not in kept:
        return quantizer.wrap(codes, kept[f"{name}_scale"])
    parts = {"block": kept[f"{name}_block"], "tensor": kept[f"{name}_tensor"]}
    return quantizer.wrap(codes, parts["block"].float() * parts["tensor"], parts)
