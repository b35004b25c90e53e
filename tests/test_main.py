"""The command line, end to end on tiny runs: what is written, what is refused and how, what a sweep does."""

import json
import math
import sys
from pathlib import Path

import pytest
import yaml
from torch.nn.modules.module import register_module_forward_pre_hook

from lowprec_train import config, main
from lowprec_train.precision.linear import Linear
from tests.launches import write_modules

SMALL = (
    *("model.layers=1", "model.dim=64", "model.ffn=64", "model.heads=2", "model.kv_heads=2", "model.vocab_size=384"),
    *("data.vocab_size=384", "data.seq_len=64", "micro_batch=2", "tokens_per_step=256", "steps=3", "eval_batches=1"),
)


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """A small corpus: Python files that a tokenizer of 384 pieces can be learnt from."""
    root = tmp_path_factory.mktemp("sources")
    write_modules(root)
    return root


@pytest.fixture
def launch(sources, tmp_path, monkeypatch, capfd):
    """Call main with a command line; returns (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments, small=SMALL, cache=sources.parent / "cache"):
        where = (f"+data.root={sources}", f"data.cache={cache}") if small else ()
        flags = [argument for argument in arguments if argument.startswith("--")]
        values = [argument for argument in arguments if not argument.startswith("--")]
        monkeypatch.setattr(sys, "argv", ["train.py", *flags, *small, *where, *values])
        with pytest.raises(SystemExit) as end:
            main.main()
        out, err = capfd.readouterr()
        return end.value.code or 0, out, err

    return call


def losses(directory):
    lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines}


def only_run(root="runs"):
    (directory,) = (path for path in Path(root).iterdir() if not path.name.startswith("."))
    return directory


def test_a_run_leaves_what_it_was(launch):
    status, out, err = launch("+recipe=fp4")
    assert (status, err) == (0, "")
    run = only_run()
    assert {path.name for path in run.iterdir() if path.name != ".lock"} == {
        *("config.yaml", "recipe.json", "run.json", "metrics.jsonl", "checkpoints", "DONE")
    }
    facts = json.loads((run / "run.json").read_text())
    assert facts["name"] == run.name == f"llama_tiny-fp4-{facts['hash']}"
    assert facts["recipe"] == "fp4" and facts["overrides"] == [] and len(facts["deviations"]) == 1
    assert 0 < facts["valid_unigram_entropy"] < 5.95  # log 384
    first = out.splitlines()[0]
    assert "recipe fp4" in first and all(text in first for text in facts["deviations"])
    linears = json.loads((run / "recipe.json").read_text())
    assert list(linears) == [
        *("blocks.0.attention.qkv", "blocks.0.attention.out", "blocks.0.mlp.gate_up", "blocks.0.mlp.down", "head")
    ]
    assert linears["head"]["execution"] == {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
    assert linears["blocks.0.mlp.down"]["shape"] == [64, 64]
    assert linears["blocks.0.mlp.down"]["recipe"]["fprop"]["a"]["format"] == "E2M1"
    assert linears["blocks.0.mlp.down"]["execution"]["fprop"] == "dequantize" and "quantize" in facts["kernels"]
    started = [line for line in out.split("  data  ")[0].splitlines() if not line.startswith("warning: ")]
    assert len(started) <= 10, started
    assert "  GEMMs      dequantize 12, bf16 3" in started and "m E4M3, v FP16, weights FP32; gradients in E4M3" in out
    assert f"  saved in   runs/{run.name}: config.yaml" in out and "1 process, micro-batches of 2 x 64 tokens" in out
    assert f": {facts['train_tokens']:,} tokens, {facts['valid_tokens']:,} held out; 3 steps of 256 are 768" in out
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["optim"]["schedule"]["steps"] == 3 and saved["resume"] == "auto"
    done = json.loads((run / "DONE").read_text())
    assert done["step"] == 3 and done["train/loss"] == losses(run)[3] and done["valid/loss"] < 6.5


def test_verbose_prints_all_of_it(launch):
    status, out, _ = launch("+recipe=fp4", "verbose=true", "steps=1", "eval_batches=80")
    assert (
        "warning: an evaluation reads eval_batches=80 of 2 sequences, more than are held out: some are counted" in out
    )
    assert status == 0 and "blocks.*.mlp.down 64x64" in out and "[dequantize]" in out and "kernels: quantize: " in out
    assert "\ntokens_per_step: 256\n" in out and "saved for backward: by norms input" in out


def test_a_finished_run_says_so(launch):
    launch("name=a")
    before = losses("runs/a")
    status, out, _ = launch("name=a")
    assert status == 0 and "is done" in out and losses("runs/a") == before


def test_another_configuration_under_the_same_name(launch):
    launch("name=a")
    status, _, err = launch("name=a", "optim.lr=0.5", "seed=7", "checkpoint_keep=5")
    assert status == 1
    assert "optim.lr: saved 0.001, now 0.5" in err and "seed: saved 1234, now 7" in err and "checkpoint_keep" not in err
    assert "resume=never" in err and "Traceback" not in err
    status, _, _ = launch("name=a", "optim.lr=0.5", "resume=never")
    assert status == 0 and Path("runs/a.1/DONE").exists() and Path("runs/a/DONE").exists()
    assert losses("runs/a")[3] != losses("runs/a.1")[3]


def test_another_corpus_under_the_same_name(launch, sources, tmp_path):
    launch("name=a", "eval_interval=1")
    (Path("runs/a") / "DONE").unlink()
    facts = json.loads(Path("runs/a/run.json").read_text())
    Path("runs/a/run.json").write_text(json.dumps(facts | {"corpus_hash": "another"}))
    status, _, err = launch("name=a")
    assert status == 1 and "corpus with hash another" in err and facts["corpus_hash"] in err


def test_resume_repeats_the_losses_bit_for_bit(launch):
    launch("+recipe=mxfp4", "name=whole", "checkpoint_interval=2")
    launch("+recipe=mxfp4", "name=parts", "checkpoint_interval=2")
    run = Path("runs/parts")
    (run / "DONE").unlink()
    (run / "PREEMPTED").write_text("{}")
    (run / "checkpoints" / "latest").write_text("step-2\n")
    status, out, _ = launch("+recipe=mxfp4", "name=parts", "checkpoint_interval=2")
    assert status == 0 and "resuming after step 2 of 3" in out
    assert losses("runs/parts") == losses("runs/whole") and len(losses("runs/whole")) == 3
    assert (run / "DONE").exists() and not (run / "PREEMPTED").exists()


def test_a_sweep_over_recipes(launch):
    status, _, err = launch("--multirun", "+recipe=bf16,fp8", "steps=2")
    assert (status, err) == (0, "")
    runs = sorted(path.name for path in Path("runs").iterdir() if not path.name.startswith("."))
    assert [name.split("-")[1] for name in runs] == ["bf16", "fp8"]
    assert all((Path("runs") / name / "DONE").exists() for name in runs)
    first, second = (losses(Path("runs") / name) for name in runs)
    assert set(first) == {1, 2} and first != second and first[1] == pytest.approx(second[1], abs=0.05)
    assert {path.name for path in Path(".").iterdir()} == {"runs"}


def test_options_may_stand_between_settings(launch):
    status, _, err = launch("+recipe=bf16", "--multirun", "seed=1,2", "steps=1")
    assert (status, err) == (0, "")
    assert len([path for path in Path("runs").iterdir() if not path.name.startswith(".")]) == 2


def test_a_failing_job_does_not_end_the_sweep(launch):
    status, _, err = launch("--multirun", "tokens_per_step=100,128", "steps=1")
    assert status == 1 and "error: tokens_per_step=100" in err
    assert (only_run() / "DONE").exists()


def test_overrides_of_a_recipe_are_logged(launch):
    changes = ("precision.override.dgrad.a.format=E4M3", "comm=fp32", "optim=adamw")
    status, out, _ = launch("+recipe=fp4", *changes, "name=a", "optim.lr=1e-4")
    assert status == 0
    assert "overrides: precision.override.dgrad.a.format=E4M3, comm=fp32, optim=adamw" in out.splitlines()[0]
    linears = json.loads(Path("runs/a/recipe.json").read_text())
    down = linears["blocks.0.mlp.down"]["recipe"]
    assert down["dgrad"]["a"]["format"] == "E4M3" and down["wgrad"]["a"]["format"] == "E5M2"
    assert linears["head"]["gemms"]["dgrad"] == "BF16 x BF16"
    assert json.loads(Path("runs/a/run.json").read_text())["overrides"] == list(changes)


def test_a_recipe_that_is_undone_is_reported(launch):
    status, out, _ = launch("+recipe=fp4", "precision=bf16", "name=a")
    facts = json.loads(Path("runs/a/run.json").read_text())
    assert status == 0 and facts["recipe"] == "bf16"
    assert facts["overrides"] == ["precision=bf16 undoes +recipe=fp4"]
    assert "warning: precision=bf16 undoes +recipe=fp4" in out


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("recipe=fp4", "recipe=fp4: a recipe is added with a plus sign: +recipe=fp4"),
        ("++recipe=fp4", "++recipe=fp4: a recipe is added with a plus sign: +recipe=fp4"),
        ("+recipe=fp5", "there is no recipe 'fp5'; one of"),
        ("+recipe=fp4,unknown", "there is no recipe 'unknown'; one of"),
    ],
)
def test_recipes_are_explained(launch, argument, says):
    sweep = ("--multirun",) if "," in argument else ()
    status, _, err = launch(*sweep, argument, small=())
    assert status == 1 and err.startswith("error: ") and len(err.splitlines()) == 1 and says in err
    assert (", ".join(config.choices("recipe")) in err) == ("one of" in says)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stepz=3"], "Could not override 'stepz'"),
        (
            ["optim.rule={a:1}"],
            "optim.rule={a:1}: optim.rule takes its keys one by one, with a plus sign: +optim.rule.KEY",
        ),
        (["model.width=3"], "Could not override 'model.width'"),
        (["data.seqlen=3"], "Could not override 'data.seqlen'"),
        (["+stepz=3"], "Could not add 'stepz': there is no such key; did you mean steps?"),
        (
            ["optim/moment@optim.grad_accumulation=e4m3"],
            "is added with a plus sign: +optim/moment@optim.grad_accumulation=e4m3",
        ),
        (["optim/moment@optim.grad_accumulate=e4m3"], "there is no such key"),
        ([f"seed={1 << 64}"], f"seed={1 << 64} must be at least 0 and below 2**63"),
        (["++model.width=3"], "Could not add 'model.width'"),
        (["steps=many"], "Value 'many' of type 'str' could not be converted to Integer"),
        (["model.bias=7.5"], "Value '7.5' is not a valid bool"),
        (["model=llama_9b"], "llama_tiny"),
    ],
)
def test_hydra_refuses_unknown_keys_and_wrong_types(launch, arguments, message):
    status, _, err = launch(*arguments, small=())
    assert status == 1 and message in err and err.startswith("error: ") and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["tokens_per_step=300"],
            "tokens_per_step=300 is not a multiple of micro_batch * data.seq_len * data-parallel",
        ),
        (["data.seq_len=100"], "data.seq_len=100 must be a multiple of 8"),
        (["data.seq_len=2048", "tokens_per_step=4096"], "data.seq_len=2048 is longer than model.max_seq_len=1024"),
        (["steps=0"], "steps=0 must be at least 1"),
        (["max_grad_norm=-1"], "max_grad_norm=-1.0"),
        (["optim.eps=0"], "optim.eps=0.0 must be at least 1e-18 and at most 1"),
        (["optim.lr=nan"], "optim.lr=nan must be a number above 0"),
        (["model.norm_eps=inf"], "model.norm_eps=inf must be"),
        (["optim.schedule.final_fraction=-1"], "optim.schedule.final_fraction=-1 must be at least 0 and at most 1"),
        (["model.heads=3"], "heads 3"),
        (["model.norm=batchnorm"], "unknown norm 'batchnorm'"),
        (["model.vocab_size=256"], "model.vocab_size 256 is smaller than the 384 pieces of the tokenizer of"),
        (["+recipe=mxfp4", "model.ffn=80"], "blocks.0.mlp.gate_up"),
        (["+recipe=mxfp4", "micro_batch=1", "data.seq_len=40", "tokens_per_step=40"], "40 tokens"),
        (["resume=sometimes"], "resume=sometimes is not one of auto, never, extend, step-N"),
        (["resume=step-x"], "resume=step-x is not one of"),
        (["resume=step-4", "name=new"], "resume=step-4: there is no run 'new' in runs"),
        (["resume=extend", "name=new"], "resume=extend: there is no run 'new' in runs"),
        (["resume=extend"], "resume=extend: no run in runs differs in length only"),
        (["device=tpu"], "device=tpu is not one of auto, cpu, cuda, cuda:N"),
        (["precision.override.dgrad.c=1", "+recipe=fp4"], "override.dgrad.c: no such field"),
        (["precision.override.dgrad.a.format=E9M9", "+recipe=fp4"], "unknown format 'E9M9'"),
        (["precision.override.dgrad.a.format=E4M3"], "quantises nothing"),
        (["optim=muon", "optim.rule.beta1=0.5"], "is added with a plus sign: +optim.rule.beta1=0.5"),
        (["+data.colour=red"], "data.colour=red: there is no such key; data has"),
        (["optim.schedule.warmup_steps=2"], "give warmup_steps or warmup_fraction, not both"),
        (["name=a/b"], "name='a/b' cannot name a directory"),
    ],
)
def test_bad_input_is_one_error_before_any_step(launch, arguments, message):
    status, _, err = launch(*arguments)
    assert status == 1
    assert err.startswith("error: ") and message in err and "Traceback" not in err
    assert not list(Path().glob("runs/*/metrics.jsonl")) and not list(Path().glob("runs/*/config.yaml"))


def test_a_value_that_must_be_given(launch):
    status, _, err = launch("data=indexed", small=())
    assert status == 1 and err.startswith("error: ") and "data.train" in err and "Traceback" not in err


def test_debug_shows_the_trace(launch):
    status, _, err = launch("steps=0", "debug=true")
    assert status == 1 and "Traceback" in err and "error: steps=0" in err


def test_a_sweep_of_many_processes_is_refused_once(launch, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["train.py", "--multirun", "+recipe=bf16,fp8"])
    with pytest.raises(SystemExit, match=r"WORLD_SIZE=2: --multirun needs one process"):
        main.main()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(main, "PATIENCE", 0)
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 1


def test_a_diverged_run_is_one_error(launch):
    status, _, err = launch("name=a", "optim.lr=1e30", "steps=20", "max_nonfinite_steps=3")
    assert status == 1 and err.startswith("error: training diverged at step") and "Traceback" not in err
    assert "4 steps in a row" in err and not Path("runs/a/DONE").exists() and Path("runs/a/DIVERGED").exists()
    assert Path("runs/a/checkpoints/latest").exists()


def test_a_run_without_an_update_is_not_done(launch):
    """Every gradient is infinite; there are fewer steps than `max_nonfinite_steps`."""
    handle = register_module_forward_pre_hook(
        lambda module, arguments: (
            (arguments[0] * math.inf, *arguments[1:]) if isinstance(module, Linear) and module.training else None
        )
    )
    try:
        for _ in range(2):  # the second time there is no step left to take
            status, _, err = launch("name=a", "steps=3", "max_nonfinite_steps=10", "eval_interval=3")
            assert status == 1 and err == (
                "error: the run has not trained: all 3 steps were skipped as not finite, and no weight has moved\n"
            )
            assert not Path("runs/a/DONE").exists()
    finally:
        handle.remove()


@pytest.fixture
def spoiled():
    """Removable: after two steps of two micro-batches, one input of every MLP's last linear (128 wide) is NaN."""
    passes = 0

    def spoil(module, arguments):
        nonlocal passes
        if not (isinstance(module, Linear) and module.in_features == 128 and module.training):
            return None
        passes += 1
        x = arguments[0].clone()
        if passes > 4:
            x[0, 3, 7] = math.nan
        return (x, *arguments[1:])

    handle = register_module_forward_pre_hook(spoil)
    yield handle
    handle.remove()


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp4", "mxfp4", "mxfp4_fp8"])
def test_nan_in_an_activation_is_one_error_and_spoils_nothing(launch, spoiled, recipe):
    """No format may swallow it; and the run goes on from what was saved, once the cause is gone."""
    command = (f"+recipe={recipe}", "name=a", "model.ffn=128", "steps=8", "max_nonfinite_steps=3")
    status, _, err = launch(*command)
    assert status == 1 and err.startswith("error: training diverged at step 6: loss nan") and "Traceback" not in err
    assert "4 steps in a row" in err and not Path("runs/a/DONE").exists() and Path("runs/a/DIVERGED").exists()
    assert [step for step, loss in losses("runs/a").items() if math.isnan(loss)] == [
        3,
        4,
        5,
        6,
    ]  # one more than allowed
    saved = Path("runs/a/checkpoints/latest").read_text().strip()
    spoiled.remove()
    status, out, err = launch(*command)
    assert (status, err) == (0, "") and f"resuming after step {saved.removeprefix('step-')} of 8" in out
    assert losses("runs/a")[8] < losses("runs/a")[1]
