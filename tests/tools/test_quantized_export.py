"""Weights in codes as compressed-tensors has them: bytes against our quantiser, logits against the same codes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open

from lowprec_train.numerics.formats import E4M3
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.precision import policy
from lowprec_train.tools import cli, export_hf
from lowprec_train.tools.huggingface.families import LLAMA
from lowprec_train.tools.huggingface.quantized import FORMATS
from lowprec_train.train.trained import trained_model
from lowprec_train.train.weights import open_weights
from tests.recipes import system
from tests.saved import save

CPU = torch.device("cpu")
CODED = {  # recipe -> format
    "fp8": "fp8-tensor",
    "fp8_rowwise": "fp8-channel",
    "fp4": "fp8-channel",
    "nvfp4": "nvfp4",
    "w4a8": "mxfp4",
}
BY_DAY = [each if each in ("fp8", "nvfp4") else pytest.param(each, marks=pytest.mark.nightly) for each in CODED]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TOKENS = torch.randint(0, 64, (2, 48), generator=torch.Generator().manual_seed(3))


def trained(directory, recipe, *overrides):
    """A run of a LLaMA with grouped queries whose weights tell mistakes."""
    one = system(recipe, "llama_tiny", "model.kv_heads=2", "model.layers=7", *overrides)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in one.model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.05, generator=generator)
    return save(directory, one.run, one.model, 1, recipe=recipe)


def exported(run, out, *options):
    assert cli.main(["export-hf", str(run), "--out", str(out), *options]) == 0
    with safe_open(out / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    return tensors, json.loads((out / "config.json").read_text())


def values(tensors, module):
    """The matrix that a module's tensors stand for, FP32, by the layout's own words."""
    if f"{module}.weight_packed" in tensors:
        packed, scale = (tensors[f"{module}.{name}"] for name in ("weight_packed", "weight_scale"))
        nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
        codes = E2M1[nibbles & 7] * torch.where(nibbles & 8 > 0, -1.0, 1.0)
        if scale.dtype == torch.uint8:
            scale = 2.0 ** (scale.float() - 127)
        else:
            scale = scale.float() / tensors[f"{module}.weight_global_scale"]
        return codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    codes, scale = tensors[f"{module}.weight"].float(), tensors[f"{module}.weight_scale"]
    if scale.ndim == 2 and scale.shape[0] != codes.shape[0]:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes * scale


def linears(run):
    """Name -> (recipe of the run, its weight in BF16)."""
    opened, model = open_weights(run), trained_model(run, device=CPU)
    return {name: (each.recipe, opened.read(f"{name}.weight").bfloat16()) for name, each in policy.named_linears(model)}


def theirs_of(run, name):
    weights = open_weights(run)
    layout = LLAMA.layout(f"{name}.weight", weights.model)
    return [each.removesuffix(".weight") for each in LLAMA.theirs(f"{name}.weight")], layout


@pytest.mark.parametrize("recipe", BY_DAY)
def test_codes_are_those_of_the_forward_pass(tmp_path, recipe):
    """Byte for byte; a linear that computes in BF16 keeps its values and is named in `ignore`."""
    run = trained(tmp_path / "run", recipe)
    tensors, config = exported(run, tmp_path / "out", "--quantized", CODED[recipe])
    told, form = config["quantization_config"], FORMATS[CODED[recipe]]
    ignored, coded = [], 0
    for name, (how, weight) in linears(run).items():
        modules, layout = theirs_of(run, name)
        if how.fprop.is_identity:
            ignored += modules
            for module, part in zip(modules, layout.split(weight), strict=True):
                assert torch.equal(tensors[f"{module}.weight"].bfloat16(), part)
            continue
        coded += 1
        made = how.fprop.b(weight)
        carriers = layout.split(made.codes.view(torch.uint8))
        for module, carrier in zip(modules, carriers, strict=True):
            if form.packed:
                want = torch.ops.lowprec.pack_e2m1(carrier.contiguous().view(torch.float8_e4m3fn))
                assert torch.equal(tensors[f"{module}.weight_packed"], want)
            else:
                assert torch.equal(tensors[f"{module}.weight"].view(torch.uint8), carrier)
        rebuilt = layout.join([values(tensors, module) for module in modules])
        if form.name == "nvfp4":  # the layout divides by the inverse of a scale
            torch.testing.assert_close(rebuilt, made.dequantize(), rtol=3e-7, atol=0)
        else:
            assert torch.equal(rebuilt, made.dequantize())
    assert coded and told["ignore"] == sorted(ignored)
    assert told["quant_method"] == "compressed-tensors" and told["quantization_status"] == "compressed"
    group = told["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"] and group["input_activations"] is None
    assert group["weights"]["num_bits"] == (4 if form.packed else 8)


def test_layers_that_readers_fuse_have_one_scale(tmp_path):
    """vLLM multiplies q, k, v and gate, up as one: a scale of a tensor, and NVFP4's outer one, is the same for them."""
    for recipe, what in (("fp8", "weight_scale"), ("nvfp4", "weight_global_scale")):
        tensors, _ = exported(
            trained(tmp_path / recipe, recipe), tmp_path / f"{recipe}-out", "--quantized", CODED[recipe]
        )
        for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            scales = [tensors[f"model.layers.0.{module}.{what}"] for module in fused]
            assert all(torch.equal(one, other) and one.shape == (1,) for one, other in pairwise(scales))


def test_blocks_of_training_stay_where_rows_stay_together(tmp_path, capsys):
    """Gate and up rows alternate in our matrix: no 128 x 128 block of theirs is one of ours, so it is rounded anew."""
    run = trained(tmp_path / "run", "fp8_block", "model.dim=256", "model.heads=2", "model.ffn=256")
    arguments = ["export-hf", str(run), "--out", str(tmp_path / "out"), "--quantized", "fp8-block"]
    assert cli.main(arguments) == 2 and not (tmp_path / "out").exists()
    error = capsys.readouterr().err
    assert (
        "model.layers.0.mlp.gate_proj: its rows come from several 128 x 128 blocks" in error and "--requantize" in error
    )
    tensors, config = exported(run, tmp_path / "anew", "--quantized", "fp8-block", "--requantize")
    assert "rounded anew, not as they were trained" in capsys.readouterr().out
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["block_structure"] == [128, 128]
    modules, layout = theirs_of(run, "blocks.0.mlp.gate_up")
    square = Quantizer(E4M3, tile=(128, 128))
    for module, part in zip(modules, layout.split(linears(run)["blocks.0.mlp.gate_up"][1]), strict=True):
        want = square(part)
        assert torch.equal(tensors[f"{module}.weight"].view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(tensors[f"{module}.weight_scale"], want.scale) and want.scale.shape == (2, 2)


REFUSED = {
    "another format": ("fp8", ("nvfp4",), "multiplies by E4M3[*x*] POW2 weights", "--quantized fp8-tensor does"),
    "a format of none": ("int8_switchback", ("fp8-tensor",), "INT8[*x*] FP32", "--requantize rounds them anew"),
    "rotated codes": ("ufp4", ("nvfp4",), "INT4[1x16]", "does not hold"),
    "several quantisers": ("fp4_mixed", ("fp8-tensor",), "does not hold", "--requantize"),
    "BF16": ("bf16", ("fp8-tensor",), "rounds no weights", "not trained with"),
    "backward alone": ("mxfp4", ("mxfp4",), "rounds no weights", "--requantize"),
    "inputs of nvfp4": ("nvfp4", ("nvfp4", "--activations", "dynamic"), "--activations dynamic", "nvfp4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_trained_so_is_refused(tmp_path, capsys, case):
    recipe, options, *says = REFUSED[case]
    run = trained(tmp_path / "run", recipe)
    assert cli.main(["export-hf", str(run), "--out", str(tmp_path / "out"), "--quantized", *options]) == 2
    error = capsys.readouterr().err
    assert all(each in error for each in says) and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_refused(tmp_path, capsys):
    run = trained(tmp_path / "run", "bf16", "model.ffn=192")
    out = str(tmp_path / "out")
    assert cli.main(["export-hf", str(run), "--out", out, "--quantized", "fp8-block", "--requantize"]) == 2
    assert (
        "self_attn.k_proj of 64 x 128 does not fit fp8-block: a 128x128 tile does not divide" in capsys.readouterr().err
    )
    gpt = save(tmp_path / "gpt", *(lambda s: (s.run, s.model))(system("fp8", "gpt_tiny")), 1)
    assert cli.main(["export-hf", str(gpt), "--out", out, "--quantized", "fp8-tensor"]) == 2
    assert "GPT-2's layers are Conv1D" in capsys.readouterr().err
    assert cli.main(["export-hf", str(run), "--out", out, "--requantize"]) == 2
    assert "--requantize and --activations are of --quantized FORMAT" in capsys.readouterr().err
    assert tuple(FORMATS) == export_hf.FORMATS and not (tmp_path / "out").exists()


# --- as others read it: compressed-tensors is no need of this project; CI installs it ---


def read_by_transformers(out, dtype=torch.float32):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is installed by .ci/run")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(out, dtype=dtype, quantization_config=config)


@pytest.mark.parametrize("recipe", BY_DAY)
def test_transformers_computes_the_logits_of_these_codes(tmp_path, recipe):
    """In FP32, weights of codes and scales: 1.7e-6 at most, where logits have a standard deviation of 0.55. The reader
    of NVFP4 and MXFP4 multiplies in BF16, so its weights are the BF16 rounding of code times scale.
    """
    run = trained(tmp_path / "run", recipe)
    exported(run, tmp_path / "out", "--quantized", CODED[recipe])
    model = trained_model(run, recipe="fp32", device=CPU)
    with torch.no_grad():
        theirs = read_by_transformers(tmp_path / "out")(TOKENS).logits
        for (_, linear), (how, weight) in zip(policy.named_linears(model), linears(run).values(), strict=True):
            if not how.fprop.is_identity:
                value = how.fprop.b(weight).dequantize()
                linear.weight.copy_(value.bfloat16().float() if FORMATS[CODED[recipe]].packed else value)
        ours = model.logits(TOKENS)
    assert ours.std() > 0.1
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


def test_transformers_rounds_inputs_where_it_is_asked_to(tmp_path):
    """FP8 of both operands, a scale a token: beside the training forward of the same recipe, in FP32 otherwise."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is installed by .ci/run")
    from transformers import AutoModelForCausalLM

    run = trained(tmp_path / "run", "fp8_rowwise")
    _, config = exported(run, tmp_path / "out", "--quantized", "fp8-channel", "--activations", "dynamic")
    assert config["quantization_config"]["format"] == "float-quantized"
    model, plain = (trained_model(run, recipe=name, device=CPU) for name in ("run", "fp32"))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(TOKENS).logits
        ours, exact = model.logits(TOKENS).float(), plain.logits(TOKENS)
    assert (theirs - ours).square().mean() < (exact - ours).square().mean() * 1.5
    assert (theirs - exact).abs().max() > 1e-3  # inputs were rounded
