"""CUDA's outlier selection, E2M1 packing, NVFP4 and DGE against the Python reference on the CPU: the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowprec_train.ops import pairs, reference
from lowprec_train.ops.library import live_kernels

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SEED = torch.tensor(0x1234_5678_9ABC_DEF)
OPS = ("outlier_bounds", "quantize_carrier", "quantize_outliers", "pack_e2m1", "unpack_e2m1", "fold", "fold_transposed")
OPS += ("unpack_e2m1_all", "quantize_nvfp4", "dge", "dge_all")
# Columns that end inside a vector, a warp, a cluster; the widest of each team of warps, and one vector more.
COLUMNS = (1, 3, 8, 40, 264, 1000, 2048, 2056, 4096, 4104, 8192, 8200, 11008, 12296, 16384, 16392, 32768, 32776)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def outlying(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :: max(1, x.shape[1] // 7)] *= 300.0
    return x


def holed(x: Tensor) -> Tensor:
    """NaN, both infinities and zeros of both signs, each in a row of its own and all in the last one."""
    x = x.clone()
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, 0.0, -0.0)):
        x[row % len(x), x.shape[1] // 2] = value
        x[-1, row % x.shape[1]] = value
    return x


def rare(x: Tensor, body: float = 0.0) -> Tensor:
    """Three or four values a row; the others are multiplied by `body`."""
    kept = torch.arange(x.shape[1]) % max(1, x.shape[1] // 3) == 0
    return torch.where(kept, x * torch.exp2(10 * x.flip(1)), x * body)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "outlying": outlying,
    "holed": holed,
    "rare": rare,
    "rare over a faint body": lambda x: rare(x, 2.0**-40),
    "rare and holed": lambda x: holed(rare(x)),
    "zeros": torch.zeros_like,
    "constant": lambda x: torch.full_like(x, -3.0),
    "few": lambda x: x.round().clamp(-2, 2),
    "positive": lambda x: x.abs(),
    "rectified": torch.relu,
    "negative": lambda x: -x.abs() - 0.01,
    "mostly negative": lambda x: torch.where(x > 2.5, x, -x.abs()),
    "sorted": lambda x: x.sort(dim=1).values,
    "tiny": lambda x: x * 2.0**-126,
    "subnormal": lambda x: x * 2.0**-140,
    "huge": lambda x: x * 2.0**126,
    "scales": lambda x: x * torch.exp2(4 * x.flip(1)),
}


def canonical(x: Tensor) -> Tensor:
    """Bits, with one NaN for all: which one an operation makes is the machine's choice."""
    nan = x.float().isnan()
    bits = x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
    return torch.where(nan, -1 if x.element_size() > 1 else 0x7F, bits)


def on_cuda(name: str, *args: object) -> tuple[Tensor, ...]:
    got = getattr(torch.ops.lowprec, name)(*(a.cuda() if isinstance(a, Tensor) else a for a in args))
    return tuple(t.cpu() for t in ((got,) if isinstance(got, Tensor) else got))


def check(name: str, meaning: Callable, *args: object) -> None:
    wanted = meaning(*args)
    for got, want in zip(on_cuda(name, *args), (wanted,) if isinstance(wanted, Tensor) else wanted, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert torch.equal(canonical(got), canonical(want)), name


def clips(columns: int) -> list[int]:
    return sorted({c for c in (0, 1, 2, columns // 100, columns // 16, columns // 8, columns // 2) if c < columns})


def check_outliers(x: Tensor, clipped: int) -> None:
    low, high = reference.outlier_bounds(x, clipped)
    for got, want in zip(on_cuda("outlier_bounds", x, clipped), (low, high), strict=True):
        nan = want.isnan()
        assert torch.equal(got.isnan(), nan) and torch.equal(got[~nan], want[~nan])  # as floats: zeros have no order
    check("quantize_carrier", reference.quantize_carrier, x, low, high, reference.amax(x, (1, -1)))
    check("quantize_outliers", pairs.quantize_outliers, x, clipped)


def test_kernels_are_live():
    kernels = live_kernels(torch.device("cuda"))
    assert {kernels[name] for name in OPS} == {"CUDA"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outliers_of_every_kind(dtype, kind):
    for rows, columns in ((7, 256), (6, 1000), (5, 4096)):
        x = KINDS[kind](drawn(rows, columns)).to(dtype)
        for clipped in clips(columns):
            check_outliers(x, clipped)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outliers_of_every_width(dtype, columns):
    for kind in ("normal", "outlying", "holed", "rectified", "rare", "rare over a faint body"):
        for rows in (1, 6):
            x = KINDS[kind](drawn(rows, columns)).to(dtype)
            for clipped in clips(columns)[::2] if columns > 8192 else clips(columns):
                check_outliers(x, clipped)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outliers_of_rows_that_are_not_aligned(dtype):
    x = drawn(9 * 512 + 1).to(dtype)[1:].view(9, 512)
    check_outliers(x, 5)
    strided = drawn(6, 1024).to(dtype)[:, ::2]
    check("quantize_outliers", pairs.quantize_outliers, strided, 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_given_bounds(dtype):
    """Bounds that no selection makes: crossed, zero, infinite, NaN. An amax of 0, NaN, infinite, of a part, of more."""
    x = holed(outlying(drawn(6, 264))).to(dtype)
    amax = torch.tensor([0.0, torch.nan, torch.inf, 1.0, 1e6, 3e38])[:, None]
    for low, high in ((-1.0, 1.0), (0.0, 0.0), (1.0, -1.0), (-torch.inf, torch.inf), (torch.nan, 1.0), (-1e38, 1e-40)):
        bounds = torch.full((6, 1), low), torch.full((6, 1), high)
        check("quantize_carrier", reference.quantize_carrier, x, *bounds, amax)
        check("quantize_carrier", reference.quantize_carrier, x, *bounds, amax.flip(0))


def test_outliers_of_every_bit_pattern():
    """All 65,536 BF16 and FP16 patterns but NaN, in rows."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = patterns.view(dtype)
        x = x[~x.isnan()]
        x = x[: x.numel() // 512 * 512].view(-1, 512)
        for clipped in (0, 5, 31, 32, 200):
            check_outliers(x, clipped)


@pytest.mark.parametrize("size", [2, 16, 30, 32, 34, 4096, 100_002])
def test_packing(size):
    codes = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    check("pack_e2m1", reference.pack_e2m1, codes.view(torch.float8_e4m3fn))
    check("unpack_e2m1", reference.unpack_e2m1, codes)
    shifted = torch.cat([codes, codes])[1 : size + 1]
    check("pack_e2m1", reference.pack_e2m1, shifted.view(torch.float8_e4m3fn).view(size // 2, 2))
    check("unpack_e2m1", reference.unpack_e2m1, shifted.view(2, size // 2))


def test_packing_of_every_pair_of_bytes():
    every = torch.arange(256, dtype=torch.uint8)
    codes = torch.stack((every.repeat_interleave(256), every.repeat(256)), dim=1)
    check("pack_e2m1", reference.pack_e2m1, codes.view(torch.float8_e4m3fn))
    check("unpack_e2m1", reference.unpack_e2m1, codes)


@pytest.mark.parametrize("carrier", ["E4M3", "E5M2"])
@pytest.mark.parametrize(
    "rows, columns, block", [(5, 12, 4), (33, 96, 32), (16, 8, 8), (144, 416, 32), (1008, 4096, 32)]
)
def test_folding(rows, columns, block, carrier):
    """One kernel each where eight codes are in a block, and for the transpose 16 rows; of every code and of NaN."""
    scale = torch.exp2(4 * drawn(rows, columns // block)).log2().round().exp2()
    scale[rows // 2, -1], scale[0], scale[1, 0] = torch.nan, 0.0, torch.inf
    codes = torch.arange(rows * columns).remainder(16).reshape(rows, columns)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    codes = reference.unpack_e2m1(packed)
    for each in (codes, codes.flip(0).clone()):
        check("fold", reference.fold, each, scale, carrier)
        check("fold_transposed", pairs.fold_transposed, each, scale, carrier)
    check("fold_transposed", pairs.fold_transposed, packed, scale, carrier)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", [(1, 16), (16, 16), (1, 8), (1, 256), (1, -1), (-1, -1), (16, 1), (3, 5), (8, 24)])
def test_nvfp4(tile, dtype, stochastic):
    seed, origin = (SEED, torch.tensor([5, 24])) if stochastic else (None, None)
    for rows, columns in ((48, 240), (48, 1280), (3, 15), (16, 16)):
        shape = (rows if tile[0] == -1 else tile[0], columns if tile[1] == -1 else tile[1])
        if rows % shape[0] or columns % shape[1]:
            continue
        for kind in ("normal", "outlying", "holed", "zeros", "tiny", "subnormal", "huge", "scales"):
            x = KINDS[kind](drawn(rows, columns)).to(dtype)
            for headroom in (1.0, 0.75, 0.9):
                check(
                    "quantize_nvfp4",
                    reference.quantize_nvfp4,
                    x,
                    tile,
                    headroom,
                    "nearest" if seed is None else "stochastic",
                    seed,
                    origin,
                )


def test_nvfp4_of_rows_that_are_not_aligned():
    x = drawn(16 * 64 + 1).bfloat16()[1:].view(16, 64)
    check("quantize_nvfp4", reference.quantize_nvfp4, x, (1, 16), 0.75, "stochastic", SEED, None)


@pytest.mark.parametrize("k, cap", [(5.0, 3.0), (1.0, 3.0), (3.0, 1e9), (10.0, 2.0)])
@pytest.mark.parametrize("tile", [(1, -1), (-1, -1), (4, 24), (3, 5)])
def test_dge(tile, k, cap):
    for rows, columns in ((12, 120), (12, 2160), (3, 15)):
        shape = (rows if tile[0] == -1 else tile[0], columns if tile[1] == -1 else tile[1])
        if rows % shape[0] or columns % shape[1]:
            continue
        for kind in ("normal", "holed", "zeros", "subnormal", "huge", "scales"):
            weight, grad = KINDS[kind](drawn(rows, columns)), drawn(rows, columns + 1)[:, 1:]
            _, scale = reference.quantize(weight, "E2M1", tile, "FP32", 1.0, 0, "nearest", None, None)
            for of_weight, of_grad, dtype in (
                (torch.float32, torch.float32, None),
                (torch.bfloat16, torch.float32, torch.bfloat16),
                (torch.bfloat16, torch.bfloat16, torch.float32),
                (torch.float16, torch.float32, torch.float16),
            ):
                check("dge", reference.dge, grad.to(of_grad), weight.to(of_weight), scale, k, cap, dtype)


def test_dge_at_every_place_of_an_interval():
    """Slopes of 2**16 weights that a scale of 1 spreads over [0, 8)."""
    weight = torch.linspace(0, 8, 2**16).view(64, 1024)
    check("dge", reference.dge, torch.ones_like(weight), weight, torch.ones(1, 1), 5.0, 1e30, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dge_of_many_gradients(dtype):
    """One launch for each 48; shapes that are not vectors, aligned rows, no rows, scales by tensor, row and block."""
    shapes = [(n, k) for n in (0, 1, 3, 64) for k in (1, 37, 264, 4096)] * 4
    tiles = [(1, -1), (-1, -1)] * (len(shapes) // 2)
    grads, weights = [drawn(*shape) for shape in shapes], [holed(drawn(n + 1, k))[:n] for n, k in shapes]
    how = ("FP32", 1.0, 0, "nearest", None, None)
    scales = [
        reference.quantize(w, "E2M1", tile, *how)[1] if len(w) else torch.ones(1, 1) for w, tile in zip(weights, tiles)
    ]
    moved = [[x.cuda() for x in each] for each in (grads, weights, scales)]
    wanted = [reference.dge(g, w.to(dtype), s, 5.0, 3.0) if len(g) else g for g, w, s in zip(grads, weights, scales)]
    torch.ops.lowprec.dge_all(*moved, 5.0, 3.0, dtype)
    for got, want in zip(moved[0], wanted, strict=True):
        assert torch.equal(canonical(got.cpu()), canonical(want))
