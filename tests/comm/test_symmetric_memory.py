"""Which runs may read gradients from the memory of other GPUs, and what `lowprec estimate` says of their memory. The
reduction itself: test_collectives.py.
"""

import pytest

from lowprec_train.tools.estimate.report import estimate
from lowprec_train.train import checks
from lowprec_train.train.compose import composed
from lowprec_train.train.construct import construct

HYBRID = ("parallel.dp_shard=2", "parallel.dp_replicate=2")
READ_BY_PEERS = ("parallel.symmetric_memory=true", "comm=fp8")


@pytest.mark.parametrize(
    ("overrides", "ranks", "kind", "node", "words"),
    [
        ((), 4, "cpu", 4, "CUDA GPUs, and this run is on cpu"),
        (("comm=bf16",), 4, "cuda", 4, "gradients in blocks of FP8 .*, and they are sent in BF16"),
        (("comm=fp8_lm",), 4, "cuda", 4, "and they are sent in E4M3, one scale"),
        ((), 8, "cuda", 4, "all 8 ranks of dp_shard, at most 64, on one node of 4 processes"),
        (
            ("parallel.dp_shard=2", "parallel.dp_replicate=2"),
            4,
            "cuda",
            1,
            "all 2 ranks of dp_shard, .* on one node of 1 processes",
        ),
        ((), 128, "cuda", 128, "all 128 ranks of dp_shard, at most 64, on one node"),
    ],
)
def test_gradients_that_no_peer_can_read_are_refused(overrides, ranks, kind, node, words):
    run = composed(*READ_BY_PEERS, *overrides)
    codec = construct(run.comm, "comm").codec
    with pytest.raises(
        ValueError, match=rf"symmetric_memory=true needs .*{words}.*use parallel.symmetric_memory=false"
    ):
        checks.symmetric_memory(run, checks.layout(run, ranks), codec, kind, node)


@pytest.mark.parametrize(
    ("overrides", "ranks", "node"),
    [
        ((), 4, 4),
        (("comm=fp8_e5m2",), 8, 8),
        (("parallel.tp=2",), 8, 8),
        (HYBRID, 4, 2),
        (("comm=bf16",), 1, 1),  # nothing is reduced
        (("comm=bf16", "parallel.symmetric_memory=false"), 8, 4),
    ],
)
def test_gradients_that_peers_can_read(overrides, ranks, node):
    run = composed(*READ_BY_PEERS, *overrides)
    checks.symmetric_memory(run, checks.layout(run, ranks), construct(run.comm, "comm").codec, "cuda", node)


def test_rows_that_other_gpus_read_stay_allocated():
    """A buffer for the rows of the largest unit, instead of rows that are sent and received in each reduction."""
    arms = ("model=llama_7b", "+recipe=fp8", "comm=fp8", "micro_batch=2", "parallel.blocks_per_unit=2")
    sent, read = (
        estimate(composed(*arms, f"parallel.symmetric_memory={on}"), gpus=4)["memory"] for on in ("false", "true")
    )
    rows = read["gradients that other GPUs read"]
    assert rows == pytest.approx(2 * 202_375_168 * (1 + 1 / 256), rel=1e-6)
    assert "gradients that other GPUs read" not in sent
    arms = (*arms, "tokens_per_step=16384", "data.seq_len=2048")
    sent, read = (
        estimate(composed(*arms, f"parallel.symmetric_memory={on}"), gpus=4)["moments"] for on in ("false", "true")
    )
    moment = next(label for label in sent if label.startswith("reduction of block"))
    assert sent[moment]["at work"] - read[moment]["at work"] == pytest.approx(2 * rows, rel=1e-6)
