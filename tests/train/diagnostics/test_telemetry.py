"""Telemetry in the trainer: training is the same bits with it, the same ops without it; what it sees, and when."""

import itertools
import math
from collections import Counter

import pytest
import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec_train.data.loader import Batch
from lowprec_train.numerics.draws import Gemms, Operand
from lowprec_train.numerics.formats import E4M3
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.optim.optimizer import CodedOptimizer, parameter_groups
from lowprec_train.optim.schedule import WarmupCosine
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.linear_plan import OperandPlan
from lowprec_train.precision.saved_activations import saved_inputs
from lowprec_train.train import build, build_optimizer
from lowprec_train.train.checkpoint import Checkpointer
from lowprec_train.train.diagnostics import roundings, telemetry
from lowprec_train.train.diagnostics.divergence import NothingTrained
from lowprec_train.train.diagnostics.telemetry import Telemetry, aggregates
from tests.recipes import system
from tests.train.standins import Corpus, Lines, Model, assembled, bits, make_trainer, same

SEQ, MICRO, STEPS = 64, 2, 6


class Text:
    """Sequences of 64 symbols, functions of (step, index) alone."""

    def batch(self, step, first, count, per_step):
        generators = [torch.Generator().manual_seed(step * per_step + i) for i in range(first, first + count)]
        block = torch.stack([torch.randint(64, (SEQ + 1,), generator=g) for g in generators])
        return Batch(tokens=block[:, :-1].contiguous(), targets=block[:, 1:].contiguous(), documents=None)


def make(recipe, interval, *overrides, family="llama_tiny", compiled=False, backend="aot_eager", **changes):
    """A trainer of `+recipe=` at test size: four sequences a step, in two micro-batches."""
    one = system(recipe, family, *overrides, f"steps={STEPS}")
    if compiled:
        torch._dynamo.reset()
        one.model.compile_blocks(backend=backend)
    watching = Telemetry(one.model, one.optimizer, interval=interval)
    arguments = {
        "model": one.model,
        "optimizer": one.optimizer,
        "schedule": WarmupCosine(peak=3e-3, steps=STEPS),
        "corpus": Corpus(Text(), Text()),
        "seeds": one.seeds,
        "steps": STEPS,
        "tokens_per_step": 2 * MICRO * SEQ,
        "micro_batch": MICRO,
        "seq_len": SEQ,
        "max_grad_norm": 1.0,
        "max_nonfinite_steps": 3,
        "eval_interval": STEPS,
        "eval_batches": 1,
        "seed": 0,
        "precision": one.precision,
        "telemetry": watching,
    }
    return assembled(arguments | changes)


def fit(trainer, **arguments):
    sink, rows = Lines(), []
    trainer.fit(sinks=[sink], write_rows=rows.extend, **arguments)
    return sink, rows


def learned(sink):
    return sink.column("train/loss"), sink.column("train/grad_norm")


# --- training does not notice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["fp4", "coat", "mxfp4"])
def test_training_is_the_same_bits_with_telemetry_and_without(recipe):
    """Losses, norms, weights and optimizer state, watched never, every other time and always."""
    runs = [make(recipe, interval) for interval in (0, 2, 1)]
    sinks, rows = zip(*map(fit, runs))
    assert learned(sinks[0]) == learned(sinks[1]) == learned(sinks[2]) and len(set(learned(sinks[0])[0])) == STEPS
    assert same(bits(runs[0]), bits(runs[1])) and same(bits(runs[0]), bits(runs[2]))
    assert [{row["step"] for row in each} for each in rows] == [set(), {2, 4, 6}, {1, 2, 3, 4, 5, 6}]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_training_is_the_same_bits_with_telemetry_and_without(backend):
    runs = [make("fp4", interval, compiled=True, backend=backend) for interval in (0, 2)]
    (plain, none), (watched, rows) = map(fit, runs)
    assert learned(plain) == learned(watched) and same(bits(runs[0]), bits(runs[1]))
    assert not none and {row["step"] for row in rows} == {2, 4, 6}


@pytest.mark.parametrize("recompute", ["model.recompute=full", "model.full_recompute_layers=1"])
def test_compiled_blocks_that_are_recomputed_are_watched_eagerly_too(recompute):
    """Their compiled part is another method."""
    runs = [make("fp8", interval, recompute, compiled=True) for interval in (0, 2)]
    (plain, none), (watched, rows) = map(fit, runs)
    assert learned(plain) == learned(watched) and same(bits(runs[0]), bits(runs[1]))
    assert not none and {row["step"] for row in rows} == {2, 4, 6}
    assert all("_residual" in block.__dict__ for block in runs[1].model.blocks[:1])


def test_a_compiled_run_makes_no_more_graphs_and_is_watched_eagerly():
    counts, rows = {}, {}
    for interval in (0, 3):
        counter = torch._dynamo.testing.CompileCounter()
        _, rows[interval] = fit(make("mxfp4", interval, compiled=True, backend=counter))
        counts[interval] = counter.frame_count
    assert counts[0] == counts[3] > 0 and rows[3]
    _, eager = fit(make("mxfp4", 3))
    assert [row for row in rows[3] if row["step"] == 3] == [row for row in eager if row["step"] == 3]


def test_the_loss_stays_compiled_in_the_probe():
    """Eagerly it would take all tokens at once in FP32. Of the graphs, the probe runs its two passes and no block's."""
    runs = Counter()

    def counting(graph, inputs):
        def run(*arguments):
            runs["all"] += 1
            return graph.forward(*arguments)

        return run

    trainer = make("mxfp4", 2, compiled=True, backend=counting)
    for _ in range(4):
        runs["before"] = runs["all"]
        trainer.step()
        runs[trainer.steps_done] = runs["all"] - runs["before"]
    assert runs[2] - runs[1] == runs[4] - runs[3] == 2 and runs[1] == runs[3] == 2 * (2 + 2 + 2)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_shows_the_same_rows(recompute):
    plain, again = make("coat", 1, steps=2), make("coat", 1, f"model.recompute={recompute}", steps=2)
    (first, rows), (second, recomputed) = fit(plain), fit(again)
    assert learned(first) == learned(second)
    key = lambda row: (row["step"], row.get("site", ""), row.get("gemm", ""), str(row))  # noqa: E731
    assert sorted(rows, key=key) == sorted(recomputed, key=key)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_watched_step_on_a_gpu_never_waits_for_it(compiled):
    """Steps 3 and 4, the last one watched, under torch's ban of synchronisation; losses as of an unwatched run."""
    device, losses = torch.device("cuda", 0), {}
    for interval in (0, 2):
        one = system("coat")
        seeds = build.weights(one.model, device, 0)
        optimizer = build_optimizer.optimizer(one.run, one.model)
        if compiled:
            torch._dynamo.reset()
            one.model.compile_blocks()
        watching = Telemetry(one.model, optimizer, interval=interval)
        parts = {"model": one.model, "optimizer": optimizer, "seeds": seeds, "telemetry": watching}
        trainer = make("coat", 0, **parts)
        lines = [trainer.step() for _ in range(2)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            lines += [trainer.step() for _ in range(2)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses[interval] = [line["train/loss"].item() for line in lines]
    assert losses[0] == losses[2] and trainer.telemetry.read(4)


class Counted(TorchDispatchMode):
    """How often each op is dispatched."""

    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["coat", "mxfp4"])
def test_a_step_that_is_not_watched_dispatches_the_ops_of_a_run_without_telemetry(recipe):
    counts = {}
    for interval in (0, 3):
        trainer = make(recipe, interval)
        for step in (1, 2, 3, 4):
            with Counted() as counted:
                trainer.step()
            counts[interval, step] = counted.ops
            assert all(m.observer is None for m in trainer.model.modules() if isinstance(m, Linear))
            assert all(module.observer is None for _, module in saved_inputs(trainer.model))
    for step in (1, 2, 4):
        assert counts[0, step] == counts[3, step] and counts[0, step].total() > 1000
    assert counts[3, 3].total() > 1.5 * counts[0, 3].total()


def test_observers_go_and_gradients_with_them_when_the_pass_fails():
    trainer = make("coat", 1)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.telemetry.probe(lambda: (_ for _ in ()).throw(RuntimeError("broken")))
    assert all(m.observer is None for m in trainer.model.modules() if isinstance(m, Linear))


# --- what it sees ---------------------------------------------------------------------------------------------------


def expected_operands(recipe):
    """(gemm, operand) that the recipe of a linear rounds itself: codes that are reused are not rounded again."""
    pairs = itertools.product(recipe.gemms().items(), "ab")
    return {(gemm, side) for (gemm, each), side in pairs if isinstance(getattr(each, side), Quantizer)}


@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "fp4", "mxfp4_fp8", "nvfp4", "int8_switchback", "coat"])
@pytest.mark.parametrize("model", ["llama_tiny", "gpt_tiny"])
def test_every_rounding_of_every_layer_has_a_row(recipe, model):
    trainer = make(recipe, 1, family=model, steps=1)
    _, rows = fit(trainer)
    seen = {(r["site"], r["gemm"], r["operand"]): r for r in rows if "site" in r and r["gemm"] != "saved"}
    linears = {name: m for name, m in trainer.model.named_modules() if isinstance(m, Linear)}
    wanted = {(name, *pair) for name, linear in linears.items() for pair in expected_operands(linear.recipe)}
    shared = {key for key in wanted - set(seen) if key[1:] == ("wgrad", "a")}  # dY's codes of dgrad serve wgrad too
    assert set(seen) == wanted - shared
    assert not shared or recipe in ("fp8", "coat", "mxfp4_fp8")
    for (name, gemm, side), row in seen.items():
        assert row["what"].startswith(str(getattr(linears[name].recipe.gemms()[gemm], side)))
        assert 8 < row["sqnr_db"] < 60 and row["amax"] > 0 and row["nonfinite_pct"] == 0


def test_kept_inputs_and_states_have_rows_too():
    trainer = make("coat", 1, steps=1)
    _, rows = fit(trainer)
    kept = [(row["site"], row["operand"]) for row in rows if row.get("gemm") == "saved"]
    blocks = [("attention_norm", "a"), ("mlp_norm", "a"), ("mlp", "a"), ("mlp", "b")]
    assert sorted(kept) == sorted((f"blocks.{i}.{name}", side) for i in range(2) for name, side in blocks)
    matrices = {name for name, p in trainer.model.named_parameters() if p.ndim == 2}
    states = {(row["parameter"], row["state"]) for row in rows if "state" in row}
    assert states == {(name, state) for name in matrices for state in ("exp_avg", "exp_avg_sq")}
    assert {row["what"] for row in rows if "state" in row} == {"E4M3 expanded"}
    names = {"step", "what", *("sqnr_db", "underflow_pct", "saturated_pct", "nonfinite_pct", "amax")}
    scales = {"scale_min", "scale_max", "scale_spread", "outlier_pct", "clamped_blocks_pct"}
    assert all(
        set(row)
        == names | ({"parameter", "state", "stalled_pct"} if "state" in row else {"site", "gemm", "operand"} | scales)
        for row in rows
    )


def test_figures_are_those_of_the_step_s_first_micro_batch_and_draws(monkeypatch):
    """Step 3 by hand: the model as two steps left it, the draws of step 3, the first two of four sequences."""
    trainer = make("mxfp4", 3, steps=3)
    twin = make("mxfp4", 0, steps=3)
    _, rows = fit(trainer)
    for _ in range(2):
        twin.step()
    seen = {}

    def watch(how, x, rounded):
        seen[how.gemm, how.operand] = roundings.tally_operand(x, rounded, how.quantizer, how.outliers).figures()

    twin.model.blocks[1].mlp.down.observer = watch
    batch = Text().batch(2, 0, MICRO, 4)
    twin.model.loss(batch.tokens, batch.targets, torch.tensor(4.0 * SEQ), draws=twin.seeds.at(2, 0)).backward()
    assert set(seen) == {(g, s) for g in (Gemms.DGRAD, Gemms.WGRAD) for s in (Operand.A, Operand.B)}
    for (gemm, side), figures in seen.items():
        labels = ("blocks.1.mlp.down", gemm.name.lower(), side.name.lower())
        (row,) = [r for r in rows if (r.get("site"), r.get("gemm"), r.get("operand")) == labels]
        finite = {name: float(value) for name, value in figures.items() if math.isfinite(float(value))}
        assert {name: row[name] for name in figures if row[name] is not None} == finite


def test_states_are_those_of_the_update_itself():
    """Step 2 again with an observer of the test's own: before, wanted and after are the optimizer's."""
    trainer, twin = make("fp8_lm", 2, steps=2), make("fp8_lm", 0, steps=2)
    _, rows = fit(trainer)
    states = {(row["parameter"], row["state"]): row for row in rows if "state" in row}
    names = {p: name for name, p in twin.model.named_parameters()}
    update, seen = twin.optimizer.step, {}

    def watched(**arguments):
        seen.clear()
        update(**arguments | {"observer": lambda p, state, *values: seen.update({(names[p], state): values})})

    twin.optimizer.step = watched
    fit(twin)
    assert set(seen) == set(states) and {state for _, state in states} == {"exp_avg", "exp_avg_sq", "master"}
    formats = {"exp_avg": "E4M3", "exp_avg_sq": "FP16", "master": "FP16"}
    for (name, state), row in states.items():
        figures = {
            figure: float(value) for figure, value in roundings.tally_state(*seen[name, state]).figures().items()
        }
        assert row == {"step": 2, "parameter": name, "state": state, "what": formats[state], **figures}
    assert any(row["stalled_pct"] > 0 for row in states.values())


def test_a_skipped_step_writes_its_rows():
    """NaN weights of one layer: the step is skipped, the row is there, and its figures are null where NaN is."""
    trainer = make("fp8", 1, steps=2)
    with torch.no_grad():
        trainer.model.blocks[1].mlp.down.weight[0, 0] = math.nan
    sink, rows = Lines(), []
    with pytest.raises(NothingTrained, match="all 2 steps were skipped"):
        trainer.fit(sinks=[sink], write_rows=rows.extend)
    assert sink.column("train/skipped") == [1, 2]
    (row,) = [r for r in rows if (r.get("site"), r.get("gemm")) == ("blocks.1.mlp.down", "fprop") and r["step"] == 1
              and r["operand"] == "b"]  # fmt: skip
    assert row["sqnr_db"] is None and row["amax"] is None and row["nonfinite_pct"] == 100
    healthy = [r for r in rows if r.get("site") == "blocks.0.mlp.down" and r["gemm"] == "fprop"]
    assert len(healthy) == 4 and all(r["sqnr_db"] > 20 for r in healthy)


def test_a_phase_is_seen_from_its_first_step_on():
    """The last tenth in BF16: of six steps, the last."""
    _, rows = fit(make("fp8", 1, "precision/schedule=bf16_end"))
    assert {row["step"] for row in rows} == {1, 2, 3, 4, 5}


# --- when it is read and where it goes ------------------------------------------------------------------------------


def test_rows_come_one_step_late_and_before_a_save(tmp_path):
    trainer, seen = make("fp8", 2, steps=6), []
    checkpointer = Checkpointer(tmp_path, interval=4, keep=2)
    save = checkpointer.save
    checkpointer.save = lambda *args, **kwargs: (seen.append("save"), save(*args, **kwargs))[1]
    trainer.fit(
        sinks=[], checkpointer=checkpointer, write_rows=lambda rows: seen.append((rows[0]["step"], trainer.steps_done))
    )
    assert seen == [(2, 3), (4, 4), "save", (6, 6), "save"]


def test_series_go_to_the_sinks_also_between_logged_steps():
    sink, rows = fit(make("fp4", 2, log_interval=3))
    assert sink.column("step") == [2, 3, 4, 6]
    for line in sink.lines:
        series = {name: value for name, value in line.items() if name.startswith(("quant/", "opt/"))}
        assert series == aggregates([row for row in rows if row["step"] == line["step"]])
        assert len(series) > 20 if line["step"] != 3 else not series


def test_a_resumed_run_sees_the_same_rows(tmp_path):
    _, whole = fit(make("coat", 2))
    checkpointer = Checkpointer(tmp_path, interval=5, keep=3)
    first = make("coat", 2)
    _, before = fit(first, checkpointer=checkpointer, should_stop=lambda: first.steps_done == 3)
    second = make("coat", 2)
    assert checkpointer.load(second.checkpoint_parts()) == 3
    _, after = fit(second)
    assert before + after == whole


def row(gemm="fprop", operand="a", **figures):
    empty = dict.fromkeys(name for name, _ in telemetry.OPERAND_SERIES)
    return {"step": 1, "site": "s", "gemm": gemm, "operand": operand, **empty, **figures}


def test_series_over_layers():
    rows = [
        row(sqnr_db=20.0, underflow_pct=1.0),
        row(sqnr_db=None, underflow_pct=4.0),
        row(sqnr_db=23.0, underflow_pct=0.0),
    ]
    rows += [row("wgrad", "b", clamped_blocks_pct=2.0), row("wgrad", "b", clamped_blocks_pct=1.0)]
    empty = dict.fromkeys(name for name, _ in telemetry.STATE_SERIES)
    rows += [
        {"parameter": "p", "state": "exp_avg", **empty, "sqnr_db": db, "stalled_pct": db / 10} for db in (30.0, 34)
    ]
    assert aggregates(rows) == {
        "quant/fprop.a/sqnr_db_min": 20.0,
        "quant/fprop.a/sqnr_db_mean": 21.5,
        "quant/fprop.a/underflow_pct_mean": pytest.approx(5 / 3),
        "quant/fprop.a/underflow_pct_max": 4.0,
        "quant/wgrad.b/clamped_blocks_pct_max": 2.0,
        "opt/exp_avg_sqnr_db": 32.0,
        "opt/exp_avg_sqnr_db_min": 30.0,
        "opt/exp_avg_stalled_pct": pytest.approx(3.2),
    }
    assert aggregates([]) == {}


def test_a_model_without_quantised_layers_has_no_rows():
    sink, rows = fit(make("bf16", 1, steps=2))
    assert rows == [] and not [name for name in sink.lines[0] if name.startswith(("quant/", "opt/"))]
    model = Model()
    watching = Telemetry(model, CodedOptimizer(parameter_groups(model, 0.1)), interval=1)
    assert fit(make_trainer(steps=2, model=model, telemetry=watching, seeds=None))[1] == []


def test_a_negative_interval_is_refused():
    with pytest.raises(ValueError, match="telemetry_interval=-1"):
        make("fp8", -1)


def test_what_is_rounded_says_how():
    how = {"gemm": Gemms.FPROP, "operand": Operand.A}
    assert OperandPlan(**how, quantizer=Quantizer(E4M3, (1, -1))).rounding == "E4M3[1x*] FP32"
