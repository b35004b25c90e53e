"""Report out of memory in one line: the requested size, the memory in use, and suggestions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lowprec_train.train import cuda_allocator

GIB = 2**30
OF_KERNELS = r'"aten::new_(empty|zeros)".*API call failed'  # torch's stable ABI drops the message and the type
SIGNS = re.compile(rf"out of memory|can't allocate memory|_ALLOC_FAILED|{OF_KERNELS}", re.IGNORECASE)
HOST_SIGNS = re.compile(r"can't allocate memory", re.IGNORECASE)
REQUESTED = re.compile(r"[Tt]ried to allocate (([\d.]+) (\w+))")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}
ADVICE = (
    "Try a smaller micro_batch, model.recompute=norms, selective or full (in some blocks: model.recompute_layers=N), "
    "optimizer states in codes (optim=adamw_coat), "
    "saved activations in codes (precision/saved_activations=coat), or more processes (docs/parallelism.md); "
    "`lowprec estimate` predicts what a configuration needs"
)
FRAGMENTED = "Enough memory is free, but fragmented"


class OutOfMemory(RuntimeError):
    """The device, or the host of a run on a CPU, has no more memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory: by type on a GPU, by its text on a CPU and in libraries. Compiled
    kernels of this package report that an output could not be allocated.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and SIGNS.search(str(error)) is not None


def of_host(error: BaseException) -> bool:
    """Return whether the host ran out of memory, for Python or tensors on the CPU, also in a run on a GPU."""
    return isinstance(error, MemoryError) or HOST_SIGNS.search(str(error)) is not None


@contextmanager
def converted(device: torch.device) -> Iterator[None]:
    """Convert torch's out-of-memory errors to OutOfMemory with one line."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(explained(error, device)) from error


def explained(error: BaseException, device: torch.device) -> str:
    """Return the line: sizes, advice, the notes of the error (`Snapshots` adds some)."""
    requested = REQUESTED.search(str(error))
    device = torch.device("cpu") if of_host(error) else device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"the {device.type.upper()}"
    notes: list[str] = getattr(error, "__notes__", [])
    step = [note for note in notes if note.startswith("in step")]
    size = f": {requested[1]} requested" if requested else ""
    used = _used(device, float(requested[2]) * UNITS.get(requested[3], 1) if requested else 0.0)
    others = [note for note in notes if note not in step]
    return ". ".join([" ".join(["out of memory on", name, *step]) + size, *used, ADVICE, *others])


def _used(device: torch.device, requested: float) -> list[str]:
    """Return the memory in use, and advice if the requested bytes would fit into all free pieces together."""
    if device.type != "cuda":
        return []
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    sizes = (
        f"torch has allocated {allocated / GIB:.1f} GiB of {total / GIB:.1f} and reserves "
        f"{(reserved - allocated) / GIB:.1f} more, {free / GIB:.1f} are free"
    )
    if not 0 < requested <= reserved - allocated + free:
        return [sizes]
    if cuda_allocator.expandable():
        return [sizes, FRAGMENTED]
    return [sizes, f"{FRAGMENTED}: {cuda_allocator.EXPANDABLE} in PYTORCH_ALLOC_CONF may help"]
