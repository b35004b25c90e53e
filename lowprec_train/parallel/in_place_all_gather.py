"""All-gathers of a unit's weights in place, into the tensors that the GEMMs read (decision 0102).

    FSDP2   shards -> copied to one buffer -> all-gather -> copied to each weight, on the stream of the GEMMs
    here    shards                         -> all-gather -> each weight

FSDP2 says when a unit is gathered and freed. Its own buffers have a few bytes, which it needs to be there. The weights
are written on the stream of the all-gather, which is up to a unit ahead of the stream that reads them, so their memory
is not freed with the unit: `GatherMemory` frees it for the next all-gather but one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lowprec_train.comm.process_group import all_gather_each

UNITS = 2  # whose weights have memory, besides units that stay gathered: one is read, the next is gathered
FILLER_BYTES = 16  # FSDP2's buffer for a unit of weights; parameters after it stay aligned


class InPlaceWeight(Protocol):
    """A weight that is gathered in place."""

    def gather_buffers(self, ranks: int) -> list[tuple[Tensor, Tensor]]:
        """Allocate the weight; return (gathered, shard) of each of its tensors."""

    def unpack(self) -> None:
        """Unpack codes after the all-gather, on its stream."""

    def free(self) -> None:
        """Free the weight's memory."""


class UnitAllGather:
    """The all-gather of one unit, for `FSDPModule.set_custom_all_gather`. memory: one for all units of a model. whole:
    whether the unit has no other parameters. stays: whether a forward pass leaves it gathered.
    """

    def __init__(
        self, weights: Sequence[InPlaceWeight], memory: GatherMemory, *, whole: bool = True, stays: bool = False
    ) -> None:
        self._weights, self._memory, self._whole, self.stays = weights, memory, whole, stays

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate FSDP2's own buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather the weights, and FSDP2's buffer if the unit has other parameters, in one collective."""
        self._memory.acquire(self, input_tensor.device)
        pairs = [pair for weight in self._weights for pair in weight.gather_buffers(group.size())]
        if not self._whole:
            pairs.append((output_tensor, input_tensor))
        all_gather_each(pairs, group)
        for weight in self._weights:
            weight.unpack()

    def release(self, device: torch.device) -> None:
        """Call when FSDP2 frees the unit, on the stream that has read it."""
        self._memory.release(self, device)

    def free(self) -> None:
        for weight in self._weights:
            weight.free()


class GatherMemory:
    """The gathered units of a model, and those that have been read but not freed, the oldest first, with an event."""

    def __init__(self) -> None:
        self._gathered: set[UnitAllGather] = set()
        self._read: dict[UnitAllGather, Any] = {}
        self._events: list[Any] = []  # of units that were freed by `clear`

    def acquire(self, unit: UnitAllGather, device: torch.device) -> None:
        """Call on the stream of the all-gather, which waits for the readers of the memory that it gets."""
        events, self._events = self._events, []
        if unit in self._read:
            events.append(self._read.pop(unit))
        passing = sum(not each.stays for each in self._gathered)
        while self._read and passing + len(self._read) >= UNITS:
            oldest = next(iter(self._read))
            events.append(self._read.pop(oldest))
            oldest.free()
        if device.type == "cuda":
            for event in events:
                torch.cuda.current_stream(device).wait_event(event)
        self._gathered.add(unit)

    def release(self, unit: UnitAllGather, device: torch.device) -> None:
        """Call on the stream that has read the unit."""
        if unit in self._gathered:
            self._gathered.remove(unit)
            self._read[unit] = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def clear(self) -> None:
        """Free what has been read."""
        for unit in self._read:
            unit.free()
        self._events += self._read.values()
        self._read.clear()

    def forget_events(self) -> None:
        """Let no all-gather wait for what was read until now. Call it when the device has finished."""
        self.clear()
        self._events.clear()


def read_by_current_stream(tensors: Sequence[Tensor]) -> None:
    """Keep the memory of tensors that another stream has made until the current stream has read them."""
    if on_gpu := [tensor for tensor in tensors if tensor.is_cuda]:
        stream = torch.cuda.current_stream()  # slow: it is asked for once
        for tensor in on_gpu:
            tensor.record_stream(stream)
