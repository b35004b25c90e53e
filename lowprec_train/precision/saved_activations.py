"""What norms and activations save for the backward pass: their inputs in BF16, or in FP8 codes (COAT, arXiv 2410.19313,
section 5).

    x^ = Q(x) in groups along the last dimension,   y = f(x^),   dx = f'(x^) dy        straight through Q

The layer computes from the rounded input, so its backward pass needs only the codes: one byte per element (E2M1: half a
byte) and one byte per group for the exponent of its power-of-two scale. E4M3 in groups of 16 needs 1.0625 bytes per
element, BF16 two and an FP32 copy four. Other values of the derivative (the norm's rate, silu) are recomputed from the
codes; COAT also saves silu. The residual stream stays in BF16. Rounding is to nearest, so recomputation gives the same
bits.

There are two forms: any function of rounded inputs, op by op (`through_codes`), and norms and activations in one kernel
(`model.activations`), which is used if there is a kernel and no observer.

A layer that `recomputes` makes its codes by an op of their own, `saved_codes` or in the second form `group_codes`, and
computes y from them. Selective recomputation saves what this op returns, and needs neither the input nor y.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from lowprec_train.group import kept
from lowprec_train.numerics.formats import E2M1, NEAREST
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule
from lowprec_train.ops import activations
from lowprec_train.ops.library import SERVED
from lowprec_train.precision.gemm import cast

Observer = Callable[[Tensor, Quantized, Quantizer], None]
"""Told of every input that is rounded: the matrix, what came out, how."""

Stored = tuple[Tensor, Tensor]
"""Codes (two E2M1 codes a byte) and the biased exponents of their scales, a byte each (E8M0; 255 for NaN)."""

EXPONENTS = (ScaleRule.POW2, ScaleRule.E8M0_CEIL)  # never saturate, and a byte holds them


@dataclass(frozen=True)
class SavedActivationPolicy:
    """Quantisers of the saved inputs of norms and activations in blocks; None: saved without quantisation.

    Raises ValueError for a quantiser that does not round to nearest, for tiles that span several tokens, and for scales
    that are not powers of two: they need four bytes per group, and a compiler that finds the same dequantisation in
    forward and backward saves its FP32 result.
    """

    norm: Quantizer | None = None
    activation: Quantizer | None = None

    def __post_init__(self) -> None:
        for role in ("norm", "activation"):
            quantizer = self.of(role)
            if quantizer is None:
                continue
            if quantizer.rounding is not NEAREST or quantizer.tile[0] != 1:
                raise ValueError(
                    f"{role}={quantizer}: saved inputs are rounded to nearest in groups of one token, so that a "
                    "recomputed layer meets the same bits, however the batch is cut"
                )
            if quantizer.scale not in EXPONENTS:
                raise ValueError(
                    f"{role}={quantizer}: the scales of saved inputs are stored as exponents; they are "
                    f"{' or '.join(rule.name for rule in EXPONENTS)}"
                )

    def of(self, role: str) -> Quantizer | None:
        """Return the quantiser of a role, "norm" or "activation"."""
        quantizer: Quantizer | None = getattr(self, role)
        return quantizer

    def check(self, model: nn.Module) -> None:
        """Raises ValueError for a module whose width is not a multiple of the group."""
        for name, module in saved_inputs(model):
            quantizer = self.of(module.role)
            if quantizer is None:
                continue
            group = 1 if quantizer.tile[1] == -1 else quantizer.tile[1]
            if module.width % group:
                raise ValueError(f"{name}: groups of {group} do not divide the {module.width} channels that it keeps")
            if quantizer.format is E2M1 and module.width % 2:
                raise ValueError(f"{name}: two E2M1 codes make a byte, and it keeps {module.width} channels")


class Formula(Protocol):
    """A function of inputs, which may be rounded, and of parameters, with its derivative; all FP32.

    forward(inputs, parameters) -> y.  backward(dy, inputs, parameters) -> a gradient for each input and parameter.
    """

    def forward(self, inputs: tuple[Tensor, ...], parameters: tuple[Tensor, ...]) -> Tensor: ...

    def backward(
        self, dy: Tensor, inputs: tuple[Tensor, ...], parameters: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]: ...


class QuantizedSavedInput(nn.Module):
    """A layer whose input may be saved in codes.

    role: "norm" or "activation". op: rounds the inputs, computes, and saves the codes in one pass, if it has a kernel.
    plain_op: computes without rounding. Both compute the amax of their results in forward and backward: fed_by and
    feeds are the linears inside this module that use it for dY and for X. width: channels of the rounded input.
    quantizer: None: no rounding. observer: called for every rounding; None: none. recomputes: whether y is computed
    from the saved codes, so that it can be recomputed from them.
    """

    role: ClassVar[str]
    op: ClassVar[str] = ""
    plain_op: ClassVar[str] = ""
    fed_by: ClassVar[str] = ""
    feeds: ClassVar[str] = ""
    width: int
    quantizer: Quantizer | None = None
    observer: Observer | None = None
    recomputes: bool = False

    def fuses(self, x: Tensor) -> bool:
        """Return whether the compiled kernel of `op` rounds x, computes and saves the codes in one pass."""
        how = self.quantizer
        return how is not None and self.observer is None and self._has_kernel(how, x.device, x.dtype)

    def runs(self, how: Quantizer | None, device: torch.device, dtype: torch.dtype) -> str:
        """Return the op that this module runs under a quantiser; "" if there are several."""
        return self.plain_op if how is None else self.op if self._has_kernel(how, device, dtype) else ""

    def _has_kernel(self, how: Quantizer, device: torch.device, dtype: torch.dtype) -> bool:
        if self.op not in SERVED.get(device.type, ()):
            return False
        plain = how.range_share == 1.0 and not how.exponent_span and dtype in (torch.bfloat16, torch.float32)
        return plain and activations.has_kernel(self.op, self.width, how.format.name, how.tile[1])

    def through_codes(self, formula: Formula, inputs: tuple[Tensor, ...], parameters: tuple[Tensor, ...]) -> Tensor:
        """Compute the formula from the rounded inputs [..., width], in their dtype, and save only codes."""
        assert self.quantizer is not None
        if not torch.is_grad_enabled():  # nothing is saved; a compiled Function without gradients loses its context
            _, values = _rounded(inputs, self.quantizer, self.observer, recomputes=False)
            return cast(formula.forward(values, parameters), inputs[0].dtype)
        how = formula, self.quantizer, self.observer, self.recomputes
        y: Tensor = _ThroughCodes.apply(*how, len(inputs), *inputs, *parameters)
        return y


class _ThroughCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, formula, quantizer, observer, recomputes, count, *tensors):  # type: ignore[no-untyped-def]
        inputs, parameters = tensors[:count], tensors[count:]
        pairs, values = _rounded(inputs, quantizer, observer, recomputes)
        ctx.formula, ctx.quantizer, ctx.count = formula, quantizer, count
        ctx.shape, ctx.dtype = inputs[0].shape, inputs[0].dtype
        parts = (part for pair in pairs for part in pair)
        ctx.save_for_backward(*parameters, *(parts if recomputes else map(kept, parts)))
        return cast(formula.forward(values, parameters), ctx.dtype)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # once: recomputation hands it out a single time
        parameters, parts = saved[: -2 * ctx.count], saved[-2 * ctx.count :]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        inputs = tuple(_restored(*pair, ctx.quantizer).dequantize().view(ctx.shape) for pair in pairs)
        gradients = ctx.formula.backward(dy.float(), inputs, parameters)
        dtypes = [ctx.dtype] * ctx.count + [parameter.dtype for parameter in parameters]
        return None, None, None, None, None, *(cast(g, d) for g, d in zip(gradients, dtypes, strict=True))


def _rounded(
    inputs: tuple[Tensor, ...], quantizer: Quantizer, observer: Observer | None, recomputes: bool
) -> tuple[list[Stored], tuple[Tensor, ...]]:
    """Return what is saved of each input, and their values, FP32 in the shape of the input."""
    pairs, values = [], []
    for x in inputs:
        matrix = x.flatten(end_dim=-2)
        if recomputes:
            pair = saved_codes(matrix, quantizer)
            codes = _restored(*pair, quantizer)
        else:
            codes = quantizer(matrix)
            pair = _stored(codes, quantizer)
        if observer is not None:
            observer(matrix, codes, quantizer)
        pairs.append(pair)
        values.append(codes.dequantize().view(x.shape))
    return pairs, tuple(values)


def saved_codes(x: Tensor, quantizer: Quantizer) -> Stored:
    """Return what is saved of x [m, k], made by an op of its own."""
    name, tile, rule = quantizer.format.name, quantizer.tile, quantizer.scale.value
    pair: Stored = torch.ops.lowprec.saved_codes(x, name, tile, rule, quantizer.range_share, quantizer.exponent_span)
    return pair


def _stored(rounded: Quantized, quantizer: Quantizer) -> Stored:
    codes = torch.ops.lowprec.pack_e2m1(rounded.codes) if quantizer.format is E2M1 else rounded.codes
    return codes, activations.exponents_of(rounded.scale)


def _restored(codes: Tensor, exponents: Tensor, quantizer: Quantizer) -> Quantized:
    codes = torch.ops.lowprec.unpack_e2m1(codes) if quantizer.format is E2M1 else codes
    return quantizer.wrap(codes, activations.scales_of(exponents))


def saved_inputs(model: nn.Module) -> Iterator[tuple[str, QuantizedSavedInput]]:
    """Return the norms and activations inside blocks, by name."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedSavedInput))
    return ((name, module) for name, module in found if name.startswith("blocks."))


def apply_saved_activations(model: nn.Module, policy: SavedActivationPolicy) -> None:
    """Set the policy of the norms and activations in blocks; may be called at any step."""
    for _, module in saved_inputs(model):
        module.quantizer = policy.of(module.role)
