"""Every op once: its schema and the shapes and dtypes it returns.

An op never draws for itself: a `seed` is a 0-dim int64 tensor that enters the graph as data, so that eager, compiled,
recomputed and resumed runs see the same bits. Formats, roundings and scale rules cross the boundary by their names,
never inferred from a dtype or from the presence of a seed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowprec_train.ops.formats import parse_format

_CODECS = (
    "str first_format, str first_scaling, str second_format, str second_scaling, str master_format, str master_scaling"
)
_ADAMW_STATS = (
    "(Tensor[] params, Tensor[] grads, Tensor[] first, Tensor[] second, Tensor[] masters, Tensor[] steps,"
    f" Tensor? grad_scale, Tensor? rms, {_CODECS}, int group, int[] segments, float lr, float beta1, float beta2,"
    " float eps, float weight_decay) -> Tensor"
)

SCHEMAS = {
    "quantize": (
        "(Tensor x, str format, int[2] tile, str scale_rule, float headroom, int exponent_span, str rounding,"
        " Tensor? seed, Tensor? origin) -> (Tensor codes, Tensor scale)"
    ),
    "quantize_nvfp4": (
        "(Tensor x, int[2] tile, float headroom, str rounding, Tensor? seed, Tensor? origin, Tensor? signs=None,"
        " int rotation=0) -> (Tensor codes, Tensor scale, Tensor block_scale, Tensor tensor_scale)"
    ),
    "amax": "(Tensor x, int[2] tile) -> Tensor",
    "quantize_by": (
        "(Tensor x, Tensor amax, Tensor? tops, str format, int[2] tile, str scale_rule, float headroom,"
        " int exponent_span, str rounding, Tensor? seed, Tensor? origin) -> (Tensor codes, Tensor scale)"
    ),
    "quantize_nvfp4_by": (
        "(Tensor x, Tensor amax, Tensor top, int[2] tile, float headroom, str rounding, Tensor? seed, Tensor? origin)"
        " -> (Tensor codes, Tensor scale, Tensor block_scale, Tensor tensor_scale)"
    ),
    "quantize_both": (
        "(Tensor x, Tensor? amax, Tensor? across, Tensor? down, str format, int[2] tile, int[2] tile_t,"
        " str scale_rule, float headroom) -> (Tensor codes, Tensor scale, Tensor codes_t, Tensor scale_t)"
    ),
    "quantize_outliers": "(Tensor x, int clipped) -> (Tensor codes, Tensor scale)",
    "quantize_carrier": "(Tensor x, Tensor low, Tensor high) -> (Tensor codes, Tensor scale)",
    "outlier_bounds": "(Tensor x, int clipped) -> (Tensor low, Tensor high)",
    "dequantize": "(Tensor codes, Tensor scale) -> Tensor",
    "dequantize_bf16": "(Tensor codes, Tensor scale) -> Tensor",
    "scaled_mm": (
        "(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, bool split_accumulation, ScalarType dtype) -> Tensor"
    ),
    "block_scaled_mm": (
        "(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor? factor_a, Tensor? factor_b, str format,"
        " ScalarType dtype) -> Tensor"
    ),
    "fold": "(Tensor codes, Tensor scale, str carrier) -> (Tensor codes, Tensor scale)",
    "pack_e2m1": "(Tensor codes) -> Tensor",
    "unpack_e2m1": "(Tensor packed) -> Tensor",
    "transpose": "(Tensor codes) -> Tensor",
    "rotate_fold": (
        "(Tensor x, Tensor? scale, bool transposed, Tensor? signs, int rotation, str scale_rule, float headroom,"
        " int exponent_span, str carrier, str rounding, Tensor? seed, Tensor? origin) -> (Tensor codes, Tensor scale)"
    ),
    "quantize_four_over_six": (
        "(Tensor x, Tensor amax, Tensor top, int[2] tile, str candidates)"
        " -> (Tensor codes, Tensor scale, Tensor block, Tensor tensor)"
    ),
    "rotated_amax": "(Tensor x, Tensor? signs, int rotation) -> Tensor",
    "quantize_eden": (
        "(Tensor x, Tensor top, Tensor? signs, int rotation, Tensor seed, Tensor? origin)"
        " -> (Tensor codes, Tensor scale, Tensor block_scale, Tensor tensor_scale)"
    ),
    "round_nvfp4": (
        "(Tensor x, float headroom, str rounding, Tensor? seed, Tensor? origin, Tensor? signs, int rotation)"
        " -> (Tensor values, Tensor tensor_scale)"
    ),
    "round_eden": (
        "(Tensor x, Tensor top, Tensor? signs, int rotation, Tensor seed, Tensor? origin)"
        " -> (Tensor values, Tensor tensor_scale)"
    ),
    "quantize_ladder": (
        "(Tensor x, Tensor? tops, int[2] tile, str candidates, int exponent_span)"
        " -> (Tensor codes, Tensor scale, Tensor row)"
    ),
    "row_sums": "(Tensor x, Tensor codes, Tensor scale, Tensor row) -> Tensor",
    "fold_ladder": "(Tensor codes, Tensor scale, Tensor row, Tensor? factor) -> (Tensor codes, Tensor scale)",
    "rotate_fold_ladder": (
        "(Tensor x, Tensor? scale, bool transposed, Tensor? signs, int rotation, int[2] tile, str candidates,"
        " int exponent_span, bool corrected) -> (Tensor codes, Tensor scale)"
    ),
    "pack_ladder": "(Tensor carriers) -> (Tensor packed, Tensor scale)",
    "unpack_ladder": "(Tensor packed, Tensor scale) -> Tensor",
    "hadamard": "(Tensor x, Tensor? seed, int block) -> Tensor",
    "quantize_expanded": (
        "(Tensor x, str format, int group, int segments)"
        " -> (Tensor codes, Tensor scale, Tensor exponent, Tensor center)"
    ),
    "dequantize_expanded": (
        "(Tensor codes, Tensor scale, Tensor exponent, Tensor center, str format, int group, int segments) -> Tensor"
    ),
    "encode_gradients": (
        "(Tensor[] parts, int rows, int[] sizes, int[] coded, str format, int block, int inner) -> Tensor"
    ),
    "decode_gradients": (
        "(Tensor wire, Tensor(a!)[] parts, int[] sizes, int[] coded, str format, int block, int senders, int inner)"
        " -> ()"
    ),
    "encode_gradients_by": "(Tensor[] parts, int rows, int[] sizes, int[] coded, Tensor scales, str format) -> Tensor",
    "decode_gradients_by": (
        "(Tensor wire, Tensor(a!)[] parts, int[] sizes, int[] coded, Tensor scales, str format, int senders,"
        " bool every_addition) -> Tensor"
    ),
    "dge": "(Tensor grad, Tensor weight, Tensor scale, float k, float cap, ScalarType? dtype=None) -> Tensor",
    "gated_silu": "(Tensor gate_up) -> (Tensor y, Tensor amax)",
    "gated_silu_backward": "(Tensor dy, Tensor gate_up) -> (Tensor dx, Tensor amax)",
    "adamw": (
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] masters,"
        " Tensor(e!)[] steps, Tensor? grad_scale, Tensor? rms, Tensor? amax, Tensor? origins, Tensor? indices,"
        f" Tensor? found_inf, {_CODECS}, bool stochastic, int group, int[] segments, int seed, float lr, float beta1,"
        " float beta2, float eps, float weight_decay, bool clip) -> ()"
    ),
    "adamw_squares": _ADAMW_STATS,
    "adamw_amax": _ADAMW_STATS,
    "sum_squares": "(Tensor[] xs) -> Tensor",
    "quantized_norm": (
        "(Tensor x, Tensor weight, Tensor? bias, float eps, bool centered, str format, int group)"
        " -> (Tensor y, Tensor amax, Tensor codes, Tensor exponents)"
    ),
    "quantized_norm_backward": (
        "(Tensor dy, Tensor codes, Tensor exponents, Tensor weight, bool biased, float eps, bool centered, str format,"
        " int group) -> (Tensor dx, Tensor dweight, Tensor dbias)"
    ),
    "quantized_gated_silu": (
        "(Tensor gate_up, str format, int group) -> (Tensor y, Tensor amax, Tensor gate, Tensor gate_exponents,"
        " Tensor up, Tensor up_exponents)"
    ),
    "quantized_gated_silu_backward": (
        "(Tensor dy, Tensor gate, Tensor gate_exponents, Tensor up, Tensor up_exponents, str format, int group)"
        " -> (Tensor dx, Tensor amax)"
    ),
    "quantized_gelu": "(Tensor x, str format, int group) -> (Tensor y, Tensor amax, Tensor codes, Tensor exponents)",
    "quantized_gelu_backward": (
        "(Tensor dy, Tensor codes, Tensor exponents, str format, int group) -> (Tensor dx, Tensor amax)"
    ),
}


def tile_shape(rows: int, columns: int, tile: list[int] | tuple[int, int]) -> tuple[int, int]:
    """The tile with -1 resolved to the whole extent. Raises ValueError when it does not divide the matrix."""
    shape = (rows if tile[0] == -1 else tile[0], columns if tile[1] == -1 else tile[1])
    if min(shape) < 1 or rows % shape[0] or columns % shape[1]:
        raise ValueError(f"a {shape[0]}x{shape[1]} tile does not divide a {rows}x{columns} matrix")
    return shape


def segment_groups(columns: int, group: int, segments: int) -> int:
    """Groups of one segment. Raises ValueError where there is no group, or where the segments do not divide a row."""
    if group < 1 or segments < 1 or columns % segments:
        raise ValueError(f"{segments} segments of groups of {group} do not fit a row of {columns}")
    return -(-(columns // segments) // group)


def plain_bytes(format: str) -> int:
    """Of a gradient that is not coded, on the wire."""
    return 4 if format == "FP32" else 2


def row_bytes(sizes: list[int], coded: list[int], format: str, block: int) -> int:
    """Of a row of gradients on the wire: ranges of `sizes` elements; coded: 1 or 0 of each (ops/gradients.py). Raises
    ValueError where they do not fit.
    """
    if block < 1 or not sizes or min(sizes) < 1 or len(sizes) != len(coded):
        raise ValueError(f"a row has ranges of at least one element and blocks of at least one, not {sizes}, {block}")
    if any(coded) and not parse_format(format).scaled:
        raise ValueError(f"{format} has no scale: its ranges are plain")
    blocks = sum(-(-size // block) for size, has_codes in zip(sizes, coded, strict=True) if has_codes)
    plain = sum(size for size, has_codes in zip(sizes, coded, strict=True) if not has_codes)
    count = plain * plain_bytes(format) + blocks * (block + 1)
    return count + count % 2


def row_bytes_by(sizes: list[int], coded: list[int], format: str) -> int:
    """Of a row whose scales are not sent (ops/shared_gradients.py). Raises ValueError as `row_bytes`."""
    bare = row_bytes(sizes, coded, format, 1) - sum(size for size, each in zip(sizes, coded, strict=True) if each)
    return bare + bare % 2


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


def _row_carriers(x, *_):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), _scale_like(x, (1, -1))


def _transpose(codes):  # type: ignore[no-untyped-def]
    return codes.new_empty((codes.shape[1], codes.shape[0]))


def _rotate_fold(  # type: ignore[no-untyped-def]
    x, scale, transposed, signs, rotation, scale_rule, headroom, exponent_span, carrier, *_
):
    rows, columns = x.shape[::-1] if transposed else x.shape
    codes = x.new_empty((rows, columns), dtype=parse_format(carrier).carrier)
    return codes, x.new_empty((rows, 1), dtype=torch.float32)


def _quantize_ladder(x, tops, tile, *_):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), _scale_like(x, tile), _scale_like(x, (1, -1))


def _row_sums(x, codes, scale, row):  # type: ignore[no-untyped-def]
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


def _fold(codes, scale, carrier):  # type: ignore[no-untyped-def]
    return codes.new_empty(codes.shape, dtype=parse_format(carrier).carrier), scale.new_empty((codes.shape[0], 1))


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
    """Nothing: the op writes into its arguments."""


def _encode_gradients(parts, rows, sizes, coded, format, block, inner):  # type: ignore[no-untyped-def]
    return parts[0].new_empty((rows, row_bytes(sizes, coded, format, block)), dtype=torch.uint8)


def _encode_gradients_by(parts, rows, sizes, coded, scales, format):  # type: ignore[no-untyped-def]
    return parts[0].new_empty((rows, row_bytes_by(sizes, coded, format)), dtype=torch.uint8)


def _dge(grad, weight, scale, k, cap, dtype=None):  # type: ignore[no-untyped-def]
    return grad.new_empty(grad.shape, dtype=dtype or torch.float32)


def _kept(x, columns, format, group):  # type: ignore[no-untyped-def]
    """Codes of a matrix of that many columns, two E2M1 ones a byte, and the exponents of its groups."""
    wide, dtype = (columns // 2, torch.uint8) if format == "E2M1" else (columns, parse_format(format).carrier)
    return x.new_empty((x.shape[0], wide), dtype=dtype), x.new_empty((x.shape[0], columns // group), dtype=torch.uint8)


def _row_amax(x):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], dtype=torch.float32)


def _quantized_norm(x, weight, bias, eps, centered, format, group):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), _row_amax(x), *_kept(x, x.shape[1], format, group)


def _norm_keep_backward(dy, codes, exponents, weight, biased, eps, centered, format, group):  # type: ignore[no-untyped-def]
    dweight = weight.new_empty(weight.shape, dtype=torch.float32)
    return dy.new_empty(dy.shape), dweight, dweight.new_empty(weight.shape if biased else 0)


def _gated_silu(gate_up):  # type: ignore[no-untyped-def]
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2)), _row_amax(gate_up)


def _gated_silu_backward(dy, gate_up):  # type: ignore[no-untyped-def]
    return dy.new_empty(gate_up.shape), _row_amax(dy)


def _quantized_gated_silu(gate_up, format, group):  # type: ignore[no-untyped-def]
    width = gate_up.shape[1] // 2
    kept = (part for _ in range(2) for part in _kept(gate_up, width, format, group))
    return gate_up.new_empty((gate_up.shape[0], width)), _row_amax(gate_up), *kept


def _gated_keep_backward(dy, *_):  # type: ignore[no-untyped-def]
    return dy.new_empty((dy.shape[0], 2 * dy.shape[1])), _row_amax(dy)


def _quantized_gelu(x, format, group):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), _row_amax(x), *_kept(x, x.shape[1], format, group)


def _gelu_keep_backward(dy, *_):  # type: ignore[no-untyped-def]
    return dy.new_empty(dy.shape), _row_amax(dy)


FAKES: dict[str, Callable] = {
    "quantize": _quantize,
    "quantize_nvfp4": _quantize_nvfp4,
    "amax": _scale_like,
    "quantize_by": _quantize_by,
    "quantize_nvfp4_by": _quantize_nvfp4_by,
    "quantize_both": _quantize_both,
    **dict.fromkeys(("quantize_outliers", "quantize_carrier"), _row_carriers),
    "transpose": _transpose,
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
    "fold": _fold,
    "pack_e2m1": _pack_e2m1,
    "unpack_e2m1": _unpack_e2m1,
    "hadamard": _as_float32,
    "quantize_expanded": _quantize_expanded,
    "dequantize_expanded": _as_float32,
    "encode_gradients": _encode_gradients,
    "decode_gradients": _in_place,
    "encode_gradients_by": _encode_gradients_by,
    "decode_gradients_by": lambda wire, *_: wire.new_empty((), dtype=torch.int64),
    "dge": _dge,
    "adamw": _in_place,
    "adamw_squares": lambda params, *_: params[0].new_empty(len(params), dtype=torch.float64),
    "sum_squares": lambda xs: xs[0].new_empty(len(xs), dtype=torch.float64),
    "adamw_amax": lambda params, *_: params[0].new_empty((len(params), 3), dtype=torch.float32),
    "gated_silu": _gated_silu,
    "gated_silu_backward": _gated_silu_backward,
    "quantized_norm": _quantized_norm,
    "quantized_norm_backward": _norm_keep_backward,
    "quantized_gated_silu": _quantized_gated_silu,
    "quantized_gated_silu_backward": _gated_keep_backward,
    "quantized_gelu": _quantized_gelu,
    "quantized_gelu_backward": _gelu_keep_backward,
}
