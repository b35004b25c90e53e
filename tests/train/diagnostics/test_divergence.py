"""Steps that would leave no numbers change nothing, and a run of such steps fails."""

import itertools
import math

import pytest
import torch

from lowprec_train.ops.adamw import EPS
from lowprec_train.optim.codecs import MASTER_CODECS, expanded, plain, scaled
from lowprec_train.train.checkpoint import Checkpointer
from lowprec_train.train.diagnostics import finite
from lowprec_train.train.diagnostics.divergence import LARGEST_NORM, NothingTrained, TrainingDiverged, usable
from tests.optim.cases import adamw
from tests.train.standins import bits, make_trainer, same

MOMENTS = [(plain(), plain()), (scaled("E4M3"), scaled("FP16")), (expanded(), expanded()), (plain("BF16"),) * 2]


@pytest.mark.parametrize(("moments", "master"), list(itertools.product(MOMENTS, MASTER_CODECS)), ids=str)
@pytest.mark.parametrize("clip_updates", [False, True])
def test_an_update_of_a_usable_gradient_is_finite(moments, master, clip_updates):
    """Rows without a gradient, a denormal one, the largest that is used; the smallest eps; then nothing for a while."""
    weight = torch.nn.Parameter(torch.randn(6, 64, generator=torch.Generator().manual_seed(0)))
    optimizer = adamw(
        [weight], lr=1e-2, eps=EPS[0], moments=moments, master=master, clip_updates=clip_updates, fused=False
    )
    gradient = torch.zeros(6, 64)
    gradient[1], gradient[2], gradient[3, 0], gradient[4] = 1e-45, 1e-30, LARGEST_NORM, 1.0
    for scale in (1.0, 1.0, -1.0, 0.0, 0.0):
        weight.grad = gradient * scale
        optimizer.step()
    assert not finite.found({"weight": weight} | optimizer.state[weight])


def test_which_steps_are_usable():
    def told(loss, norm, scale=1.0):
        return bool(usable(torch.tensor(loss), torch.tensor(norm), torch.tensor(scale)))

    assert told(2.0, 0.0) and told(2.0, 1e18) and told(-1e30, 1e30, 1e30)
    assert not told(math.nan, 1.0) and not told(math.inf, 1.0)
    assert not told(2.0, math.nan) and not told(2.0, math.inf) and not told(2.0, 1e20)
    assert not told(2.0, 1e38, math.inf), "an update by zeros is none"


def test_a_gradient_whose_square_overflows_is_skipped():
    trainer = make_trainer(max_grad_norm=0)
    before = bits(trainer)
    trainer.model.head.weight.register_hook(lambda gradient: gradient + 1e19)
    metrics = trainer.step()
    assert metrics["train/skipped"] == 1 and math.isfinite(metrics["train/grad_norm"])
    after = bits(trainer)
    learned = [{k: v for k, v in each.items() if not k.startswith("trainer.")} for each in (before, after)]
    assert same(*learned)


def test_the_gradients_that_were_not_finite_are_named():
    trainer = make_trainer(poison=())
    trainer.model.head.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingDiverged) as error:
        trainer.fit(sinks=[])
    assert error.value.gradients == ("head.weight",) and "gradients not finite: head.weight)" in str(error.value)


def test_a_run_without_an_update_fails_also_when_it_is_started_again(tmp_path):
    def run(**changes):
        trainer = make_trainer(steps=4, **changes)
        checkpointer = Checkpointer(tmp_path, interval=1, keep=1)
        checkpointer.load(trainer.checkpoint_parts())
        return trainer.fit(sinks=[], checkpointer=checkpointer)

    for _ in range(2):
        with pytest.raises(NothingTrained, match="all 4 steps were skipped as not finite, and no weight has moved"):
            run(poison=range(4), max_nonfinite_steps=5)


@pytest.mark.parametrize(
    ("poison", "valid", "says"),
    [((0, 1, 3, 4), 3.0, "4 of 6 steps were skipped"), ((5,), math.nan, "valid/loss is nan"), ((), math.inf, "is inf")],
)
def test_a_run_that_did_not_learn_fails_also_when_it_is_started_again(tmp_path, monkeypatch, poison, valid, says):
    """Most steps were skipped, or its weights compute no finite loss."""
    for _ in range(2):
        trainer = make_trainer(steps=6, poison=poison)
        monkeypatch.setattr(trainer, "evaluate", lambda: {"valid/loss": valid})
        checkpointer = Checkpointer(tmp_path, interval=1, keep=1)
        checkpointer.load(trainer.checkpoint_parts())
        with pytest.raises(NothingTrained, match=says):
            trainer.fit(sinks=[], checkpointer=checkpointer)


@pytest.mark.parametrize(
    ("steps", "poison", "says"),
    [
        (2, (1,), "1 of 2 steps only measured norms, 1 were skipped as not finite"),
        (2, (0, 1), "all 2 steps were skipped as not finite"),
    ],
)
def test_a_run_whose_other_steps_only_measured_norms_fails(steps, poison, says):
    """Clipped in the backward pass, the first step updates nothing."""
    trainer = make_trainer(steps=steps, poison=poison, in_backward=True)
    with pytest.raises(NothingTrained, match=f"{says}, and no weight has moved"):
        trainer.fit(sinks=[])


def test_a_run_that_ends_in_skipped_steps_fails_also_when_it_is_started_again(tmp_path):
    def run(max_nonfinite_steps):
        trainer = make_trainer(steps=6, poison=(3, 4, 5), max_nonfinite_steps=max_nonfinite_steps)
        checkpointer = Checkpointer(tmp_path, interval=1, keep=1)
        checkpointer.load(trainer.checkpoint_parts())
        return trainer.fit(sinks=[], checkpointer=checkpointer)

    with pytest.raises(TrainingDiverged):
        run(3)
    with pytest.raises(NothingTrained, match="the last 3 of 6 steps were skipped"):
        run(3)
    assert run(4) == "done", "as the message of the first failure offers"
