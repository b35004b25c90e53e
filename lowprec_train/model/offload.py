"""Inputs of blocks in pinned host memory between the forward and the backward pass.

    forward    block i: input -> host on a stream of its own; block i + 2 waits until it is there
    backward   block i begins: host -> device for block i - 1 on another stream, into one of two buffers

With `recompute=full` a block saves its input alone, so no more than two of them are on the device, beside those that
compute. On a CPU the same copies are made without streams. The hooks are `torch.autograd.graph.saved_tensors_hooks`; a
copy is a copy: offloaded or not, a run has the same bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

BUFFERS = 2


class BlockInputs:
    """The inputs of a model's blocks, of one micro-batch at a time."""

    def __init__(self) -> None:
        self._host: dict[int, Tensor] = {}
        self._buffers: list[Tensor] = []
        self._sent: dict[int, Any] = {}  # by block; the event after which its input is on the host
        self._fetched: dict[int, tuple[Tensor, Any]] = {}
        self._store: Any = None  # streams, on a GPU
        self._fetch: Any = None

    def saved(self, block: int, x: Tensor) -> AbstractContextManager[Any]:
        """While a block runs on x: what autograd saves of x goes to the host."""
        if not torch.is_grad_enabled():
            return nullcontext()
        if block == 0:
            self._sent, self._fetched = {}, {}
        whole = (x.untyped_storage().data_ptr(), x.shape, x.dtype)

        def pack(saved: Tensor) -> Tensor | int:
            if (saved.untyped_storage().data_ptr(), saved.shape, saved.dtype) != whole:
                return saved
            if block not in self._sent:
                self._send(block, saved)
            return block

        def unpack(packed: Tensor | int) -> Tensor:
            return self._take(packed) if isinstance(packed, int) else packed

        return saved_tensors_hooks(pack, unpack)

    def _send(self, block: int, x: Tensor) -> None:
        on_gpu, host = x.is_cuda, self._host.get(block)
        if host is None or (host.shape, host.dtype) != (x.shape, x.dtype):
            host = self._host[block] = torch.empty(x.shape, dtype=x.dtype, pin_memory=on_gpu)
        if not on_gpu:
            self._sent[block] = host.copy_(x.detach())
            return
        if self._store is None:
            self._store, self._fetch = torch.cuda.Stream(x.device), torch.cuda.Stream(x.device)
        current = torch.cuda.current_stream()
        if block - BUFFERS in self._sent:
            current.wait_event(self._sent[block - BUFFERS])
        self._store.wait_stream(current)
        with torch.cuda.stream(self._store):
            host.copy_(x.detach(), non_blocking=True)
            self._sent[block] = self._store.record_event()
        x.record_stream(self._store)

    def _take(self, block: int) -> Tensor:
        """The input of a block, whose backward pass begins."""
        if block not in self._fetched:
            self._begin_fetch(block)
        x, fetched = self._fetched[block]
        if fetched is not None:
            torch.cuda.current_stream().wait_event(fetched)
        if block - 1 in self._sent and block - 1 not in self._fetched:
            self._begin_fetch(block - 1)
        return x

    def _begin_fetch(self, block: int) -> None:
        """Into the buffer of block + 2, whose backward pass is over or queued."""
        host = self._host[block]
        if self._fetch is None:
            self._fetched[block] = host.clone(), None
            return
        if not self._buffers or (self._buffers[0].shape, self._buffers[0].dtype) != (host.shape, host.dtype):
            device = self._fetch.device
            self._buffers = [torch.empty(host.shape, dtype=host.dtype, device=device) for _ in range(BUFFERS)]
        buffer = self._buffers[block % BUFFERS].detach()
        self._fetch.wait_event(self._sent[block])
        self._fetch.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._fetch):
            buffer.copy_(host, non_blocking=True)
            self._fetched[block] = buffer, self._fetch.record_event()
