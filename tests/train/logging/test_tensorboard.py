"""TensorBoard reads back what was logged, each step once, whatever interrupted the run."""

import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lowprec_train.train.logging.sinks import RunFacts
from lowprec_train.train.logging.tensorboard_sink import TensorBoardSink


def facts(directory, **changes):
    return RunFacts(**{"name": "r", "directory": directory, "steps": 100, "config": {"comm": {"a": 1}}, **changes})


def launch(directory, steps, *, attempt, resumed_step=0):
    sink = TensorBoardSink(run=facts(directory, resumed_step=resumed_step, recipe="fp4"))
    for step in steps:
        sink.log(step, {"train/loss": 100 * attempt + step})
    return sink


def read(directory):
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return events


def test_scalars_are_there_before_the_run_ends_and_the_recipe_with_them(tmp_path):
    launch(tmp_path, [3], attempt=0)
    events = read(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 3.0)]
    (text,) = events.Tensors("recipe/text_summary")
    assert b"# fp4\ncomm:\n  a: 1" in text.tensor_proto.string_val[0]


def test_a_step_that_is_taken_again_is_shown_once(tmp_path):
    """A launch killed before its first checkpoint, one that went past step 5, one that resumes there."""
    launch(tmp_path, range(1, 4), attempt=1)
    launch(tmp_path, range(1, 9), attempt=2)
    last = launch(tmp_path, range(6, 11), attempt=3, resumed_step=5)
    last.close()
    shown = [(e.step, e.value) for e in read(tmp_path).Scalars("train/loss")]
    assert len(read(tmp_path).Tensors("recipe/text_summary")) == 1
    assert shown == [(s, 200.0 + s) for s in range(1, 6)] + [(s, 300.0 + s) for s in range(6, 11)]


def test_missing_package_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ValueError, match=r"logger=tensorboard needs the package 'tensorboard'.*lowprec_train\[tens"):
        TensorBoardSink(run=facts(tmp_path))
