"""Weights in codes, in the layout of compressed-tensors, which transformers and vLLM read.

    fp8-tensor    weight E4M3 [n, k]      weight_scale FP32 [1]
    fp8-channel   weight E4M3 [n, k]      weight_scale FP32 [n, 1]                 E2M1 rows too: their codes are E4M3
    fp8-block     weight E4M3 [n, k]      weight_scale FP32 [n / 128, k / 128]
    nvfp4         weight_packed [n, k/2]  weight_scale E4M3 [n, k / 16]   weight_global_scale FP32 [1], the inverse
    mxfp8         weight E4M3 [n, k]      weight_scale uint8 [n, k / 32], the biased exponent
    mxfp4         weight_packed [n, k/2]  weight_scale uint8 [n, k / 32]

Codes are those that the recipe's forward pass multiplies by: they are made of the whole matrix of ours, BF16 first, and
then move row by row to the matrices of theirs. A scale of several rows is written once for each of them where the
format has scales of rows. Rows of one 128 x 128 block of theirs may come from several of ours: they are rounded by the
recipe's quantiser under the power of two of their own block, to the same values but for E4M3's subnormal numbers.

`input_codes` says what readers do to inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowprec_train.config import ModelConfig
from lowprec_train.numerics.formats import E2M1, E4M3, NEAREST
from lowprec_train.numerics.quantizer import WHOLE, Quantized, Quantizer, ScaleRule
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.precision.saved_activations import SavedActivationPolicy
from lowprec_train.tools.huggingface.family import Family
from lowprec_train.tools.huggingface.input_codes import (
    DYNAMIC,
    E2M1_GROUPS,
    E4M3_GROUPS,
    E4M3_TENSOR,
    MX,
    NONE,
    STATIC,
    InputCodes,
    Json,
    args,
)
from lowprec_train.tools.huggingface.rows import Rows
from lowprec_train.tools.huggingface.shards import TensorSpec

Parts = tuple[Tensor, Tensor, Quantized]  # codes and scale of one of their matrices, and what they were made with
FP8, BLOCK = torch.float8_e4m3fn, 128
PRODUCER = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


@dataclass(frozen=True, kw_only=True)
class Format:
    """quantizer: makes codes of a matrix whose recipe has none of this format. scheme: what compressed-tensors calls
    the format. weights: QuantizationArgs; inputs: those of each way to round inputs. group: columns of a scale; 0: of a
    tensor, a row or a block.
    """

    name: str
    quantizer: Quantizer
    scheme: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Mapping[str, Any]]
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
            power = rule in (ScaleRule.E8M0_CEIL, ScaleRule.E8M0_FLOOR, ScaleRule.POW2)
            power = power and made_by.format is self.quantizer.format
            right = rule is ScaleRule.NVFP4 if self.name == "nvfp4" else power
            return right and tile[1] == self.group and tile[0] > 0 and made_by.range_share == 1
        if self.name == "fp8-block" and (made_by.format is not E4M3 or rule is not ScaleRule.POW2):
            return False  # rows of several blocks meet in one: only E4M3 under powers of two keeps its values
        return rule is not ScaleRule.LADDER and tile == self.quantizer.tile

    def specs(self, module: str, shape: torch.Size) -> list[TensorSpec]:
        """The tensors of one of their matrices [n, k]. ValueError where a tile does not divide it."""
        n, k = shape
        try:
            self.quantizer.check(n, k)
        except ValueError as error:
            raise ValueError(f"{module} of {n} x {k} does not fit {self.name}: {error}") from None
        made: dict[str, tuple[tuple[int, ...], torch.dtype]]
        if self.group:
            scale = torch.float8_e4m3fn if self.name == "nvfp4" else torch.uint8
            made = {"weight_packed": ((n, k // 2), torch.uint8)} if self.packed else {"weight": ((n, k), FP8)}
            made |= {"weight_scale": ((n, k // self.group), scale)}
            made |= {"weight_global_scale": ((1,), torch.float32)} if self.name == "nvfp4" else {}
        else:
            of = {"fp8-tensor": (1,), "fp8-channel": (n, 1), "fp8-block": (n // BLOCK, k // BLOCK)}[self.name]
            made = {"weight": ((n, k), FP8), "weight_scale": (of, torch.float32)}
        return [
            TensorSpec(name=f"{module}.{name}", shape=torch.Size(of), dtype=dtype) for name, (of, dtype) in made.items()
        ]

    def config(self, *, ignore: list[str], inputs: InputCodes) -> Json:
        """quantization_config of config.json. ignore: linear layers that keep their values."""
        own = None if inputs.args is None else dict(inputs.args)
        scheme = self.scheme if self.group or own is not None else "naive-quantized"
        group = {"targets": ["Linear"], "weights": dict(self.weights), "input_activations": own}
        return {**PRODUCER, "format": scheme, "config_groups": {"group_0": group}, "ignore": ignore}


FORMATS = {
    each.name: each
    for each in (
        Format(
            name="fp8-tensor",
            quantizer=Quantizer(E4M3),
            scheme="float-quantized",
            weights=args(8, "tensor"),
            inputs={DYNAMIC: args(8, "tensor", dynamic=True), MX: E4M3_GROUPS, STATIC: E4M3_TENSOR},
        ),
        Format(
            name="fp8-channel",
            quantizer=Quantizer(E4M3, tile=(1, -1)),
            scheme="float-quantized",
            weights=args(8, "channel"),
            inputs={DYNAMIC: args(8, "token", dynamic=True), MX: E4M3_GROUPS, STATIC: E4M3_TENSOR},
        ),
        Format(
            name="fp8-block",
            quantizer=Quantizer(E4M3, tile=(BLOCK, BLOCK)),
            scheme="float-quantized",
            weights=args(8, "block", block_structure=[BLOCK, BLOCK]),
            inputs={DYNAMIC: args(8, "group", dynamic=True, group_size=BLOCK), MX: E4M3_GROUPS},
        ),
        Format(
            name="nvfp4",
            quantizer=Quantizer(E2M1, tile=(1, 16), scale=ScaleRule.NVFP4),
            scheme="nvfp4-pack-quantized",
            weights=args(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
            inputs={STATIC: E2M1_GROUPS},
            group=16,
        ),
        Format(
            name="mxfp8",
            quantizer=Quantizer(E4M3, tile=(1, 32), scale=ScaleRule.E8M0_CEIL),
            scheme="mxfp8-quantized",
            weights=args(8, "group", group_size=32, scale_dtype="torch.uint8"),
            inputs={MX: E4M3_GROUPS},
            group=32,
        ),
        Format(
            name="mxfp4",
            quantizer=Quantizer(E2M1, tile=(1, 32), scale=ScaleRule.E8M0_CEIL),
            scheme="mxfp4-pack-quantized",
            weights=args(4, "group", group_size=32, scale_dtype="torch.uint8"),
            inputs={DYNAMIC: args(8, "group", dynamic=True, group_size=BLOCK), MX: E4M3_GROUPS},
            group=32,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class WeightCodes:
    """How our linear layers are written. quantizers: by name, of those whose weights become codes; None of the others.
    requantized: they are the format's own, not the recipe's. inputs: how they are rounded; `beside`: what training does
    to them otherwise. moved: weights whose values are not those of training, counted as they are written.
    """

    format: Format
    quantizers: Mapping[str, Quantizer | None]
    requantized: bool
    inputs: InputCodes
    beside: Sequence[str] = ()
    moved: dict[str, int] = field(default_factory=dict)

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
        return self.format.config(ignore=ignore, inputs=self.inputs)

    def specs(self, module: str, shape: torch.Size) -> list[TensorSpec]:
        """As `Format.specs`, with what belongs to inputs."""
        self.inputs.check(module, shape[1])
        return self.format.specs(module, shape) + self.inputs.specs(module)

    @property
    def told(self) -> str:
        """One line: whose codes these are."""
        kept = sum(each is None for each in self.quantizers.values())
        coded = len(self.quantizers) - kept
        made = "rounded anew, not as they were trained" if self.requantized else "codes of the forward pass of training"
        rest = f", {kept} linear layers as they are" if kept else ""
        lines = [f"{self.format.name}: weights of {coded} linear layers, {made}{rest}"]
        if self.moved:
            lines += [
                f"{sum(self.moved.values())} weights of {len(self.moved)} layers, smaller than 2**-13 of their block's "
                "maximum, are rounded in their own blocks' scale: training has another value there"
            ]
        return "\n".join([*lines, self._told_of_inputs])

    @property
    def _told_of_inputs(self) -> str:
        if self.beside and not self.requantized:
            return f"{self.inputs.told}; not so in training: {'; '.join(self.beside)}"
        return self.inputs.told + ("" if self.requantized else ", to the values of training")

    def tensors(self, name: str, theirs: Sequence[str], layout: Rows, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of our weight [n, k], by their names. theirs: of their weights."""
        linear, modules = name.removesuffix(".weight"), [each.removesuffix(".weight") for each in theirs]
        quantizer = self.quantizers[linear]
        assert quantizer is not None
        how = self._blocks if self.format.name == "fp8-block" else self._rows
        for module, made in zip(modules, how(modules, layout, weight.bfloat16(), quantizer), strict=True):
            yield from self._written(module, *made)
            yield from self.inputs.tensors(linear, module)

    def _rows(self, modules: Sequence[str], layout: Rows, weight: Tensor, quantizer: Quantizer) -> Iterator[Parts]:
        """The codes of the whole matrix, moved row by row."""
        codes = quantizer(weight)
        carriers = layout.split(codes.codes.view(torch.uint8))
        scales = [codes.scale] * len(modules) if codes.scale.numel() == 1 else layout.split(_of_rows(codes))
        for part, scale in zip(carriers, scales, strict=True):
            yield part.contiguous().view(FP8), scale.contiguous(), codes

    def _blocks(self, modules: Sequence[str], layout: Rows, weight: Tensor, quantizer: Quantizer) -> Iterator[Parts]:
        """Rounded in their blocks, and counted where that is not the value that training multiplies by."""
        trained = None if self.requantized else layout.split(quantizer(weight).dequantize())
        for number, (module, part) in enumerate(zip(modules, layout.split(weight), strict=True)):
            made = quantizer(part)
            if trained is not None and (count := int((made.dequantize() != trained[number]).sum())):
                self.moved[module] = count
            yield made.codes, made.scale, made

    def _written(self, module: str, codes: Tensor, scale: Tensor, whole: Quantized) -> Iterator[tuple[str, Tensor]]:
        """scale: one number, those of every row, or of blocks that were made of this matrix."""
        if self.format.packed:
            yield f"{module}.weight_packed", torch.ops.lowprec.pack_e2m1(codes)
        else:
            yield f"{module}.weight", codes
        if self.format.name == "nvfp4":
            yield f"{module}.weight_scale", scale.to(FP8)
            yield f"{module}.weight_global_scale", 1 / whole.parts["tensor"].view(1)
        elif self.format.group:
            yield f"{module}.weight_scale", (scale.view(torch.int32) >> 23).to(torch.uint8)
        else:  # files hold no tensor twice
            yield f"{module}.weight_scale", scale.clone().view(1) if self.format.name == "fp8-tensor" else scale


def _of_rows(codes: Quantized) -> Tensor:
    """The scales of every row; under NVFP4 those beneath the tensor's, as they are stored. FP32."""
    block = codes.parts.get("block", codes.scale).float()
    return block.repeat_interleave(codes.codes.shape[0] // block.shape[0], 0)


def weight_codes(
    name: str,
    recipes: Mapping[str, LinearRecipe],
    *,
    recipe: str,
    saved: SavedActivationPolicy,
    requantize: bool = False,
    activations: str | None = None,
    amax: Mapping[str, float] | None = None,
) -> WeightCodes:
    """Of the format `name`. recipes: of every linear layer of ours; recipe: what they are called. saved: what norms and
    activations round, which no reader does. requantize: round the weights of all blocks anew. activations: how inputs
    are rounded; None takes the way that gives the values of training, "none" where there is none. amax: of every
    layer's inputs, where they were calibrated.

    Raises ValueError for a recipe whose forward pass has no such codes, and for inputs that the format does not round.
    """
    form = FORMATS[name]
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
    coded = [recipes[linear] for linear, each in made.items() if each is not None]
    inputs = _inputs(form, [] if requantize else coded, activations, amax)
    beside = dict.fromkeys(told for each in coded if (told := inputs.differs(each)))
    rounded = [f"{role}s compute from {how}" for role in ("norm", "activation") if (how := saved.of(role))]
    beside |= {f"its {' and its '.join(rounded)}": None} if rounded else {}
    return WeightCodes(format=form, quantizers=made, requantized=requantize, inputs=inputs, beside=tuple(beside))


def _inputs(
    form: Format, recipes: Sequence[LinearRecipe], asked: str | None, amax: Mapping[str, float] | None
) -> InputCodes:
    """recipes: whose values the inputs should have where nothing is asked for."""
    ways = {mode: InputCodes(mode=mode, args=how, amax=amax or {}) for mode, how in form.inputs.items()}
    ways = {NONE: InputCodes(mode=NONE), **ways}
    if asked is None:
        usable = [STATIC] if amax is not None else [NONE, MX, DYNAMIC]
        right = [mode for mode in usable if mode in ways and not any(map(ways[mode].differs, recipes))]
        asked = STATIC if amax is not None else right[0] if right else NONE
    if asked not in ways:
        raise ValueError(f"--activations {asked}: {form.name} has {', '.join(ways)}")
    if (asked == STATIC) != (amax is not None):
        raise ValueError(
            f"--activations {asked} {'needs' if asked == STATIC else 'takes no'} --calibration PATH: scales of inputs "
            "come from text that the model reads"
        )
    return ways[asked]


def _instead(own: object) -> str:
    fitting = [name for name, each in FORMATS.items() if isinstance(own, Quantizer) and each.fits(own)]
    return f" (--quantized {fitting[0]} does)" if fitting else ""
