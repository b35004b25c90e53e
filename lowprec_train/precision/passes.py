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
from lowprec_train.numerics.quantizer import Quantized, Quantizer, Shared, both, pairs, parts_pair
from lowprec_train.precision.code_rows import gathered, travel_as_codes
from lowprec_train.precision.estimators import StraightThrough
from lowprec_train.precision.gemm import accumulate, carrier_of, cast, folds, multiply
from lowprec_train.precision.outliers import OutlierClamp, Residual
from lowprec_train.precision.recipe import Gemm, Keep, LinearRecipe, Reuse
from lowprec_train.precision.split import Split

Kept = dict[str, Tensor]

Observer = Callable[[Gemms, Purpose, Tensor, Quantized, Quantizer, OutlierClamp | None], None]
"""Told of every operand that is rounded: GEMM, side, the matrix as the quantiser saw it, what came out, how."""


@dataclass(frozen=True)
class Site:
    """One layer in one pass: its recipe, its draws and who watches. draws: None for a recipe that needs none. split:
    where x, weight and dy are this rank's parts; codes and scales are those of the whole, cut alike.
    """

    recipe: LinearRecipe
    draws: SiteDraws | None = None
    observer: Observer | None = None
    split: Split | None = None

    def forward(
        self, x: Tensor, weight: Tensor, maxima: Tensor | None = None, given: Kept | None = None
    ) -> tuple[Tensor, Kept]:
        """x [m, k], weight [n, k] -> (y [m, n] in x's dtype, what `backward` needs besides the weight).

        maxima: any tensor whose largest element is max |x|, where the kernel that made x left it. given: codes of the
        weight from `precision.all_gathered_weight`; the weight is then asked for its dtype only, that of dw.
        """
        gemm, w = self.recipe.fprop, weight if given else cast(weight, x.dtype)
        a, b = self._rotated(Gemms.FPROP, x, w)
        codes_x, residual, kept_x = self._input(x, a, maxima)
        codes_w, kept_w = (_restored("w", given, gemm.b), given) if given else self._weight(b)
        kept = kept_w | kept_x
        if gemm.codes_only:
            return multiply(x, w, split_accumulation=False, dtype=x.dtype), kept
        left, right = a if codes_x is None else codes_x, b if codes_w is None else codes_w
        if residual is None:
            return multiply(left, right, split_accumulation=gemm.split_accumulation, dtype=x.dtype), kept
        y = multiply(left, right, split_accumulation=gemm.split_accumulation, dtype=torch.float32)
        return cast(y + accumulate(residual.dense(x.dtype), w), x.dtype), kept

    def backward(
        self,
        dy: Tensor,
        weight: Tensor,
        kept: Kept,
        dtype: torch.dtype,
        needs: tuple[bool, bool],
        maxima: Tensor | None = None,
        into: torch.dtype | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """dy [m, n] -> (dx [m, k] in `dtype`, dw [n, k] in `into` or the weight's dtype), each where it is needed.
        maxima: of dy, as in `forward`.
        """
        into = into or weight.dtype
        straight = isinstance(self.recipe.estimator, StraightThrough) and "residual" not in kept
        product = into if straight else None if "residual" not in kept else torch.float32
        dx: Tensor | None
        dw: Tensor | None
        if all(needs) and self._pairs_dy(kept):
            dx, dw = self._both(dy, weight, kept, dtype, product, maxima)
        else:
            shared = self._rounded(Gemms.DGRAD, Purpose.A, dy) if all(needs) and self._shares_dy(kept) else None
            dx = self._dgrad(dy if shared is None else shared, weight, kept, dtype) if needs[0] else None
            dw = self._wgrad(dy, shared, kept, dtype, product) if needs[1] else None
        if dx is not None and self.split is not None and self.gathers_codes:
            dx = self.split.group.reduce_scatter(dx)
        return dx, None if dw is None else self._estimated(dy, dw, weight, kept, dtype, into)

    def _estimated(
        self, dy: Tensor, dw: Tensor, weight: Tensor, kept: Kept, dtype: torch.dtype, into: torch.dtype
    ) -> Tensor:
        """The weight's gradient from the product of wgrad: the residual's share, the estimator's slope."""
        if "residual" in kept:
            rest = Residual(kept["residual"], kept["columns"], dw.shape[1]).dense(dtype)
            dw = dw + accumulate(dy.t().contiguous(), rest.t().contiguous())
        if not isinstance(self.recipe.estimator, StraightThrough):
            scale = kept["w_scale"].t() if "w_turned" in kept else kept["w_scale"]
            dw = self.recipe.estimator(dw, cast(weight, dtype), scale, into)
        return cast(dw, into)

    def _input(self, x: Tensor, a: Tensor, maxima: Tensor | None) -> tuple[Quantized | None, Residual | None, Kept]:
        """Codes of `a`, the input under fprop's rotation; what the clamp left over; what backward needs of x."""
        recipe, gemm = self.recipe, self.recipe.fprop
        if gemm.a is None or (gemm.codes_only and not recipe.keeps_codes):
            return None, None, self._operand_of(x) if recipe.keep is Keep.OPERAND else {"x": x}
        if self.split is not None and self.gathers_codes:
            codes = gathered(x, gemm, self.split.group)
            return codes, None, self._keep_input(x, codes, None)
        if gemm.outliers is not None:
            split = None if self._shared(Gemms.FPROP, Purpose.A) is None else self.split
            codes, residual = gemm.outliers(a, gemm.a, *self._noise(gemm.a, Gemms.FPROP, Purpose.A), split)
            self._observe(Gemms.FPROP, Purpose.A, a, codes, gemm.a, gemm.outliers)
            return codes, residual, self._keep_input(x, codes, residual)
        second = self._input_partner()
        if second is not None:
            shared = self._shared(Gemms.FPROP, Purpose.A)
            codes, turned = both(a, gemm.a, second, amax=maxima, produced=True, shared=shared)
            return codes, None, _stored_turned("x", turned)
        codes = self._rounded(Gemms.FPROP, Purpose.A, a)
        return codes, None, self._keep_input(x, codes, None)

    @property
    def gathers_codes(self) -> bool:
        """True when `forward` takes this rank's rows of x and `backward` returns their gradient, and codes are gathered
        between; nobody may watch, for no rank sees the whole x.
        """
        cut = self.split is not None and self.split.dim == 0
        return cut and self.observer is None and travel_as_codes(self.recipe)

    def _input_partner(self) -> Quantizer | None:
        """What rounds X^T for wgrad in the op that rounds X for fprop, where one op can."""
        recipe, a = self.recipe, self.recipe.fprop.a
        if a is None or self.observer is not None or recipe.fprop.rotation is not None:
            return None
        reused = recipe.wgrad.b is Reuse.FPROP_CODES
        plain = recipe.keep is Keep.OPERAND and recipe.wgrad.rotation is None
        second = (a.turned() if a.format is not E2M1 else None) if reused else recipe.wgrad.b if plain else None
        if not isinstance(second, Quantizer) or not pairs(a, second):
            return None
        return second if parts_pair(a, second, self._shared(Gemms.FPROP, Purpose.A), folded=False) else None

    def _keep_input(self, x: Tensor, codes: Quantized, residual: Residual | None) -> Kept:
        recipe = self.recipe
        if recipe.keep is Keep.OPERAND:
            return self._operand_of(x)
        if not recipe.keeps_codes:
            return {"x": x}
        assert recipe.fprop.a is not None
        carried = recipe.fprop.outliers is not None and recipe.fprop.outliers.variant == "carrier"
        packed = recipe.fprop.a.format is E2M1 and not carried
        if recipe.wgrad.b is Reuse.FPROP_CODES and not packed:
            return _stored_turned("x", codes.t())
        kept = _stored("x", codes, packed=packed)
        return kept if residual is None else kept | {"residual": residual.values, "columns": residual.columns}

    def _operand_of(self, x: Tensor) -> Kept:
        """wgrad's own operand, rotated and rounded in the forward pass."""
        quantizer = self.recipe.wgrad.b
        assert isinstance(quantizer, Quantizer)
        _, operand = self._rotated(Gemms.WGRAD, None, x.t().contiguous())
        return _stored("x", self._rounded(Gemms.WGRAD, Purpose.B, operand), packed=quantizer.format is E2M1)

    def _weight(self, w: Tensor) -> tuple[Quantized | None, Kept]:
        """Codes of the weight, where fprop or a later GEMM takes them; what backward needs of them."""
        quantizer, reused = self.recipe.fprop.b, self.recipe.dgrad.b is Reuse.FPROP_CODES
        if not isinstance(quantizer, Quantizer) or (self.recipe.fprop.codes_only and not reused):
            return None, {}
        back, shared = quantizer.turned(), self._shared(Gemms.FPROP, Purpose.B)
        fused = self.observer is None and pairs(quantizer, back) and parts_pair(quantizer, back, shared, folded=False)
        if reused and fused:
            codes, turned = both(w, quantizer, back, shared=shared)
            return codes, _stored_turned("w", turned)
        codes = self._rounded(Gemms.FPROP, Purpose.B, w)
        if reused:
            return codes, _stored("w", codes, packed=quantizer.format is E2M1)
        return codes, {} if isinstance(self.recipe.estimator, StraightThrough) else {"w_scale": codes.scale}

    def _dgrad_weight(self, weight: Tensor, kept: Kept, dtype: torch.dtype) -> Tensor | Quantized:
        """W^T [k, n], or its codes."""
        if self.recipe.dgrad.b is Reuse.FPROP_CODES:
            return _restored("w", kept, self.recipe.fprop.b, turned=True)
        return cast(weight, dtype).t().contiguous()

    def _wgrad_input(self, kept: Kept, dtype: torch.dtype) -> Tensor | Quantized:
        """X^T [k, m], or its codes."""
        recipe = self.recipe
        if recipe.keep is Keep.OPERAND:
            return _restored("x", kept, recipe.wgrad.b)
        if not recipe.keeps_codes:
            return kept["x"].t().contiguous()
        if recipe.wgrad.b is Reuse.FPROP_CODES:
            return _restored("x", kept, recipe.fprop.a, turned=True)
        return cast(_restored("x", kept, recipe.fprop.a).dequantize(), dtype).t().contiguous()

    def _both(
        self,
        dy: Tensor,
        weight: Tensor,
        kept: Kept,
        dtype: torch.dtype,
        product: torch.dtype | None,
        maxima: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """dX and the product of wgrad, dY rounded for both in one op."""
        dgrad, wgrad = self.recipe.dgrad, self.recipe.wgrad
        assert dgrad.a is not None and wgrad.a is not None
        across, w = self._unfolded(Gemms.DGRAD, self._dgrad_weight(weight, kept, dtype))
        down, x = self._unfolded(Gemms.WGRAD, self._wgrad_input(kept, dtype))
        folds = {"across": across, "down": None if down is None else down.t()}
        shared = self._shared(Gemms.DGRAD, Purpose.A)
        a, a_t = both(dy, dgrad.a, wgrad.a, **folds, amax=maxima, produced=True, shared=shared)
        dx = multiply(a, w, split_accumulation=dgrad.split_accumulation, dtype=dtype)
        return dx, multiply(a_t, x, split_accumulation=wgrad.split_accumulation, dtype=product)

    def _unfolded(self, which: Gemms, b: Tensor | Quantized) -> tuple[Tensor | None, Tensor | Quantized]:
        """(the scale [1, k] that the other operand has to take, operand b without it)."""
        if isinstance(b, Quantized) and _along_k(b):
            return b.scale, Quantized(b.codes, torch.ones_like(b.scale[:, :1]))
        if isinstance(self._gemm(which).b, Quantizer) and isinstance(b, Tensor):
            b = self._rounded(which, Purpose.B, b)
        return None, b

    def _dgrad(self, dy: Tensor | Quantized, weight: Tensor, kept: Kept, dtype: torch.dtype) -> Tensor:
        if isinstance(dy, Tensor) and self._folds(Gemms.DGRAD):
            a = self._folded(Gemms.DGRAD, Purpose.A, dy)
            b = self._folded(Gemms.DGRAD, Purpose.B, cast(weight, dtype), transposed=True)
            return multiply(a, b, split_accumulation=self.recipe.dgrad.split_accumulation, dtype=dtype)
        return self._product(Gemms.DGRAD, dy, self._dgrad_weight(weight, kept, dtype), dtype)

    def _wgrad(
        self, dy: Tensor, shared: Quantized | None, kept: Kept, dtype: torch.dtype, product: torch.dtype | None
    ) -> Tensor:
        recipe = self.recipe
        if recipe.wgrad.is_identity and not recipe.keeps_codes:  # the very product that nn.Linear's backward makes
            return cast(dy.t() @ kept["x"], product or torch.float32)
        plain = "x" in kept or ("x_codes" in kept and dtype == torch.bfloat16)
        if self._folds(Gemms.WGRAD) and plain:
            a = self._folded(Gemms.WGRAD, Purpose.A, dy, transposed=True)
            x, scale = (kept["x"], None) if "x" in kept else (kept["x_codes"], kept["x_scale"])
            b = self._folded(Gemms.WGRAD, Purpose.B, x, transposed=True, scale=scale)
            return multiply(a, b, split_accumulation=recipe.wgrad.split_accumulation, dtype=product)
        a_t = shared.t() if shared is not None else dy.t().contiguous()
        return self._product(Gemms.WGRAD, a_t, self._wgrad_input(kept, dtype), product)

    def _product(self, which: Gemms, a: Tensor | Quantized, b: Tensor | Quantized, dtype: torch.dtype | None) -> Tensor:
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

    def _folds(self, which: Gemms) -> bool:
        """True when both operands go from plain values to folded carriers in one op."""
        gemm = self._gemm(which)
        operands = ((gemm.a, self._shared(which, Purpose.A)), (gemm.b, self._shared(which, Purpose.B)))
        return self.observer is None and all(
            isinstance(q, Quantizer) and folds(q) and (shared is None or not q.crosses(shared.dim))
            for q, shared in operands
        )

    def _folded(
        self, which: Gemms, purpose: Purpose, x: Tensor, *, transposed: bool = False, scale: Tensor | None = None
    ) -> Quantized:
        """One operand, rotated, rounded and folded. x [m, k] as it lies, with `scale` the codes of it."""
        gemm = self._gemm(which)
        quantizer = gemm.a if purpose is Purpose.A else gemm.b
        assert isinstance(quantizer, Quantizer)
        signs = None if gemm.rotation is None else self._seed(which, Purpose.ROTATION)
        rotation = 0 if gemm.rotation is None else gemm.rotation.block
        span, share = quantizer.span, quantizer.range_share
        how = (quantizer.scale.value, share, span, carrier_of(span), quantizer.rounding.name)
        codes, row = quantizer.kernel("rotate_fold", x.device)(
            x, scale, transposed, signs, rotation, *how, *self._noise(quantizer, which, purpose)
        )
        return Quantized(codes, row, span=quantizer.span)

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
        codes = quantizer(x, *self._noise(quantizer, which, purpose), self._shared(which, purpose))
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
        seed, tokens = self._seed(which, purpose), self._token_origin(which, purpose)
        return seed, tokens if self.split is None else self.split.origin(which, purpose, tokens, seed.device)

    def _shared(self, which: Gemms, purpose: Purpose) -> Shared | None:
        """What an operand's scales take from other ranks; None for an operand that is not cut."""
        return None if self.split is None else self.split.shared(which, purpose)

    def _seed(self, which: Gemms, purpose: Purpose) -> Tensor:
        if self.draws is None:
            raise ValueError("a stochastic recipe needs draws: forward(x, draws=...), or attach_draws before it")
        return self.draws.seed(which, purpose)

    def _token_origin(self, which: Gemms, purpose: Purpose) -> Tensor | None:
        """Where the operand's tokens lie: rows of X and dY, columns of dY^T and X^T, none in W."""
        assert self.draws is not None
        if which is Gemms.WGRAD:
            return self.draws.token_columns
        return self.draws.token_rows if purpose is Purpose.A else None

    def _pairs_dy(self, kept: Kept) -> bool:
        """True when one op rounds dY for dgrad and for wgrad."""
        dgrad, wgrad = self.recipe.dgrad, self.recipe.wgrad
        plain = self.observer is None and dgrad.rotation is None and wgrad.rotation is None
        if not plain or dgrad.a is None or wgrad.a is None or not pairs(dgrad.a, wgrad.a):
            return False
        shared = self._shared(Gemms.DGRAD, Purpose.A)
        return parts_pair(dgrad.a, wgrad.a, shared, folded=self._takes_scales(kept))

    def _shares_dy(self, kept: Kept) -> bool:
        """True when dgrad and wgrad see the same codes of dY: one tensor scale, nothing rotated, drawn or folded."""
        dgrad, wgrad = self.recipe.dgrad, self.recipe.wgrad
        a, plain = dgrad.a, dgrad.rotation is None and wgrad.rotation is None
        if a is None or a != wgrad.a or a.tile != (-1, -1) or a.stochastic or not plain:
            return False
        return not self._takes_scales(kept)

    def _takes_scales(self, kept: Kept) -> bool:
        """True when reused codes have several scales: those along the reduction are folded into dY."""
        reuses = ((self.recipe.dgrad, "w_scale"), (self.recipe.wgrad, "x_scale"))
        return any(gemm.b is Reuse.FPROP_CODES and kept[name].numel() > 1 for gemm, name in reuses if name in kept)


def _along_k(b: Quantized) -> bool:
    """One scale for each column of b: it lies along the reduction."""
    return b.scale.shape[0] == 1 and b.scale.shape[1] == b.codes.shape[1] > 1


def _stored(name: str, codes: Quantized, *, packed: bool) -> Kept:
    """Flat tensors to keep: codes, two E2M1 codes a byte where `packed`; the scale, or the levels that make it."""
    packed = packed and codes.codes.shape[1] % 2 == 0
    kept = {f"{name}_packed": torch.ops.lowprec.pack_e2m1(codes.codes)} if packed else {f"{name}_codes": codes.codes}
    levels = {f"{name}_{part}": value for part, value in codes.parts.items()}
    return kept | (levels or {f"{name}_scale": codes.scale})


def _stored_turned(name: str, codes: Quantized) -> Kept:
    """Codes of the transposed matrix, as a backward GEMM takes them."""
    return {f"{name}_turned": codes.codes, f"{name}_scale": codes.scale}


def _restored(name: str, kept: Kept, quantizer: Quantizer | Reuse | None, *, turned: bool = False) -> Quantized:
    """What `_stored` or `_stored_turned` took, rounded by `quantizer`; `turned`: of the transposed matrix."""
    assert isinstance(quantizer, Quantizer)
    if f"{name}_turned" in kept:
        return quantizer.wrap(kept[f"{name}_turned"], kept[f"{name}_scale"])
    packed = kept.get(f"{name}_packed")
    codes = kept[f"{name}_codes"] if packed is None else torch.ops.lowprec.unpack_e2m1(packed)
    if f"{name}_block" in kept:
        parts = {"block": kept[f"{name}_block"], "tensor": kept[f"{name}_tensor"]}
        restored = quantizer.wrap(codes, parts["block"].float() * parts["tensor"], parts)
    else:
        restored = quantizer.wrap(codes, kept[f"{name}_scale"])
    return restored.t() if turned else restored
