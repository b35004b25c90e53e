"""Checkpoints: bit-exact resume, kills, a full disk, another model."""

import errno
import math
import os
import re
import signal
import time

import pytest
import torch

from lowprec_train.train.checkpoint import Checkpointer, CheckpointError
from lowprec_train.train.logging.sinks import read_lines
from tests.launches import fork_server
from tests.train.killable_run import launch
from tests.train.standins import Lines, bits, make_trainer, same

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def keeper(directory, **changes):
    return Checkpointer(directory, **({"interval": 5, "keep": 2} | changes))


def losses(trainer, **arguments):
    sink = Lines()
    trainer.fit(sinks=[sink], **arguments)
    return [
        (line["step"], line["train/loss"], line["train/grad_norm"], line["train/skipped"], line.get("valid/loss"))
        for line in sink.lines
    ]


def text(rows):
    return [repr(row) for row in rows]  # NaN equals NaN


# --- resume ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_n_and_reload_and_n_is_2n_bit_for_bit(tmp_path, asynchronous, tied, device):
    """With skipped steps on both sides, one of them the very step of the checkpoint."""
    options = {"steps": 12, "poison": [3, 5, 8], "tied": tied, "device": device}
    whole = make_trainer(**options)
    expected = losses(whole)
    first = make_trainer(**options)
    saver = keeper(tmp_path, asynchronous=asynchronous)
    half = losses(first, checkpointer=saver, should_stop=lambda: first.steps_done == 6)
    second = make_trainer(**options)
    assert keeper(tmp_path).load(second.checkpoint_parts()) == 6 == second.steps_done
    assert same(bits(second), bits(first))
    assert text(half + losses(second)) == text(expected)
    assert same(bits(second), bits(whole))
    assert "nan" in repr(expected)


def test_training_goes_on_while_a_save_is_written(tmp_path):
    class Slow(Checkpointer):
        def _write(self, flat, step):
            time.sleep(0.3)
            super()._write(flat, step)

    trainer = make_trainer()
    trainer.step()
    saved = bits(trainer)
    saver = Slow(tmp_path, interval=1, keep=1)
    begin = time.perf_counter()
    saver.save(trainer.checkpoint_parts(), 1)
    trainer.step(), trainer.step()
    assert time.perf_counter() - begin < 0.3
    saver.finish()
    restored = make_trainer()
    assert saver.load(restored.checkpoint_parts()) == 1
    assert same(bits(restored), saved) and not same(bits(trainer), saved)


def test_one_save_in_flight(tmp_path):
    active = []

    class Counting(Checkpointer):
        def _write(self, flat, step):
            active.append(+1)
            time.sleep(0.05)
            super()._write(flat, step)
            active.append(-1)

    trainer = make_trainer()
    saver = Counting(tmp_path, interval=1, keep=1)
    for step in (1, 2, 3):
        saver.save(trainer.checkpoint_parts(), step)
    saver.finish()
    assert active == [1, -1] * 3


def test_a_fresh_run_has_nothing_to_load_and_step_zero_can_be_saved(tmp_path):
    trainer = make_trainer()
    saver = keeper(tmp_path / "deep" / "checkpoints")
    assert saver.load(trainer.checkpoint_parts()) is None and saver.latest() is None
    saver.save(trainer.checkpoint_parts(), 0, wait=True)
    other = make_trainer(lr=1.0)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.fill_(7.0)
    assert saver.load(other.checkpoint_parts()) == 0 and same(bits(other), bits(trainer))


def test_what_sinks_remember_travels(tmp_path):
    trainer = make_trainer()
    trainer.remembered["wandb_run_id"] = "abc"
    saver = keeper(tmp_path)
    saver.save(trainer.checkpoint_parts(), 3, wait=True)
    other = make_trainer()
    held = other.remembered
    saver.load(other.checkpoint_parts())
    assert held == {"wandb_run_id": "abc"}


def test_a_metric_may_be_infinite_but_no_state(tmp_path):
    """As the SQNR of gradients of which none was rounded."""

    class Part:
        def __init__(self, **values):
            self.values = {name: torch.tensor(value) for name, value in values.items()}

        def state_dict(self):
            return dict(self.values)

        def load_state_dict(self, state):
            self.values = dict(state)

    saver, infinite = keeper(tmp_path), {"sampling": Part(sqnr_db=math.inf)}
    saver.save(infinite, 1, wait=True, only_finite=True)
    loaded = {"sampling": Part(sqnr_db=0.0)}
    assert saver.load(loaded) == 1 and loaded["sampling"].values["sqnr_db"] == math.inf
    with pytest.raises(CheckpointError, match="NaN or infinity in other.x"):
        saver.save({"other": Part(x=math.inf)}, 2, wait=True, only_finite=True)


def test_loading_fills_the_live_tensors_and_keeps_their_types(tmp_path):
    trainer = make_trainer()
    saver = keeper(tmp_path)
    saver.save(trainer.checkpoint_parts(), 1, wait=True)
    before = {k: (v.data_ptr(), v.dtype) for k, v in live(trainer).items()}
    saver.load(trainer.checkpoint_parts())
    assert {k: (v.data_ptr(), v.dtype) for k, v in live(trainer).items()} == before
    for parameter in trainer.model.parameters():
        assert {v.dtype for v in trainer.optimizer.state[parameter].values()} == {torch.float32}


def live(trainer):
    parts = trainer.checkpoint_parts()
    return {
        f"{n}.{k}": v for n, part in parts.items() for k, v in part.state_dict().items() if isinstance(v, torch.Tensor)
    }


# --- files ---


def test_keep_last_n_and_latest(tmp_path):
    saver = keeper(tmp_path, interval=2, keep=3)
    trainer = make_trainer(steps=11)
    losses(trainer, checkpointer=saver)
    assert saver.steps() == [8, 10, 11] and saver.latest() == 11
    assert (tmp_path / "latest").read_text() == "step-11\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-10", "step-11", "step-8"]
    again = make_trainer(steps=11)
    assert saver.load(again.checkpoint_parts(), step=8) == 8 == again.steps_done


def test_leftovers_of_a_crash_go_at_the_start(tmp_path):
    trainer = make_trainer()
    keeper(tmp_path).save(trainer.checkpoint_parts(), 5, wait=True)
    (tmp_path / ".tmp-step-9").mkdir()
    (tmp_path / ".tmp-step-9" / "__0_0.distcp").write_text("half")
    (tmp_path / "latest.partial").write_text("step-")
    (tmp_path / "step-5").rename(tmp_path / ".tmp-old-step-5")  # died while step 5 was being replaced
    saver = keeper(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-5"]
    assert saver.load(make_trainer().checkpoint_parts()) == 5


def test_a_checkpoint_that_was_never_published_is_replaced(tmp_path):
    """Died between the rename to step-9 and `latest`: the run resumes at 5 and writes step 9 again."""
    trainer = make_trainer()
    saver = keeper(tmp_path, keep=3)
    saver.save(trainer.checkpoint_parts(), 5, wait=True)
    saver.save(trainer.checkpoint_parts(), 9, wait=True)
    (tmp_path / "latest").write_text("step-5\n")
    saver = keeper(tmp_path, keep=3)
    assert saver.load(trainer.checkpoint_parts()) == 5
    trainer.step()
    saver.save(trainer.checkpoint_parts(), 9, wait=True)
    restored = make_trainer()
    assert saver.load(restored.checkpoint_parts()) == 9 and same(bits(restored), bits(trainer))
    assert saver.steps() == [5, 9]


@pytest.mark.parametrize("values", [{"interval": 0, "keep": 1}, {"interval": 1, "keep": 0}])
def test_bad_numbers_are_named(tmp_path, values):
    with pytest.raises(ValueError, match="=0 must be at least 1"):
        Checkpointer(tmp_path, **values)


def test_directory_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot keep checkpoints in .*file"):
        keeper(tmp_path / "file" / "checkpoints")


# --- checkpoints that must be refused ---


def test_another_model_names_keys_and_shapes_and_touches_nothing(tmp_path):
    saver = keeper(tmp_path)
    saver.save(make_trainer(dim=12).checkpoint_parts(), 4, wait=True)
    wide = make_trainer(dim=20)
    before = bits(wide)
    with pytest.raises(ValueError, match="of another model") as caught:
        saver.load(wide.checkpoint_parts())
    assert "model.head.weight: saved (16, 12) torch.float32, here (16, 20) torch.float32" in str(caught.value)
    assert "and 10 more" in str(caught.value)
    assert same(bits(wide), before)


def test_missing_and_unexpected_keys_are_named(tmp_path):
    saver = keeper(tmp_path)
    saver.save(make_trainer().checkpoint_parts(), 4, wait=True)
    other = make_trainer()
    other.model.gate = other.model.hidden
    del other.model.hidden
    with pytest.raises(ValueError) as caught:
        saver.load({"model": other.checkpoint_parts()["model"]})
    assert str(caught.value).splitlines()[1:] == [
        "  missing in the checkpoint:",
        "    model.gate.bias",
        "    model.gate.weight",
        "  in the checkpoint only:",
        "    model.hidden.bias",
        "    model.hidden.weight",
    ]


def test_an_optional_part_may_be_absent_but_not_another(tmp_path):
    saver, trainer = keeper(tmp_path), make_trainer()
    saver.save(trainer.checkpoint_parts(), 4, wait=True)
    grown = {"reduction": trainer, **make_trainer().checkpoint_parts()}
    with pytest.raises(ValueError, match="missing in the checkpoint:\n    reduction.remembered"):
        saver.load(grown)
    assert saver.load(grown, optional=["reduction", "optimizer"]) == 4
    del trainer.model.hidden.bias
    saver.save({"model": trainer.checkpoint_parts()["model"]}, 5, wait=True)
    with pytest.raises(ValueError, match="model.hidden.bias"):
        saver.load({"model": make_trainer().checkpoint_parts()["model"]}, optional=["model"])


def test_another_dtype_is_refused_not_cast(tmp_path):
    saver = keeper(tmp_path)
    saver.save(make_trainer().checkpoint_parts(), 4, wait=True)
    other = make_trainer()
    state = other.optimizer.state[other.model.head.weight]
    state["exp_avg"] = state["exp_avg"].bfloat16()
    with pytest.raises(
        ValueError,
        match=r"optimizer.head.weight.exp_avg: saved \(16, 12\) torch.float32, here \(16, 12\) torch.bfloat16",
    ):
        saver.load(other.checkpoint_parts())


def test_another_seed_or_step_size_is_refused(tmp_path):
    saver = keeper(tmp_path)
    saver.save(make_trainer().checkpoint_parts(), 4, wait=True)
    with pytest.raises(ValueError, match="seed=3, this one has 4"):
        saver.load(make_trainer(seed=4).checkpoint_parts())
    with pytest.raises(ValueError, match="tokens_per_step=64, this one has 128"):
        saver.load(make_trainer(tokens_per_step=128).checkpoint_parts())


def test_spoiled_latest_is_named(tmp_path):
    saver = keeper(tmp_path)
    (tmp_path / "latest").write_text("nonsense")
    with pytest.raises(CheckpointError, match="'nonsense'"):
        saver.load(make_trainer().checkpoint_parts())


# --- failing saves ---


@pytest.mark.parametrize("where", ["finish", "check", "save"])
def test_error_of_a_background_save_surfaces_at_the_next_call(tmp_path, monkeypatch, where):
    trainer = make_trainer()
    saver = keeper(tmp_path)
    saver.save(trainer.checkpoint_parts(), 4, wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_without_space)
        saver.save(trainer.checkpoint_parts(), 8)
        while not saver._save.done():
            time.sleep(0.01)
    call = {"finish": saver.finish, "check": saver.check, "save": lambda: saver.save(trainer.checkpoint_parts(), 12)}[
        where
    ]
    with pytest.raises(CheckpointError, match="step 8 could not be written.*No space left.*step-4 is intact"):
        call()
    saver.finish()  # said once
    assert saver.steps() == [4] and not list(tmp_path.glob(".tmp*"))
    saver.save(trainer.checkpoint_parts(), 12, wait=True)
    assert saver.latest() == 12


def fail_without_space(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")


# --- processes ---


def run(directory, *, kill_after=None, **options):
    """(exit code, output) of a run that is killed so many seconds after it said from where it goes on."""
    output = directory / "output"
    output.unlink(missing_ok=True)
    process = fork_server().Process(target=launch, args=(str(directory), str(output), options))
    process.start()
    while kill_after is not None and process.is_alive() and not (output.exists() and output.stat().st_size):
        time.sleep(0.005)
    process.join(timeout=kill_after)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, output.read_text() if output.exists() else ""


def rows(directory):
    keys = ("step", "train/loss", "train/grad_norm", "train/skipped", "valid/loss")
    return [repr([line.get(key) for key in keys]) for line in read_lines(directory / "metrics.jsonl")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    code, output = run(directory)
    assert code == 0, output
    assert len(rows(directory)) == 30 and "nan" in rows(directory)[4]
    return rows(directory)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("limit", [300, 4000, 20_000])
def test_full_disk_is_one_error_and_the_previous_checkpoint_survives(tmp_path, uninterrupted, limit, asynchronous):
    """A file-size limit that strikes at the first bytes, at the metadata, in the middle of the tensors (there beneath
    an error of torch's own)."""
    code, output = run(tmp_path, limit=limit, limit_from=9, keep=1, asynchronous=asynchronous, step_pause=0.02)
    assert code == 1
    message = output[output.rindex("CheckpointError: ") :]
    assert "checkpoint of step 9 could not be written" in message and "File too large" in message
    assert f"{tmp_path}/checkpoints/step-6 is intact." in message and "resumes" in message
    code, output = run(tmp_path, keep=1)
    assert code == 0 and output.split()[:2] == ["resumed", "6"], output
    assert rows(tmp_path) == uninterrupted


def test_sigkill_at_any_time_resumes_bit_for_bit(tmp_path, uninterrupted):
    """Killed again and again, mostly inside a save that is drawn out over its three stages, until a launch gets
    through."""
    resumed, codes = [], []
    for attempt in range(10):
        code, output = run(tmp_path, kill_after=0.01 + 0.05 * attempt, pause=0.03, step_pause=0.01)
        codes.append(code)
        resumed += [int(step) for step in re.findall(r"^resumed (\d+)$", output, re.MULTILINE)]
    assert -signal.SIGKILL in codes and resumed == sorted(resumed) and resumed[-1] > 0, (codes, resumed)
    code, output = run(tmp_path)
    assert code == 0 and output.split()[-1] == "done", output
    assert rows(tmp_path) == uninterrupted
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))
