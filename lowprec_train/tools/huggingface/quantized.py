"""Weights in codes, in the layout of compressed-tensors, which transformers and vLLM read.

    fp8-tensor    weight E4M3 [n, k]      weight_scale FP32 [1]
    fp8-channel   weight E4M3 [n, k]      weight_scale FP32 [n, 1]                 E2M1 rows too: their codes are E4M3
    fp8-block     weight E4M3 [n, k]      weight_scale FP32 [n / 128, k / 128]
    nvfp4         weight_packed [n, k/2]  weight_scale E4M3 [n, k / 16]   weight_global_scale FP32 [1], the inverse
    mxfp4         weight_packed [n, k/2]  weight_scale uint8 [n, k / 32], the biased exponent

Codes are those that the recipe's forward pass multiplies by: they are made of the whole matrix of ours, BF16 first, and
then move row by row to the matrices of theirs. A scale of several rows is written once for each of them where the
format has scales of rows; 128 x 128 blocks only stay where a block's rows stay together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowprec_train.config import ModelConfig
from lowprec_train.numerics.formats import E2M1, E4M3, NEAREST
from lowprec_train.numerics.quantizer import WHOLE, Quantized, Quantizer, ScaleRule
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.tools.huggingface.family import Family
from lowprec_train.tools.huggingface.rows import Rows
from lowprec_train.tools.huggingface.shards import TensorSpec

Json = dict[str, Any]
FP8, BLOCK = torch.float8_e4m3fn, 128
PRODUCER = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


@dataclass(frozen=True, kw_only=True)
class Format:
    """quantizer: makes codes of a matrix whose recipe has none of this format. scheme: what compressed-tensors calls
    the format. weights, activations: QuantizationArgs; None for inputs that cannot be rounded as they come. group:
    columns of a scale; 0: of a tensor, a row or a block.
    """

    name: str
    quantizer: Quantizer
    scheme: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None = None
    group: int = 0

    @property
    def packed(self) -> bool:
        """Two codes a byte."""
        return self.quantizer.format is E2M1

    def fits(self, made_by: Quantizer) -> bool:
        """Whether the codes and scales of this quantiser can be written so."""
        tile, rule = made_by.tile, made_by.scale
        if made_by.rounding is not NEAREST or made_by.format not in (E4M3, E2M1) or made_by.outer != WHOLE:
            return False
        if self.group:  # squares too: each of their rows has the square's scale
            power = made_by.format is E2M1 and rule in (ScaleRule.E8M0_CEIL, ScaleRule.E8M0_FLOOR, ScaleRule.POW2)
            right = rule is ScaleRule.NVFP4 if self.name == "nvfp4" else power
            return right and tile[1] == self.group and tile[0] > 0 and made_by.range_share == 1
        return rule is not ScaleRule.LADDER and tile == self.quantizer.tile

    def specs(self, module: str, shape: torch.Size) -> list[TensorSpec]:
        """The tensors of one of their matrices [n, k]. ValueError where a tile does not divide it."""
        n, k = shape
        try:
            self.quantizer.check(n, k)
        except ValueError as error:
            raise ValueError(f"{module} of {n} x {k} does not fit {self.name}: {error}") from None
        made: dict[str, tuple[tuple[int, ...], torch.dtype]]
        if self.packed:
            scale = torch.float8_e4m3fn if self.name == "nvfp4" else torch.uint8
            made = {"weight_packed": ((n, k // 2), torch.uint8), "weight_scale": ((n, k // self.group), scale)}
            made |= {"weight_global_scale": ((1,), torch.float32)} if self.name == "nvfp4" else {}
        else:
            of = {"fp8-tensor": (1,), "fp8-channel": (n, 1), "fp8-block": (n // BLOCK, k // BLOCK)}[self.name]
            made = {"weight": ((n, k), FP8), "weight_scale": (of, torch.float32)}
        return [
            TensorSpec(name=f"{module}.{name}", shape=torch.Size(of), dtype=dtype) for name, (of, dtype) in made.items()
        ]

    def config(self, *, ignore: list[str], activations: bool) -> Json:
        """quantization_config of config.json. ignore: linear layers that keep their values."""
        inputs = dict(self.activations) if activations and self.activations is not None else None
        scheme = self.scheme if self.packed or activations else "naive-quantized"
        group = {"targets": ["Linear"], "weights": dict(self.weights), "input_activations": inputs}
        return {**PRODUCER, "format": scheme, "config_groups": {"group_0": group}, "ignore": ignore}


def _args(bits: int, strategy: str, *, dynamic: bool | str = False, **more: Any) -> Json:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": dynamic, **more}


FORMATS = {
    each.name: each
    for each in (
        Format(
            name="fp8-tensor",
            quantizer=Quantizer(E4M3),
            scheme="float-quantized",
            weights=_args(8, "tensor"),
            activations=_args(8, "tensor", dynamic=True),
        ),
        Format(
            name="fp8-channel",
            quantizer=Quantizer(E4M3, tile=(1, -1)),
            scheme="float-quantized",
            weights=_args(8, "channel"),
            activations=_args(8, "token", dynamic=True),
        ),
        Format(
            name="fp8-block",
            quantizer=Quantizer(E4M3, tile=(BLOCK, BLOCK)),
            scheme="float-quantized",
            weights=_args(8, "block", block_structure=[BLOCK, BLOCK]),
            activations=_args(8, "group", dynamic=True, group_size=BLOCK),
        ),
        Format(
            name="nvfp4",
            quantizer=Quantizer(E2M1, tile=(1, 16), scale=ScaleRule.NVFP4),
            scheme="nvfp4-pack-quantized",
            weights=_args(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
            group=16,
        ),
        Format(
            name="mxfp4",
            quantizer=Quantizer(E2M1, tile=(1, 32), scale=ScaleRule.E8M0_CEIL),
            scheme="mxfp4-pack-quantized",
            weights=_args(4, "group", group_size=32, scale_dtype="torch.uint8"),
            group=32,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class WeightCodes:
    """How our linear layers are written. quantizers: by name, of those whose weights become codes; None of the others.
    requantized: they are the format's own, not the recipe's. activations: "dynamic" or "none".
    """

    format: Format
    quantizers: Mapping[str, Quantizer | None]
    requantized: bool
    activations: str

    def has(self, name: str) -> bool:
        """Whether this parameter is written in codes."""
        return self.quantizers.get(name.removesuffix(".weight")) is not None and name.endswith(".weight")

    def leaves(self, name: str) -> bool:
        """Whether this parameter is the weight of a linear layer that keeps its values."""
        linear = name.removesuffix(".weight")
        return name.endswith(".weight") and linear in self.quantizers and self.quantizers[linear] is None

    def check(self, family: Family, model: ModelConfig) -> None:
        """ValueError for a family whose layers are no Linear, and for a tied head in codes."""
        if family.model_type == "gpt2":
            raise ValueError(
                f"--quantized {self.format.name}: GPT-2's layers are Conv1D, which compressed-tensors leaves out"
            )
        if model.tied and self.quantizers.get("head") is not None:
            raise ValueError(f"--quantized {self.format.name}: the head is the embedding, whose values a lookup needs")

    def config(self, plain: Sequence[str]) -> Json:
        """quantization_config of config.json. plain: their weights of linear layers that keep their values."""
        ignore = sorted(
            {name.removesuffix(".weight") for name in plain} | ({"lm_head"} if not self.has("head.weight") else set())
        )
        return self.format.config(ignore=ignore, activations=self.activations == "dynamic")

    @property
    def told(self) -> str:
        """One line: whose codes these are."""
        kept = sum(each is None for each in self.quantizers.values())
        coded = len(self.quantizers) - kept
        made = "rounded anew, not as they were trained" if self.requantized else "codes of the forward pass of training"
        rest = f", {kept} linear layers as they are" if kept else ""
        inputs = "inputs rounded by the reader" if self.activations == "dynamic" else "inputs not rounded"
        return f"{self.format.name}: weights of {coded} linear layers, {made}{rest}; {inputs}"

    def tensors(self, name: str, theirs: Sequence[str], layout: Rows, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of our weight [n, k], by their names. theirs: of their weights."""
        modules = [each.removesuffix(".weight") for each in theirs]
        quantizer = self.quantizers[name.removesuffix(".weight")]
        assert quantizer is not None
        if self.requantized and self.format.name == "fp8-block":
            for module, part in zip(modules, layout.split(weight), strict=True):
                made = quantizer(part.bfloat16())
                yield from self._written(module, made.codes, made.scale, made)
            return
        codes = quantizer(weight.bfloat16())
        carriers = layout.split(codes.codes.view(torch.uint8))
        scales = [codes.scale] * len(modules) if codes.scale.numel() == 1 else layout.split(_of_rows(codes))
        for module, part, scale in zip(modules, carriers, scales, strict=True):
            yield from self._written(module, part.contiguous().view(FP8), scale.contiguous(), codes)

    def _written(self, module: str, codes: Tensor, scale: Tensor, whole: Quantized) -> Iterator[tuple[str, Tensor]]:
        """scale: one number, those of every row, or of blocks that were made of this matrix."""
        if not self.format.packed:
            yield f"{module}.weight", codes
            yield f"{module}.weight_scale", self._scale(module, scale)
            return
        yield f"{module}.weight_packed", torch.ops.lowprec.pack_e2m1(codes)
        if self.format.name == "nvfp4":
            yield f"{module}.weight_scale", scale.to(FP8)
            yield f"{module}.weight_global_scale", 1 / whole.parts["tensor"].view(1)
        else:
            yield f"{module}.weight_scale", (scale.view(torch.int32) >> 23).to(torch.uint8)

    def _scale(self, module: str, scale: Tensor) -> Tensor:
        if self.format.name == "fp8-tensor":
            return scale.clone().view(1)  # files hold no tensor twice
        if self.format.name != "fp8-block" or self.requantized:
            return scale
        blocks = scale.unflatten(0, (-1, BLOCK))
        if not torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
            raise ValueError(
                f"{module}: its rows come from several 128 x 128 blocks of the layer that was trained, whose codes "
                "fp8-block cannot hold; --requantize rounds it anew, in blocks of its own"
            )
        return blocks[:, 0].contiguous()


def _of_rows(codes: Quantized) -> Tensor:
    """The scales of every row; under NVFP4 those beneath the tensor's, as they are stored. FP32."""
    block = codes.parts.get("block", codes.scale).float()
    return block.repeat_interleave(codes.codes.shape[0] // block.shape[0], 0)


def weight_codes(
    name: str,
    recipes: Mapping[str, LinearRecipe],
    *,
    recipe: str,
    requantize: bool = False,
    activations: str = "none",
) -> WeightCodes:
    """Of the format `name`. recipes: of every linear layer of ours; recipe: what they are called. requantize: round the
    weights of all blocks anew.

    Raises ValueError for a recipe whose forward pass has no such codes.
    """
    form = FORMATS[name]
    if activations == "dynamic" and form.activations is None:
        raise ValueError(
            f"--activations dynamic: {name} is written for inputs in BF16 or FP16; fp8-* have dynamic ones"
        )
    made: dict[str, Quantizer | None] = {}
    for linear, each in recipes.items():
        own = each.fprop.b
        if requantize:
            made[linear] = form.quantizer if linear.startswith("blocks.") else None
        elif each.fprop.is_identity or each.fprop.codes_only:
            made[linear] = None
        elif isinstance(own, Quantizer) and each.fprop.rotation is None and form.fits(own):
            made[linear] = own
        else:
            raise ValueError(
                f"--quantized {name}: the forward pass of {recipe} multiplies by {own or 'BF16'} weights in {linear}, "
                f"which {name} does not hold{_instead(own)}; --requantize rounds them anew as {name}"
            )
    if not any(made.values()):
        raise ValueError(
            f"--quantized {name}: the forward pass of {recipe} rounds no weights; --requantize rounds them as {name}, "
            "which the model was not trained with"
        )
    return WeightCodes(format=form, quantizers=made, requantized=requantize, activations=activations)


def _instead(own: object) -> str:
    fitting = [name for name, each in FORMATS.items() if isinstance(own, Quantizer) and each.fits(own)]
    return f" (--quantized {fitting[0]} does)" if fitting else ""
