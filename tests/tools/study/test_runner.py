"""What the runner refuses, forks, keeps and gives up, with jobs that train nothing."""

import json
import os
import shutil
import signal
import subprocess
import time
from functools import partial

import pytest

from lowprec_train.tools import cli
from lowprec_train.tools.study import progress, running
from lowprec_train.train import processes
from lowprec_train.train.digests import FILE as MANIFEST
from tests.tools.study import synthetic

STEP = 200
INTERRUPT = "sleep 0.3; kill -INT $PPID;"
FORK = {"purpose": "estimate", "seeds": [1], "fork": {"arm": "bf16", "step": STEP}}
WHOLE = {"purpose": "estimate", "seeds": [2, 3], "arms": ["bf16"]}
ARMS = dict.fromkeys(["bf16", "fp8"])


def ended(out, run, **options):
    """A run that has ended, with a checkpoint."""
    shutil.rmtree(out / run.name, ignore_errors=True)
    directory = synthetic.run(out, run, 4.0, **options)
    checkpoint = directory / "checkpoints" / f"step-{STEP}"
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).write_text("{}")
    return directory


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """Names of the runs whose jobs were begun. A job ends its run at once; those in `begun.bad` end with status 1."""

    class Begun(list):
        runs, bad = (), ()

    names = Begun()

    def background(module, arguments, log, **_):
        name = dict(text.partition("=")[::2] for text in arguments)["name"]
        names.append(name)
        log.touch()
        if name not in names.bad:
            ended(tmp_path, next(run for run in names.runs if run.name == name))
        return subprocess.Popen(["sh", "-c", f"exit {int(name in names.bad)}"])

    monkeypatch.setattr(processes, "background", background)
    return names


def run(out, planned, **options):
    """What has failed, on one worker."""
    return running.Runner(planned, out, running.cpu_workers(1), say=lambda _: None, **options).run()


def test_runs_of_another_configuration_are_no_runs_of_this_study(tmp_path, begun):
    _, planned, _ = synthetic.study(tmp_path, arms=ARMS, blocks=[WHOLE])
    ended(tmp_path, planned[0])
    _, now, _ = synthetic.study(tmp_path, arms=ARMS, blocks=[WHOLE], overrides=["steps=400", "optim.lr=0.5"])
    with pytest.raises(ValueError, match=r"bf16-s2 was trained with another(.|\n)*optim.lr: saved 0.001, now 0.5"):
        run(tmp_path, now)
    assert not begun


def test_a_checkpoint_that_other_arms_are_to_fork_from_is_kept(tmp_path, begun):
    _, whole, _ = synthetic.study(tmp_path, arms=ARMS, blocks=[FORK])
    begun.runs = whole
    part = [each for each in whole if each.arm == "bf16"]
    assert not run(tmp_path, part, whole=whole, keep_checkpoints=False)
    assert begun == ["bf16-trunk200-s1", "bf16-from200-s1"]
    assert [path.parent.name for path in tmp_path.glob("*/checkpoints")] == ["bf16-trunk200-s1"]
    assert not run(tmp_path, whole, keep_checkpoints=False) and begun[2:] == ["fp8-from200-s1"]
    assert not list(tmp_path.glob("*/checkpoints"))


def test_forks_of_a_trunk_without_its_checkpoint_fail_alone(tmp_path, begun):
    _, planned, _ = synthetic.study(tmp_path, arms=ARMS, blocks=[FORK, WHOLE])
    begun.runs = planned
    shutil.rmtree(ended(tmp_path, planned[0]) / "checkpoints")
    failed = run(tmp_path, planned)
    assert list(failed) == ["bf16-from200-s1", "fp8-from200-s1"] and begun == ["bf16-s2", "bf16-s3"]
    trunk = tmp_path / "bf16-trunk200-s1"
    told = f"{trunk} has no checkpoint step-200 to fork from; checkpoints there: []; remove {trunk} "
    assert set(failed.values()) == {f"{told}to train it again"}


def test_forks_begin_once_the_trunk_has_passed_their_step(tmp_path, monkeypatch):
    """Not at the checkpoint, since the last lines of metrics follow it, and not only at the trunk's end."""
    _, planned, _ = synthetic.study(tmp_path, arms=ARMS, blocks=[FORK])
    trunk, gate, begun, polls = tmp_path / planned[0].name, tmp_path / "gate", [], []

    def background(module, arguments, log, **_):
        begun.append(dict(text.partition("=")[::2] for text in arguments)["name"])
        log.touch()
        ended(tmp_path, next(run for run in planned if run.name == begun[-1]))
        if begun[-1] != trunk.name:
            return subprocess.Popen(["true"])
        (trunk / "DONE").unlink()
        lines[:] = (trunk / "metrics.jsonl").read_text().splitlines(keepends=True)
        (trunk / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= STEP))
        return subprocess.Popen(["sh", "-c", f"until test -e {gate}; do sleep 0.02; done"])

    def sleep(_):
        polls.append(list(begun))
        if len(polls) == 3:
            (trunk / "metrics.jsonl").write_text("".join(lines))
        if len(begun) == 3 and not gate.exists():
            (trunk / "DONE").write_text(json.dumps({"step": synthetic.STEPS}))
            gate.touch()
        pause(0.01)

    lines, pause = [], time.sleep
    monkeypatch.setattr(processes, "background", background)
    monkeypatch.setattr(running.time, "sleep", sleep)
    assert not running.Runner(planned, tmp_path, running.cpu_workers(2), say=lambda _: None).run()
    assert begun == [run.name for run in planned] and polls[2] == begun[:1]


def test_spoilt_metrics_of_a_trunk_in_training_end_no_study(tmp_path, begun, monkeypatch):
    """The trunk's own job reads them and says what is wrong; other runs go on."""
    _, planned, _ = synthetic.study(tmp_path, arms=ARMS, blocks=[FORK, WHOLE])
    begun.runs, at_once = planned, processes.background
    trunk = ended(tmp_path, planned[0])
    (trunk / "DONE").unlink()
    (trunk / "metrics.jsonl").write_text("spoilt\n")

    def background(module, arguments, log, **more):
        if f"name={trunk.name}" not in arguments:
            return at_once(module, arguments, log, **more)
        log.touch()
        return subprocess.Popen(["sh", "-c", "sleep 0.5; exit 1"])

    monkeypatch.setattr(processes, "background", background)
    failed = running.Runner(planned, tmp_path, running.cpu_workers(2), say=lambda _: None).run()
    assert list(failed) == [trunk.name] and begun == ["bf16-s2", "bf16-s3"]


def test_forks_of_a_trunk_that_diverged_later_begin(tmp_path, begun):
    _, planned, _ = synthetic.study(tmp_path, arms=ARMS, blocks=[FORK])
    begun.runs = planned
    ended(tmp_path, planned[0], diverged=True)
    assert not run(tmp_path, planned, keep_checkpoints=False) and begun == ["bf16-from200-s1", "fp8-from200-s1"]
    assert not list(tmp_path.glob("*/checkpoints"))  # nor those of a run that diverged


def test_an_arm_is_given_up_for_a_new_run_that_failed_and_not_for_an_evaluation(tmp_path, begun):
    _, planned, _ = synthetic.study(tmp_path, arms=ARMS, blocks=[WHOLE])
    begun.runs, begun.bad = planned, ["bf16-s2"]
    (ended(tmp_path, planned[0]) / "evaluation.json").unlink()
    assert list(run(tmp_path, planned)) == ["bf16-s2"] and begun == ["bf16-s2", "bf16-s3"]
    shutil.rmtree(tmp_path / "bf16-s2")
    shutil.rmtree(tmp_path / "bf16-s3")
    assert list(run(tmp_path, planned)) == ["bf16-s2"] and begun[2:] == ["bf16-s2"]


@pytest.mark.parametrize("content", ['{"step": 4', '{"step": 4, "loss": {"run": null}}', '{"sharpness": 5}'])
def test_a_run_whose_evaluation_cannot_be_read_fails_alone(tmp_path, begun, monkeypatch, content):
    _, planned, _ = synthetic.study(tmp_path, arms=ARMS, blocks=[WHOLE])
    begun.runs = planned
    real = synthetic.run

    def torn(out, planned, loss, **options):
        directory = real(out, planned, loss, **options)
        if planned.name == "bf16-s2":
            (directory / "evaluation.json").write_text(content)
        return directory

    monkeypatch.setattr(synthetic, "run", torn)
    failed = run(tmp_path, planned)
    assert list(failed) == ["bf16-s2"] and "evaluation.json" in failed["bf16-s2"] and begun == ["bf16-s2", "bf16-s3"]


def test_alternating_arms_are_spread_over_the_gpus():
    """Runs are dealt in order: of two arms that alternate, each GPU trains half of both."""
    workers = running.gpu_workers(["0", "1"], 4)
    gpus = [worker.values["CUDA_VISIBLE_DEVICES"] for worker in workers]
    assert gpus[:2] == ["0", "1"]  # first one run each
    assert all(gpus[arm::2].count(gpu) == 2 for arm in (0, 1) for gpu in ("0", "1"))


@pytest.mark.parametrize("places", [1, 2])
def test_runs_that_shared_a_device_are_known(tmp_path, begun, places):
    _, planned, _ = synthetic.study(tmp_path, arms=ARMS, blocks=[WHOLE])
    begun.runs = planned
    assert not running.Runner(planned, tmp_path, running.gpu_workers(["0"], places), say=lambda _: None).run()
    assert set(progress.shared(tmp_path)) == (set(begun) if places == 2 else set())


@pytest.mark.parametrize("heeded", [True, False])
def test_a_signal_that_comes_while_a_run_is_begun_reaches_it(tmp_path, monkeypatch, heeded):
    """One that does not end by it is ended by two interrupts."""
    _, planned, _ = synthetic.study(tmp_path, arms=ARMS, blocks=[WHOLE])
    job, handler = ("", signal.SIG_DFL) if heeded else (2 * INTERRUPT, signal.SIG_IGN)
    begun = []

    def background(*_, **__):
        prepare = partial(signal.signal, signal.SIGTERM, handler)
        begun.append(subprocess.Popen(["sh", "-c", f"{job} sleep 60"], start_new_session=True, preexec_fn=prepare))
        os.kill(os.getpid(), signal.SIGTERM)
        return begun[0]

    monkeypatch.setattr(processes, "background", background)
    if heeded:
        assert not run(tmp_path, planned)
    else:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, planned)
    assert [each.returncode for each in begun] == [-signal.SIGTERM if heeded else -signal.SIGKILL]


def test_results_are_written_as_runs_finish(tmp_path, begun, monkeypatch, capsys):
    """Also those of runs outside --arms. Results that do not belong together are named, and end no study."""
    _, planned, file = synthetic.study(tmp_path, arms=ARMS, blocks=[WHOLE | {"arms": ["bf16", "fp8"]}])
    begun.runs, seen, at_once = planned, [], processes.background
    ended(tmp_path, planned[0])

    def background(*arguments, **more):
        seen.append(sorted(json.loads(stored.read_text())["runs"]) if stored.exists() else [])
        return at_once(*arguments, **more)

    monkeypatch.setattr(processes, "background", background)
    stored = tmp_path / "results.json"
    words = ["study", "run", str(file), "--nproc", "1", "--out", str(tmp_path)]
    assert cli.main([*words, "--arms", "fp8"]) == 0
    assert seen == [[], ["bf16-s2", "fp8-s2"]]
    whole = stored.read_text()
    assert sorted(json.loads(whole)["runs"]) == ["bf16-s2", "fp8-s2", "fp8-s3"]

    stored.write_text(json.dumps({"study": "another", "runs": {}}))
    assert cli.main(words) == 2 and json.loads(stored.read_text())["study"] == "another"
    assert f"{tmp_path} has the results of study another, and this is study synthetic" in capsys.readouterr().err
    stored.write_text(whole)

    facts = tmp_path / "fp8-s2" / "run.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"corpus_hash": "decaf"}))
    capsys.readouterr()
    assert cli.main(words) == 0
    assert f"{stored} is not up to date: fp8-s2 has corpus hash decaf" in capsys.readouterr().out
    assert stored.read_text() == whole
