"""Kept codes in a compiled graph: the bits of an eager run, whatever is recomputed, in a handful of graphs.

All gradients are compared: on torch 2.11 an output of an autograd function that aliases another forward value loses its
gradient in a compiled graph, silently, and another parameter's need not show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from lowprec_train.model.joint_graph import partitioned
from lowprec_train.model.transformer import Transformer, compile_method
from lowprec_train.numerics import pairs
from lowprec_train.numerics.draws import SeedTable
from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision import linear_gemms
from lowprec_train.precision.saved_activations import SavedActivationPolicy, apply_saved_activations
from lowprec_train.recipes import coat, fp8
from tests.recipes import GPT, LLAMA, MODELS, SYSTEMS, build, one_of_a_kind_by_day, system


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_blocks(model: Transformer) -> None:
    """The blocks alone: the head and the loss keep no codes."""
    for block in model.blocks:
        compile_method(block, "forward", fullgraph=True, backend="aot_eager")


def loss_and_gradients(model: Transformer, seeds: SeedTable) -> dict[str, Tensor]:
    model.zero_grad()
    tokens = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(2))
    loss = model.loss(tokens, tokens.roll(-1, 1), float(tokens.numel()), draws=seeds.at(0, 0))
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.any(), name
        assert torch.equal(found[name], value), (name, (found[name] - value).norm() / value.norm())


@pytest.mark.parametrize("recompute", ["none", "full", "selective model.full_recompute_layers=1"])
@pytest.mark.parametrize("model", MODELS)
def test_compiled_and_recomputed_are_the_bits_of_eager(model: str, recompute: str) -> None:
    eager, compiled = system("coat", model), system("coat", model, *f"model.recompute={recompute}".split())
    compile_blocks(compiled.model)
    assert_same(*(loss_and_gradients(one.model, one.seeds) for one in (compiled, eager)))


@pytest.mark.parametrize("recompute", ["norms", "selective"])
@pytest.mark.parametrize("recipe", one_of_a_kind_by_day([name for name in SYSTEMS if name != "coat"]))
def test_every_recipe_recomputed_in_part_has_the_bits_of_eager(recipe: str, recompute: str) -> None:
    """Partitioned as Inductor does, whose choice of what is saved the policy decides."""
    eager, compiled = system(recipe), system(recipe, "llama_tiny", f"model.recompute={recompute}")
    for block in compiled.model.blocks:
        compile_method(block, "forward", fullgraph=True, backend=partitioned)
    assert_same(*(loss_and_gradients(one.model, one.seeds) for one in (compiled, eager)))


@pytest.mark.parametrize("recompute", ["none", "full", "norms"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_eden4"])
def test_an_amax_from_the_kernel_that_makes_x_changes_no_bit(recipe: str, recompute: str, monkeypatch) -> None:
    """As on a GPU. `fp8_eden4` has codes of `gate_up`'s dY from SwiGLU, too."""
    eager, compiled = system(recipe), system(recipe, "llama_tiny", f"model.recompute={recompute}")
    for module in (linear_gemms, pairs):
        monkeypatch.setattr(module, "amax_of_rows", lambda x: x.abs().amax(dim=1).float())
    for block in compiled.model.blocks:
        compile_method(block, "forward", fullgraph=True, backend=partitioned)
    found = loss_and_gradients(compiled.model, compiled.seeds)
    monkeypatch.undo()
    assert_same(found, loss_and_gradients(eager.model, eager.seeds))


@pytest.mark.parametrize("family", [LLAMA, GPT], ids=["llama", "gpt"])
def test_an_fp32_stream_loses_no_gradient(family: Mapping[str, Any]) -> None:
    """Where `.to` does nothing. Kept in E2M1, two codes a byte."""
    keep = Quantizer(E2M1, tile=(1, 32), scale=ScaleRule.POW2)
    results = []
    for compiled in (True, False):
        model, seeds = build(fp8.recipe(), family, dtype=torch.float32)
        apply_saved_activations(model, SavedActivationPolicy(norm=keep, activation=keep))
        if compiled:
            compile_blocks(model)
        results.append(loss_and_gradients(model, seeds))
    assert_same(*results)


def test_a_handful_of_graphs_at_32_layers() -> None:
    """Blocks share one graph; keeping codes is another one for all of them, and going back none."""
    model, seeds = build(fp8.recipe(), LLAMA, layers=32, dim=64, ffn=64, heads=2, kv_heads=2)
    counter = torch._dynamo.testing.CompileCounter()
    model.compile_blocks(backend=counter)
    counts = []
    for keep in (SavedActivationPolicy(), coat.saved_activations(), SavedActivationPolicy(), coat.saved_activations()):
        apply_saved_activations(model, keep)
        loss_and_gradients(model, seeds)
        counts.append(counter.frame_count)
    assert counts[0] <= 6 and 1 <= counts[1] - counts[0] <= 2 and counts[1:] == counts[1:2] * 3, counts
