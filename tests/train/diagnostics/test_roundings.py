"""The figures of a rounding against numpy: every format, tile and rule; zeros, clipping, clamps, spans and stalls."""

import math

import numpy as np
import pytest
import torch

from lowprec_train.numerics.formats import BF16, E2M1, E4M3, E5M2, FP32, INT8, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule, Shared
from lowprec_train.precision.outliers import OutlierClamp
from lowprec_train.precision.split import Split
from lowprec_train.train.diagnostics.roundings import (
    Tally,
    sqnr_db,
    tally_operand,
    tally_state,
)
from tests import oracle
from tests.groups import among
from tests.numerics.quantized import ROUNDING, SCALED, TILES, rules, seed

QUANTIZERS = [Quantizer(f, tile, rule) for f in SCALED for tile in TILES for rule in rules(f)]
QUANTIZERS += [
    Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, STOCHASTIC, exponent_span=span) for span in (0, 6, 14, 28)
]
QUANTIZERS += [
    Quantizer(E2M1, (1, 16), ScaleRule.NVFP4, STOCHASTIC),
    Quantizer(BF16),
    Quantizer(E5M2, (1, 16), exponent_span=0),
]
QUANTIZERS += [Quantizer(E4M3, (1, 8), rule, exponent_span=4) for rule in (ScaleRule.POW2, ScaleRule.E8M0_CEIL)]
NAN = float("nan")


def data(m=64, k=128, binades=12):
    """Normal numbers whose rows and blocks of 8 spread over binades; zeros of both signs, a zero row, a zero block."""
    g = np.random.default_rng(7)
    x = g.standard_normal((m, k)) * np.ldexp(1.0, -g.integers(0, binades, (m, k // 8))).repeat(8, axis=1)
    x[g.random((m, k)) < 0.1] = 0.0
    x[g.random((m, k)) < 0.1] = -0.0
    x[3], x[8:16, :32] = 0.0, -0.0
    return x.astype(np.float32)


def expected(x, q, how, *, wanted=None, top=None):
    """The definitions in FP64. `wanted` is measured, `top` is the largest code."""
    wanted = x if wanted is None else wanted
    scale = q.scale.double().numpy()
    spread = np.kron(scale, np.ones((x.shape[0] // scale.shape[0], x.shape[1] // scale.shape[1])))
    got = q.codes.double().numpy() * spread
    tile = (x.shape[0] // scale.shape[0], x.shape[1] // scale.shape[1])
    amax = np.abs(oracle.tiles(wanted, tile)).max(axis=(1, 3))
    used = scale[amax > 0]
    percent = lambda mask: 100 * np.mean(mask)  # noqa: E731
    figures = {
        "sqnr_db": 10 * np.log10((wanted.astype(float) ** 2).sum() / ((wanted - got) ** 2).sum()),
        "underflow_pct": percent([a != 0 and b == 0 for a, b in zip(wanted.ravel(), got.ravel())]),
        "saturated_pct": percent(np.abs(wanted) / spread > (top or how.format.max) * (1 + 1e-6)),
        "nonfinite_pct": 0.0,
        "amax": np.abs(x).max(),
        "scale_min": used.min(),
        "scale_max": used.max(),
        "scale_spread": math.log2(used.max()) - math.log2(used.min()),
        "outlier_pct": NAN,
        "clamped_blocks_pct": NAN,
    }
    if how.exponent_span:
        own = oracle.tile_scales(amax, how.format.name, how.scale.value, how.range_share)
        figures["clamped_blocks_pct"] = percent((amax > 0) & (scale > own * 1.001))
    return figures


def assert_figures(got, want):
    assert list(got) == list(want)
    assert all(value.shape == () for value in got.values())
    for name, value in want.items():
        np.testing.assert_allclose(float(got[name]), value, rtol=2e-5, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("how", QUANTIZERS, ids=lambda how: f"{how}{how.exponent_span or ''}")
def test_against_numpy(how):
    x = data()
    q = how(torch.from_numpy(x), seed() if how.stochastic else None)
    assert_figures(tally_operand(torch.from_numpy(x), q, how).figures(), expected(x, q, how))


@pytest.mark.parametrize("quantile", [0.9, 0.99, 1.0])
@pytest.mark.parametrize("variant", ["carrier", "residual"])
def test_clamped_outliers_against_numpy(variant, quantile):
    """One row has outliers for which a carrier's scale must be larger, one an outlier for which it need not, one
    nothing but an outlier: its body is zero, and without a carrier its scale means nothing.
    """
    x, clamp, how = data(binades=4), OutlierClamp(quantile, variant), Quantizer(E2M1, (1, -1))
    if quantile < 1:
        x[5, :2], x[6, 0], x[3, 0] = (1e6, -1e5), 4000.0, 5.0
    q, _ = clamp(torch.from_numpy(x), how, None, None)
    ordered, count = np.sort(x, axis=1), math.floor((1 - quantile) * x.shape[1] + 1e-9)
    low, high = ordered[:, [count]], ordered[:, [-1 - count]]
    body = np.clip(x, low, high)
    of = {"top": 448.0} if variant == "carrier" else {"wanted": body}
    got = tally_operand(torch.from_numpy(x), q, how, clamp).figures()
    want = expected(x, q, how, **of) | {"outlier_pct": 100 * np.mean((x < low) | (x > high))}
    assert_figures(got, want)
    assert float(got["saturated_pct"]) == 0
    assert float(got["outlier_pct"]) > 1 or quantile > 0.9
    assert (float(got["outlier_pct"]) > 0) == (quantile < 1)


def test_an_infinite_outlier_is_not_finite_rather_than_clipped():
    x, clamp, how = torch.from_numpy(data(binades=4)), OutlierClamp(0.99), Quantizer(E2M1, (1, -1))
    x[7, 1] = math.inf
    q, _ = clamp(x, how, None, None)
    got = numbers(tally_operand(x, q, how, clamp).figures())
    assert got["saturated_pct"] == 0 and got["nonfinite_pct"] == 100 / x.numel()


def test_bf16_operands_are_measured_as_they_are():
    x = torch.from_numpy(data()).bfloat16()
    how = Quantizer(E4M3, (1, -1))
    q = how(x)
    assert_figures(tally_operand(x, q, how).figures(), expected(x.float().numpy(), q, how))


# --- what counts and what does not ----------------------------------------------------------------------------------


def test_zeros_of_either_sign_do_not_underflow_and_small_numbers_do():
    how = Quantizer(E2M1, scale=ScaleRule.POW2)
    x = torch.tensor([[6.0, 0.0, -0.0, 0.2, -0.2, 0.26, 1e-40, 0.5]])  # below 0.25 to zero, the tie too
    assert float(tally_operand(x, how(x), how).figures()["underflow_pct"]) == pytest.approx(100 * 3 / 8)
    zeros = torch.tensor([[6.0, 0.0, -0.0, -0.0]])
    assert float(tally_operand(zeros, how(zeros), how).figures()["underflow_pct"]) == 0


@pytest.mark.parametrize("format", [E2M1, E4M3, E5M2, INT8], ids=str)
@pytest.mark.parametrize("rule", [ScaleRule.FP32, ScaleRule.POW2, ScaleRule.E8M0_CEIL], ids=str)
def test_amax_at_the_maximum_is_no_saturation(format, rule):
    """Of 4,096 rows, each with a largest value of its own, none clips; FP32 scales round, and still none counts."""
    g = np.random.default_rng(1)
    x = torch.from_numpy((g.standard_normal((4096, 16)) * np.exp(g.uniform(-30, 30, (4096, 1)))).astype(np.float32))
    how = Quantizer(format, (1, -1), rule)
    assert float(tally_operand(x, how(x), how).figures()["saturated_pct"]) == 0
    exact = torch.full((2, 8), format.max) * torch.tensor([[1.0], [4.0]])
    assert float(tally_operand(exact, how(exact), how).figures()["saturated_pct"]) == 0


def test_saturation_of_floored_scales():
    """OCP's rule gives 4 <= amax < 8 the scale 1: 7 clips, 6 does not. Of normal numbers 2.3 % clip (blocks of 32)."""
    how = Quantizer(E2M1, (1, 4), ScaleRule.E8M0_FLOOR)
    x = torch.tensor([[7.0, -6.5, 6.0, 1.0, 6.0, -6.0, 0.0, 1.0]])
    assert float(tally_operand(x, how(x), how).figures()["saturated_pct"]) == 25
    normal = torch.from_numpy(np.random.default_rng(2).standard_normal((512, 1024)).astype(np.float32))
    for stochastic, share in ((False, 2.34), (True, 0.0)):  # with SR comes the 3/4, which leaves room
        block = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, ROUNDING[stochastic])
        figures = tally_operand(normal, block(normal, seed() if stochastic else None), block).figures()
        assert float(figures["saturated_pct"]) == pytest.approx(share, abs=0.1)


@pytest.mark.parametrize("rule", [ScaleRule.E8M0_FLOOR, ScaleRule.E8M0_CEIL, ScaleRule.POW2], ids=str)
def test_clamped_blocks_by_construction(rule):
    """Blocks 0, 3, 4, 5 and 20 binades down, and a zero one: a span of 4 raises two of twelve in all."""
    how = Quantizer(E2M1, (1, 4), rule, exponent_span=4)
    row = np.repeat(np.ldexp(5.0, [0, -3, -4, -5, -20, 0]), 4)
    row[20:] = 0
    x = torch.from_numpy(np.stack([row, np.tile(row[:4], 6)]).astype(np.float32))
    figures = tally_operand(x, how(x), how).figures()
    assert float(figures["clamped_blocks_pct"]) == pytest.approx(100 * 2 / 12)
    assert float(figures["scale_spread"]) == 4
    assert float(tally_operand(1024 * x, how(1024 * x), how).figures()["clamped_blocks_pct"]) == float(
        figures["clamped_blocks_pct"]
    )
    free = Quantizer(E2M1, (1, 4), rule)
    assert float(tally_operand(x, free(x), free).figures()["scale_spread"]) == 20
    assert math.isnan(tally_operand(x, free(x), free).figures()["clamped_blocks_pct"])


# --- degenerate data ------------------------------------------------------------------------------------------------


def numbers(figures):
    return {name: float(value) for name, value in figures.items()}


def test_a_zero_tensor_has_no_sqnr_and_no_scales():
    x, how = torch.zeros(8, 32), Quantizer(E4M3, (1, 16))
    got = numbers(tally_operand(x, how(x), how).figures())
    assert math.isnan(got["sqnr_db"]) and not math.isfinite(got["scale_min"]) and math.isnan(got["scale_spread"])
    assert [got[n] for n in ("underflow_pct", "saturated_pct", "nonfinite_pct", "amax")] == [0, 0, 0, 0]


def test_an_exact_rounding_has_infinite_sqnr():
    x, how = torch.from_numpy(data()), Quantizer(FP32)
    got = numbers(tally_operand(x, how(x), how).figures())
    assert got["sqnr_db"] == math.inf and got["underflow_pct"] == got["saturated_pct"] == 0
    assert got["scale_spread"] == 0 and got["scale_min"] == 1


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", [ScaleRule.FP32, ScaleRule.POW2, ScaleRule.E8M0_FLOOR], ids=str)
def test_non_finite_data_is_counted_with_the_tile_that_it_spoils(poison, rule):
    x, how = torch.from_numpy(data()), Quantizer(E4M3, (1, 16), rule)
    x[0, :16] = 0
    clean = numbers(tally_operand(x, how(x), how).figures())
    x[0, 0] = poison
    got = numbers(tally_operand(x, how(x), how).figures())
    assert not math.isfinite(got["sqnr_db"]) and not math.isfinite(got["amax"])
    assert got["nonfinite_pct"] == pytest.approx(100 * 16 / x.numel())
    assert got["saturated_pct"] == clean["saturated_pct"] and math.isfinite(got["scale_spread"])


def test_sqnr_keeps_its_range():
    """Squares of gradients leave FP32: SQNR does not change with a power of two, down to the last normal numbers."""
    x = torch.from_numpy(np.random.default_rng(3).uniform(1, 2, (16, 16)).astype(np.float32))
    got = x.bfloat16().float()
    want = float(sqnr_db(x, got))
    assert want == pytest.approx(10 * math.log10((x.double() ** 2).sum() / ((x - got).double() ** 2).sum()))
    for power in (-100, -60, 60, 126):
        assert float(sqnr_db(torch.ldexp(x, torch.tensor(power)), torch.ldexp(got, torch.tensor(power)))) == want


# --- shards ---------------------------------------------------------------------------------------------------------


def joined(tallies):
    """The tally of all shards, as ranks make it."""
    sums = {name: torch.stack([each.sums[name] for each in tallies]).sum(0) for name in tallies[0].sums}
    tops = {name: torch.stack([each.tops[name] for each in tallies]).amax(0) for name in tallies[0].tops}
    return Tally(sums, tops)


SHARDED = [
    Quantizer(E4M3),
    Quantizer(E2M1, (1, -1)),
    Quantizer(E2M1, (1, 16), ScaleRule.NVFP4),
    Quantizer(E4M3, (1, 8), ScaleRule.POW2, exponent_span=4),
    Quantizer(E2M1, (1, 16), ScaleRule.LADDER, exponent_span=4),
]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("how", SHARDED, ids=str)
def test_tallies_of_shards_add_up_to_the_whole(how, dim):
    """One shard is zero, but for a row; some rows are zero in one shard only."""
    x = torch.from_numpy(data())
    low, _ = x.chunk(2, dim)
    low.mul_(torch.arange(low.shape[0])[:, None] == 20)
    parts = x.chunk(2, dim)

    def tally(group):
        part = parts[group.rank].contiguous()
        return tally_operand(part, how(part, shared=Shared(dim=dim, group=group)), how)

    whole = numbers(tally_operand(x, how(x), how).figures())
    assert numbers(joined(among(2, tally)).figures()) == pytest.approx(whole, rel=1e-12, nan_ok=True)
    assert 10 < whole["sqnr_db"] < 60
    assert not how.exponent_span or whole["clamped_blocks_pct"] > 0


@pytest.mark.parametrize("variant", ["carrier", "residual"])
def test_tallies_of_clamped_shards_need_the_quantiles_of_whole_rows(variant):
    x, clamp, how = torch.from_numpy(data(binades=4)), OutlierClamp(0.9, variant), Quantizer(E2M1, (1, -1))
    x[:, :64] *= 8  # most outliers are in one shard

    def tally(group):
        split = Split(dim=1, group=group, whole=x.shape[1])
        part = x.chunk(2, 1)[group.rank].contiguous()
        codes, _ = clamp(part, how, None, None, split)
        return tally_operand(part, codes, how, clamp, split)

    codes, _ = clamp(x, how, None, None)
    whole = numbers(tally_operand(x, codes, how, clamp).figures())
    assert numbers(joined(among(2, tally)).figures()) == pytest.approx(whole, rel=1e-12, nan_ok=True)
    assert whole["outlier_pct"] > 1


def test_an_empty_shard_of_a_state_adds_nothing():
    before, wanted = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.05, 2.0, 0.3]])
    after, empty = torch.round(wanted * 8) / 8, torch.zeros(0, 3)
    tallies = [tally_state(before, wanted, after), tally_state(empty, empty, empty)]
    assert numbers(joined(tallies).figures()) == numbers(tally_state(before, wanted, after).figures())


# --- states ---------------------------------------------------------------------------------------------------------


def test_stalled_updates_by_construction():
    """Codes 1/8 apart: of eight moments three want to move by less than half a step, one of them downwards; one has
    arrived, and the others move."""
    step = 1 / 8
    before = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, -1.0]])
    wanted = torch.tensor([[1.05, 0.95, 1.0, 1.07, 2.0, 0.05, 0.07, -1.5]])
    after = torch.round(wanted / step) * step
    got = numbers(tally_state(before, wanted, after).figures())
    assert got["stalled_pct"] == pytest.approx(100 * 3 / 8)
    assert got["underflow_pct"] == pytest.approx(100 / 8)  # 0.05, which stalls at zero
    assert got["amax"] == 2 and got["saturated_pct"] == got["nonfinite_pct"] == 0
    noise = ((wanted - after) ** 2).sum()
    assert got["sqnr_db"] == pytest.approx(10 * math.log10((wanted**2).sum() / noise), rel=1e-5)


def test_a_code_that_drifts_with_its_scale_the_wrong_way_is_stalled():
    before, wanted = torch.full((1, 4), 2.0), torch.tensor([[1.9, 2.1, 1.9, 2.0]])
    after = torch.tensor([[2.05, 2.05, 1.95, 2.05]])  # away, towards, towards, nothing was wanted
    assert numbers(tally_state(before, wanted, after).figures())["stalled_pct"] == 25


def test_an_ema_stalls_in_eight_bits_and_not_in_sixteen():
    """v' = b v + (1 - b) g, b = 0.999 (2603.16731): a step of 0.1 % is below half of E4M3's 1/16 to 1/8 of a value."""
    g = torch.from_numpy(np.random.default_rng(4).uniform(0.5, 1.0, (64, 64)).astype(np.float32))
    target = 2 * g
    stalled = {}
    for bits, how in (("E4M3", Quantizer(E4M3, scale=ScaleRule.POW2)), ("FP32", Quantizer(FP32))):
        stored = how(g).dequantize()
        wanted = 0.999 * stored + 0.001 * target
        stalled[bits] = numbers(tally_state(stored, wanted, how(wanted).dequantize()).figures())["stalled_pct"]
    assert stalled["E4M3"] > 99 and stalled["FP32"] == 0


def test_a_state_that_was_clipped_is_seen():
    wanted = torch.tensor([[1.0, 2.0, 4.0, 9.0]])
    assert numbers(tally_state(wanted, wanted, wanted.clamp(max=4.0)).figures())["saturated_pct"] == 25
    assert numbers(tally_state(wanted, wanted, torch.tensor([[1.0, 2.0, 4.0, 8.5]])).figures())["saturated_pct"] == 0
    assert numbers(tally_state(wanted, wanted, torch.zeros(1, 4)).figures())["saturated_pct"] == 0  # lost, not clipped
