"""Master weights: which updates survive rounding, whose draws they take, and what autograd makes of BF16 parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowprec_train.ops.updates import STREAM, seeds
from lowprec_train.optim.optimizer import parameter_groups
from tests.optim.cases import MASTERS, adamw, fill, system

RUN = 1234
reduced = pytest.mark.parametrize("master", [MASTERS["fp16"], MASTERS["bf16"]], ids=["fp16", "bf16"])


def seed(step, parameter=0):
    return seeds(RUN, torch.tensor([parameter]), torch.tensor([float(step)]))[0]


def progress(master, relative, steps=1000):
    """log of a weight's growth under w <- w (1 + relative), as a share of what exact arithmetic gives; per weight."""
    generator = torch.Generator().manual_seed(0)
    parts = master.encode(torch.randn(32, 256, generator=generator) * 0.02, seed=seed(0))
    start = master.decode(parts).double()
    for step in range(1, steps + 1):
        parts = master.encode(master.decode(parts) * (1 + relative), seed=seed(step))
    return (master.decode(parts).double() / start).log() / (steps * torch.tensor(relative).log1p())


def test_updates_of_1e_4_for_a_thousand_steps():
    """T20, measured: FP32 1.0002 of the sum. FP16 to nearest 0: every update is lost, for all time. FP16 stochastic
    1.000 +- 0.078 (the spread over weights), BF16 stochastic 0.997 +- 0.235 (in the logarithm; unbiased in w)."""
    exact, nearest, stochastic, bf16 = (
        progress(MASTERS[name], 1e-4) for name in ("fp32", "fp16_nearest", "fp16", "bf16")
    )
    assert (exact - 1).abs().max() < 2e-3
    assert (nearest == 0).all()
    assert stochastic.mean() == pytest.approx(1, abs=5e-3) and 0.06 < stochastic.std() < 0.1
    assert bf16.mean() == pytest.approx(1, abs=1e-2) and 0.2 < bf16.std() < 0.28


def test_nearest_loses_all_below_2_to_the_minus_12_and_some_up_to_twice_that():
    """Measured at 3e-4: 70 % of the weights never move; at 1e-3 all do, by 0.93 of their due."""
    nearest = MASTERS["fp16_nearest"]
    assert (progress(nearest, 0.99 * 2.0**-12, steps=50) == 0).all()
    at_3e4, at_1e3 = progress(nearest, 3e-4, steps=300), progress(nearest, 1e-3, steps=300)
    assert 0.5 < (at_3e4 == 0).float().mean() < 0.9
    assert (at_1e3 > 0).all() and at_1e3.mean() == pytest.approx(0.93, abs=0.04)


@reduced
def test_stochastic_rounding_is_unbiased(master):
    """Mean over 16,384 draws of each of 16 weights within 5 standard errors, and neighbours of the grid only."""
    w = (torch.rand(16, 1) + 0.5).expand(16, 2048).contiguous()
    drawn = torch.cat([master.decode(master.encode(w, seed=seed(step))) for step in range(8)], dim=1)
    low, high = drawn.amin(1), drawn.amax(1)
    assert all(len(row.unique()) <= 2 for row in drawn)
    error = ((high - w[:, 0]) * (w[:, 0] - low) / drawn.shape[1]).clamp_min(0).sqrt()
    assert ((drawn.double().mean(1) - w[:, 0]).abs() <= 5 * error + 2.0**-17 * (high - low)).all()


@reduced
def test_draws_are_addressed_by_global_rows_and_columns(master):
    w = torch.rand(16, 32) + 0.5
    whole = master.decode(master.encode(w, seed=seed(3)))
    for row, column in ((0, 0), (8, 0), (4, 16)):
        shard, origin = w[row : row + 4, column : column + 8], torch.tensor([row, column])
        part = master.encode(shard, amax=w.amax(), seed=seed(3), origin=origin)
        assert torch.equal(master.decode(part), whole[row : row + 4, column : column + 8])


def test_seeds_differ_by_parameter_step_and_run():
    drawn = {seed(step, parameter).item() for step in range(20) for parameter in range(20)}
    drawn |= {seeds(1235, torch.tensor([0]), torch.tensor([1.0]))[0].item()}
    assert len(drawn) == 401 and min(drawn) >= 0
    many = seeds(RUN, torch.arange(5), torch.full((5,), 7.0))
    assert many.tolist() == [seed(7, parameter).item() for parameter in range(5)]
    assert STREAM > 9  # the streams of a linear layer


def test_the_parameter_is_the_rounding_of_its_master():
    net, optimizer = system("adamw_fp8lm")
    first = net[2].weight.detach().clone()
    start = system("adamw")[0][2].weight.detach()
    master = MASTERS["fp16"]
    for step in range(3):
        held = optimizer.state[net[2].weight]
        codes = {"codes": held["master"], "scale": held["master.scale"]}
        assert held["master"].dtype == torch.float16 and net[2].weight.dtype == torch.bfloat16
        assert torch.equal(net[2].weight, master.decode(codes).bfloat16())
        if step == 0:  # taken from the FP32 weights, not from their BF16 rounding
            torch.testing.assert_close(master.decode(codes), start, rtol=2.0**-11, atol=1e-9)
            assert not torch.equal(master.decode(codes), first.float())
        fill(net, step)
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw_fp8lm", "bf16", "e5m2_fp16"])
def test_vectors_and_looked_up_weights_stay_fp32(name):
    net, optimizer = system(name)
    assert {n: p.dtype for n, p in net.named_parameters()} == {
        "0.weight": torch.float32,
        "1.weight": torch.float32,
        "1.bias": torch.float32,
        "2.weight": torch.bfloat16,
        "2.bias": torch.float32,
    }
    assert set(optimizer.state[net[1].weight]) == {"step", "exp_avg", "exp_avg_sq"}
    one_scale = name == "adamw_fp8lm"  # for all rows, most of which have no gradient: no codes
    assert (optimizer.state[net[0].weight]["exp_avg"].dtype == torch.float32) == one_scale


@pytest.mark.parametrize("compiled", [False, True])
def test_micro_batches_are_summed_in_fp32(compiled):
    """300 micro-batches, each a gradient of 1 + 2^-7: a BF16 sum would stop at 256."""
    layer = nn.Linear(8, 4, bias=False)
    adamw(parameter_groups(layer, 0.0), master=MASTERS["bf16"])
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x = torch.full((1, 8), 1 + 2.0**-7, dtype=torch.bfloat16)
    for _ in range(300):
        run(x).sum().backward()
    assert layer.weight.dtype == torch.bfloat16 and layer.weight.grad.dtype == torch.float32
    assert torch.equal(layer.weight.grad, torch.full((4, 8), 300 * (1 + 2.0**-7)))


def test_a_frequent_token_keeps_its_gradient():
    """Why looked-up weights keep FP32 masters: a BF16 embedding sums a thousand ones to 256 on the CPU."""
    net, _ = system("adamw_fp8lm")
    F.embedding(torch.zeros(1000, dtype=torch.long), net[0].weight).to(torch.bfloat16).sum().backward()
    assert (net[0].weight.grad[0] == 1000).all()
