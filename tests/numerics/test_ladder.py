"""Block scales on {1, 1.25, 1.5} 2^e against the formulas alone: codes, rungs, carriers, factors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lowprec_train.numerics.corrections import Candidates, Correction
from lowprec_train.numerics.draws import Operand
from lowprec_train.numerics.formats import E2M1, E4M3, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule, Shared
from lowprec_train.ops import kernels
from lowprec_train.ops.ladder import SPAN
from lowprec_train.precision.gemm import multiply
from lowprec_train.precision.gemm_path import Path
from lowprec_train.precision.hadamard import RandomHadamard
from tests import oracle
from tests.groups import among
from tests.numerics.quantized import codes
from tests.oracle_cases import CASES
from tests.oracle_ladder import RUNGS, Ladder, ladder, rotate_half

F32, F64 = np.float32, np.float64
FOLD3 = Quantizer(E2M1, (1, 16), ScaleRule.LADDER, exponent_span=SPAN, candidates=Candidates.MSE)
CORRECTED = replace(FOLD3, correction=Correction.ROW)
ops = torch.ops.lowprec
cases = pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
M, K = 12, 320


def made(case, seed: int = 0, m: int = M, k: int = K, width: int = 16) -> np.ndarray:
    return case(m, k, (1, width), "E2M1", np.random.default_rng(seed))


def assert_equal(got: Quantized, want: Ladder) -> None:
    np.testing.assert_array_equal(got.parts["block"].numpy(), want.rounded.scale)
    np.testing.assert_array_equal(codes(got), oracle.encode(want.rounded.values, "E4M3"))


# --- codes and rungs ---


@cases
@pytest.mark.parametrize("by", list(Candidates), ids=lambda c: c.value)
def test_codes_and_rungs(case, by):
    for width, span, seed in ((16, 11, 0), (16, 0, 1), (32, 11, 2), (2, 3, 3)):
        x = made(case, seed, width=width)
        quantizer = replace(FOLD3, tile=(1, width), exponent_span=span, candidates=by)
        got = quantizer(torch.from_numpy(x))
        want = ladder(x, width, by.value, span)
        assert_equal(got, want)
        assert torch.equal(got.scale, got.parts["block"])
        assert ("row" in got.parts) == (span > 0)
        if span:
            np.testing.assert_array_equal(got.parts["row"].numpy(), want.row)


def test_the_first_rung_turns_at_six_rungs():
    """6 L itself, and the FP32 numbers beside it: at most 6 L takes L, the next number takes the next rung."""
    rungs = RUNGS[6:-10]
    tops = (6 * rungs).astype(F32)
    for x, want in ((tops, rungs), (np.nextafter(tops, F32(0)), rungs), (np.nextafter(tops, F32(3e38)), None)):
        full = np.zeros((len(x), 16), F32)
        full[:, 3] = -x
        got = replace(FOLD3, candidates=Candidates.NONE)(torch.from_numpy(full)).parts["block"].numpy()[:, 0]
        np.testing.assert_array_equal(got, RUNGS[7:-9] if want is None else want)


def test_no_candidate_has_less_error():
    """Squared errors of the neighbouring rungs in FP64: none lies below the chosen one's by more than half precision
    can tell.
    """
    x = torch.randn(64, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).float()
    got = FOLD3(x)
    place = np.searchsorted(RUNGS, got.scale.numpy())
    blocks = x.double().numpy().reshape(64, 16, 16)

    def error(rung: np.ndarray) -> np.ndarray:
        values = oracle.to_grid(blocks / rung[..., None], "E2M1") * rung[..., None]
        return ((values - blocks) ** 2).sum(axis=2)

    own = np.searchsorted(6 * RUNGS, np.abs(blocks).max(axis=2))
    chosen = error(RUNGS[place])
    assert set(np.unique(place - own)) == {-1, 0, 1, 2}
    for step in (-1, 0, 1, 2):
        assert (chosen <= error(RUNGS[own + step]) * 1.01).all()


def test_equal_errors_take_the_larger_scale():
    """Multiples of 2 up to 4 are codes under 1 and under 2 (and 1.5 has an error): both are exact."""
    x = torch.tensor([[0.0, 2.0, -4.0, 2.0] * 4]) * 1.5  # own rung 1: tried are 0.75, 1, 1.25 and 1.5; 0.75 and 1.5 fit
    assert FOLD3(x).scale.item() == 1.5
    y = torch.tensor([[9.0, 4.5, -1.5, 3.0] * 4])  # 6, 3, 1, 2 under 1.5; nothing else is exact
    assert FOLD3(y).scale.item() == 1.5
    zero = torch.zeros(1, 16)
    assert (FOLD3(zero).codes.float() == 0).all() and FOLD3(zero).scale.item() == FOLD3(-zero).scale.item()


def test_relative_error_of_gaussians():
    """.0081 (docs/numerics.md); NVFP4 has .0091."""
    x = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0))
    assert ((FOLD3(x).dequantize() - x).square().sum() / x.square().sum()).item() < 0.00812


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_what_is_not_finite_stays_visible(value):
    """In its row where a span makes rows one, else in its block; other rows are as without it."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    spoilt = x.clone()
    spoilt[1, 20] = value
    for quantizer in (FOLD3, CORRECTED):
        got, want = quantizer(spoilt), quantizer(x)
        assert got.dequantize()[1].isnan().all() and got.parts["row"][1].isnan().all()
        for a, b in ((got.codes, want.codes), (got.scale, want.scale)):
            assert torch.equal(a.float()[[0, 2, 3]], b.float()[[0, 2, 3]])
    free = replace(FOLD3, exponent_span=0)(spoilt).dequantize()
    assert free[1, 16:32].isnan().all() and free.isnan().sum() == 16


# --- carriers ---


@cases
def test_carriers_are_exact(case):
    """E4M3 holds codes times rungs over the whole span: nothing is rounded, flushed or clipped."""
    for seed in range(4):
        x = made(case, seed)
        q = FOLD3(torch.from_numpy(x))
        want = ladder(x).carriers
        got, row = ops.fold_ladder(q.codes, q.parts["block"], q.parts["row"], None)
        np.testing.assert_array_equal(got.double().numpy(), want.values)
        values = q.codes.double().numpy() * oracle.spread(q.scale.double().numpy(), x.shape)
        np.testing.assert_array_equal(got.double().numpy() * row.double().numpy(), values)


def test_every_code_under_every_rung_of_the_span():
    """All 15 codes in a block of each of 3 x 12 rungs below a row's largest, and of the rung above it."""
    values = np.append(np.concatenate([oracle.TABLES["E2M1"], -oracle.TABLES["E2M1"][1:]]), 6.0)
    rungs = RUNGS[3 * 111 : 3 * 123 + 1]
    x = (rungs[:, None] * values).astype(F32).reshape(1, -1)
    q = replace(FOLD3, candidates=Candidates.NONE)(torch.from_numpy(x))
    assert rungs[-1] == 2.0 and q.parts["row"].item() == 2.0 ** (1 - 5)
    carrier, row = ops.fold_ladder(q.codes, q.parts["block"], q.parts["row"], None)
    assert (carrier.double() * row.double()).numpy().tolist() == q.dequantize().double().numpy().tolist()
    inside = x[:, 48:]  # of the lowest binade, one below the span, blocks took the floor
    np.testing.assert_array_equal((carrier.double() * row.double()).numpy()[:, 48:], inside)


def test_blocks_below_the_span_take_its_floor():
    x = np.zeros((2, 48), F32)
    x[:, 0] = 6.0  # rung 1, so the floor is 2^-11
    x[0, 16], x[0, 17], x[0, 32] = 6 * 2.0**-11, 2.0**-11, 2.0**-13  # at it; far below it: a quarter of a step
    x[1, 16], x[1, 32] = 6 * 2.0**-13, 3 * 2.0**-13
    q = replace(FOLD3, candidates=Candidates.NONE)(torch.from_numpy(x))
    assert q.scale.tolist() == [[1.0, 2.0**-11, 2.0**-11]] * 2
    assert q.codes.float()[0, [16, 17, 32]].tolist() == [6.0, 1.0, 0.0]
    assert q.codes.float()[1, [16, 32]].tolist() == [1.5, 1.0]
    chosen = FOLD3(torch.from_numpy(x))
    assert (chosen.scale >= 2.0**-11).all()


def test_products_of_carriers_are_those_of_the_codes_in_fp64():
    """Over 16,384 elements: the product of carriers equals that of codes times rungs."""
    g = torch.Generator().manual_seed(4)
    a, b = (torch.randn(n, 16384, generator=g) * torch.exp2(torch.randn(n, 16384 // 16, generator=g) * 2)
            .repeat_interleave(16, 1) for n in (3, 4))  # fmt: skip
    a, b = FOLD3(a), FOLD3(b)
    exact = a.dequantize().double() @ b.dequantize().double().t()
    (ca, ra), (cb, rb) = (ops.fold_ladder(q.codes, q.parts["block"], q.parts["row"], None) for q in (a, b))
    assert torch.equal(ca.double() @ cb.double().t() * ra.double() * rb.double().t(), exact)
    for path in (Path.FP8_ROW, Path.DEQUANTIZE):  # FP32 sums
        got = multiply(a, b, path, split_accumulation=True, dtype=torch.float32)
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


@pytest.mark.parametrize("k", [2048, 16384])
def test_products_of_carriers_have_exact_fp32_sums(k):
    """Of normal data: no error against FP64. FP8 tensor cores keep fewer bits of a sum (docs/numerics.md)."""
    g, one = torch.Generator().manual_seed(k), torch.ones(1, 1)
    rounded = (FOLD3(torch.randn(64, k, generator=g)) for _ in range(2))
    a, b = (Quantized(ops.fold_ladder(q.codes, q.parts["block"], q.parts["row"], None)[0], one) for q in rounded)
    exact = a.codes.double() @ b.codes.double().t()
    for path in (Path.FP8_TENSOR, Path.DEQUANTIZE):
        assert torch.equal(multiply(a, b, path, split_accumulation=True, dtype=torch.float32).double(), exact)


# --- factors of rows ---


@cases
def test_factors(case):
    for seed in range(3):
        x = made(case, seed)
        got, want = CORRECTED(torch.from_numpy(x)), ladder(x)
        assert_equal(got, want)
        factor = want.factor()
        np.testing.assert_array_equal(got.parts["factor"].numpy(), factor)
        np.testing.assert_array_equal(got.scale.numpy(), want.rounded.scale * factor)


def test_a_corrected_row_has_the_length_of_its_shadow():
    """<y, c q s> = |y|^2, but for half precision of a block's sums, which a row of 256 blocks averages."""
    x = torch.randn(32, 4096, generator=torch.Generator().manual_seed(5))
    wrong = (x.double() * CORRECTED(x).dequantize().double()).sum(1) / x.double().square().sum(1) - 1
    assert wrong.abs().max() < 2e-4 and wrong.mean().abs() < 4e-5
    assert ((x.double() * FOLD3(x).dequantize().double()).sum(1) / x.double().square().sum(1) - 1).abs().max() > 1e-3


# --- rotations in half precision ---


@cases
def test_rotations(case):
    for block in (2, 16, 64, 256):
        x, gain = made(case, block, k=512), 2.0 ** -(block.bit_length() // 2)
        got = ops.hadamard_half(torch.from_numpy(x), torch.tensor(5), block, gain)
        np.testing.assert_array_equal(got.double().numpy(), rotate_half(x, 5, block, gain))


def test_rotated_operands_have_the_product_of_the_operands():
    """The gains of both operands make up 1 / block; half precision adds a thousandth."""
    g = torch.Generator().manual_seed(6)
    a, b, seed = torch.randn(32, 1024, generator=g), torch.randn(48, 1024, generator=g), torch.tensor(2)
    for block in (2, 4, 8, 16, 32, 64, 128, 256):
        rotation = RandomHadamard(block, half=True)
        y, z = rotation(a, seed, Operand.A).double(), rotation(b, seed, Operand.B).double()
        exact = a.double() @ b.double().t()
        assert ((y @ z.t() - exact).norm() / exact.norm()).item() < 2e-3


# --- parts and one op ---


@pytest.mark.parametrize("how", [FOLD3, CORRECTED, replace(CORRECTED, exponent_span=0)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_are_the_whole_cut(how, dim):
    """Codes, rungs and the rows' numbers, from maxima and sums over ranks."""
    x = torch.from_numpy(made(CASES[0], 7, 8, 128))
    x[:, :64] *= 2.0**-9
    x[3], x[4, :64] = 0, 0
    whole = how(x)

    def body(group):
        return how(x.chunk(2, dim)[group.rank], shared=Shared(dim=dim, group=group))

    for rank, part in enumerate(among(2, body)):
        for mine, of in (
            (part.codes, whole.codes),
            (part.scale, whole.scale),
            *((part.parts[n], whole.parts[n]) for n in whole.parts),
        ):
            cut = of.chunk(2, dim)[rank] if of.shape[dim] > 1 else of
            assert torch.equal(mine.contiguous().view(torch.uint8), cut.contiguous().view(torch.uint8))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rotation", [0, 16, 128])
@pytest.mark.parametrize("corrected", [False, True])
def test_the_fused_op_against_the_formulas(transposed, rotation, corrected):
    x = oracle.bf16(made(CASES[0], 9, 256, 128)).astype(F32)
    given = (torch.from_numpy(x).bfloat16(), None)
    if rotation == 16:  # codes under a scale per row, decoded to BF16
        scale = 2.0 ** torch.arange(256).remainder(5)[:, None].float()
        given = ((given[0].float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale)
        x = oracle.bf16(given[0].double().numpy() * scale.numpy()).astype(F32)
    seed = torch.tensor(11) if rotation else None
    carrier, row = ops.rotate_fold_ladder(*given, transposed, seed, rotation, 0.125, (1, 16), "mse", SPAN, corrected)
    y = x.T if transposed else x
    y = rotate_half(y, 11, rotation, 0.125) if rotation else y
    want = ladder(y)
    np.testing.assert_array_equal(carrier.double().numpy(), want.carriers.values)
    factor = want.factor() if corrected else F32(1)
    np.testing.assert_array_equal(row.numpy(), want.row * factor)


REFUSED = [
    ({"format": E4M3}, "E4M3"),
    ({"tile": (1, -1)}, "(1, -1)"),
    ({"tile": (16, 16)}, "(16, 16)"),
    ({"tile": (1, 24)}, "(1, 24)"),
    ({"tile": (1, 512)}, "(1, 512)"),
    ({"rounding": STOCHASTIC}, "stochastic"),
    ({"headroom": 0.75}, "0.75"),
    ({"exponent_span": 12}, "12"),
    ({"scale": ScaleRule.POW2}, "candidates=MSE"),
    ({"scale": ScaleRule.NVFP4, "candidates": Candidates.NONE, "exponent_span": 0}, "correction=ROW"),
]


@pytest.mark.parametrize("change, said", REFUSED, ids=lambda v: str(v) if isinstance(v, str) else "")
def test_what_the_ladder_does_not_know_is_refused(change, said):
    with pytest.raises(ValueError, match="LADDER") as error:
        replace(CORRECTED, **change)
    assert said in str(error.value)


def test_ops_refuse_other_tiles_and_names():
    x = torch.ones(2, 48)
    for tile, by, said in (((2, 16), "mse", "(2, 16)"), ((1, 24), "mse", "(1, 24)"), ((1, 16), "mode", "mode")):
        with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
            torch.ops.lowprec.quantize_ladder.reference(x, None, tile, by, 0)
    with pytest.raises(ValueError, match="1x16 tile does not divide a 2x40 matrix"):
        FOLD3(torch.ones(2, 40))


@pytest.mark.skipif("cpu" not in kernels.present(), reason="_C.abi3.so is not built here (make kernels)")
def test_sizes_that_do_not_fit_are_refused():
    """A kernel that trusts them reads what lies behind."""
    ops, x, codes = torch.ops.lowprec, torch.randn(64, 32), torch.zeros(64, 32).to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="64 rows take one number each, not 1"):
        ops.quantize_ladder(x, torch.ones(1, 1), [1, 16], "mse", 11)
    with pytest.raises(
        RuntimeError, match=r"scales of 64 x 32 codes are \[64, a divisor of 32\], not 4 numbers in 2 rows"
    ):
        ops.fold_ladder(codes, torch.ones(2, 2), torch.ones(2, 1), None)
    with pytest.raises(RuntimeError, match="64 rows have as many scales, not 2"):
        ops.fold_ladder(codes, torch.ones(64, 2), torch.ones(2, 1), None)
    with pytest.raises(RuntimeError, match="codes of 32 x 32 values, not 64 x 32"):
        ops.row_sums(x[:32], codes, torch.ones(64, 2), torch.ones(64, 1), 11)
    with pytest.raises(RuntimeError, match="sums of up to 256 numbers, not of 512"):
        ops.hadamard_half(torch.ones(2, 512), None, 512, 1.0)
