"""RMSNorm and LayerNorm with the fused kernels of NVIDIA's apex, with the same parameters and names.

apex's mixed-dtype kernels read the BF16 residual stream and FP32 weights and return FP32, which is rounded once to the
stream's dtype, as in our norms. They run outside of compiled graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train import nvidia
from lowprec_train.model.layers import LayerNorm, RMSNorm


class ApexRMSNorm(RMSNorm):
    """`RMSNorm` with apex's kernel."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return _rms_norm(x_BTD, self.weight, self.eps)


class ApexLayerNorm(LayerNorm):
    """`LayerNorm` with apex's kernel; without a bias, zeros are used."""

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
