"""Bytes that one GPU sends in a step, by use.

    parameters        all-gather over dp_shard before a block computes, and again before its backward pass if it was
                      resharded in between; in each micro-batch
    gradients         reduce-scatter over dp_shard, then all-reduce over dp_replicate, in the bytes of the codec
    vectors           one FP32 all-reduce per step
    tensor parallel   rows of activations and of their gradients, counted on the meta device, in each micro-batch

Collectives are counted for the algorithms that send least: an all-gather or reduce-scatter sends (n - 1) / n of the
whole. `between_nodes` counts the share that leaves the node: 1 / node of a library's ring; `comm.nodes` for gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.collectives import (
    all_reduce_bytes,
    all_reduce_links,
    reduce_scatter_bytes,
    reduce_scatter_links,
)
from lowprec_train.comm.fsdp import Reduction
from lowprec_train.comm.grad_codec import GradCodec
from lowprec_train.comm.layout import FlatLayout, sharded_layout
from lowprec_train.numerics.formats import FP32
from lowprec_train.parallel.mesh import AXES, Sizes, groups_along, node_ranks
from lowprec_train.precision.linear import Linear
from lowprec_train.tools.estimate.saved import only
from lowprec_train.tools.estimate.subject import META, Subject, Weight

Bytes = dict[str, int]
GPUS_OF_A_NODE = 8
SCALE = 4  # bytes of a row's scale
AGAIN = {"norms", "selective"}  # of `model.recompute`: tensor-parallel ranks gather X again


def units(weights: Iterable[Weight], blocks_per_unit: int = 1) -> dict[str, tuple[Weight, ...]]:
    """Group weights by unit that is all-gathered together, as in `parallel.data.shard`, by the name of its first block,
    or "head", "embedding" or the part of the root.
    """
    found: dict[str, tuple[Weight, ...]] = {}
    for weight in weights:
        of, _, index = weight.unit.partition(".")
        first = f"{of}.{int(index) // blocks_per_unit * blocks_per_unit}" if of == "blocks" else weight.unit
        found[first] = (*found.get(first, ()), weight)
    return found


def layout(matrices: Sequence[Weight], over: Sizes, reduction: Reduction) -> FlatLayout:
    """Return the layout of a row of a unit's reduce-scatter."""
    return sharded_layout({weight.name: weight.part(over.tp) for weight in matrices}, over.dp_shard, reduction.exclude)


def traffic(subject: Subject, reduction: Reduction) -> Bytes:
    """Return the bytes that rank 0 sends in a step, without zero entries."""
    sent = {
        "parameters gathered": parameters(subject),
        "gradients scattered": gradients(subject, reduction, reduce_scatter_bytes, subject.sizes.dp_shard),
        "gradients between replicas": gradients(subject, reduction, all_reduce_bytes, subject.sizes.dp_replicate),
        "gradients of vectors": vectors(subject),
    }
    sent |= {f"tensor parallel, {what}": size for what, size in activations(subject).items()}
    return {what: size for what, size in sent.items() if size}


def between_nodes(subject: Subject, reduction: Reduction) -> Bytes:
    """Return the bytes of `traffic` that rank 0 sends through its NIC to other nodes of `node_size` GPUs."""
    sent, over = traffic(subject, reduction), subject.sizes
    node = {axis: node_ranks(groups_along(over, axis), node_size(reduction)) or 1 for axis in AXES}

    def scattered(codec: GradCodec, row: FlatLayout, ranks: int) -> int:
        return reduce_scatter_links(codec, row, ranks, node["dp_shard"]).nic

    def summed(codec: GradCodec, row: FlatLayout, ranks: int) -> int:
        return all_reduce_links(codec, row, ranks, node["dp_replicate"]).nic

    found = {
        "parameters gathered": _of_ring(sent.get("parameters gathered", 0), over.dp_shard, node["dp_shard"]),
        "gradients scattered": gradients(subject, reduction, scattered, over.dp_shard),
        "gradients between replicas": gradients(subject, reduction, summed, over.dp_replicate),
    }
    found |= {what: _of_ring(size, over.tp, node["tp"]) for what, size in sent.items() if what.startswith("tensor")}
    vectors_node = min(node_size(reduction), over.processes)
    found["gradients of vectors"] = _of_ring(sent.get("gradients of vectors", 0), over.processes, vectors_node)
    return {what: found[what] for what in sent if found[what]}


def node_size(reduction: Reduction) -> int:
    """Return the GPUs per node: from the configuration, else those that NVLink connects in a common server."""
    return reduction.node_size or GPUS_OF_A_NODE


def _of_ring(total: int, ranks: int, node: int) -> int:
    return total // node if node < ranks else 0


def parameters(subject: Subject) -> int:
    """Return the bytes of the all-gathers of all micro-batches, in the all-gather format of each weight."""
    over, total = subject.sizes, 0
    for weight in (w for w in subject.weights if w.matrix):
        total += (2 if subject.gathered_twice(weight) else 1) * (over.dp_shard - 1) * subject.sent_bytes(weight)
    return total * subject.micro_batches


def gradients(
    subject: Subject, reduction: Reduction, sent_by: Callable[[GradCodec, FlatLayout, int], int], ranks: int
) -> int:
    """Return the bytes for gradients of matrices along one axis of `ranks`.

    sent_by: `reduce_scatter_bytes` or `all_reduce_bytes`.
    """
    if ranks == 1:
        return 0
    matrices = units((w for w in subject.weights if w.matrix), subject.run.parallel.blocks_per_unit)
    rows = (layout(unit, subject.sizes, reduction) for unit in matrices.values())
    sums = subject.micro_batches if subject.run.parallel.grad_reduce == "every_microbatch" else 1
    return sums * sum(sent_by(reduction.codec, row, ranks) for row in rows)


def vectors(subject: Subject) -> int:
    """Return the bytes for gradients of norms and biases, reduced once per step over all ranks."""
    count, ranks = sum(math.prod(w.shape) for w in subject.weights if not w.matrix), subject.sizes.processes
    if ranks == 1 or not count:
        return 0
    return all_reduce_bytes(BlockScaledCodec(FP32), FlatLayout.plain(count), ranks)


def activations(subject: Subject) -> Bytes:
    """Return the bytes of activations per step between tensor-parallel ranks."""
    if subject.sizes.tp == 1:
        return {}
    kinds = tuple(zip(subject.kinds(), subject.recompute, strict=True))
    rest = _sent(subject, None)
    blocks = {kind: _sent(subject, *kind) for kind in dict.fromkeys(kinds)}
    found = {
        what: subject.micro_batches * (of_rest + sum(blocks[kind][what] - of_rest for kind in kinds))
        for what, of_rest in rest.items()
    }
    if not AGAIN.isdisjoint(subject.recompute):
        found["gather"] += subject.micro_batches * _gathered_again(subject)
    return found


def _sent(subject: Subject, block: int | None, recompute: str = "none") -> Bytes:
    """Return the bytes of a micro-batch for the model with one block, or none: eager forward and backward pass, without
    what selective recomputation repeats.
    """
    model = only(subject.model("full" if recompute == "full" else "none"), block)
    before = dict(subject.group.sent)
    subject.loss(model, subject.run.micro_batch).backward()
    return {what: size - before[what] for what, size in subject.group.sent.items()}


def _gathered_again(subject: Subject) -> int:
    """Return the bytes of a micro-batch for rows of X, or their codes, that recomputed blocks gather again."""
    model, size = subject.model("none"), subject.sizes.tp
    sent = 0
    blocks = [block for block, how in zip(model.blocks, subject.recompute, strict=True) if how in AGAIN]
    for linear in (module for block in blocks for module in block.modules() if isinstance(module, Linear)):
        if linear.split is None or linear.split.dim != 0:
            continue
        plan = linear.plan(subject.tokens, model.dtype, META)
        if plan.gathers_rows:
            assert plan.fprop.a.quantizer is not None
            sent += linear.in_features + (0 if plan.fprop.a.quantizer.tile[0] == -1 else SCALE)
        else:
            sent += linear.in_features * model.dtype.itemsize
    return (size - 1) * (subject.tokens // size) * sent
