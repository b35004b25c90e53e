"""The rows of `lowprec bench kernels`: the op, its inputs, and the bytes that it must move.

A memory-bound kernel is compared with the bytes that must move: outputs and inputs once, and its first input `passes`
times. A second pass is needed if the amax over more than one row must be known before the first code is written; one
row, or a tile of 128 x 128, fits on the chip. Sizes of inputs and outputs come from the op's fake kernel on the meta
device, so scales are included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowprec_train.ops import library  # noqa: F401  registers torch.ops.lowprec
from lowprec_train.tools.bench.case import ACTIVATIONS, WEIGHTS, Case, Inputs, values
from lowprec_train.tools.bench.producer_cases import producers

SEED, BLOCK, GROUP, SEGMENTS = 7, 128, 128, 8
ops = torch.ops.lowprec


def _seed(device: torch.device) -> Tensor:
    return torch.full((), SEED, dtype=torch.int64, device=device)


def _quantize(format: str, tile: tuple[int, int], rule: str, headroom: float = 1.0, exponent_span: int = 0) -> Callable:
    def call(x: Tensor, seed: Tensor | None = None) -> Any:
        rounding = "nearest" if seed is None else "stochastic"
        return ops.quantize(x, format, tile, rule, headroom, exponent_span, rounding, seed, None)

    return call


def _both(format: str, tile: tuple[int, int], tile_t: tuple[int, int], rule: str) -> Callable:
    return lambda x, amax=None, across=None, down=None: ops.quantize_both(
        x, amax, across, down, format, tile, tile_t, rule, 1.0
    )


def _with_seed(m: int, k: int, device: torch.device) -> Inputs:
    return torch.randn(m, k, device=device, dtype=torch.bfloat16), _seed(device)


def _with_amax(m: int, k: int, device: torch.device) -> Inputs:
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    return x, x.abs().amax(dim=1).float()


def _with_folds(m: int, k: int, device: torch.device) -> Inputs:
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    return x, None, torch.rand(1, k, device=device) + 0.5, torch.rand(m, 1, device=device) + 0.5


def _codes(format: str, tile: tuple[int, int], rule: str = "POW2", scales: bool = True) -> Callable[..., Inputs]:
    """Return a function that makes codes of random values, with or without scales."""

    def made(m: int, k: int, device: torch.device) -> Inputs:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        codes, scale = ops.quantize(x, format, tile, rule, 1.0, 14 if tile == (1, 32) else 0, "nearest", None, None)
        return (codes, scale) if scales else (codes,)

    return made


def _packed(m: int, k: int, device: torch.device) -> Inputs:
    return (ops.pack_e2m1(_codes("E2M1", (1, -1), "FP32", scales=False)(m, k, device)[0]),)


def _bounded(m: int, k: int, device: torch.device) -> Inputs:
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    limit = torch.full((m, 1), 2.3, device=device)  # of a normal distribution, about 1 % on each side
    return x, -limit, limit, x.abs().amax(1, keepdim=True).float()


def _gradient(m: int, k: int, device: torch.device) -> Inputs:
    weight = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    return torch.randn(m, k, device=device), weight, torch.full((m, 1), 0.75, device=device)


def _moments(m: int, k: int, device: torch.device) -> Inputs:
    return tuple(ops.quantize_expanded(torch.randn(m, k, device=device), "E4M3", GROUP, SEGMENTS))


def _rotate_fold(transposed: bool, coded: bool) -> Callable:
    def call(x: Tensor, seed: Tensor, scale: Tensor | None = None) -> Any:
        how = (64, "E8M0_FLOOR", 0.75, 14 if coded else 28, "E4M3" if coded else "E5M2")
        return ops.rotate_fold(x, scale, transposed, seed, *how, "stochastic", seed, None)

    return call


def _rotate_fold_ladder(transposed: bool, rotation: int) -> Callable:
    def call(x: Tensor, seed: Tensor, scale: Tensor | None = None) -> Any:
        how = (rotation, 2.0**-3, (1, 16), "mse", 11, rotation > 0)
        return ops.rotate_fold_ladder(x, scale, transposed, seed if rotation else None, *how)

    return call


def _rotated(m: int, k: int, device: torch.device) -> Inputs:
    x = ops.hadamard_half(*_with_seed(m, k, device), 128, 2.0**-3)
    return x, ops.amax(x, (1, -1))


def _laddered(m: int, k: int, device: torch.device) -> Inputs:
    of = _rotated(m, k, device)
    return of[0], *_quantize_ladder(*of)


def _quantize_ladder(x: Tensor | None, tops: Tensor | None = None) -> Any:
    return ops.quantize_ladder(x, tops, (1, 16), "mse", 11)


def _carriers(m: int, k: int, device: torch.device) -> Inputs:
    return ops.fold_ladder(*_laddered(m, k, device)[1:], None)[:1]


def _packed_carriers(m: int, k: int, device: torch.device) -> Inputs:
    return ops.pack_ladder(*_carriers(m, k, device))


def _quantize_eden(x: Tensor, seed: Tensor) -> Any:
    return ops.quantize_eden(x, ops.rotated_amax(x, seed, 128), seed, 128, seed, None)


def _round_eden(x: Tensor, seed: Tensor) -> Any:
    return ops.round_eden(x, ops.rotated_amax(x, seed, 128), seed, 128, seed, None)


def _coded(m: int, k: int, device: torch.device) -> Inputs:
    codes, scale = _codes("E4M3", (-1, -1))(m, k, device)
    return codes, _seed(device), scale


def _quantisers() -> Iterator[Case]:
    yield Case(name="tensor", op="quantize", inputs=values(), call=_quantize("E4M3", (-1, -1), "POW2"), passes=2)
    yield Case(name="row", op="quantize", inputs=values(), call=_quantize("E4M3", (1, -1), "FP32"))
    yield Case(name="row E2M1", op="quantize", inputs=values(), call=_quantize("E2M1", (1, -1), "FP32"), shapes=WEIGHTS)
    yield Case(name="1x128", op="quantize", inputs=values(), call=_quantize("E4M3", (1, BLOCK), "POW2"))
    yield Case(
        name="128x128", op="quantize", inputs=values(), call=_quantize("E4M3", (BLOCK, BLOCK), "POW2"), shapes=WEIGHTS
    )
    mx = _quantize("E2M1", (1, 32), "E8M0_FLOOR", 0.75, 28)
    yield Case(name="1x32 E2M1 stochastic", op="quantize", inputs=_with_seed, call=mx)
    yield Case(
        name="1x16 stochastic",
        op="quantize_nvfp4",
        inputs=_with_seed,
        call=lambda x, seed: ops.quantize_nvfp4(x, (1, 16), 16 / 17, "stochastic", seed, None),
        passes=2,
    )
    yield Case(
        name="stochastic, rotated 16",
        op="round_nvfp4",
        inputs=_with_seed,
        call=lambda x, seed: ops.round_nvfp4(x, 16 / 17, "stochastic", seed, None, seed, 16),
        passes=2,
    )
    yield Case(
        name="16x16",
        op="quantize_nvfp4",
        inputs=values(),
        call=lambda x: ops.quantize_nvfp4(x, (16, 16), 1.0, "nearest", None, None),
        passes=2,
        shapes=WEIGHTS,
    )


def _parts() -> Iterator[Case]:
    """Yield ops on a rank's shard of a matrix, with the amax of the whole matrix."""

    def with_amax(tile: tuple[int, int]) -> Callable[[int, int, torch.device], Inputs]:
        def made(m: int, k: int, device: torch.device) -> Inputs:
            x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
            return x, ops.amax(x, tile)

        return made

    def by_row(x: Tensor, amax: Tensor) -> Any:
        return ops.quantize_by(x, amax, None, "E4M3", (1, -1), "POW2", 1.0, 0, "nearest", None, None)

    def nvfp4(x: Tensor, amax: Tensor) -> Any:
        return ops.quantize_nvfp4_by(x, amax, amax.amax().reshape(1, 1), (1, 16), 1.0, "nearest", None, None)

    def four_over_six(x: Tensor, amax: Tensor) -> Any:
        return ops.quantize_four_over_six(x, amax, amax.amax().reshape(1, 1), (1, 16), "mse")

    yield Case(name="row", op="amax", inputs=values(), call=lambda x: ops.amax(x, (1, -1)))
    yield Case(name="row", op="quantize_by", inputs=with_amax((1, -1)), call=by_row)
    yield Case(name="1x16", op="quantize_nvfp4_by", inputs=with_amax((1, 16)), call=nvfp4)
    yield Case(name="1x16", op="quantize_four_over_six", inputs=with_amax((1, 16)), call=four_over_six)
    yield Case(
        name="FP32",
        op="sum_squares",
        inputs=lambda m, k, device: (torch.randn(m, k, device=device),),
        call=lambda x: ops.sum_squares([x]),
        shapes=WEIGHTS,
    )


def _pairs() -> Iterator[Case]:
    everywhere, tensor, row, line = ACTIVATIONS + WEIGHTS, (-1, -1), (1, -1), (1, BLOCK)
    whole = _both("E4M3", tensor, tensor, "POW2")
    yield Case(name="tensor", op="quantize_both", inputs=values(), call=whole, passes=2, shapes=everywhere)
    yield Case(name="tensor, amax", op="quantize_both", inputs=_with_amax, call=whole, shapes=everywhere)
    rows = _both("E4M3", row, row, "FP32")
    yield Case(name="row", op="quantize_both", inputs=values(), call=rows, passes=2, shapes=everywhere)
    rows = _both("E5M2", row, row, "FP32")
    yield Case(name="row E5M2, folds", op="quantize_both", inputs=_with_folds, call=rows, passes=2)
    transposed = _both("E2M1", row, (-1, 1), "FP32")
    yield Case(name="row E2M1, transposed", op="quantize_both", inputs=values(), call=transposed, shapes=WEIGHTS)

    def alone(x: Tensor, amax: Tensor, *norm: Tensor) -> Any:
        return ops.quantize_transposed(x, amax, "E4M3", "POW2", 1.0, *norm)

    def whole_amax(m: int, k: int, device: torch.device) -> Inputs:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        return x, ops.amax(x, tensor)

    def with_norm(m: int, k: int, device: torch.device) -> Inputs:
        return *whole_amax(m, k, device), torch.ones(m, device=device), torch.ones(k, device=device)

    yield Case(name="tensor", op="quantize_transposed", inputs=whole_amax, call=alone)
    yield Case(name="tensor, norm", op="quantize_transposed", inputs=with_norm, call=alone)
    lines = _both("E4M3", line, line, "POW2")
    yield Case(name="1x128", op="quantize_both", inputs=values(), call=lines)
    square = _both("E4M3", (BLOCK, BLOCK), (BLOCK, BLOCK), "POW2")
    yield Case(name="128x128", op="quantize_both", inputs=values(), call=square, shapes=WEIGHTS)


def _codes_alone() -> Iterator[Case]:
    def copied(weight: Tensor) -> Any:
        return ops.copy_weight(weight, torch.bfloat16, weight)

    yield Case(name="BF16", op="copy_weight", inputs=values(), call=copied, shapes=WEIGHTS)
    one = _codes("E4M3", (-1, -1), scales=False)
    yield Case(name="1 byte", op="transpose", inputs=one, call=ops.transpose)
    four = _codes("E2M1", (1, -1), "FP32", scales=False)
    yield Case(name="E2M1", op="pack_e2m1", inputs=four, call=ops.pack_e2m1)
    yield Case(name="E2M1", op="unpack_e2m1", inputs=_packed, call=ops.unpack_e2m1)
    yield Case(name="row", op="dequantize", inputs=_codes("E4M3", (1, -1)), call=ops.dequantize)
    yield Case(name="1x16", op="dequantize", inputs=_codes("E4M3", (1, 16)), call=ops.dequantize)
    yield Case(name="1x16", op="dequantize_bf16", inputs=_codes("E4M3", (1, 16)), call=ops.dequantize_bf16)
    yield Case(
        name="1x32 into E5M2", op="fold", inputs=_codes("E2M1", (1, 32)), call=lambda c, s: ops.fold(c, s, "E5M2")
    )

    def packed(m: int, k: int, device: torch.device) -> Inputs:
        codes, scale = _codes("E2M1", (1, 32))(m, k, device)
        return ops.pack_e2m1(codes), scale

    yield Case(
        name="1x32, packed, into E4M3",
        op="fold_transposed",
        inputs=packed,
        call=lambda c, s: ops.fold_transposed(c, s, "E4M3"),
        shapes=WEIGHTS,
    )


def _lists() -> Iterator[Case]:
    """Ops of many tensors, with one. Those that write to their arguments return what they wrote."""

    def quantised(x: Tensor, amax: Tensor) -> Any:
        codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        return codes, ops.quantize_all_by([x], amax.flatten(), [codes], "E4M3", "POW2", 1.0)

    def corrected(grad: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ops.dge_all([grad], [weight], [scale], 5.0, 3.0, torch.bfloat16)
        return grad

    def unpacked(packed: Tensor) -> Tensor:
        codes = packed.new_empty((packed.shape[0], 2 * packed.shape[1]))
        ops.unpack_e2m1_all([packed], [codes])
        return codes

    def amaxes(m: int, k: int, device: torch.device) -> Inputs:
        return torch.randn(m, k, device=device, dtype=torch.bfloat16), torch.full((1,), 6.0, device=device)

    yield Case(name="one", op="amax_all", inputs=values(), call=lambda x: ops.amax_all([x]), shapes=WEIGHTS)
    yield Case(name="one", op="quantize_all_by", inputs=amaxes, call=quantised, shapes=WEIGHTS)
    yield Case(name="one, k = 5", op="dge_all", inputs=_gradient, call=corrected, shapes=WEIGHTS)
    yield Case(name="one", op="unpack_e2m1_all", inputs=_packed, call=unpacked, shapes=WEIGHTS)


def _methods() -> Iterator[Case]:
    def clipped(x: Tensor) -> int:
        return x.shape[1] // 100

    yield Case(name="1 %", op="quantize_outliers", inputs=values(), call=lambda x: ops.quantize_outliers(x, clipped(x)))
    yield Case(name="1 %", op="outlier_bounds", inputs=values(), call=lambda x: ops.outlier_bounds(x, clipped(x)))
    yield Case(name="row", op="quantize_carrier", inputs=_bounded, call=ops.quantize_carrier)
    yield Case(
        name="k = 5", op="dge", inputs=_gradient, call=lambda *a: ops.dge(*a, 5.0, 3.0, torch.bfloat16), shapes=WEIGHTS
    )
    yield Case(name="64", op="hadamard", inputs=_with_seed, call=lambda x, seed: ops.hadamard(x, seed, 64))
    half = lambda x, seed: ops.hadamard_half(x, seed, 128, 2.0**-3)  # noqa: E731
    yield Case(name="128", op="hadamard_half", inputs=_with_seed, call=half)
    everywhere = ACTIVATIONS + WEIGHTS
    yield Case(name="rows", op="rotate_fold", inputs=_with_seed, call=_rotate_fold(False, False), shapes=everywhere)
    transposed = _rotate_fold(True, False)
    yield Case(name="columns", op="rotate_fold", inputs=_with_seed, call=transposed, passes=2, shapes=everywhere)
    transposed = _rotate_fold(True, True)
    yield Case(name="columns of E4M3 codes", op="rotate_fold", inputs=_coded, call=transposed, passes=2)
    for name, across, rotation in (("rows, plain", False, 0), ("rows", False, 128), ("columns", True, 128)):
        call, op = _rotate_fold_ladder(across, rotation), "rotate_fold_ladder"
        yield Case(name=name, op=op, inputs=_with_seed, call=call, passes=1 + across, shapes=everywhere)
    rungs = Case(name="1x16", op="quantize_ladder", inputs=values(), call=_quantize_ladder)
    part = Case(name="1x16, rotated, given amax", op="quantize_ladder", inputs=_rotated, call=_quantize_ladder)
    folds = Case(name="1x16", op="fold_ladder", inputs=_laddered, call=lambda _, *of: ops.fold_ladder(*of, None))
    sums = Case(name="1x16", op="row_sums", inputs=_laddered, call=lambda *of: ops.row_sums(*of, 11))
    yield from (rungs, part, folds, sums)
    yield Case(name="carriers", op="pack_ladder", inputs=_carriers, call=ops.pack_ladder)
    yield Case(name="carriers", op="unpack_ladder", inputs=_packed_carriers, call=ops.unpack_ladder)
    yield Case(name="rows", op="rotated_amax", inputs=_with_seed, call=lambda x, seed: ops.rotated_amax(x, seed, 128))
    yield Case(name="rows", op="quantize_eden", inputs=_with_seed, call=_quantize_eden, passes=2)
    yield Case(name="rows", op="round_eden", inputs=_with_seed, call=_round_eden, passes=2)
    call = _rotate_fold_ladder(True, 128)
    yield Case(name="columns of E4M3 codes", op="rotate_fold_ladder", inputs=_coded, call=call, passes=2)
    expanded = ("E4M3", GROUP, SEGMENTS)
    yield Case(
        name="E4M3",
        op="quantize_expanded",
        inputs=values(torch.float32),
        call=lambda x: ops.quantize_expanded(x, *expanded),
        shapes=WEIGHTS,
    )
    yield Case(
        name="E4M3",
        op="dequantize_expanded",
        inputs=_moments,
        call=lambda *parts: ops.dequantize_expanded(*parts, *expanded),
        shapes=WEIGHTS,
    )


CASES: tuple[Case, ...] = (*_quantisers(), *_parts(), *_pairs(), *_codes_alone(), *_lists(), *_methods(), *producers())
