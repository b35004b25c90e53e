"""Count the bytes of live tensors on devices whose allocator has no statistics: storages are counted when created."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """Counts all storages that operations create while it is active, but not memory within a kernel."""

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
        """Return the bytes of live storages."""
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        return sum(size for _, size in self._alive.values())

    def peak(self) -> int:
        """Return the peak since the last call."""
        found, self._peak = self._peak, self.allocated()
        return found
