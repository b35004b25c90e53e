"""Cases of the differentiable estimator's ops, for `ops.cases`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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


BY_OP: dict[str, Callable[[], Cases]] = {"dge": _dge, "dge_all": _dge_all}
