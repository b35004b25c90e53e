"""The ranks of a reduction by node: bytes by kind of link, and sums inside each node before data leaves it.

    rank r, with `node` ranks per node: number r % node on node r // node

    reduce_scatter   rows for the same-numbered ranks of all nodes | exchange inside the node | decode and sum
                     one more encode                               | exchange between nodes   | decode and sum

A flat exchange sends `ranks - node` rows through a GPU's NIC; this one sends `ranks / node - 1`. That is less than a
GPU's share of a ring, 1 / node of `ranks - 1` rows. It rounds twice, as ZeRO++ does (arXiv 2306.10209, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist


class Links(NamedTuple):
    """Bytes that a rank sends inside its node (nvlink) and to other nodes (nic)."""

    nvlink: int
    nic: int

    def plus(self, other: Links) -> Links:
        """Return the sums of both."""
        return Links(self.nvlink + other.nvlink, self.nic + other.nic)


def links(row: int, ranks: int, node: int, *, flat: bool = False) -> Links:
    """Return the bytes for rows of `row` bytes to or from each of the other ranks: inside the node first, or directly
    if `flat`. Raises ValueError if `node` does not divide the ranks.
    """
    if node < 1 or ranks % node:
        raise ValueError(f"nodes of {node} ranks do not divide {ranks} ranks")
    nic = (ranks - node if flat else ranks // node - 1) * row
    return Links((ranks - 1) * row - nic, nic)


def ring(row: int, ranks: int, node: int) -> Links:
    """Return a rank's bytes in a library's ring of all ranks: the GPUs of a node share what leaves it."""
    total = (ranks - 1) * row
    nic = total // node if node < ranks else 0
    return Links(total - nic, nic)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The ranks of a process group, with `node` consecutive ranks per node.

    whole: the group; None: the default group. inside, across: the groups of this rank's node, and of the ranks with its
    number on all nodes. They are set if there are several nodes of several ranks: sums are made inside nodes first.
    """

    whole: dist.ProcessGroup | None
    node: int
    inside: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None

    @classmethod
    def one(cls, group: dist.ProcessGroup | None) -> Nodes:
        """Return a group whose ranks are on one node."""
        return cls(whole=group, node=dist.get_world_size(group))

    @property
    def ranks(self) -> int:
        """Number of ranks of the whole group."""
        return dist.get_world_size(self.whole)

    @property
    def count(self) -> int:
        """Number of nodes."""
        return self.ranks // self.node
