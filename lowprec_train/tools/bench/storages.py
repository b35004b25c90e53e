"""Bytes of the tensors that live, where no allocator can be asked: storages are counted as they are made."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """Of all storages that operations have made since it was entered. What a kernel takes and frees is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else (result,)
        for tensor in (each for each in made if isinstance(each, Tensor) and not each.is_meta):
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            self._alive.setdefault(reference.cdata, (reference, storage.nbytes()))
        self._peak = max(self._peak, self.allocated())
        return result

    def allocated(self) -> int:
        """Bytes now."""
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        return sum(size for _, size in self._alive.values())

    def peak(self) -> int:
        """The most since the last call."""
        found, self._peak = self._peak, self.allocated()
        return found
