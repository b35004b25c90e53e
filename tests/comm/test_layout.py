"""Layouts: blocks within one rank's row and one parameter, and nothing lost on the way there and back."""

import pytest
import torch
from torch import nn

from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.layout import ElementRange, sharded_layout
from lowprec_train.numerics.formats import E4M3
from tests.comm.cases import ROW, VECTORS, ranges, row

SHAPES = {"embedding.weight": (100, 16), "up.weight": (33, 20), "norm.weight": (50,), "temperature": ()}


def test_rows_of_fully_shard():
    """Dimension 0 in equal parts, rounded up; vectors are not coded, nor is what a pattern names."""
    assert ranges(sharded_layout(SHAPES, ranks=4)) == [(400, True), (180, True), (13, False), (1, False)]
    assert ranges(sharded_layout(SHAPES)) == [(1600, True), (660, True), (50, False), (1, False)]
    named = sharded_layout(SHAPES, ranks=4, exclude=["*embedding*"])
    assert ranges(named) == [(400, False), (180, True), (13, False), (1, False)]


def test_buffer_of_fully_shard():
    """The same order and padding as torch.chunk, which is what `fully_shard` copies into its buffer."""
    layers = nn.ModuleDict({"a": nn.Linear(24, 10), "b": nn.Linear(10, 7)})
    shapes = {name: p.shape for name, p in layers.named_parameters()}
    for ranks in (2, 3, 4):
        largest = [max(chunk.numel() for chunk in p.chunk(ranks)) for p in layers.parameters()]
        assert [each.size for each in sharded_layout(shapes, ranks).ranges] == largest


def test_what_is_refused():
    with pytest.raises(ValueError, match="at least one range"):
        sharded_layout({})
    with pytest.raises(ValueError, match="at least one element, not 0"):
        ElementRange(0)


@pytest.mark.parametrize("layout", [ROW, VECTORS, row(300), row(512, 256)])
@pytest.mark.parametrize("block", [32, 256])
def test_columns_and_merge_are_inverse(layout, block):
    rows = torch.randn(3, layout.size)
    coded, plain = (layout.columns(rows, each, block) for each in (True, False))
    assert coded.shape[1] == layout.padded_size(True, block) and coded.shape[1] % block == 0
    assert plain.shape[1] == layout.size - layout.coded_size
    assert torch.equal(layout.merge(coded, plain, block), rows)


def test_no_copy_where_nothing_moves():
    rows = torch.randn(2, 768)
    assert row(512, 256).columns(rows, True, 256) is rows


@pytest.mark.parametrize("layout", [ROW, VECTORS])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_scatter_and_gather_are_inverse(layout, ranks):
    flat = torch.randn(layout.size)
    rows = layout.scatter(flat, ranks, 256)
    assert rows.shape == (ranks, layout.split(ranks, 256).size)
    assert torch.equal(layout.gather(rows, 256), flat)
    assert all(each.size % 256 == 0 for each in layout.split(ranks, 256).ranges if each.coded)


@pytest.mark.parametrize("limit", [256, 512, 1024, 1 << 20])
def test_chunks_cut_between_blocks(limit):
    parts = ROW.chunks(limit)
    assert all(part.size <= limit for part in parts)
    assert sum(part.size for part in parts) == ROW.size
    rows, codec = torch.randn(2, ROW.size), BlockScaledCodec(E4M3)
    whole = codec.decode(codec.encode(rows, ROW), ROW)
    pieces = zip(rows.split([part.size for part in parts], dim=1), parts)
    assert torch.equal(torch.cat([codec.decode(codec.encode(x, part), part) for x, part in pieces], 1), whole)


def test_messages_are_filled():
    """Small spans share a message: few large messages, not one a parameter."""
    layout = row(*[100] * 40)
    assert [part.size for part in layout.chunks(1024)] == [1000, 1000, 1000, 1000]
