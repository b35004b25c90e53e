"""Test cases of norms and activations (ops/cases.py): three formats, several groups, BF16 and FP32, with and without
centring and bias; backward from the codes that the reference saves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowprec_train.ops import library
from lowprec_train.ops.case_inputs import normal, values

Cases = dict[str, tuple[Any, ...]]


def _norm_arguments(x: Tensor, bias: Tensor | None, *, centered: bool, format: str, group: int) -> tuple[Any, ...]:
    weight = 1 + 0.1 * values(1, x.shape[1], seed=31)[0].sign()
    return x, weight, bias, 1e-5, centered, format, group


def _quantized_norm() -> Cases:
    bias = normal(1, 128)[0].float()
    return {
        "RMS": _norm_arguments(normal(5, 256), None, centered=False, format="E4M3", group=128),
        "centred": _norm_arguments(normal(7, 128), bias, centered=True, format="E4M3", group=16),
        "E2M1": _norm_arguments(normal(6, 96), None, centered=False, format="E2M1", group=32),
        "FP32": _norm_arguments(normal(3, 64).float(), None, centered=False, format="E5M2", group=32),
    }


def _backward(op: str, kept: slice) -> Cases:
    """Return backward cases from the tensors that the reference saves in the forward op's cases."""
    made: Cases = {}
    for name, arguments in BY_OP[op]().items():
        outputs = library.EAGER[op](*arguments)
        rows, columns = outputs[0].shape
        made[name] = (normal(rows, columns, seed=43).to(outputs[0].dtype), *outputs[kept])
        if op == "quantized_norm":
            made[name] += (arguments[1], arguments[2] is not None)
        made[name] += arguments[3 if op == "quantized_norm" else 1 :]
    return made


def _gated_silu_backward_ladder() -> Cases:
    """Return cases whose gates are 0 or 128, where sigmoids and so all bits are the same on every device."""
    made: Cases = {}
    for name, rows, width, rotation, dtype, candidates in (
        ("rotated", 40, 320, 128, torch.bfloat16, "mse"),
        ("not rotated", 7, 24, 0, torch.bfloat16, "mse"),
        ("FP16", 5, 64, 128, torch.float16, "mse"),
        ("rotations of 32", 5, 64, 32, torch.bfloat16, "mse"),
        ("one scale", 5, 64, 128, torch.bfloat16, "none"),
    ):
        gate, up = 128 * (normal(rows, width, seed=5) > 0), normal(rows, width, seed=7)
        gate_up = torch.stack((gate, up), 2).flatten(1).to(dtype)
        dy = (normal(rows, width, seed=9) * 2.0 ** (torch.arange(rows) % 7)[:, None]).to(dtype)
        signs = torch.tensor(13) if rotation else None
        made[name] = (dy, gate_up, signs, rotation, 0.125, [1, 16], candidates, 11, rows > 5)
    return made


def _rotary_backward() -> Cases:
    """Return cases of several head sizes and groups; 96 and 6 columns a head have no fused kernel on GPUs."""
    made: Cases = {}
    for name, rows, tokens, head, groups, queries, dtype in (
        ("heads of 64", 12, 6, 64, 2, 1, torch.bfloat16),
        ("four queries a key", 10, 5, 128, 1, 4, torch.bfloat16),
        ("heads of 256", 6, 3, 256, 2, 2, torch.bfloat16),
        ("heads of 96", 6, 6, 96, 2, 2, torch.bfloat16),
        ("FP32", 8, 4, 6, 3, 2, torch.float32),
    ):
        widths = (groups * queries * head, groups * head, groups * head)
        gradients = (normal(rows, width, seed=seed).to(dtype) for seed, width in enumerate(widths, 3))
        turns = torch.outer(torch.arange(tokens), torch.linspace(1, 0.01, head // 2))
        made[name] = (*gradients, turns.cos(), turns.sin())
    return made


def _rotary_backward_ladder() -> Cases:
    """Return the cases of `rotary_backward` whose rows are divided by the rotation, and some without one."""
    made: Cases = {}
    for name, arguments in _rotary_backward().items():
        for rotation in (128, 32, 0):
            columns = arguments[0].shape[1] + 2 * arguments[1].shape[1]
            if columns % (rotation or 16) == 0:
                signs = torch.tensor(13) if rotation else None
                how = (signs, rotation, 0.125, [1, 16], "mse" if rotation != 32 else "none", 11, rotation > 0)
                made[f"{name}, rotated {rotation}"] = (*arguments, *how)
    return made


def _quantized_gated_silu() -> Cases:
    return {
        "E4M3": (normal(5, 512), "E4M3", 128),
        "E2M1": (normal(6, 192), "E2M1", 32),
        "FP32": (normal(3, 128).float(), "E5M2", 16),
    }


def _saved_codes() -> Cases:
    return {
        "E4M3": (values(5, 256).bfloat16(), "E4M3", [1, 16], "POW2", 1.0, 0),
        "E2M1": (values(6, 96), "E2M1", [1, 32], "E8M0_CEIL", 1.0, 0),
        "columns apart": (values(4, 128)[:, ::2], "E5M2", [1, -1], "POW2", 0.5, 0),
    }


def _group_codes() -> Cases:
    return {
        "E4M3": (values(5, 256).bfloat16(), "E4M3", 16, 1),
        "two ways": (values(6, 192).bfloat16(), "E2M1", 32, 2),
        "FP32, two ways": (values(3, 128), "E5M2", 16, 2),
    }


def _of_codes(op: str) -> Cases:
    """Return cases of an op that computes from codes, in BF16 and FP32, from the codes of numbers with NaN and Inf."""
    made: Cases = {}
    for format, group, dtype in (
        ("E4M3", 64, torch.bfloat16),
        ("E2M1", 32, torch.bfloat16),
        ("E5M2", 16, torch.float32),
    ):
        ways = 2 if op == "gated_silu_of_codes" else 1
        x = values(5, 64 * ways, seed=group)
        codes = library.EAGER["group_codes"](x, format, group, ways)
        norm = _norm_arguments(x, None, centered=format == "E5M2", format=format, group=group)[1:5]
        made[format] = (*codes, *(norm if op == "norm_of_codes" else ()), format, group, dtype)
    return made


def _quantized_gelu() -> Cases:
    return {"E4M3": (normal(5, 256), "E4M3", 128), "E2M1": (normal(6, 96), "E2M1", 32)}


BY_OP: dict[str, Callable[[], Cases]] = {
    "saved_codes": _saved_codes,
    "group_codes": _group_codes,
    **{op: partial(_of_codes, op) for op in ("norm_of_codes", "gated_silu_of_codes", "gelu_of_codes")},
    "quantized_norm": _quantized_norm,
    "quantized_norm_backward": partial(_backward, "quantized_norm", slice(2, 4)),
    "gated_silu": lambda: {"FP32": (values(5, 24),), "BF16": (values(9, 256).bfloat16(),)},
    "gated_silu_backward": lambda: {"BF16": (values(9, 128, seed=3).bfloat16(), values(9, 256).bfloat16())},
    "gated_silu_backward_ladder": _gated_silu_backward_ladder,
    "rotary_backward": _rotary_backward,
    "rotary_backward_ladder": _rotary_backward_ladder,
    "quantized_gated_silu": _quantized_gated_silu,
    "quantized_gated_silu_backward": partial(_backward, "quantized_gated_silu", slice(2, 6)),
    "quantized_gelu": _quantized_gelu,
    "quantized_gelu_backward": partial(_backward, "quantized_gelu", slice(2, 4)),
}
