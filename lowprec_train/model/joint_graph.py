"""Adapter to the compiler's joint graph of a forward and a backward pass (torch 2.11 to 2.13): which of its tensors are
saved.

The policy of `model.recompute` names operations, so it cannot tell the codes of X from those of W, which one operation
makes. `group.kept` marks tensors instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

MARK = torch.ops.prims.convert_element_type.default  # to the dtype that a tensor has


class KeepMarked(CustomGraphPass):
    """A pass over a joint graph: what `group.kept` marks is saved, although the policy does not name its operation.

    A mark is an operation that does nothing, which Inductor removes before it decides what is saved. Here it is
    removed, and a marked tensor is saved or not as without recomputation. So is what only marked tensors need: torch
    saves the inputs of each operation that it is told to recompute, even if the backward pass does not use the result.
    """

    def __call__(self, graph: Graph) -> None:
        kept: set[Node] = set()
        for node in list(graph.nodes):
            source = node.args[0] if node.target is MARK else None
            if not isinstance(source, Node) or node.meta["val"].dtype != source.meta["val"].dtype:
                continue  # not a mark: a rounding stays
            if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
                kept.add(source)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        numbers = _value_numbers(graph)
        recomputed = {numbers[node] for node in _recomputed(graph, kept)}
        for node in graph.nodes:
            if node.meta.get("recompute") == CheckpointPolicy.PREFER_RECOMPUTE and numbers[node] not in recomputed:
                del node.meta["recompute"]

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def keep_marked() -> None:
    """Let Inductor run the pass `KeepMarked`, in this process."""
    torch._inductor.config.joint_custom_pre_pass = KeepMarked()


def _recomputed(graph: Graph, kept: set[Node]) -> set[Node]:
    """Return the operations from which the backward pass needs a result that is not saved."""
    backward = {node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("tangents")}
    for node in graph.nodes:
        if node.op == "call_function" and not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    needed, left = set(backward), list(backward)
    while left:
        for node in left.pop().all_input_nodes:
            saved = node in kept or node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
            if not saved and node.op == "call_function" and node not in needed:
                needed.add(node)
                left.append(node)
    return needed - backward


def _value_numbers(graph: Graph) -> dict[Node, int]:
    """Return a number for each node, the same for operations on the same inputs: the partition merges those."""
    numbers: dict[Node, int] = {}
    known: dict[tuple[Any, str], int] = {}
    for node in graph.nodes:
        inputs = str(map_arg((node.args, node.kwargs), lambda each: numbers[each])) if node.op != "output" else ""
        target = node.target if node.op == "call_function" else node
        numbers[node] = known.setdefault((target, inputs), len(known))
    return numbers


def partitioned(module: GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend of torch.compile: partitions forward and backward as Inductor does, and runs both op by op."""

    cut = partial(min_cut_rematerialization_partition, compiler="inductor")

    def partition(joint: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        KeepMarked()(joint.graph)
        return cut(joint, *args, **kwargs)

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, decompositions=select_decomp_table, partition_fn=partition
    )(module, inputs)
    return compiled
