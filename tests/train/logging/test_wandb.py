"""W&B without an account: what is on disk after interruptions, read back from the files that `wandb sync` uploads."""

import json
import os
import signal
import subprocess
import sys
import time
import types

import pytest
import wandb

from lowprec_train.train.logging import wandb_files
from lowprec_train.train.logging.sinks import JsonlSink, RunFacts
from lowprec_train.train.logging.wandb_sink import WandbSink

CONFIG = {"precision": {"name": "fp4"}, "comm": {"payload": "BF16"}, "optim": {"lr": 0.5}, "seed": 1}


def facts(directory, **changes):
    about = {"name": "r", "directory": directory, "steps": 100, "config": CONFIG, "recipe": "fp4", "comparison": "c-1"}
    return RunFacts(**about | changes)


def launch(directory, steps, *, remembered, resumed_step=0):
    """One launch: metrics.jsonl and W&B, opened in the order of a run."""
    run = facts(directory, remembered=remembered, resumed_step=resumed_step)
    sinks = [JsonlSink(run=run), WandbSink(run=run, mode="offline")]
    for step in steps:
        for sink in sinks:
            sink.log(step, {"train/loss": step / 3, "data/tokens": 64.0 * step})
    return sinks


def killed(directory, steps):
    """A launch in a process of its own, killed before W&B has written what it holds."""
    script = (
        "import os, signal; from pathlib import Path; from tests.train.logging.test_wandb import launch;"
        f"launch(Path({str(directory)!r}), {steps!r}, remembered={{}}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, env=environment)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    time.sleep(1)  # W&B names a launch's directory by the second, and that one would be taken


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Killed at step 5, saved at 4; went on to 8, saved at 6; from there to 10; from there to 12."""
    run = tmp_path_factory.mktemp("runs") / "r"
    run.mkdir()
    (run / "recipe.json").write_text('{"head": {}}')
    killed(run, range(1, 6))
    remembered = {}
    for steps, resumed in ((range(5, 9), 4), (range(7, 11), 6), (range(11, 13), 10)):
        for sink in launch(run, steps, remembered=remembered, resumed_step=resumed):
            sink.close()
        wandb.teardown()  # as the end of a process does: W&B writes on behind `finish`
    return run, remembered["wandb_run_id"]


def records(file, kind):
    from wandb.proto import wandb_internal_pb2 as schema

    read = [schema.Record.FromString(payload) for payload, _ in wandb_files.records(file.read_bytes())]
    return [getattr(record, kind) for record in read if record.WhichOneof("record_type") == kind]


def test_one_run_id_and_every_step_once_in_order(interrupted):
    """What the kill took from W&B's buffer is filled in, what was taken twice is there once; the file of the killed
    launch, at which `wandb sync` would stop, is out of its way."""
    run, identity = interrupted
    launches = wandb_files.files(run)
    assert [file.name for file in run.glob("wandb/offline-*/*.wandb*") if file not in launches] == [
        f"run-{identity}.wandb.empty"
    ]
    assert {wandb_files.run_id(file) for file in launches} == {identity}
    assert [len(wandb_files.history(file)) for file in launches] == [8, 2, 2]
    points = [point for file in launches for point in wandb_files.history(file)]
    assert [point["_step"] for point in points] == list(range(1, 13))
    assert [point["train/loss"] for point in points] == [step / 3 for step in range(1, 13)]
    assert wandb_files.last_step(run, identity) == 12 and wandb_files.last_step(run, "another") == 0


def test_what_makes_runs_comparable_is_there(interrupted):
    run, identity = interrupted
    for file in wandb_files.files(run):
        (about,) = {(r.run_id, r.run_group, r.job_type, r.display_name) for r in records(file, "run")}
        assert about == (identity, "c-1", "fp4", "r")
        config = {u.key: json.loads(u.value_json) for r in records(file, "run") for u in r.config.update}
        assert config["recipe"] == "fp4" and config["recipe_text"].startswith("precision:\n  name: fp4\ncomm:\n")
        axes = {r.name or r.glob_name: r.step_metric for r in records(file, "metric")}
        assert axes == {"data/tokens": "", "*": "data/tokens"}
        sent = {item.path for record in records(file, "files") for item in record.files}
        assert {"recipe.yaml", "recipe.json"} <= sent
        assert (file.parent / "files" / "recipe.json").read_text() == '{"head": {}}'


def test_a_torn_file_counts_up_to_the_tear_and_is_mended(interrupted, tmp_path):
    run, _ = interrupted
    whole = wandb_files.files(run)[0].read_bytes()
    torn, lengths = tmp_path / "run-x.wandb", []
    for end in range(8, len(whole) + 1, 97):
        torn.write_bytes(whole[:end])
        lengths.append(len(wandb_files.history(torn)))
        wandb_files.mend(torn)
        mended = torn.read_bytes() if torn.exists() else b""
        ends = [position for _, position in wandb_files.records(whole) if position <= end]
        assert mended == whole[: max(ends, default=0)]
    assert lengths == sorted(lengths) and {0, 8} <= set(lengths)
    torn.write_bytes(whole)
    wandb_files.mend(torn)
    assert torn.read_bytes() == whole


def test_a_record_that_cannot_be_read_is_the_end(interrupted, tmp_path):
    """A block that the disk lost: the length is there, the bytes are not what W&B wrote."""
    run, _ = interrupted
    whole = wandb_files.files(run)[0].read_bytes()
    points = [end for each, end in wandb_files.messages(whole) if each.WhichOneof("record_type") == "history"]
    before = max(end for _, end in wandb_files.records(whole) if end < points[3])
    damaged = tmp_path / "run-x.wandb"
    damaged.write_bytes(whole[: before + 7] + b"\xff" * (points[3] - before - 7) + whole[points[3] :])
    assert len(wandb_files.history(damaged)) == 3
    wandb_files.mend(damaged)
    assert damaged.read_bytes() == whole[:before]


def test_a_record_may_cross_blocks():
    """Chunks as LevelDB's format describes them, by hand: 10 bytes, 60,000 over three blocks, padding, 5 bytes."""

    def chunk(kind, payload):
        return b"\0\0\0\0" + len(payload).to_bytes(2, "little") + bytes([kind]) + payload

    log = bytes(7) + chunk(1, b"a" * 10)
    room = 32768 - len(log) - 7
    long = bytes(range(250)) * 240
    log += chunk(2, long[:room]) + chunk(4, long[room:])
    second = 32768 - len(log) % 32768 - 7 - 3
    log += chunk(1, b"b" * second) + bytes(3) + chunk(1, b"c" * 5)
    read = list(wandb_files.records(log))
    assert [payload for payload, _ in read] == [b"a" * 10, long, b"b" * second, b"c" * 5]
    assert [end for _, end in read] == [24, 24 + 7 + room + 7 + 60000 - room, 65533, len(log)]


class FakeRun:
    """Stands in for an online run: the server says at which step it goes on."""

    offline, disabled = False, True

    def __init__(self, starting_step=0, **arguments):
        self.arguments, self.id, self.lines, self.ended = arguments, arguments["id"] or "new-id", [], None
        self.starting_step = starting_step

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, metrics, step, commit):
        assert commit
        self.lines.append((step, metrics))

    def finish(self, exit_code):
        self.ended = exit_code


@pytest.fixture
def online(monkeypatch):
    """(starting step) -> list that takes the runs which are begun."""

    def serve(starting_step=0):
        made = []
        fake = types.SimpleNamespace(
            Error=type("Error", (Exception,), {}),
            init=lambda **arguments: made.append(FakeRun(starting_step, **arguments)) or made[-1],
        )
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return made

    return serve


def test_online_the_server_says_which_steps_it_has(tmp_path, online):
    made = online(starting_step=8)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "x": 1.0}) + "\n" for s in range(1, 11)))
    sink = WandbSink(run=facts(tmp_path, remembered={"wandb_run_id": "old"}, resumed_step=9), group="g", mode=None)
    for step in (8, 10, 11):
        sink.log(step, {"x": 2.0})
    sink.close()
    (run,) = made
    assert run.lines == [(8, {"x": 1.0}), (9, {"x": 1.0}), (10, {"x": 2.0}), (11, {"x": 2.0})] and run.ended == 0
    asked = {name: run.arguments[name] for name in ("id", "resume", "group", "job_type", "mode")}
    assert asked == {"id": "old", "resume": "allow", "group": "g", "job_type": "fp4", "mode": None}


def test_a_run_that_ends_in_an_error_is_marked_as_failed(tmp_path, online):
    made = online()
    with pytest.raises(OSError, match="disk"):
        try:
            raise OSError("disk")
        finally:
            WandbSink(run=facts(tmp_path)).close()
    assert made[0].ended == 1 and made[0].arguments["id"] is None


@pytest.mark.parametrize("broken", ["define_metric", "log", "finish"])
def test_a_run_outlives_the_errors_of_wandb(broken, tmp_path, online, monkeypatch, caplog):
    made = online()

    def refuse(self, *arguments, **options):
        raise sys.modules["wandb"].Error("the service\nis gone")

    monkeypatch.setattr(FakeRun, broken, refuse)
    sink = WandbSink(run=facts(tmp_path))
    for step in (1, 2):
        sink.log(step, {"x": 2.0})
    sink.close()
    assert caplog.text.count("W&B: the service is gone; this launch continues without it") == 1
    assert len(made[0].lines) == (2 if broken == "finish" else 0)


def test_disabled_does_nothing(tmp_path):
    sink = WandbSink(run=facts(tmp_path), mode="disabled")
    sink.log(1, {"train/loss": 1.0})
    sink.close()
    assert not list(tmp_path.glob("wandb/*run*"))


def test_without_an_account_the_way_out_is_reported(tmp_path, online):
    made = online()

    def refuse(**arguments):
        raise sys.modules["wandb"].Error("No API key configured.\nUse `wandb login`")

    sys.modules["wandb"].init = refuse
    with pytest.raises(ValueError, match=r"^W&B: No API key configured. Use `wandb login`; logger.wandb.mode=offline"):
        WandbSink(run=facts(tmp_path))
    assert not made


def test_missing_package_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"logger=wandb needs the package 'wandb'.*lowprec_train\[wandb\]"):
        WandbSink(run=facts(tmp_path))
