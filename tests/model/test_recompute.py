"""Recomputing changes what is kept, never a bit of the result."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

import lowprec_train.comm.process_group  # noqa: F401  registers lowprec_comm
from lowprec_train.model.recompute import RECOMPUTE, keep_dear
from lowprec_train.model.transformer import Transformer
from lowprec_train.ops.schema import SCHEMAS
from tests.recipes import MODELS, SYSTEMS, System, by_day, system

aten = torch.ops.aten
CHOICES = ("none", "norms", "selective", "full")


class Record(TorchDispatchMode):
    """Counts operations and remembers the storages that they made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[str(func.overloadpacket).removeprefix("aten.")] += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def kept(self) -> int:
        """Bytes of the storages that still live."""
        return sum(size for ref, size in self.storages.values() if not ref.expired())


def gradients(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter.grad) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_losses_and_gradients_are_bit_equal(build, batch, family: str) -> None:
    tokens, targets = batch()
    models = {choice: build(family, recompute=choice) for choice in CHOICES}
    losses = {choice: model.loss(tokens, targets, 7.0) for choice, model in models.items()}
    for loss in losses.values():
        loss.backward()
    for choice in CHOICES[1:]:
        assert torch.equal(losses[choice], losses["none"])
        for (name, value), (_, expected) in zip(gradients(models[choice]), gradients(models["none"])):
            assert torch.equal(value, expected), (choice, name)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_more_recompute_keeps_less(build, batch, family: str) -> None:
    kept = {}
    for choice in CHOICES:
        model = build(family, layers=4, recompute=choice)
        with Record() as record:
            hidden = model.hidden(batch()[0])
            kept[choice] = record.kept()
        hidden.sum().backward()
    assert kept["full"] < 0.5 * kept["selective"] and kept["selective"] < 0.7 * kept["none"], kept


def test_selective_runs_no_gemm_and_no_attention_again(build, batch) -> None:
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    counts = {}
    for choice in CHOICES:
        model = build("llama", recompute=choice)
        with Record() as record:
            model.hidden(batch()[0]).sum().backward()
        counts[choice] = record.calls
    gemms, again = {choice: count["mm"] for choice, count in counts.items()}, 2  # layers
    assert gemms["selective"] == gemms["none"] == 4 * again * 3  # four linear layers, three GEMMs each
    assert gemms["full"] > gemms["none"]
    assert counts["selective"][attention] == counts["none"][attention] == again
    assert counts["full"][attention] == 2 * again
    assert counts["selective"]["silu"] == counts["full"]["silu"] == 2 * counts["none"]["silu"]


@pytest.mark.parametrize("others", ["none", "selective"])
def test_the_first_blocks_are_recomputed_as_a_whole(build, batch, others: str) -> None:
    """With the bits of `none`; each of two blocks saves its input alone and runs its attention again."""
    found, kept, calls = {}, {}, {}
    for whole in (0, 2, 4):
        model = build("llama", layers=4, recompute=others, full_recompute_layers=whole)
        with Record() as record:
            hidden = model.hidden(batch()[0])
            kept[whole] = record.kept()
            hidden.sum().backward()
        calls[whole] = record.calls["_scaled_dot_product_flash_attention_for_cpu"]
        found[whole] = [hidden.detach(), *(grad for _, grad in gradients(model) if grad is not None)]
    assert calls == {0: 4, 2: 6, 4: 8}
    assert kept[0] - kept[2] == kept[2] - kept[4] > 0
    for whole in (2, 4):
        assert all(torch.equal(*pair) for pair in zip(found[whole], found[0], strict=True))


def test_some_blocks_are_recomputed(build, batch) -> None:
    """The first ones, and those that are recomputed as a whole in any case; with the bits of `none`."""
    found, kept = [], []
    for some, whole in ((0, 0), (1, 0), (3, 2), (1, 2), (None, 0)):
        model = build("llama", layers=4, recompute="selective", recompute_layers=some, full_recompute_layers=whole)
        names = ["full"] * whole + ["selective"] * ((4 if some is None else some) - whole)
        of_blocks = [block.recompute for block in model.blocks]
        assert of_blocks == [RECOMPUTE[name] for name in names + ["none"] * (4 - len(names))]
        with Record() as record:
            hidden = model.hidden(batch()[0])
            kept.append(record.kept())
            hidden.sum().backward()
        found.append([hidden.detach(), *(grad for _, grad in gradients(model) if grad is not None)])
    assert kept[0] > kept[1] > kept[4] and kept[3] > kept[2]
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(other, found[0], strict=True))


def test_full_recomputation_of_all_blocks_includes_the_first(build) -> None:
    """So that `model.recompute=full` may be given to any run."""
    model = build("llama", recompute="full", full_recompute_layers=1)
    assert all(block.recompute is RECOMPUTE["full"] for block in model.blocks)


def test_gemms_attention_and_collectives_are_kept_by_name() -> None:
    def kept(operation: Any) -> bool:
        return keep_dear(None, operation) is CheckpointPolicy.MUST_SAVE

    ours = {name for name in SCHEMAS if kept(getattr(torch.ops.lowprec, name).default)}
    assert ours == {"scaled_mm", "block_scaled_mm", "bf16_mm", "saved_codes", "group_codes"}
    assert all(map(kept, (aten.mm.default, aten.mm.dtype, aten.addmm.default, aten._scaled_mm.default)))
    assert kept(aten._scaled_dot_product_cudnn_attention.default)
    assert kept(torch.ops._c10d_functional.all_gather_into_tensor.default)
    assert not kept(torch.ops.lowprec_comm.all_gather_again.default)
    assert not any(map(kept, (aten.silu.default, aten.add.Tensor, aten._to_copy.default)))


def loss_and_gradients(one: System, record: TorchDispatchMode | None = None) -> list[Tensor]:
    tokens = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(2))
    with record or nullcontext():
        loss = one.model.loss(tokens, tokens.roll(-1, 1), float(tokens.numel()), draws=one.seeds.at(0, 0))
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in one.model.parameters())]


@pytest.mark.parametrize("recipe", by_day(SYSTEMS))
@pytest.mark.parametrize("model", MODELS)
def test_selective_repeats_roundings_and_no_gemm(recipe: str, model: str) -> None:
    """With every recipe: the bits of `none`, each GEMM and attention once, and the codes of the forward pass twice."""
    results, calls = {}, {}
    for choice in CHOICES:
        record = Record()
        results[choice] = loss_and_gradients(system(recipe, model, f"model.recompute={choice}"), record)
        calls[choice] = record.calls
    for choice in CHOICES[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[choice], results["none"], strict=True)), choice
    dear = [name for name in calls["full"] if "mm" in name or "attention" in name]
    assert dear and all(calls["selective"][name] == calls["none"][name] for name in dear), calls
    assert any(calls["full"][name] > calls["none"][name] for name in dear)
    roundings = [name for name in calls["none"] if re.match(r"lowprec\.(quantize|round|rotate)", name)]
    if recipe not in ("bf16", "coat"):
        assert roundings and all(calls["selective"][name] == calls["full"][name] for name in roundings), calls


@pytest.mark.gpu
def test_compiled_recompute_orders_peak_memory(build) -> None:
    peaks = {}
    tokens = torch.randint(0, 61, (8, 1024), device="cuda")
    for choice in CHOICES:
        torch._dynamo.reset()
        model = build("llama", dim=512, ffn=1408, layers=8, max_seq_len=1024, recompute=choice).cuda()
        model.compile_blocks()
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model.loss(tokens, tokens, 1.0).backward()
            peaks[choice] = torch.cuda.max_memory_allocated() - before
            model.zero_grad()
    assert peaks["full"] < 0.9 * peaks["selective"] and peaks["selective"] < 0.9 * peaks["none"], peaks
