"""Rows of gradients in symmetric memory: every GPU of a node reads what the others have encoded, over NVLink.

    barrier | encode to this rank's buffer | barrier | decode reads row r of every rank's buffer, on rank r

An all-to-all copies the rows of all ranks, and decode reads the copy. Here decode reads the rows where they were
written, so that two passes over what arrives are one, and no call of NCCL is made. The first barrier waits until the
other ranks have read the rows before these, the second until they have written theirs. Both are kernels, which a CUDA
graph records.

PyTorch's module for this has no public name (decision 0117).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

READ, WRITTEN = 0, 1  # channels of the barriers
MOST_RANKS = 64  # whose addresses the decode kernel takes: WIRES of csrc/cuda/gradients.cu


class PeerRows(Protocol):
    """A buffer on each rank of a group, which all its ranks can read. Every rank calls both functions in turn."""

    def to_write(self, row_bytes: int) -> Tensor:
        """Return this rank's rows, one for each rank, uint8 [ranks, row_bytes]; they may be written by what follows on
        the current stream.
        """

    def to_read(self, row_bytes: int) -> list[Tensor]:
        """Return the row for this rank from every rank, uint8 [1, row_bytes] each, which every rank has written before
        what follows on the current stream.
        """


class SymmetricRows:
    """`PeerRows` of the GPUs of one node.

    size: bytes of a buffer, the same on every rank. group: its ranks, at most `MOST_RANKS`; None: the default group.
    All ranks create it together. Raises RuntimeError if a GPU cannot read the memory of another.
    """

    def __init__(self, size: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        self._ranks, self._rank = group.size(), group.rank()
        self._buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self._buffer, group.group_name)
        self._of_ranks: dict[int, list[Tensor]] = {}

    def to_write(self, row_bytes: int) -> Tensor:
        self._handle.barrier(channel=READ)
        return self._buffer[: self._ranks * row_bytes].view(self._ranks, row_bytes)

    def to_read(self, row_bytes: int) -> list[Tensor]:
        self._handle.barrier(channel=WRITTEN)
        if row_bytes not in self._of_ranks:
            self._of_ranks[row_bytes] = [
                self._handle.get_buffer(each, (1, row_bytes), torch.uint8, self._rank * row_bytes)
                for each in range(self._ranks)
            ]
        return self._of_ranks[row_bytes]
