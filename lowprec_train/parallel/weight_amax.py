"""Maxima of weights whose parts are on tensor-parallel ranks: all-reduced once per step, not in every GEMM.

    part, or shard of it -> its dtype in the GEMM -> amax      all of the model's -> one all-reduce for each axis

A scale of a whole matrix follows from one number, and the weight does not change between the micro-batches of a step.
Layers read it from `Linear.weight_amax`. Recipes that need a number per row, or that rotate first, communicate when
they quantise. Weights that are gathered as codes have their scales already.
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
    """Of the divided linear layers of `model`. dtype: of its residual stream. groups: of the ranks with other parts of
    a weight, and of those with other shards of this part, if any. all_gather: of its weights.
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
        """Compute the maxima. Call it before the first micro-batch of a step and before an evaluation, after the change
        of weights and recipes, and after `prepare` of the all-gather.
        """
        coded = set() if self._all_gather is None else self._all_gather.coded()
        layers = [layer for layer in self._layers if layer not in coded]
        found = [(layer, amax) for layer in layers if (amax := self._local(layer)) is not None]
        self.finish()
        if found:
            flat = torch.cat([amax.flatten() for _, amax in found])
            for group in self._groups:
                flat = group.all_reduce_max(flat)
            for (layer, amax), reduced in zip(found, flat.unbind(), strict=True):
                layer.weight_amax = reduced.view_as(amax).clone()

    def finish(self) -> None:
        """Clear the maxima, after the last backward pass of a step and before weights change."""
        self.free()

    def free(self) -> None:
        """Clear the maxima."""
        for layer in self._layers:
            layer.weight_amax = None

    def _local(self, layer: Linear) -> Tensor | None:
        """Return the amax of this rank's shard, [1, 1]; None if scales do not follow from one number of the matrix."""
        quantizer, split = layer.recipe.fprop.b, layer.split
        assert split is not None
        if not isinstance(quantizer, Quantizer) or layer.recipe.fprop.rotation is not None:
            return None
        if not quantizer.crosses(split.dim):
            return None
        weight = layer.weight.to_local() if isinstance(layer.weight, DTensor) else layer.weight
        if quantizer.tile != WHOLE and not (quantizer.scale is ScaleRule.NVFP4 and quantizer.outer == WHOLE):
            return None
        weight = weight.detach().to(self._dtype)
        if not weight.numel():
            return weight.new_zeros((1, 1), dtype=torch.float32)
        return quantizer.local_amax(weight, split.dim)
