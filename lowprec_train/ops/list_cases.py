"""Cases of ops that take many tensors, and of `dge`, which one of them repeats, for `ops.cases`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowprec_train.ops.case_inputs import spoilt, values

Cases = dict[str, tuple[Any, ...]]


def _dge() -> Cases:
    return {
        "tensor": (values(5, 36), values(5, 36, seed=8).bfloat16(), torch.tensor([[0.5]]), 5.0, 3.0),
        "rows": (values(5, 36), values(5, 36, seed=8), values(5, 1, seed=9, edges=False).abs(), 5.0, 3.0),
    }


def _dge_all() -> Cases:
    shapes = ((5, 36), (0, 16), (3, 40), (8, 37))
    grads = [values(*shape, seed=index, edges=index == 0) for index, shape in enumerate(shapes)]
    weights = [values(*shape, seed=8, edges=False) for shape in shapes[:3]] + [spoilt(*shapes[3])]
    scales = [
        torch.tensor([[0.5]]),
        torch.ones(1, 1),
        *(values(n, m, seed=9, edges=False).abs() for n, m in ((3, 5), (8, 1))),
    ]
    many = [[each[0].clone() for _ in range(50)] for each in (grads, weights, scales)]
    return {
        "FP32 rounded to BF16": ([x.clone() for x in grads], weights, scales, 5.0, 3.0, torch.bfloat16),
        "FP32": ([x.clone() for x in grads], weights, scales, 5.0, 3.0, torch.float32),
        "BF16": (grads, [w.bfloat16() for w in weights], scales, 3.0, 2.0, torch.bfloat16),
        "two launches": (*many, 5.0, 3.0, torch.bfloat16),
    }


def _matrices() -> list[Tensor]:
    """Return FP32 matrices: of several blocks, not of whole vectors, not aligned, with Inf and with NaN."""
    large = values(96, 200, seed=3, edges=False)
    return [
        values(5, 36),
        large,
        values(3, 7, edges=False),
        large.flatten()[1:57].view(7, 8),
        spoilt(3, 8),
        spoilt(4, 9)[1:2],
    ]


def _amax_all() -> Cases:
    x = _matrices()
    return {"FP32": (x,), "BF16": ([each.bfloat16() for each in x],), "two launches": ([x[0]] * 120,)}


def _quantize_all_by() -> Cases:
    made: Cases = {}
    for name, format, rule, dtype, repeats in (
        ("E4M3", "E4M3", "POW2", torch.bfloat16, 1),
        ("E5M2", "E5M2", "POW2", torch.float32, 1),
        ("E2M1", "E2M1", "FP32", torch.bfloat16, 1),
        ("two launches", "E4M3", "FP32", torch.bfloat16, 20),
    ):
        x = [each.to(dtype) for each in _matrices()] * repeats
        amax = torch.stack([each.float().abs().amax() for each in x])
        codes = [torch.zeros(each.shape, dtype=torch.uint8) for each in x]
        made[name] = (x, amax, codes, format, rule, 1.0)
    return made


BY_OP: dict[str, Callable[[], Cases]] = {
    "amax_all": _amax_all,
    "dge": _dge,
    "dge_all": _dge_all,
    "quantize_all_by": _quantize_all_by,
}
