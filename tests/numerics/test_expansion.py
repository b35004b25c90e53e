"""Dynamic range expansion against its defining equations in FP64, and at the edges that break the published kernel."""

import math

import pytest
import torch

from lowprec_train.numerics.formats import FORMATS
from lowprec_train.ops import states
from lowprec_train.ops.powers import exp2, log2

BOUND = 448.0**2 / 2
SLACK = 2e-5  # of FP32 logarithms and powers, beside rounding steps of 1e-3 and more


def quantize(x, format="E4M3", group=128, segments=1):
    return torch.ops.lowprec.quantize_expanded(x, format, group, segments)


def dequantize(parts, format="E4M3", group=128, segments=1):
    return torch.ops.lowprec.dequantize_expanded(*parts, format, group, segments)


def round_trip(x, **how):
    return dequantize(quantize(x, **how), **how)


def groups_of_every_width(rows=64, group=128):
    """A group a row, spanning from next to nothing to 60 binades, around centres from 2^-70 to 2^40."""
    generator = torch.Generator().manual_seed(1)
    width = torch.logspace(-3, math.log10(60), rows, base=10).unsqueeze(1)
    exponent = (torch.rand(rows, group, generator=generator) - 0.5) * width
    sign = torch.randint(2, (rows, group), generator=generator) * 2.0 - 1
    return sign * torch.exp2(exponent + torch.linspace(-70, 40, rows).unsqueeze(1))


def extremes(x):
    magnitude = x.abs().double()
    return magnitude.amax(1), torch.where(magnitude == 0, math.inf, magnitude).amin(1)


def test_log2_over_all_mantissas():
    x = (torch.arange(1 << 23, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    error = (log2(x).double() - x.double().log2()).abs().max()
    assert error <= 8.4e-8
    powers = torch.exp2(torch.arange(-126.0, 128.0))
    assert torch.equal(log2(powers), torch.arange(-126.0, 128.0))


def test_exp2_over_the_interval_and_the_range():
    inside = torch.arange(-(1 << 23), 1 << 23).double().mul(2.0**-24).float()
    wide = torch.linspace(-126, 127, (1 << 20) + 1)
    for x in (inside, wide):
        assert (exp2(x).double() / x.double().exp2() - 1).abs().max() <= 1.1e-7
    whole = torch.arange(-126.0, 128.0)
    assert torch.equal(exp2(whole), torch.exp2(whole.double()).float())


def test_powers_do_not_depend_on_the_place_in_the_tensor():
    x = torch.rand(1003) * 20 + 0.1
    assert torch.equal(log2(x), torch.cat([log2(part) for part in x.split(1)]))
    assert torch.equal(exp2(x), torch.cat([exp2(part) for part in x.split(7)]))


@pytest.mark.parametrize("format", ["E4M3", "E5M2"])
def test_codes_use_the_whole_format(format):
    """I2.1: the largest code is the format's maximum in every group; the smallest is two subnormal steps or more."""
    x = groups_of_every_width()
    codes = quantize(x, format=format)[0].float().abs()
    mantissa, low, limit = FORMATS[format].mantissa_bits, FORMATS[format].min_exponent, FORMATS[format].max
    assert (codes.amax(dim=1) == limit).all()
    assert codes.min() >= 2 * 2.0 ** (low - mantissa)  # E4M3: 2^-8


@pytest.mark.parametrize("format", ["E4M3", "E5M2"])
def test_exponent_is_the_largest_sixteenth_that_fits(format):
    """I2.2: ratio^k <= bound < ratio^(k + 1/16)."""
    x = groups_of_every_width()
    _, scale, k, center = (each.squeeze(1).double() for each in quantize(x, format=format))
    amax, amin = extremes(x)
    bound, span = FORMATS[format].max ** 2 / 2, (amax / amin).log2()
    capped = k == 64
    assert ((k * 16) == (k * 16).round()).all() and (k >= 1 / 16).all() and capped.any() and not capped.all()
    assert (k * span <= math.log2(bound) + SLACK).all()
    assert ((k + 1 / 16) * span > math.log2(bound) - SLACK)[~capped].all()
    torch.testing.assert_close(center, (amax * amin).sqrt(), rtol=3e-7, atol=0)
    torch.testing.assert_close(scale, (amax / center) ** k / FORMATS[format].max, rtol=SLACK, atol=0)
    assert (scale <= math.sqrt(bound) / FORMATS[format].max * (1 + SLACK)).all()


def test_codes_are_the_rounded_powers():
    """Against FP64: an element may differ only where the exact value lies within `SLACK` of a rounding boundary."""
    x = groups_of_every_width()
    codes, _, k, _ = quantize(x)
    amax, _ = extremes(x)
    exact = 448 * (x.double().abs() / amax.unsqueeze(1)) ** k.double() * x.sign().double()
    below, above = ((exact * (1 + side * SLACK)).float().to(torch.float8_e4m3fn).float() for side in (-1, 1))
    codes = codes.float()
    assert ((codes == below) | (codes == above)).all()
    assert (below == above).float().mean() > 0.99


def worst(k):
    """The largest relative error: 2.5 subnormal steps, which round to 2 or 3."""
    k = k.double()
    return torch.maximum(1.2 ** (1 / k) - 1, 1 - 0.8 ** (1 / k)) + SLACK / k + 2.0**-22


def test_error_bound():
    """I2.3: sign exact; 1.2^(1/k) - 1 or 1 - 0.8^(1/k), (1 + 1/16)^(1/k) - 1 in the normal range; monotone.

    (For k > 1 the error downwards is the larger one: 0.22 / k for large k, against 0.18 / k upwards.)
    """
    x = groups_of_every_width()
    codes, _, k, _ = quantize(x)
    back = round_trip(x)
    error = (back.double() / x.double() - 1).abs()
    anywhere, normal = worst(k), (17 / 16) ** (1 / k.double()) - 1 + SLACK / k.double() + 2.0**-22
    assert torch.equal(back.sign(), x.sign())
    assert (error <= anywhere).all() and (error > 0.9 * anywhere).any()
    assert (error <= torch.where(codes.float().abs() > 2.0**-6, normal, anywhere)).all()
    for row, restored in zip(x, back, strict=True):
        assert (restored[row.argsort()].diff() >= 0).all()


def test_zeros_stay_zero_and_leave_their_neighbours_alone():
    """I2.4; in the published kernel one zero lowers k to about 0.19."""
    x = groups_of_every_width()[:40]
    holes = x.clone()
    holes[:, ::3] = 0
    packed = torch.stack([row[row != 0] for row in holes])
    back, alone = round_trip(holes), round_trip(packed)
    assert torch.equal(back[:, ::3], torch.zeros_like(back[:, ::3]))
    assert torch.equal(torch.stack([row[row != 0] for row in back]), alone)
    for each, other in zip(quantize(holes)[1:], quantize(packed)[1:], strict=True):
        assert torch.equal(each, other)


def test_a_group_of_zeros():
    codes, scale, k, center = quantize(torch.zeros(2, 256))
    assert not codes.view(torch.uint8).any()
    assert (k == 1).all() and (center == 1).all() and scale.isfinite().all() and (scale > 0).all()
    assert torch.equal(round_trip(torch.zeros(2, 256)), torch.zeros(2, 256))


@pytest.mark.parametrize("value", [3.3, -1e-20, 1e-30, 1.2e-38, 3.4e38])
def test_equal_magnitudes_come_back(value):
    x = torch.full((1, 128), value)
    x[0, ::2] *= -1
    torch.testing.assert_close(round_trip(x), x, rtol=2.0**-22, atol=0)
    lonely = torch.zeros(1, 128)
    lonely[0, 77] = value
    torch.testing.assert_close(round_trip(lonely), lonely, rtol=2.0**-22, atol=0)


def test_one_outlier():
    """The outlier is exact to logarithms; the rest keeps the precision of its k, which the outlier lowers."""
    torch.manual_seed(3)
    x = torch.rand(1, 128) + 0.5
    x[0, 5] = 1e4
    back, k = round_trip(x), quantize(x)[2]
    assert 1 < k.item() < 1.25
    torch.testing.assert_close(back[0, 5], x[0, 5], rtol=SLACK, atol=0)
    assert ((back / x - 1).abs() <= worst(k)).all()


def test_a_ratio_beyond_the_formats_compresses():
    """I2.5: k < 1 keeps small entries alive where plain E4M3 flushes them."""
    x = torch.logspace(-9, 3, 128).unsqueeze(0)
    codes, _, k, _ = quantize(x)
    plain = (x * (448 / 1e3)).to(torch.float8_e4m3fn)
    assert k.item() < 1 and (codes.float() > 0).all() and (plain.float() == 0).sum() > 30
    assert ((round_trip(x) / x - 1).abs() <= worst(k)).all()


@pytest.mark.parametrize("magnitude", [1e-20, 1e-30, 1e-36, 1e35])
def test_intermediates_neither_underflow_nor_overflow(magnitude):
    torch.manual_seed(4)
    x = torch.randn(4, 128).abs().clamp(1e-1, 10.0) * magnitude
    k = quantize(x)[2]
    error = (round_trip(x).double() / x.double() - 1).abs()
    assert (k > 1).all() and (error <= worst(k)).all()
    moved = x * 2.0 ** (20 if magnitude < 1 else -20)
    assert torch.equal(quantize(x)[0].view(torch.uint8), quantize(moved)[0].view(torch.uint8))


def test_the_whole_of_fp32_in_one_group():
    x = torch.tensor([[2.0**-126, 1.0, 3e38, 2.0**-127, 0.0]])
    back = round_trip(x)
    assert back.isfinite().all() and (back[0, :3] >= 2.0**-126).all() and (back[0, 3:] == 0).all()
    torch.testing.assert_close(back[0, 2], x[0, 2], rtol=1e-4, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(bad):
    x = torch.randn(2, 256)
    x[1, 200] = bad
    back = round_trip(x)
    assert back[1, 128:].isnan().all() and back[0].isfinite().all() and back[1, :128].isfinite().all()


def test_the_precision_of_the_paper():
    """The published kernel on Gaussian groups: relative RMS error .0145 (plain E4M3: .0257), median k, scale."""
    torch.manual_seed(0)
    x = torch.randn(64, 4096)
    _, scale, k, _ = quantize(x, segments=8)
    error = (round_trip(x, segments=8) - x).square().mean().sqrt()
    assert error == pytest.approx(0.0145, abs=3e-4)
    assert k.median() == pytest.approx(1.875, abs=0.07) and scale.median() == pytest.approx(0.643, abs=0.01)
    plain = torch.ops.lowprec.quantize(x, "E4M3", [1, 128], "FP32", 1.0, 0, "nearest", None, None)
    assert error < 0.6 * (torch.ops.lowprec.dequantize(*plain) - x).square().mean().sqrt()


@pytest.mark.parametrize("columns", [4096, 1000, 96, 8])
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_shards_of_a_row_are_slices_of_the_whole(columns, shards):
    torch.manual_seed(5)
    x = torch.randn(3, columns)
    whole = quantize(x, segments=8)
    assert whole[1].shape == (3, 8 * -(-columns // 8 // 128) if columns >= 1024 else 8)
    parts = [quantize(shard, segments=8 // shards) for shard in x.chunk(shards, dim=1)]
    for index, tensor in enumerate(whole):
        assert torch.equal(tensor.view(torch.uint8), torch.cat([p[index].view(torch.uint8) for p in parts], dim=1))
    back = torch.cat([dequantize(part, segments=8 // shards) for part in parts], dim=1)
    assert torch.equal(back, dequantize(whole, segments=8))


def test_short_groups_and_many_rows():
    """A group at the end of a segment holds what is left; rows are cut into slices that do not show."""
    x = torch.randn(700, 300)
    codes, scale, k, center = quantize(x)
    assert scale.shape == k.shape == center.shape == (700, 3)
    for first, last in ((0, 128), (128, 256), (256, 300)):
        alone = quantize(x[650:, first:last].contiguous())
        assert torch.equal(codes[650:, first:last].view(torch.uint8), alone[0].view(torch.uint8))
        assert torch.equal(center[650:, first // 128], alone[3][:, 0])


def test_fake_kernels_agree():
    x = torch.randn(4, 72)
    parts = quantize(x, group=16, segments=8)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = quantize(mode.from_tensor(x), group=16, segments=8)
        back = dequantize(fakes, group=16, segments=8)
    assert [(f.shape, f.dtype) for f in fakes] == [(p.shape, p.dtype) for p in parts]
    assert (back.shape, back.dtype) == (x.shape, torch.float32)


@pytest.mark.parametrize(("group", "segments"), [(0, 1), (128, 3), (128, 0)])
def test_groups_that_do_not_fit_are_refused(group, segments):
    with pytest.raises(
        (ValueError, RuntimeError), match=f"{segments} segments of groups of {group} do not fit a row of 64"
    ):
        quantize(torch.zeros(2, 64), group=group, segments=segments)


@pytest.mark.parametrize("segments", [1, 8])
def test_an_empty_shard_has_no_codes(segments):
    """Of a matrix with fewer rows than ranks; also without compiled kernels."""
    parts = states.quantize_expanded(torch.zeros(0, 64), "E4M3", 128, segments)
    assert [part.shape for part in parts] == [(0, 64)] + [(0, segments)] * 3
    assert states.dequantize_expanded(*parts, "E4M3", 128, segments).shape == (0, 64)
