"""The ranks of a reduction by node: which links its bytes take, and sums inside of a node before any leaves it.

    rank r of nodes of `node` ranks: number r % node on node r // node

    reduce_scatter   rows for the same-numbered ranks of all nodes | exchange inside the node | decode and sum
                     one more encode                               | exchange between nodes   | decode and sum

A flat exchange sends `ranks - node` rows through a GPU's NIC, this one `ranks / node - 1`: less than the 1 / node of
`ranks - 1` rows that is a GPU's share of a ring. It rounds twice, as ZeRO++ does (arXiv 2306.10209, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist


class Links(NamedTuple):
    """Bytes that a rank sends to ranks of its node, and to others."""

    nvlink: int
    nic: int

    def plus(self, other: Links) -> Links:
        """The sums of both."""
        return Links(self.nvlink + other.nvlink, self.nic + other.nic)


def links(row: int, ranks: int, node: int, *, flat: bool = False) -> Links:
    """Of rows of `row` bytes that go to, or come from, each of the other ranks, inside the node first, or all of them
    directly where `flat`. Raises ValueError where nodes of `node` ranks do not divide the ranks.
    """
    if node < 1 or ranks % node:
        raise ValueError(f"nodes of {node} ranks do not divide {ranks} ranks")
    nic = (ranks - node if flat else ranks // node - 1) * row
    return Links((ranks - 1) * row - nic, nic)


def ring(row: int, ranks: int, node: int) -> Links:
    """Of a library's ring of all ranks: what leaves a node goes through one GPU of it, in turns."""
    total = (ranks - 1) * row
    nic = total // node if node < ranks else 0
    return Links(total - nic, nic)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The ranks of a process group, `node` neighbours a node.

    whole: the group; None: the default one. inside, across: of this rank's node, and of the ranks of its number on all
    nodes, where there are several of several ranks; then sums are made inside of nodes first.
    """

    whole: dist.ProcessGroup | None
    node: int
    inside: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None

    @classmethod
    def one(cls, group: dist.ProcessGroup | None) -> Nodes:
        """A group whose ranks are on one node."""
        return cls(whole=group, node=dist.get_world_size(group))

    @property
    def ranks(self) -> int:
        """Of the whole group."""
        return dist.get_world_size(self.whole)

    @property
    def count(self) -> int:
        """Of nodes."""
        return self.ranks // self.node
