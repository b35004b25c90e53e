"""Weights in codes as compressed-tensors has them: bytes against our quantiser, layers against the training forward."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open

from lowprec_train.numerics.formats import E4M3
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.precision import policy
from lowprec_train.recipes import nvfp4
from lowprec_train.tools import cli, export_hf
from lowprec_train.tools.huggingface.families import LLAMA
from lowprec_train.tools.huggingface.input_quantization import E2M1_GROUPS, InputQuantization
from lowprec_train.tools.huggingface.quantized import FORMATS
from lowprec_train.train.trained import Trained
from lowprec_train.train.weights import open_weights
from tests.recipes import system
from tests.saved import save
from tests.tools import exported_logits
from tests.tools.exported_logits import WIDE, by_layer, reader, trained, training

CPU = torch.device("cpu")
CODED = {  # recipe -> format
    "fp8": "fp8-tensor",
    "fp8_rowwise": "fp8-channel",
    "fp4": "fp8-channel",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "w4a8": "mxfp4",
}
INPUTS = {"fp4": None, "nvfp4": None}  # where no way to round inputs without a calibration is that of training
TINY = ("model.kv_heads=2", "model.layers=7")
BY_DAY = [each if each in ("fp8", "nvfp4") else pytest.param(each, marks=pytest.mark.nightly) for each in CODED]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TOKENS = torch.randint(0, 64, (2, 48), generator=torch.Generator().manual_seed(3))


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
    if scale.dtype == torch.uint8:
        return codes * (2.0 ** (scale.float() - 127)).repeat_interleave(32, 1)
    if scale.ndim == 2 and scale.shape[0] != codes.shape[0]:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes * scale


def linears(run):
    """Name -> (recipe of the run, its weight in BF16)."""
    opened, model = open_weights(run), Trained(run).model("run", device=CPU)
    return {name: (each.recipe, opened.read(f"{name}.weight").bfloat16()) for name, each in policy.named_linears(model)}


def hf_modules(run, name):
    weights = open_weights(run)
    layout = LLAMA.layout(f"{name}.weight", weights.model)
    return [each.removesuffix(".weight") for each in LLAMA.hf_names(f"{name}.weight")], layout


@pytest.mark.parametrize("recipe", BY_DAY)
def test_codes_are_those_of_the_forward_pass(tmp_path, recipe):
    """Byte for byte; a linear that computes in BF16 keeps its values and is named in `ignore`."""
    run = trained(tmp_path / "run", recipe, *TINY)
    tensors, config = exported(run, tmp_path / "out", "--quantized", CODED[recipe])
    told, form = config["quantization_config"], FORMATS[CODED[recipe]]
    bf16 = CODED[recipe] in export_hf.DECODED_TO_BF16
    assert config["torch_dtype"] == ("bfloat16" if bf16 else "float32")
    assert tensors["model.norm.weight"].dtype == (torch.bfloat16 if bf16 else torch.float32)
    ignored, coded = [], 0
    for name, (how, weight) in linears(run).items():
        modules, layout = hf_modules(run, name)
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
    inputs = INPUTS.get(recipe, {"num_bits": 8, "group_size": 32, "dynamic": True})
    assert group["targets"] == ["Linear"] and (group["input_activations"] or {}).items() >= (inputs or {}).items()
    assert (group["input_activations"] is None) == (inputs is None)
    assert group["weights"]["num_bits"] == (4 if form.packed else 8)


def test_layers_that_readers_fuse_have_one_scale(tmp_path):
    """vLLM multiplies q, k, v and gate, up as one: a scale of a tensor, and NVFP4's outer one, is the same for them."""
    for recipe, what in (("fp8", "weight_scale"), ("nvfp4", "weight_global_scale")):
        tensors, _ = exported(
            trained(tmp_path / recipe, recipe, *TINY), tmp_path / f"{recipe}-out", "--quantized", CODED[recipe]
        )
        for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            scales = [tensors[f"model.layers.0.{module}.{what}"] for module in fused]
            assert all(torch.equal(one, other) and one.shape == (1,) for one, other in pairwise(scales))


def test_blocks_keep_the_values_of_training(tmp_path, capsys):
    """Gate and up rows alternate in our matrix, so two of our 128 x 128 blocks meet in one of theirs: under a power of
    two of its own it has the values of training, but for E4M3's subnormal numbers, which are counted and told.
    """
    run = trained(tmp_path / "run", "fp8_block", *WIDE, "model.layers=2")
    tensors, config = exported(run, tmp_path / "out", "--quantized", "fp8-block")
    told = capsys.readouterr().out
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["block_structure"] == [128, 128]
    other = 0
    for name, (how, weight) in linears(run).items():
        if how.fprop.is_identity:
            continue
        modules, layout = hf_modules(run, name)
        made = how.fprop.b(weight).dequantize()
        rebuilt = layout.join([values(tensors, module) for module in modules])
        differs = rebuilt != made
        other += int(differs.sum())
        assert name.endswith("gate_up") or not differs.any()
        assert (rebuilt - made).abs().max() <= made.abs().max() * 2**-18
    assert other < 1000 and (f"{other} weights of" in told) == (other > 0)
    tensors, _ = exported(run, tmp_path / "anew", "--quantized", "fp8-block", "--requantize")
    assert "requantised, not as trained" in capsys.readouterr().out
    modules, layout = hf_modules(run, "blocks.0.mlp.gate_up")
    square = Quantizer(E4M3, tile=(128, 128))
    for module, part in zip(modules, layout.split(linears(run)["blocks.0.mlp.gate_up"][1]), strict=True):
        want = square(part)
        assert torch.equal(tensors[f"{module}.weight"].view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(tensors[f"{module}.weight_scale"], want.scale)


REFUSED = {
    "another format": ("fp8", ("nvfp4",), "cannot store the E4M3[*x*] POW2 weights", "--quantized fp8-tensor can"),
    "a format of none": (
        "int8_switchback",
        ("fp8-tensor",),
        "INT8[*x*] FP32",
        "--requantize quantises them to fp8-tensor",
    ),
    "rotated codes": ("ufp4", ("nvfp4",), "INT4[1x16]", "cannot store"),
    "several quantisers": ("fp4_mixed", ("fp8-tensor",), "cannot store", "--requantize"),
    "BF16": ("bf16", ("fp8-tensor",), "quantises no weights", "not trained with"),
    "backward alone": ("mxfp4", ("mxfp4",), "quantises no weights", "--requantize"),
    "inputs of nvfp4": (
        "nvfp4",
        ("nvfp4", "--activations", "dynamic"),
        "--activations dynamic",
        "nvfp4 supports none, static",
    ),
    "no calibration": ("fp8", ("fp8-tensor", "--activations", "static"), "static needs --calibration PATH"),
    "a wrong way": ("mxfp8", ("mxfp8", "--activations", "static"), "mxfp8 supports none, mx"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_trained_so_is_refused(tmp_path, capsys, case):
    recipe, options, *says = REFUSED[case]
    run = trained(tmp_path / "run", recipe, *TINY)
    assert cli.main(["export-hf", str(run), "--out", str(tmp_path / "out"), "--quantized", *options]) == 2
    error = capsys.readouterr().err
    assert all(each in error for each in says) and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_refused(tmp_path, capsys):
    run = trained(tmp_path / "run", "bf16", *TINY, "model.ffn=192")
    out = str(tmp_path / "out")
    assert cli.main(["export-hf", str(run), "--out", out, "--quantized", "fp8-block", "--requantize"]) == 2
    assert (
        "self_attn.k_proj of 64 x 128 does not fit fp8-block: a 128x128 tile does not divide" in capsys.readouterr().err
    )
    narrow = trained(tmp_path / "narrow", "fp8", *TINY, "model.ffn=80")
    assert cli.main(["export-hf", str(narrow), "--out", out, "--quantized", "fp8-tensor"]) == 2
    assert "mlp.down_proj has 80 input features, which groups of 32 do not divide" in capsys.readouterr().err
    nowhere = ["--quantized", "fp8-tensor", "--calibration", str(tmp_path / "nowhere")]
    assert cli.main(["export-hf", str(run), "--out", out, *nowhere, "--requantize"]) == 2
    assert "nowhere: no such file or prepared set" in capsys.readouterr().err
    gpt = save(tmp_path / "gpt", *(lambda s: (s.run, s.model))(system("fp8", "gpt_tiny")), 1)
    assert cli.main(["export-hf", str(gpt), "--out", out, "--quantized", "fp8-tensor"]) == 2
    assert "GPT-2's layers are Conv1D" in capsys.readouterr().err
    assert cli.main(["export-hf", str(run), "--out", out, "--requantize"]) == 2
    assert "--requantize, --activations and --calibration need --quantized FORMAT" in capsys.readouterr().err
    assert tuple(FORMATS) == export_hf.FORMATS and not (tmp_path / "out").exists()


# --- as others read it: compressed-tensors is no need of this project, but of its tests ---


def read_by_transformers(out, dtype=torch.float32):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is of the extra `dev`")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(out, dtype=dtype, quantization_config=config)


@pytest.mark.parametrize("recipe", BY_DAY)
def test_transformers_computes_the_logits_of_these_codes(tmp_path, recipe):
    """In FP32, weights of codes and scales: 1.7e-6 at most, where logits have a standard deviation of 0.55. The reader
    of NVFP4 and MXFP4 multiplies in BF16, so its weights are the BF16 rounding of code times scale.
    """
    run = trained(tmp_path / "run", recipe, *TINY)
    exported(run, tmp_path / "out", "--quantized", CODED[recipe], "--dtype", "fp32")
    model = Trained(run).model("fp32", device=CPU)
    with torch.no_grad():
        theirs = read_by_transformers(tmp_path / "out")(TOKENS).logits
        for (_, linear), (how, weight) in zip(policy.named_linears(model), linears(run).values(), strict=True):
            if not how.fprop.is_identity:
                value = how.fprop.b(weight).dequantize()
                linear.weight.copy_(value.bfloat16().float() if FORMATS[CODED[recipe]].packed else value)
        ours = model.logits(TOKENS)
    assert ours.std() > 0.1
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


LAYERS = {  # recipe -> format, way, options, least share of inputs with the values of training, outputs' difference
    "fp8": ("fp8-tensor", "mx", (), 0.995, 1e-4),
    "fp8 static": ("fp8-tensor", "static", (), 0.998, 1e-4),
    "fp8_rowwise": ("fp8-channel", "mx", (), 0.995, 1e-4),
    "fp8_block": ("fp8-block", "mx", (), 0.995, 1e-4),
    "mxfp8": ("mxfp8", "mx", (), 0.9999, 1e-5),
    "w4a8": ("mxfp4", "mx", (), 0.995, 1e-4),
}


@pytest.mark.parametrize(
    "case", [each if each == "fp8 static" else pytest.param(each, marks=pytest.mark.nightly) for each in LAYERS]
)
def test_layers_of_transformers_are_those_of_training(tmp_path, case):
    """Each layer, given the input of training: its inputs are rounded to the same values, its outputs differ by the
    order of sums. A scale of one token or tensor leaves E4M3's subnormal numbers to differ from a finer or wider one.
    """
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is of the extra `dev`")
    form, way, options, share, apart = LAYERS[case]
    run = trained(tmp_path / "run", case.split()[0], *WIDE, *(("model.layers=2",) if case != "nvfp4" else ()))
    exported_logits.exported(run, tmp_path / "out", form, way, *options)
    with torch.no_grad():
        model, theirs = training(run, torch.float32), reader(tmp_path / "out", torch.float32)
        equal, largest = by_layer(run, model, theirs, exported_logits.tokens(5))
    assert equal >= share and largest <= apart


def test_inputs_of_nvfp4_have_the_codes_of_training_under_the_scale_of_a_batch():
    """Training takes the outer scale of each batch; the reader has that of the calibration, with a binade to spare."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is of the extra `dev`")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    inputs = InputQuantization(mode="static", args=E2M1_GROUPS, amax={"one": float(x.abs().max())})
    ((name, outer),) = inputs.tensors("one", "m")
    args = QuantizationArgs(**E2M1_GROUPS)
    scale, zero = compute_dynamic_scales_and_zp(x, args, None, global_scale=outer)
    theirs = fake_quantize(x, scale, zero, args, global_scale=outer)
    ours = nvfp4.recipe().fprop.a(x).dequantize()
    assert name == "m.input_global_scale"
    torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=0)
    assert "NVFP4" in inputs.difference(nvfp4.recipe())


FAMILIES = {
    "Qwen2ForCausalLM": ("model.qkv_bias=true",),
    "Qwen3ForCausalLM": ("model.attention=qk_norm",),
    "Olmo2ForCausalLM": ("model.attention=full_qk_norm", "model.norm_placement=post"),
    "LlamaForCausalLM": ("model.tied=true",),
}


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_from_several_files(tmp_path, family):
    """MXFP8 codes, whose layers are those of training: logits of two blocks, where few roundings tip."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is of the extra `dev`")
    run = trained(tmp_path / "run", "mxfp8", *WIDE, "model.layers=2", *FAMILIES[family])
    exported_logits.exported(run, tmp_path / "out", "mxfp8", "mx", "--max-shard-size", "300KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    with torch.no_grad():
        theirs, read = reader(tmp_path / "out", torch.float32), exported_logits.tokens(3)
        apart = training(run, torch.float32).logits(read).float() - theirs(read).logits
    assert type(theirs).__name__ == family and exported_logits.rms(apart) < 0.02
