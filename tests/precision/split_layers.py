"""Linear layers split over ranks, which are threads (tests/groups.py), and whole ones to compare them with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lowprec_train.group import Group
from lowprec_train.numerics.draws import Gemms, Operand
from lowprec_train.numerics.quantizer import Quantized
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.precision.split import Split
from tests.groups import among
from tests.precision.layers import linear

Place = tuple[Gemms, Operand]
Data = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass
class Ran:
    """What a pass returned, and every operand that was rounded in it, in order."""

    y: Tensor
    dx: Tensor
    dw: Tensor
    seen: list[tuple[Place, Quantized]]


def ran(layer: Linear, x: Tensor, dy: Tensor, watched: bool) -> Ran:
    seen: list[tuple[Place, Quantized]] = []
    layer.observer = (lambda how, x, codes: seen.append(((how.gemm, how.operand), codes))) if watched else None
    leaf = x.contiguous().requires_grad_()
    y = layer(leaf)
    y.backward(dy.view_as(y))
    assert leaf.grad is not None and layer.weight.grad is not None
    return Ran(y.detach().flatten(end_dim=-2), leaf.grad, layer.weight.grad, seen)


def tensors(data: Data, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(data[0]).to(dtype), torch.from_numpy(data[2]).to(dtype)


def whole(recipe: LinearRecipe, data: Data, dtype: torch.dtype, watched: bool = True) -> Ran:
    return ran(linear(recipe, data[1]), *tensors(data, dtype), watched)


def part_of(recipe: LinearRecipe, w: np.ndarray, dim: int, group: Group) -> Linear:
    layer = linear(recipe, np.split(w, group.size, dim)[group.rank])
    layer.split = Split(dim=dim, group=group, whole=w.shape[dim])
    return layer


def parts(recipe: LinearRecipe, data: Data, dtype: torch.dtype, dim: int, count: int, watched: bool) -> list[Ran]:
    """Column-parallel: rows of x and columns of dy are cut; row-parallel: columns of x and rows of dy."""
    x, dy = tensors(data, dtype)

    def body(group: Group) -> Ran:
        mine = x.chunk(count, dim)[group.rank], dy.chunk(count, 1 - dim)[group.rank]
        return ran(part_of(recipe, data[1], dim, group), *mine, watched)

    return among(count, body)
