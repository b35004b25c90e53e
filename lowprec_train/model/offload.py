"""Inputs of blocks in pinned host memory between the forward and the backward pass.

    forward    block i: input -> host on a separate stream; block i + 2 waits until the copy is complete
    backward   at the start of block i: host -> device for block i - 1 on another stream, into one of two buffers

With `recompute=full` a block saves only its input, so at most two saved inputs are on the device. A second backward
pass over one forward pass is refused, because the buffers contain other inputs by then. On a CPU the same copies are
made without streams. The hooks are `torch.autograd.graph.saved_tensors_hooks`. Offloading does not change the bits of a
run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

BUFFERS = 2


class BlockInputs:
    """Inputs of a model's blocks, for each micro-batch in flight; a backward pass covers all blocks."""

    def __init__(self) -> None:
        self._flight = _Flight()
        self._free: dict[Any, list[tuple[Tensor, Any]]] = {}  # of the host, with the event after which it is unused
        self._buffers: list[Tensor] = []
        self._holds: dict[int, tuple[_Flight, int]] = {}  # by buffer: the micro-batch and the block of its input
        self._store: Any = None  # streams, on a GPU
        self._fetch: Any = None

    def saved(self, block: int, x: Tensor) -> AbstractContextManager[Any]:
        """Context for a block that runs on x: if autograd saves x, it is moved to the host."""
        if not torch.is_grad_enabled():
            return nullcontext()
        if block == 0:
            self._flight = _Flight()
        flight, whole = self._flight, (x.untyped_storage().data_ptr(), x.shape, x.dtype)

        def pack(saved: Tensor) -> Tensor | int:
            if (saved.untyped_storage().data_ptr(), saved.shape, saved.dtype) != whole:
                return saved
            if block not in flight.host:
                self._begin_store(flight, block, saved.detach())
            return block

        def unpack(packed: Tensor | int) -> Tensor:
            return self._take(flight, packed) if isinstance(packed, int) else packed

        return saved_tensors_hooks(pack, unpack)

    def _begin_store(self, flight: _Flight, block: int, x: Tensor) -> None:
        free = self._free.setdefault((x.shape, x.dtype), [])
        unused = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda), None
        flight.host[block], last_use = free.pop() if free else unused
        if not x.is_cuda:
            flight.host[block].copy_(x)
            return
        if self._store is None:
            self._store, self._fetch = torch.cuda.Stream(x.device), torch.cuda.Stream(x.device)
        current = torch.cuda.current_stream()
        if block - BUFFERS in flight.stored:
            current.wait_event(flight.stored[block - BUFFERS])
        self._store.wait_stream(current)
        if last_use is not None:
            self._store.wait_event(last_use)
        with torch.cuda.stream(self._store):
            flight.host[block].copy_(x, non_blocking=True)
            flight.stored[block] = self._store.record_event()
        x.record_stream(self._store)

    def _take(self, flight: _Flight, block: int) -> Tensor:
        """Return the input of a block at the start of its backward pass."""
        for wanted in (block, block - 1):
            if wanted in flight.host and wanted not in flight.fetched:
                self._begin_fetch(flight, wanted)
        if self._holds[block % BUFFERS] != (flight, block):
            raise RuntimeError(
                f"model.offload=true: a backward pass needs the input of block {block} a second time, when that of "
                f"block {self._holds[block % BUFFERS][1]} has taken its place on the device: run one backward pass "
                "over a forward pass (no retain_graph=True), or set model.offload=false"
            )
        x, fetched = flight.fetched[block]
        if fetched is not None:
            torch.cuda.current_stream().wait_event(fetched)
        return x

    def _begin_fetch(self, flight: _Flight, block: int) -> None:
        """Fetch into the buffer of block + 2, whose backward pass is complete or queued."""
        host, event = flight.host[block], None
        if self._fetch is None:
            x = host.clone()
        else:
            x = self._buffer(block, host)
            self._fetch.wait_event(flight.stored[block])
            self._fetch.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._fetch):
                x.copy_(host, non_blocking=True)
                event = self._fetch.record_event()
        flight.fetched[block] = x, event
        self._holds[block % BUFFERS] = flight, block
        self._free[host.shape, host.dtype].append((host, event))

    def _buffer(self, block: int, host: Tensor) -> Tensor:
        if not self._buffers or (self._buffers[0].shape, self._buffers[0].dtype) != (host.shape, host.dtype):
            device = self._fetch.device
            self._buffers = [torch.empty(host.shape, dtype=host.dtype, device=device) for _ in range(BUFFERS)]
        return self._buffers[block % BUFFERS].detach()


class _Flight:
    """One micro-batch: for each block its input on the host, the event of that copy, and the fetched input."""

    def __init__(self) -> None:
        self.host: dict[int, Tensor] = {}
        self.stored: dict[int, Any] = {}
        self.fetched: dict[int, tuple[Tensor, Any]] = {}
