"""Fake kernels: shapes and dtypes of each op's outputs, for tracing. The schemas are in ops/schema.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowprec_train.ops.formats import parse_format
from lowprec_train.ops.rotary import rotary_shape
from lowprec_train.ops.schema import row_bytes_by, segment_groups, tile_shape


def _scale_like(x: Tensor, tile: list[int] | tuple[int, int]) -> Tensor:
    rows, columns = tile_shape(x.shape[0], x.shape[1], tile)
    return x.new_empty((x.shape[0] // rows, x.shape[1] // columns), dtype=torch.float32)


def _quantize(x, format, tile, *_):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=parse_format(format).carrier), _scale_like(x, tile)


def _quantize_nvfp4(x, tile, *_):  # type: ignore[no-untyped-def]
    scale = _scale_like(x, tile)
    stored = torch.empty_like(scale, dtype=torch.float8_e4m3fn)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scale, stored, scale.new_empty((1, 1))


def _quantize_by(x, amax, tops, format, tile, *_):  # type: ignore[no-untyped-def]
    return _quantize(x, format, tile)


def _quantize_nvfp4_by(x, amax, top, tile, *_):  # type: ignore[no-untyped-def]
    codes, scale, stored, _ = _quantize_nvfp4(x, tile)
    return codes, scale, stored, torch.empty_like(top)


def _quantize_eden(x, top, *_):  # type: ignore[no-untyped-def]
    return _quantize_nvfp4(x, (1, 16))


def _round_nvfp4(x, *_):  # type: ignore[no-untyped-def]
    tile_shape(x.shape[0], x.shape[1], (1, 16))
    return x.new_empty(x.shape, dtype=torch.bfloat16), x.new_empty((1, 1), dtype=torch.float32)


def _quantize_both(x, amax, across, down, format, tile, tile_t, scale_rule, headroom):  # type: ignore[no-untyped-def]
    codes_t = x.new_empty((x.shape[1], x.shape[0]), dtype=parse_format(format).carrier)
    return (
        x.new_empty(x.shape, dtype=parse_format(format).carrier),
        _scale_like(x, tile),
        codes_t,
        _scale_like(codes_t, tile_t),
    )


def _quantize_transposed(x, amax, format, *_):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[1], x.shape[0]), dtype=parse_format(format).carrier), _scale_like(x, (-1, -1))


def _row_carriers(x, *_):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), _scale_like(x, (1, -1))


def _transpose(codes, after=None):  # type: ignore[no-untyped-def]
    return codes.new_empty((codes.shape[1], codes.shape[0]))


def _copy_weight(weight, dtype, after):  # type: ignore[no-untyped-def]
    return weight.new_empty(weight.shape, dtype=dtype)


def _rotate_fold(  # type: ignore[no-untyped-def]
    x, scale, transposed, signs, rotation, scale_rule, headroom, exponent_span, carrier, *_
):
    rows, columns = x.shape[::-1] if transposed else x.shape
    codes = x.new_empty((rows, columns), dtype=parse_format(carrier).carrier)
    return codes, x.new_empty((rows, 1), dtype=torch.float32)


def _quantize_ladder(x, tops, tile, *_):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), _scale_like(x, tile), _scale_like(x, (1, -1))


def _row_sums(x, codes, scale, row, exponent_span):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], 2), dtype=torch.float64)


def _fold_ladder(codes, scale, row, factor):  # type: ignore[no-untyped-def]
    return torch.empty_like(codes), torch.empty_like(row)


def _rotate_fold_ladder(x, scale, transposed, *_):  # type: ignore[no-untyped-def]
    rows, columns = x.shape[::-1] if transposed else x.shape
    return x.new_empty((rows, columns), dtype=torch.float8_e4m3fn), x.new_empty((rows, 1), dtype=torch.float32)


def _outlier_bounds(x, clipped):  # type: ignore[no-untyped-def]
    return _scale_like(x, (1, -1)), _scale_like(x, (1, -1))


def _scaled_mm(a, scale_a, b, scale_b, *how):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[0]), dtype=how[-1])


def _bf16_mm(a, b, factor, dtype):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _fold(codes, scale, carrier):  # type: ignore[no-untyped-def]
    return codes.new_empty(codes.shape, dtype=parse_format(carrier).carrier), scale.new_empty((codes.shape[0], 1))


def _fold_transposed(codes, scale, carrier, after=None):  # type: ignore[no-untyped-def]
    rows, columns = codes.shape[0], codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
    return codes.new_empty((columns, rows), dtype=parse_format(carrier).carrier), scale.new_empty((rows, 1))


def _pack_e2m1(codes):  # type: ignore[no-untyped-def]
    if codes.shape[-1] % 2:
        raise ValueError(f"two E2M1 codes make a byte; the last dimension {codes.shape[-1]} is odd")
    return codes.new_empty((*codes.shape[:-1], codes.shape[-1] // 2), dtype=torch.uint8)


def _unpack_e2m1(packed):  # type: ignore[no-untyped-def]
    return packed.new_empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=torch.float8_e4m3fn)


def _quantize_expanded(x, format, group, segments):  # type: ignore[no-untyped-def]
    groups = segments * segment_groups(x.shape[1], group, segments)
    scale = x.new_empty((x.shape[0], groups), dtype=torch.float32)
    return (
        x.new_empty(x.shape, dtype=parse_format(format).carrier),
        scale,
        torch.empty_like(scale),
        torch.empty_like(scale),
    )


def _as_float32(x, *_):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=torch.float32)


def _in_place(*_):  # type: ignore[no-untyped-def]
    """Return nothing: the op writes to its arguments."""


def _encode_gradients_by(parts, rows, sizes, coded, scales, format):  # type: ignore[no-untyped-def]
    return parts[0].new_empty((rows, row_bytes_by(sizes, coded, format)), dtype=torch.uint8)


def _dge(grad, weight, scale, k, cap, dtype=None):  # type: ignore[no-untyped-def]
    return grad.new_empty(grad.shape, dtype=dtype or torch.float32)


def _codes_and_exponents(x, columns, format, group):  # type: ignore[no-untyped-def]
    """Return codes of x.shape[0] rows of `columns`, two E2M1 codes per byte, and the exponents of their groups."""
    wide, dtype = (columns // 2, torch.uint8) if format == "E2M1" else (columns, parse_format(format).carrier)
    return x.new_empty((x.shape[0], wide), dtype=dtype), x.new_empty((x.shape[0], columns // group), dtype=torch.uint8)


def _saved_codes(x, format, tile, *_):  # type: ignore[no-untyped-def]
    codes, scale = _quantize(x, format, tile)
    return _pack_e2m1(codes) if format == "E2M1" else codes, torch.empty_like(scale, dtype=torch.uint8)


def _group_codes(x, format, group, ways):  # type: ignore[no-untyped-def]
    codes, exponents = _codes_and_exponents(x, x.shape[1] // ways, format, group)
    return tuple(each.new_empty((ways * x.shape[0], each.shape[1])) for each in (codes, exponents))


def _of_codes(codes, rows, format, dtype):  # type: ignore[no-untyped-def]
    """Return y [rows, columns] of a matrix with these codes, and its amax."""
    y = codes.new_empty((rows, codes.shape[1] * (2 if format == "E2M1" else 1)), dtype=dtype)
    return y, _row_amax(y)


def _norm_of_codes(codes, exponents, weight, bias, eps, centered, format, group, dtype):  # type: ignore[no-untyped-def]
    return _of_codes(codes, codes.shape[0], format, dtype)


def _gated_silu_of_codes(codes, exponents, format, group, dtype):  # type: ignore[no-untyped-def]
    return _of_codes(codes, codes.shape[0] // 2, format, dtype)


def _gelu_of_codes(codes, exponents, format, group, dtype):  # type: ignore[no-untyped-def]
    return _of_codes(codes, codes.shape[0], format, dtype)


def _row_amax(x):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], dtype=torch.float32)


def _quantized_norm(x, weight, bias, eps, centered, format, group):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), _row_amax(x), *_codes_and_exponents(x, x.shape[1], format, group)


def _quantized_norm_backward(dy, codes, exponents, weight, biased, eps, centered, format, group):  # type: ignore[no-untyped-def]
    dweight = weight.new_empty(weight.shape, dtype=torch.float32)
    return dy.new_empty(dy.shape), dweight, dweight.new_empty(weight.shape if biased else 0)


def _gated_silu(gate_up):  # type: ignore[no-untyped-def]
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2)), _row_amax(gate_up)


def _gated_silu_backward(dy, gate_up):  # type: ignore[no-untyped-def]
    return dy.new_empty(gate_up.shape), _row_amax(dy)


def _gated_silu_backward_ladder(dy, gate_up, *_):  # type: ignore[no-untyped-def]
    return dy.new_empty(gate_up.shape), _rotate_fold_ladder(gate_up, None, False)[1]


def _rotary_backward(dq, dk, dv, cos, sin):  # type: ignore[no-untyped-def]
    return dq.new_empty((dq.shape[0], rotary_shape(dq, dk, dv, cos, sin)[2]))


def _rotary_backward_ladder(dq, dk, dv, cos, sin, *_):  # type: ignore[no-untyped-def]
    dx = _rotary_backward(dq, dk, dv, cos, sin)
    return dx, *_rotate_fold_ladder(dx, None, False)


def _quantized_gated_silu(gate_up, format, group):  # type: ignore[no-untyped-def]
    width = gate_up.shape[1] // 2
    kept = (part for _ in range(2) for part in _codes_and_exponents(gate_up, width, format, group))
    return gate_up.new_empty((gate_up.shape[0], width)), _row_amax(gate_up), *kept


def _quantized_gated_silu_backward(dy, *_):  # type: ignore[no-untyped-def]
    return dy.new_empty((dy.shape[0], 2 * dy.shape[1])), _row_amax(dy)


def _quantized_gelu(x, format, group):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), _row_amax(x), *_codes_and_exponents(x, x.shape[1], format, group)


def _quantized_gelu_backward(dy, *_):  # type: ignore[no-untyped-def]
    return dy.new_empty(dy.shape), _row_amax(dy)


FAKES: dict[str, Callable] = {
    "quantize": _quantize,
    "quantize_nvfp4": _quantize_nvfp4,
    "amax": _scale_like,
    "quantize_by": _quantize_by,
    "quantize_nvfp4_by": _quantize_nvfp4_by,
    "quantize_both": _quantize_both,
    "quantize_transposed": _quantize_transposed,
    **dict.fromkeys(("quantize_outliers", "quantize_carrier"), _row_carriers),
    "transpose": _transpose,
    "copy_weight": _copy_weight,
    "rotate_fold": _rotate_fold,
    "quantize_four_over_six": _quantize_nvfp4_by,
    "rotated_amax": lambda x, *_: x.new_empty((1, 1), dtype=torch.float32),
    "quantize_eden": _quantize_eden,
    "round_nvfp4": _round_nvfp4,
    "round_eden": _round_nvfp4,
    "quantize_ladder": _quantize_ladder,
    "row_sums": _row_sums,
    "fold_ladder": _fold_ladder,
    "rotate_fold_ladder": _rotate_fold_ladder,
    "pack_ladder": lambda carriers: (_pack_e2m1(carriers), torch.empty_like(carriers[:, ::16])),
    "unpack_ladder": lambda packed, _: _unpack_e2m1(packed),
    "outlier_bounds": _outlier_bounds,
    "dequantize": _as_float32,
    "dequantize_bf16": lambda codes, _: codes.new_empty(codes.shape, dtype=torch.bfloat16),
    **dict.fromkeys(("scaled_mm", "block_scaled_mm"), _scaled_mm),
    "bf16_mm": _bf16_mm,
    "fold": _fold,
    "fold_transposed": _fold_transposed,
    "pack_e2m1": _pack_e2m1,
    "unpack_e2m1": _unpack_e2m1,
    "unpack_e2m1_all": _in_place,
    "hadamard": _as_float32,
    "hadamard_half": _as_float32,
    "quantize_expanded": _quantize_expanded,
    "dequantize_expanded": _as_float32,
    "encode_gradients": _in_place,
    "decode_gradients": _in_place,
    "encode_gradients_by": _encode_gradients_by,
    "decode_gradients_by": lambda wire, *_: wire.new_empty((), dtype=torch.int64),
    **dict.fromkeys(("amax_all", "quantize_all_by"), lambda xs, *_: xs[0].new_empty(len(xs), dtype=torch.float32)),
    "dge": _dge,
    "dge_all": _in_place,
    "adamw": _in_place,
    "adamw_squares": lambda params, *_: params[0].new_empty(len(params), dtype=torch.float64),
    "sum_squares": lambda xs: xs[0].new_empty(len(xs), dtype=torch.float64),
    "adamw_amax": lambda params, *_: params[0].new_empty((len(params), 3), dtype=torch.float32),
    "gated_silu": _gated_silu,
    "gated_silu_backward": _gated_silu_backward,
    "gated_silu_backward_ladder": _gated_silu_backward_ladder,
    "rotary_backward": _rotary_backward,
    "rotary_backward_ladder": _rotary_backward_ladder,
    "saved_codes": _saved_codes,
    "group_codes": _group_codes,
    "norm_of_codes": _norm_of_codes,
    "gated_silu_of_codes": _gated_silu_of_codes,
    "gelu_of_codes": _gelu_of_codes,
    "quantized_norm": _quantized_norm,
    "quantized_norm_backward": _quantized_norm_backward,
    "quantized_gated_silu": _quantized_gated_silu,
    "quantized_gated_silu_backward": _quantized_gated_silu_backward,
    "quantized_gelu": _quantized_gelu,
    "quantized_gelu_backward": _quantized_gelu_backward,
}
