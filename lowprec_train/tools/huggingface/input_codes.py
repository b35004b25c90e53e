"""How a reader rounds the inputs of layers whose weights are codes: `input_activations` of compressed-tensors.

    none      not at all (W8A16, W4A16)
    dynamic   as the reader's kernels do, under FP32 scales that it takes by itself
    mx        E4M3 in groups of 32 under powers of two that the reader takes by itself
    static    under scales that are written: E4M3 under one power of two, or NVFP4's 1 x 16 under one FP32 scale

E4M3 codes are floating-point numbers: under any power of two that neither saturates nor leaves the normal range, a
value is rounded to the same number. So `mx` and `static` give the values of training wherever training's scales are
powers of two, whatever their tiles; only values below 2**-13 of a tile's maximum, E4M3's subnormal numbers, may differ.
NVFP4 has the codes of training where a batch has the maximum of the calibration, and codes under another FP32 scale
elsewhere: training takes that scale of every batch.
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
HEADROOM = 2.0  # of static scales over the calibration's maximum: a power of two changes no rounding


def args(bits: int, strategy: str, *, dynamic: bool | str = False, **more: Any) -> Json:
    """QuantizationArgs of compressed-tensors."""
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": dynamic, **more}


E4M3_GROUPS = args(8, "group", dynamic=True, group_size=32, scale_dtype="torch.uint8")
E4M3_TENSOR = args(8, "tensor")
E2M1_GROUPS = args(4, "tensor_group", dynamic="local", group_size=16, scale_dtype="torch.float8_e4m3fn")


@dataclass(frozen=True, kw_only=True)
class InputCodes:
    """mode: one of the above. args: QuantizationArgs; None of "none". amax: of the inputs of each of our linear layers
    over a calibration, for "static" alone.
    """

    mode: str
    args: Mapping[str, Any] | None = None
    amax: Mapping[str, float] = field(default_factory=dict)

    @property
    def _two_levels(self) -> bool:
        return self.args is not None and self.args["strategy"] == "tensor_group"

    def check(self, module: str, k: int) -> None:
        """ValueError where groups do not divide the k inputs of a layer of theirs."""
        group = 1 if self.args is None else self.args.get("group_size", 1)
        if k % group:
            raise ValueError(
                f"{module} has {k} inputs, which groups of {group} do not divide: --activations {self.mode} is not for "
                "this model; --activations none is for any"
            )

    def specs(self, module: str) -> list[TensorSpec]:
        """The tensors beside those of one of their matrices."""
        if self.mode != STATIC:
            return []
        name = "input_global_scale" if self._two_levels else "input_scale"
        return [TensorSpec(name=f"{module}.{name}", shape=torch.Size((1,)), dtype=torch.float32)]

    def tensors(self, linear: str, module: str) -> Iterator[tuple[str, Tensor]]:
        """Those tensors. linear: ours, whose input is that of `module`."""
        for spec in self.specs(module):
            top = torch.tensor([self.amax[linear] or 1.0])
            quantizer = Quantizer(E2M1, scale=ScaleRule.NVFP4, tile=(1, 16)) if self._two_levels else POWER
            made = quantizer(top.expand(1, 16).contiguous())
            scale = made.parts["tensor"] if self._two_levels else made.scale
            yield spec.name, (1 / (HEADROOM * scale) if self._two_levels else HEADROOM * scale).view(1)

    def differs(self, recipe: LinearRecipe) -> str | None:
        """What training does to a layer's inputs that a reader does not do so; None where values are the same."""
        gemm = recipe.fprop
        if gemm.a is None:
            return None if self.mode == NONE else "inputs are not rounded"
        told = f"inputs are rounded to {gemm.a}"
        if recipe.mean_split:
            return f"{told} after their mean over the tokens is taken out"
        if gemm.outliers is not None:
            return f"{told}, outliers apart ({gemm.outliers.quantile} {gemm.outliers.variant})"
        return None if self._same(gemm.a) else told

    def _same(self, own: Quantizer) -> bool:
        if own.rounding is not NEAREST or own.range_share != 1 or self.args is None:
            return False
        if own.format is not E4M3 or self._two_levels:  # training takes NVFP4's outer scale of every batch anew
            return False
        if self.mode == STATIC or "scale_dtype" in self.args:
            return own.scale in (ScaleRule.POW2, ScaleRule.E8M0_CEIL)
        tile = {"tensor": WHOLE, "token": ROW, "group": (1, self.args.get("group_size"))}[self.args["strategy"]]
        return own.scale is ScaleRule.FP32 and own.tile == tile

    @property
    def told(self) -> str:
        """What is done to inputs, for people."""
        if self.args is None:
            return "inputs not rounded"
        kind = "NVFP4" if self._two_levels else "E4M3"
        how = {
            DYNAMIC: "under scales of the reader's own",
            MX: "in groups of 32 under powers of two",
            STATIC: "under scales from the calibration",
        }[self.mode]
        return f"inputs in {kind} {how}"


POWER = Quantizer(E4M3, tile=(1, -1), scale=ScaleRule.POW2)
