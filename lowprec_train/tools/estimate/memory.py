"""Estimate the memory of one GPU at each moment of a step, and its peak.

Persistent: parameters, optimizer states, and gradients between micro-batches. Temporary: all-gathered weights, tensors
saved by autograd (`saved.py`), gradients until they are reduced. The backward pass of a block frees its saved tensors
and creates its gradients, so the sum is computed from the loss back to the first block:

    block i:    persistent + saved by blocks 0..i + gradients before it + temporary tensors of block i
    reduction:  persistent + saved by blocks 0..i-1 + gradients so far + gradients of block i as made + messages

Not included: CUDA's context, NCCL's buffers, workspaces of libraries (together 1 to 2 GiB), fragmentation, batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lowprec_train.comm.collectives import reduce_scatter_bytes
from lowprec_train.comm.fsdp import Reduction
from lowprec_train.parallel.mesh import groups_along, node_ranks
from lowprec_train.tools.estimate import offload, traffic
from lowprec_train.tools.estimate.saved import Counter, SavedBytes, SavedParts
from lowprec_train.tools.estimate.subject import Subject, Weight
from lowprec_train.train import build_optimizer

FP32, BF16 = 4, 2
SUM = FP32  # bytes per element of a gradient that is summed or waits for its update
BLOCKS_GATHERED = 2  # the current block and the next one
Moment = dict[str, int]


_RESTS: dict[tuple[object, ...], SavedBytes] = {}
_BLOCKS: dict[tuple[object, ...], tuple[SavedBytes, ...]] = {}


def saved_bytes(subject: Subject, recompute: str) -> SavedParts:
    """Return the bytes that autograd saves if all blocks recompute as `recompute` says. Cached for all sizes of a
    micro-batch and all layouts with the same tensor-parallel shards. With `full`, a block saves only its input, so
    blocks need no count.
    """
    run, sizes = subject.run, tuple(subject.gathered_bytes(weight) for weight in subject.weights)
    model = replace(run.model, recompute="none", recompute_layers=None, full_recompute_layers=0)
    key = (repr((model, run.precision, run.data, run.compile)), subject.phase, subject.sizes.tp, sizes)
    if key not in _RESTS:
        _RESTS[key] = Counter(subject, "none").rest()
    if (*key, recompute) not in _BLOCKS:
        _BLOCKS[*key, recompute] = _count(subject, recompute)
    return SavedParts(rest=_RESTS[key], blocks=_BLOCKS[*key, recompute])


def _count(subject: Subject, recompute: str) -> tuple[SavedBytes, ...]:
    kinds = subject.kinds()
    if recompute == "full":
        kept = 0 if subject.run.model.offload else BF16 * subject.run.model.dim / subject.sizes.tp
        return (SavedBytes(token=kept, fixed=0),) * len(kinds)
    counts = Counter(subject, recompute)
    blocks = {kind: counts.block(kind) for kind in dict.fromkeys(kinds)}
    return tuple(blocks[kind] for kind in kinds)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """moments: label -> bytes by use, from the loss backwards. saved: tensors saved by autograd."""

    moments: dict[str, Moment]
    saved: SavedParts

    @property
    def peak(self) -> tuple[str, Moment]:
        """The moment with the largest sum."""
        return max(self.moments.items(), key=lambda item: sum(item[1].values()))

    @property
    def bytes(self) -> int:
        """Bytes at the peak."""
        return sum(self.peak[1].values())


def memory(subject: Subject, reduction: Reduction) -> Memory:
    """Return the memory of rank 0, which has the largest shards."""
    again, parts = saved_bytes(subject, "none"), {how: saved_bytes(subject, how) for how in set(subject.recompute)}
    saved = replace(again, blocks=tuple(parts[how].blocks[index] for index, how in enumerate(subject.recompute)))
    standing = {
        "parameters": parameters(subject),
        "optimizer states": states(subject) - offload.states_on_host(subject),
    }
    if moved := offload.slots(subject) + offload.buffers(subject):
        standing["on the way to and from the host"] = moved
    if rows := peer_rows(subject, reduction):
        standing["gradients that other GPUs read"] = rows
    moments = {label: standing | changing for label, changing in _backward(subject, reduction, saved, again)}
    return Memory(moments=moments, saved=saved)


def parameters(subject: Subject) -> int:
    """Return the bytes of this rank's parameters, as they are stored."""
    return sum(math.prod(w.mine(subject.sizes)) * subject.stored_size(w) for w in subject.weights)


def states(subject: Subject) -> int:
    """Return the bytes of moments and master weights as the codecs store them."""

    def of(weight: Weight) -> int:
        codecs, mine = subject.codecs_of(weight), weight.mine(subject.sizes)
        if weight.cut == 1:  # groups are those of the whole row
            return codecs.state_bytes((mine[0], *weight.shape[1:])) // subject.sizes.tp
        return codecs.state_bytes(mine)

    return sum(map(of, subject.weights))


def _backward(
    subject: Subject, reduction: Reduction, saved: SavedParts, again: SavedParts
) -> Iterator[tuple[str, Moment]]:
    """Yield the bytes at each moment of the backward pass, from the loss to the first block."""
    tokens, tp, layers = subject.tokens, subject.sizes.tp, len(saved.blocks)
    units, grads = traffic.units(subject.weights), Gradients(subject, reduction)
    head = tuple(units.get("head", ()))
    whole = {
        "saved by blocks": sum(block.of(tokens) for block in saved.blocks),
        "embedding, head and logits": saved.rest.of(tokens),
        "weights gathered": gathered(subject, last_block=layers - 1),
    }
    if subject.run.model.loss_chunk is not None:
        yield "chunks of the loss", {"gradients": grads.standing, **whole, "at work": _chunk(subject)}
    made = (0, 0) if grads.reduces else (grads.made(head), grads.alone(head))
    at_work = BF16 * tokens * subject.run.model.dim // tp + made[1]
    yield "loss", {"gradients": grads.standing + made[0], **whole, "at work": at_work}
    if grads.reduces:
        freed = {"embedding, head and logits": 0, "at work": grads.in_reduction(head)}
        yield "reduction of head", {"gradients": grads.standing, **whole} | freed
    done, before, together = head, head, subject.run.parallel.blocks_per_unit
    unit: tuple[Weight, ...] = ()
    for index in reversed(range(layers)):
        here = tuple(units[f"blocks.{index}"])
        recomputed = again.blocks[index].of(tokens) - saved.blocks[index].of(tokens)
        largest = max(sum(w.part(tp)) for w in here if w.matrix)
        below = sum(block.of(tokens) for block in saved.blocks[:index])
        moment = {
            "gradients": grads.standing + grads.made(done if grads.reduces else done + here),
            "saved by blocks": below + saved.blocks[index].of(tokens) + recomputed,
            "weights gathered": gathered(subject, last_block=index),
            "at work": BF16 * tokens * largest + (grads.whole(before + unit) if grads.reduces else grads.alone(here)),
        }
        yield f"block {index}", moment
        unit = here + unit
        if index % together and grads.reduces:
            continue  # gradients are reduced after the first block of a unit
        done, before, unit = done + unit, unit, ()
        if grads.reduces:
            after = {"gradients": grads.standing + grads.made(done), "saved by blocks": below}
            yield f"reduction of block {index}", moment | after | {"at work": grads.in_reduction(before)}


def _chunk(subject: Subject) -> int:
    """Return the bytes of the head's gradient, summed in FP32, with the logits of a chunk or later with its BF16 copy,
    which is counted as saved.
    """
    run, tp = subject.run.model, subject.sizes.tp
    chunk = min(run.loss_chunk or subject.tokens, subject.tokens)
    weight, logits = run.vocab_size * run.dim // tp, BF16 * chunk * run.vocab_size // tp
    return FP32 * weight + max(0, logits - BF16 * weight)


def gathered(subject: Subject, *, last_block: int) -> int:
    """Return the bytes of weights that are all-gathered while the backward pass of `last_block` computes, and of this
    rank's shards in the format that is sent.
    """
    if subject.sizes.dp_shard == 1:
        return 0
    own = any(subject.gather_format(weight) is not None for weight in subject.weights)
    rounded = sum(map(subject.rounded_bytes, subject.weights))
    together = subject.run.parallel.blocks_per_unit
    units = traffic.units([w for w in subject.weights if w.matrix and not w.forward_only], together)
    sizes = {name: sum(map(subject.gathered_bytes, unit)) for name, unit in units.items()}
    blocks = [size for name, size in sizes.items() if name.startswith("blocks.")]
    staying = sum(sizes.values()) - sum(blocks)
    if subject.run.parallel.reshard_after_forward:
        buffers = BLOCKS_GATHERED if own else BLOCKS_GATHERED + 1  # FSDP2's own all-gather has a receive buffer
        return rounded + staying + buffers * max(blocks, default=0)
    return rounded + staying + sum(blocks[: last_block // together + 1])


def peer_rows(subject: Subject, reduction: Reduction) -> int:
    """Return the bytes of the buffer that the other GPUs read: the rows of the largest unit."""
    ranks, together = subject.sizes.dp_shard, subject.run.parallel.blocks_per_unit
    if ranks == 1 or not subject.run.parallel.symmetric_memory:
        return 0
    units = traffic.units([w for w in subject.weights if w.matrix], together).values()
    return ranks * max(reduction.codec.row_bytes(traffic.layout(unit, subject.sizes, reduction)) for unit in units)


def sent_unchanged(subject: Subject, reduction: Reduction, matrices: Sequence[Weight]) -> bool:
    """Return whether the gradients of a unit's matrices are sent from where they lie (`GradCodec.sends_unchanged`)."""
    codec, ranks = reduction.codec, subject.sizes.dp_shard
    size = BF16 if codec.sends_bf16 else FP32 if codec.exact else None
    made = {subject.gradient_size(w, codec) for w in matrices}
    equal = all(w.part(subject.sizes.tp)[0] % ranks == 0 for w in matrices)
    in_node = node_ranks(groups_along(subject.sizes, "dp_shard"), traffic.node_size(reduction)) or 1
    return made == {size} and equal and in_node in (1, ranks)  # else they are first summed inside each node


class Gradients:
    """Bytes of gradients between the first backward pass and the update.

    standing: bytes of accumulated gradients with several micro-batches: of whole gradients if they are reduced only
    after the last one, else of this rank's shards; in FP32 for any parameter dtype, or in the codes of
    `optim.grad_accumulation`. Gradients of a single micro-batch on one GPU have the dtype of their parameter.
    """

    def __init__(self, subject: Subject, reduction: Reduction) -> None:
        self._subject, self._reduction, self._sizes = subject, reduction, subject.sizes
        self._codec, several = build_optimizer.grad_accumulation(subject.run), subject.micro_batches > 1
        self._in_backward = subject.run.optim.in_backward
        late = several and self._sizes.dp > 1 and subject.run.parallel.grad_reduce == "last_microbatch"
        self._wide = several or self._sizes.dp > 1
        whole = [self._bytes(w, w.part(self._sizes.tp), SUM) for w in subject.weights if w.matrix]
        self.standing = 0 if not several else sum(whole) if late else self._parts(subject.weights)

    def made(self, weights: Sequence[Weight]) -> int:
        """Return the bytes beyond `standing` after the backward pass has computed the gradients of these weights."""
        if self._in_backward:
            after = self._sizes.dp > 1 or self._subject.run.max_grad_norm  # vectors are updated after the pass
            weights = [w for w in weights if not w.matrix] if after else []
        return 0 if self.standing else self._parts(weights)

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced over data-parallel ranks, unit by unit."""
        return self._sizes.dp > 1

    def alone(self, weights: Sequence[Weight]) -> int:
        """Return the bytes of the gradient that is handled, on one GPU, where they are handled one by one."""
        taken = self.standing or self._in_backward or self._codec is not None
        return max((self._alone(w) for w in weights if w.matrix), default=0) if taken else 0

    def whole(self, weights: Sequence[Weight]) -> int:
        """Return the bytes of a unit's gradients as they are made. They are freed when the next unit is reduced."""
        tp, codec, matrices = self._sizes.tp, self._reduction.codec, [w for w in weights if w.matrix]
        return sum(math.prod(w.part(tp)) * self._subject.gradient_size(w, codec) for w in matrices)

    def in_reduction(self, weights: Sequence[Weight]) -> int:
        """Return the bytes of a unit's gradients as they are made, and of what a rank sends, if that is something else,
        and receives in their reduction, its own part included.
        """
        matrices, ranks = [w for w in weights if w.matrix], self._sizes.dp_shard
        if ranks == 1 or not matrices:
            return self.whole(weights)
        layout = traffic.layout(matrices, self._sizes, self._reduction)
        sent = reduce_scatter_bytes(self._reduction.codec, layout, ranks)
        unchanged = sent_unchanged(self._subject, self._reduction, matrices)
        buffers = 1 if unchanged else 0 if self._subject.run.parallel.symmetric_memory else 2
        return self.whole(weights) + buffers * sent * ranks // (ranks - 1)

    def _alone(self, weight: Weight) -> int:
        """Return the bytes of a gradient from autograd, and of an FP32 copy if one is made."""
        made = self._subject.value_size(weight)
        copied = made != FP32 and (self._wide or self._codec is not None)
        return math.prod(weight.part(self._sizes.tp)) * (made + SUM if copied else made)

    def _parts(self, weights: Sequence[Weight]) -> int:
        sizes = {w: SUM if self._wide else self._subject.value_size(w) for w in weights}
        return sum(self._bytes(w, w.mine(self._sizes), size) for w, size in sizes.items())

    def _bytes(self, weight: Weight, shape: tuple[int, ...], size: int) -> int:
        if self._codec is None or not weight.matrix:
            return math.prod(shape) * size
        return self._codec.state_bytes(shape)
