"""Recomputing changes what is kept, never a bit of the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from lowprec_train.model.recompute import RECOMPUTE, keep_dear
from lowprec_train.model.transformer import Transformer

CHOICES = ("none", "selective", "full")


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


def test_our_operations_are_kept_by_name() -> None:
    with torch.library._scoped_library("lowprec", "FRAGMENT") as library:
        library.define("recompute_probe(Tensor x) -> Tensor")
        assert keep_dear(None, torch.ops.lowprec.recompute_probe.default) is CheckpointPolicy.MUST_SAVE
    assert keep_dear(None, torch.ops.aten.mm.default) is CheckpointPolicy.MUST_SAVE
    assert keep_dear(None, torch.ops.aten.silu.default) is CheckpointPolicy.PREFER_RECOMPUTE


def test_codes_are_made_once_under_selective() -> None:
    """An operation of ours inside an autograd Function, as a quantised linear layer has it."""
    calls = []
    with torch.library._scoped_library("lowprec", "FRAGMENT") as library:
        library.define("recompute_codes(Tensor x) -> Tensor")

        def codes(x: Tensor) -> Tensor:
            calls.append(1)
            return (x * 4).round() / 4

        library.impl("recompute_codes", codes, "CompositeExplicitAutograd")

        class Coded(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                kept = torch.ops.lowprec.recompute_codes(x)
                ctx.save_for_backward(kept)
                return kept * 2

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                return grads[0] * ctx.saved_tensors[0]

        x = torch.randn(8, requires_grad=True)
        results = {}
        for choice in CHOICES:
            calls.clear()
            RECOMPUTE[choice](lambda y: Coded.apply(y.sin()), x).sum().backward()
            results[choice], x.grad = (x.grad, len(calls)), None
    assert [results[choice][1] for choice in CHOICES] == [1, 1, 2]
    assert torch.equal(results["selective"][0], results["none"][0])
    assert torch.equal(results["full"][0], results["none"][0])


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
