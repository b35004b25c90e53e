"""Registration of the ops: schemas, fake kernels, compiled kernels if they were built, and the reference otherwise.

The reference is the kernel of every device without a compiled one. On the CPU it runs eagerly, a few rows at a time if
rows are independent, so that temporaries fit in the cache. On CUDA torch.compile compiles the rounding ops, once per
shape, with the same schema (eager Philox takes ten times longer) and the same bits. `live_kernels` lists what runs.

A library's kernels support the formats, roundings and scale candidates that it was built with (`ops.kernels.names`).
For others, `kernel` returns the op's second overload, such as `lowprec::quantize.reference`, which always runs the
reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from hashlib import sha256
from types import FunctionType
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor

from lowprec_train.ops import (
    activations,
    adamw,
    block_scaled,
    cublas,
    eden,
    four_over_six,
    gradients,
    kernels,
    ladder,
    pairs,
    reference,
    rotary,
    rotated,
    shared_gradients,
    states,
    tensor_cores,
    updates,
)
from lowprec_train.ops.fakes import FAKES
from lowprec_train.ops.schema import SCHEMAS, matrices

_LIBRARY = torch.library.Library("lowprec", "DEF")
COMPILED_ON_CUDA = {"quantize", "quantize_nvfp4", "quantize_carrier", "dequantize", "dequantize_bf16", "fold"}
COMPILED_ON_CUDA |= {
    "pack_e2m1",
    "unpack_e2m1",
    "amax",
    "quantize_by",
    "quantize_nvfp4_by",
    "quantize_four_over_six",
    "round_nvfp4",
}
COMPILED_ON_CUDA |= {"pack_ladder", "unpack_ladder"}
CHUNK = 1 << 17  # elements of a slice of rows on the CPU


@cache
def _compiled(name: str, variant: tuple) -> Callable:
    """Return a compiled function, one code object per variant: torch limits the recompilations per code object."""
    function = next(getattr(each, name) for each in (reference, four_over_six, ladder) if hasattr(each, name))
    code = function.__code__.replace(co_name=f"{name}_{hash(variant) & 0xFFFFFF:06x}")
    renamed = FunctionType(
        code, function.__globals__, argdefs=function.__defaults__
    )  # torch omits default arguments in calls
    return torch.compile(renamed, fullgraph=True, dynamic=False)


def _key(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.shape, argument.stride()
    return tuple(argument) if isinstance(argument, list) else argument


def _on_cuda(name: str, *args: Any) -> Any:
    with torch.no_grad():
        return _compiled(name, tuple(_key(a) for a in args))(*args)


def _quantize(x, format, tile, scale_rule, headroom, exponent_span, rounding, seed, origin):  # type: ignore[no-untyped-def]
    """Quantise row tiles in slices; `origin` gives each slice its random bits."""
    if tile[0] != 1 or x.device.type != "cpu":
        return reference.quantize(x, format, tile, scale_rule, headroom, exponent_span, rounding, seed, origin)
    rows, parts = max(1, CHUNK // x.shape[1]), []
    for index, part in enumerate(x.split(rows)):
        first = None if seed is None else torch.tensor([index * rows, 0]) + (0 if origin is None else origin)
        parts.append(reference.quantize(part, format, tile, scale_rule, headroom, exponent_span, rounding, seed, first))
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _hadamard(x, seed, block):  # type: ignore[no-untyped-def]
    if x.device.type != "cpu":
        return reference.hadamard(x, seed, block)
    return torch.cat([reference.hadamard(part, seed, block) for part in x.split(max(1, CHUNK // x.shape[1]))])


def _quantize_expanded(x, format, group, segments):  # type: ignore[no-untyped-def]
    rows = max(1, CHUNK // x.shape[1]) if x.device.type == "cpu" else x.shape[0]
    parts = [states.quantize_expanded(part, format, group, segments) for part in x.split(rows)]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def _dequantize_expanded(codes, scale, exponent, center, format, group, segments):  # type: ignore[no-untyped-def]
    rows = max(1, CHUNK // codes.shape[1]) if codes.device.type == "cpu" else codes.shape[0]
    parts = zip(*(each.split(rows) for each in (codes, scale, exponent, center)), strict=True)
    return torch.cat([states.dequantize_expanded(*part, format, group, segments) for part in parts])


def _saved_codes(x, format, tile, scale_rule, headroom, exponent_span):  # type: ignore[no-untyped-def]
    """Quantise x [m, k] by its device's kernel, to nearest, and return the codes and exponents that are saved."""
    quantize = kernel("quantize", x.device, format, "nearest")
    codes, scale = quantize(x, format, tile, scale_rule, headroom, exponent_span, "nearest", None, None)
    stored = torch.ops.lowprec.pack_e2m1(codes) if format == "E2M1" else codes
    return stored, activations.exponents_of(scale)


def _gated_silu_backward_ladder(dy, gate_up, signs, rotation, gain, tile, candidates, exponent_span, corrected):  # type: ignore[no-untyped-def]
    """Return dx of `gated_silu_backward` and the scales [m, 1] of its codes by `rotate_fold_ladder`. The codes [m, 2 F]
    are written over dy [m, F], which has as many bytes if its dtype has 16 bits. Raises ValueError for others.
    """
    if dy.element_size() != 2 or not dy.is_contiguous():
        form = f"{dy.dtype} with strides {dy.stride()}"
        raise ValueError(f"gated_silu_backward_ladder writes codes over a contiguous matrix of 16 bits, not {form}")
    dx, _ = torch.ops.lowprec.gated_silu_backward(dy, gate_up)
    codes, scale = _row_codes(dx, signs, rotation, gain, tile, candidates, exponent_span, corrected)
    dy.view(codes.dtype).copy_(codes)
    return dx, scale


def _rotary_backward_ladder(dq, dk, dv, cos, sin, *how):  # type: ignore[no-untyped-def]
    """Return dx of `rotary_backward`, and of it the codes and scales [m, 1] of `rotate_fold_ladder`."""
    dx = torch.ops.lowprec.rotary_backward(dq, dk, dv, cos, sin)
    return dx, *_row_codes(dx, *how)


def _row_codes(x, signs, rotation, gain, tile, candidates, exponent_span, corrected):  # type: ignore[no-untyped-def]
    fold = kernel("rotate_fold_ladder", x.device, candidates)
    return fold(x, None, False, signs, rotation, gain, tile, candidates, exponent_span, corrected)


LADDER = (
    "hadamard_half",
    "quantize_ladder",
    "row_sums",
    "fold_ladder",
    "rotate_fold_ladder",
    "pack_ladder",
    "unpack_ladder",
)
PAIRS = ("quantize_both", "quantize_transposed", "quantize_outliers", "fold_transposed", "transpose")
EAGER: dict[str, Callable] = {"quantize_expanded": _quantize_expanded, "dequantize_expanded": _dequantize_expanded}
EAGER |= {name: getattr(pairs, name) for name in PAIRS}
EAGER |= {name: getattr(adamw, name) for name in ("adamw", "adamw_squares", "adamw_amax")}
EAGER |= {"block_scaled_mm": block_scaled.reference, "bf16_mm": cublas.reference}
EAGER |= {"rotate_fold": rotated.rotate_fold, "sum_squares": updates.sum_squares}
EAGER |= {name: getattr(ladder, name) for name in LADDER}
EAGER |= {name: getattr(eden, name) for name in ("rotated_amax", "quantize_eden", "round_eden")}
EAGER |= {"quantize_four_over_six": four_over_six.quantize_four_over_six}
EAGER |= {name: getattr(gradients, name) for name in ("encode_gradients", "decode_gradients")}
EAGER |= {name: getattr(shared_gradients, name) for name in ("encode_gradients_by", "decode_gradients_by")}
EAGER |= {name: getattr(activations, name) for name in SCHEMAS if hasattr(activations, name)}
EAGER |= {"saved_codes": _saved_codes, "gated_silu_backward_ladder": _gated_silu_backward_ladder}
EAGER |= {"rotary_backward": rotary.rotary_backward, "rotary_backward_ladder": _rotary_backward_ladder}
EAGER |= {name: getattr(reference, name) for name in SCHEMAS if name not in EAGER}
EAGER |= {"quantize": _quantize, "hadamard": _hadamard}


NAMED = tuple(name for name, schema in SCHEMAS.items() if "str rounding" in schema or "str candidates" in schema)
NAMED += ("quantize_both", "quantize_transposed")
"""Ops whose format, rounding or scale candidates are arguments; they have a `reference` overload."""


def cache_tag(schemas: Mapping[str, str]) -> str:
    """Return a tag of these schemas for the key of torch's cache of compiled code, which has their arguments in it."""
    return f"lowprec-{sha256(repr(sorted(schemas.items())).encode()).hexdigest()[:16]}"


torch.compiler.config.cache_key_tag += cache_tag(SCHEMAS)  # else code from before a change of a schema would be called
for _name, _schema in SCHEMAS.items():
    _LIBRARY.define(_name + _schema)
for _name in NAMED:
    _LIBRARY.define(f"{_name}.reference{SCHEMAS[_name]}")
SERVED = kernels.load(SCHEMAS)  # device type -> ops with a compiled kernel
KNOWN = kernels.names()  # device type -> formats and roundings that its kernels support


def _of_matrices(name: str, function: Callable) -> Callable:
    """Return the function with a check of the arguments that must be matrices; compiled kernels have their own."""
    checked = matrices(name)

    def call(*args: Any) -> Any:
        for place, argument in checked.items():
            if args[place].dim() != 2:
                raise ValueError(f"{name}: {argument} is a matrix, not a tensor of shape {list(args[place].shape)}")
        return function(*args)

    return call


def _register(name: str, op: str, *, served: bool) -> None:
    """Register the reference, which a device's compiled kernel overrides, and the fake kernel."""
    _LIBRARY.impl(op, _of_matrices(name, EAGER[name]), "CompositeExplicitAutograd")
    if name in COMPILED_ON_CUDA and not served:
        _LIBRARY.impl(op, _of_matrices(name, partial(_on_cuda, name)), "CUDA")
    torch.library.register_fake(f"lowprec::{op}", _of_matrices(name, FAKES[name]))


for _name in SCHEMAS:
    _register(_name, _name, served=_name in SERVED["cuda"])
for _name in NAMED:
    _register(_name, f"{_name}.reference", served=False)
if "scaled_mm" not in SERVED["cuda"]:
    _LIBRARY.impl("scaled_mm", tensor_cores.scaled_mm, "CUDA")
_LIBRARY.impl("block_scaled_mm", block_scaled.block_scaled_mm, "CUDA")
_LIBRARY.impl("bf16_mm", cublas.bf16_mm, "CUDA")


def knows(op: str, device: torch.device, *names: str) -> bool:
    """Return whether the op's kernel on a device supports these formats and roundings; a reference supports all."""
    if op not in SERVED.get(device.type, ()):
        return True
    return all(name in KNOWN[device.type] for name in names)


def lacks(op: str, fused: str, device: torch.device) -> bool:
    """Return whether a device has a compiled kernel of `fused` but none of `op`, which is a part of it."""
    served = SERVED.get(device.type, ())
    return fused in served and op not in served


def kernel(op: str, device: torch.device, *names: str) -> Callable[..., Any]:
    """Return the op, or its reference if the device's compiled kernel does not support one of `names`."""
    found = getattr(torch.ops.lowprec, op)
    return found.default if knows(op, device, *names) else found.reference


def live_kernels(device: torch.device) -> dict[str, str]:
    """Return op -> kind of its kernel on a device."""
    kinds = dict.fromkeys(SCHEMAS, "reference")
    if device.type == "cuda":
        kinds |= dict.fromkeys(COMPILED_ON_CUDA, "reference, compiled") | dict.fromkeys(
            ("scaled_mm", "block_scaled_mm"), "cuBLASLt"
        )
        kinds["bf16_mm"] = "cuBLAS" if cublas.library() else "torch's mm"
    language = {"cpu": "C++", "cuda": "CUDA"}.get(device.type, "")
    return kinds | dict.fromkeys(sorted(SERVED.get(device.type, ())), language)
