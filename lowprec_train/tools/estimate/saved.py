"""Count the tensors that autograd saves, on the real model on the meta device, where tensors have no memory.

Blocks of the same kind save the same, so a model without blocks and one with a single block are sufficient:

    saved(model) = rest + sum over blocks of saved(block)

Each storage is counted once, also if several nodes saved views of it. Parameters, buffers and draws are not counted,
because they exist anyway. Compiled models use the backend of torch.compile that partitions forward and backward as
Inductor does and runs both op by op, so the count has the tensors that the compiler chooses to save.

Bytes are linear in the sequences of a micro-batch, so two counts give the slope (bytes per token) and the constant
(bytes that do not depend on tokens: casts and codes of weights).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowprec_train.model.joint_graph import partitioned
from lowprec_train.model.transformer import Transformer, compile_block
from lowprec_train.precision.linear import Linear
from lowprec_train.tools.estimate.subject import Subject


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """token: bytes per token of this process's micro-batch. fixed: bytes that do not depend on tokens."""

    token: float
    fixed: float

    def of(self, tokens: int) -> int:
        """Return the bytes for a micro-batch of `tokens`."""
        return round(self.token * tokens + self.fixed)


@dataclass(frozen=True, kw_only=True)
class SavedParts:
    """rest: embedding, last norm, head with its logits, loss. blocks: in order."""

    rest: SavedBytes
    blocks: tuple[SavedBytes, ...]

    def total(self, tokens: int) -> int:
        """Return the bytes at the end of a forward pass."""
        return self.rest.of(tokens) + sum(block.of(tokens) for block in self.blocks)


@dataclass(frozen=True)
class Counter:
    """Counts what autograd saves for a micro-batch. recompute: of all blocks.

    Raises ValueError for "norms" and "selective" in an eager run: autograd's hooks do not see what they recompute.
    """

    subject: Subject
    recompute: str

    def __post_init__(self) -> None:
        if self.recompute in ("norms", "selective") and not self.subject.compiled:
            raise ValueError(
                f"model.recompute={self.recompute} is counted for compiled runs only, not with compile=off"
            )

    def rest(self) -> SavedBytes:
        """Return the bytes that everything except the blocks saves."""
        return self._saved_bytes(lambda size: self._saved(None, size, compiled=self.subject.compiled))

    def block(self, index: int) -> SavedBytes:
        """Return the bytes of one block: with it minus without it. The rest is eager here, which is cheaper."""
        return self._saved_bytes(
            lambda size: self._saved(index, size, compiled=False) - self._saved(None, size, compiled=False)
        )

    def _saved_bytes(self, count: Callable[[int], int]) -> SavedBytes:
        batch, tokens = self.subject.run.micro_batch, self.subject.tokens
        small, large = count(batch), count(2 * batch)
        token = (large - small) / tokens
        return SavedBytes(token=token, fixed=small - token * tokens)

    def _saved(self, block: int | None, batch: int, *, compiled: bool) -> int:
        """Return the bytes that a forward pass and its loss save. compiled: whether the rest of the model is."""
        model = only(self.subject.model(self.recompute), block)
        if self.subject.compiled and (compiled or block is not None):
            torch.compiler.reset()  # torch caches only a few graphs of one function
            _compile(model, rest=compiled)
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = self.subject.loss(model, batch)
        there = {_identity(tensor) for tensor in _owned(model)}
        sizes = {_identity(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
        assert loss.requires_grad
        return sum(size for storage, size in sizes.items() if storage not in there)


def _compile(model: Transformer, *, rest: bool) -> None:
    options: dict[str, Any] = {"backend": partitioned, "dynamic": False}
    if rest:
        model.compile_blocks(**options)
    for block in () if rest else model.blocks:
        compile_block(block, fullgraph=True, **options)


def only(model: Transformer, block: int | None) -> Transformer:
    """Return the model with only one of its blocks, or without blocks."""
    model.blocks = nn.ModuleList([] if block is None else [model.blocks[block]])
    return model


def _owned(model: nn.Module) -> list[Tensor]:
    """Return tensors that exist anyway or are counted elsewhere: parameters, buffers, seeds, all-gathered weights."""
    owned = [*model.parameters(), *model.buffers()]
    for linear in (module for module in model.modules() if isinstance(module, Linear)):
        if linear.draws is not None:
            owned += [linear.draws.seeds, linear.draws.token_rows, linear.draws.token_columns]
        if linear.gathered is not None:
            owned += [linear.gathered.leaf, *linear.gathered.tensors]
    return owned


def _identity(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage: a meta tensor has no address."""
    return StorageWeakRef(tensor.untyped_storage()).cdata
