"""Maxima of weights that tensor-parallel ranks hold parts of: agreed once a step, not at every product.

    part, or shard of it -> its dtype in the GEMM -> amax      all of the model's -> one all-reduce for each axis

A scale of a whole matrix, cut or not, follows from one number, and the weight does not change between the micro-batches
of a step. Layers read it from `Linear.weight_amax`. What needs a number a row, and what is rotated first, asks the
other ranks as it is rounded; weights that arrive as codes have their scales already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowprec_train.group import Group
from lowprec_train.numerics.quantizer import WHOLE, Quantizer, ScaleRule
from lowprec_train.parallel.quantized_all_gather import QuantizedAllGather
from lowprec_train.precision.linear import Linear


class WeightAmax:
    """Of the linear layers of `model` that are cut. dtype: of its residual stream. groups: the ranks that hold other
    parts of a weight, and other shards of this part where there are any. all_gather: of its weights.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype,
        groups: Sequence[Group],
        all_gather: QuantizedAllGather | None = None,
    ) -> None:
        self._layers = [each for each in model.modules() if isinstance(each, Linear) and each.split is not None]
        self._dtype, self._groups, self._all_gather = dtype, groups, all_gather

    @torch.no_grad()
    def prepare(self) -> None:
        """Before the first micro-batch of a step and before an evaluation, with the weights and recipes of both, after
        that of the all-gather.
        """
        coded = set() if self._all_gather is None else self._all_gather.coded()
        layers = [layer for layer in self._layers if layer not in coded]
        found = [(layer, amax) for layer in layers if (amax := self._local(layer)) is not None]
        self.finish()
        if found:
            flat = torch.cat([amax.flatten() for _, amax in found])
            for group in self._groups:
                flat = group.all_reduce_max(flat)
            for (layer, amax), agreed in zip(found, flat.unbind(), strict=True):
                layer.weight_amax = agreed.view_as(amax).clone()

    def finish(self) -> None:
        """After the last backward pass of a step, before weights change."""
        for layer in self._layers:
            layer.weight_amax = None

    def _local(self, layer: Linear) -> Tensor | None:
        """[1, 1], of this rank's shard; None where no number of the whole matrix makes its scales."""
        how, split = layer.recipe.fprop.b, layer.split
        assert split is not None
        if not isinstance(how, Quantizer) or layer.recipe.fprop.rotation is not None or not how.crosses(split.dim):
            return None
        weight = layer.weight.to_local() if isinstance(layer.weight, DTensor) else layer.weight
        if how.tile != WHOLE and not (how.scale is ScaleRule.NVFP4 and how.outer == WHOLE):
            return None
        weight = weight.detach().to(self._dtype)
        return how.local_amax(weight, split.dim) if weight.numel() else weight.new_zeros((1, 1), dtype=torch.float32)
