"""The training loop against hand-written references: accumulation, skipping, evaluation, what is logged and when."""

import itertools
import math

import pytest
import torch
from torch import nn

from lowprec_train.train.checkpoint import Checkpointer
from lowprec_train.train.logging.metrics import Throughput
from lowprec_train.train.trainer import EVALUATION_STEP, TrainingDiverged
from tests.train.standins import SEQ, Counting, Lines, Model, Noise, bits, make_trainer, same

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
E8_NAMES = {
    *("train/loss", "train/grad_norm", "train/lr", "train/skipped", "data/tokens", "time/data_ms", "time/step_ms"),
    *("perf/tokens_per_sec_per_gpu", "mem/peak_gib", "mem/alloc_retries"),
}


def fit(trainer, **arguments):
    sink = Lines()
    outcome = trainer.fit(sinks=[sink], **arguments)
    return outcome, sink


def test_steps_equal_a_plain_loop_with_torchs_clip_and_adamw():
    """Ten steps against the loop that everybody writes: one big batch, clip_grad_norm_, AdamW. Clipping divides
    instead of multiplying: 1e-6."""
    trainer = make_trainer(steps=10, micro_batch=8, max_grad_norm=0.5)
    _, sink = fit(trainer)
    model = Model()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    norms, losses = [], []
    for step in range(10):
        batch = Counting().batch(step, 0, 8, 8)
        loss = model.loss(batch.tokens, batch.targets, float((batch.targets != -100).sum()), draws=Noise().at(step, 0))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        for group in optimizer.param_groups:
            group["lr"] = trainer.schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.testing.assert_close(sink.column("train/loss"), losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(sink.column("train/grad_norm"), norms, rtol=1e-5, atol=0)
    assert max(norms) > 0.5 and losses[-1] < losses[0]
    for mine, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_accumulation_is_one_big_batch(micro_batch):
    """Targets are ignored unevenly over the micro-batches, so a mean of means would show. Gradients sum in another
    order: 1e-5 over 5 steps."""

    class Silent:
        def at(self, step, first_token):
            return None

    runs = [make_trainer(steps=5, micro_batch=size, seeds=Silent()) for size in (8, micro_batch)]
    big, small = (fit(trainer)[1] for trainer in runs)
    counts = {int((Counting().batch(0, i, micro_batch, 8).targets >= 0).sum()) for i in range(0, 8, micro_batch)}
    assert len(counts) > 1
    torch.testing.assert_close(small.column("train/loss"), big.column("train/loss"), rtol=1e-5, atol=0)
    torch.testing.assert_close(small.column("train/grad_norm"), big.column("train/grad_norm"), rtol=1e-4, atol=0)


def test_every_micro_batch_has_draws_and_evaluation_has_its_own():
    trainer = make_trainer(steps=2, eval_interval=2)
    fit(trainer)
    assert trainer.seeds.calls == [
        (0, 0),
        (0, 4 * SEQ),
        (1, 0),
        (1, 4 * SEQ),
        (EVALUATION_STEP, 0),
        (EVALUATION_STEP, 4 * SEQ),
    ]


def test_batches_are_asked_for_once_and_in_order():
    trainer = make_trainer(steps=3)
    fit(trainer)
    assert trainer.corpus.train.asked == [(step, first, 4, 8) for step in range(3) for first in (0, 4)]


def test_evaluation_is_the_mean_token_loss_and_disturbs_nothing():
    trainer = make_trainer()
    trainer.step()
    before = bits(trainer)
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first == second and same(before, bits(trainer)) and trainer.model.training
    batch = trainer.corpus.valid.batch(0, 0, 8, 8)
    losses = []
    for begin in (0, 4):
        draws = trainer.seeds.at(EVALUATION_STEP, begin * SEQ)
        part = slice(begin, begin + 4)
        losses.append(trainer.model.loss(batch.tokens[part], batch.targets[part], 1.0, draws=draws).item())
    assert first["valid/loss"] == pytest.approx(sum(losses) / int((batch.targets != -100).sum()), rel=1e-6)
    sparse, dense = (fit(make_trainer(eval_interval=interval))[1] for interval in (12, 1))
    assert sparse.column("train/loss") == dense.column("train/loss")


def test_one_line_a_step_with_the_names_of_the_convention():
    trainer = make_trainer(
        steps=12, eval_interval=5, throughput=Throughput(tokens_per_step=64, flops_per_token={"bf16": 6e6})
    )
    outcome, sink = fit(trainer)
    assert outcome == "done" and sink.column("step") == list(range(1, 13))
    assert [line["step"] for line in sink.lines if "valid/loss" in line] == [5, 10, 12]
    assert all(set(line) - {"step", "valid/loss"} == E8_NAMES | {"perf/tflops_per_gpu"} for line in sink.lines)
    assert sink.column("data/tokens") == [64.0 * step for step in range(1, 13)]
    assert sink.column("train/lr") == [trainer.schedule(step) for step in range(12)]
    for line in sink.lines:
        assert line["perf/tokens_per_sec_per_gpu"] == pytest.approx(64 / (line["time/step_ms"] / 1e3))
        assert line["perf/tflops_per_gpu"] == pytest.approx(line["perf/tokens_per_sec_per_gpu"] * 6e-6)
        assert 0 <= line["time/data_ms"] < 1e4 and 0 < line["time/step_ms"] < 1e4 and line["mem/peak_gib"] > 0.01


def test_the_rms_of_updates_is_logged_and_changes_nothing():
    plain, watched = (fit(make_trainer(log_update_rms=on))[1] for on in (False, True))
    assert watched.column("train/loss") == plain.column("train/loss")
    names = {"optim/update_rms", "optim/update_rms_embedding"}
    assert all(set(line) - set(other) == names for line, other in zip(watched.lines, plain.lines, strict=True))
    for name in names:  # the first second moment is the first square, but for zeros
        assert watched.column(name)[0] <= 1.0 and all(0 < value < 4.5 for value in watched.column(name))


def test_log_interval_thins_lines_but_not_evaluations():
    _, sink = fit(make_trainer(steps=12, eval_interval=5, log_interval=4))
    assert sink.column("step") == [4, 5, 8, 10, 12]


def test_logging_runs_one_step_late():
    """The numbers of a step are read while the next one is under way, and at boundaries at once."""
    trainer, seen = make_trainer(steps=6, eval_interval=4), []

    class Watch:
        def log(self, step, metrics):
            seen.append((step, trainer.steps_done))

        def close(self):
            pass

    trainer.fit(sinks=[Watch()])
    assert seen == [(1, 2), (2, 3), (3, 4), (4, 4), (5, 6), (6, 6)]


@pytest.mark.parametrize("device", DEVICES)
def test_nan_in_activations_skips_the_step_and_only_that(device):
    trainer = make_trainer(steps=6, poison=[2, 4], device=device)
    states = [bits(trainer)]
    lines = []
    for _ in range(6):
        lines.append({k: float(v) for k, v in trainer.step().items()})
        states.append(bits(trainer))
    assert [math.isnan(line["train/loss"]) for line in lines] == [False, False, True, False, True, False]
    assert [line["train/skipped"] for line in lines] == [0, 0, 1, 1, 2, 2]
    learned = [{k: v for k, v in state.items() if not k.startswith("trainer.")} for state in states]
    assert [same(a, b) for a, b in itertools.pairwise(learned)] == [False, False, True, False, True, False]
    assert all(v.isfinite().all() for v in learned[-1].values())
    assert {v.item() for k, v in learned[-1].items() if k.endswith(".step")} == {4.0}


def test_infinite_gradient_with_a_finite_loss_is_skipped():
    trainer = make_trainer(steps=2)
    trainer.model.hidden.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = bits(trainer)
    line = trainer.step()
    after = bits(trainer)
    assert line["train/loss"].isfinite() and not line["train/grad_norm"].isfinite() and line["train/skipped"] == 1
    assert same(
        {k: v for k, v in before.items() if k.startswith("model")},
        {k: v for k, v in after.items() if k.startswith("model")},
    )


def test_divergence_saves_and_stops_with_the_numbers(tmp_path):
    trainer = make_trainer(steps=30, poison=[3, 6, 7, 8, 9], max_nonfinite_steps=3)
    states = {}

    def remember():
        states[trainer.steps_done] = bits(trainer)
        return False

    checkpointer = Checkpointer(tmp_path, interval=100, keep=2)
    sink = Lines()
    with pytest.raises(TrainingDiverged, match=r"step 10: loss nan, gradient norm nan, 4 steps in a row") as caught:
        trainer.fit(sinks=[sink], checkpointer=checkpointer, should_stop=remember)
    assert (caught.value.step, caught.value.skipped) == (10, 4) and "learning rate" in str(caught.value)
    assert "optimizer states after step 10 are saved" in str(caught.value)
    assert sink.column("step") == list(range(1, 11))
    restored = make_trainer(steps=30, max_nonfinite_steps=3)
    assert checkpointer.load(restored.checkpoint_parts()) == 10  # found out one step late
    learned = {k: v for k, v in bits(restored).items() if not k.startswith("trainer.")}
    assert same(learned, {k: v for k, v in states[6].items() if not k.startswith("trainer.")})
    assert restored._skipped.item() == 5 and restored._skipped_in_row.item() == 4


def test_the_step_after_a_divergence_is_logged_and_kept(tmp_path):
    """The host finds out when the next step is done: that one may be finite, and the next launch goes on from it."""
    sink, checkpointer = Lines(), Checkpointer(tmp_path, interval=100, keep=2)
    trainer = make_trainer(steps=12, poison=[4, 5, 6], max_nonfinite_steps=3)
    with pytest.raises(TrainingDiverged, match=r"step 7: .* 3 steps in a row") as caught:
        trainer.fit(sinks=[sink], checkpointer=checkpointer)
    assert "after step 8 are saved" in str(caught.value) and trainer.steps_done == 8
    again = make_trainer(steps=12, max_nonfinite_steps=3)
    assert checkpointer.load(again.checkpoint_parts()) == 8 and again._skipped_in_row.item() == 0
    assert again.fit(sinks=[sink], checkpointer=checkpointer) == "done"
    assert sink.column("step") == list(range(1, 13))


def test_divergence_without_room_to_save_says_both(tmp_path):
    class Full(Checkpointer):
        def _write(self, flat, step):
            from lowprec_train.train.checkpoint import CheckpointError

            raise CheckpointError("no room")

    with pytest.raises(TrainingDiverged) as caught:
        make_trainer(poison=range(20)).fit(sinks=[], checkpointer=Full(tmp_path, interval=100, keep=1))
    assert caught.value.__notes__ == ["no room"]


def test_skips_apart_from_each_other_do_not_stop_a_run():
    outcome, sink = fit(make_trainer(steps=12, poison=[1, 2, 4, 5, 7, 8], max_nonfinite_steps=3))
    assert outcome == "done" and sink.lines[-1]["train/skipped"] == 6


def test_stop_request_saves_after_the_step(tmp_path):
    trainer = make_trainer()
    checkpointer = Checkpointer(tmp_path, interval=100, keep=1)
    outcome, sink = fit(trainer, checkpointer=checkpointer, should_stop=lambda: trainer.steps_done == 7)
    assert outcome == "preempted" and sink.column("step") == list(range(1, 8)) and checkpointer.latest() == 7


def test_stop_request_at_the_last_step_is_done(tmp_path):
    checkpointer = Checkpointer(tmp_path, interval=100, keep=1)
    trainer = make_trainer(steps=4)
    outcome, _ = fit(trainer, checkpointer=checkpointer, should_stop=lambda: trainer.steps_done == 4)
    assert outcome == "done" and checkpointer.latest() == 4
    assert fit(trainer, checkpointer=checkpointer)[0] == "done" and trainer.steps_done == 4


def test_failing_data_surfaces():
    class Broken(Counting):
        def batch(self, step, first, count, per_step):
            if step == 2:
                raise OSError("shard is gone")
            return super().batch(step, first, count, per_step)

    from tests.train.standins import Corpus

    trainer = make_trainer(corpus=Corpus(Broken(), Counting()))
    with pytest.raises(OSError, match="shard is gone"):
        trainer.fit(sinks=[])
    assert trainer.steps_done == 2


def test_batch_without_a_target_is_harmless():
    class Ignored(Counting):
        def batch(self, *arguments):
            batch = super().batch(*arguments)
            batch.targets.fill_(-100)
            return batch

    from tests.train.standins import Corpus

    trainer = make_trainer(corpus=Corpus(Ignored(), Counting()))
    line = trainer.step()
    assert line["train/loss"] == 0 and line["train/skipped"] == 0


def test_max_grad_norm_zero_does_not_clip():
    free, loose = (fit(make_trainer(max_grad_norm=clip))[1].column("train/loss") for clip in (0, 1e30))
    assert free == loose


@pytest.mark.gpu
def test_a_step_never_waits_for_the_device():
    trainer = make_trainer(device="cuda")
    trainer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
