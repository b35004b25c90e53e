"""How a launch goes on with an earlier run: what is lost is found, refused or kept; runs go back and get longer.

Every run here is a copy of one that trained 12 steps, with a WSD schedule that decays over the last four.
"""

import json
import shutil
import sys

import pytest
import yaml

from lowprec_train import main
from tests.train.damage import invert, shards

NOUNS = ("loss", "scale", "tile", "token", "block", "codes", "draws", "layer", "model", "train", "valid")
TIMES = ("time/", "perf/", "mem/")
SMALL = (
    *("model.layers=1", "model.dim=64", "model.ffn=64", "model.heads=2", "model.kv_heads=2", "model.vocab_size=320"),
    *("data=text", "data.vocab_size=320", "data.seq_len=32", "micro_batch=2", "tokens_per_step=64", "eval_batches=1"),
    *("eval_interval=5", "checkpoint_interval=4", "checkpoint_async=false", "checkpoint_keep=9"),
)
WSD = ("optim/schedule=wsd", "optim.schedule.warmup_fraction=null", "optim.schedule.warmup_steps=2")
WSD += ("optim.schedule.decay_fraction=null", "optim.schedule.decay_steps=4")
BRIEF = ("steps=2", "optim.schedule.warmup_steps=0", "optim.schedule.decay_steps=1")
RUN = ("+recipe=mxfp4", *SMALL, *WSD)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A working directory with some text, and the tokens that are made of it."""
    home = tmp_path_factory.mktemp("home")
    (home / "text").mkdir()
    for number in range(40):
        text = "\n".join(f"def {NOUNS[i * number % 11]}_{i}(x): return x * {i * 7 + number}" for i in range(40))
        (home / "text" / f"{number}.txt").write_text(text)
    return home


@pytest.fixture(scope="module")
def trained(home):
    """Run directories: of 12 steps as `run`; of 12 and of 16 with checkpoint_keep=1 as `short` and `long`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for command in (
            ("name=run", "steps=12"),
            ("name=short", "steps=12", "checkpoint_keep=1", "checkpoint_interval=100"),
            ("name=long", "steps=16", "checkpoint_keep=1", "checkpoint_interval=100"),
        ):
            assert call(patch, home, *RUN, *command, "run_root=trained") == 0
    return home / "trained"


def call(patch, home, *arguments):
    for name in ("RANK", "WORLD_SIZE"):
        patch.delenv(name, raising=False)
    data = () if any(a.startswith("data.train=") for a in arguments) else (f"data.train={home / 'text'}",)
    patch.setattr(sys, "argv", ["train.py", *arguments, *data, f"data.cache={home / 'cache'}"])
    with pytest.raises(SystemExit) as end:
        main.main()
    return end.value.code or 0


@pytest.fixture
def launch(trained, home, tmp_path, monkeypatch, capfd):
    """A function of a command line, run beside copies of the trained runs; returns (exit status, stdout, stderr)."""
    shutil.copytree(trained, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)

    def launched(*arguments):
        status = call(monkeypatch, home, *RUN, *arguments)
        return status, *capfd.readouterr()

    return launched


@pytest.fixture
def run(launch, tmp_path):
    """The run as a kill in step 10 leaves it: checkpoints of steps 4 and 8."""
    run = tmp_path / "runs" / "run"
    (run / "DONE").unlink()
    shutil.rmtree(run / "checkpoints" / "step-12")
    (run / "checkpoints" / "latest").write_text("step-8\n")
    cut(run, 10)
    return run


def cut(run, lines):
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:lines]))


def numbers(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def steps(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def contents(directory):
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(directory): path.read_bytes() for path in files}


# --- nothing is lost, nothing is silent ---


def test_a_lost_pointer_begins_nothing_again(launch, run, trained):
    (run / "checkpoints" / "latest").unlink()
    status, out, err = launch("name=run", "steps=12")
    assert (status, err) == (0, "") and "resuming after step 8 of 12" in out
    assert out.count("latest is missing; continuing from step-8") == 1
    assert numbers(run) == numbers(trained / "run") and steps(run) == [4, 8, 12]


def test_a_directory_in_place_of_the_pointer_begins_nothing_again(launch, run, trained):
    (run / "checkpoints" / "latest").unlink()
    (run / "checkpoints" / "latest").mkdir()
    status, out, err = launch("name=run", "steps=12")
    assert (status, err) == (0, "") and out.count("latest: Is a directory; continuing from step-8") == 1
    assert numbers(run) == numbers(trained / "run") and steps(run) == [4, 8, 12]
    assert not list((run / "checkpoints").glob("*.partial"))


def test_inverted_bytes_lead_to_the_checkpoint_before(launch, run, trained):
    invert(shards(run / "checkpoints" / "step-8")[0])
    status, out, _ = launch("name=run", "steps=12")
    assert status == 0 and "resuming after step 4 of 12" in out
    (line,) = [line for line in out.splitlines() if "is damaged" in line]
    assert "__0_0.distcp is not as it was written" in line and line.endswith("; continuing from step-4")
    assert numbers(run) == numbers(trained / "run") and (run / "checkpoints" / "damaged-step-8").is_dir()


def test_a_state_of_another_step_is_refused(launch, run):
    """Files exchanged, and only their sizes compared."""
    checkpoints = run / "checkpoints"
    for file in ("__0_0.distcp", ".metadata"):
        shutil.copy(checkpoints / "step-4" / file, checkpoints / "step-8" / file)
    before = contents(run)
    status, _, err = launch("name=run", "steps=12", "checkpoint_verify=false")
    assert status == 1 and "checkpoints/step-8 holds the state of step 4; checkpoints there: [4, 8]" in err
    assert contents(run) == before


LOSSES = {
    "all checkpoints": lambda run: remove(*(run / "checkpoints").glob("step-*")),
    "all but the pointer's name": lambda run: remove(*(run / "checkpoints").iterdir()),
    "their folder": lambda run: remove(run / "checkpoints"),
    "all checkpoints, after a signal": lambda run: (
        cut(run, 2),
        (run / "PREEMPTED").write_text('{"step": 2, "signal": "SIGTERM"}'),
        remove(*(run / "checkpoints").iterdir()),
    ),
}


def remove(*paths):
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(launch, run, loss):
    LOSSES[loss](run)
    before = contents(run)
    status, _, err = launch("name=run", "steps=12")
    assert status == 1 and err.startswith("error: ") and "Traceback" not in err and err.count("\n") <= 3
    assert "runs/run" in err and "no checkpoint in" in err and "use resume=never to move the run to run.1" in err
    assert contents(run) == before


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.yaml", None, "run 'run' in runs has checkpoints (4, 8) and metrics.jsonl but no config.yaml"),
        ("config.yaml", "", "config.yaml holds no settings; it is empty or was cut off"),
        ("config.yaml", "steps: [", "config.yaml is not YAML"),
        ("config.yaml", "just words", "config.yaml is not the configuration of a run"),
        ("config.yaml", b"\xff\xfe\x00", "config.yaml is not YAML"),
        ("config.yaml", "model: {}", "config.yaml has steps: None, which is not a number of steps"),
        ("config.yaml", "model: {}\nsteps: 12\ncheckpoint_interval: a", "config.yaml has checkpoint_interval: a, "),
        ("run.json", None, "run.json is missing"),
        ("run.json", "", "run.json cannot be read"),
        ("run.json", "[1]", "run.json holds '[1]', not a JSON object"),
        ("run.json", '{"name": "run"}', "run.json has no corpus_hash"),
        ("DONE", "", "DONE cannot be read"),
        ("DONE", b"\x00\x01", "DONE cannot be read"),
        ("PREEMPTED", "{", "PREEMPTED cannot be read"),
        ("PREEMPTED", '{"step": "x"}', "PREEMPTED has step 'x'"),
        ("metrics.jsonl", '{"step": 1}\nnonsense\n', "metrics.jsonl, line 2 cannot be read"),
        ("metrics.jsonl", b"[" * 100_000 + b"\n", "metrics.jsonl, line 1 cannot be read (maximum recursion depth"),
        ("telemetry.jsonl", b"\xff\n", "telemetry.jsonl, line 1 cannot be read"),
    ],
)
def test_a_spoiled_file_of_a_run_is_named(launch, run, file, content, says):
    if content is None:
        (run / file).unlink()
    else:
        (run / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = contents(run)
    status, _, err = launch("name=run", "steps=12")
    assert status == 1 and err.startswith("error: ") and says in err and "Traceback" not in err
    assert err.count("\n") == 1 and contents(run) == before


def test_a_run_without_its_configuration_is_moved_aside_on_request(launch, run):
    (run / "config.yaml").unlink()
    before = contents(run)
    assert launch("name=run", *BRIEF, "resume=never")[0] == 0
    assert contents(run.with_name("run.1")) == before and len(numbers(run)) == 2


def test_a_run_that_was_to_be_moved_aside_comes_back_where_none_began(launch, run, tmp_path):
    before = contents(run)
    status, _, err = launch("name=run", *BRIEF, "resume=never", "data.train=nowhere")
    assert status == 1 and "nowhere" in err and contents(run) == before
    assert not run.with_name("run.1").exists()


def test_lines_that_are_lost_are_reported(launch, run, trained):
    """A crash of the machine takes lines that were not on the disk yet."""
    cut(run, 5)
    status, out, err = launch("name=run", "steps=12")
    assert (status, err) == (0, "") and "metrics.jsonl has no metrics of step 6 to 8" in out
    assert numbers(run) == numbers(trained / "run")[:5] + numbers(trained / "run")[8:]


@pytest.mark.parametrize(("logged", "kept"), [(3, False), (4, True)])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(launch, run, trained, logged, kept):
    """Where one may have been written already, what was logged is kept."""
    cut(run, logged)
    remove(*(run / "checkpoints").iterdir())
    lines = (run / "metrics.jsonl").read_text()
    status, _, err = launch("name=run", "steps=12")
    assert (status, err) == (0, "") and numbers(run) == numbers(trained / "run")
    copy = run / "metrics.jsonl.1"
    assert copy.exists() == kept and (not kept or copy.read_text() == lines)


# --- going back ---


def test_a_run_goes_back_and_keeps_what_it_had(launch, trained, tmp_path):
    run, kept = tmp_path / "runs" / "run", tmp_path / "runs" / "run.1"
    (run / "evaluation.json").write_text('{"step": 12}')  # of the weights that are left behind
    before = contents(run)
    status, out, err = launch("name=run", "steps=12", "resume=step-4")
    assert (status, err) == (0, "") and "resuming after step 4 of 12" in out
    assert "run runs/run goes back to step 4" in out and "results after step 4 are kept in runs/run.1" in out
    assert numbers(run) == numbers(trained / "run") == numbers(kept) and (run / "DONE").exists()
    assert (steps(run), steps(kept)) == ([4, 8, 12], [8, 12])
    after = contents(kept)
    assert {path: before[path] for path in after if path.name != "latest"} == {
        path: content for path, content in after.items() if path.name != "latest"
    }
    assert json.loads((run / "run.json").read_text())["history"] == ["run runs/run goes back to step 4"]
    assert (kept / "evaluation.json").exists() and not (run / "evaluation.json").exists()


def test_the_same_command_after_a_crash_does_not_go_back_again(launch, run, trained):
    """As Slurm and torchrun give it."""
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"went_back_to": 2}))
    status, out, _ = launch("name=run", "steps=12", "resume=step-2")
    assert status == 0 and "an earlier launch went back to step 2" in out and "resuming after step 8 of 12" in out
    assert numbers(run) == numbers(trained / "run") and not run.with_name("run.1").exists()


def test_a_checkpoint_that_is_not_there(launch, run):
    before = contents(run)
    status, _, err = launch("name=run", "steps=12", "resume=step-5")
    assert status == 1 and "has no step-5; checkpoints there: [4, 8]" in err and contents(run) == before
    invert(shards(run / "checkpoints" / "step-4")[0])
    before = contents(run)
    status, _, err = launch("name=run", "steps=12", "resume=step-4")
    assert status == 1 and "step-4 is damaged" in err and contents(run) == before


# --- more steps ---


def test_more_steps_say_how_to_go_on(launch):
    status, out, _ = launch("name=run", "steps=12")
    assert status == 0 and "is done" in out and "to continue, set steps=... above 12 with resume=extend" in out
    status, _, err = launch("name=run", "steps=16")
    assert status == 1 and "steps: saved 12, now 16" in err
    assert "resume=extend continues to step 16 (docs/resuming.md)" in err and err.count("\n") <= 6


def test_an_extended_wsd_run_is_a_longer_one_bit_for_bit(launch, trained, tmp_path):
    """The checkpoint before its decay was saved and kept, though none was due there and only one is to be kept."""
    run = tmp_path / "runs" / "short"
    assert steps(run) == [8, 12] and steps(trained / "long") == [12, 16]
    extend = ("name=short", "steps=16", "resume=extend", "checkpoint_keep=1", "checkpoint_interval=100")
    status, out, err = launch(*extend)
    assert (status, err) == (0, "") and "of 12 steps, continues after step 8 up to step 16" in out
    assert "learning rate 0.001 at step 8, then 0.001 at step 9, 0.001 at step 12, 0 at step 16" in out
    assert numbers(run) == numbers(trained / "long") and steps(run) == [12, 16]
    assert json.loads((run / "DONE").read_text())["step"] == 16
    assert yaml.safe_load((run / "config.yaml").read_text())["steps"] == 16
    assert numbers(tmp_path / "runs" / "short.1") == numbers(trained / "short")
    status, out, _ = launch(*extend)
    assert status == 0 and "is done" in out and not (tmp_path / "runs" / "short.2").exists()


def test_without_a_checkpoint_of_the_plateau_the_change_of_the_rate_is_reported(launch, trained, tmp_path):
    run = tmp_path / "runs" / "short"
    shutil.rmtree(run / "checkpoints" / "step-8")
    status, out, _ = launch("name=short", "steps=16", "resume=extend")
    assert status == 0 and "continues after step 12 up to step 16" in out
    assert "learning rate 0 at step 12, then 0.00075 at step 13, 0.0005 at step 14, 0 at step 16" in out
    rates = [line["train/lr"] for line in numbers(run)]
    assert rates[11:] == pytest.approx([0.0, 0.00075, 0.0005, 0.00025, 0.0]) and len(rates) == 16
    assert numbers(run)[:12] == numbers(trained / "short") and not (tmp_path / "runs" / "short.1").exists()


def test_another_schedule_from_a_chosen_checkpoint(launch, tmp_path):
    run = tmp_path / "runs" / "run"
    linear = ("optim.schedule.decay_steps=2", "optim.schedule.final_fraction=0.5")
    status, out, _ = launch("name=run", "steps=10", "resume=step-8", *linear)
    assert status == 0 and "continues after step 8 up to step 10" in out
    assert [line["train/lr"] for line in numbers(run)][7:] == pytest.approx([0.001, 0.00075, 0.0005])
    assert steps(tmp_path / "runs" / "run.1") == [12]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("steps=12", "resume=extend", "optim.schedule.decay_steps=2"), "the run already has 12 steps"),
        (("steps=8", "resume=extend", "optim.schedule.decay_steps=2"), "resume=extend steps=8"),
        (("steps=8", "resume=step-8", "optim.schedule.decay_steps=2"), "no steps remain: the checkpoint is at step 8"),
        (("steps=16", "resume=extend", "optim.lr=0.5"), "optim.lr: saved 0.001, now 0.5"),
        (("steps=12", "resume=step-99"), "has no step-99; checkpoints there: [4, 8, 12]"),
    ],
)
def test_what_cannot_be_gone_on_with(launch, tmp_path, arguments, says):
    before = contents(tmp_path / "runs" / "run")
    status, _, err = launch("name=run", *arguments)
    assert status == 1 and err.startswith("error: ") and says in err and err.count("\n") <= 6
    assert contents(tmp_path / "runs" / "run") == before


# --- whose run it is ---


def test_an_unnamed_run_is_extended_and_found_again(launch, tmp_path):
    shutil.rmtree(tmp_path / "runs")
    assert launch(*BRIEF)[0] == 0
    (run,) = (tmp_path / "runs").iterdir()
    rest = ("steps=3", *BRIEF[1:])
    status, out, _ = launch(*rest, "resume=extend")
    assert status == 0 and "continues after step 1 up to step 3" in out and len(numbers(run)) == 3
    status, out, _ = launch(*rest)
    assert status == 0 and f"run runs/{run.name} is done" in out
    status, out, _ = launch("steps=4", *rest[1:])
    assert status == 0 and f"runs has shorter versions of this run: {run.name}; resume=extend" in out


def test_a_run_is_its_text_and_not_the_place_of_it(launch, run, home, trained, tmp_path):
    """By name it goes on after a move; without one, wherever the last part of the path is the same."""
    shutil.copytree(home / "text", tmp_path / "moved" / "elsewhere")
    status, _, err = launch("name=run", "steps=12", "data.train=moved/elsewhere")
    assert (status, err) == (0, "") and numbers(run) == numbers(trained / "run")
    shutil.copytree(home / "text", tmp_path / "moved" / "text")
    places = ("moved/text", "./moved/text", f"{tmp_path}/moved/text", f"{home}/text", f"[{home}/text]")
    outs = [launch(*BRIEF, f"data.train={place}")[1] for place in places]
    assert ["is done" in out for out in outs] == [False, True, True, True, True]
    (tmp_path / "link").symlink_to(tmp_path / "moved" / "text")
    before = sorted((tmp_path / "runs").iterdir())
    status, _, err = launch(*BRIEF, "data.train=link")
    assert (
        status == 1
        and "has the same configuration and the same data under another path; use name=llama_tiny-mxfp4-" in err
    )
    assert sorted((tmp_path / "runs").iterdir()) == before
    (tmp_path / "moved" / "text" / "0.txt").write_text("other words")
    for name in ("long", "run", "short"):
        shutil.rmtree(tmp_path / "runs" / name)
    (unnamed,) = (tmp_path / "runs").iterdir()
    (unnamed / "DONE").unlink()
    status, _, err = launch(*BRIEF, "data.train=moved/text")
    assert status == 1 and "was started on a corpus with hash" in err
