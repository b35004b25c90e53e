"""Optimizer states in pinned host memory, copied to the device for the update of their parameter and back.

    fetch stream     host -> slot n                  waits until slot n was stored
    update           slot n, in place                waits until slot n was fetched
    store stream     slot n -> host                  waits until the update is done

Slots are a ring of device buffers that are allocated once. While one parameter is updated, the next ones are fetched
and earlier ones are stored, without host synchronization. States are fetched in the order of the previous step. On a
CPU the same copies are made without streams. Offloading does not change the bits of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SLOTS = 3  # one is updated, one is fetched, one is stored
ALIGNED = 256  # bytes


class HostStates:
    """States of the parameters that `take` was called for, then `ready`: those tensors with the elements of a matrix.

    The tensors of a state are in host memory, where checkpoints read and write them; inside `there` they are on the
    device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, device.type == "cuda"
        self._host: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._states: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._stored: dict[nn.Parameter, Any] = {}
        self._slots: list[_Slot] = []
        self._fetch, self._store = (torch.cuda.Stream(device) if self._streams else None for _ in range(2))
        self._order: list[nn.Parameter] = []  # of the last step's updates
        self._now: list[nn.Parameter] = []
        self._next = 0

    def take(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
        """Move a state to the host."""
        host = {}
        for name, part in state.items():
            if part.ndim >= 2 and part.numel() > 1:
                host[name] = torch.empty(part.shape, dtype=part.dtype, pin_memory=self._streams)
                host[name].copy_(part)
        if host:
            state.update(host)
            self._host[parameter], self._states[parameter] = host, state

    def ready(self) -> None:
        """Allocate the slots. Raises ValueError if no state was moved."""
        sizes = [sum(map(_room, host.values())) for host in self._host.values()]
        if not sizes:
            raise ValueError("optim.offload=true, and no parameter has a state that could be in host memory")
        buffers = (torch.empty(max(sizes), dtype=torch.uint8, device=self._device) for _ in range(SLOTS))
        self._slots = [_Slot(buffer) for buffer in buffers]
        if self._fetch is not None:
            self._fetch.wait_stream(torch.cuda.current_stream())  # which may still use the memory of the slots

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._host

    def begin(self) -> None:
        """Start to fetch the first states. Call it before a step."""
        self._order, self._now = self._now or self._order, []
        self._fetch_ahead(self._order)

    @contextmanager
    def there(self, parameter: nn.Parameter) -> Iterator[None]:
        """Context in which the states of `parameter` are on the device, for an in-place update."""
        place = len(self._now)
        if place >= len(self._order) or self._order[place] is not parameter:
            self._order = []  # another order than the step before: nothing is fetched ahead until the next one
        self._now.append(parameter)
        slot = self._fetched(parameter)
        host, state = self._host[parameter], self._states[parameter]
        if self._streams:
            torch.cuda.current_stream().wait_event(slot.fetched)
        state.update(slot.views(host))
        yield
        parts = {name: state[name] for name in host}
        state.update(host)
        self._begin_store(parameter, slot, parts)
        slot.holds = None
        self._fetch_ahead(self._order[len(self._now) :])

    def synchronize(self) -> None:
        """Wait for all stores and drop prefetched states. Call it before host tensors are read or written."""
        if self._store is not None:
            self._store.synchronize()
        for slot in self._slots:
            slot.holds = None

    def _fetched(self, parameter: nn.Parameter) -> _Slot:
        for slot in self._slots:
            if slot.holds is parameter:
                return slot
        slot = next((each for each in self._ring() if each.holds is None), self._slots[self._next])
        self._begin_fetch(parameter, slot)
        return slot

    def _fetch_ahead(self, coming: Sequence[nn.Parameter]) -> None:
        held = [slot.holds for slot in self._slots]
        for parameter in coming[: SLOTS - 1]:
            if all(parameter is not each for each in held):
                free = next((each for each in self._ring() if each.holds is None), None)
                if free is None:
                    return
                self._begin_fetch(parameter, free)

    def _ring(self) -> list[_Slot]:
        """Return the slots, the one that was stored first in front."""
        return self._slots[self._next :] + self._slots[: self._next]

    def _begin_fetch(self, parameter: nn.Parameter, slot: _Slot) -> None:
        self._next = (self._slots.index(slot) + 1) % SLOTS
        slot.holds, host = parameter, self._host[parameter]
        with torch.cuda.stream(self._fetch):
            if self._fetch is not None:
                for stored in (slot.stored, self._stored.get(parameter)):
                    if stored is not None:
                        self._fetch.wait_event(stored)
            for name, part in slot.views(host).items():
                part.copy_(host[name], non_blocking=True)
            if self._fetch is not None:
                slot.fetched = self._fetch.record_event()

    def _begin_store(self, parameter: nn.Parameter, slot: _Slot, parts: Mapping[str, Tensor]) -> None:
        if self._store is not None:
            self._store.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._store):
            for name, part in parts.items():
                self._host[parameter][name].copy_(part, non_blocking=True)
            if self._store is not None:
                slot.stored = self._stored[parameter] = self._store.record_event()


class _Slot:
    """A device buffer and the parameter whose states it contains."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self.holds: nn.Parameter | None = None
        self.fetched: Any = None  # events, on a GPU
        self.stored: Any = None

    def views(self, host: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return views of the buffer with the shapes and dtypes of `host`."""
        found, begin = {}, 0
        for name, part in host.items():
            flat = self._buffer[begin : begin + part.numel() * part.element_size()]
            found[name] = flat.view(part.dtype).view(part.shape)
            begin += _room(part)
        return found


def _room(part: Tensor) -> int:
    return math.ceil(part.numel() * part.element_size() / ALIGNED) * ALIGNED
