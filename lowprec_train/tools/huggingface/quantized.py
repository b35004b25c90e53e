"""Quantised weights in the layout of compressed-tensors, which transformers and vLLM load.

    fp8-tensor    weight E4M3 [n, k]      weight_scale FP32 [1]
    fp8-channel   weight E4M3 [n, k]      weight_scale FP32 [n, 1]                 also E2M1 codes, exact in E4M3
    fp8-block     weight E4M3 [n, k]      weight_scale FP32 [n / 128, k / 128]
    nvfp4         weight_packed [n, k/2]  weight_scale E4M3 [n, k / 16]   weight_global_scale FP32 [1], the inverse
    mxfp8         weight E4M3 [n, k]      weight_scale uint8 [n, k / 32], the biased exponent
    mxfp4         weight_packed [n, k/2]  weight_scale uint8 [n, k / 32]

The codes are those of the recipe's forward pass: a fused weight of this package is cast to BF16 and quantised as one
matrix, and its rows are then distributed to the Hugging Face weights. A format with a scale per row repeats the scale
of a tile for each of its rows. fp8-block quantises every Hugging Face weight by itself, because the rows of its
128 x 128 blocks come from several blocks of this package; values equal those of training except for E4M3 subnormals.

`input_quantization` describes the activations.
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
from lowprec_train.tools.huggingface.input_quantization import (
    DYNAMIC,
    E2M1_GROUPS,
    E4M3_GROUPS,
    E4M3_TENSOR,
    MX,
    NONE,
    STATIC,
    InputQuantization,
    Json,
    args,
)
from lowprec_train.tools.huggingface.rows import Rows
from lowprec_train.tools.huggingface.shards import TensorSpec

Parts = tuple[Tensor, Tensor, Quantized]  # codes and scale of a Hugging Face weight, and the matrix they come from
FP8, BLOCK = torch.float8_e4m3fn, 128
PRODUCER = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


@dataclass(frozen=True, kw_only=True)
class Format:
    """quantizer: used by --requantize. scheme: name of the format in compressed-tensors. weights: QuantizationArgs.
    inputs: mode of input quantisation -> QuantizationArgs. group: columns that share a scale; 0 for a scale per tensor,
    row or block.
    """

    name: str
    quantizer: Quantizer
    scheme: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Mapping[str, Any]]
    group: int = 0

    @property
    def packed(self) -> bool:
        """True if a byte has two codes."""
        return self.quantizer.format is E2M1

    def represents(self, quantizer: Quantizer) -> bool:
        """Return whether this format can store the codes and scales of a quantiser."""
        tile, rule = quantizer.tile, quantizer.scale
        if quantizer.rounding is not NEAREST or quantizer.format not in (E4M3, E2M1) or quantizer.outer != WHOLE:
            return False
        if self.group:  # also for square tiles: each of their rows repeats the scale
            pow2 = rule in (ScaleRule.E8M0_CEIL, ScaleRule.E8M0_FLOOR, ScaleRule.POW2)
            pow2 = pow2 and quantizer.format is self.quantizer.format
            same_scales = rule is ScaleRule.NVFP4 if self.name == "nvfp4" else pow2
            return same_scales and tile[1] == self.group and tile[0] > 0 and quantizer.range_share == 1
        if self.name == "fp8-block" and (quantizer.format is not E4M3 or rule is not ScaleRule.POW2):
            return False  # its blocks differ from training's: only E4M3 with power-of-two scales keeps the values
        return rule is not ScaleRule.LADDER and tile == self.quantizer.tile

    def specs(self, module: str, shape: torch.Size) -> list[TensorSpec]:
        """Return the tensors of a Hugging Face weight [n, k]. Raises ValueError if a tile does not divide it."""
        n, k = shape
        try:
            self.quantizer.check(n, k)
        except ValueError as error:
            raise ValueError(f"{module} of {n} x {k} does not fit {self.name}: {error}") from None
        forms: dict[str, tuple[tuple[int, ...], torch.dtype]]
        if self.group:
            scale = torch.float8_e4m3fn if self.name == "nvfp4" else torch.uint8
            forms = {"weight_packed": ((n, k // 2), torch.uint8)} if self.packed else {"weight": ((n, k), FP8)}
            forms |= {"weight_scale": ((n, k // self.group), scale)}
            forms |= {"weight_global_scale": ((1,), torch.float32)} if self.name == "nvfp4" else {}
        else:
            scales = {"fp8-tensor": (1,), "fp8-channel": (n, 1), "fp8-block": (n // BLOCK, k // BLOCK)}[self.name]
            forms = {"weight": ((n, k), FP8), "weight_scale": (scales, torch.float32)}
        return [
            TensorSpec(name=f"{module}.{name}", shape=torch.Size(size), dtype=dtype)
            for name, (size, dtype) in forms.items()
        ]

    def config(self, *, ignore: list[str], inputs: InputQuantization) -> Json:
        """Return quantization_config for config.json. ignore: Hugging Face linear layers that are not quantised."""
        input_args = None if inputs.args is None else dict(inputs.args)
        scheme = self.scheme if self.group or input_args is not None else "naive-quantized"
        group = {"targets": ["Linear"], "weights": dict(self.weights), "input_activations": input_args}
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
class QuantizedExport:
    """Which linear layers are exported quantised, and how.

    quantizers: linear layer -> quantiser of its weight; None for a layer that is not quantised. requantized: whether
    they are the format's quantisers, not the recipe's. input_differences: how training rounds inputs that `inputs`
    rounds to other values. changed: Hugging Face module -> number of weights whose value differs from training, filled
    by `tensors`.
    """

    format: Format
    quantizers: Mapping[str, Quantizer | None]
    requantized: bool
    inputs: InputQuantization
    input_differences: Sequence[str] = ()
    changed: dict[str, int] = field(default_factory=dict)

    def quantizes(self, name: str) -> bool:
        """Return whether this parameter is exported quantised."""
        return self.quantizers.get(name.removesuffix(".weight")) is not None and name.endswith(".weight")

    def ignores(self, name: str) -> bool:
        """Return whether this parameter is the weight of a linear layer that is not quantised."""
        linear = name.removesuffix(".weight")
        return name.endswith(".weight") and linear in self.quantizers and self.quantizers[linear] is None

    def check(self, family: Family, model: ModelConfig) -> None:
        """Raise ValueError for GPT-2, whose layers are not nn.Linear, and for a quantised tied head."""
        if family.model_type == "gpt2":
            raise ValueError(
                f"--quantized {self.format.name}: GPT-2's layers are Conv1D, which compressed-tensors does not quantise"
            )
        if model.tied and self.quantizers.get("head") is not None:
            raise ValueError(
                f"--quantized {self.format.name} cannot quantise the head of {model.name}: it is tied to the embedding"
            )

    def config(self, ignored: Sequence[str]) -> Json:
        """Return quantization_config for config.json. ignored: Hugging Face weights of unquantised linear layers."""
        head = set() if self.quantizes("head.weight") else {"lm_head"}
        ignore = sorted({name.removesuffix(".weight") for name in ignored} | head)
        return self.format.config(ignore=ignore, inputs=self.inputs)

    def specs(self, module: str, shape: torch.Size) -> list[TensorSpec]:
        """Return the tensors of a Hugging Face module: those of `Format.specs` and its input scale."""
        self.inputs.check(module, shape[1])
        return self.format.specs(module, shape) + self.inputs.specs(module)

    @property
    def summary(self) -> str:
        """Lines about the export: weights, weights with other values than in training, and inputs."""
        ignored = sum(each is None for each in self.quantizers.values())
        quantized = len(self.quantizers) - ignored
        codes = "requantised, not as trained" if self.requantized else "codes of the training forward pass"
        rest = f", {ignored} linear layers not quantised" if ignored else ""
        lines = [f"{self.format.name}: weights of {quantized} linear layers, {codes}{rest}"]
        if self.changed:
            lines += [
                f"{sum(self.changed.values())} weights of {len(self.changed)} layers have another value than in "
                "training: they are below 2**-13 of the amax of their block"
            ]
        return "\n".join([*lines, self._input_summary])

    @property
    def _input_summary(self) -> str:
        if self.input_differences and not self.requantized:
            return f"{self.inputs.summary}; in training {'; '.join(self.input_differences)}"
        return self.inputs.summary + ("" if self.requantized else ", with the values of training")

    def tensors(self, name: str, hf_names: Sequence[str], layout: Rows, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) pairs for a weight [n, k] of this package. hf_names: of its Hugging Face weights."""
        linear, modules = name.removesuffix(".weight"), [each.removesuffix(".weight") for each in hf_names]
        quantizer = self.quantizers[linear]
        assert quantizer is not None
        quantize = self._quantize_parts if self.format.name == "fp8-block" else self._quantize_whole
        for module, parts in zip(modules, quantize(modules, layout, weight.bfloat16(), quantizer), strict=True):
            yield from self._stored(module, *parts)
            yield from self.inputs.tensors(linear, module)

    def _quantize_whole(
        self, modules: Sequence[str], layout: Rows, weight: Tensor, quantizer: Quantizer
    ) -> Iterator[Parts]:
        """Quantise the whole weight, then distribute the rows of its codes."""
        quantized = quantizer(weight)
        carriers = layout.split(quantized.codes.view(torch.uint8))
        scale = quantized.scale
        scales = [scale] * len(modules) if scale.numel() == 1 else layout.split(_row_scales(quantized))
        for part, scale in zip(carriers, scales, strict=True):
            yield part.contiguous().view(FP8), scale.contiguous(), quantized

    def _quantize_parts(
        self, modules: Sequence[str], layout: Rows, weight: Tensor, quantizer: Quantizer
    ) -> Iterator[Parts]:
        """Distribute the rows of the weight, then quantise each part; count the values that differ from training."""
        trained = None if self.requantized else layout.split(quantizer(weight).dequantize())
        for number, (module, part) in enumerate(zip(modules, layout.split(weight), strict=True)):
            quantized = quantizer(part)
            if trained is not None and (count := int((quantized.dequantize() != trained[number]).sum())):
                self.changed[module] = count
            yield quantized.codes, quantized.scale, quantized

    def _stored(self, module: str, codes: Tensor, scale: Tensor, source: Quantized) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored tensors of a module. scale: [1], one per row, or one per block. source: has NVFP4's tensor
        scale.
        """
        if self.format.packed:
            yield f"{module}.weight_packed", torch.ops.lowprec.pack_e2m1(codes)
        else:
            yield f"{module}.weight", codes
        if self.format.name == "nvfp4":
            yield f"{module}.weight_scale", scale.to(FP8)
            yield f"{module}.weight_global_scale", 1 / source.parts["tensor"].view(1)
        elif self.format.group:
            yield f"{module}.weight_scale", (scale.view(torch.int32) >> 23).to(torch.uint8)
        else:  # cloned, because safetensors refuses tensors that share memory
            yield f"{module}.weight_scale", scale.clone().view(1) if self.format.name == "fp8-tensor" else scale


def _row_scales(quantized: Quantized) -> Tensor:
    """Return FP32 scales [n, k / group], one row of scales per row of codes; for NVFP4 the block scales."""
    block = quantized.parts.get("block", quantized.scale).float()
    return block.repeat_interleave(quantized.codes.shape[0] // block.shape[0], 0)


def quantized_export(
    name: str,
    recipes: Mapping[str, LinearRecipe],
    *,
    recipe: str,
    saved: SavedActivationPolicy,
    requantize: bool = False,
    activations: str | None = None,
    amax: Mapping[str, float] | None = None,
) -> QuantizedExport:
    """Return a quantised export in the format `name`.

    recipes: linear layer -> its recipe; recipe: their common name, for errors. saved: quantised activations of norms
    and activation functions, which inference engines do not have. requantize: quantise all blocks with the format's
    quantiser. activations: mode of the inputs; None takes the one that reproduces training, NONE if there is none.
    amax: calibrated amax of the inputs.

    Raises ValueError if the format cannot store the weights of the recipe's forward pass, and for a mode that the
    format does not have.
    """
    form = FORMATS[name]
    quantizers: dict[str, Quantizer | None] = {}
    for linear, each in recipes.items():
        trained = each.fprop.b
        if requantize:
            quantizers[linear] = form.quantizer if linear.startswith("blocks.") else None
        elif each.fprop.is_identity or each.fprop.codes_only:
            quantizers[linear] = None
        elif isinstance(trained, Quantizer) and each.fprop.rotation is None and form.represents(trained):
            quantizers[linear] = trained
        else:
            raise ValueError(
                f"--quantized {name} cannot store the {trained or 'BF16'} weights of {linear} in the forward pass of "
                f"{recipe}{_alternative(trained)}; --requantize quantises them to {name}"
            )
    if not any(quantizers.values()):
        raise ValueError(
            f"--quantized {name}: the forward pass of {recipe} quantises no weights; --requantize quantises them to "
            f"{name}, which the model was not trained with"
        )
    quantized = [recipes[linear] for linear, each in quantizers.items() if each is not None]
    inputs = _inputs(form, [] if requantize else quantized, activations, amax)
    differences = dict.fromkeys(difference for each in quantized if (difference := inputs.difference(each)))
    rounded = [f"{role}s compute from {codec}" for role in ("norm", "activation") if (codec := saved.of(role))]
    differences |= {" and ".join(rounded): None} if rounded else {}
    return QuantizedExport(
        format=form,
        quantizers=quantizers,
        requantized=requantize,
        inputs=inputs,
        input_differences=tuple(differences),
    )


def _inputs(
    form: Format, recipes: Sequence[LinearRecipe], mode: str | None, amax: Mapping[str, float] | None
) -> InputQuantization:
    """Return the quantisation of inputs. mode: None selects the first that reproduces the inputs of `recipes`."""
    modes = {mode: InputQuantization(mode=mode, args=args, amax=amax or {}) for mode, args in form.inputs.items()}
    modes = {NONE: InputQuantization(mode=NONE), **modes}
    if mode is None:
        usable = [STATIC] if amax is not None else [NONE, MX, DYNAMIC]
        same = [each for each in usable if each in modes and not any(map(modes[each].difference, recipes))]
        mode = STATIC if amax is not None else same[0] if same else NONE
    if mode not in modes:
        raise ValueError(f"--activations {mode}: {form.name} supports {', '.join(modes)}")
    if (mode == STATIC) != (amax is not None):
        raise ValueError(
            f"--activations {mode} {'needs' if mode == STATIC else 'takes no'} --calibration PATH, the text from which "
            "static scales are computed"
        )
    return modes[mode]


def _alternative(quantizer: object) -> str:
    formats = [
        name for name, each in FORMATS.items() if isinstance(quantizer, Quantizer) and each.represents(quantizer)
    ]
    return f" (--quantized {formats[0]} can)" if formats else ""
