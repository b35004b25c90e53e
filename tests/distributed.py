"""Tests over processes: one function on every rank of a layout.

Ranks are forked from the server of tests/launches.py; those that use GPUs are started anew, for CUDA does not survive a
fork. What they return is sent back by torch.save; what they print goes to a file, and into the error of a launch that
fails.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowprec_train.parallel.mesh import Sizes
from tests.launches import fork_server, redirect

GRACE = 10.0  # seconds that the other ranks have to end once one has failed
TAIL = 6000  # characters of a rank's output in an error


def run_distributed(
    fn: Callable[..., Any],
    layout: Sizes | int,
    *arguments: Any,
    backend: str | None = "gloo",
    timeout: float = 400,
    on_gpu: bool = False,
) -> list[Any]:
    """What fn(rank, *arguments) returns on each rank, in rank order.

    fn: a function of a module, with a default process group of `backend`: "gloo", "nccl" (a GPU a rank, which the test
    is skipped without), or None (no group). layout: of the processes, or their number. timeout: in seconds. on_gpu:
    ranks without a group that use a GPU each.

    Raises AssertionError with the error and the output of the rank that failed first, or the ranks that did not end.
    """
    size = layout if isinstance(layout, int) else layout.processes
    on_gpu = on_gpu or backend == "nccl"
    if on_gpu and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    with tempfile.TemporaryDirectory() as directory:
        launch = _Launch(fn, size, arguments, backend, Path(directory), on_gpu=on_gpu)
        launch.wait(timeout, until_failure=True)
        assert not launch.failure, launch.failure
        return launch.values


def free_port() -> int:
    """A port for ranks that meet as those of torchrun do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_until_exit(
    fn: Callable[..., Any], layout: Sizes | int, *arguments: Any, timeout: float = 90
) -> tuple[list[int | None], list[Any]]:
    """(exit codes, results) of ranks that may be killed: None is the result of a rank that did not return. fn joins a
    process group of its own. Arguments and errors otherwise as `run_distributed`.
    """
    size = layout if isinstance(layout, int) else layout.processes
    with tempfile.TemporaryDirectory() as directory:
        launch = _Launch(fn, size, arguments, None, Path(directory))
        launch.wait(timeout, until_failure=False)
        codes = [process.exitcode for process in launch.processes]
        assert None not in codes, f"ranks {[rank for rank, code in enumerate(codes) if code is None]} hang"
        return codes, launch.values


class _Launch:
    """The processes of one launch. failure: what went wrong first; empty as long as nothing has."""

    def __init__(
        self,
        fn: Callable[..., Any],
        size: int,
        arguments: tuple,
        backend: str | None,
        directory: Path,
        *,
        on_gpu: bool = False,
    ) -> None:
        self.values: list[Any] = [None] * size
        self.failure, self._directory, self._pipes = "", directory, {}
        self.processes = []
        for rank in range(size):
            receiver, sender = multiprocessing.Pipe(duplex=False)
            given = (rank, size, backend, str(directory), sender, fn, arguments)
            context = multiprocessing.get_context("spawn") if on_gpu else fork_server()
            self.processes.append(context.Process(target=_rank, args=given, daemon=True))
            self.processes[-1].start()
            sender.close()
            self._pipes[receiver] = rank

    def wait(self, timeout: float, *, until_failure: bool) -> None:
        """Return when all ranks have ended; after `timeout`, or GRACE after a failure, kill those that have not."""
        until = time.monotonic() + timeout
        while self._pipes and (left := until - time.monotonic()) > 0:
            for pipe in wait(list(self._pipes), left):
                assert isinstance(pipe, Connection)
                failed = self._receive(pipe)
                if failed and until_failure:
                    self.failure = self.failure or failed
                    until = min(until, time.monotonic() + GRACE)
        if self._pipes and not self.failure:
            late = sorted(self._pipes.values())
            self.failure = f"ranks {late} have not ended after {timeout:g} s" + "".join(map(self._output, late))
        for process in self.processes:
            process.join(max(0.0, min(GRACE, until - time.monotonic())))
            if process.exitcode is None and until_failure:
                process.kill()
                process.join()

    def _receive(self, pipe: Connection) -> str:
        """Take what a rank has sent; what is wrong with it."""
        rank = self._pipes.pop(pipe)
        try:
            error, value = pipe.recv()
        except EOFError:
            self.processes[rank].join(GRACE)
            return f"rank {rank} ended with exit code {self.processes[rank].exitcode}{self._output(rank)}"
        if error:
            return f"rank {rank} of {len(self.processes)} failed:\n{error}{self._output(rank)}"
        self.values[rank] = torch.load(io.BytesIO(value), weights_only=False)
        return ""

    def _output(self, rank: int) -> str:
        file = self._directory / f"output-{rank}"
        text = file.read_text(errors="replace")[-TAIL:] if file.exists() else ""
        return f"\n--- output of rank {rank} ---\n{text}" if text else ""


def _rank(
    rank: int,
    size: int,
    backend: str | None,
    directory: str,
    pipe: Connection,
    fn: Callable[..., Any],
    arguments: tuple,
) -> None:
    """Entry of a process. It ends without Python's own end, which may wait for a group that has broken."""
    redirect(Path(directory, f"output-{rank}"))
    faulthandler.enable()
    torch.set_num_threads(1)
    error, buffer = "", io.BytesIO()
    try:
        if backend is not None:
            _join(rank, size, backend, f"file://{directory}/store")
        torch.save(fn(rank, *arguments), buffer)
        if backend is not None:
            dist.destroy_process_group()
    except BaseException:
        error = traceback.format_exc()
    pipe.send((error, buffer.getvalue()))
    pipe.close()
    sys.stdout.flush()
    os._exit(1 if error else 0)


def _join(rank: int, size: int, backend: str, store: str) -> None:
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    how = {"init_method": store, "rank": rank, "world_size": size, "timeout": timedelta(minutes=5)}
    dist.init_process_group(backend, device_id=device, **how)
