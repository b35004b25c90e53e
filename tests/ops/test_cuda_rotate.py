"""MXFP4's CUDA kernels against their meaning in plain PyTorch on the CPU: the same bits for rows and for columns, every
input, rotation, rule and span, at tails of every tile, and at zeros, subnormals, infinities and NaN."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product

import numpy as np
import pytest
import torch
from torch import Tensor

from lowprec_train.ops import library, reference, rotated
from tests.numerics.data import MATRICES

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
MEANING: dict[str, Callable] = {"hadamard": reference.hadamard, "fold": reference.fold}
MEANING |= {"rotate_fold": rotated.rotate_fold}
SEED, SIGNS = torch.tensor(0x1234_5678_9ABC_DEF0), torch.tensor(-77)
ORIGIN = torch.tensor([2**33 + 5, 2**35 + 64])
RULES = ("POW2", "E8M0_FLOOR", "E8M0_CEIL")
FLOOR = ("E8M0_FLOOR", 0.75, 28, "E5M2")  # the recipe's operand a
OTHER = ("E8M0_FLOOR", 0.75, 14, "E4M3")  # and b


def _special(m: int, k: int) -> np.ndarray:
    """Rows with NaN, with infinities, of zeros, and with both zeros and one of these."""
    x = MATRICES["normal"](m, k)
    x[0, 5], x[1, 7], x[2, 40], x[3, 41], x[4, :] = np.nan, -np.nan, np.inf, -np.inf, np.nan
    x[5], x[6], x[7] = 0.0, -0.0, 0.0
    x[5, 9], x[6, 0], x[6, 1] = np.inf, np.nan, np.inf
    x[8, 32:64] = 0.0
    return x


def _wide(m: int, k: int) -> np.ndarray:
    """Blocks of 32 that lie up to 120 binades apart, both ways."""
    x = MATRICES["normal"](m, k)
    down, across = (np.random.RandomState(n).randint(-30, 30, n) for n in (m, k))
    return (x * np.exp2((down[:, None] // 32 + across[None, :] // 32 * 4).astype(np.float32))).astype(np.float32)


def _scaled(power: int) -> Callable:
    return lambda m, k: (MATRICES["normal"](m, k) * np.float32(2.0**power)).astype(np.float32)


KINDS: dict[str, Callable] = dict(MATRICES)
KINDS |= {"special": _special, "wide": _wide, "tiny": _scaled(-130), "huge": _scaled(124)}


def matrix(kind: str, m: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(KINDS[kind](m, k))).to(dtype)


def assert_same(got: Tensor, want: Tensor) -> None:
    """Bits of codes, but for the sign of NaN, which a sum of infinities leaves open; elsewhere NaN where NaN is, and
    the bits of all numbers."""
    got = got.cpu()
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.element_size() == 1:
        a, b = (torch.where(each.float().isnan(), 0x7F, each.view(torch.uint8).int()) for each in (got, want))
        assert torch.equal(a, b), f"{int((a != b).sum())} codes differ, first {(a != b).nonzero()[:4].tolist()}"
        return
    assert torch.equal(got.isnan(), want.isnan())
    a, b = (each.nan_to_num(1, torch.inf, -torch.inf).view(torch.int32) for each in (got, want))
    assert torch.equal(a, b), f"{int((a != b).sum())} numbers differ, first {(a != b).nonzero()[:4].tolist()}"


def check(op: str, *arguments: object) -> None:
    moved = [each.to(CUDA) if isinstance(each, Tensor) else each for each in arguments]
    got, want = getattr(torch.ops.lowprec, op)(*moved), MEANING[op](*arguments)
    if op == "rotate_fold":  # a row whose scale is NaN is NaN, whatever its codes are
        number, codes = want[1][:, 0].isfinite(), want[0]
        assert_same(*(each.cpu().view(torch.uint8)[number].view(codes.dtype) for each in (got[0], codes)))
        assert_same(got[1], want[1])
        return
    for a, b in zip(*(each if isinstance(each, tuple) else (each,) for each in (got, want)), strict=True):
        assert_same(a, b)


@pytest.fixture(autouse=True)
def live() -> None:
    kernels = library.live_kernels(CUDA)
    missing = {name for name in MEANING if kernels[name] != "CUDA"}
    if missing:
        pytest.skip(f"no CUDA kernel is built for {sorted(missing)} (make kernels)")


# --- rotate_fold ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_span_and_rotation(kind, dtype, transposed):
    x = matrix(kind, 256, 256, dtype)
    spans = cycle(((28, "E5M2"), (14, "E4M3"), (3, "E5M2"), (40, "E4M3")))
    for rotation, rule, headroom in product((0, 32, 64, 128, 256), RULES, (1.0, 0.75, 0.9)):
        how = (rotation, rule, headroom, *next(spans))
        check("rotate_fold", x, None, transposed, SIGNS, *how, "stochastic", SEED, ORIGIN)
        check("rotate_fold", x, None, transposed, None, *how, "nearest", None, None)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "m, k", [(32, 32), (32, 96), (96, 32), (160, 224), (64, 2048), (2112, 64), (288, 2144), (32, 64)]
)
def test_tails(m, k, transposed):
    reduction = m if transposed else k
    for kind in ("heavy", "special") if m >= 9 and k >= 64 else ("heavy",):
        for dtype in (torch.bfloat16, torch.float32):
            x = matrix(kind, m, k, dtype)
            for rotation in (0, 2, 8, 32, 64):
                if rotation and reduction % rotation:
                    continue
                check("rotate_fold", x, None, transposed, SIGNS, rotation, *FLOOR, "stochastic", SEED, None)
                check("rotate_fold", x, None, transposed, SIGNS, rotation, *OTHER, "stochastic", SEED, ORIGIN)
                check(
                    "rotate_fold",
                    x,
                    None,
                    transposed,
                    SIGNS,
                    rotation,
                    "E8M0_CEIL",
                    1.0,
                    14,
                    "E4M3",
                    "nearest",
                    None,
                    None,
                )


@pytest.mark.parametrize("m, k", [(3, 64), (1, 4096), (5, 11008), (300, 4096), (2, 32768), (1, 40960)])
def test_rows_of_any_length(m, k):
    """More rows than a GPU holds at once at some lengths; the last length has no kernel of its own."""
    for dtype in (torch.bfloat16, torch.float32):
        x = matrix("heavy", m, k, dtype)
        check("rotate_fold", x, None, False, SIGNS, 64, *FLOOR, "stochastic", SEED, ORIGIN)
        check("rotate_fold", x, None, False, SIGNS, 64, "E8M0_CEIL", 1.0, 14, "E4M3", "nearest", None, None)


@pytest.mark.parametrize("k", [8, 40, 520])
def test_columns_of_any_number(k):
    for m in (64, 4160):
        for dtype in (torch.bfloat16, torch.float32):
            x = matrix("heavy", m, k, dtype)
            check("rotate_fold", x, None, True, SIGNS, 64, *FLOOR, "stochastic", SEED, ORIGIN)


@pytest.mark.slow
def test_more_work_than_the_gpu_holds_at_once():
    x = matrix("heavy", 4096, 4096, torch.bfloat16)
    for transposed in (False, True):
        check("rotate_fold", x, None, transposed, SIGNS, 64, *FLOOR, "stochastic", SEED, None)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tensor_scale", [None, 0.37, 2.0**-140, 2.0**120])
def test_codes_are_decoded_first(tensor_scale, transposed):
    for m, k in ((96, 160), (256, 512), (320, 2112)):
        codes, scale = reference.quantize(
            matrix("heavy", m, k), "E4M3", (-1, -1), "FP32", 1.0, 0, "nearest", None, None
        )
        if tensor_scale is not None:
            scale = torch.full_like(scale, tensor_scale)
        rotation = 64 if (m if transposed else k) % 64 == 0 else 32
        for turn in (0, rotation):
            check("rotate_fold", codes, scale, transposed, SIGNS, turn, *OTHER, "stochastic", SEED, ORIGIN)
            check(
                "rotate_fold",
                codes,
                scale,
                transposed,
                SIGNS,
                turn,
                "E8M0_CEIL",
                1.0,
                28,
                "E5M2",
                "nearest",
                None,
                None,
            )


@pytest.mark.parametrize("transposed", [False, True])
def test_every_code(transposed):
    codes = torch.arange(256, dtype=torch.uint8).repeat(64, 1)
    codes[1:, 127], codes[1:, 255] = 0, 0  # NaN in one row only
    codes = codes.view(torch.float8_e4m3fn)
    for rotation in (0, 64):
        check(
            "rotate_fold", codes, torch.tensor([[0.013]]), transposed, SIGNS, rotation, *FLOOR, "stochastic", SEED, None
        )


def test_magnitudes_all_over_the_grid():
    """Any FP32 number up to 6 under a scale of 1, and those within a few units of a place, a midpoint, or a draw's
    threshold; all BF16 ones."""
    generator = torch.Generator().manual_seed(1)
    anywhere = torch.randint(0, 0x40C00001, (512, 1024), generator=generator, dtype=torch.int32).view(torch.float32)
    steps = torch.randint(0, 2**17, (512, 1024), generator=generator).float() / 2**17 * 6
    near = (steps.view(torch.int32) + torch.randint(-2, 3, steps.shape, generator=generator)).int().view(torch.float32)
    bf16 = torch.arange(0x40C1, dtype=torch.int16).repeat(32)[: 512 * 1024].reshape(512, 1024).view(torch.bfloat16)
    for x in (anywhere, near.abs().clamp_max(6.0), bf16):
        x = torch.where(torch.rand(x.shape, generator=generator) < 0.5, x, -x)
        x[:, ::32] = 6.0
        for seed in (SEED, SIGNS, None):
            check(
                "rotate_fold",
                x,
                None,
                False,
                None,
                0,
                "E8M0_CEIL",
                1.0,
                14,
                "E4M3",
                "nearest" if seed is None else "stochastic",
                seed,
                ORIGIN,
            )
            check(
                "rotate_fold",
                x,
                None,
                False,
                None,
                0,
                "E8M0_FLOOR",
                0.75,
                28,
                "E5M2",
                "nearest" if seed is None else "stochastic",
                seed,
                None,
            )


@pytest.mark.parametrize("transposed", [False, True])
def test_what_the_fused_kernels_leave_out(transposed):
    """Other inputs, no span, scales that are no powers of two, views, rotations beyond 256: step by step, the same."""
    x = matrix("heavy", 512, 512)
    check("rotate_fold", x.half(), None, transposed, SIGNS, 64, *FLOOR, "stochastic", SEED, None)
    check("rotate_fold", x, None, transposed, SIGNS, 64, "E8M0_FLOOR", 0.75, 0, "E5M2", "stochastic", SEED, None)
    check("rotate_fold", x, None, transposed, SIGNS, 64, "FP32", 1.0, 14, "E4M3", "stochastic", SEED, ORIGIN)
    check("rotate_fold", x, None, transposed, SIGNS, 512, *FLOOR, "stochastic", SEED, None)
    check("rotate_fold", x.bfloat16().t(), None, transposed, SIGNS, 64, *FLOOR, "stochastic", SEED, None)
    check("rotate_fold", x.bfloat16()[64:, 3:67], None, transposed, SIGNS, 64, *FLOOR, "stochastic", SEED, None)
    check(
        "rotate_fold",
        x[:, :37] if transposed else x[:37],
        None,
        transposed,
        SIGNS,
        64,
        *FLOOR,
        "stochastic",
        SEED,
        None,
    )


def test_a_shape_that_does_not_fit_is_refused():
    x = torch.zeros(48, 96, device=CUDA)
    for transposed, rotation in ((False, 64), (True, 0)):
        with pytest.raises(RuntimeError):
            torch.ops.lowprec.rotate_fold(x, None, transposed, None, rotation, *FLOOR, "nearest", None, None)


# --- its steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
def test_hadamard(block):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for kind in ("heavy", "tiny", "special", "normal"):
            x = matrix(kind, 9, 1024, dtype)
            check("hadamard", x, SIGNS, block)
            check("hadamard", x, None, block)
    check("hadamard", matrix("heavy", 3, 7 * block), SIGNS, block)
    check("hadamard", matrix("heavy", 700, 1024), SIGNS, block)


@pytest.mark.parametrize("carrier", ["E4M3", "E5M2"])
def test_fold(carrier):
    every = torch.arange(256, dtype=torch.uint8).repeat(8, 1).view(torch.float8_e4m3fn)
    exponents = torch.randint(-40, 40, (8, 8), generator=torch.Generator().manual_seed(0))
    scale = torch.exp2(exponents.float())
    scale[1, 3], scale[2, 2], scale[3], scale[4, 0] = torch.nan, 2.0**-126, 2.0**-126, torch.inf
    e2m1 = torch.where(every.float().abs() <= 6, every.float(), 0.0).to(torch.float8_e4m3fn)
    check("fold", e2m1, scale, carrier)
    check("fold", e2m1, scale[:, :1], carrier)
    for kind in MATRICES:
        for width in (32, 16, 3):
            codes, scale = reference.quantize(
                matrix(kind, 33, 96), "E2M1", (1, width), "E8M0_CEIL", 1.0, 0, "nearest", None, None
            )
            check("fold", codes, scale, carrier)
