"""Every recipe at every layout: the losses of one process that accumulates the same micro-batches.

Data parallel over one axis, with FP32 gradients on the wire and no clipping: bit for bit. The same codes, scales and
draws, and the same sums in the same order; hybrid sharding adds the same gradients in another order. Tensor parallel:
the same codes, scales and draws, but sums along a cut dimension come in another order; with FP32 between layers that is
all, but where it tips a rounding. In BF16 partial sums are rounded too.
"""

import pytest
import torch

from tests.parallel.runs import CASES, LAYOUTS, STEPS, cases_of, described, launched, night_of, noises, trained
from tests.precision.noise import standard_score
from tests.recipes import BY_NIGHT

# Relative bounds of a step's loss.
CLIPPED = 1e-6  # an FP64 norm is rounded once, and a clipped update with it
ORDER = 1e-3  # FP32 sums in another order, which now and then tip a rounding: one code in some thousand moves by a step
TIPPED = 4e-3  # the same with four-bit codes, whose steps are 17 % to 50 % of a value
BF16 = 1e-2  # half a unit of 2^-8 in every residual addition, through five optimizer steps
WIRE = 5e-3  # 2.6 % of noise in each update
EXACT = [case for case, overrides in CASES.items() if {"comm=fp32", "max_grad_norm=0"} <= set(overrides)]
FOUR_BITS = ("fp4", "fp4_mixed", "mxfp4", "mxfp4_fp8", "fp4_fold", "fp8_eden4", "nvfp4", "averis")
FOUR_BITS += ("quartet2", "ufp4", "w4a8")


@pytest.fixture(scope="module")
def ranks_at(once):
    """layout -> what each rank saved; processes are started once a layout, and once more by night."""

    def of(name, night=False):
        cases = night_of(name) if night else ()
        return once(f"layout-{name}{'-night' * night}", lambda: launched(name, cases=cases))

    return of


@pytest.fixture(scope="module")
def references():
    known = {}

    def reference(case, sizes, **options):
        key = (case, sizes.dp, sizes.tp > 1, *options.items())
        if key not in known:
            known[key] = trained(described(case, sizes, **options))
        return known[key]

    return reference


def bound(case, name):
    sizes = LAYOUTS[name]
    if case.startswith("own comm"):
        return WIRE
    if case == "in bf16" and sizes.tp > 1:
        return BF16
    if sizes.tp > 1 or sizes.dp_replicate > 1:
        return TIPPED if case in FOUR_BITS else ORDER
    return 0.0 if case in EXACT else CLIPPED


def by_day_or_night():
    """What meets a layout by day (tests/parallel/runs.py), and the rest of the product by night."""
    for name in LAYOUTS:
        yield from ((name, case) for case in cases_of(name))
        yield from (pytest.param(name, case, marks=pytest.mark.nightly) for case in night_of(name))


@pytest.mark.parametrize(("name", "case"), list(by_day_or_night()))
def test_losses_are_those_of_one_process(name, case, ranks_at, references):
    ranks, expected = ranks_at(name, case not in cases_of(name)), references(case, LAYOUTS[name])
    assert all(each[case] == ranks[0][case] for each in ranks), "every rank reports the same numbers"
    found = ranks[0][case]
    assert len(found["loss"]) == STEPS and found["loss"][-1] < found["loss"][0]
    assert found["loss"] == pytest.approx(expected["loss"], rel=bound(case, name), abs=0.0)
    assert found["valid"] == pytest.approx(expected["valid"], rel=bound(case, name), abs=0.0)
    assert found["norm"] == pytest.approx(expected["norm"], rel=max(20 * bound(case, name), 1e-6), abs=0.0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_accumulation(name, ranks_at, references):
    """Two micro-batches a rank: gradients are added on each rank first, so sums come in another order."""
    found = ranks_at(name)[0]["fp8, accumulation 2"]["loss"]
    assert found == pytest.approx(references("fp8", LAYOUTS[name], accumulation=2)["loss"], rel=ORDER)


@pytest.mark.parametrize("name", ["dp2", "dp2-tp2"])
def test_updates_in_the_backward_pass_and_offloaded_states_change_no_bit(name, ranks_at):
    """Nor do inputs of blocks on the host."""
    assert all(rank["lean coat"] == rank["coat"] for rank in ranks_at(name))


@pytest.mark.parametrize("name", ["dp2", "dp2-tp2"])
def test_weights_that_are_rounded_again_in_the_backward_pass_change_no_bit(name, ranks_at):
    assert all(rank["weights again"] == rank["fp8"] for rank in ranks_at(name))


def test_sums_of_gradients_in_codes(ranks_at):
    """Whole gradients are added up on each rank until the last micro-batch. In FP32 codes these are the bits of FSDP2's
    own sums; in BF16 the losses stay within a rounding of each sum.
    """
    ranks = ranks_at("dp2")
    native, exact, coarse = (
        [rank[case] for rank in ranks] for case in ("fp8, accumulation 2", "sums in fp32", "sums in bf16")
    )
    assert exact == native and all(each == coarse[0] for each in coarse)
    assert coarse[0]["loss"] == pytest.approx(native[0]["loss"], rel=WIRE) and coarse != native


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_noise_of_weights_is_another_on_each_data_parallel_rank_and_in_each_micro_batch(name, ranks_at):
    """And that of micro-batch i * dp + d of one process on all tp ranks of data-parallel rank d."""
    sizes, ranks = LAYOUTS[name], ranks_at(name)
    alone = noises(described("mxfp4", sizes, accumulation=2, steps=1))
    assert len(alone) == 2 * sizes.dp
    for rank, each in enumerate(ranks):
        expected = alone[rank // sizes.tp :: sizes.dp]
        assert len(each["noise"]) == len(expected) == 2
        assert all(torch.equal(found, right) for found, right in zip(each["noise"], expected))
    scores = [standard_score(a, b) for i, a in enumerate(alone) for b in alone[:i]]
    assert scores and max(map(abs, scores)) < 4.5, scores


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS)
def test_twenty_steps(name, tmp_path):
    """What is exact stays exact; what is tipped leads to other codes, which lead to others."""
    cases = [case for case in (*cases_of(name), *night_of(name)) if case not in BY_NIGHT]
    found = launched(name, steps=20, cases=cases)[0]
    for case in cases:
        expected = trained(described(case, LAYOUTS[name], steps=20))["loss"]
        assert len(expected) == 20
        assert found[case]["loss"] == pytest.approx(expected, rel=10 * bound(case, name), abs=0.0), case
