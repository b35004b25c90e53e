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
from lowprec_train.tools.estimate.subject import Subject

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


@dataclass(frozen=True)
class Counter:
    """Counts what autograd keeps of a micro-batch of a subject under a choice of what is recomputed.

    Raises ValueError for a selection of what is recomputed in an eager run, which autograd's hooks do not see.
    """

    subject: Subject
    recompute: str

    def __post_init__(self) -> None:
        if self.recompute == "selective" and not self.subject.compiled:
            raise ValueError("model.recompute=selective is counted for compiled runs only; compile=off was asked for")

    def rest(self) -> SavedBytes:
        """Bytes that everything except the blocks saves."""
        return self._saved_bytes(lambda size: self._saved(None, size, compiled=self.subject.compiled))

    def block(self, index: int) -> SavedBytes:
        """One block: the difference that it makes to the rest, which is eager here, since that costs nothing."""
        return self._saved_bytes(
            lambda size: self._saved(index, size, compiled=False) - self._saved(None, size, compiled=False)
        )

    def _saved_bytes(self, count: Callable[[int], int]) -> SavedBytes:
        batch, tokens = self.subject.run.micro_batch, self.subject.tokens
        small, large = count(batch), count(2 * batch)
        token = (large - small) / tokens
        return SavedBytes(token=token, fixed=small - token * tokens)

    def _saved(self, block: int | None, batch: int, *, compiled: bool) -> int:
        """Bytes that a forward pass and its loss leave for the backward pass. compiled: the rest is."""
        model = only(self.subject.model(self.recompute), block)
        if self.subject.compiled and (compiled or block is not None):
            torch.compiler.reset()  # torch keeps few graphs of one code
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
    options: dict[str, Any] = {"backend": PARTITION, "dynamic": False}
    if rest:
        model.compile_blocks(**options)
    for block in () if rest else model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, **options)


def only(model: Transformer, block: int | None) -> Transformer:
    """The model with one of its blocks, or with none."""
    model.blocks = nn.ModuleList([] if block is None else [model.blocks[block]])
    return model


def _owned(model: nn.Module) -> list[Tensor]:
    """What lives anyway, or is counted elsewhere: parameters, buffers, seeds, weights that other ranks sent."""
    owned = [*model.parameters(), *model.buffers()]
    for linear in (module for module in model.modules() if isinstance(module, Linear)):
        if linear.draws is not None:
            owned += [linear.draws.seeds, linear.draws.token_rows, linear.draws.token_columns]
        if linear.gathered is not None:
            owned += [linear.gathered.leaf, *linear.gathered.tensors]
    return owned


def _identity(tensor: Tensor) -> int:
    """Identity of a tensor's storage: a tensor without memory has no address."""
    identity: int = StorageWeakRef(tensor.untyped_storage()).cdata
    return identity
