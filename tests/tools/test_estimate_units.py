"""`lowprec estimate` of `parallel.blocks_per_unit`."""

from lowprec_train.tools.estimate.memory import memory
from lowprec_train.tools.estimate.subject import Subject
from lowprec_train.tools.estimate.traffic import traffic
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
