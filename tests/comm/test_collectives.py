"""The collectives over gloo on four processes and NCCL on two GPUs: the simulation's bits, the same on every rank."""

import pytest
import torch

from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.collectives import all_reduce_bytes, reduce_scatter_bytes
from lowprec_train.comm.shared_scale import SharedScaleCodec
from lowprec_train.numerics.formats import BF16, E4M3, E5M2, FP32
from tests.comm import simulation
from tests.comm.cases import CASES, RANKS, ROW, of_two_ranks, ranges, row
from tests.comm.processes import in_symmetric_memory, of_own_scales, work, work_on_gpu
from tests.distributed import run_distributed

SHARED = [name for name, case in CASES.items() if case.codec.shares_scales]
PLAIN = [name for name in CASES if name not in SHARED]


@pytest.fixture(scope="module")
def results():
    """What each of four ranks computed over gloo, {case: result} a rank."""
    return run_distributed(work, RANKS)


@pytest.fixture(scope="module")
def results_on_gpus():
    """The same of two ranks over NCCL."""
    return run_distributed(work_on_gpu, 2, backend="nccl")


def same_bits(a, b):
    """torch.equal on the bits; any NaN equals any other."""
    assert a.dtype == b.dtype and a.shape == b.shape
    one = torch.tensor(torch.nan)
    return torch.equal(*(torch.where(x.isnan(), one, x).view(torch.int32) for x in (a, b)))


def expected(case, whole=None):
    """One result a rank."""
    format, block, ranks = case.codec.format.name, case.codec.block, len(case.flats)
    if case.kind == "reduce_scatter":
        return simulation.reduce_scatter(case.flats, ranges(case.layout), format, block)
    whole = case.codec.sends_whole(case.layout, ranks) if whole is None else whole
    return [simulation.all_reduce(case.flats, ranges(case.layout), format, block, whole)] * ranks


def expected_shared(case):
    """One result a rank, and the share at the maximum."""
    arguments = (case.flats, ranges(case.layout), case.mu, case.codec.format.name, case.codec.every_addition)
    values, share = getattr(simulation, f"{case.kind}_shared")(*arguments)
    if case.kind == "reduce_scatter":
        return values, share
    return [values] * len(case.flats), share / case.layout.coded_size


@pytest.mark.parametrize("name", PLAIN)
def test_equals_the_simulation(results, name):
    for rank, value in enumerate(expected(CASES[name])):
        assert same_bits(results[rank][name], value), rank


@pytest.mark.parametrize("name", SHARED)
def test_shared_scale_equals_the_simulation(results, name):
    values, share = expected_shared(CASES[name])
    for rank, value in enumerate(values):
        assert same_bits(results[rank][name][0], value), rank
        assert results[rank][name][1] == pytest.approx(share)


@pytest.mark.parametrize("name", of_own_scales(CASES))
def test_rows_read_from_other_ranks_equal_the_simulation(results, name):
    """Elements that are sent as they lie are sent."""
    case, format = CASES[name], CASES[name].codec.format
    unchanged = format in (BF16, FP32) and case.flats[0].dtype == format.carrier
    for rank, value in enumerate(expected(case)):
        found, turns = results[rank]["from peers"][name]
        assert same_bits(found, value), rank
        assert turns == ([] if unchanged else ["write", "read"])


@pytest.fixture(scope="module")
def results_in_symmetric_memory():
    """What two GPUs computed that read each other's memory."""
    return run_distributed(in_symmetric_memory, 2, backend="nccl")


@pytest.mark.gpu
@pytest.mark.parametrize("name", of_own_scales(CASES))
def test_gpus_that_read_each_other_equal_the_simulation(results_in_symmetric_memory, name):
    for rank, value in enumerate(expected(of_two_ranks(CASES[name]))):
        found, (first, second, doubled) = results_in_symmetric_memory[rank][name]
        assert same_bits(found, value) and same_bits(first, value) and same_bits(second, value), rank
        assert same_bits(doubled, 2.0 * value), rank


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN)
def test_gpus_equal_the_simulation(results_on_gpus, name):
    case = of_two_ranks(CASES[name])
    for rank, value in enumerate(expected(case)):
        assert same_bits(results_on_gpus[rank][name], value), rank
    if case.kind == "all_reduce":
        for rank, value in enumerate(expected(case, whole=False)):
            assert same_bits(results_on_gpus[rank][f"{name}-two-steps"], value), rank


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHARED)
def test_gpus_with_a_shared_scale_equal_the_simulation(results_on_gpus, name):
    values, share = expected_shared(of_two_ranks(CASES[name]))
    for rank, value in enumerate(values):
        assert same_bits(results_on_gpus[rank][name][0], value), rank
        assert results_on_gpus[rank][name][1] == pytest.approx(share)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].kind == "all_reduce"])
def test_ranks_agree(results, name):
    first, *others = ([each[name]] if torch.is_tensor(each[name]) else each[name] for each in results)
    assert all(same_bits(a, b) for other in others for a, b in zip(first, other))


def test_two_ranks_sum_whole_contributions(results):
    case = CASES["all_reduce-e4m3"]
    for first in (0, 2):
        pair = simulation.all_reduce(case.flats[first : first + 2], ranges(ROW), "E4M3", 256, whole=True)
        assert all(same_bits(results[rank]["pair"], pair) for rank in (first, first + 1))


def test_one_rank_is_the_identity(results):
    for rank, flat in enumerate(CASES["all_reduce-e4m3"].flats):
        for name in ("alone", "alone-scattered", "alone-shared"):
            assert torch.equal(results[rank][name], flat)


@pytest.mark.parametrize("name", ["nan-everywhere", "inf-in-bf16"])
def test_not_finite_on_one_rank_reaches_all(results, name):
    """Rank 2's element 1100 lies in the third range's only full block, or is alone in BF16."""
    poisoned = slice(1064, 1064 + 256) if name == "nan-everywhere" else slice(1100, 1101)
    clean = torch.ones(ROW.size, dtype=torch.bool)
    clean[poisoned] = False
    for each in results:
        assert not each[name][poisoned].isfinite().any()
        assert each[name][clean].isfinite().all()


@pytest.mark.parametrize("name", ["nan", "inf"])
def test_not_finite_reaches_its_owner(results, name):
    """Row 1 is where rank 2's element lies."""
    seen = [not each[name].isfinite().all() for each in results]
    assert seen == [False, True, False, False]


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("name", ["nan", "inf"])
def test_not_finite_under_a_shared_scale_reaches_all(results, kind, name):
    """A whole parameter: the one that holds the element, on every rank."""
    start, size = {"nan": (1064, 300), "inf": (0, 1024)}[name]
    for each in results:
        lost = ~each[f"{kind}-shared-{name}"][0].isfinite()
        assert lost[start : start + size].all() and lost.sum() == size


def test_schedule_ends_saturation(results):
    """Identical gradients saturate at mu = 1 and 1/2; four ranks do not at 1/4. All ranks follow the same mu."""
    history = results[0]["schedule"]
    assert all(torch.equal(each["schedule"], history) for each in results)
    mu, share = history.unbind(1)
    assert mu[:3].tolist() == [1.0, 0.5, 0.25]
    assert (share[:2] > 1e-5).all() and (share[2:] <= 1e-5).all()
    assert mu[3:].tolist() == pytest.approx([0.25 * 2 ** (k / 1000) for k in (1, 2, 3)])


def test_refusals(results):
    words = ["elements are not", "sums are FP32"]
    for message, word in zip(results[0]["refusals"], words * 2, strict=True):
        assert message and word in message


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "cost"), [(BlockScaledCodec(E4M3), 1 + 1 / 256), (BlockScaledCodec(E5M2), 1 + 1 / 256)]
)
def test_a_gradient_is_a_byte(codec, cost):
    """T13: one byte, and a 256th for its block's exponent; BF16 takes twice that, a shared scale nothing beside."""
    layout = row(1 << 20)
    assert reduce_scatter_bytes(codec, layout, 8) == 7 * cost * (1 << 20)
    assert reduce_scatter_bytes(BlockScaledCodec(BF16), layout, 8) == 7 * 2 << 20
    assert reduce_scatter_bytes(SharedScaleCodec(), layout, 8) == 7 << 20


def test_all_reduce_sends_what_is_less():
    whole = row(1 << 20)
    assert BlockScaledCodec().sends_whole(whole, 2) and not BlockScaledCodec().sends_whole(whole, 4)
    assert all_reduce_bytes(BlockScaledCodec(), whole, 2) == (1 + 1 / 256) * (1 << 20)
    assert all_reduce_bytes(BlockScaledCodec(), whole, 8) == 2 * 7 / 8 * (1 + 1 / 256) * (1 << 20)
    assert all_reduce_bytes(SharedScaleCodec(), whole, 8) == 2 * 7 / 8 * (1 << 20)


def test_small_parameters_are_summed_whole():
    """A 300-element matrix fills a block on each of eight ranks: two steps would send 2 * 257 bytes to each."""
    assert BlockScaledCodec().sends_whole(row(300), 8)
    assert all_reduce_bytes(BlockScaledCodec(), row(300), 8) == 7 * 514
