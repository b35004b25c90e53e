"""What a block keeps between its passes, in bytes, from the shapes alone: COAT's table 2 for this code.

Storages are counted once, however many nodes saved a view of them; what is there anyway (parameters, rotary tables,
seeds) is not counted. Compiled means the partition that Inductor trains with, so that what a compiler chooses to keep
instead of the codes would show.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowprec_train.model.joint_graph import keep_marked, partitioned
from lowprec_train.model.transformer import compile_block
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.policy import attach_draws
from tests.recipes import MODELS, System, system

B, T, GROUP = 2, 64, 16
FP8, BYTE, BF16, FP32 = torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.float32
Bytes = Counter[torch.dtype]


@dataclass(frozen=True)
class Shape:
    llama: bool
    dim: int
    ffn: int
    heads: int
    kv_heads: int


SHAPES = {
    "llama_tiny": Shape(True, 128, 384, 4, 4),
    "llama_tiny model.kv_heads=2": Shape(True, 128, 384, 4, 2),
    "gpt_tiny": Shape(False, 128, 512, 4, 4),
}
LLAMA_7B, GPT_6B7 = Shape(True, 4096, 11008, 32, 32), Shape(False, 4096, 16384, 32, 32)
CASES = [(name, compiled) for name in SHAPES for compiled in (False, True) if not (compiled and name == "llama_tiny")]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- by the shapes ---


def norms(recipe: str, shape: Shape, compiled: bool) -> Bytes:
    """Codes; or compiled the input with its rate (and mean), eager FP32 copies: x, and x / rms for RMSNorm's weight."""
    width, statistics = 2 * shape.dim, 2 * (4 if shape.llama else 4 + 4)
    if recipe == "coat":
        return Bytes({FP8: width, BYTE: width // GROUP})
    if compiled:
        return Bytes({BF16: 2 * width, FP32: statistics})
    return Bytes({FP32: (2 if shape.llama else 1) * 4 * width + statistics})


def activation(recipe: str, shape: Shape) -> Bytes:
    """Gate and up, or GELU's input: in codes, or in BF16."""
    width = (2 if shape.llama else 1) * shape.ffn
    if recipe == "coat":
        return Bytes({FP8: width, BYTE: width // GROUP})
    return Bytes({BF16: 2 * width})


def attention(recipe: str, shape: Shape) -> Bytes:
    """q, k and v, once, and the logarithm of the softmax's sum. Its output, unless a linear keeps that already."""
    keys = shape.kv_heads * shape.dim // shape.heads
    output = 0 if recipe == "bf16" else 2 * shape.dim
    return Bytes({BF16: 2 * (shape.dim + 2 * keys) + output, FP32: 4 * shape.heads})


def linears(recipe: str, shape: Shape, compiled: bool) -> Bytes:
    """The inputs of qkv, up and down, and of out if attention does not save it; rates of norms instead of results."""
    if recipe == "bf16":
        return Bytes({BF16: 2 * (3 * shape.dim + shape.ffn)})
    if recipe == "fp8" and compiled and shape.llama:
        return Bytes({FP8: shape.ffn, FP32: 2 * 4})
    return Bytes({FP8: shape.ffn + 2 * shape.dim})


def selective(recipe: str, shape: Shape) -> Bytes:
    """What GEMMs and attention return, and codes where they are smaller: of a token, compiled, with
    `model.recompute=selective`. Without codes, the block's input and what attention adds to it are in BF16.
    """
    qkv = shape.dim + 2 * shape.kv_heads * shape.dim // shape.heads
    found = Bytes({BF16: 2 * (qkv + shape.dim), FP32: 4 * shape.heads})
    if recipe == "coat":
        return found + norms(recipe, shape, True) + activation(recipe, shape)
    return found + Bytes({BF16: 2 * 2 * shape.dim}) + activation("bf16", shape)


def without_norms(recipe: str, shape: Shape) -> Bytes:
    """Of a token, compiled, with `model.recompute=norms`: neither what norms return nor codes of it or of what
    attention returns. Under `fp8` this is `none`.
    """
    if recipe == "fp8" and shape.llama:
        return expected(recipe, shape, True)
    inputs = norms(recipe, shape, True) if recipe == "coat" else Bytes({BF16: 2 * 2 * shape.dim})
    of_down = {BF16: 2 * shape.ffn} if recipe == "bf16" else {FP8: shape.ffn}
    output = Bytes({BF16: 2 * shape.dim if recipe == "bf16" else 0})
    return inputs + activation(recipe, shape) + attention(recipe, shape) + output + Bytes(of_down)


def weights(recipe: str, model: nn.Module) -> Bytes:
    """SavedBytes by the weight, not by the token: as it was multiplied."""
    count = sum(m.weight.numel() for m in model.modules() if isinstance(m, Linear))
    return Bytes({BF16: 2 * count}) if recipe == "bf16" else Bytes({FP8: count})


def expected(recipe: str, shape: Shape, compiled: bool) -> Bytes:
    """Of a token."""
    parts = norms(recipe, shape, compiled), activation(recipe, shape), linears(recipe, shape, compiled)
    return sum(parts, attention(recipe, shape))


# --- as it is ---


def owned(one: System) -> set[int]:
    """Storages that live anyway."""
    tensors = [*one.model.parameters(), *one.model.buffers()]
    for linear in (m for m in one.model.modules() if isinstance(m, Linear) and m.draws is not None):
        tensors += [linear.draws.seeds, linear.draws.token_rows, linear.draws.token_columns]
    return {t.untyped_storage().data_ptr() for t in tensors}


def block(one: System) -> Tensor:
    """The first block's output."""
    x = torch.randn(B, T, one.model.dim).bfloat16().requires_grad_()
    return one.model.blocks[0](x, one.model.position.angles(T), None)


def saved(one: System) -> Bytes:
    """Bytes that autograd saved of one block, by dtype; scales of whole tensors (four bytes) left out."""
    attach_draws(one.model, one.seeds.at(0, 0))
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


@pytest.mark.parametrize("model, compiled", CASES)
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "coat"])
def test_a_block_keeps_what_its_shapes_say(recipe: str, model: str, compiled: bool) -> None:
    """Of each dtype to the byte: under coat BF16 is attention's alone, FP32 the softmax's sums."""
    one = system(recipe, *model.split(), "model.recompute=none")
    first = one.model.blocks[0]
    if compiled:
        compile_block(first, fullgraph=True, backend=partitioned)
    token = expected(recipe, SHAPES[model], compiled)
    assert saved(one) == Bytes({dtype: B * T * size for dtype, size in token.items()}) + weights(recipe, first)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recipe", ["fp8", "coat", "nvfp4"])
def test_a_recomputed_block_keeps_what_gemms_return(recipe: str, model: str) -> None:
    """Of each dtype to the byte, products in BF16 also where a GEMM sums in FP32, and nothing of the weights."""
    one = system(recipe, *model.split(), "model.recompute=selective")
    first = one.model.blocks[0]
    compile_block(first, fullgraph=True, backend=partitioned)
    token = selective(recipe, SHAPES[model])
    assert saved(one) == Bytes({dtype: B * T * size for dtype, size in token.items()})


NIGHTLY = pytest.mark.nightly
RECOMPUTED = [
    ("bf16", "llama_tiny", partitioned),
    ("coat", "gpt_tiny", partitioned),
    ("fp8", "llama_tiny", "inductor"),
    pytest.param("bf16", "llama_tiny", "inductor", marks=NIGHTLY),
    pytest.param("coat", "gpt_tiny", "inductor", marks=NIGHTLY),
]


@pytest.mark.parametrize(("recipe", "model", "backend"), RECOMPUTED)
def test_a_block_recomputes_its_norms_alone(recipe: str, model: str, backend: Any) -> None:
    """Of each dtype to the byte, whatever removes the marks; codes of W are saved, and casts are not."""
    one = system(recipe, *model.split(), "model.recompute=norms")
    first = one.model.blocks[0]
    keep_marked()
    compile_block(first, fullgraph=True, backend=backend)
    token, codes = without_norms(recipe, SHAPES[model]), Bytes() if recipe == "bf16" else weights(recipe, first)
    assert saved(one) == Bytes({dtype: B * T * size for dtype, size in token.items()}) + codes


UNITS = re.compile(r"^\| (BF16|`fp8`|`coat`), (eager|compiled) \| ([\d.]+) \| ([\d.]+) \|$", flags=re.MULTILINE)


def test_the_documented_units_follow_from_the_shapes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    rows = UNITS.findall(text)
    assert len(rows) == 6
    for recipe, how, *figures in rows:
        for shape, figure in zip((LLAMA_7B, GPT_6B7), figures):
            size = expected(recipe.strip("`").lower(), shape, how == "compiled").total()
            assert f"{size / (2 * shape.dim):.2f}" == figure, (recipe, how, size / (2 * shape.dim))


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
    """Not even under `selective`, which keeps what GEMMs return: here, eager, FP32 products."""
    one = system("coat", model, f"model.recompute={recompute}")
    attach_draws(one.model, one.seeds.at(0, 0))
    products = [4 * B * T * m.out_features for m in one.model.blocks[0].modules() if isinstance(m, Linear)]
    with Alive() as alive:
        y = block(one)
        wide = [size for size in alive.bytes(FP32) if size >= 4 * B * T * one.model.dim]
    y.sum().backward()
    assert wide == (sorted(products, reverse=True) if recompute == "selective" else [])
