"""Definition of each op in plain PyTorch: the reference of all tests, and the kernel if no compiled one was built.

Codes, scales and random bits use only operations that all back ends round equally: + - x in FP32, integer arithmetic,
exponent fields and multiplication by powers of two. Quotients are computed in FP64 and rounded to FP32, which gives the
correctly rounded FP32 quotient (53 >= 2 * 24 + 2 bits) even if a compiler approximates FP32 division. No expression is
a * b + c with an inexact product, so contraction to a fused multiply-add changes nothing; the exception is the powers
of `dge`, which is therefore never compiled.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowprec_train.ops.exponents import exp2_int, exponent
from lowprec_train.ops.formats import E2M1, E4M3, FORMATS, Format, parse_format
from lowprec_train.ops.philox import random_bits
from lowprec_train.ops.powers import exp2, log2
from lowprec_train.ops.rounding import encode, parse_rounding, round_to
from lowprec_train.ops.schema import tile_shape

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
VALUES = {dtype: torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float() for dtype in FP8}
TINY = 2.0**-126  # the smallest normal FP32: a scale below it has no finite reciprocal
FOLD_TOP = {"E4M3": 6, "E5M2": 13}  # exponent of a row's largest block in a carrier: 6 * 2**top fits
FOLD_SPAN = {"E4M3": 14, "E5M2": 28}  # binades below it in which E2M1 codes are exact carrier values
CARRIER_SHIFT = 8  # outlier carriers are scaled by 2**-8, the smallest scale at which E2M1 codes are exact


def divide(numerator: Tensor, denominator: Tensor | float) -> Tensor:
    """Return the correctly rounded FP32 quotient on every back end."""
    return (numerator.double() / denominator).float()


def square_root(x: Tensor) -> Tensor:
    """Return the correctly rounded FP32 root on every back end: torch's on CUDA is sometimes off by one unit."""
    return x.double().sqrt().float()


def to_float(x: Tensor) -> Tensor:
    """Return x in FP32; FP8 on the CPU in eager mode by a table of 256 values, four times faster than the cast."""
    if x.dtype not in FP8 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return x.float()
    index = x.contiguous().view(torch.uint8).flatten().int()
    return VALUES[x.dtype].index_select(0, index).view(x.shape)


def tiles(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Reshape [m, k] to [m / rows, rows, k / columns, columns]."""
    return x.unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0]))


def tile_amax(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each tile, [m / rows, k / columns]; NaN and Inf propagate."""
    return tiles(x, tile).abs().amax(dim=(1, 3))


def _exponents(amax: Tensor, limit: float, rule: str, headroom: float) -> Tensor:
    """Return scale exponents, exact by bit operations. limit: the largest value of the format."""
    e = exponent(amax)
    if rule == "E8M0_FLOOR":
        return e - math.frexp(limit)[1] + 1
    fraction, limit_exponent = math.frexp(limit * headroom)
    mantissa = (amax.view(torch.int32) & 0x7FFFFF | 0x3F800000).view(torch.float32)
    return e - limit_exponent + 1 + ((mantissa > 2 * fraction) & ~amax.isnan())  # all NaNs give the same result


def _power_of_two(
    amax: Tensor, limit: float, rule: str, headroom: float, exponent_span: int, tops: Tensor | None = None
) -> Tensor:
    e = _exponents(amax, limit, rule, headroom).clamp(-126, 127)
    if exponent_span:  # a zero block gets the smallest exponent, so it never sets the row's largest
        largest = e if tops is None else _exponents(tops, limit, rule, headroom).clamp(-126, 127)
        e = torch.maximum(e, largest.amax(dim=1, keepdim=True) - exponent_span)
    return torch.where(amax.isfinite(), exp2_int(e), torch.nan)


def tile_scale(
    amax: Tensor, format: Format, rule: str, headroom: float, exponent_span: int, tops: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (dequantisation multiplier, factor of x before rounding), both FP32 with the shape of `amax`. tops:
    magnitudes that limit the span of a row, if not the largest amax of the row.
    """
    if not format.scaled:
        return torch.ones_like(amax), torch.ones_like(amax)
    if rule == "FP32":
        scale = torch.where(amax == 0, 1.0, divide(amax, format.max * headroom).clamp_min(TINY))
        return scale, divide(torch.ones_like(scale), scale)
    scale = _power_of_two(amax, format.max, rule, headroom, exponent_span, tops)
    inverse = divide(torch.ones_like(scale), scale)
    if rule == "E8M0_FLOOR" and headroom != 1.0:
        scale, inverse = divide(scale, headroom), inverse * headroom
    return (scale if exponent_span else torch.where(amax == 0, 1.0, scale)), inverse


def over(x: Tensor, scale: Tensor, tile: tuple[int, int]) -> Tensor:
    """Return x divided by the scale of its tile, rounded once: a product with a rounded inverse moves 7 % of the ties
    off the midpoint. A tile whose scale is NaN becomes that NaN.
    """
    by = spread(scale, x.shape, tile)
    return torch.where(by.isnan(), by, divide(x, by))


def _encode_scaled(v, format, rounding, seed, origin):  # type: ignore[no-untyped-def]
    """Return codes of scaled values [m, k]. seed, origin: for stochastic rounding; ignored otherwise."""
    if rounding.stochastic and seed is None:
        raise ValueError(f"{rounding} rounding draws from a seed, and there is none")
    bits = random_bits(seed, origin, v.shape[0], v.shape[1]) if rounding.stochastic else None
    return encode(v, format, rounding, bits)


def spread(scale: Tensor, shape: torch.Size, tile: tuple[int, int]) -> Tensor:
    """Broadcast a scale per tile against [m, k]; expanded only if tiles are smaller than a row."""
    if tile[1] != shape[1]:
        scale = scale.repeat_interleave(tile[1], dim=1)
    return scale if tile[0] in (1, shape[0]) else scale.repeat_interleave(tile[0], dim=0)


def amax(x, tile):  # type: ignore[no-untyped-def]
    """Return the largest magnitude of each tile, FP32 [m / rows, k / columns]."""
    return tile_amax(x, tile_shape(x.shape[0], x.shape[1], tile)).float()


def quantize(x, format, tile, scale_rule, headroom, exponent_span, rounding, seed, origin):  # type: ignore[no-untyped-def]
    """Return codes on the format's grid and one dequantisation multiplier per tile: x ~ codes * scale."""
    return quantize_by(
        x, amax(x, tile), None, format, tile, scale_rule, headroom, exponent_span, rounding, seed, origin
    )


def normalized(x, rate, weight):  # type: ignore[no-untyped-def]
    """Return what an RMSNorm makes of its input x [m, k], in x's dtype, BF16 or FP32. rate [m] and weight [k]: FP32."""
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the input of a norm is BF16 or FP32, not {x.dtype}")
    return (x.float() * rate.view(-1, 1) * weight).to(x.dtype)


def quantize_by(  # type: ignore[no-untyped-def]
    x,
    amax,
    tops,
    format,
    tile,
    scale_rule,
    headroom,
    exponent_span,
    rounding,
    seed,
    origin,
    rate=None,
    weight=None,
):
    """`quantize` for a part x of a matrix whose tiles exceed it. amax: largest magnitudes of the tiles; tops
    [m / rows, 1]: of whole rows, for the span; None computes them from amax. rate [m] and weight [k]: x is the input of
    an RMSNorm, whose result is quantised (`normalized`).
    """
    x = x if rate is None else normalized(x, rate, weight)
    shape, x, format = tile_shape(x.shape[0], x.shape[1], tile), x.float(), parse_format(format)
    scale, inverse = tile_scale(amax, format, scale_rule, headroom, exponent_span, tops)
    divides = scale_rule == "FP32" and format.scaled  # the inverse of a power of two is exact
    v = over(x, scale, shape) if divides else x * spread(inverse, x.shape, shape)
    return _encode_scaled(v, format, parse_rounding(rounding), seed, origin), scale


def quantize_nvfp4(x, tile, headroom, rounding, seed, origin, signs=None, rotation=0):  # type: ignore[no-untyped-def]
    """Two-level NVFP4 (arXiv 2509.25149): E4M3 block scales with one FP32 tensor scale, amax_x / (6 * 448).

    signs: seed of the signs of a random Hadamard transform of x before rounding; rotation: its block, 0 for none.
    """
    x = hadamard(x, signs, rotation) if rotation else x
    of_tiles = amax(x, tile)
    top = of_tiles.amax().reshape(1, 1) if of_tiles.numel() else of_tiles.new_zeros((1, 1))
    return quantize_nvfp4_by(x, of_tiles, top, tile, headroom, rounding, seed, origin)


def round_nvfp4(x, headroom, rounding, seed, origin, signs, rotation):  # type: ignore[no-untyped-def]
    """Return dequantised codes of `quantize_nvfp4` with blocks of 1x16, without the outer scale, in BF16, which is
    exact; and the outer scale [1, 1].
    """
    codes, _, block, outer = quantize_nvfp4(x, (1, 16), headroom, rounding, seed, origin, signs, rotation)
    return dequantize_bf16(codes, block.float()), outer


def quantize_nvfp4_by(x, amax, top, tile, headroom, rounding, seed, origin):  # type: ignore[no-untyped-def]
    """`quantize_nvfp4` for a part x of a matrix. amax: of the tiles; top: amax of the whole matrix [1, 1], of its rows
    [m, 1] or of its columns [1, k].
    """
    shape, x = tile_shape(x.shape[0], x.shape[1], tile), x.float()
    tensor_scale = divide(top, 6.0 * 448.0).clamp_min(TINY * 2.0**9)
    wanted = divide(divide(amax, 6.0 * headroom), tensor_scale.double())
    block = encode(wanted.clamp_min(2.0**-9), E4M3)  # a block scale of zero would flush the block
    if headroom < 1.0:
        block = _raise_clipping_scales(block, tensor_scale, amax)
    scale = torch.where(amax == 0, 1.0, block.float() * tensor_scale)
    v = over(x, scale, shape)
    return _encode_scaled(v, E2M1, parse_rounding(rounding), seed, origin), scale, block, tensor_scale


def _raise_clipping_scales(block: Tensor, tensor_scale: Tensor, amax: Tensor) -> Tensor:
    """Increase block scales that are too small for their block by one E4M3 step. Headroom covers half a step of a
    normal number, but subnormal numbers are coarser, and a block far below the tensor's amax would clip.
    """
    scale = block.float() * tensor_scale
    clips = (divide(amax, scale) > 6.0) & (block.float() < 448.0)
    return (block.view(torch.uint8) + clips.to(torch.uint8)).view(torch.float8_e4m3fn)


def outlier_bounds(x, clipped):  # type: ignore[no-untyped-def]
    """Return the (clipped + 1)-th smallest and largest value of each row, each [m, 1] FP32: at most `clipped` values
    are outside on each side.
    """
    high = x.topk(clipped + 1, dim=1).values[:, -1:]
    low = x.topk(clipped + 1, dim=1, largest=False).values[:, -1:]
    nan = x.isnan().any(dim=1, keepdim=True)
    return torch.where(nan, torch.nan, low.float()), torch.where(nan, torch.nan, high.float())


def carrier_scale(low: Tensor, high: Tensor, amax: Tensor) -> Tensor:
    """Return the scale of E2M1 codes of values within the bounds, larger if the row's largest outlier would saturate:
    if both bounds are 0, it is the outliers' alone. An amax that is not finite changes nothing.
    """
    bound, reach = torch.maximum(low.abs(), high.abs()), torch.where(amax.isfinite(), amax, 0.0)
    scale = torch.maximum(divide(bound, E2M1.max), divide(reach, E4M3.max * 2.0**CARRIER_SHIFT))
    return torch.where(torch.maximum(bound, reach) == 0, 1.0, scale.clamp_min(TINY))


def quantize_carrier(x, low, high, amax):  # type: ignore[no-untyped-def]
    """Return E4M3 carriers and scales per row: E2M1 codes of values within the bounds, outliers rounded once to E4M3,
    both scaled by 2**-8. amax [m, 1]: the largest magnitude of each row, of which x may be a part.
    """
    x = x.float()
    scale = carrier_scale(low, high, amax)
    v = divide(x, scale)
    body = round_to(v.clamp(-6.0, 6.0), E2M1)
    shift = 2.0**-CARRIER_SHIFT
    codes = torch.where((x < low) | (x > high), v, body) * shift
    codes = torch.where(x.isfinite() & ~v.isnan(), codes, torch.nan)  # Inf becomes NaN instead of saturating
    return encode(codes, E4M3), scale * 2.0**CARRIER_SHIFT


def dequantize(codes, scale):  # type: ignore[no-untyped-def]
    """Return codes * scale, FP32."""
    if not codes.numel():  # without rows there are no scales
        return codes.new_empty(codes.shape, dtype=torch.float32)
    tile = (codes.shape[0] // scale.shape[0], codes.shape[1] // scale.shape[1])
    return to_float(codes) * spread(scale, codes.shape, tile)


def dequantize_bf16(codes, scale):  # type: ignore[no-untyped-def]
    """Return codes * scale, rounded once to BF16, for BF16 tensor cores. Exact for E2M1 with E4M3 scales."""
    return dequantize(codes, scale).to(torch.bfloat16)


def scaled_mm(a, scale_a, b, scale_b, split_accumulation, dtype):  # type: ignore[no-untyped-def]
    """Return (a[m, k] @ b[n, k]^T) * scale_a * scale_b^T, [m, n] in `dtype`, with FP32 sums (INT8: exact sums, in
    FP64). Scales are [1, 1], one per row, or one per tile along k, applied inside the sum.
    """
    if scale_a.shape[1] > 1 or scale_b.shape[1] > 1:
        return (dequantize(a, scale_a) @ dequantize(b, scale_b).t()).to(dtype)
    if a.dtype == torch.int8:
        return ((a.double() @ b.double().t()).float() * scale_a * scale_b.t()).to(dtype)
    return (to_float(a) @ to_float(b).t() * scale_a * scale_b.t()).to(dtype)


def amax_all(xs):  # type: ignore[no-untyped-def]
    """Return the largest magnitude of each matrix, FP32 [n]; NaN and Inf propagate."""
    return torch.cat([torch.ops.lowprec.amax(x, (-1, -1)).flatten() for x in xs])


def quantize_all_by(xs, amax, codes, format, scale_rule, headroom):  # type: ignore[no-untyped-def]
    """Quantise matrices to nearest under one scale each, from `amax` [n], into `codes`. Return the scales, FP32 [n]."""
    how, scales = (format, (-1, -1), scale_rule, headroom, 0, "nearest", None, None), []
    for x, largest, out in zip(xs, amax.unbind(), codes, strict=True):
        made, scale = torch.ops.lowprec.quantize_by(x, largest.view(1, 1), None, *how)
        out.view(made.dtype).copy_(made)
        scales.append(scale.flatten())
    return torch.cat(scales)


def pack_e2m1(codes):  # type: ignore[no-untyped-def]
    """Pack E2M1 codes, two per byte, the first one in the low bits. Bit 3 of a nibble is the sign, bits 0..2 the index
    in the grid. A NaN code has no nibble; the scale of its tile is NaN.
    """
    bits = codes.view(torch.uint8)  # E4M3 bits of 0 .5 1 1.5 2 3 4 6 are 0x00 0x30 0x38 0x3c 0x40 0x44 0x48 0x4c
    magnitude = bits & 0x7F
    place = torch.where(magnitude < 0x38, magnitude >> 5, ((magnitude - 0x38) >> 2) + 2) & 7
    low, high = (place | (bits >> 4 & 8)).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def unpack_e2m1(packed):  # type: ignore[no-untyped-def]
    """Return the codes that `pack_e2m1` packed."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    place = nibbles & 7
    magnitude = torch.where(place == 1, 0x30, torch.where(place == 0, 0, 0x30 + (place << 2)))
    return (magnitude | (nibbles & 8) << 4).to(torch.uint8).view(torch.float8_e4m3fn)


def unpack_e2m1_all(packed, codes):  # type: ignore[no-untyped-def]
    """Unpack matrices into `codes`, which have one byte an element and twice as many columns."""
    for each, out in zip(packed, codes, strict=True):
        out.view(torch.uint8).copy_(torch.ops.lowprec.unpack_e2m1(each).view(torch.uint8))


def copy_weight(weight, dtype, after):  # type: ignore[no-untyped-def]
    """Return a copy of a weight in `dtype`, which a compiler cannot make before `after` exists (ops/schema.py)."""
    return weight.to(dtype, copy=True)


def fold(codes, scale, carrier):  # type: ignore[no-untyped-def]
    """Multiply block exponents into the carrier: code * 2**(e_block - e_row + top), with one scale per row; exact
    within the span.
    """
    e = exponent(scale)
    top = FOLD_TOP[carrier]
    shift = exp2_int((e - e.amax(dim=1, keepdim=True) + top).clamp(-126, 127))
    folded = codes.float() * spread(shift, codes.shape, (1, codes.shape[1] // scale.shape[1]))
    return folded.to(FORMATS[carrier].carrier), scale.amax(dim=1, keepdim=True) * 2.0**-top


def random_signs(seed: Tensor | None, block: int) -> Tensor | float:
    """Return `block` random signs, FP32 [1, block]; 1 without a seed."""
    return 1.0 if seed is None else 1.0 - 2.0 * (random_bits(seed, None, 1, block) & 1).float()


def hadamard(x, seed, block):  # type: ignore[no-untyped-def]
    """Apply random signs (one vector of length `block` for all blocks), then the orthonormal Walsh-Hadamard transform
    of each block.

    Butterflies have a fixed order, stride 1 first; without a seed the signs are all +1.
    """
    h = x.float().unflatten(1, (-1, block)) * random_signs(seed, block)
    out, stride = torch.empty_like(h), 1
    while stride < block:
        a, b = h.unflatten(2, (-1, 2, stride)).unbind(3)
        total, difference = out.unflatten(2, (-1, 2, stride)).unbind(3)
        torch.add(a, b, out=total)
        torch.sub(a, b, out=difference)
        h, out, stride = out, h, 2 * stride
    return (h * block**-0.5).flatten(1)


def dge(grad, weight, scale, k, cap, dtype=None):  # type: ignore[no-untyped-def]
    """Return grad * f'(weight / scale), f' = min(|2 t - 1|**(1/k - 1) / k, cap), t the position inside E2M1's interval
    (arXiv 2501.17116, eq. 8), rounded once to `dtype` (default FP32).
    """
    if not grad.numel():  # without rows there are no scales
        return grad.new_empty(grad.shape, dtype=dtype or torch.float32)
    tile = (weight.shape[0] // scale.shape[0], weight.shape[1] // scale.shape[1])
    inverse = spread(divide(torch.ones_like(scale), scale), weight.shape, tile)
    v = (weight.float() * inverse).abs().clamp_max(6.0)
    e = exponent(v).clamp_min(0)
    steps = v * exp2_int(1 - e)  # the width of the interval is 2**(e - 1)
    centred = (2.0 * (steps - steps.floor()) - 1.0).abs()
    slope = _power(centred.clamp_min(TINY), 1.0 / k - 1.0) * (1.0 / k)
    return (grad.float() * slope.clamp_max(cap)).to(dtype or torch.float32)


def dge_all(grads, weights, scales, k, cap, dtype):  # type: ignore[no-untyped-def]
    """Multiply gradients [n, k] in place by f'(W / scale) of their weights, which are first rounded to `dtype`."""
    for grad, weight, scale in zip(grads, weights, scales, strict=True):
        grad.copy_(torch.ops.lowprec.dge(grad, weight.to(dtype), scale, k, cap, grad.dtype))


def _power(x: Tensor, p: float) -> Tensor:
    """Return x**p for normal x <= 1 and -1 <= p <= 0, with the same bits at every index of the tensor."""
    return torch.where(x.isnan(), x, exp2(log2(x) * p))
