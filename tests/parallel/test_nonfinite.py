"""NaN and infinity in runs of several processes: what is named, and what is saved all the same."""

import math
from dataclasses import replace

import pytest

from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train.checkpoint import Checkpointer
from lowprec_train.train.diagnostics.divergence import TrainingDiverged
from lowprec_train.train.launch import World
from tests.distributed import run_distributed
from tests.parallel.runs import built, described

WEIGHT = "blocks.0.mlp.down.weight"
LAYOUTS = {"dp2": Sizes(dp_shard=2), "tp2": Sizes(tp=2)}


def diverging(rank, job, bad):
    """The parameters that a run names after the gradient of an output was infinite on one rank."""
    trainer = built(replace(job.run, max_nonfinite_steps=1), World(rank, 2, rank), job.stream)
    block = trainer.model.blocks[0]
    if rank == bad:
        block.mlp.down.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * math.inf,))
    try:
        trainer.fit(sinks=[])
    except TrainingDiverged as error:
        return error.gradients
    return None


def saved_after_nan(rank, job, directory):
    """SQNRs and saved steps of a run whose first loss is NaN, and the SQNR that is loaded."""
    trainer = built(job.run, World(rank, 2, rank), job.stream)
    hook = trainer.model.blocks[0].register_forward_hook(lambda module, given, output: output * math.nan)
    checkpointer = Checkpointer(directory, interval=1, keep=3)
    found = []
    for step in (1, 2):
        found.append(float(trainer.step()["comm/grad_sqnr_db"]))
        hook.remove()
        checkpointer.save(trainer.checkpoint_parts(), step, wait=True, only_finite=True)
    again = built(job.run, World(rank, 2, rank), job.stream)
    step = checkpointer.load(again.checkpoint_parts())
    return found, step, float(again.step()["comm/grad_sqnr_db"])


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_of_any_rank_is_named(layout, bad):
    sizes = LAYOUTS[layout]
    job = described("fp8", sizes, split=True)
    named = run_distributed(diverging, sizes, job, bad)
    assert named[0] == named[1] and WEIGHT in named[0]


def test_a_run_is_saved_after_a_step_with_nan(tmp_path):
    """The SQNR of the gradients is then NaN until it is measured again: a metric, and no reason to refuse a state."""
    sizes = LAYOUTS["dp2"]
    job = described("own comm bf16", sizes, split=True)
    for found, step, loaded in run_distributed(saved_after_nan, sizes, job, tmp_path):
        assert step == 2 and all(map(math.isnan, (*found, loaded)))
