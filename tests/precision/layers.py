"""What the tests of whole linears share: data that numbers go wrong on, a layer with seeds, and the bound of a GEMM.

Both sides of a comparison have the same codes and scales, so what may differ is a sum of k FP32 products in some order
(its bound: (k + 8) 2^-24 sum |a| |b|, the 8 for scales) and one rounding of the result to its dtype: 2^-8 of the value
for BF16. One wrong code moves an element by some 1e-3 of sum |a| |b|; FP32 runs see it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lowprec_train.numerics.draws import SeedTable, SiteDraws
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.recipe import LinearRecipe
from tests import oracle
from tests.oracle_linear import Passes, Product

TOKENS, IN, OUT = 128, 256, 64
Sizes = tuple[int, int, int]
U = 2.0**-24
RUN_SEED, SITE, STEP, FIRST_TOKEN = 2**40 + 7, 2, 5, 256
DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}


def plain_data(g: np.random.Generator, sizes: Sizes = (TOKENS, IN, OUT)) -> tuple:
    m, k, n = sizes
    return g.standard_normal((m, k)), g.standard_normal((n, k)) * 0.02, g.standard_normal((m, n))


def heavy_tails(g: np.random.Generator, sizes: Sizes = (TOKENS, IN, OUT)) -> tuple:
    """Token norms over decades, zero tokens, a dead output channel, gradients near 1e-4."""
    m, k, n = sizes
    x = g.standard_t(2, (m, k)) * np.exp(2 * g.standard_normal((m, 1)))
    w = g.standard_t(3, (n, k)) * 0.02 * np.exp(g.standard_normal((n, 1)))
    dy = g.standard_t(2, (m, n)) * 1e-4 * np.exp(2 * g.standard_normal((m, 1)))
    x[3], dy[9], w[7], dy[:, 11] = 0, 0, 0, 0
    return x, w, dy


def outlier_channels(g: np.random.Generator, sizes: Sizes = (TOKENS, IN, OUT)) -> tuple:
    x, w, dy = plain_data(g, sizes)
    x[:, [5, 40]] *= 200
    w[:, 17] *= 50
    dy[:, 3] *= 300
    dy[64:] *= 1e-6
    return x, w, dy


DATA = [plain_data, heavy_tails, outlier_channels]


def make(data: Callable, format: str, sizes: Sizes = (TOKENS, IN, OUT)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x and dy as values of the format, the weight of FP32; FP64 arrays."""
    x, w, dy = data(np.random.default_rng(0), sizes)
    cast = oracle.bf16 if format == "BF16" else lambda a: a.astype(np.float32).astype(np.float64)
    return cast(x), w.astype(np.float32).astype(np.float64), cast(dy)


def draws() -> SiteDraws:
    return SeedTable(RUN_SEED, 4).at(STEP, FIRST_TOKEN).site(SITE)


def seeds(gemm: int, purpose: int) -> int:
    return oracle.draw_seed(RUN_SEED, SITE, gemm, purpose, STEP, FIRST_TOKEN)


def linear(recipe: LinearRecipe, w: np.ndarray, bias: np.ndarray | None = None) -> Linear:
    layer = Linear(w.shape[1], w.shape[0], bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(w))
        if bias is not None:
            layer.bias.copy_(torch.from_numpy(bias))
    layer.recipe, layer.draws = recipe, draws()
    return layer


def run(layer: Linear, x: np.ndarray, dy: np.ndarray, format: str) -> list[torch.Tensor]:
    """[y, dX, dW]"""
    leaf = torch.from_numpy(x).to(DTYPES[format]).requires_grad_()
    y = layer(leaf)
    y.backward(torch.from_numpy(dy).to(y.dtype))
    return [y.detach(), leaf.grad, layer.weight.grad]


def bound(product: Product, dtype: torch.dtype) -> np.ndarray:
    sums = (product.k + 8) * U * product.magnitude
    return sums + (2.0**-8 * (np.abs(product.value) + sums) if dtype == torch.bfloat16 else 0) + 1e-37


def assert_within(
    got: list[torch.Tensor],
    want: Passes,
    format: str,
    slack: float = 0.0,
    more: dict[str, np.ndarray] | None = None,
    plain_weight: bool = False,
) -> None:
    """slack: relative, of dW, for an estimator's slopes. more: what else an output may lose. plain_weight: dW is
    nn.Linear's, which makes it in x's dtype before it becomes FP32."""
    expected = {"y": want.y, "dX": want.dx, "dW": want.dw}
    for (name, product), tensor in zip(expected.items(), got):
        assert tensor.dtype == (torch.float32 if name == "dW" else DTYPES[format])
        error = np.abs(tensor.double().numpy() - product.value)
        made = DTYPES[format] if name != "dW" or plain_weight else torch.float32
        allowed = bound(product, made) + (np.abs(product.value) * slack if name == "dW" else 0)
        allowed = allowed + (more or {}).get(name, 0)
        assert (error <= allowed).all(), (name, (error / allowed).max())
        assert np.abs(product.value).max() > 0


def rounded_to_bf16(total: np.ndarray, product: Product, *terms: np.ndarray) -> np.ndarray:
    """What `total` may lose: the product's own bound, and a BF16 rounding of the sum and of each further term."""
    sizes = np.abs(total) + sum(np.abs(term) for term in terms)
    return bound(product, torch.bfloat16) + 2.0**-8 * sizes * (1 + 2.0**-7)
