"""Interface of a library that runs linear layers in place of this project's GEMMs.

A recipe names the backend; the layer passes x, its weight and its bias. The layer owns the parameters, so checkpoints
of other recipes can be loaded. State of the library between steps is a separate part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowprec_train.precision.gemm_path import Path


class BackendLayer(Protocol):
    """A backend's implementation of one linear layer [n, k]."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., k], weight [n, k], bias [n] -> [..., n]; all in one dtype."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Copies of the tensors that persist between steps."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state` returned."""
        ...


class Backend(Protocol):
    """A library and its settings, as a value. `str()` names the library and its recipe."""

    @property
    def path(self) -> Path:
        """The path of its GEMMs."""
        ...

    @property
    def stateful(self) -> bool:
        """True if layers have state between steps."""
        ...

    def layer(self, n: int, k: int, *, bias: bool, dtype: torch.dtype) -> BackendLayer:
        """Creates a layer; the weight and bias are passed at each call."""
        ...

    def around_pass(self) -> AbstractContextManager[Any]:
        """Context manager for a forward pass of the whole model."""
        ...

    def check(self, name: str, n: int, k: int, tokens: int) -> None:
        """Raises ValueError if the library does not support the layer's sizes."""
        ...

    @property
    def version(self) -> str:
        """Version of the installed library."""
        ...

    def settings(self) -> str:
        """All settings of the library's recipe, including defaults."""
        ...

    def check_machine(self, device: torch.device) -> None:
        """Raises ValueError if this library or device cannot run it. Called before a run begins."""
        ...


@torch.compiler.disable
def run(layer: Callable[[], BackendLayer], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`layer()(x, weight, bias)` in x's dtype, outside of compiled graphs."""
    return layer()(x, weight.to(x.dtype), bias)


class BackendState:
    """State of the backend's layers in a checkpoint: `<layer>.<name>`, FP32 bits as int32.

    Checkpoints must be finite, but an amax history of TransformerEngine may contain infinities; hence bits.
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
