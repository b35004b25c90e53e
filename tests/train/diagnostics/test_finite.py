"""What is saved and what is read holds numbers, else it is refused by name, and the older checkpoint stays."""

import math

import pytest
import torch

from lowprec_train.train.checkpoint import Checkpointer, CheckpointError
from lowprec_train.train.diagnostics import finite
from tests.train.standins import bits, make_trainer, same

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def poisoned(dtype, *values):
    """[7, 5] of ordinary numbers, the first of which are `values`."""
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    x.view(-1)[: len(values)] = torch.tensor(values)
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_is_found_and_counted(dtype):
    largest = torch.finfo(dtype).max
    ordinary = {"a": poisoned(dtype, largest, -largest, 0.0), "empty": torch.empty(0, dtype=dtype), "n": 3}
    assert finite.found(ordinary | {"codes": torch.arange(3), "number": torch.tensor(1.0, dtype=dtype)}) == {}
    bad = poisoned(dtype, math.nan, 1.0, math.nan)
    assert finite.found(ordinary | {"bad": bad, "alone": bad[0, 0]}) == {"bad": (2, 35), "alone": (1, 1)}
    if dtype is not torch.float8_e4m3fn:  # which has no infinity
        assert finite.found({"x": poisoned(dtype, -math.inf)}) == finite.found({"x": poisoned(dtype, math.inf)})
        assert finite.found({"x": poisoned(dtype, -math.inf)}) == {"x": (1, 35)}


def test_a_message_names_a_few():
    bad = dict.fromkeys("abcde", (1, 4096))
    text = finite.summary(bad)
    assert text.startswith("a (1 of 4,096 elements), b") and text.endswith("and 2 more tensors")
    with pytest.raises(ValueError, match=r"somewhere holds NaN or infinity: w \(1 of 35 elements\)"):
        finite.check("w", poisoned(torch.float32, math.inf), "somewhere")


@pytest.mark.parametrize("where", ["model.embedding.weight", "optimizer.embedding.weight.exp_avg_sq"])
def test_a_checkpoint_that_is_not_finite_is_not_written(tmp_path, where):
    """A number is lost between step 8 and its save: the run ends, and goes on from step 4."""
    trainer, checkpointer = make_trainer(steps=12), Checkpointer(tmp_path, interval=4, keep=3)
    good = {}

    def spoil():
        if trainer.steps_done == 4:
            good.update(bits(trainer))
        if trainer.steps_done == 8:
            part, _, key = where.partition(".")
            trainer.checkpoint_parts()[part].state_dict()[key][3, 2] = math.inf
        return 0

    with pytest.raises(CheckpointError, match="checkpoint of step 8 could not be written") as error:
        trainer.fit(sinks=[], checkpointer=checkpointer, should_stop=spoil)
    assert f"{where} (" in str(error.value) and "step-4 is intact" in str(error.value)
    restored = make_trainer(steps=12)
    assert checkpointer.load(restored.checkpoint_parts()) == 4
    assert same(bits(restored), good)


def test_a_checkpoint_that_is_not_finite_is_not_loaded(tmp_path):
    """As an earlier version could have written it."""
    trainer, checkpointer = make_trainer(), Checkpointer(tmp_path, interval=1, keep=2, asynchronous=False)
    checkpointer.save(trainer.checkpoint_parts(), 1)
    with torch.no_grad():
        trainer.model.head.weight[0, 0] = math.nan
    checkpointer.save(trainer.checkpoint_parts(), 2)
    with pytest.raises(CheckpointError, match="checkpoint of step 3 could not be written"):
        checkpointer.save(trainer.checkpoint_parts(), 3, only_finite=True)
    with pytest.raises(CheckpointError, match=r"step-2 holds NaN or infinity: model.head.weight \(1 of 192 elements\)"):
        checkpointer.load(make_trainer().checkpoint_parts(), 2)
    assert checkpointer.load(make_trainer().checkpoint_parts()) == 1, "the newest whole one"
