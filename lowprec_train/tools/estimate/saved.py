"""Count the tensors that autograd saves, on the real model on the meta device, where tensors have no memory.

Blocks of a kind keep the same, so a model without blocks and one with a single block tell all:

    saved(model) = rest + sum over blocks of saved(block)

Each storage is counted once however many nodes saved a view of it, and parameters, buffers and draws are not counted:
they are there anyway. Compiled means torch.compile with the backend that cuts forward from backward as Inductor does
and runs both op by op, so that what a compiler keeps instead of what the code keeps is seen.

Bytes are linear in the sequences of a micro-batch, so two counts give the slope (bytes a token) and the rest (bytes
that do not depend on tokens: casts and codes of the weights as they were multiplied).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowprec_train.model.transformer import Transformer
from lowprec_train.precision.linear import Linear

PARTITION = "aot_eager_decomp_partition"


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """token: bytes a token of this process's micro-batch. fixed: bytes whatever the tokens."""

    token: float
    fixed: float

    def of(self, tokens: int) -> int:
        """Bytes for a micro-batch of so many tokens."""
        return round(self.token * tokens + self.fixed)


@dataclass(frozen=True, kw_only=True)
class SavedParts:
    """rest: embedding, last norm, head with its logits, loss. blocks: one each, in order."""

    rest: SavedBytes
    blocks: tuple[SavedBytes, ...]

    def total(self, tokens: int) -> int:
        """Bytes at the end of a forward pass."""
        return self.rest.of(tokens) + sum(block.of(tokens) for block in self.blocks)


@dataclass(frozen=True, kw_only=True)
class Counter:
    """Counts what models keep that `make` builds on the meta device: with recipes, draws, and weights as they arrive.

    batch: sequences of a micro-batch. documents: whether attention stays within documents.
    """

    make: Callable[[], Transformer]
    batch: int
    seq_len: int
    compiled: bool
    documents: bool = False

    def rest(self) -> SavedBytes:
        """All but the blocks."""
        return self._saved_bytes(lambda size: self._saved(None, size, compiled=self.compiled))

    def block(self, index: int) -> SavedBytes:
        """One block: the difference that it makes to the rest, which is eager here, since that costs nothing."""
        return self._saved_bytes(
            lambda size: self._saved(index, size, compiled=False) - self._saved(None, size, compiled=False)
        )

    def _saved_bytes(self, count: Callable[[int], int]) -> SavedBytes:
        small, large = count(self.batch), count(2 * self.batch)
        token = (large - small) / (self.batch * self.seq_len)
        return SavedBytes(token=token, fixed=small - token * self.batch * self.seq_len)

    def _saved(self, block: int | None, batch: int, *, compiled: bool) -> int:
        model = only(self.make(), block)
        if self.compiled and (compiled or block is not None):
            torch.compiler.reset()  # torch keeps few graphs of one code
            _compile(model, rest=compiled)
        return saved_bytes(model, batch, self.seq_len, documents=self.documents)


def _compile(model: Transformer, *, rest: bool) -> None:
    options: dict[str, Any] = {"backend": PARTITION, "dynamic": False}
    if rest:
        model.compile_blocks(**options)
    for block in () if rest else model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, **options)


def only(model: Transformer, block: int | None) -> Transformer:
    """The model with one of its blocks, or with none."""
    model.blocks = nn.ModuleList([] if block is None else [model.blocks[block]])
    return model


def saved_bytes(model: Transformer, batch: int, seq_len: int, *, documents: bool = False) -> int:
    """Bytes that a forward pass and its loss leave for the backward pass."""
    tokens = torch.empty(batch, seq_len, dtype=torch.int64, device="meta")
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.loss(tokens, tokens, 1.0, tokens if documents else None)
    there = {_identity(tensor) for tensor in _owned(model)}
    sizes = {_identity(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    assert loss.requires_grad
    return sum(size for storage, size in sizes.items() if storage not in there)


def _owned(model: nn.Module) -> list[Tensor]:
    """What lives anyway, or is counted elsewhere: parameters, buffers, seeds, weights that other ranks sent."""
    owned = [*model.parameters(), *model.buffers()]
    for linear in (module for module in model.modules() if isinstance(module, Linear)):
        owned += (
            [] if linear.draws is None else [linear.draws.seeds, linear.draws.token_rows, linear.draws.token_columns]
        )
        owned += [] if linear.gathered is None else [linear.gathered.leaf, *linear.gathered.tensors]
    return owned


def _identity(tensor: Tensor) -> int:
    """Of the storage: a tensor without memory has no address."""
    identity: int = StorageWeakRef(tensor.untyped_storage()).cdata
    return identity
