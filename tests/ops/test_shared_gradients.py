"""Gradients on the wire under scales of all ranks: the reference against sums written out, the C++ kernels against the
reference, at odd sizes, from tensors that end early, and for ranges that are not dense.
"""

from __future__ import annotations

import pytest
import torch

from lowprec_train.comm.layout import ElementRange, FlatLayout
from lowprec_train.comm.shared_scale import SharedScaleCodec
from lowprec_train.group import SINGLE
from lowprec_train.numerics.formats import parse_format
from lowprec_train.ops import library
from lowprec_train.ops.schema import row_bytes_by
from lowprec_train.ops.shared_gradients import decode_gradients_by, encode_gradients_by
from tests.comm import simulation
from tests.ops.wire_data import DTYPES, KINDS, RANGES, gradients, same

LIVE = library.live_kernels(torch.device("cpu"))["encode_gradients_by"]
ENCODE, DECODE = torch.ops.lowprec.encode_gradients_by, torch.ops.lowprec.decode_gradients_by
NAMES = [name for name, (sizes, *_) in RANGES.items() if len(sizes) < 100]


def scales_of(x, sizes, format, mu):
    layout = FlatLayout(tuple(ElementRange(size) for size in sizes))
    return SharedScaleCodec(parse_format(format)).scales(x, layout, SINGLE, torch.tensor(mu))


def summed(op, wire, sizes, coded, s, format, senders, every):
    rows = len(wire) // senders
    parts = [torch.full((rows, size) if rows > 1 else (size,), 7.0) for size in sizes]
    count = op(wire, parts, sizes, coded, s, format, senders, every)
    return torch.cat([part.view(rows, -1) for part in parts], 1), count


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("format", "every"), [("E4M3", True), ("E5M2", False)])
def test_sums_are_those_of_the_simulation(name, kind, format, every):
    """At mu = 1, where sums saturate, and codes at the maximum are counted."""
    sizes, coded, _ = RANGES[name]
    x = gradients(3, sum(sizes), kind)
    x[2] = x[1]
    s = scales_of(x, sizes, format, 1.0)
    wire = encode_gradients_by(list(x.split(sizes, 1)), 3, sizes, coded, s, format)
    total, count = summed(decode_gradients_by, wire, sizes, coded, s, format, 3, every)
    ranges = [(size, bool(has_codes)) for size, has_codes in zip(sizes, coded, strict=True)]
    value, at_maximum = simulation.shared_row(list(x), ranges, s, format, every)
    assert same(total[0], value) and count == at_maximum


@pytest.mark.skipif(LIVE != "C++", reason="no C++ library is built (make kernels)")
@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_the_reference(name, kind):
    sizes, coded, _ = RANGES[name]
    for dtype, format, mu in zip(DTYPES, ("E4M3", "E5M2", "E4M3"), (1.0, 0.3, 6**-0.5), strict=True):
        x = gradients(6, sum(sizes), kind, dtype)
        parts, s = list(x.split(sizes, 1)), scales_of(x, sizes, format, mu)
        wire = ENCODE(parts, 6, sizes, coded, s, format)
        assert same(wire, encode_gradients_by(parts, 6, sizes, coded, s, format)), dtype
        for senders, every in ((6, True), (3, False), (1, True), (1, False)):
            found = (summed(op, wire, sizes, coded, s, format, senders, every) for op in (DECODE, decode_gradients_by))
            (mine, count), (meant, expected) = found
            assert same(mine, meant) and torch.equal(count, expected), (dtype, senders, every)


@pytest.mark.parametrize("length", [0, 1, 255, 700, 1023, 1024])
def test_what_a_part_lacks_is_zeros_and_is_not_written(length):
    """Nor is a code counted that no part takes."""
    s, x = torch.ones(1), torch.full((1024,), 400.0)
    for op in (ENCODE, encode_gradients_by):
        wire = op([x[:length]], 4, [256], [1], s, "E4M3")
        assert same(wire, op([torch.where(torch.arange(1024) < length, x, 0.0)], 4, [256], [1], s, "E4M3"))
    full = ENCODE([x], 4, [256], [1], s, "E4M3")
    for op in (DECODE, decode_gradients_by):
        back = torch.full((1024,), 7.0)
        count = op(torch.cat([full, full]), [back[:length]], [256], [1], s, "E4M3", 2, True)
        assert (back[:length] == 448).all() and (back[length:] == 7).all() and count == length


def test_ranges_of_a_wider_buffer():
    x, s = gradients(4, 2000, "normal"), torch.tensor([2.0**-10, 0.7])
    parts, how = [x[:, 3:1003], x[:, 1500:1596]], ([1000, 96], [1, 0], s, "E4M3")
    wire = ENCODE(parts, 4, *how)
    assert torch.equal(wire, encode_gradients_by([part.contiguous() for part in parts], 4, *how))
    into, expected = torch.zeros(4, 2000), torch.zeros(4, 2000)
    for op, out in ((DECODE, into), (decode_gradients_by, expected)):
        op(wire, [out[:, 3:1003], out[:, 1500:1596]], *how, 1, True)
    assert torch.equal(into, expected) and into[:, 3:1003].any() and not into[:, 1003:1500].any()


@pytest.mark.parametrize("name", RANGES)
def test_bytes_are_what_the_schema_says(name):
    sizes, coded, _ = RANGES[name]
    x, s = gradients(2, sum(sizes), "normal"), torch.ones(len(sizes))
    wire = ENCODE(list(x.split(sizes, 1)), 2, sizes, coded, s, "E4M3")
    assert wire.shape == (2, row_bytes_by(sizes, coded, "E4M3")) and wire.shape[1] % 2 == 0
    fake = ENCODE([torch.empty(2, n, device="meta") for n in sizes], 2, sizes, coded, s.to("meta"), "E4M3")
    assert fake.shape == wire.shape and fake.dtype == torch.uint8
    count = DECODE(fake, [torch.empty(n, device="meta") for n in sizes], sizes, coded, s.to("meta"), "E4M3", 2, True)
    assert count.shape == () and count.dtype == torch.int64


@pytest.mark.parametrize("encode", [encode_gradients_by, ENCODE])
@pytest.mark.parametrize(
    "change",
    [{0: [torch.zeros(2, 9)]}, {0: [torch.zeros(21)]}, {2: [0]}, {3: [1, 1]}, {4: torch.ones(2)}]
    + [{4: torch.ones(1).double()}, {5: "BF16"}, {5: "INT8"}],
)
def test_what_is_refused(encode, change):
    arguments = dict(enumerate(([torch.zeros(2, 10)], 2, [10], [1], torch.ones(1), "E4M3")))
    encode(*arguments.values())
    with pytest.raises((ValueError, RuntimeError)):
        encode(*(arguments | change).values())


@pytest.mark.parametrize("decode", [decode_gradients_by, DECODE])
@pytest.mark.parametrize("change", [{0: torch.zeros(2, 8, dtype=torch.uint8)}, {1: [torch.zeros(2, 10)]}, {6: 3}])
def test_a_wire_that_does_not_fit_is_refused(decode, change):
    wire = encode_gradients_by([torch.zeros(2, 10)], 2, [10], [1], torch.ones(1), "E4M3")
    arguments = dict(enumerate((wire, [torch.zeros(10)], [10], [1], torch.ones(1), "E4M3", 2, True)))
    assert decode(*arguments.values()) == 0
    with pytest.raises((ValueError, RuntimeError)):
        decode(*(arguments | change).values())
