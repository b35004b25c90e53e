"""Telemetry with several processes: the rows and figures of one process, and the losses of a run without it."""

import math

import pytest

from tests.distributed import run_distributed
from tests.parallel.observed_runs import AT, EACH, INTERVAL, QUANTIZED, described, jobs, trained, work
from tests.parallel.runs import LAYOUTS

CASES = [(layout, case) for layout, cases in AT.items() for case in cases]


@pytest.fixture(scope="module")
def ranks_at(once):
    def of(layout):
        sizes = LAYOUTS[layout]
        return once(
            f"observed-{layout}", lambda: run_distributed(work, sizes, jobs(layout), sizes.processes, timeout=900)
        )

    return of


def by_rounding(rows):
    labels = ("site", "gemm", "operand", "parameter", "state", "what")
    found = {tuple(row.get(label) for label in ("step", *labels)): row for row in rows}
    assert len(found) == len(rows) > 0
    figures = dict.fromkeys(name for row in rows for name in row if name not in ("step", *labels))
    number = lambda value: math.nan if value is None else value  # noqa: E731
    return {key: {name: number(row[name]) for name in figures if name in row} for key, row in found.items()}


def interval_of(layout):
    (interval,) = {each for _, each in jobs(layout)} - {0}
    return interval


@pytest.mark.parametrize(("layout", "case"), CASES)
def test_figures_are_those_of_one_process(layout, case, ranks_at):
    """Of FP64 sums in another order; with tensor parallelism of operands that FP32 sums in another order change by some
    units in the last place, and one code in some thousand with them.
    """
    sizes, interval = LAYOUTS[layout], interval_of(layout)
    overrides = [each for each in AT[layout][case] if each not in (QUANTIZED, EACH)]
    one = by_rounding(trained(described(case, sizes, interval, *overrides, split=False))["rows"])
    many = by_rounding(ranks_at(layout)[0][case, interval]["rows"])
    if sizes.tp > 1:
        one, many = ({key: row for key, row in each.items() if key[0] == 1} for each in (one, many))
    assert set(one) == set(many)
    for key, row in one.items():
        assert many[key] == pytest.approx(row, rel=1e-6, abs=1e-9, nan_ok=True) or (
            sizes.tp > 1 and near(many[key], row)
        ), key
    before_any_sum = [key for key in one if key[1:3] == ("blocks.0.attention.qkv", "fprop") and interval == 1]
    assert all(many[key] == pytest.approx(one[key], rel=1e-9, nan_ok=True) for key in before_any_sum)
    assert before_any_sum or interval > 1


def near(found, row):
    """Whether figures differ by some tipped codes: a spread of scales, in binades, by one block's scale, the SQNR of
    a second moment in FP16 by the rounding of its largest values.
    """
    wider = {"scale_spread": 0.6} | ({"sqnr_db": 6.0} if row["sqnr_db"] > 60 else {})
    same = {name: row[name] for name, bound in wider.items() if name in row and abs(found[name] - row[name]) < bound}
    return found | same == pytest.approx(row, rel=2e-2, abs=0.15, nan_ok=True)


@pytest.mark.parametrize(("layout", "case"), CASES)
def test_training_is_the_same_bits_and_the_same_ops_without_telemetry(layout, case, ranks_at):
    for rank in ranks_at(layout):
        never, observed = rank[case, 0], rank[case, interval_of(layout)]
        assert never["loss"] == observed["loss"] and not never["rows"]
        if interval_of(layout) > 1:
            assert never["ops"] == observed["ops"] and any("c10d" in op for op in never["ops"])
            assert {row["step"] for row in observed["rows"]} <= {interval_of(layout)}


def test_only_ranks_with_the_first_micro_batch_measure_operands(ranks_at):
    """The second rank has the rows of what is sharded: weights that are all-gathered as codes, and states."""
    weight = lambda row: (row.get("gemm"), row.get("operand")) == ("fprop", "b")  # noqa: E731
    for case, sharded in (("fp8", weight), ("coat", lambda row: "state" in row)):
        first, second = (each[case, INTERVAL]["rows"] for each in ranks_at("dp2"))
        assert second == [row for row in first if sharded(row)] and 0 < len(second) < len(first)
