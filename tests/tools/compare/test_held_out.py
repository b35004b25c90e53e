"""Held-out losses are compared only between runs that were evaluated on the same tokens."""

import html
import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from lowprec_train.tools.compare import measure, plot, report
from lowprec_train.tools.compare.over_seeds import ONE_SEED
from lowprec_train.tools.compare.page import document, numbers
from lowprec_train.tools.compare.runs import read_runs

GAP, HELD_GAP = 1 / 64, -1.0  # of the training losses and of the held-out losses
N = 60


def losses(gap=0.0):
    return np.round(1024 * (4 + 3 * np.exp(-np.arange(N) / 20))) / 1024 + gap


def evaluated(batches, micro_batch=4, seq_len=256):
    """The keys that decide which tokens are evaluated."""
    return f"eval_batches: {batches}\nmicro_batch: {micro_batch}\ndata: {{seq_len: {seq_len}}}\n"


@pytest.fixture
def runs_of(make_run):
    """`runs_of(bf16=config, fp4=config)`: training losses of all but bf16 are GAP above its own, held-out losses
    HELD_GAP.
    """

    def runs(**configs):
        paths = []
        for name, config in configs.items():
            gap, held = (0, 0) if name == "bf16" else (GAP, HELD_GAP)
            paths.append(make_run(name, losses(gap), valid={30: 5.0 + held, N: 4.5 + held}, config=config))
        return read_runs(paths)

    return runs


def fp4_of(comparison):
    return next(each for each in comparison.runs if each.name == "fp4")


OTHERS = {
    "eval_batches": (evaluated(16), "fp4 was evaluated on 64 sequences, the baseline on 32"),
    "micro_batch": (evaluated(8, micro_batch=2), "fp4 was evaluated on 16 sequences, the baseline on 32"),
    "one": (evaluated(1, micro_batch=1), "fp4 was evaluated on 1 sequence, the baseline on 32"),
    "seq_len": (
        evaluated(8, seq_len=512),
        "fp4 was evaluated on 32 sequences of 512 tokens, the baseline on 32 sequences of 256 tokens",
    ),
    "the same number of tokens": (
        evaluated(4, seq_len=512),
        "fp4 was evaluated on 16 sequences of 512 tokens, the baseline on 32 sequences of 256 tokens",
    ),
    "seq_len, and nothing else": (
        "data: {seq_len: 512}\n",
        "fp4 was evaluated on sequences of 512 tokens, the baseline on 32 sequences of 256 tokens",
    ),
}


@pytest.mark.parametrize(("other", "sentence"), OTHERS.values(), ids=OTHERS.keys())
def test_other_tokens_have_a_loss_and_no_gap(runs_of, other, sentence):
    comparison = measure.compare(runs_of(bf16=evaluated(8), fp4=other))
    held = fp4_of(comparison).validation
    assert (held.loss, held.step) == (4.5 + HELD_GAP, N)
    assert held.gap is held.gap_percent is held.gap_step is None
    reason = f"{sentence}: held-out losses are not compared"
    assert comparison.held_out_notes == json.loads(report.to_json(comparison))["held_out_notes"] == [reason]
    text = report.to_markdown(comparison, figure="curves.png")
    assert text.count(f"{reason}.") == 1
    assert next(line for line in text.splitlines() if line.startswith("| fp4")).split()[-6:-1:2] == ["3.5000", "-", "-"]


@pytest.mark.parametrize(
    ("base", "other"),
    [
        (evaluated(8), evaluated(8)),
        (evaluated(8), evaluated(4, micro_batch=8)),  # as many sequences
        (evaluated(8), ""),
        ("", evaluated(8)),
        ("micro_batch: 4\n", "micro_batch: 8\n"),
        ("eval_batches: 4\n", "eval_batches: 8\n"),
        (evaluated(8), "eval_batches: 16\nmicro_batch: 4.5\n"),
    ],
)
def test_the_same_tokens_are_compared_and_so_are_unknown_ones(runs_of, base, other):
    comparison = measure.compare(runs_of(bf16=base, fp4=other), max_gap=0.1)
    held = fp4_of(comparison).validation
    assert (held.gap, held.gap_step) == (HELD_GAP, N) and comparison.held_out_notes == []
    assert comparison.failures == ["fp4: gap of -1.0000 nat, validation"]
    assert "not compared" not in report.to_markdown(comparison, figure="curves.png")


def test_the_gate_uses_training_losses_of_runs_on_other_tokens(runs_of):
    runs = runs_of(bf16=evaluated(8), fp4=evaluated(16), fp8=evaluated(8))
    assert measure.compare(runs, max_gap=0.1).failures == ["fp8: gap of -1.0000 nat, validation"]
    comparison = measure.compare(runs[:2], max_gap=GAP)
    assert comparison.failures == [] and "0.0156 (fp4, matched steps)" in report.gate(comparison)
    comparison = measure.compare(runs[:2], max_gap=GAP / 2)
    assert comparison.failures == ["fp4: gap of +0.0156 nat, matched steps", "fp4: gap of +0.0156 nat, matched tokens"]


def test_one_sentence_for_runs_on_the_same_tokens(runs_of):
    wide, same = evaluated(16), evaluated(8)
    comparison = measure.compare(runs_of(bf16=same, fp4=wide, fp8=wide, int8=wide, coat=same, mxfp4=evaluated(2)))
    assert comparison.held_out_notes == [
        "fp4, fp8 and int8 were evaluated on 64 sequences, the baseline on 32: held-out losses are not compared",
        "mxfp4 was evaluated on 8 sequences, the baseline on 32: held-out losses are not compared",
    ]
    gaps = {each.name: each.validation.gap for each in comparison.runs}
    assert gaps == {"bf16": None, "fp4": None, "fp8": None, "int8": None, "coat": HELD_GAP, "mxfp4": None}


@pytest.mark.parametrize("silent", ["bf16", "fp4"])
def test_runs_that_were_not_evaluated_need_no_reason(make_run, silent):
    valid = {name: {N: 4.5} if name != silent else None for name in ("bf16", "fp4")}
    configs = {"bf16": evaluated(8), "fp4": evaluated(16)}
    paths = [make_run(name, losses(), valid=valid[name], config=configs[name]) for name in configs]
    assert measure.compare(read_runs(paths)).held_out_notes == []


def test_charts_and_page_have_no_held_out_gap(runs_of, monkeypatch):
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: kept.append(figure))
    runs = runs_of(bf16=evaluated(8), fp4=evaluated(16), fp8=evaluated(8))
    comparison = measure.compare(runs)
    plot.save(comparison, runs, None)
    reason = "fp4 was evaluated on 64 sequences, the baseline on 32: held-out losses are not compared"
    hollow = [line.get_ydata()[0] for line in kept[0].axes[3].lines if line.get_markerfacecolor() == "white"]
    assert hollow == [HELD_GAP]  # of fp8
    assert reason in kept[0].get_supxlabel()
    tree = numbers.of_comparison(comparison, runs, "sqnr_db")
    assert [run["held"] for run in tree["runs"]] == [None, None, HELD_GAP]
    assert [run["valid"]["values"][-1] for run in tree["runs"]] == [4.5, 3.5, 3.5]
    assert f'<p class="warning">{html.escape(reason)}.</p>' in document.to_html(comparison, runs)


@pytest.fixture
def seeds_of(make_run):
    """`seeds_of({("fp4", 1): config})`: three seeds of bf16 and of fp4, all evaluated on 32 sequences but for the named
    ones. fp4 is 1/8 above in training, 1 below held out.
    """

    def runs(others):
        paths = []
        for recipe in ("bf16", "fp4"):
            for seed in range(3):
                train, held = (1 / 8, HELD_GAP) if recipe == "fp4" else (0, 0)
                noise = seed / 4 + (seed == 1) * (recipe == "fp4") / 512
                valid = {N: 4.5 + held + noise}
                path = make_run(f"{recipe}-{seed}", losses(train + noise), valid=valid, recipe=recipe)
                config = others.get((recipe, seed), evaluated(8))
                (path / "config.yaml").write_text(f"seed: {seed}\nprecision: {{name: {recipe}}}\n{config}")
                paths.append(path)
        return read_runs(paths)

    return runs


def test_gaps_over_seeds_are_of_held_out_losses_on_the_same_tokens(seeds_of):
    over = measure.compare(seeds_of({})).over_seeds
    (fp4,) = over.gaps
    assert (over.loss, over.note) == (f"validation, step {N}", "")
    assert fp4.words == "below" and fp4.nats == pytest.approx(HELD_GAP, abs=1 / 512)


REASONS = {
    "one run": ({("fp4", 1): evaluated(16)}, "32 and 64 sequences"),
    "one arm": ({("fp4", seed): evaluated(16) for seed in range(3)}, "32 and 64 sequences"),
    "three": ({("fp4", 0): evaluated(16), ("bf16", 0): evaluated(4)}, "16, 32 and 64 sequences"),
    "another micro_batch": (
        {("fp4", seed): evaluated(8, micro_batch=8) for seed in range(3)},
        "32 and 64 sequences",
    ),
    "an old run": (
        {("fp4", 1): evaluated(16), ("fp4", 2): "micro_batch: 4\ndata: {seq_len: 256}\n"},
        "32 and 64 sequences",
    ),
    "lengths": (
        {("fp4", seed): evaluated(8, seq_len=512) for seed in range(3)},
        "32 sequences of 256 tokens and 32 sequences of 512 tokens",
    ),
}


@pytest.mark.parametrize(("others", "amounts"), REASONS.values(), ids=REASONS.keys())
def test_gaps_over_seeds_are_of_training_losses_on_other_tokens(seeds_of, others, amounts):
    runs = seeds_of(others)
    comparison = measure.compare(runs)
    over, reason = comparison.over_seeds, f"the runs were evaluated on {amounts}, so these gaps are of training losses"
    assert (over.loss, over.note) == ("training", reason)
    assert [each.words for each in over.gaps] == ["above"]
    assert over.gaps[0].nats == pytest.approx(1 / 8, abs=1 / 512) and over.gaps[0].seeds == 3  # still one arm
    assert f"Over seeds: {reason}." in report.to_markdown(comparison, figure="curves.png")
    assert f"<li>{reason}</li>" in document.to_html(comparison, runs)


def test_without_gaps_over_seeds_there_is_one_reason(runs_of):
    over = measure.compare(runs_of(bf16=evaluated(8), fp4=evaluated(16))).over_seeds
    assert over.gaps == [] and over.note == ONE_SEED
