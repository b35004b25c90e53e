"""Layouts: blocks within one rank's row and one parameter, and nothing lost on the way there and back."""

import pytest
import torch
from torch import nn

from lowprec_train.comm.layout import ElementRange, sharded_layout
from tests.comm.cases import ROW, VECTORS, ranges

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


@pytest.mark.parametrize("layout", [ROW, VECTORS])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_parts_hold_every_range_in_whole_blocks(layout, ranks):
    for part, whole in zip(layout.split(ranks, 256).ranges, layout.ranges, strict=True):
        assert part.coded == whole.coded and ranks * part.size >= whole.size
        assert part.size % 256 == 0 if part.coded else part.size == -(-whole.size // ranks)


def test_pieces_are_views():
    rows = torch.randn(3, ROW.size)
    assert torch.equal(torch.cat(ROW.pieces(rows), 1), rows)
    assert all(piece.data_ptr() >= rows.data_ptr() for piece in ROW.pieces(rows))
