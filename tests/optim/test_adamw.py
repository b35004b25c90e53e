"""The device-side clip and skip against torch's host-side ones."""

import copy

import pytest
import torch
from torch import nn

from lowprec_train.optim.optimizer import parameter_groups
from tests.optim.cases import adamw

UNITS = 16  # five steps of six operations, each of which rounds by half a unit where torch's kernel may contract two
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def small_model(device="cpu", seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 5)).to(device)


def fill_gradients(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.device)


def snapshot(model, optimizer):
    tensors = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        tensors += [optimizer.state[parameter][key].clone() for key in ("step", "exp_avg", "exp_avg_sq")]
    return tensors


def apart(a, b):
    """Distance in units in the last place of the largest value, which elements that cancel do not share."""
    return float((a - b).abs().max() / (b.abs().max() * 2.0**-23 + 1e-45))


def test_groups_decay_matrices_only():
    model = small_model()
    decayed, free = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and free["weight_decay"] == 0.0
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight), id(model[2].weight)]
    assert [id(p) for p in free["params"]] == [id(model[1].weight), id(model[1].bias), id(model[2].bias)]


def test_tied_weights_are_one_parameter_and_frozen_ones_none():
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
    model["head"].weight = model["embedding"].weight
    (group,) = parameter_groups(model, 0.1)
    assert len(group["params"]) == 1
    model["embedding"].weight.requires_grad_(False)
    assert parameter_groups(model, 0.1) == []


@pytest.mark.parametrize("model", [nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2, device="meta")])
def test_groups_refuse_what_is_no_master_weight(model):
    with pytest.raises(ValueError, match="weight"):
        parameter_groups(model, 0.1)


def test_negative_decay_is_an_error():
    with pytest.raises(ValueError, match="-1"):
        parameter_groups(small_model(), -1)


@pytest.mark.parametrize("device", DEVICES)
def test_unit_scale_is_torchs_fused_adamw(device):
    """On the CPU it is torch's kernel; our CUDA kernel rounds each operation by itself, which torch's fuses."""
    ours, theirs = small_model(device), small_model(device)
    optimizer = adamw(parameter_groups(ours, 0.1), betas=[0.9, 0.99], eps=1e-9)
    reference = torch.optim.AdamW(parameter_groups(theirs, 0.1), betas=(0.9, 0.99), eps=1e-9, fused=True)
    one, zero = torch.ones((), device=device), torch.zeros((), device=device)
    for step in range(5):
        lr = 1e-2 / (step + 1)
        fill_gradients(ours, step), fill_gradients(theirs, step)
        optimizer.set_lr(lr)
        for group in reference.param_groups:
            group["lr"] = lr
        optimizer.step(grad_scale=one, found_inf=zero)
        reference.step()
    for mine, other in zip(snapshot(ours, optimizer), snapshot(theirs, reference), strict=True):
        assert torch.equal(mine, other) if device == "cpu" else apart(mine, other) <= UNITS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_skip_leaves_everything_bit_for_bit(device, bad):
    model = small_model(device)
    optimizer = adamw(parameter_groups(model, 0.1), lr=1e-2)
    one, zero = torch.ones((), device=device), torch.zeros((), device=device)
    for found in (one, zero, one):  # before the first update, and after one
        before = snapshot(model, optimizer)
        fill_gradients(model, 3)
        if found is one:
            model[2].weight.grad[1, 1] = bad
        optimizer.step(grad_scale=one * bad if found is one else one, found_inf=found)
        unchanged = list(map(torch.equal, before, snapshot(model, optimizer)))
        assert all(unchanged) if found is one else not any(unchanged)
    assert [optimizer.state[p]["step"].item() for p in model.parameters()] == [1.0] * 5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_clip_by_tensor_is_torchs_clip(device, scale):
    """Dividing by max(norm / clip, 1) against multiplying by min(clip / norm, 1): the same up to one rounding."""
    clip = 1.0
    ours, theirs = small_model(device), small_model(device)
    optimizer = adamw(parameter_groups(ours, 0.1), lr=1e-2)
    reference = torch.optim.AdamW(parameter_groups(theirs, 0.1), lr=1e-2, betas=(0.9, 0.95), fused=True)
    for step in range(5):
        fill_gradients(ours, step, scale), fill_gradients(theirs, step, scale)
        norm = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()])
        optimizer.step(grad_scale=((norm + 1e-6) / clip).clamp(min=1), found_inf=torch.zeros((), device=device))
        nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        reference.step()
    exact = scale < 1 and device == "cpu"  # nothing to clip: the divisor is exactly 1
    for a, b in zip(snapshot(ours, optimizer), snapshot(theirs, reference), strict=True):
        assert torch.equal(a, b) if exact else apart(a, b) <= UNITS


def test_state_exists_before_the_first_step_and_round_trips():
    model = small_model()
    optimizer = adamw(parameter_groups(model, 0.1))
    assert all(set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in model.parameters())
    fill_gradients(model, 1)
    optimizer.step()
    twin = copy.deepcopy(model)
    other = adamw(parameter_groups(twin, 0.1))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fill_gradients(model, 2), fill_gradients(twin, 2)
    optimizer.step(), other.step()
    assert all(map(torch.equal, snapshot(model, optimizer), snapshot(twin, other)))
