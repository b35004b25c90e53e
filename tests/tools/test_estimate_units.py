"""`lowprec estimate` of units of several blocks, of their gradients, and of blocks that are recomputed as a whole."""

import math

import pytest

from lowprec_train.tools.estimate.memory import memory
from lowprec_train.tools.estimate.subject import Subject
from lowprec_train.tools.estimate.traffic import activations, traffic
from lowprec_train.train import build
from lowprec_train.train.compose import composed

FOUR = ("model=llama_tiny", "model.layers=4", "micro_batch=2", "data.seq_len=64", "tokens_per_step=512")
FOUR += ("compile='off'", "+recipe=bf16", "comm=fp32", "parallel.dp_shard=4")


def test_units_of_two_blocks_need_their_weights_and_gradients_at_once():
    """Weights of two units at a time, and gradients of both blocks until they are reduced. The same bytes are sent."""
    alone, pairs = (Subject(run=composed(*FOUR, f"parallel.blocks_per_unit={count}")) for count in (1, 2))
    reduction = build.construct(alone.run.comm)
    assert traffic(alone, reduction) == traffic(pairs, reduction)
    block = sum(w.shape[0] * w.shape[1] for w in alone.weights if w.unit == "blocks.0" and w.matrix)
    of_one, of_two = (memory(each, reduction).moments for each in (alone, pairs))
    assert of_two["block 3"]["weights gathered"] - of_one["block 3"]["weights gathered"] == 2 * 2 * block
    assert of_two["block 0"]["at work"] - of_one["block 0"]["at work"] == 2 * 2 * block, (
        "of blocks 1 to 3, or of block 1"
    )
    assert set(of_one) - set(of_two) == {"reduction of block 3", "reduction of block 1"}
    assert of_two["reduction of block 2"]["at work"] == 2 * of_one["reduction of block 2"]["at work"]


TWO = ("model=llama_tiny", "model.layers=2", "micro_batch=2", "data.seq_len=64", "tokens_per_step=128", "compile='off'")


def subject(*overrides):
    return Subject(run=composed(*TWO, *overrides))


def moments(*overrides):
    one = subject(*overrides)
    return memory(one, build.construct(one.run.comm)).moments


@pytest.mark.parametrize(
    ("layout", "node_size", "copies"),
    [
        (("parallel.dp_shard=4",), 4, 0),
        (("parallel.dp_shard=4",), 2, 1),  # sums inside a node come first, from rows of all ranks
        (("parallel.dp_shard=4",), 1, 0),
        (("parallel.dp_shard=4", "parallel.tp=2"), 8, 0),
        (("parallel.dp_shard=4", "parallel.tp=2"), 4, 1),
        (("parallel.dp_shard=4", "parallel.tp=2"), 2, 0),
    ],
)
def test_gradients_are_copied_where_nodes_sum_first(layout, node_size, copies):
    found = moments("+recipe=bf16", *layout, f"comm.node_size={node_size}")["reduction of block 1"]
    one = subject("+recipe=bf16", *layout)
    matrices = [w for w in one.weights if w.unit == "blocks.0" and w.matrix]
    elements = sum(math.prod(w.part(one.sizes.tp)) for w in matrices)
    assert found["at work"] == 2 * elements * (2 + copies)


def test_gradients_that_are_sent_in_bf16_or_fp8_are_written_in_bf16():
    """By the GEMMs of a recipe that quantises, but for micro-batches whose gradients are summed first."""
    sharded = ("+recipe=fp8", "parallel.dp_shard=2")
    elements = sum(w.shape[0] * w.shape[1] for w in subject(*sharded).weights if w.unit == "blocks.1" and w.matrix)

    def of_unit(*overrides):
        return moments(*sharded, *overrides)["block 0"]["at work"]

    narrow, wide = of_unit("comm=bf16"), of_unit("comm=fp32")
    assert wide - narrow == 2 * elements
    assert of_unit("comm=fp8") == narrow and of_unit("comm=fp8_lm") == wide
    several = ("comm=bf16", "tokens_per_step=512")
    assert of_unit(*several, "parallel.grad_reduce=every_microbatch") == narrow
    assert of_unit(*several, "parallel.grad_reduce=last_microbatch") == wide


def test_blocks_that_are_recomputed_as_a_whole_keep_their_inputs_alone():
    words = (*(word for word in FOUR if word != "+recipe=bf16"), "+recipe=coat")
    runs = [
        Subject(run=composed(*words, *more))
        for more in ((), ("model.full_recompute_layers=3",), ("model.recompute=full",))
    ]
    none, mixed, full = (memory(each, build.construct(each.run.comm)) for each in runs)
    assert mixed.saved.blocks == (*full.saved.blocks[:3], none.saved.blocks[3])
    assert none.bytes > mixed.bytes


def test_such_blocks_send_activations_again():
    """Of four, one: a quarter of what all of them send beyond what `selective` sends."""
    size = ("model=llama_tiny", "model.layers=4", "micro_batch=2", "data.seq_len=64", "tokens_per_step=128")
    runs = (
        Subject(run=composed(*size, "+recipe=fp8", "parallel.tp=2", *more))
        for more in (
            ("model.recompute=selective",),
            ("model.recompute=selective", "model.full_recompute_layers=1"),
            ("model.recompute=full",),
        )
    )
    selective, mixed, full = (activations(each) for each in runs)
    for what in selective:
        assert 4 * mixed[what] == 3 * selective[what] + full[what], what


def test_layouts_that_a_run_refuses():
    """`coat` stores expanded moments, whose groups restart at an eighth of a row."""
    words = ("model=llama_1b3", "+recipe=coat", "parallel.tp=16")
    with pytest.raises(ValueError, match="tp=16 gives a rank 128 of the 2048 columns of blocks.0.attention.out"):
        Subject(run=composed(*words), gpus=16)
    assert Subject(run=composed(*words, "optim=adamw"), gpus=16).sizes.tp == 16
    with pytest.raises(ValueError, match="comm.node_size=3 does not divide 8 processes"):
        Subject(run=composed("model=llama_tiny", "comm.node_size=3"), gpus=8)
