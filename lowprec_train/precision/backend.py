"""A library that runs linear layers in place of this project's own GEMMs: what a recipe and a Linear know of it.

A recipe names a backend and says nothing of GEMMs; the layer hands x, its weight and its bias over. Parameters, their
names and their first values stay the layer's own, so a checkpoint of any other recipe fits. What the library remembers
between steps is kept beside the model's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowprec_train.precision.gemm import Path


class BackendLayer(Protocol):
    """One linear layer [n, k], made by a backend."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., k], weight [n, k], bias [n] -> [..., n]; all in one dtype."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What outlives a step, as copies."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` gave."""
        ...


class Backend(Protocol):
    """A value: equal ones run layers alike. Its text says which library, and by which of its recipes."""

    @property
    def path(self) -> Path:
        """How its GEMMs run."""
        ...

    @property
    def stateful(self) -> bool:
        """True where a layer remembers something between steps."""
        ...

    def layer(self, n: int, k: int, *, bias: bool, dtype: torch.dtype) -> BackendLayer:
        """A layer without parameters of its own."""
        ...

    def around_pass(self) -> AbstractContextManager[Any]:
        """What a forward pass of the whole model runs in."""
        ...

    def check(self, name: str, n: int, k: int, tokens: int) -> None:
        """ValueError for a layer whose sizes the library does not take."""
        ...

    @property
    def version(self) -> str:
        """Of the library that is installed."""
        ...

    def settings(self) -> str:
        """Of its recipe, every one, also those that nobody has chosen."""
        ...

    def check_machine(self, device: torch.device) -> None:
        """ValueError where the library, or this device, cannot run it: asked before a run begins."""
        ...


@torch.compiler.disable
def run(layer: Callable[[], BackendLayer], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`layer()(x, weight, bias)` in x's dtype, outside of compiled graphs."""
    return layer()(x, weight.to(x.dtype), bias)


class BackendState:
    """What the backend of a model's layers remembers, as a part of a checkpoint: `<layer>.<name>`, bits as int32.

    Bits, since what is saved must be finite and this need not be: TransformerEngine keeps its scale where an amax is
    infinite, and such an amax stays in its history until it is pushed out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = {name: each.backend_layer() for name, each in model.named_modules() if _run_by_backend(each)}

    def state_dict(self) -> dict[str, Any]:
        return {
            f"{name}.{key}": tensor.view(torch.int32)
            for name, layer in self._layers.items()
            for key, tensor in layer.state().items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, layer in self._layers.items():
            own = {key.removeprefix(f"{name}."): v for key, v in state_dict.items() if key.rpartition(".")[0] == name}
            layer.load_state({key: tensor.view(torch.float32) for key, tensor in own.items()})


def _run_by_backend(module: nn.Module) -> bool:
    recipe = getattr(module, "recipe", None)
    return recipe is not None and recipe.backend is not None
