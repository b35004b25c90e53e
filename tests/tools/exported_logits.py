"""A quantised export as transformers computes it with compressed-tensors, against the training forward pass.

    PYTHONPATH=. python tests/tools/exported_logits.py /tmp/exported      # prints the table of docs/huggingface.md

Of each export, on tokens that no calibration saw, in FP32 outside of what is rounded, on both sides alike:

    inputs    values of inputs that a reader rounds as training does, of all, each layer given the input of training
    layers    largest difference of what layers return then, over the standard deviation of it
    logits    root mean square of their difference; its measures are `moved`, the training forward pass against itself
              after its embedding moved by 4e-6 of itself, and `rounding`, against the model that rounds nothing
    bf16      logits where both sides compute in BF16, and `moved` there, by half an ulp, 2e-3
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowprec_train.model.transformer import Transformer
from lowprec_train.precision import policy
from lowprec_train.tools import cli
from lowprec_train.tools.huggingface.families import LLAMA
from lowprec_train.train.trained import Trained
from tests.data.indexed_files import write_indexed
from tests.recipes import system
from tests.saved import save

CPU = torch.device("cpu")
WIDE = ("model.dim=256", "model.heads=2", "model.kv_heads=2", "model.ffn=512", "model.layers=7")  # heads of 128
EXPORTS = {  # recipe -> format and ways to round inputs; None: the default
    "fp8": ("fp8-tensor", ("mx", "static", "dynamic", "none")),
    "coat": ("fp8-tensor", ("mx",)),
    "fp8_lm": ("fp8-tensor", ("mx",)),
    "mxfp4_fp8": ("fp8-tensor", ("mx",)),
    "fp8_eden4": ("fp8-tensor", ("mx",)),
    "fp8_rowwise": ("fp8-channel", ("mx", "static", "dynamic", "none")),
    "fp8_block": ("fp8-block", ("mx", "dynamic", "none")),
    "mxfp8": ("mxfp8", ("mx", "none")),
    "w4a8": ("mxfp4", ("mx", "dynamic", "none")),
    "nvfp4": ("nvfp4", ("static", "none")),
    "averis": ("nvfp4", ("static", "none")),
    "fp4": ("fp8-channel", ("dynamic", "none")),
}


def trained(directory: Path, recipe: str, *overrides: str) -> Path:
    """A run of a LLaMA whose weights tell mistakes."""
    one = system(recipe, "llama_tiny", *overrides)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in one.model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.05, generator=generator)
    return save(directory, one.run, one.model, 1, recipe=recipe)


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(seed))


def calibration(prefix: Path) -> Path:
    """A prepared set of other tokens than those that are compared."""
    write_indexed(prefix, tokens(5).numpy(), np.uint16)
    return prefix


def reader(out: Path, dtype: torch.dtype) -> Any:
    """The model of transformers. compressed-tensors decodes four-bit and MX weights to BF16."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
    model.hf_quantizer.compressor.decompress_model(model)
    return model.to(dtype).eval().requires_grad_(False)


def training(run: Path, dtype: torch.dtype, recipe: str = "run") -> Transformer:
    """The forward pass of training; codes are made of BF16 weights, whatever the rest computes in."""
    model = Trained(run).model(recipe, device=CPU, dtype=dtype)
    for _, linear in policy.named_linears(model):
        if not linear.recipe.is_identity:
            linear.weight.copy_(linear.weight.bfloat16())
    return model


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def moved(run: Path, dtype: torch.dtype, read: Tensor) -> float:
    """What the logits of training move by, when its embedding moves as little as other orders of sums move layers."""
    models = [training(run, dtype) for _ in range(2)]
    share = 2.0**-18 if dtype is torch.float32 else 1.5 * 2.0**-9
    weight = models[1].embedding.weight
    sign = torch.randint(0, 2, weight.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    weight.copy_((weight.double() * (1 + share * sign)).to(weight.dtype))
    first, second = (model.logits(read).float() for model in models)
    return rms(first - second)


def by_layer(run: Path, model: Transformer, theirs: Any, read: Tensor) -> tuple[float, float]:
    """(share of inputs with equal values, largest relative difference of outputs) of layers given training's inputs."""
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    inputs, sizes = {}, Trained(run).weights.model
    for name, linear in policy.named_linears(model):
        linear.register_forward_pre_hook(lambda _, args, name=name: inputs.__setitem__(name, args[0].flatten(0, -2)))
    model.logits(read)
    equal, count, largest = 0, 0, 0.0
    for name, linear in policy.named_linears(model):
        gemm, x = linear.recipe.fprop, inputs[name]
        if gemm.is_identity:
            continue
        modules = [theirs.get_submodule(each.removesuffix(".weight")) for each in LLAMA.hf_names(f"{name}.weight")]
        layout = LLAMA.layout(f"{name}.weight", sizes)
        y, got = linear._product(x, None, None, None, False)[0], [each(x).t().contiguous() for each in modules]
        largest = max(largest, float((layout.join(got).t() - y).abs().max() / y.std()))
        if (how := modules[0].quantization_scheme.input_activations) is not None and gemm.a is not None:
            equal += int((forward_quantize(modules[0], x, "input", how) == gemm.a(x).dequantize()).sum())
        count += x.numel()
    return equal / count, largest


@torch.no_grad()
def compared(run: Path, out: Path, read: Tensor) -> dict[str, float]:
    """The figures of one export."""
    found = {}
    for name, dtype in (("logits", torch.float32), ("bf16", torch.bfloat16)):
        model, theirs = training(run, dtype), reader(out, dtype)
        ours, read_there = model.logits(read).float(), theirs(read).logits.float()
        found[name], found[f"{name} max"] = rms(ours - read_there), float((ours - read_there).abs().max())
        found[f"{name} moved"] = moved(run, dtype, read)
        if name == "logits":
            found["std"] = float(ours.std())
            found["rounding"] = rms(ours - Trained(run).model("fp32", device=CPU).logits(read))
            found["inputs"], found["layers"] = by_layer(run, model, theirs, read)
    return found


def exported(run: Path, out: Path, form: str, activations: str, *options: str) -> None:
    more = ("--activations", activations)
    more += ("--calibration", str(calibration(out.with_suffix(".calibration")))) if activations == "static" else ()
    assert cli.main(["export-hf", str(run), "--out", str(out), "--quantized", form, *more, *options]) == 0


COLUMNS = ("inputs", "layers", "logits", "logits max", "logits moved", "rounding", "bf16", "bf16 moved", "std")


def main(folder: Path) -> None:
    read = tokens(3)
    print("| recipe | format | inputs |", " | ".join(COLUMNS), "|\n|", "---|" * (3 + len(COLUMNS)), sep="", flush=True)
    for recipe, (form, ways) in EXPORTS.items():
        run = trained(folder / recipe, recipe, *WIDE)
        for activations in ways:
            out = folder / f"{recipe}-{activations}"
            exported(run, out, form, activations)
            found = compared(run, out, read)
            figures = [f"{found[each]:.4f}" if each == "inputs" else f"{found[each]:.2g}" for each in COLUMNS]
            print("|", " | ".join([recipe, form, activations, *figures]), "|", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
