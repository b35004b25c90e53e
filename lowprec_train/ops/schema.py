"""Schemas of all ops, and sizes that follow from their arguments. Output shapes and dtypes are in ops/fakes.py.

Ops have no random state: a `seed` is a 0-dim int64 tensor that enters the graph as data, so that eager, compiled,
recomputed and resumed runs use the same bits. Formats, roundings and scale rules are passed by name, and never inferred
from a dtype or from the presence of a seed.

`after` is a tensor that is not read. An op of a backward pass that depends on weights alone gets a gradient here: else
a compiler may run the op in the forward pass and save the result, although the weights are there in both passes. Not
where weights are cast first: the compiler would save the cast, which is wider. `copy_weight` is a cast that waits.
"""

from __future__ import annotations

from lowprec_train.ops.formats import parse_format

_CODECS = (
    "str first_format, str first_scaling, str second_format, str second_scaling, str master_format, str master_scaling"
)
_ADAMW_STATS = (
    "(Tensor[] params, Tensor[] grads, Tensor[] first, Tensor[] second, Tensor[] masters, Tensor[] steps,"
    f" Tensor? grad_scale, Tensor? rms, {_CODECS}, int group, int[] segments, Tensor lr, float beta1, float beta2,"
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
    "amax_all": "(Tensor[] xs) -> Tensor",
    "quantize_all_by": (
        "(Tensor[] xs, Tensor amax, Tensor(a!)[] codes, str format, str scale_rule, float headroom) -> Tensor"
    ),
    "quantize_by": (
        "(Tensor x, Tensor amax, Tensor? tops, str format, int[2] tile, str scale_rule, float headroom,"
        " int exponent_span, str rounding, Tensor? seed, Tensor? origin, Tensor? rate=None,"
        " Tensor? weight=None) -> (Tensor codes, Tensor scale)"
    ),
    "quantize_nvfp4_by": (
        "(Tensor x, Tensor amax, Tensor top, int[2] tile, float headroom, str rounding, Tensor? seed, Tensor? origin)"
        " -> (Tensor codes, Tensor scale, Tensor block_scale, Tensor tensor_scale)"
    ),
    "quantize_both": (
        "(Tensor x, Tensor? amax, Tensor? across, Tensor? down, str format, int[2] tile, int[2] tile_t,"
        " str scale_rule, float headroom) -> (Tensor codes, Tensor scale, Tensor codes_t, Tensor scale_t)"
    ),
    "quantize_transposed": (
        "(Tensor x, Tensor amax, str format, str scale_rule, float headroom, Tensor? rate=None, Tensor? weight=None,"
        " Tensor? after=None) -> (Tensor codes, Tensor scale)"
    ),
    "quantize_outliers": "(Tensor x, int clipped) -> (Tensor codes, Tensor scale)",
    "quantize_carrier": "(Tensor x, Tensor low, Tensor high, Tensor amax) -> (Tensor codes, Tensor scale)",
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
    "bf16_mm": "(Tensor a, Tensor b, Tensor? factor, ScalarType dtype) -> Tensor",
    "fold": "(Tensor codes, Tensor scale, str carrier) -> (Tensor codes, Tensor scale)",
    "fold_transposed": "(Tensor codes, Tensor scale, str carrier, Tensor? after=None) -> (Tensor codes, Tensor scale)",
    "pack_e2m1": "(Tensor codes) -> Tensor",
    "unpack_e2m1": "(Tensor packed) -> Tensor",
    "unpack_e2m1_all": "(Tensor[] packed, Tensor(a!)[] codes) -> ()",
    "transpose": "(Tensor codes, Tensor? after=None) -> Tensor",
    "copy_weight": "(Tensor weight, ScalarType dtype, Tensor after) -> Tensor",
    "rotate_fold": (
        "(Tensor x, Tensor? scale, bool transposed, Tensor? signs, int rotation, str scale_rule, float headroom,"
        " int exponent_span, str carrier, str rounding, Tensor? seed, Tensor? origin, Tensor? after=None)"
        " -> (Tensor codes, Tensor scale)"
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
    "row_sums": "(Tensor x, Tensor codes, Tensor scale, Tensor row, int exponent_span) -> Tensor",
    "fold_ladder": "(Tensor codes, Tensor scale, Tensor row, Tensor? factor) -> (Tensor codes, Tensor scale)",
    "rotate_fold_ladder": (
        "(Tensor x, Tensor? scale, bool transposed, Tensor? signs, int rotation, float gain, int[2] tile,"
        " str candidates, int exponent_span, bool corrected, Tensor? after=None, Tensor? rate=None,"
        " Tensor? weight=None) -> (Tensor codes, Tensor scale)"
    ),
    "pack_ladder": "(Tensor carriers) -> (Tensor packed, Tensor scale)",
    "unpack_ladder": "(Tensor packed, Tensor scale) -> Tensor",
    "hadamard": "(Tensor x, Tensor? seed, int block) -> Tensor",
    "hadamard_half": "(Tensor x, Tensor? seed, int block, float gain) -> Tensor",
    "quantize_expanded": (
        "(Tensor x, str format, int group, int segments)"
        " -> (Tensor codes, Tensor scale, Tensor exponent, Tensor center)"
    ),
    "dequantize_expanded": (
        "(Tensor codes, Tensor scale, Tensor exponent, Tensor center, str format, int group, int segments) -> Tensor"
    ),
    "encode_gradients": (
        "(Tensor(a!) wire, Tensor[] parts, int[] sizes, int[] coded, str format, int block, int inner) -> ()"
    ),
    "decode_gradients": (
        "(Tensor[] wires, Tensor(a!)[] parts, int[] sizes, int[] coded, str format, int block, int senders, int inner,"
        " bool by_range=False) -> ()"
    ),
    "encode_gradients_by": "(Tensor[] parts, int rows, int[] sizes, int[] coded, Tensor scales, str format) -> Tensor",
    "decode_gradients_by": (
        "(Tensor wire, Tensor(a!)[] parts, int[] sizes, int[] coded, Tensor scales, str format, int senders,"
        " bool every_addition) -> Tensor"
    ),
    "dge": "(Tensor grad, Tensor weight, Tensor scale, float k, float cap, ScalarType? dtype=None) -> Tensor",
    "dge_all": "(Tensor(a!)[] grads, Tensor[] weights, Tensor[] scales, float k, float cap, ScalarType dtype) -> ()",
    "gated_silu": "(Tensor gate_up) -> (Tensor y, Tensor amax)",
    "gated_silu_backward": "(Tensor dy, Tensor gate_up) -> (Tensor dx, Tensor amax)",
    "rotary_backward": "(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor",
    "rotary_backward_ladder": (
        "(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, Tensor? signs, int rotation, float gain,"
        " int[2] tile, str candidates, int exponent_span, bool corrected) -> (Tensor dx, Tensor codes, Tensor scale)"
    ),
    "gated_silu_backward_ladder": (
        "(Tensor(a!) dy, Tensor gate_up, Tensor? signs, int rotation, float gain, int[2] tile, str candidates,"
        " int exponent_span, bool corrected) -> (Tensor dx, Tensor scale)"
    ),
    "adamw": (
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] masters,"
        " Tensor(e!)[] steps, Tensor? grad_scale, Tensor? rms, Tensor? amax, Tensor? origins, Tensor? indices,"
        f" Tensor? found_inf, {_CODECS}, bool stochastic, int group, int[] segments, int seed, Tensor lr, float beta1,"
        " float beta2, float eps, float weight_decay, bool clip) -> ()"
    ),
    "adamw_squares": _ADAMW_STATS,
    "adamw_amax": _ADAMW_STATS,
    "sum_squares": "(Tensor[] xs) -> Tensor",
    "saved_codes": (
        "(Tensor x, str format, int[2] tile, str scale_rule, float headroom, int exponent_span)"
        " -> (Tensor codes, Tensor exponents)"
    ),
    "group_codes": "(Tensor x, str format, int group, int ways) -> (Tensor codes, Tensor exponents)",
    "norm_of_codes": (
        "(Tensor codes, Tensor exponents, Tensor weight, Tensor? bias, float eps, bool centered, str format, int group,"
        " ScalarType dtype) -> (Tensor y, Tensor amax)"
    ),
    "gated_silu_of_codes": (
        "(Tensor codes, Tensor exponents, str format, int group, ScalarType dtype) -> (Tensor y, Tensor amax)"
    ),
    "gelu_of_codes": (
        "(Tensor codes, Tensor exponents, str format, int group, ScalarType dtype) -> (Tensor y, Tensor amax)"
    ),
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


_ANY_SHAPE = ("pack_e2m1", "unpack_e2m1")
_MATRICES = ("x", "a", "b", "codes", "carriers", "dy", "gate_up", "grad")


def matrices(op: str) -> dict[int, str]:
    """Return the arguments of an op that must be matrices: place -> name."""
    if op in _ANY_SHAPE:
        return {}
    arguments = SCHEMAS[op].partition(" -> ")[0][1:-1].split(", ")
    tensors = {place: text.removeprefix("Tensor ") for place, text in enumerate(arguments) if text[:7] == "Tensor "}
    return {place: name for place, name in tensors.items() if name in _MATRICES}


def tile_shape(rows: int, columns: int, tile: list[int] | tuple[int, int]) -> tuple[int, int]:
    """Return the tile with -1 replaced by the whole extent. Raises ValueError if it does not divide the matrix."""
    shape = (rows if tile[0] == -1 else tile[0], columns if tile[1] == -1 else tile[1])
    if min(shape) < 1 or rows % shape[0] or columns % shape[1]:
        raise ValueError(f"a {shape[0]}x{shape[1]} tile does not divide a {rows}x{columns} matrix")
    return shape


def segment_groups(columns: int, group: int, segments: int) -> int:
    """Return the groups of one segment. Raises ValueError without groups, or if the segments do not divide a row."""
    if group < 1 or segments < 1 or columns % segments:
        raise ValueError(f"{segments} segments of groups of {group} do not fit a row of {columns}")
    return -(-(columns // segments) // group)


def plain_bytes(format: str) -> int:
    """Return the wire bytes of a gradient element without codes."""
    return 4 if format == "FP32" else 2


def row_bytes(sizes: list[int], coded: list[int], format: str, block: int) -> int:
    """Return the bytes of a row of gradients on the wire: ranges of `sizes` elements; coded: 1 or 0 for each
    (ops/gradients.py). Raises ValueError for empty ranges or blocks, and for codes of a format without scales.
    """
    if block < 1 or not sizes or min(sizes) < 1 or len(sizes) != len(coded):
        raise ValueError(f"ranges and blocks must have at least one element, not {sizes} and {block}")
    if any(coded) and not parse_format(format).scaled:
        raise ValueError(f"{format} has no scale, so its ranges cannot be coded")
    blocks = sum(-(-size // block) for size, has_codes in zip(sizes, coded, strict=True) if has_codes)
    plain = sum(size for size, has_codes in zip(sizes, coded, strict=True) if not has_codes)
    count = plain * plain_bytes(format) + blocks * (block + 1)
    return count + count % 2


def row_bytes_by(sizes: list[int], coded: list[int], format: str) -> int:
    """Return the bytes of a row without scales (ops/shared_gradients.py). Raises ValueError as `row_bytes`."""
    bare = row_bytes(sizes, coded, format, 1) - sum(size for size, each in zip(sizes, coded, strict=True) if each)
    return bare + bare % 2
