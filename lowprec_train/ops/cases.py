"""Small test inputs for every op, with the values at which kernels fail: zeros of both signs, a zero row, subnormals,
values next to powers of two, Inf and NaN in one tile, sizes that no vector width divides, random bits with and without
an origin.

`cases(op)` returns arguments; the expected outputs are those of the reference (ops/self_test.py). Random bits are from
Philox, so the cases are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowprec_train.ops import (
    activation_cases,
    block_scaled_cases,
    eden_cases,
    fold_cases,
    ladder_cases,
    library,
    list_cases,
    norm_cases,
    reference,
)
from lowprec_train.ops.case_inputs import e2m1, normal, spoilt, ties, values
from lowprec_train.ops.codecs import FP32, StateCodec, StateCodecs, parts_of
from lowprec_train.ops.gradient_cases import decode_by_cases, decode_cases, encode_by_cases, encode_cases

Cases = dict[str, tuple[Any, ...]]  # name of the case -> arguments of the op

# Ops of which only the codes are bit-exact (norms and activations).
BOUNDED = {f"quantized_{op}{way}" for op in ("norm", "gated_silu", "gelu") for way in ("", "_backward")}
BOUNDED |= {"gated_silu", "gated_silu_backward"}
BOUNDED |= {f"{op}_of_codes" for op in ("norm", "gated_silu", "gelu")}


def _bf16_mm() -> Cases:
    """Sums of small whole numbers, which are exact in any order."""

    def whole(rows: int, columns: int, first: int) -> torch.Tensor:
        return ((torch.arange(rows * columns) * 7 + first) % 13 - 6).view(rows, columns).bfloat16()

    a, b, factor, one = whole(48, 64, 3), whole(32, 64, 5), torch.tensor([[0.3]]), torch.tensor([[-1.7e-5]])
    return {
        "to BF16": (a, b, factor, torch.bfloat16),
        "to FP32": (a, b, one, torch.float32),
        "no factor": (a, b, None, torch.bfloat16),
        "columns together": (whole(64, 48, 1).t(), whole(64, 32, 2).t(), factor, torch.bfloat16),
        "part of a matrix": (whole(48, 96, 4)[:, 16:80], b, factor, torch.float32),
        "odd sizes": (whole(7, 13, 6), whole(5, 13, 8), factor, torch.bfloat16),
        "long sums": (whole(16, 4096, 9), whole(16, 4096, 10), factor, torch.float32),
        "not finite": (torch.where(a == 6, torch.inf, a), b, factor, torch.bfloat16),
    }


def _quantize() -> Cases:
    seed, origin = torch.tensor(7 << 33 | 5), torch.tensor([3, 16])
    made = {
        "tensor": (values(5, 37), "E4M3", [-1, -1], "POW2", 1.0, 0, "nearest", None, None),
        "FP32 scale": (values(33, 72), "E5M2", [-1, -1], "FP32", 1.0, 0, "nearest", None, None),
        "rows": (values(7, 52), "E2M1", [1, -1], "FP32", 1.0, 0, "nearest", None, None),
        "columns": (values(36, 21), "E4M3", [-1, 1], "POW2", 1.0, 0, "nearest", None, None),
        "columns of BF16": (values(64, 40).bfloat16(), "E4M3", [-1, 1], "POW2", 1.0, 0, "nearest", None, None),
        "groups": (values(3, 256).bfloat16(), "E4M3", [1, 128], "POW2", 1.0, 0, "nearest", None, None),
        "squares": (values(64, 64).bfloat16(), "E4M3", [32, 32], "POW2", 1.0, 0, "nearest", None, None),
        "INT8": (values(6, 36), "INT8", [1, -1], "FP32", 1.0, 0, "nearest", None, None),
        "INT4": (values(6, 48), "INT4", [1, 16], "FP32", 1.0, 0, "nearest", None, None),
        "stochastic INT4": (values(6, 48).bfloat16(), "INT4", [1, 16], "FP32", 1.0, 0, "stochastic", seed, origin),
        "FP16": (values(6, 36), "FP16", [1, -1], "POW2", 1.0, 0, "nearest", None, None),
        "MX floor": (values(9, 96), "E2M1", [1, 32], "E8M0_FLOOR", 0.75, 0, "stochastic", seed, origin),
        "MX ceil": (values(9, 96).bfloat16(), "E2M1", [1, 32], "E8M0_CEIL", 1.0, 0, "nearest", None, None),
        "MX span": (values(9, 96).bfloat16(), "E2M1", [1, 32], "E8M0_FLOOR", 0.75, 14, "stochastic", seed, None),
        "stochastic rows": (values(11, 37), "E4M3", [1, -1], "FP32", 1.0, 0, "stochastic", seed, origin),
        "stochastic tensor": (values(4, 44).half(), "E5M2", [-1, -1], "POW2", 1.0, 0, "stochastic", seed, None),
        "nearest, seed ignored": (values(9, 96), "E2M1", [1, 32], "E8M0_CEIL", 1.0, 0, "nearest", seed, origin),
        "stochastic BF16": (values(5, 24), "BF16", [-1, -1], "FP32", 1.0, 0, "stochastic", seed, origin),
    }
    for format in ("E2M1", "E4M3", "E5M2", "INT4", "INT8"):
        x, plain = ties(format), ("FP32", 1.0, 0, "nearest", None, None)
        made |= {f"ties of {format} in {n}": (x, format, n, *plain) for n in ([1, -1], [1, 32])}
    made["ties of BF16"] = (ties("E2M1")[:7].bfloat16(), "E2M1", [1, -1], "FP32", 1.0, 0, "nearest", None, None)
    made["ties in columns"] = (ties("E4M3").t().contiguous(), "E4M3", [-1, 1], "FP32", 1.0, 0, "nearest", None, None)
    made["ties of tiny numbers"] = (ties("E4M3") * 2.0**-110, "E4M3", [1, -1], "FP32", 1.0, 0, "nearest", None, None)
    made["ties under one scale"] = (ties("E4M3")[60:61], "E4M3", [-1, -1], "FP32", 1.0, 0, "nearest", None, None)
    bad = spoilt(5, 64)
    for tile in ([-1, -1], [1, -1]):
        made[f"Inf and NaN in {tile}"] = (bad, "E4M3", tile, "POW2", 1.0, 0, "nearest", None, None)
    block = ([1, 32], "E8M0_FLOOR", 0.75, 28, "stochastic", seed, None)
    return made | {"Inf and NaN in MX": (bad.bfloat16(), "E2M1", *block)}


def _quantize_nvfp4() -> Cases:
    seed, origin = torch.tensor(11), torch.tensor([1, 8])
    return {
        "rows": (values(7, 48), [1, 16], 1.0, "nearest", None, None),
        "squares": (values(32, 64).bfloat16(), [16, 16], 1.0, "nearest", None, None),
        "stochastic": (values(5, 80).bfloat16(), [1, 16], 16 / 17, "stochastic", seed, origin),
        "nearest, seed ignored": (values(5, 80), [1, 16], 1.0, "nearest", seed, origin),
        "one value": (torch.full((1, 16), 1e-30), [1, 16], 1.0, "nearest", None, None),
        "ties": (ties("E2M1", 16)[4:5].repeat(16, 3), [1, 16], 1.0, "nearest", None, None),
        "ties in squares": (ties("E2M1", 16)[7:8].repeat(16, 2).bfloat16(), [16, 16], 1.0, "nearest", None, None),
        "Inf and NaN": (spoilt(4, 48), [1, 16], 1.0, "nearest", None, None),
    }


def _rotated_nvfp4() -> Cases:
    """Return cases of `quantize_nvfp4` with a rotation."""
    signs, seed, origin = torch.tensor(5), torch.tensor(11), torch.tensor([2, 16])
    line = ([1, 16], 16 / 17, "stochastic", seed, origin, signs)
    return {
        "rotated": (normal(5, 96).bfloat16(), [1, 16], 1.0, "nearest", None, None, signs, 16),
        "rotated, stochastic": (values(6, 256).bfloat16(), *line, 128),
        "rotated in FP32, without signs": (normal(3, 32), [1, 16], 1.0, "nearest", None, None, None, 2),
        "rotated, squares": (normal(32, 64), [16, 16], 1.0, "nearest", None, None, signs, 32),
        "rotated, Inf and NaN": (spoilt(4, 64), *line, 16),
    }


def _round_nvfp4() -> Cases:
    """Return the cases of `quantize_nvfp4` with blocks of 1x16."""
    found = {name: (*each, None, 0)[:8] for name, each in (_quantize_nvfp4() | _rotated_nvfp4()).items()}
    return {name: (x, *how) for name, (x, tile, *how) in found.items() if tile == [1, 16]}


def _amax() -> Cases:
    tiles = {"tensor": [-1, -1], "rows": [1, -1], "columns": [-1, 1], "MX": [1, 32], "squares": [16, 16]}
    x, bad = values(32, 96).bfloat16(), spoilt(5, 64)
    return {name: (x, tile) for name, tile in tiles.items()} | {"Inf and NaN": (bad, [1, 32])}


def _quantize_by() -> Cases:
    """Return the cases of `quantize` as the first half of a matrix whose second half is eight times as large."""
    made: Cases = {}
    for name, (x, format, tile, rule, headroom, exponent_span, *draws) in _quantize().items():
        amax = reference.amax(x, tile) * 8.0
        tops = amax.amax(1, keepdim=True) * 4.0 if exponent_span else None
        made[name] = (x, amax, tops, format, tile, rule, headroom, exponent_span, *draws)
    return made | norm_cases.quantize_by()


def _quantize_nvfp4_by() -> Cases:
    made: Cases = {}
    for name, (x, tile, *how) in _quantize_nvfp4().items():
        amax = reference.amax(x, tile)
        made[name] = (x, amax, amax.amax().reshape(1, 1) * 8.0, tile, *how)
    return made


def _four_over_six() -> Cases:
    """Return the round-to-nearest cases of `quantize_nvfp4_by` for each error, and blocks that round better to 4."""
    made: Cases = {}
    for name, (x, amax, top, tile, *_) in _quantize_nvfp4_by().items():
        made |= {f"{name} by {error}": (x, amax, top, tile, error) for error in ("mse", "mae", "max")}
    x = normal(16, 96)
    amax = reference.amax(x, [1, 16])
    return made | {"rows": (x, amax, amax.amax(1, keepdim=True), [1, 16], "mse")}


def _quantize_both() -> Cases:
    x, short = values(33, 72).bfloat16(), values(5, 36)
    across, down = 2.0 ** values(1, 72).sign(), 2.0 ** values(33, 1, seed=3).sign()
    return {
        "tensor": (x, None, None, None, "E4M3", [-1, -1], [-1, -1], "POW2", 1.0),
        "tensor, given amax": (x, x.float().abs().amax(1), None, None, "E4M3", [-1, -1], [-1, -1], "POW2", 1.0),
        "a part": (x, torch.tensor([1e9]), None, None, "E5M2", [-1, -1], [-1, -1], "POW2", 1.0),
        "a small part": (short, values(7, 1).abs() * 8, None, None, "E4M3", [-1, -1], [-1, -1], "FP32", 1.0),
        "folded": (x, None, across, down, "E5M2", [1, -1], [1, -1], "FP32", 1.0),
        "rows, then columns": (x, None, None, None, "E4M3", [1, -1], [-1, 1], "FP32", 1.0),
        "FP32": (short, None, None, None, "E2M1", [1, -1], [1, -1], "FP32", 1.0),
        "ties": (ties("E4M3")[:96], None, None, None, "E4M3", [1, -1], [-1, 1], "FP32", 1.0),
        "ties, folded": (
            ties("E5M2")[:96],
            None,
            across[:, :64],
            down[:1].expand(96, 1),
            "E5M2",
            [1, -1],
            [1, -1],
            "FP32",
            1.0,
        ),
        "Inf and NaN": (spoilt(5, 64), None, None, None, "E4M3", [1, -1], [1, -1], "POW2", 1.0),
    }


def _rotate_fold() -> Cases:
    signs, seed, origin = torch.tensor(13), torch.tensor(17), torch.tensor([2, 32])
    x, codes = values(64, 96).bfloat16(), values(32, 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    rule = ("E8M0_FLOOR", 0.75)
    return {
        "rows": (x, None, False, signs, 32, *rule, 28, "E5M2", "stochastic", seed, origin),
        "columns": (x, None, True, signs, 64, *rule, 14, "E4M3", "stochastic", seed, None),
        "no rotation": (x, None, False, None, 0, *rule, 28, "E5M2", "stochastic", seed, None),
        "nearest": (x, None, True, signs, 32, "E8M0_FLOOR", 1.0, 14, "E4M3", "nearest", None, None),
        "nearest, seed ignored": (x, None, False, signs, 32, "E8M0_CEIL", 1.0, 28, "E5M2", "nearest", seed, None),
        "codes": (codes, torch.tensor([[0.25]]), False, signs, 64, *rule, 14, "E4M3", "stochastic", seed, origin),
        "codes, columns": (codes, torch.tensor([[0.25]]), True, signs, 32, *rule, 14, "E4M3", "stochastic", seed, None),
        "Inf and NaN": (spoilt(4, 96).bfloat16(), None, False, signs, 32, *rule, 28, "E5M2", "stochastic", seed, None),
    }


def _rare(name: str) -> bool:
    """Return whether this case of `_outliers` has bounds of 0 or near it."""
    return name.startswith(("rare", "over a faint body"))


def _outliers() -> tuple[dict[str, Tensor], dict[str, int]]:
    x = {"few": values(5, 37), "BF16": values(6, 264).bfloat16(), "ties": values(3, 64).sign(), "spoilt": spoilt(4, 48)}
    x["middles"] = ties("E2M1")[:96].bfloat16()
    numbers, rare = values(6, 72, seed=9), torch.arange(72) % 24 == 5
    x["rare"], x["over a faint body"] = numbers * rare, torch.where(rare, numbers, numbers * 2.0**-40)
    x |= {f"{name}, BF16": x[name].bfloat16() for name in ("rare", "over a faint body")}
    few = dict.fromkeys(filter(_rare, x), 3)
    return x, {"few": 1, "BF16": 3, "ties": 5, "spoilt": 2, "middles": 0, **few}


def _expanded() -> Cases:
    x = {"E4M3": values(5, 72).square(), "E5M2": values(3, 300, seed=4), "equal": torch.full((2, 64), 3e-7)}
    x["spoilt"] = spoilt(4, 48)
    made = {name: (each, "E5M2" if name == "E5M2" else "E4M3", 16, 4) for name, each in x.items()}
    return made | {"whole rows": (values(4, 160), "E4M3", 128, 1)}


def _decoded(made: Cases) -> Cases:
    """Return cases to decode: outputs of the reference encoder."""
    encode = library.EAGER["quantize_expanded"]
    return {name: (*encode(*arguments), *arguments[1:]) for name, arguments in made.items()}


def _adamw_arguments(
    first: StateCodec,
    second: StateCodec,
    master: StateCodec = FP32,
    *,
    found: float | Sequence[float] = 0.0,
    dtype: torch.dtype = torch.float32,
    beta1: float = 0.9,
    shards: bool = False,
) -> dict[str, Any]:
    """Return the arguments of `adamw` by name, for the third step of matrices that include rows of one element, with
    state encoded by the reference. shards: tensors are shards of larger ones, the last empty; parameters are FP32.
    """
    shapes, segments, group = [(5, 1024), (6, 72), (7, 1)] + [(0, 64)] * shards, [8, 8, 1] + [8] * shards, 128
    codecs = StateCodecs((("exp_avg", first), ("exp_avg_sq", second)), master)
    held: dict[str, list[Tensor]] = {"params": [], "exp_avg": [], "exp_avg_sq": [], "master": []}
    for shape, count in zip(shapes, segments, strict=True):
        m = values(8, shape[1], seed=53)[: shape[0]] * 1e-5
        w = values(8, shape[1], seed=51, edges=False)[: shape[0]].clamp(-4, 4) * 0.02
        parts = codecs.encode(
            {"exp_avg": m, "exp_avg_sq": m.square(), "master": w}, segments=count, seed=torch.tensor(7)
        )
        value = parts.pop("parameter")
        held["params"].append(value.float().clone() if shards else value.clone())
        for name, _ in codecs.kept:
            held[name] += [part.clone() for part in parts_of(parts, name).values()]
    size = len(shapes)
    whole = {"rms": None, "amax": None, "origins": None} if not shards else {
        "rms": torch.linspace(0.5, 2.0, size),
        "amax": torch.tensor([[2e-3, 1e-4, 0.5]]) * torch.arange(1, size + 1)[:, None],
        "origins": torch.tensor([[0, 8], [3, 72], [70000, 0], [5, 0]]),
    }  # fmt: skip
    return {
        "params": held["params"],
        "grads": [(values(8, k, seed=57, edges=False)[:n] * 1e-5).to(dtype) for n, k in shapes],
        "first": held["exp_avg"],
        "second": held["exp_avg_sq"],
        "masters": held["master"],
        "steps": [torch.tensor(2.0) for _ in shapes],
        "grad_scale": torch.tensor(3.0),
        **whole,
        "indices": torch.arange(size) if master.stochastic else None,
        "found_inf": torch.tensor(found),
        "codecs": [field for _, codec in codecs.named for field in (codec.format, codec.scaling)],
        "stochastic": master.stochastic,
        "group": group,
        "segments": segments,
        "seed": 1234,
        "rates": (torch.tensor(1e-3, dtype=torch.float64), beta1, 0.95, 1e-8, 0.1),
        "clip": False,
    }


def _adamw() -> dict[str, dict[str, Any]]:
    bf16, fp16, e4m3, e5m2 = StateCodec("BF16"), *(StateCodec(f, "tensor") for f in ("FP16", "E4M3", "E5M2"))
    coat, coat_e5m2 = (StateCodec(f, "expanded", 128) for f in ("E4M3", "E5M2"))
    drawn = {"BF16": StateCodec("BF16", stochastic=True), "FP16": StateCodec("FP16", "tensor", stochastic=True)}
    return {
        "FP32": _adamw_arguments(FP32, FP32),
        "expanded": _adamw_arguments(coat, coat),
        "expanded, BF16 gradients": _adamw_arguments(coat_e5m2, coat_e5m2, dtype=torch.bfloat16),
        "expanded, skipped": _adamw_arguments(coat, coat, found=1.0),
        "expanded, one skipped": _adamw_arguments(coat, coat, found=(0.0, 1.0, 0.0)),
        "expanded, shards": _adamw_arguments(coat, coat, drawn["BF16"], shards=True),
        "scaled": _adamw_arguments(e4m3, fp16, fp16),
        "scaled, two skipped": _adamw_arguments(e4m3, fp16, fp16, found=(1.0, 0.0, 1.0)),
        "scaled, shards": _adamw_arguments(e4m3, fp16, drawn["FP16"], shards=True),
        "BF16": _adamw_arguments(bf16, bf16, drawn["BF16"], dtype=torch.bfloat16),
        "BF16, slow": _adamw_arguments(bf16, FP32, beta1=0.999),
        "BF16, shards": _adamw_arguments(bf16, bf16, drawn["BF16"], shards=True),
        "scaled, slow": _adamw_arguments(fp16, fp16, beta1=0.99),
        "scaled, slow E4M3": _adamw_arguments(e4m3, fp16, beta1=0.95),
        "scaled, slow E5M2": _adamw_arguments(e5m2, fp16, beta1=0.95),
        "mixed": _adamw_arguments(e5m2, coat, drawn["FP16"]),
    }


def _arguments(op: str) -> Cases:
    """Return the arguments of `adamw` or of an op for its statistics, in the order of the schema."""
    own = ("amax", "origins", "indices", "found_inf", "stochastic", "seed", "clip") if op != "adamw" else ()
    made = {}
    for name, named in _adamw().items():
        kept = {key: value for key, value in named.items() if key not in own}
        codecs, rates = kept.pop("codecs"), kept.pop("rates")
        ordered = list(kept.items())
        at = [key for key, _ in ordered].index("stochastic" if op == "adamw" else "group")
        clip = [ordered.pop()[1]] if op == "adamw" else []
        before, after = ([value for _, value in part] for part in (ordered[:at], ordered[at:]))
        made[name] = (*before, *codecs, *after, *rates, *clip)
    return made


def _dequantize() -> Cases:
    e4m3, codes = values(5, 96).clamp(-448, 448).to(torch.float8_e4m3fn), e2m1(6, 96)
    e5m2, narrow = e4m3.float().to(torch.float8_e5m2), values(6, 3, seed=6).abs()
    return {
        "tensor": (e4m3, torch.tensor([[0.125]])),
        "rows": (e5m2, values(5, 1, seed=6).abs()),
        "blocks": (codes, values(6, 6, seed=8)),
        "squares": (codes, values(3, 4, seed=8)),
        "short blocks": (codes[:, :36].contiguous(), values(6, 9, seed=8)),
        "odd": (e4m3[:, :37].contiguous(), torch.tensor([[0.3]])),
        "INT8": (codes.view(torch.int8), torch.tensor([[0.3]])),
        "FP16": (values(6, 96).half(), narrow),
        "BF16": (values(6, 96).bfloat16(), narrow),
        "Inf and NaN": (spoilt(6, 96).to(torch.float8_e5m2), narrow),
    }


def cases(op: str) -> Cases:
    """Return the cases of an op, on the CPU."""
    e4m3, codes = values(5, 96).clamp(-448, 448).to(torch.float8_e4m3fn), e2m1(6, 96)
    x, clipped = _outliers()
    every = torch.arange(256, dtype=torch.uint8)
    made: dict[str, Any] = {
        "quantize": _quantize,
        "quantize_nvfp4": lambda: _quantize_nvfp4() | _rotated_nvfp4(),
        "round_nvfp4": _round_nvfp4,
        "amax": _amax,
        "quantize_by": _quantize_by,
        "quantize_nvfp4_by": _quantize_nvfp4_by,
        "quantize_four_over_six": _four_over_six,
        "quantize_both": _quantize_both,
        "quantize_outliers": lambda: {name: (x[name], n) for name, n in clipped.items()},
        "quantize_carrier": lambda: {
            n: (x[n], *reference.outlier_bounds(x[n], c), reference.amax(x[n], (1, -1))) for n, c in clipped.items()
        },
        # A bound of 0 has either sign, and signs are compared here.
        "outlier_bounds": lambda: {name: (x[name], n) for name, n in clipped.items() if not _rare(name)},
        **dict.fromkeys(("dequantize", "dequantize_bf16"), _dequantize),
        "block_scaled_mm": block_scaled_cases.cases,
        "bf16_mm": _bf16_mm,
        **fold_cases.BY_OP,
        "pack_e2m1": lambda: {"matrix": (codes,), "odd": (e2m1(3, 14),), "one": (e2m1(1, 2)[0],)},
        "unpack_e2m1": lambda: {"every byte": (every.reshape(8, 32),)},
        "unpack_e2m1_all": lambda: {"lists": ([every, every[1:10]], [every.repeat(2), every[:18].clone()])},
        "transpose": lambda: {"odd": (e4m3[:, :37].contiguous(),), "INT8": (codes.view(torch.int8),)},
        "copy_weight": lambda: {
            name: (values(3, 16), dtype, every[:1])
            for name, dtype in (("FP32", torch.float32), ("BF16", torch.bfloat16))
        },
        "rotate_fold": _rotate_fold,
        **norm_cases.BY_OP,
        **activation_cases.BY_OP,
        **eden_cases.BY_OP,
        **ladder_cases.BY_OP,
        "hadamard": lambda: {
            "signs": (values(5, 96), torch.tensor(23), 32),
            "no signs": (values(3, 128).bfloat16(), None, 64),
            "Inf and NaN": (spoilt(3, 64), torch.tensor(23), 16),
        },
        "quantize_expanded": _expanded,
        "encode_gradients": lambda: encode_cases(values(4, 2308), spoilt(4, 2308)),
        "decode_gradients": lambda: decode_cases(values(4, 2308), spoilt(4, 2308)),
        "encode_gradients_by": lambda: encode_by_cases(values(4, 2308), spoilt(4, 2308)),
        "decode_gradients_by": lambda: decode_by_cases(values(4, 2308), spoilt(4, 2308)),
        "dequantize_expanded": lambda: _decoded(_expanded()),
        **list_cases.BY_OP,
        **{op: partial(_arguments, op) for op in ("adamw", "adamw_squares", "adamw_amax")},
        "sum_squares": lambda: {
            "lists": ([values(5, 37), torch.empty(0), values(3, 8).bfloat16(), torch.ones(1), torch.empty(0)],),
            "unaligned": ([values(7, 41).flatten()[3:]],),
            "Inf and NaN": ([spoilt(3, 8)[:1], spoilt(3, 8)[1:]],),
        },
    }
    return made[op]()
