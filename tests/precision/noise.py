"""The noise that a recipe's backward pass adds to a weight, seen alone.

Rows of the identity, rotated, are +-1/8, and 3/4 of that is a code of E2M1. So under dY = I the dgrad of MXFP4 returns
the weight that it multiplied by, and dX - W is the noise of W.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.numerics.draws import SiteDraws
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.recipe import LinearRecipe

IN, OUT, TOKENS = 256, 64, 64


def layer(recipe: LinearRecipe, site: SiteDraws) -> Linear:
    made = Linear(IN, OUT, bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1)))
    made.recipe, made.draws = recipe, site
    return made


def gradients(made: Linear, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(dX, dW), FP64."""
    leaf = x.clone().requires_grad_()
    made.weight.grad = None
    made(leaf).backward(dy)
    assert leaf.grad is not None and made.weight.grad is not None
    return leaf.grad.double(), made.weight.grad.double()


def weight_noise(recipe: LinearRecipe, site: SiteDraws) -> Tensor:
    """dX - W under dY = I, FP64 [OUT, IN]."""
    made = layer(recipe, site)
    return gradients(made, torch.zeros(TOKENS, IN), torch.eye(OUT))[0] - made.weight.detach().double()


def standard_score(a: Tensor, b: Tensor) -> float:
    """Of the correlation of two noises: about N(0, 1) where they are independent."""
    product = a * b
    return float(product.sum() / product.square().sum().sqrt())
