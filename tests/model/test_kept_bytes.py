"""What a block keeps between its passes, in bytes, from the shapes alone: COAT's table 2 for this code.

Storages are counted once, however many nodes saved a view of them; what is there anyway (parameters, rotary tables,
seeds) is not counted. Compiled means the partition that Inductor trains with, so that what a compiler chooses to keep
instead of the codes would show.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowprec_train.precision.linear import Linear
from tests.recipes import MODELS, System, system

B, T, D, HEADS, GROUP = 2, 64, 128, 4, 16
FFN = {"llama_tiny": 384, "gpt_tiny": 512}
FP8, BYTE, BF16, FP32 = torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.float32
PARTITION = "aot_eager_decomp_partition"
CASES = [("llama_tiny", 4, None), ("llama_tiny", 2, None), ("gpt_tiny", 4, None)]
CASES += [("llama_tiny", 2, PARTITION), ("gpt_tiny", 4, PARTITION)]
Bytes = Counter[torch.dtype]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- by the shapes ---


def norms(recipe: str, model: str, compiled: bool) -> Bytes:
    """Codes; or compiled the input with its rate (and mean), eager FP32 copies: x, and x / rms for RMSNorm's weight."""
    if recipe == "coat":
        return Bytes({FP8: 2 * D, BYTE: 2 * D // GROUP})
    statistics = 4 if model == "llama_tiny" else 4 + 4
    if compiled:
        return Bytes({BF16: 2 * 2 * D, FP32: 2 * statistics})
    copies = 2 if model == "llama_tiny" else 1
    return Bytes({FP32: 2 * (copies * 4 * D + statistics)})


def activation(recipe: str, model: str, compiled: bool) -> Bytes:
    """Gate and up, or GELU's input: in codes, in BF16, or eager gate, silu(gate) and up in FP32."""
    llama, ffn = model == "llama_tiny", FFN[model]
    width = (2 if llama else 1) * ffn
    if recipe == "coat":
        return Bytes({FP8: width, BYTE: width // GROUP})
    return Bytes({FP32: 3 * 4 * ffn}) if llama and not compiled else Bytes({BF16: 2 * width})


def attention(recipe: str, kv_heads: int) -> Bytes:
    """q, k and v, once, and the logarithm of the softmax's sum. Its output, unless a linear keeps that already."""
    output = 0 if recipe == "bf16" else 2 * D
    return Bytes({BF16: 2 * (D + 2 * kv_heads * D // HEADS) + output, FP32: 4 * HEADS})


def linears(recipe: str, model: str) -> Bytes:
    """The inputs of qkv, out, up and down."""
    width = 3 * D + FFN[model]
    return Bytes({BF16: 2 * width}) if recipe == "bf16" else Bytes({FP8: width})


def weights(recipe: str, model: nn.Module) -> Bytes:
    """Kept by the weight, not by the token: as it was multiplied."""
    count = sum(m.weight.numel() for m in model.modules() if isinstance(m, Linear))
    return Bytes({BF16: 2 * count}) if recipe == "bf16" else Bytes({FP8: count})


def expected(recipe: str, model: str, compiled: bool, kv_heads: int) -> Bytes:
    """Of a token."""
    parts = norms(recipe, model, compiled), activation(recipe, model, compiled), linears(recipe, model)
    return sum(parts, attention(recipe, kv_heads))


# --- as it is ---


def owned(one: System) -> set[int]:
    """Storages that live anyway."""
    tensors = [*one.model.parameters(), *one.model.buffers()]
    for linear in (m for m in one.model.modules() if isinstance(m, Linear) and m.draws is not None):
        tensors += [linear.draws.seeds, linear.draws.token_rows, linear.draws.token_columns]
    return {t.untyped_storage().data_ptr() for t in tensors}


def block(one: System) -> Tensor:
    """The first block's output."""
    x = torch.randn(B, T, D).bfloat16().requires_grad_()
    return one.model.blocks[0](x, one.model.position.angles(T), None)


def kept(one: System) -> Bytes:
    """Bytes that autograd saved of one block, by dtype; scales of whole tensors (four bytes) left out."""
    one.draws.begin(0, 0)
    block(one).sum().backward()  # compiles
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = block(one)
    storages = {t.untyped_storage().data_ptr(): t for t in saved}
    there = owned(one)
    y.sum().backward()
    assert len(storages) > 10
    sizes = [(t.dtype, t.untyped_storage().nbytes()) for pointer, t in storages.items() if pointer not in there]
    found = Bytes()
    for dtype, size in sizes:
        found[dtype] += size if size > 4 else 0
    return found


@pytest.mark.parametrize("model, kv_heads, backend", CASES)
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "coat"])
def test_a_block_keeps_what_its_shapes_say(recipe: str, model: str, kv_heads: int, backend: str | None) -> None:
    """Of each dtype to the byte: under coat BF16 is attention's alone, FP32 the softmax's sums."""
    one = system(recipe, model, "model.recompute=none", f"model.kv_heads={kv_heads}")
    if backend:
        one.model.compile_blocks(backend=backend)
    token = expected(recipe, model, backend is not None, kv_heads)
    whole = Bytes({dtype: B * T * size for dtype, size in token.items()}) + weights(recipe, one.model.blocks[0])
    assert kept(one) == whole


class Alive(TorchDispatchMode):
    """Remembers every tensor that an operation made, weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, torch.dtype, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage.data_ptr()] = (StorageWeakRef(storage), tensor.dtype, storage.nbytes())
        return result

    def bytes(self, dtype: torch.dtype) -> list[int]:
        """Of the storages of a dtype that still live, largest first."""
        alive = (size for ref, kind, size in self.seen.values() if kind is dtype and not ref.expired())
        return sorted(alive, reverse=True)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_no_dequantised_value_outlives_the_forward_pass(model: str, recompute: str) -> None:
    """Not even under `selective`, which keeps what GEMMs and our operations return: here FP32 products alone."""
    one = system("coat", model, f"model.recompute={recompute}")
    one.draws.begin(0, 0)
    products = [4 * B * T * m.out_features for m in one.model.blocks[0].modules() if isinstance(m, Linear)]
    with Alive() as alive:
        y = block(one)
        wide = [size for size in alive.bytes(FP32) if size >= 4 * B * T * D]
    y.sum().backward()
    assert wide == (sorted(products, reverse=True) if recompute == "selective" else [])
