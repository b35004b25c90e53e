"""`lowprec estimate`: what autograd keeps, what optimizers store and what ranks send, against other sources of each."""

import json

import pytest
import torch

from lowprec_train.tools import cli
from lowprec_train.tools.estimate.memory import memory, parameters, saved_bytes, states
from lowprec_train.tools.estimate.report import estimate, flops
from lowprec_train.tools.estimate.saved import Counter
from lowprec_train.tools.estimate.subject import Subject, Weight
from lowprec_train.tools.estimate.traffic import between_nodes, traffic
from lowprec_train.train import build
from lowprec_train.train.compose import composed
from tests.model.test_saved_bytes import SHAPES, expected
from tests.recipes import SYSTEMS, system

TINY = ("model.layers=2", "micro_batch=2", "data.seq_len=64", "tokens_per_step=128")
BF16_ADAMW = ("optim/master=bf16", "optim/moment@optim.first_moment=bf16", "optim/moment@optim.second_moment=bf16")


def subject(*overrides, gpus=None):
    return Subject(run=composed("model=llama_tiny", *TINY, *overrides), gpus=gpus)


def saved(one):
    return saved_bytes(one, one.run.model.recompute)


def needed(*overrides):
    """Eager, which is counted in a moment."""
    one = subject("compile='off'", *overrides)
    return memory(one, build.construct(one.run.comm))


# --- what autograd keeps ---


QUICK = {("bf16", "llama_tiny"), ("fp8", "llama_tiny model.kv_heads=2"), ("coat", "gpt_tiny")}
KEPT = [(recipe, model, False) for recipe in ("bf16", "fp8", "coat") for model in SHAPES]
KEPT += [
    (*case, True) if case in QUICK else pytest.param(*case, True, marks=pytest.mark.nightly)
    for case in ((recipe, model) for recipe, model, _ in list(KEPT))
]


@pytest.mark.parametrize(("recipe", "model", "compiled"), KEPT)
def test_blocks_keep_what_their_shapes_say(recipe, model, compiled):
    """The very numbers of tests/model/test_saved_bytes.py, without memory; and the weights as they were multiplied."""
    how = "auto" if compiled else "'off'"
    one = subject(f"+recipe={recipe}", *f"model={model}".split(), f"compile={how}")
    first, second = saved(one).blocks
    assert first == second and first.token == expected(recipe, SHAPES[model], compiled).total()
    weights = sum(w.shape[0] * w.shape[1] for w in one.weights if w.unit == "blocks.0" and w.matrix)
    assert first.fixed == pytest.approx(weights * (2 if recipe == "bf16" else 1), abs=64)  # scales of whole tensors


def test_recomputed_blocks_keep_their_input_or_what_is_dear():
    found = {how: saved(subject("+recipe=fp8", f"model.recompute={how}")) for how in ("none", "selective", "full")}
    full, selective, none = (found[how].blocks[0] for how in ("full", "selective", "none"))
    assert (full.token, full.fixed) == (2 * 128, 0) and full.token < selective.token < none.token
    assert len({parts.rest for parts in found.values()}) == 1
    one = subject("+recipe=fp8", "model.recompute=full")
    assert Counter(one, "full").rest() == found["none"].rest  # counted, not from the cache
    with pytest.raises(ValueError, match="selective is counted for compiled runs only"):
        saved(subject("model.recompute=selective", "compile='off'"))


def test_the_rest_is_tokens_norm_and_logits():
    """Token and target numbers, the last norm's input and rate, its output for the head, logits and their sums."""
    rest = saved(subject(*BF16_ADAMW, "model.vocab_size=320")).rest
    assert rest.token == 8 + 2 * 128 + 4 + 2 * 128 + 2 * 320 + 4 and rest.fixed == 0


def test_blocks_of_other_recipes_keep_other_bytes():
    one = subject("+recipe=nvfp4", "model.layers=4", "compile='off'")
    found = saved(one)
    assert len(found.blocks) == 4 and len(set(one.kinds())) == len(set(found.blocks))


# --- what stands ---


@pytest.mark.parametrize("recipe", ["bf16", "coat", "fp4", "fp8_lm"])
def test_states_are_what_the_optimizer_holds(recipe):
    one = system(recipe)
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    one.model.loss(tokens, tokens, 1.0, draws=one.seeds.at(0, 0)).backward()
    one.optimizer.step()
    held = [t for state in one.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    of_parameters = sum(p.numel() * p.element_size() for p in one.model.parameters())
    estimated = Subject(run=one.run)
    assert parameters(estimated) == of_parameters
    assert states(estimated) == pytest.approx(sum(t.numel() * t.element_size() for t in held), rel=1e-3)


def test_parts_are_those_of_the_first_rank():
    """Rows over dp_shard after rows or columns over tp; vectors whole; uneven parts are rounded up."""
    over = subject("parallel.dp_shard=3", "parallel.tp=2").sizes
    assert Weight(name="blocks.0.up", shape=(64, 32), cut=0).mine(over) == (11, 32)
    assert Weight(name="blocks.0.down", shape=(64, 32), cut=1).mine(over) == (22, 16)
    assert Weight(name="norm", shape=(64,)).mine(over) == (64,)


def test_sharding_divides_what_stands():
    whole, parts = needed("+recipe=coat"), needed("+recipe=coat", "parallel.dp_shard=4")
    for what in ("parameters", "optimizer states"):
        assert parts.peak[1][what] == pytest.approx(whole.peak[1][what] / 4, rel=0.02)
    assert whole.peak[1]["weights gathered"] == 0 < parts.peak[1]["weights gathered"]


def test_late_sums_keep_whole_gradients():
    """In FP32, all of them, from the first of several micro-batches on."""
    more = ("parallel.dp_shard=4", "tokens_per_step=2048")
    late, each = (needed(*more, f"parallel.grad_reduce={when}") for when in ("last_microbatch", "every_microbatch"))
    matrices = sum(w.shape[0] * w.shape[1] for w in subject().weights if w.matrix)
    assert late.peak[1]["gradients"] == 4 * matrices
    assert each.peak[1]["gradients"] == pytest.approx(matrices, rel=0.02)


# --- what is sent ---


def sent(*overrides, gpus=None):
    one = subject(*overrides, gpus=gpus)
    return one, traffic(one, build.construct(one.run.comm))


def test_gradients_are_sent_in_the_payload():
    """Of each matrix 3 of 4 parts, in 4, 2 or 1 + 1/256 bytes; between replicas every part once more."""
    one = subject()
    matrices = sum(w.shape[0] * w.shape[1] for w in one.weights if w.matrix)
    for payload, size in (("fp32", 4), ("bf16", 2), ("fp8", 257 / 256)):
        _, found = sent("parallel.dp_shard=4", f"comm={payload}")
        assert found["gradients scattered"] == pytest.approx(0.75 * size * matrices, rel=1e-3)
        _, found = sent("parallel.dp_replicate=2", "parallel.dp_shard=4", f"comm={payload}")
        assert found["gradients between replicas"] == pytest.approx(0.25 * size * matrices, rel=1e-3)


def test_links_are_told_apart():
    """On two nodes of two: of each matrix one row in four leaves the node, half of what goes round in a ring."""
    sharded = ("parallel.dp_shard=4", "comm=fp8", "comm.node_size=2")
    one, found = sent(*sharded)
    nic = between_nodes(one, build.construct(one.run.comm))
    assert nic["gradients scattered"] == found["gradients scattered"] / 3
    assert nic["parameters gathered"] == found["parameters gathered"] // 2
    assert nic["gradients of vectors"] == found["gradients of vectors"] // 2
    one, found = sent("parallel.dp_replicate=2", "parallel.dp_shard=2", "comm=fp8", "comm.node_size=2")
    nic = between_nodes(one, build.construct(one.run.comm))
    assert set(nic) == {"gradients between replicas", "gradients of vectors"}
    assert nic["gradients between replicas"] == found["gradients between replicas"]
    assert between_nodes(*(subject("parallel.dp_shard=4"), build.construct(one.run.comm | {"node_size": None}))) == {}


MASTER = ("parallel.dp_shard=4", "tokens_per_step=1024", "parallel.param_all_gather=fp32")


def test_weights_are_gathered_twice_where_they_are_given_back():
    one, found = sent(*MASTER)
    assert one.micro_batches == 2
    sizes = {True: 0, False: 0}
    for weight in (w for w in one.weights if w.matrix):
        sizes[weight.unit.startswith("blocks.")] += 4 * weight.shape[0] * weight.shape[1]
    assert found["parameters gathered"] == 2 * 0.75 * (2 * sizes[True] + sizes[False])
    _, stays = sent(*MASTER, "parallel.reshard_after_forward=false")
    assert stays["parameters gathered"] == 2 * 0.75 * (sizes[True] + sizes[False])


@pytest.mark.parametrize(("gather", "sent_size", "kept_size"), [("fp32", 4, 1), ("bf16", 2, 1), ("quantized", 1, 0)])
def test_weights_travel_as_they_are_asked_to(gather, sent_size, kept_size):
    """A block's weights as bytes a number; and what its layers keep of them: codes, unless codes are what came."""
    layers = [("compile='off'", "+recipe=fp8", "parallel.dp_shard=4", f"parallel.param_all_gather={gather}")]
    layers.append((*layers[0], "model.layers=3"))
    (one, two), (_, three) = (sent(*overrides) for overrides in layers)
    block = sum(w.shape[0] * w.shape[1] for w in one.weights if w.unit == "blocks.0" and w.matrix)
    assert three["parameters gathered"] - two["parameters gathered"] == 2 * 0.75 * sent_size * block
    assert saved(one).blocks[0].fixed == pytest.approx(kept_size * block, abs=64)


def test_summing_each_micro_batch_sends_as_often():
    (_, last), (_, each) = (
        sent("parallel.dp_shard=4", "tokens_per_step=2048", f"parallel.grad_reduce={when}")
        for when in ("last_microbatch", "every_microbatch")
    )
    assert each["gradients scattered"] == 4 * last["gradients scattered"]


def test_one_process_sends_nothing():
    assert sent()[1] == {}


def test_tensor_parallel_ranks_send_rows_four_times_a_block():
    """Gathered before qkv and gate_up, and as gradients behind out and down; scattered the other way round."""
    tp = ("compile='off'", "parallel.tp=2")
    (one, two), (_, three) = sent(*tp), sent(*tp, "model.layers=3")
    rows = one.tokens // 2 * 128 * 2
    for what in ("gather", "scatter"):
        name = f"tensor parallel, {what}"
        assert three[name] - two[name] == 4 * rows
    assert "tensor parallel, amax" in sent(*tp, "+recipe=fp8")[1]


def test_tensor_parallel_parts_keep_less():
    """Of norms and of the stream their rows, of the layers between their channels; inputs that were gathered, whole."""
    whole, half = (saved(subject("compile='off'", "+recipe=fp8", f"parallel.tp={tp}")).blocks[0] for tp in (1, 2))
    assert 0.5 * whole.token <= half.token < whole.token and half.fixed == pytest.approx(whole.fixed / 2, abs=64)


def test_every_recipe_can_be_estimated_in_parts():
    parts = ("model.dim=256", "model.heads=8", "model.ffn=768", "parallel.tp=2", "parallel.dp_shard=2")
    for recipe in SYSTEMS:
        assert needed(f"+recipe={recipe}", *parts).bytes > 0


# --- the command ---


def test_flops_are_separated_by_tensor_core():
    """6 a parameter of a linear; BF16: the head and attention."""
    one = subject("+recipe=fp8")
    linears = [w for w in one.weights if w.matrix and w.name != "embedding.weight"]
    found, blocks = flops(one), sum(w.shape[0] * w.shape[1] for w in linears if w.unit != "head")
    assert found["fp8"] == 6 * blocks
    assert sum(found.values()) - found["fp8"] == 6 * 128 * one.run.model.vocab_size + 3 * 2 * 4 * 128 * 32


def test_json_has_every_moment(capsys):
    run = ("model=llama_tiny", "compile='off'", *TINY, "tokens_per_step=1024")
    assert cli.main(["estimate", *run, "--gpus", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sizes"] == {"dp_replicate": 1, "dp_shard": 8, "tp": 1, "gpus": 8}
    blocks = [label for index in (1, 0) for label in (f"block {index}", f"reduction of block {index}")]
    assert list(found["moments"]) == ["loss", "reduction of head", *blocks]
    numbers = [value for what, value in found["memory"].items() if what not in ("at", "total")]
    assert sum(numbers) == found["memory"]["total"] == max(sum(each.values()) for each in found["moments"].values())


def test_an_option_of_a_group_may_come_first(capsys):
    """`lowprec estimate --json`: the parser knows the options of its groups, too."""
    assert cli.main(["estimate", "--json", "--gpus", "0"]) == 2
    assert "--gpus 0 must be at least 1" in capsys.readouterr().err


def test_text_is_for_people(capsys):
    run = ("+recipe=fp4", "model=llama_tiny", "compile='off'", *TINY, "tokens_per_step=256")
    assert cli.main(["estimate", *run, "parallel.dp_shard=2"]) == 0
    out = capsys.readouterr().out
    assert "2 GPUs: dp_replicate 1, dp_shard 2, tp 1; 1 micro-batches of 128 tokens" in out
    assert "gradients E4M3[256]" in out and "memory of a GPU, most at: " in out and "gradients scattered" in out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tp=3", "--gpus", "8"], "3 does not divide 8 processes"),
        (["parallel.dp_shard=16", "--gpus", "8"], "need 16 processes"),
        (["parallel.grad_reduce=never"], "grad_reduce='never' is not one of last_microbatch, every_microbatch"),
        (["model=llama_9b"], "llama_9b"),
        (["data.seq_len=0"], "data.seq_len=0 must be a positive number of tokens"),
        (["model.norm_backend=apex"], "model.norm_backend=apex computes the norms"),
    ],
)
def test_mistakes_are_one_error(overrides, message, capsys):
    assert cli.main(["estimate", *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lowprec estimate: error:") and message in error


def test_updates_in_the_backward_pass_leave_no_gradients():
    """One at a time; with several micro-batches they are added up as before."""
    one, more = "tokens_per_step=128", "tokens_per_step=512"
    how = ("+recipe=coat", "max_grad_norm=0", "optim.in_backward=true")
    freed, kept = needed(*how, one), needed("+recipe=coat", one)
    assert all(moment["gradients"] == 0 for moment in freed.moments.values())
    largest = max(w.shape[0] * w.shape[1] for w in subject(*how).weights if w.unit == "blocks.0" and w.matrix)
    assert freed.moments["block 0"]["at work"] - kept.moments["block 0"]["at work"] == 4 * largest
    assert needed(*how, more).peak[1]["gradients"] == needed("+recipe=coat", more).peak[1]["gradients"]


@pytest.mark.parametrize(("codec", "share"), [("bf16", 2), ("fp16", 2), ("e4m3", 4)])
def test_sums_in_codes_take_their_share(codec, share):
    """Whole ones under last_microbatch, and a rank's parts; vectors stay in FP32."""
    for more in (("parallel.dp_shard=4", "tokens_per_step=2048"), ("tokens_per_step=512",)):
        found = needed("+recipe=coat", *more, f"+optim/moment@optim.grad_accumulation={codec}").peak[1]["gradients"]
        assert found == pytest.approx(needed("+recipe=coat", *more).peak[1]["gradients"] / share, rel=0.02)


def test_offloaded_states_leave_three_slots():
    """Of the largest state; what a run's optimizer holds on the host, and there and back over the link."""
    here, away = needed("+recipe=coat", "compile='off'"), needed("+recipe=coat", "optim.offload=true", "compile='off'")
    one = system("coat", "llama_tiny", "optim.offload=true", "compile='off'")
    host = [t for state in one.optimizer.state.values() for t in state.values() if t.ndim > 1 and t.numel() > 1]
    moved = sum(t.numel() * t.element_size() for t in host)
    largest = max(
        sum(t.numel() * t.element_size() for t in state.values() if t.ndim > 1 and t.numel() > 1)
        for state in one.optimizer.state.values()
    )
    found = estimate(one.run)
    assert found["host"] == {"pinned": moved, "link_each_way": moved}
    assert found["memory"]["on the way to and from the host"] == 3 * largest
    assert away.peak[1]["optimizer states"] < 0.02 * here.peak[1]["optimizer states"]


def test_offloaded_inputs_of_blocks_leave_two_buffers():
    full = ("+recipe=coat", "model.recompute=full", "model.layers=6")
    here, away = needed(*full), needed(*full, "model.offload=true")
    stream = 2 * 2 * 64 * 128
    assert here.moments["loss"]["saved by blocks"] == 6 * stream and away.moments["loss"]["saved by blocks"] == 0
    assert away.moments["loss"]["on the way to and from the host"] == 2 * stream
    run = subject(*full, "model.offload=true", "tokens_per_step=512", "compile='off'").run
    assert estimate(run)["host"] == {"pinned": 6 * stream, "link_each_way": 4 * 6 * stream}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("master", ["fp32", "bf16", "fp16"])
def test_gradients_have_the_dtype_of_a_run(master, several):
    """FP32 if micro-batches are summed, else that of their parameter."""
    how = ("+recipe=coat", "compile='off'", f"optim/master={master}", f"tokens_per_step={2048 if several else 1024}")
    one, found = system("coat", "llama_tiny", *how[1:]), {}
    for name, parameter in one.model.named_parameters():
        if several or name.startswith(("blocks.", "head.")):
            parameter.register_post_accumulate_grad_hook(lambda p: found.update({p: p.grad.nbytes}))
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    one.model.loss(tokens, tokens, 1.0, draws=one.seeds.at(0, 0)).backward()
    assert {p.grad.dtype for p in found if p.ndim == 2} == {torch.float32 if several else one.model.head.weight.dtype}
    assert estimate(one.run)["moments"]["block 0"]["gradients"] == sum(found.values())


def test_one_gradient_is_in_flight_in_the_backward_pass():
    """Of the head, in the dtype of its parameter: what an H200's peak showed to be missing."""
    freed = ("+recipe=coat", "max_grad_norm=0", "optim.in_backward=true", "tokens_per_step=128")
    words = next(w for w in subject(*freed).weights if w.unit == "head").shape
    stream = 2 * 128 * 128
    for master, size in (("bf16", 2), ("fp32", 4)):
        assert (
            needed(*freed, f"optim/master={master}").moments["loss"]["at work"] - stream == size * words[0] * words[1]
        )


def test_a_reduction_holds_one_unit_and_its_messages():
    """Of the block whose backward pass is over: gradients as they are made, in BF16, and what is received."""
    found = needed("+recipe=bf16", "parallel.dp_shard=2").moments
    matrices = [w for w in subject("+recipe=bf16", "parallel.dp_shard=2").weights if w.unit == "blocks.0" and w.matrix]
    elements = sum(w.shape[0] * w.shape[1] for w in matrices)
    before, after = found["block 1"], found["reduction of block 1"]
    assert after["at work"] == 2 * elements + 2 * elements
    assert after["gradients"] - before["gradients"] == 4 * elements // 2 + 4 * 2 * 128
    assert before["saved by blocks"] == 2 * after["saved by blocks"]


def test_a_loss_in_chunks_keeps_gradients_in_place_of_logits():
    """Of the head's input in place of the input; of its weight in BF16, and in FP32 while it is made."""
    tokens, words, dim = 128, 8192, 64
    sizes = (f"model.vocab_size={words}", f"model.dim={dim}", "micro_batch=2", "optim/master=bf16")
    whole, parts = needed(*sizes), needed(*sizes, "model.loss_chunk=16")
    rest = whole.saved.rest.of(tokens) - parts.saved.rest.of(tokens)
    logits, weight = 2 * tokens * words, 2 * words * dim
    assert rest == logits - weight + 4 * tokens  # a sum of exponentials a token
    made = parts.moments["chunks of the loss"]
    assert made["at work"] == 2 * weight + max(0, 2 * 16 * words - weight)
