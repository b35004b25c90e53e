"""Models exchanged with transformers: the same logits there, the same bits back, and what is refused."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lowprec_train.numerics.draws import SeedTable
from lowprec_train.precision.linear import Linear
from lowprec_train.recipes import fp4, fp8
from lowprec_train.tools.cli import main
from lowprec_train.tools.huggingface import families, shards
from lowprec_train.tools.huggingface.shards import TensorSpec
from lowprec_train.train.weights import fill_from, open_weights, weight_files
from tests.tools.exchanged import MODELS, SIZES, STEP, drawn, logits_of, same, save_run, transformer

RECIPES = {"fp8": fp8.recipe(), "fp4": fp4.recipe()}

CONFIG = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_hidden_layers": 2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_inner": 96, "n_positions": 48},
}
CONFIG["llama"] |= {"num_key_value_heads": 2, "max_position_embeddings": 48, "rms_norm_eps": 1e-6}
CONFIG["mistral"] = CONFIG["llama"] | {"sliding_window": None, "head_dim": 16}
CONFIG["qwen2"] = CONFIG["llama"] | {"tie_word_embeddings": True}
CONFIG["qwen3"] = CONFIG["llama"] | {"head_dim": 16}
CONFIG["olmo2"] = CONFIG["llama"] | {"eos_token_id": None}
CLASSES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "mistral": "MistralForCausalLM"}
CLASSES |= {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "olmo2": "Olmo2ForCausalLM"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """name -> the run directory of a model of that name."""
    root = tmp_path_factory.mktemp("runs")
    for name, sizes in MODELS.items():
        save_run(root / name, drawn(sizes), sizes, tokenizer=None)
    return lambda name: root / name


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """model_type -> a directory as transformers saves a model of that type, in several files."""
    root = tmp_path_factory.mktemp("made")
    for family, name in CLASSES.items():
        config = transformers.AutoConfig.for_model(family, vocab_size=96, **CONFIG[family])
        model = getattr(transformers, name)(config)
        torch.manual_seed(3)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.1)
        model.save_pretrained(root / family, max_shard_size="50KB")
    return lambda family: root / family


def call(*arguments):
    assert main([*map(str, arguments)]) == 0


def refused(capsys, *arguments):
    """What a command says as it refuses."""
    assert main([*map(str, arguments)]) == 2
    return capsys.readouterr().err


def tokens():
    return torch.randint(0, SIZES["vocab_size"], (3, 40), generator=torch.Generator().manual_seed(5))


def tensors(directory):
    """All tensors of a directory of transformers."""
    files = weight_files(directory)
    return {name: tensor for file in set(files.values()) for name, tensor in load_file(file).items()}


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_transformers_are_ours(run, tmp_path, name):
    """In FP32; measured 8e-6 and 3e-12 at most, of logits with a spread of 1.6."""
    call("export-hf", run(name), "--out", tmp_path / "out", "--max-shard-size", "60KB")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        there = theirs(tokens()).logits
    here = logits_of(open_weights(run(name)), tokens())
    assert here.std() > 0.5
    assert (here - there).abs().max() <= 1e-4
    p, q = here.double().log_softmax(-1), there.double().log_softmax(-1)
    assert (p.exp() * (p - q)).sum(-1).max() <= 1e-9


@pytest.mark.parametrize("name", MODELS)
def test_export_and_import_return_the_same_bits(run, tmp_path, name):
    call("export-hf", run(name), "--out", tmp_path / "out")
    call("import-hf", tmp_path / "out", "--out", tmp_path / "back", "--max-shard-size", "60KB")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert same(open_weights(run(name)), open_weights(tmp_path / "back"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [name for name in CLASSES if name != "mistral"])
def test_import_and_export_return_the_same_bits(made, tmp_path, family, dtype):
    source = tmp_path / "source"
    transformers.AutoModelForCausalLM.from_pretrained(made(family), dtype=dtype).save_pretrained(source)
    call("import-hf", source, "--out", tmp_path / "in")
    call("export-hf", tmp_path / "in", "--out", tmp_path / "out")
    before, after = tensors(source), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == dtype for name in before)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out").to_dict()
    unset = {"resid_pdrop", "embd_pdrop", "attn_pdrop", "_name_or_path", "pad_token_id"}
    differing = {k for k, v in transformers.AutoConfig.from_pretrained(source).to_dict().items() if config.get(k) != v}
    assert differing <= unset


@pytest.mark.parametrize("family", CLASSES)
def test_an_imported_model_computes_what_it_did(made, tmp_path, family):
    """Measured 1.2e-7 at most, 1e-5 allowed, of logits with a spread of 0.07 and more."""
    call("import-hf", made(family), "--out", tmp_path / "in")
    with torch.no_grad():
        there = transformers.AutoModelForCausalLM.from_pretrained(made(family)).eval()(tokens()).logits
    assert (logits_of(open_weights(tmp_path / "in"), tokens()) - there).abs().max() <= 1e-5 < there.std() / 1000


def test_a_mistral_is_exported_as_the_llama_that_it_is(made, tmp_path):
    call("import-hf", made("mistral"), "--out", tmp_path / "in")
    call("export-hf", tmp_path / "in", "--out", tmp_path / "out")
    before, after = tensors(made("mistral")), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    there, here = (
        transformers.AutoModelForCausalLM.from_pretrained(each) for each in (made("mistral"), tmp_path / "out")
    )
    assert type(here).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        assert torch.equal(here(tokens()).logits, there(tokens()).logits)


@pytest.mark.parametrize("recipe", ["fp8", "fp4"])
@pytest.mark.parametrize("family", CLASSES)
def test_an_imported_model_trains_on_and_is_exported(made, tmp_path, family, recipe):
    """Five steps on one batch under a recipe lower its loss; transformers computes the loss of what is exported."""
    call("import-hf", made(family), "--out", tmp_path / "in")
    weights = open_weights(tmp_path / "in")
    model = transformer(weights.model, torch.bfloat16)
    model.init_weights(0, fill_from(weights))
    for layer in (each for each in model.modules() if isinstance(each, Linear)):
        layer.recipe = RECIPES[recipe]
    draws = SeedTable(1, model.number_sites(), torch.device("cpu"))
    optimizer, losses, batch = torch.optim.AdamW(model.parameters(), lr=3e-3), [], tokens()
    for step in range(5):
        loss = model.loss(batch, batch.roll(-1, 1), float(batch.numel()), draws=draws.at(step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05, losses
    save_run(tmp_path / "run", model, weights.model, tokenizer=None)
    call("export-hf", tmp_path / "run", "--out", tmp_path / "out")
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = there(batch).logits
    assert (logits - logits_of(open_weights(tmp_path / "run"), batch)).abs().max() <= 1e-5


def test_special_tokens_are_those_that_it_came_with(made, tmp_path):
    """Also where no tokenizer names them."""
    source = altered(made("llama"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"bos_token_id": 5, "eos_token_id": [7, 9]}
    (source / "config.json").write_text(json.dumps(config))
    call("import-hf", source, "--out", tmp_path / "in")
    call("export-hf", tmp_path / "in", "--out", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (found["bos_token_id"], found["eos_token_id"]) == (5, [7, 9])


def test_bf16_is_the_checkpoint_rounded_once(run, tmp_path):
    call("export-hf", run("llama"), "--out", tmp_path / "fp32")
    call("export-hf", run("llama"), "--out", tmp_path / "bf16", "--dtype", "bf16")
    whole, rounded = tensors(tmp_path / "fp32"), tensors(tmp_path / "bf16")
    assert all(torch.equal(whole[name].bfloat16(), rounded[name]) for name in whole)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_files_of_a_bare_gpt2_as_they_were_first_published(made, tmp_path):
    """Names without `transformer.`, a causal mask and its value among the weights, no index."""
    source = tmp_path / "source"
    source.mkdir()
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors(made("gpt2")).items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 48, 48), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(bare | masks, source / "model.safetensors")
    (source / "config.json").write_text((made("gpt2") / "config.json").read_text())
    call("import-hf", source, "--out", tmp_path / "in")
    call("import-hf", made("gpt2"), "--out", tmp_path / "whole")
    assert same(open_weights(tmp_path / "in"), open_weights(tmp_path / "whole"))


def altered(source, out, **changed):
    """A directory of transformers with some of its tensors replaced."""
    out.mkdir()
    save_file(tensors(source) | changed, out / "model.safetensors")
    (out / "config.json").write_text((source / "config.json").read_text())
    return out


def test_parts_of_several_dtypes_are_joined_without_rounding(made, tmp_path, capsys):
    names = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv"]
    name = "model.layers.1.mlp.gate_proj.weight"
    halves = {each: tensors(made("llama"))[each].bfloat16() for each in (names[0], name)}
    call("import-hf", altered(made("llama"), tmp_path / "mixed", **halves), "--out", tmp_path / "in")
    call("export-hf", tmp_path / "in", "--out", tmp_path / "out")
    before, after = tensors(made("llama")), tensors(tmp_path / "out")
    assert all(torch.equal(after[each], before[each] if each not in halves else halves[each].float()) for each in after)
    whole = altered(made("llama"), tmp_path / "whole numbers", **{names[1]: tensors(made("llama"))[names[1]].int()})
    assert f"{names[1]} torch.int32" in refused(capsys, "import-hf", whole, "--out", tmp_path / "no")


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_are_as_large_as_asked_and_indexed(run, tmp_path):
    call("export-hf", run("gpt"), "--out", tmp_path / "out", "--max-shard-size", "0.06MB")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(tmp_path / "out").values())
    for file in files:
        held = load_file(file)
        assert sum(tensor.nbytes for tensor in held.values()) <= 60_000 or len(held) == 1
        assert set(held) == {name for name, where in index["weight_map"].items() if where == file.name}


def test_a_plan_keeps_order_and_gives_a_large_tensor_a_file():
    slots = [TensorSpec(name=str(n), shape=torch.Size([n]), dtype=torch.int8) for n in (3, 4, 3, 20, 1, 9)]
    assert [[slot.name for slot in file] for file in shards.plan(slots, 10)] == [["3", "4", "3"], ["20"], ["1", "9"]]
    assert [shards.size(text) for text in ("2GB", "1.5mb", "70")] == [2_000_000_000, 1_500_000, 70]


def test_nothing_is_left_of_an_export_that_fails(run, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "write", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    assert main(["export-hf", str(run("gpt")), "--out", str(tmp_path / "new" / "out")]) == 2
    assert list((tmp_path / "new").iterdir()) == []


def test_a_step_is_chosen(run, tmp_path, capsys):
    call("export-hf", run("gpt"), "--out", tmp_path / "out", "--step", STEP)
    assert f"step {STEP}" in capsys.readouterr().out
    assert "checkpoints there: [12]" in refused(capsys, "export-hf", run("gpt"), "--out", tmp_path / "b", "--step", 3)


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "rope_scaling": ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "factor"),
    "rope_parameters": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
        "rope_type must be default or llama3",
    ),
    "half of llama3": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}},
        "lacks the key 'factor'",
    ),
    "window": ("mistral", {"sliding_window": 16}, "sliding_window = 16, and this project computes null only"),
    "no window said": ("mistral", {"sliding_window": None}, "lacks the key 'sliding_window'"),
    "no groups said": ("qwen2", {"num_key_value_heads": None}, "lacks the key 'num_key_value_heads'"),
    "no head said": ("qwen3", {"head_dim": None}, "lacks the key 'head_dim'"),
    "windows": ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True"),
    "some windows": ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    "hidden_act": ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "head_dim": ("llama", {"head_dim": 16}, "give a tensor of shape (96, 64), and config.json describes (192, 64)"),
    "narrow heads": ("llama", {"head_dim": 12}, "the head width 12 must be a positive multiple of 8"),
    "mlp_bias": (
        "llama",
        {"mlp_bias": True},
        "mlp_bias = True, and this project computes False, the value of attention_bias, only",
    ),
    "model_type": ("llama", {"model_type": "mixtral"}, "model_type = 'mixtral' needs a mixture of experts"),
    "unknown": (
        "llama",
        {"model_type": "eliza"},
        "model_type = 'eliza' is not supported; supported are llama, qwen2, qwen3, olmo2",
    ),
    "quantised": ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    "layers": ("llama", {"num_hidden_layers": 1}, "has tensors that config.json does not describe: model.layers.1"),
    "more layers": ("llama", {"num_hidden_layers": 3}, "has no model.layers.2"),
    "shape": ("llama", {"intermediate_size": 128}, "mlp.up_proj.weight give a tensor of shape (192, 64)"),
    "heads": ("llama", {"num_attention_heads": 5, "head_dim": None}, "heads must divide dim"),
    "no heads": ("llama", {"num_attention_heads": 0}, "num_attention_heads = 0 is not a positive number"),
    "no positions": ("llama", {"max_position_embeddings": 0}, "max_position_embeddings = 0 is not a positive number"),
    "a flag as text": (
        "llama",
        {"tie_word_embeddings": "yes"},
        "tie_word_embeddings = 'yes' is neither true nor false",
    ),
    "a flag as a number": ("qwen2", {"use_sliding_window": 0}, "use_sliding_window = 0 is neither true nor false"),
    "a size as text": ("llama", {"head_dim": "16"}, "head_dim = '16' is not a positive number"),
    "no number": ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps = 'x' is not a positive number"),
    "no table": ("llama", {"rope_scaling": "x"}, "rope_scaling = 'x' is not a table"),
    "two tables": (
        "llama",
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "are not the same",
    ),
    "no width": ("gpt2", {"n_embd": "wide"}, "n_embd = 'wide' is not a positive number"),
    "missing": ("llama", {"hidden_size": None}, "hidden_size"),
    "activation": ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu'"),
    "no id": ("llama", {"eos_token_id": "</s>"}, "eos_token_id = '</s>' is not a token id"),
    "an id that is negative": ("gpt2", {"bos_token_id": [1, -1]}, "bos_token_id = [1, -1] is not a token id"),
    "a head of its own": ("llama", {"tie_word_embeddings": True}, "lm_head.weight is not model.embed_tokens.weight"),
    "no angle": ("llama", {"rope_parameters": {"rope_theta": "big"}}, "rope_theta = 'big' is not a positive number"),
    "scaling": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_compute_otherwise_is_refused(made, tmp_path, capsys, case):
    family, change, says = REFUSED[case]
    source = tmp_path / "source"
    source.mkdir()
    for file in made(family).iterdir():
        (source / file.name).symlink_to(file)
    config = {**json.loads((source / "config.json").read_text()), **change}
    (source / "config.json").unlink()
    (source / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    assert says in refused(capsys, "import-hf", source, "--out", tmp_path / "in")
    assert not (tmp_path / "in").exists()


def test_other_bad_input_is_reported_in_one_line(run, made, tmp_path, capsys):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    for arguments, says in (
        (("export-hf", run("gpt"), "--out", tmp_path / "used"), "exists; choose another directory"),
        (("export-hf", tmp_path, "--out", tmp_path / "a"), "is neither a run"),
        (
            ("export-hf", run("gpt"), "--out", tmp_path / "a", "--max-shard-size", "much"),
            "'much' is not a positive size",
        ),
        (("import-hf", tmp_path, "--out", tmp_path / "a"), "is not a Hugging Face model directory"),
        (("import-hf", tmp_path / "list", "--out", tmp_path / "a"), "config.json holds [], not an object"),
    ):
        said = refused(capsys, *arguments)
        assert says in said and said.count("\n") == 1


def test_models_without_a_form_there_are_refused():
    for change, says in (({"activation": "gelu"}, "llama has no activation=gelu"), ({"norm": "layernorm"}, "gpt2 has")):
        mixed = MODELS["llama"].__class__(**{**vars(MODELS["llama"]), **change})
        with pytest.raises(ValueError, match=says):
            families.family_of(mixed)
