"""Gradients that are sent in BF16 or FP8 are written in BF16 by their GEMMs. Those in BF16 change no bit by that."""

from unittest import mock

import pytest
import torch

from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.fsdp import UnitSum
from lowprec_train.comm.shared_scale import SharedScaleCodec
from lowprec_train.numerics.formats import BF16, E4M3, E5M2, FP32
from lowprec_train.parallel import data
from lowprec_train.parallel.data import grad_dtype
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train.launch import World
from tests.distributed import run_distributed
from tests.parallel.runs import LAYOUTS, MICRO, SEQ, SPLIT, TINY, Job, trained
from tests.recipes import composed

RECIPES = ("fp8", "coat", "fp4", "mxfp4", "mxfp4_fp8", "nvfp4", "averis")
EACH, LAST = "parallel.grad_reduce=every_microbatch", "parallel.grad_reduce=last_microbatch"
SENT = {name: (f"+recipe={name}", "comm=bf16") for name in RECIPES}
SENT |= {"two, each": ("+recipe=fp8", "comm=bf16", EACH), "values": ("+recipe=bf16", "comm=bf16")}
ROUNDED = {  # to BF16 and then to FP8
    "in fp8": ("+recipe=fp8", "comm=fp8"),
    "in fp8, each": ("+recipe=fp8", "comm=fp8", EACH),
    "fp4 in fp8": ("+recipe=fp4", "comm=fp8"),
    "fp4 in fp8, quantized": ("+recipe=fp4", "comm=fp8", "parallel.param_all_gather=quantized"),
    "in fp8, but one": ("+recipe=fp8", "comm=fp8", "comm.exclude=[*down*]"),
    "in e5m2": ("+recipe=coat", "comm=fp8", "comm.format=E5M2"),
}
KEPT = {  # what is summed or shares a scale is written in FP32
    "two, last": ("+recipe=fp8", "comm=bf16", LAST),
    "in fp32": ("+recipe=fp8", "comm=fp32"),
    "two, last, in fp8": ("+recipe=fp8", "comm=fp8", LAST),
    "shared scale": ("+recipe=fp8", "comm=fp8_lm"),
    "as stored": ("+recipe=fp8", "comm=bf16", "parallel.param_all_gather=fp32"),
}
NODES = "in fp8, nodes of two"  # encoded once more between nodes
CASES = SENT | ROUNDED | KEPT | {NODES: ("+recipe=fp8", "comm=fp8", "comm.node_size=2")}
OF = {"dp2": (*SENT, *ROUNDED, *KEPT), "replicate2-shard2": ("fp8", "in fp8"), "dp2-tp2": ("fp8", "in fp8")}
OF["dp4"] = (NODES,)
DTYPES = (torch.bfloat16, torch.float32)


def job(case, sizes):
    tokens = MICRO * SEQ * sizes.dp * (2 if case.startswith("two") or case.endswith("each") else 1)
    layout = {"dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard, "tp": sizes.tp}
    grid = [f"parallel.{key}={value}" for key, value in layout.items()]
    return Job(composed(*TINY, *SPLIT, *CASES[case], f"tokens_per_step={tokens}", "steps=3", *grid), torch.bfloat16)


def work(rank, jobs, processes):
    """case -> (what it computes, the same with gradients in FP32, dtypes of gradients by unit, the embedding last)."""
    found = {}
    for case, each in jobs.items():
        units = {}
        reduce = UnitSum.reduce_scatter

        def watched(self, gradients, units=units, reduce=reduce):
            units.setdefault(self, set()).update(DTYPES.index(gradient.dtype) for gradient in gradients)
            return reduce(self, gradients)

        with mock.patch.object(UnitSum, "reduce_scatter", watched):
            first = trained(each, World(rank, processes, rank))
        with mock.patch.object(data, "grad_dtype", lambda *args, **options: None):
            second = None if case in KEPT else trained(each, World(rank, processes, rank))
        found[case] = first, second, list(units.values())
    return found


@pytest.fixture(scope="module")
def ranks(once):
    def of(layout):
        sizes = (LAYOUTS | {"dp4": Sizes(dp_shard=4)})[layout]
        jobs = {case: job(case, sizes) for case in OF[layout]}
        return once(f"gradients-{layout}", lambda: run_distributed(work, sizes, jobs, sizes.processes, timeout=480))

    return of


@pytest.mark.parametrize("case", SENT)
def test_gradients_sent_in_bf16_are_written_in_bf16(case, ranks):
    for written, rounded, units in (rank[case] for rank in ranks("dp2")):
        *blocks, embedding = units
        assert all(unit == {DTYPES.index(torch.bfloat16)} for unit in blocks), "of the head and of each block"
        assert embedding == {DTYPES.index(torch.float32)}, "which is no GEMM's"
        assert written == rounded


@pytest.mark.parametrize("case", ROUNDED)
def test_gradients_sent_in_fp8_are_written_in_bf16(case, ranks):
    """The first norm is that of gradients in FP32 to a thousandth."""
    for written, rounded, (*blocks, embedding) in (rank[case] for rank in ranks("dp2")):
        assert all(unit == {DTYPES.index(torch.bfloat16)} for unit in blocks)
        assert embedding == {DTYPES.index(torch.float32)}
        assert_near(written, rounded)


def assert_near(written, rounded):
    assert written != rounded and written["loss"][0] == rounded["loss"][0]
    assert written["norm"][0] == pytest.approx(rounded["norm"][0], rel=1e-3)
    assert written["loss"] == pytest.approx(rounded["loss"], rel=2e-3)


@pytest.mark.parametrize("layout", ["replicate2-shard2", "dp2-tp2"])
def test_in_other_layouts(layout, ranks):
    for rank in ranks(layout):
        for case in ("fp8", "in fp8"):
            written, rounded, (*blocks, _) = rank[case]
            assert all(unit == {DTYPES.index(torch.bfloat16)} for unit in blocks)
            (assert_near if case in ROUNDED else assert_equal)(written, rounded)


@pytest.mark.nightly
def test_over_nodes(ranks):
    for written, rounded, (*blocks, _) in (rank[NODES] for rank in ranks("dp4")):
        assert all(unit == {DTYPES.index(torch.bfloat16)} for unit in blocks)
        assert_near(written, rounded)


def assert_equal(written, rounded):
    assert written == rounded


@pytest.mark.parametrize("case", KEPT)
def test_other_gradients_stay_in_fp32(case, ranks):
    for _, _, (_, *units) in (rank[case] for rank in ranks("dp2")):  # that of the head is a BF16 GEMM's
        assert all(DTYPES.index(torch.float32) in unit for unit in units)


@pytest.mark.parametrize(
    ("codec", "reduce", "micro_batches", "expected"),
    [
        (BlockScaledCodec(BF16), "last_microbatch", 1, torch.bfloat16),
        (BlockScaledCodec(BF16), "last_microbatch", 2, None),
        (BlockScaledCodec(BF16), "every_microbatch", 2, torch.bfloat16),
        (BlockScaledCodec(FP32), "every_microbatch", 1, None),
        (BlockScaledCodec(E4M3), "every_microbatch", 2, torch.bfloat16),
        (BlockScaledCodec(E5M2), "last_microbatch", 1, torch.bfloat16),
        (BlockScaledCodec(E4M3), "last_microbatch", 2, None),
        (SharedScaleCodec(E4M3), "every_microbatch", 1, None),
    ],
)
def test_the_dtype(codec, reduce, micro_batches, expected):
    assert grad_dtype(codec, grad_reduce=reduce, micro_batches=micro_batches) == expected
