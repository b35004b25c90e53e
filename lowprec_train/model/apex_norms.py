"""RMSNorm and LayerNorm by the fused kernels of NVIDIA's apex: the same parameters, under the same names.

apex's kernels of mixed dtypes take the BF16 stream and FP32 weights and return FP32, rounded once to the stream's dtype
as our own norms are. They run outside of compiled graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train import nvidia
from lowprec_train.model.layers import LayerNorm, RMSNorm


class ApexRMSNorm(RMSNorm):
    """`RMSNorm` by apex."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return _rms_norm(x_BTD, self.weight, self.eps)


class ApexLayerNorm(LayerNorm):
    """`LayerNorm` by apex, with a bias of zeros where it has none."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        bias = torch.zeros_like(self.weight) if self.bias is None else self.bias
        return _layer_norm(x_BTD, self.weight, bias, self.eps)


@torch.compiler.disable
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y: Tensor = nvidia.apex_norms().mixed_dtype_fused_rms_norm_affine(x, weight, weight.shape, eps)
    return y.to(x.dtype)


@torch.compiler.disable
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    y: Tensor = nvidia.apex_norms().mixed_dtype_fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
    return y.to(x.dtype)
