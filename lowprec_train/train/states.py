"""The tensors of a run in a checkpoint, with names and whole shapes that do not depend on the layout of processes.

    model        <fqn>                 a parameter or a persistent buffer
    optimizer    <fqn>.exp_avg, ...    the optimizer's states of a parameter

A sharded tensor becomes a DTensor over the whole mesh that shares the memory of the local shard. A checkpoint of one
layout can therefore be loaded with another, and loading fills the live shards in place. States along a parameter are
sharded like it (codes with its shape, group scales with its rows and groups). A state with one number per matrix is the
same on every process and stays a plain tensor. The codec says which states lie along the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowprec_train.optim.optimizer import CodedOptimizer
from lowprec_train.parallel.placement import Placements


class ModelState:
    """A model's parameters and persistent buffers.

    placements: of the parameters, if they are sharded. optimizer: gives the dtype to which their values are rounded.
    FSDP2 may keep BF16 values in FP32; a checkpoint has them in BF16, as with every other layout.
    """

    def __init__(
        self, model: nn.Module, placements: Placements | None = None, optimizer: CodedOptimizer | None = None
    ) -> None:
        self._model, self._placements, self._optimizer = model, placements, optimizer

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        names = _parameter_names(self._model)
        return {
            name: self._placed(names[tensor], tensor) if tensor in names else tensor.detach()
            for name, tensor in self._model.state_dict(keep_vars=True).items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Finish a load: DCP has filled the live tensors in place; tensors of another dtype are copied."""
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if tensor.dtype != state_dict[name].dtype:
                _local(tensor).copy_(_local(state_dict[name]))
            else:
                _assert_live(name, tensor, state_dict[name])

    def _placed(self, name: str, parameter: nn.Parameter) -> Tensor:
        if self._placements is None:
            return parameter.detach()
        dtype = parameter.dtype if self._optimizer is None else self._optimizer.value_dtype(parameter)
        return self._placements.whole(name, _local(parameter).to(dtype))


class OptimizerState:
    """The tensors of an optimizer as `<parameter fqn>.<name>`. The optimizer must have its states before a load."""

    def __init__(self, model: nn.Module, optimizer: CodedOptimizer, placements: Placements | None = None) -> None:
        self._model, self._optimizer, self._placements = model, optimizer, placements

    def state_dict(self) -> dict[str, Any]:
        self._optimizer.synchronize()
        names = _parameter_names(self._model)
        flat: dict[str, Tensor] = {}
        for parameter, state in self._optimizer.state.items():
            assert isinstance(parameter, nn.Parameter)
            placed = self._placed(names[parameter], parameter, state)
            flat |= {f"{names[parameter]}.{key}": tensor for key, tensor in placed.items()}
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that DCP has filled the live tensors in place."""
        for name, tensor in self.state_dict().items():
            _assert_live(name, tensor, state_dict[name])

    def _placed(self, name: str, parameter: nn.Parameter, state: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._placements is None:
            return state
        along = self._optimizer.along(parameter, self._placements.parameters[name].shape)
        return {
            key: self._placements.whole(name, tensor, along[key]) if key in along else tensor
            for key, tensor in state.items()
        }


def _parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Return the first name of every parameter. Uses state_dict: there FSDP2 has the shards, even if a forward pass
    has left the unsharded matrices in their place.
    """
    named = model.state_dict(keep_vars=True).items()
    return {tensor: name for name, tensor in reversed(list(named)) if isinstance(tensor, nn.Parameter)}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _assert_live(name: str, live: Tensor, loaded: Tensor) -> None:
    assert loaded.dtype == live.dtype and _local(loaded).data_ptr() == _local(live).data_ptr(), name
