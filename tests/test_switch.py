"""fp4_mixed ends in BF16: the switch changes what GEMMs compute and nothing that training has accumulated."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tests.copy_task import batches, step
from tests.recipes import System, system

STEPS, SWITCH = 8, 5
LENGTH = (f"steps={STEPS}", f"precision.schedule.end.at={SWITCH / STEPS}")


def everything(one: System) -> dict[str, Tensor]:
    """Every parameter and every tensor of the optimizer's state, by name, copied."""
    names = {p: name for name, p in one.model.named_parameters()}
    tensors = dict(one.model.named_parameters())
    tensors |= {f"{names[p]}.{key}": t for p, state in one.optimizer.state.items() for key, t in state.items()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def trained(one: System, first: int, last: int) -> list[float]:
    """Losses of the steps first .. last - 1, on the batches that belong to them."""
    return [step(one, i, batch) for i, batch in zip(range(last), batches(), strict=False) if i >= first]


OPTIMIZERS = ("adamw", "adamw_fp8lm", "adamw_coat")


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_the_switch_leaves_every_bit_of_the_state(optim):
    mixed = system("fp4_mixed", "llama_tiny", *LENGTH, f"optim={optim}")
    trained(mixed, 0, SWITCH)
    before = everything(mixed)
    assert not mixed.model.blocks[0].mlp.down.recipe.is_identity
    mixed.precision.begin(mixed.model, SWITCH)
    assert mixed.model.blocks[0].mlp.down.recipe.is_identity
    assert same(everything(mixed), before)


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_the_run_goes_on_as_bf16_from_the_same_state(optim):
    """Up to the switch it is the run without a schedule; from there on it is a BF16 run that was handed its state."""
    mixed = system("fp4_mixed", "llama_tiny", *LENGTH, f"optim={optim}")
    plain = system("fp4_mixed", "llama_tiny", f"steps={STEPS}", f"optim={optim}", "precision/schedule=none")
    assert trained(mixed, 0, SWITCH) == trained(plain, 0, SWITCH)
    assert same(everything(mixed), everything(plain))

    other = system("bf16", "llama_tiny", f"steps={STEPS}", f"optim={optim}", seed=5)
    hand_over(plain, other)
    after, unswitched = trained(mixed, SWITCH, STEPS), trained(plain, SWITCH, STEPS)
    assert after == trained(other, SWITCH, STEPS)
    assert after != unswitched
    assert same(everything(mixed), everything(other)) and not same(everything(mixed), everything(plain))


def hand_over(source: System, target: System) -> None:
    """Weights and optimizer state, tensor by tensor."""
    for (_, a), (_, b) in zip(source.model.named_parameters(), target.model.named_parameters(), strict=True):
        with torch.no_grad():
            b.copy_(a)
        for key, value in source.optimizer.state[a].items():
            target.optimizer.state[b][key].copy_(deepcopy(value))


def test_the_switch_costs_a_bounded_number_of_graphs():
    """Eight blocks share their graphs before and after; only the first switched step compiles."""
    torch._dynamo.reset()
    mixed = system("fp4_mixed", "llama_tiny", *LENGTH, "model.layers=8")
    counter = torch._dynamo.testing.CompileCounter()
    mixed.model.compile_blocks(backend=counter)
    trained(mixed, 0, 2)
    first = counter.frame_count
    assert first <= 6, first
    trained(mixed, 2, SWITCH)
    assert counter.frame_count == first
    trained(mixed, SWITCH, SWITCH + 1)
    switched = counter.frame_count
    assert 1 <= switched - first <= 2, (first, switched)
    trained(mixed, SWITCH + 1, STEPS)
    assert counter.frame_count == switched
    torch._dynamo.reset()
