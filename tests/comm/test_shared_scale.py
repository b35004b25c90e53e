"""FP8-LM's reduction: one scale on all ranks, sums in FP8, head-room that follows saturation."""

import math

import pytest
import torch

from lowprec_train.comm.grad_codec import decoded
from lowprec_train.comm.shared_scale import MuSchedule, SharedScaleCodec
from lowprec_train.group import SINGLE
from lowprec_train.numerics.formats import BF16, E4M3, E5M2
from tests.comm import simulation
from tests.comm.cases import ROW, encoded, gradients, ranges, row, summed, with_value

ONE = torch.tensor(1.0)


def agreed(flats, codec, layout, mu):
    """What every rank computes once the maxima are exchanged: those of one rank that has all rows."""
    return codec.scales(torch.stack(flats), layout, SINGLE, mu)


def reduced(flats, codec, layout, mu):
    """(sum, share at the maximum) for rows of one rank each."""
    s = agreed(flats, codec, layout, mu)
    wire = torch.cat([encoded(codec, flat[None], layout, s) for flat in flats])
    total, at_maximum = summed(codec, wire, layout, s)
    return total, at_maximum.item() / layout.coded_size


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("every_addition", [True, False])
@pytest.mark.parametrize("mu", [1.0, 0.5, 0.3, 8**-0.5])
def test_equals_the_simulation(format, every_addition, mu):
    flats = gradients(ROW.size, ranks=8, spread=1.5)
    value, share = reduced(flats, SharedScaleCodec(format, every_addition), ROW, torch.tensor(mu))
    s = simulation.shared_multipliers(flats, ranges(ROW), format.name, mu)
    expected, at_maximum = simulation.shared_row(flats, ranges(ROW), s, format.name, every_addition)
    assert torch.equal(value, expected)
    assert share == at_maximum / ROW.coded_size


def test_scale_is_the_smallest_of_the_ranks():
    """I4.1: the same bits as the minimum over the ranks' own just-in-time scales, ranks of zeros aside."""
    flats = gradients(ROW.size)
    flats[1] = torch.zeros(ROW.size)
    own = [agreed([flat], SharedScaleCodec(), ROW, ONE) for rank, flat in enumerate(flats) if rank != 1]
    assert torch.equal(agreed(flats, SharedScaleCodec(), ROW, ONE), torch.stack(own).amin(0))
    for mu in (0.25, 0.3):
        shared = agreed(flats, SharedScaleCodec(), ROW, torch.tensor(mu))
        assert torch.equal(shared, torch.stack(own).amin(0) * torch.tensor(mu))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("every_addition", [True, False])
def test_identical_gradients_saturate_unless_mu_is_one_over_ranks(ranks, every_addition):
    """I4.2: with 1/sqrt(N) the sum of N equal gradients leaves the range, and that is counted; with 1/N it cannot."""
    layout, codec = row(1 << 16), SharedScaleCodec(every_addition=every_addition)
    gradient = torch.randn(1 << 16).clamp(-3, 3)  # of 3.5, the largest value at the scale that 3 gets
    value, share = reduced([gradient] * ranks, codec, layout, torch.tensor(ranks**-0.5))
    limit = 3.5 * ranks**0.5
    beyond = (gradient.abs() * ranks > limit).sum() / gradient.numel()
    assert value.max() == pytest.approx(limit, rel=1e-6)
    assert share > beyond / 2 > 1e-3
    value, share = reduced([gradient] * ranks, codec, layout, torch.tensor(1 / ranks))
    assert value.max() == pytest.approx(3 * ranks, rel=0.1)
    assert share == 0


def test_saturation_on_the_way_is_counted():
    """Partial sums that leave the range and come back: the last code does not tell, the count does."""
    flats = [torch.full((64,), value) for value in (448.0, 448.0, -448.0)]
    value, share = reduced(flats, SharedScaleCodec(), row(64), ONE)
    assert share == 1 and not value.any()
    value, share = reduced(flats, SharedScaleCodec(every_addition=False), row(64), ONE)
    assert (value == 448).all() and share == 1


@pytest.mark.parametrize("sizes", [(1024, 40, 300, 7, 5, 513), (4096,), (512, 64, 2048), (3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maxima_of_ranges_of_any_size(sizes, dtype):
    """Taken a line at a time, a line being what divides all of them."""
    layout, flats = row(*sizes), [flat.to(dtype) for flat in gradients(3 * sum(sizes), ranks=1)]
    flats[0][0] = -torch.inf if len(sizes) == 4 else 3.0
    expected = simulation.shared_multipliers(flats, ranges(layout), "E4M3", 0.3)
    got = SharedScaleCodec().scales(flats[0].view(3, -1), layout, SINGLE, torch.tensor(0.3))
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_one_rounding_of_each_contribution():
    """What a rank's codes lose before any sum: 2.7 % of sqrt(sum |g_i|^2), as with scales of blocks, where gradients
    are of one magnitude.
    """
    flats = [torch.randn(1 << 16) for _ in range(8)]
    codec, layout = SharedScaleCodec(every_addition=False), row(1 << 16)
    s = agreed(flats, codec, layout, ONE)
    sums = sum(decoded(encoded(codec, flat[None], layout, s), codec, layout, s)[0].double() for flat in flats)
    exact = torch.stack(flats).double()
    assert (sums - exact.sum(0)).norm() <= 0.027 * exact.norm()


@pytest.mark.parametrize(("every_addition", "error"), [(True, 0.069), (False, 0.038)])
@pytest.mark.parametrize("mu", [8**-0.5, 1 / 8])
def test_errors_of_the_mean(every_addition, error, mu):
    """I4.4 on eight ranks: about 6.9 % with a rounding per addition, 3.8 % with one."""
    flats = [torch.randn(1 << 16) * 2.0 ** -(rank % 4) for rank in range(8)]
    value, share = reduced(flats, SharedScaleCodec(every_addition=every_addition), row(1 << 16), torch.tensor(mu))
    exact = torch.stack(flats).double().sum(0)
    assert ((value.double() - exact).norm() / exact.norm()).item() == pytest.approx(error, rel=0.08)
    assert share == 0


def test_average_as_published():
    """FP8-LM dequantises with N * s: the caller's division of this sum by N, bit for bit when N is a power of two."""
    flats, codec = gradients(ROW.size), SharedScaleCodec()
    s = agreed(flats, codec, ROW, ONE)
    wire = torch.cat([encoded(codec, flat[None], ROW, s) for flat in flats])
    published, ours = (summed(codec, wire, ROW, scales)[0] for scales in (s * 4, s))
    for whole, mine, theirs in zip(ROW.ranges, ROW.pieces(ours[None]), ROW.pieces(published[None]), strict=True):
        assert torch.equal(theirs, mine / 4 if whole.coded else mine)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_loses_the_parameter_everywhere(value):
    """I4.3: the maximum carries it, so ranks need not see the element."""
    flats = with_value(gradients(ROW.size), 2, 5, value)
    codec = SharedScaleCodec()
    s = agreed(flats, codec, ROW, ONE)
    assert s.isnan().tolist() == [True] + [False] * 5
    for flat in flats:
        mine = decoded(encoded(codec, flat[None], ROW, s), codec, ROW, s)[0]
        assert mine[:1024].isnan().all() and mine[1024:].isfinite().all()


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("amax", [1e-38, 1e-30, 1.0, 3.0, 1e30])
@pytest.mark.parametrize("mu", [1.0, 0.3, 8**-0.5, 1 / 8])
def test_a_decoded_sum_is_encoded_as_it_was(format, amax, mu):
    """Every code, at every scale: an all-reduce gathers sums without another rounding."""
    codec, layout = SharedScaleCodec(format), row(256)
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(format.carrier).float()
    s = codec.scales(torch.full((1, 256), amax), layout, SINGLE, torch.tensor(mu))
    again = encoded(codec, decoded(codes[None], codec, layout, s), layout, s)[0]
    assert torch.equal(again[values.isfinite()], codes[values.isfinite()])
    assert again[values.isnan()].view(format.carrier).float().isnan().all()


def test_zeros_are_exact():
    zeros = torch.zeros(ROW.size)
    value, share = reduced([zeros] * 4, SharedScaleCodec(), ROW, torch.tensor(0.3))
    assert torch.equal(value, zeros) and share == 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_bytes_are_what_is_sent(ranks):
    codec, s = SharedScaleCodec(), torch.ones(len(ROW.ranges))
    assert encoded(codec, torch.randn(ranks, ROW.size), ROW, s).shape == (ranks, codec.row_bytes(ROW))
    assert codec.row_bytes(row(1000)) == 1000


def test_what_is_refused():
    with pytest.raises(ValueError, match="not BF16"):
        SharedScaleCodec(BF16)
    with pytest.raises(ValueError, match="not 0"):
        MuSchedule(0)


# --- the schedule of mu ---------------------------------------------------------------------------------------------

CLEAN, SATURATED = torch.tensor(0.0), torch.tensor(2e-5)


def test_mu_doubles_in_a_thousand_clean_steps():
    """T15: exactly, as the level is an integer; by 2^(1/1000) each step."""
    schedule = MuSchedule(8)
    seen = [schedule.mu.item()]
    for _ in range(1000):
        schedule.update(CLEAN)
        seen.append(schedule.mu.item())
    assert seen[0] == 0.125 and seen[-1] == 0.25
    assert seen == pytest.approx([0.125 * 2 ** (k / 1000) for k in range(1001)], rel=1e-7)


def test_mu_halves_when_codes_saturate():
    schedule = MuSchedule(8)
    for _ in range(2500):
        schedule.update(CLEAN)
    before = schedule.mu.item()
    schedule.update(SATURATED)
    assert schedule.mu.item() == before / 2
    schedule.update(torch.tensor(1e-5))  # the share itself is not beyond it
    assert schedule.mu.item() == pytest.approx(before / 2 * 2**0.001, rel=1e-7)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1000])
def test_mu_stays_within_its_bounds(ranks):
    schedule = MuSchedule(ranks)
    assert schedule.mu == torch.tensor(1 / ranks)
    for share, end in ((SATURATED, 1 / ranks), (CLEAN, 1.0)):
        for _ in range(1000 * math.ceil(math.log2(ranks)) + 5):
            schedule.update(share)
        assert schedule.mu == torch.tensor(end)


def test_mu_continues():
    schedule, other = MuSchedule(8), MuSchedule(8)
    for _ in range(700):
        schedule.update(CLEAN)
    other.load_state_dict({name: value.clone() for name, value in schedule.state_dict().items()})
    for share in (CLEAN, SATURATED, CLEAN):
        schedule.update(share)
        other.update(share)
        assert torch.equal(schedule.mu, other.mu)


def test_mu_of_another_number_of_ranks():
    """Fewer ranks need less head-room: a level below the new bound becomes that bound."""
    schedule = MuSchedule(2)
    schedule.load_state_dict(MuSchedule(64).state_dict())
    assert schedule.mu == 0.5
    for _ in range(1000):
        schedule.update(CLEAN)
    assert schedule.mu == 1.0
