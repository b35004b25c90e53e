"""Activation quantisation of an exported model: `input_activations` of compressed-tensors.

    none      inputs are not quantised (W8A16, W4A16)
    dynamic   the inference engine computes FP32 scales
    mx        E4M3 in groups of 32; the inference engine computes power-of-two scales
    static    calibrated scales in the checkpoint: E4M3 with one power of two per tensor, or NVFP4's 1 x 16 groups with
              one FP32 scale per tensor

E4M3 rounds a value to the same number under every power-of-two scale that keeps it in the normal range. So `mx` and
`static` reproduce training's values if training's scales are powers of two, whatever their tiles; only values below
2**-13 of a tile's amax (E4M3 subnormals) may differ. NVFP4 reproduces training's codes where the amax of a batch is
the calibrated one, since training computes the FP32 scale of every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowprec_train.numerics.formats import E2M1, E4M3, NEAREST
from lowprec_train.numerics.quantizer import ROW, WHOLE, Quantizer, ScaleRule
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.tools.huggingface.shards import TensorSpec

Json = dict[str, Any]
NONE, DYNAMIC, MX, STATIC = "none", "dynamic", "mx", "static"
HEADROOM = 2.0  # factor of static scales over the calibrated amax; a power of two does not change rounding


def args(bits: int, strategy: str, *, dynamic: bool | str = False, **more: Any) -> Json:
    """Return QuantizationArgs of compressed-tensors."""
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": dynamic, **more}


E4M3_GROUPS = args(8, "group", dynamic=True, group_size=32, scale_dtype="torch.uint8")
E4M3_TENSOR = args(8, "tensor")
E2M1_GROUPS = args(4, "tensor_group", dynamic="local", group_size=16, scale_dtype="torch.float8_e4m3fn")


@dataclass(frozen=True, kw_only=True)
class InputQuantization:
    """mode: NONE, DYNAMIC, MX or STATIC. args: QuantizationArgs; None for NONE. amax: linear layer of this package ->
    calibrated amax of its input, for STATIC only.
    """

    mode: str
    args: Mapping[str, Any] | None = None
    amax: Mapping[str, float] = field(default_factory=dict)

    @property
    def _two_levels(self) -> bool:
        return self.args is not None and self.args["strategy"] == "tensor_group"

    def check(self, module: str, k: int) -> None:
        """Raise ValueError if the group size does not divide the k input features of a Hugging Face module."""
        group = 1 if self.args is None else self.args.get("group_size", 1)
        if k % group:
            raise ValueError(
                f"{module} has {k} input features, which groups of {group} do not divide, so --activations {self.mode} "
                "does not fit this model; --activations none fits any model"
            )

    def specs(self, module: str) -> list[TensorSpec]:
        """Return the tensors of a Hugging Face module's input scale: one for STATIC, else none."""
        if self.mode != STATIC:
            return []
        name = "input_global_scale" if self._two_levels else "input_scale"
        return [TensorSpec(name=f"{module}.{name}", shape=torch.Size((1,)), dtype=torch.float32)]

    def tensors(self, linear: str, module: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the (name, value) pairs of `specs`. linear: the layer of this package that becomes `module`."""
        for spec in self.specs(module):
            amax = torch.tensor([self.amax[linear] or 1.0])
            quantizer = Quantizer(E2M1, scale=ScaleRule.NVFP4, tile=(1, 16)) if self._two_levels else E4M3_POW2
            quantized = quantizer(amax.expand(1, 16).contiguous())
            scale = quantized.parts["tensor"] if self._two_levels else quantized.scale
            yield spec.name, (1 / (HEADROOM * scale) if self._two_levels else HEADROOM * scale).view(1)

    def difference(self, recipe: LinearRecipe) -> str | None:
        """Return how training rounds inputs if inference rounds them to other values; None if values are the same."""
        gemm = recipe.fprop
        if gemm.a is None:
            return None if self.mode == NONE else "inputs are not quantised"
        rounded = f"inputs are quantised to {gemm.a}"
        if recipe.mean_split:
            return f"{rounded} after their mean over the tokens is subtracted"
        if gemm.outliers is not None:
            return f"{rounded}, without outliers ({gemm.outliers.quantile} {gemm.outliers.variant})"
        return None if self._reproduces(gemm.a) else rounded

    def _reproduces(self, quantizer: Quantizer) -> bool:
        if quantizer.rounding is not NEAREST or quantizer.range_share != 1 or self.args is None:
            return False
        if quantizer.format is not E4M3 or self._two_levels:  # training computes NVFP4's FP32 scale for every batch
            return False
        if self.mode == STATIC or "scale_dtype" in self.args:
            return quantizer.scale in (ScaleRule.POW2, ScaleRule.E8M0_CEIL)
        tile = {"tensor": WHOLE, "token": ROW, "group": (1, self.args.get("group_size"))}[self.args["strategy"]]
        return quantizer.scale is ScaleRule.FP32 and quantizer.tile == tile

    @property
    def summary(self) -> str:
        """Text about how inputs are quantised, which export prints."""
        if self.args is None:
            return "inputs are not quantised"
        scales = {
            DYNAMIC: "scales computed by the inference engine",
            MX: "power-of-two scales of groups of 32",
            STATIC: "calibrated scales",
        }[self.mode]
        return f"inputs in {'NVFP4' if self._two_levels else 'E4M3'} with {scales}"


E4M3_POW2 = Quantizer(E4M3, tile=(1, -1), scale=ScaleRule.POW2)
