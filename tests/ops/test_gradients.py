"""Gradients on the wire: the reference against sums written out block by block, the C++ kernels against the reference,
at odd sizes, in every row order, from tensors that end early, and for ranges that are not dense.
"""

from __future__ import annotations

import pytest
import torch

from lowprec_train.ops import library
from lowprec_train.ops.gradients import decode_gradients, encode_gradients, places
from lowprec_train.ops.schema import row_bytes
from tests.comm import simulation
from tests.ops.wire_data import DTYPES, KINDS, RANGES, gradients, payloads, rows_of, same

LIVE = library.live_kernels(torch.device("cpu"))["encode_gradients"]
CASES = [(name, format) for name, (_, coded, _) in RANGES.items() for format in payloads(coded)]


def encoded(op, x, name, format, inner=1):
    sizes, coded, block = RANGES[name]
    return rows_of(op, list(x.split(sizes, 1)), len(x), sizes, coded, format, block, inner)


def summed(op, wire, name, format, senders, inner=1):
    sizes, coded, block = RANGES[name]
    rows = len(wire) // senders
    parts = [torch.full((rows, size) if rows > 1 else (size,), 7.0) for size in sizes]
    op([wire], parts, sizes, coded, format, block, senders, inner)
    return torch.cat([part.view(rows, -1) for part in parts], 1)


@pytest.mark.parametrize(("name", "format"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_those_of_the_simulation(name, format, kind):
    """Each contribution rounded once, block by block; added in the order of the senders, in FP32."""
    sizes, coded, block = RANGES[name]
    x = gradients(3, sum(sizes), kind)
    total = summed(decode_gradients, encoded(encode_gradients, x, name, format), name, format, senders=3)
    ranges = [(size, bool(has_codes)) for size, has_codes in zip(sizes, coded, strict=True)]
    assert same(total[0], simulation.sum_of_rows(list(x), ranges, format, block))


@pytest.mark.skipif(LIVE != "C++", reason="no C++ library is built (make kernels)")
@pytest.mark.parametrize(("name", "format"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_the_reference(name, format, kind):
    encode, decode = torch.ops.lowprec.encode_gradients, torch.ops.lowprec.decode_gradients
    for dtype in DTYPES:
        x = gradients(6, sum(RANGES[name][0]), kind, dtype)
        wire = encoded(encode, x, name, format, inner=2)
        assert same(wire, encoded(encode_gradients, x, name, format, inner=2)), dtype
        for senders, inner in ((6, 1), (2, 3), (1, 2), (1, 1)):
            sums = (summed(op, wire, name, format, senders, inner) for op in (decode, decode_gradients))
            assert same(*sums), (dtype, senders)


@pytest.mark.parametrize("op", [encode_gradients, torch.ops.lowprec.encode_gradients])
def test_rows_lie_where_they_are_asked_for(op):
    """Row r of 6 at (r % inner) (6 / inner) + r / inner, of the same bytes."""
    x = gradients(6, 1000 + 96, "normal")
    wire = encoded(op, x, "small blocks", "E4M3")
    assert places(6, 2) == [0, 3, 1, 4, 2, 5]
    for inner in (2, 3, 6):
        assert torch.equal(encoded(op, x, "small blocks", "E4M3", inner)[places(6, inner)], wire)


@pytest.mark.parametrize("length", [0, 1, 255, 700, 1023, 1024])
@pytest.mark.parametrize("format", ["E4M3", "BF16", "FP32"])
def test_what_a_part_lacks_is_zeros_and_is_not_written(length, format):
    coded, x = [int(format == "E4M3")], gradients(1, 1024, "normal")[0]
    whole = x.clone()
    whole[length:] = 0.0
    encode, decode = torch.ops.lowprec.encode_gradients, torch.ops.lowprec.decode_gradients
    wire = rows_of(encode, [x[:length]], 4, [256], coded, format, 64, 1)
    assert torch.equal(wire, rows_of(encode_gradients, [whole], 4, [256], coded, format, 64, 1))
    back, rest = torch.full((1024,), 7.0), torch.full((1024,), 7.0)
    decode([wire], [back[:length]], [256], coded, format, 64, 1, 1)
    decode_gradients([wire], [rest], [256], coded, format, 64, 1, 1)
    assert torch.equal(back[:length], rest[:length]) and (back[length:] == 7).all()


def test_ranges_of_a_wider_buffer():
    """Columns of rows that lie further apart, as a unit's parameters in its buffer."""
    x = gradients(4, 2000, "normal")
    encode = torch.ops.lowprec.encode_gradients
    parts = [x[:, 3:1003], x[:, 1500:1596]]
    dense = [part.contiguous() for part in parts]
    how = (4, *RANGES["small blocks"][:2], "E4M3", 32, 1)
    assert torch.equal(rows_of(encode, parts, *how), rows_of(encode_gradients, dense, *how))
    into, expected = torch.zeros(4, 2000), torch.zeros(4, 2000)
    wire = rows_of(encode, parts, *how)
    for op, out in ((torch.ops.lowprec.decode_gradients, into), (decode_gradients, expected)):
        op([wire], [out[:, 3:1003], out[:, 1500:1596]], *how[1:5], 1, 1)
    assert torch.equal(into, expected) and into[:, 3:1003].any() and not into[:, 1003:1500].any()


@pytest.mark.parametrize("op", [encode_gradients, torch.ops.lowprec.encode_gradients])
def test_other_dtypes_go_by_fp32(op):
    x = gradients(2, 1096, "normal").double()
    assert torch.equal(encoded(op, x, "small blocks", "E4M3"), encoded(op, x.float(), "small blocks", "E4M3"))


@pytest.mark.parametrize(("name", "format"), CASES)
def test_bytes_of_a_row(name, format):
    """Plain elements, whole blocks of codes with a byte for the scale of each, and one byte if that is odd."""
    sizes, coded, block = RANGES[name]
    blocks = [-(-size // block) for size, has_codes in zip(sizes, coded, strict=True) if has_codes]
    plain = sum(size for size, has_codes in zip(sizes, coded, strict=True) if not has_codes)
    count = plain * (4 if format == "FP32" else 2) + sum(blocks) * (block + 1)
    assert row_bytes(sizes, coded, format, block) == count + count % 2


@pytest.mark.parametrize("encode", [encode_gradients, torch.ops.lowprec.encode_gradients])
@pytest.mark.parametrize(
    "change",
    [
        {0: torch.zeros(2, 15, dtype=torch.uint8)},
        {0: torch.zeros(2, 16)},
        {0: torch.zeros(16, 2, dtype=torch.uint8).t()},
        {1: [torch.zeros(2, 9)]},
        {1: [torch.zeros(21)]},
        {0: torch.zeros(3, 16, dtype=torch.uint8), 1: [torch.zeros(3, 10)], 6: 2},
        {2: [0]},
        {3: [1, 1]},
        {4: "BF16"},
        {5: 0},
    ],
)
def test_what_is_refused(encode, change):
    wire = torch.zeros(2, 16, dtype=torch.uint8)
    arguments = dict(enumerate((wire, [torch.zeros(2, 10)], [10], [1], "E4M3", 4, 1)))
    encode(*arguments.values())
    with pytest.raises((ValueError, RuntimeError)):
        encode(*(arguments | change).values())


@pytest.mark.parametrize("decode", [decode_gradients, torch.ops.lowprec.decode_gradients])
@pytest.mark.parametrize(
    "change",
    [
        {0: [torch.zeros(2, 8, dtype=torch.uint8)]},
        {0: [torch.zeros(1, 16, dtype=torch.uint8)] * 3},
        {0: [torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(2, 16, dtype=torch.uint8)]},
        {0: [torch.zeros(2, 16)]},
        {1: [torch.zeros(2, 10)]},
        {6: 3},
    ],
)
def test_a_wire_that_does_not_fit_is_refused(decode, change):
    wire = rows_of(encode_gradients, [torch.zeros(2, 10)], 2, [10], [1], "E4M3", 4, 1)
    arguments = dict(enumerate(([wire], [torch.zeros(10)], [10], [1], "E4M3", 4, 2, 1)))
    decode(*arguments.values())
    decode(*(arguments | {0: list(wire.split(1))}).values())
    with pytest.raises((ValueError, RuntimeError)):
        decode(*(arguments | change).values())


@pytest.mark.parametrize("decode", [decode_gradients, torch.ops.lowprec.decode_gradients])
@pytest.mark.parametrize(("name", "format"), CASES)
def test_wires_apart_have_the_sums_of_one_wire(decode, name, format):
    """Each sender's rows in memory of its own."""
    sizes, coded, block = RANGES[name]
    wire = encoded(encode_gradients, gradients(6, sum(sizes), "normal"), name, format, inner=2)
    for senders in (3, 6):
        sums = [[torch.zeros(6 // senders, size) for size in sizes] for _ in range(2)]
        apart = [rows.clone() for rows in wire.split(6 // senders)]
        for wires, parts in zip(([wire], apart), sums, strict=True):
            decode(wires, parts, sizes, coded, format, block, senders, 1)
        assert all(same(*pair) for pair in zip(*sums, strict=True)), senders


@pytest.mark.parametrize("decode", [decode_gradients, torch.ops.lowprec.decode_gradients])
def test_wires_apart_are_not_sent_range_by_range(decode):
    wires, sums = [torch.zeros(1, 20, dtype=torch.uint8)] * 3, [torch.zeros(4), torch.zeros(6)]
    decode([torch.cat(wires)], sums, [4, 6], [0, 0], "BF16", 256, 3, 1, True)
    with pytest.raises((ValueError, RuntimeError), match="not sent range by range"):
        decode(wires, sums, [4, 6], [0, 0], "BF16", 256, 3, 1, True)
