"""Updates inside of the backward pass: the bits of a step after it, no gradient left, and what is refused."""

import pytest
import torch
from torch import nn

from lowprec_train.optim.in_backward import UpdatesInBackward
from lowprec_train.optim.norm import norm_and_squares
from lowprec_train.optim.optimizer import CodedOptimizer
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train import build
from lowprec_train.train.checkpoint import Checkpointer
from tests.optim.cases import SYSTEMS, equal, system, tensors
from tests.optim.shards import SHAPES, Cut, along, differences, first_weights, gradients, together
from tests.optim.shards import optimizer as sharded_optimizer
from tests.optim.shards import tensors as shard_tensors
from tests.parallel.runs import built, described
from tests.recipes import composed
from tests.train.standins import Lines, bits, make_trainer, same


def output(net, step):
    """A number that every parameter has a gradient of; the embedding is looked up twice."""
    words = torch.randint(24, (2, 6), generator=torch.Generator().manual_seed(step))
    table = net[0]
    return (net[2].weight.float() @ net[1](table(words[0]) + table(words[1])).T).tanh().sum() + net[2].bias.sum()


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", SYSTEMS)
def test_states_and_norms_are_those_of_a_step_after_the_backward_pass(name, clip, together):
    ours, in_backward = system(name, clip_updates=clip, fused=False)
    theirs, after = system(name, clip_updates=clip, fused=False)
    units = [list(ours.parameters())[:3]] if together else []
    updates = UpdatesInBackward(in_backward, ours.parameters(), units)
    for step in range(3):
        for micro in (False, True):
            loss = output(ours, 2 * step + micro)
            updates.begin(loss.detach() if micro else None)
            loss.backward()
            output(theirs, 2 * step + micro).backward()
        norms = norm_and_squares(ours.parameters(), None, updates.squares), norm_and_squares(theirs.parameters())
        assert torch.equal(norms[0][0], norms[1][0]) and norms[0][1] == norms[1][1] and norms[0][0] > 0
        assert all(parameter.grad is None for parameter in ours.parameters())
        after.step()
        after.zero_grad(set_to_none=True)
    assert equal(tensors(ours, in_backward), tensors(theirs, after))


def clip(norm):
    return ((norm + 1e-6) / 0.5).clamp(min=1.0)


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("name", ["adamw", "adamw_coat"])
def test_gradients_are_clipped_by_earlier_norms_times_their_growth(name, together):
    """Bit for bit a step after the pass with divisors by the formula. The first step changes nothing but the norms; the
    third is skipped and does not count.
    """
    (ours, in_backward), (theirs, after) = system(name, fused=False), system(name, fused=False)
    units = [list(ours.parameters())[:3]] if together else []
    updates, rows, grown = UpdatesInBackward(in_backward, ours.parameters(), units, max_norm=0.5), [], []
    start = tensors(ours, in_backward)
    for step in range(6):
        loss = output(ours, step)
        updates.begin(loss.detach())
        loss.backward()
        output(theirs, step).backward()
        norm, squares = norm_and_squares(theirs.parameters())
        own = torch.stack(squares).sqrt().float()
        if rows:
            least = torch.stack(rows[-2:]).amin(0)
            growth = (own / least[1:]).clamp(min=1.0)
            grown.append(growth)
            for parameter, divisor in zip(theirs.parameters(), clip(least[0] * growth) / clip(least[0]), strict=True):
                parameter.grad /= divisor
            after.step(grad_scale=clip(least[0]))
        assert equal(tensors(ours, in_backward), tensors(theirs, after) if rows else start)
        after.zero_grad(set_to_none=True)
        updates.end(norm, torch.tensor(step != 2))
        rows += [] if step == 2 else [torch.cat((norm[None], own))]
        assert torch.equal(updates.norms, torch.stack([*rows[::-1], torch.zeros_like(rows[0])])[:2])
    assert all(float(each.amax()) > 1.0 and float(each.amin()) == 1.0 for each in grown)


def test_gradients_that_grow_together_are_clipped_to_the_norm():
    """All are a thousand times as long in one step: what is added to the moments has the norm of `max_norm`."""
    net, optimizer = system("adamw", fused=False)
    updates = UpdatesInBackward(optimizer, net.parameters(), max_norm=0.5)
    for times in (1.0, 1.0, 1000.0):
        before = {p: optimizer.state[p]["exp_avg"].clone() for p in net.parameters()}
        loss = times * output(net, 0)
        updates.begin(loss.detach())
        loss.backward()
        norm = torch.cat([squares.view(1) for squares in updates.squares.values()]).sum().sqrt().float()
        updates.end(norm, torch.tensor(True))
    added = [(optimizer.state[p]["exp_avg"] - 0.9 * before[p]) / 0.1 for p in net.parameters()]
    assert 0.45 < float(torch.cat([x.flatten() for x in added]).norm()) <= 0.5001
    assert float(norm) > 500


def test_a_matrix_that_had_no_gradient_is_clipped_to_the_norm():
    """In both steps after a gradient of 0: not shortened to nothing, not left as long as it is."""
    first, second = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
    optimizer, used = CodedOptimizer([first, second], lr=0.0, weight_decay=0.0), []
    updates = UpdatesInBackward(optimizer, [first, second], max_norm=1.0)
    for own, other in ((3.0, 4.0), (3.0, 4.0), (3.0, 0.0), (3.0, 400.0), (3.0, 400.0), (3.0, 400.0)):
        before = optimizer.state[second]["exp_avg"].clone() if used else 0.0
        loss = (first * own / 2).sum() + (second * other / 2).sum()
        updates.begin(loss.detach())
        loss.backward()
        norm = torch.stack(list(updates.squares.values())).sum().sqrt().float()
        updates.end(norm, torch.tensor(True))
        used.append(float((optimizer.state[second]["exp_avg"] - 0.9 * before).norm()) / 0.1 if used else 0.0)
    assert used == pytest.approx([0.0, 0.8, 0.0, 1.0, 1.0, 1.0], abs=1e-3)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_can_be_saved_after_any_step(tmp_path, steps):
    """A save of what was trained refuses numbers that are not finite."""
    first, second = (make_trainer(steps=4, max_grad_norm=0.05, in_backward=True) for _ in range(2))
    for _ in range(steps):
        first.step()
    checkpointer = Checkpointer(tmp_path, interval=100, keep=2)
    checkpointer.save(first.checkpoint_parts(), steps, wait=True, only_finite=True)
    assert checkpointer.load(second.checkpoint_parts()) == steps and same(bits(first), bits(second))


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("first", [0, 3])
def test_gradients_that_are_too_long_to_square_are_counted_or_clipped(first, clip):
    """Without clipping nothing is updated by them, from step `first` on. Clipped, they can be squared; only the first
    step updates nothing.
    """
    trainer = make_trainer(steps=8, max_grad_norm=clip, in_backward=True)
    weight = trainer.model.hidden.weight
    weight.register_hook(lambda gradient: gradient * (1e25 if trainer.steps_done >= first else 1.0))
    skipped = [float(trainer.step()["train/skipped"]) for _ in range(8)]
    assert skipped[-1] == (0 if clip else 8 - first)
    assert int(trainer.optimizer.state[weight]["step"]) == (7 if clip else first)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25])
def test_a_bad_gradient_leaves_its_parameter_and_a_bad_loss_all(bad):
    net, optimizer = system("adamw_coat")
    updates = UpdatesInBackward(optimizer, net.parameters())
    before = tensors(net, optimizer)
    loss = output(net, 0)
    updates.begin(loss.detach() * float("nan"))
    loss.backward()
    assert equal(before, tensors(net, optimizer))
    net[2].bias.register_hook(lambda gradient: gradient * bad)
    loss = output(net, 1)
    updates.begin(loss.detach())
    loss.backward()
    after = tensors(net, optimizer)
    kept = {key for key in before if torch.equal(before[key], after[key])}
    assert {key.split("/")[0] for key in kept if key.endswith("/step")} == {"2.bias"} and "2.weight" not in kept
    assert all(key.startswith("2.bias") for key in kept)


def histories(parameters, optimizer, part, units=()):
    """States after each of three steps; in the second one element of one matrix is not finite."""
    updates, found = UpdatesInBackward(optimizer, parameters.values(), units), []
    for step in range(3):
        given = gradients(step)
        given["weight"][30, 70] = float("nan") if step == 1 else 1.0
        loss = sum((p * part(name, given[name])).sum() for name, p in parameters.items())
        updates.begin(torch.zeros(()))
        loss.backward()
        found.append(shard_tensors(parameters, optimizer))
    return found


@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_ranks_with_shards_skip_the_same_steps(layout):
    """A number that is not finite is in one rank's shard; all keep the parameter and its count of steps."""
    cut = Cut(*layout)
    parameters, optimizer = sharded_optimizer(first_weights(), "adamw_coat")
    wanted, cut_along = histories(parameters, optimizer, lambda name, whole: whole), along(parameters, optimizer)

    def rank(number):
        shards = {name: cut.shard(name, number) for name in SHAPES}
        weights = {name: cut.part(name, number, whole) for name, whole in first_weights().items()}
        mine = sharded_optimizer(weights, "adamw_coat", shards)
        units = [list(mine[0].values())]  # they are updated together, with one collective
        return histories(*mine, lambda name, whole: cut.part(name, number, whole), units)

    for step, parts in enumerate(zip(*cut.on_threads(rank), strict=True)):
        assert not differences(together(cut, parts, cut_along, wanted[step]), wanted[step]), (layout, step)
    assert float(wanted[-1]["weight", "step"]) == 2.0 and float(wanted[-1]["wide", "step"]) == 3.0


def test_the_most_that_gradients_take_is_one_layers():
    """Bytes of all `.grad` at the moment of each update."""
    net = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
    _, optimizer = system("adamw")
    optimizer = type(optimizer)(net.parameters())
    updates, alive = UpdatesInBackward(optimizer, net.parameters()), []
    for parameter in net.parameters():
        parameter.register_hook(
            lambda gradient: alive.append(sum(p.grad is not None for p in net.parameters())) or gradient
        )
    loss = net(torch.ones(2, 32)).sum()
    updates.begin(loss.detach())
    loss.backward()
    assert len(alive) == 8 and max(alive) == 0 and len(updates.squares) == 8


@pytest.mark.parametrize("micro_batch", [4, 8])
def test_a_trainer_has_the_bits_of_one_that_steps_afterwards(micro_batch):
    """With several micro-batches too; a poisoned step is skipped by both."""
    runs = []
    for in_backward in (False, True):
        trainer = make_trainer(
            steps=6, poison=(2,), micro_batch=micro_batch, max_grad_norm=0.0, in_backward=in_backward
        )
        lines = [trainer.step() for _ in range(6)]
        kept = [[float(line[key]) for key in ("train/loss", "train/grad_norm", "train/skipped")] for line in lines]
        runs.append((repr(kept), bits(trainer)))
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])


def test_a_resumed_trainer_clips_by_the_same_norm(tmp_path):
    """Gradients are longer than 0.05 in every step, so each update depends on the norm of the step before."""
    whole, first, second = (make_trainer(steps=6, max_grad_norm=0.05, in_backward=True) for _ in range(3))
    checkpointer = Checkpointer(tmp_path, interval=100, keep=2)
    for _ in range(6):
        assert float(whole.step()["train/grad_norm"]) > 0.05
    first.fit(sinks=[Lines()], checkpointer=checkpointer, should_stop=lambda: first.steps_done == 3)
    assert float(first.state_dict()["last_norms"].amin()) > 0.05
    assert checkpointer.load(second.checkpoint_parts()) == 3 and same(bits(first), bits(second))
    for _ in range(3):
        second.step()
    assert same(bits(whole), bits(second))
    assert "last_norms" not in make_trainer(max_grad_norm=0.0, in_backward=True).state_dict()


def test_recomputed_blocks_are_stepped_after_they_have_been_computed_again():
    """The weights that a block is run again with are those of its forward pass."""
    found = []
    for how in ("none", "full"):
        job = described("lean coat", Sizes())
        job.run.model.offload = False
        job.run.model.recompute = how
        trainer = built(job.run, stream=torch.bfloat16, world=build.ALONE)
        found.append([float(trainer.step()["train/loss"]) for _ in range(3)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("overrides", "sizes", "said"),
    [
        (("telemetry_interval=5",), Sizes(), "telemetry_interval=5 reads them"),
        (("log_update_rms=true",), Sizes(), "log_update_rms=true reads them"),
        (
            ("+recipe=fp4",),
            Sizes(dp_shard=2),
            r"E4M3 scaled needs the amax of all shards \(parallel.dp_shard=2, tp=1\)",
        ),
        (("+recipe=bf16", "optim=muon"), Sizes(tp=2), "Muon.* needs all shards"),
        (("+recipe=bf16", "optim=stable_adamw"), Sizes(dp_shard=4), "clip_updates=True.* needs all shards"),
        (
            ("+recipe=fp4", "optim=adamw_coat", "parallel.param_all_gather=quantized"),
            Sizes(dp_shard=2),
            "param_all_gather=quantized multiplies gradients by DifferentiableEstimator",
        ),
    ],
)
def test_what_needs_other_gradients_is_refused(overrides, sizes, said):
    run = composed("model.layers=2", "optim.in_backward=true", "max_grad_norm=0", *overrides)
    laid_out = build.layout(run)
    with pytest.raises(ValueError, match=f"optim.in_backward=true frees gradients.*{said}"):
        build.choices(run, laid_out).check_memory(sizes)


def test_one_step_that_would_update_nothing_is_refused():
    run = composed("model.layers=2", "optim.in_backward=true", "+recipe=bf16", "steps=1")
    with pytest.raises(
        ValueError, match=r"steps=1 with max_grad_norm=1.0 would update nothing, because the first step"
    ):
        build.choices(run, build.layout(run)).check_memory(Sizes())
