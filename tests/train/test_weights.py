"""Weights of runs and of imported models: what is read, at which layout, and a run that begins with them."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from lowprec_train.config import model_of
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from lowprec_train.data.tokenizer import store
from lowprec_train.tools.cli import main
from lowprec_train.train import build
from lowprec_train.train.distribute import Distribution
from lowprec_train.train.packages import needs_package
from lowprec_train.train.weights import check_sizes, fill_from, open_weights, other_tokenizer, weight_files
from tests.distributed import run_distributed
from tests.parallel.runs import MICRO, SEQ, TINY, VOCAB, Walks
from tests.recipes import composed
from tests.tools.exchanged import MODELS, STEP, drawn, same, save_run, transformer
from tests.train import weights_ranks
from tests.train.damage import invert
from tests.train.standins import Corpus

ROOT, CPU = Path(__file__).parents[2], torch.device("cpu")
GROUPED = ("model=llama_tiny", "model.kv_heads=2")


@pytest.fixture
def gpt(tmp_path):
    return save_run(tmp_path / "gpt", drawn(MODELS["gpt"]), MODELS["gpt"])


def save_imported(path, model, sizes, dtype):
    path.mkdir()
    OmegaConf.save(OmegaConf.create(asdict(sizes)), path / "model.yaml")
    tensors = {k: v.detach().to(dtype if v.ndim > 1 else v.dtype) for k, v in model.named_parameters()}
    save_file(tensors, path / "model.safetensors")
    return path


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_read_tensor_by_tensor(gpt):
    weights, wanted = open_weights(gpt), dict(drawn(MODELS["gpt"]).named_parameters())
    assert weights.names() == list(wanted)
    for name, parameter in wanted.items():
        assert torch.equal(weights.read(name), parameter) and weights.shape(name) == parameter.shape
        assert weights.dtype(name) == torch.float32
    assert weights.source == f"{gpt}, step {STEP}"
    assert same(weights, open_weights(gpt, STEP)) and same(weights, open_weights(gpt / "checkpoints" / f"step-{STEP}"))


def test_an_imported_directory_keeps_its_dtypes(tmp_path):
    model, sizes = drawn(MODELS["llama"]), MODELS["llama"]
    weights = open_weights(save_imported(tmp_path / "in", model, sizes, torch.bfloat16))
    assert asdict(weights.model) == asdict(sizes) and weights.source == str(tmp_path / "in")
    for name, parameter in model.named_parameters():
        assert weights.dtype(name) == (torch.bfloat16 if parameter.ndim > 1 else torch.float32)
        assert torch.equal(weights.read(name), parameter.to(weights.dtype(name)))


def test_a_model_is_filled_from_either(gpt, tmp_path):
    wanted = drawn(MODELS["gpt"])
    for path in (gpt, save_imported(tmp_path / "in", wanted, MODELS["gpt"], torch.float32)):
        filled = transformer(MODELS["gpt"])
        filled.init_weights(0, fill_from(open_weights(path)))
        assert all(map(torch.equal, filled.parameters(), wanted.parameters()))


def test_what_cannot_be_read_is_refused(gpt, tmp_path):
    def refused(says, path, step=None):
        with pytest.raises(ValueError, match=says):
            open_weights(path, step)

    refused("is neither a run", tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    refused("import it first: lowprec import-hf .*hf --out DIR", tmp_path / "hf")
    refused(r"checkpoints has no step-3; checkpoints there: \[12\]", gpt, 3)
    refused("step 3 was requested, but .*step-12 is the checkpoint of step 12", gpt / "checkpoints" / "step-12", 3)
    imported = save_imported(tmp_path / "in", drawn(MODELS["gpt"]), MODELS["llama"], torch.float32)
    refused("(?s)does not fit the model that it describes.*blocks.0.mlp.gate_up.weight: missing", imported)
    refused("is not a run directory", imported, 3)
    (imported / "model.safetensors").write_bytes(b"\0" * 100)
    refused("has no readable weights", imported)
    (imported / "model.yaml").write_text("dim: wide\n")
    refused("does not describe a model", imported)
    (imported / "model.yaml").write_bytes(b"\xff\xfe\0")
    refused("model.yaml does not describe a model", imported)
    data = next((gpt / "checkpoints" / f"step-{STEP}").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    refused("is incomplete: .*distcp has", gpt)
    (gpt / "checkpoints" / "latest").unlink()
    refused(r"latest is missing; choose a checkpoint, .*step-N; checkpoints there: \[12\]", gpt)
    (gpt / "checkpoints" / f"step-{STEP}").rename(tmp_path / "elsewhere")
    refused("has no checkpoint yet", gpt)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": 3}, "{'weight_map': 3}, not"),
        ([1], r"\[1\], not"),
        ({}, "{}, not"),
        ({"weight_map": {}}, "{'weight_map': {}}, not"),
        ({"weight_map": {"norm.weight": 7}}, "maps norm.weight to 7, not to the name of a file"),
        ({"weight_map": {"norm.weight": ["a"]}}, r"maps norm.weight to \['a'\], not"),
        *(
            ({"weight_map": {"norm.weight": file}}, f"maps norm.weight to '{file}', not")
            for file in ("../x/model.safetensors", "/x/model.safetensors", "x/model.safetensors", "..", "")
        ),
    ],
)
def test_an_index_maps_names_to_files_beside_it(index, says, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{tmp_path} has no readable weights .*model.safetensors.index.json.*{says}"):
        weight_files(tmp_path)


def test_a_tensor_that_the_index_does_not_name_is_missing(tmp_path):
    imported = save_imported(tmp_path / "in", drawn(MODELS["gpt"]), MODELS["gpt"], torch.float32)
    names = dict.fromkeys(open_weights(imported).names()[1:], "model.safetensors")
    (imported / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ValueError, match="(?s)does not fit the model that it describes.*: missing"):
        open_weights(imported)


@pytest.mark.parametrize("damaged", ["*.distcp", ".metadata", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_in_one_line(gpt, damaged, monkeypatch):
    """What reads one model does not take another; bytes are not compared where the run says so."""
    (file,) = (gpt / "checkpoints" / f"step-{STEP}").glob(damaged)
    invert(file, count=8)
    with pytest.raises(ValueError, match=f"step-{STEP} is damaged: {file.name} is not") as error:
        open_weights(gpt)
    assert "\n" not in str(error.value) and str(error.value).endswith("; checkpoints there: [12]")
    if damaged == "*.distcp":
        (gpt / "config.yaml").write_text((gpt / "config.yaml").read_text() + "checkpoint_verify: false\n")
        assert open_weights(gpt).names()


@pytest.mark.parametrize("module", [None, "no_such_thing", "no_such_thing.inside"])
def test_a_missing_package_is_reported_with_what_helps(module):
    says = r"reading x needs the package 'no_such_thing': pip install 'lowprec_train\[hf\]'"
    with pytest.raises(ValueError, match=says):
        needs_package("no_such_thing", extra="hf", what="reading x", module=module)


def test_all_sizes_that_differ_are_named_at_once(gpt):
    weights, gpt_sizes = open_weights(gpt), MODELS["gpt"]
    check_sizes(replace(gpt_sizes, name="other", recompute="full"), weights)
    with pytest.raises(ValueError, match=r"(?s)model.ffn: weights 96, run 128\n  model.tied: weights True, run False"):
        check_sizes(replace(gpt_sizes, ffn=128, tied=False), weights)
    with pytest.raises(ValueError, match="model.max_seq_len: weights 48, run 64"):
        check_sizes(replace(gpt_sizes, max_seq_len=64), weights)


def test_rotary_positions_may_reach_further(tmp_path):
    path = save_run(tmp_path / "llama", drawn(MODELS["llama"]), MODELS["llama"])
    check_sizes(replace(MODELS["llama"], max_seq_len=4096), open_weights(path))


def test_another_tokenizer_is_reported(tmp_path, gpt):
    def learnt(name, size):
        (tmp_path / name).mkdir()
        texts = [path.read_text() for path in (ROOT / "lowprec_train").glob("*.py")]
        return store(SentencePieceTokenizer.train(texts, size, name), tmp_path / name)

    own, same_text, other = learnt("own", 400), learnt("same", 400), learnt("other", 450)
    assert other_tokenizer(open_weights(gpt), other) == ""  # run.json names none
    (gpt / "run.json").write_text(json.dumps({"tokenizer": str(own)}))
    assert other_tokenizer(open_weights(gpt), same_text) == other_tokenizer(open_weights(gpt), None) == ""
    assert f"the data has {other}: the token ids differ" in other_tokenizer(open_weights(gpt), other)
    own.unlink()
    assert other_tokenizer(open_weights(gpt), other) == ""


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_four_processes_begin_with_weights_and_what_they_save_is_exported(tmp_path):
    """dp 2 x tp 2, BF16 masters: the checkpoint, its export and an import of that have the whole tensors."""
    sizes = composed(*weights_ranks.MODEL).model
    start = save_imported(tmp_path / "start", drawn(sizes), sizes, torch.bfloat16)
    ranks = run_distributed(weights_ranks.work, weights_ranks.SIZES, start, tmp_path)
    truth, first = ranks[0][0], open_weights(start)
    assert all(torch.equal(truth["before"][name].float(), first.read(name).float()) for name in first.names())

    saved = open_weights(tmp_path / "run")
    moved = [name for name in saved.names() if not torch.equal(saved.read(name).float(), first.read(name).float())]
    assert set(moved) >= {"blocks.0.attention.qkv.weight", "blocks.1.mlp.gate_up.weight", "norm.weight"}
    assert {saved.dtype(name) for name in saved.names()} == {torch.bfloat16, torch.float32}
    assert main(["export-hf", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--tokenizer", "none"]) == 0
    assert main(["import-hf", str(tmp_path / "out"), "--out", str(tmp_path / "back")]) == 0
    back = open_weights(tmp_path / "back")
    for name, tensor in truth["after"].items():
        assert torch.equal(saved.read(name), tensor)
        assert torch.equal(back.read(name), tensor.float())

    refused = {each[1] for each in ranks}
    assert len(refused) == 1, "lost numbers of one rank end the run on all, in the same words"
    said = refused.pop()
    assert "checkpoint of step 2 could not be written" in said and "step-1 is intact" in said
    assert "NaN or infinity in model.blocks.1.mlp.down.weight (2 of " in said


# --- a run that begins with weights -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A small LLaMA that has learnt a little of `Walks`, exported to transformers and imported again."""
    root = tmp_path_factory.mktemp("learnt")
    trainer = trainer_of("+recipe=bf16", *GROUPED, "steps=20", "optim.lr=6e-3")
    for _ in range(20):
        trainer.step()
    save_run(root / "run", trainer.model, composed(*TINY, *GROUPED).model)
    assert main(["export-hf", str(root / "run"), "--out", str(root / "there")]) == 0
    assert main(["import-hf", str(root / "there"), "--out", str(root / "in")]) == 0
    return root


def trainer_of(*overrides, first=None):
    run = composed(*overrides, *(each for each in TINY if first is None or not each.startswith("model")))
    run.tokens_per_step = 4 * MICRO * SEQ
    laid_out = build.layout(run)
    plans = laid_out.plans(CPU)
    text = Corpus(Walks(), Walks())
    fill = first and fill_from(first)
    return build.trainer(run, laid_out, plans, text, Distribution(), CPU, compiled=False, fill=fill)


def loss_of_first_step(logits_of):
    batch = Walks().batch(0, 0, 4 * MICRO, 4 * MICRO)
    targets = torch.cat([Walks().batch(0, at, MICRO, 4 * MICRO).targets for at in range(0, 4 * MICRO, MICRO)])
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(logits_of(batch.tokens).flatten(0, 1), targets.flatten()).item()


@pytest.mark.parametrize(("recipe", "within"), [("bf16", 0.001), ("fp4", 0.01)])
def test_pretraining_goes_on_from_an_imported_model(learnt, recipe, within):
    """The first loss is that of transformers on the same tokens, but for what is rounded; unlearnt weights have 4.2."""
    import transformers

    there = transformers.AutoModelForCausalLM.from_pretrained(learnt / "there").eval()
    wanted = loss_of_first_step(lambda tokens: there(tokens).logits)
    overrides = (f"+recipe={recipe}", f"weights={learnt / 'in'}", "model=from_checkpoint")
    run = composed(*overrides, *TINY[3:])
    trainer = trainer_of(*overrides, first=build.first_weights(run, learnt / "none"))
    begun = float(trainer.step()["train/loss"])
    assert begun == pytest.approx(wanted, abs=within)
    assert wanted < 3.2 < math.log(VOCAB)


def test_a_run_with_a_checkpoint_needs_its_first_weights_no_more(learnt):
    """A run that was killed before its first checkpoint begins with them again; afterwards they may be gone."""
    run = composed("weights=gone/away")
    assert build.first_weights(run, learnt / "run") is None
    with pytest.raises(ValueError, match="gone/away is neither a run"):
        build.first_weights(run, learnt / "none")
    assert build.first_weights(composed(), learnt / "none") is None


def test_a_run_begins_again_where_it_has_begun(learnt):
    """Not with what the run that it took its weights from has learnt since."""
    run = composed(f"weights={learnt / 'run'}", "model=from_checkpoint", "data.seq_len=64")
    opened = build.first_weights(run, learnt / "none")
    assert build.begun_with(opened, {})["weights_step"] == opened.step == STEP
    with pytest.raises(ValueError, match=f"step-{STEP - 1}"):
        build.first_weights(run, learnt / "none", STEP - 1)
    said = {"weights": "there", "weights_step": STEP - 1}
    assert build.begun_with(None, said) == said


def test_sizes_are_taken_from_weights(learnt):
    wanted = model_of(learnt / "run")
    for path in (learnt / "run", learnt / "run" / "checkpoints" / f"step-{STEP}", learnt / "in"):
        found = composed(f"weights={path}", "model=from_checkpoint", "data.seq_len=64").model
        assert asdict(found) | {"name": ""} == asdict(wanted) | {"name": ""}
    with pytest.raises(Exception, match="takes its sizes from weights=..., which is null"):
        composed("model=from_checkpoint")
