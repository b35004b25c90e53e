"""Activation recomputation: what a block saves for its backward pass, and what it recomputes.

`none` saves everything. `full` saves the input of a block and recomputes the block. `selective` recomputes only cheap
operations (norms, activations, rotary embedding, residual sums, casts, decoding) and saves the outputs of expensive
ones: GEMMs, attention, and our ops `torch.ops.lowprec.*`, so that backward uses the codes of forward. All three give
the same bits: random draws are functions of tensors that do not change between forward and backward, so no random state
is saved. Under a `SavedActivationPolicy`, `selective` saves little more memory, because codes are saved anyway.

The mode is applied inside a block's forward, where it works for eager autograd and for compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowprec_train.ops  # noqa: F401  registers the operations that are named below

Recompute = Callable[..., Any]  # (function, *arguments) -> function(*arguments)

_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_mm.default,
    _aten._scaled_mm_v2.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
_DECODING = {torch.ops.lowprec.dequantize.default, torch.ops.lowprec.dequantize_bf16.default}
_DECODING |= {torch.ops.lowprec.unpack_e2m1.default, torch.ops.lowprec.unpack_ladder.default}  # larger than their codes


def keep_dear(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save outputs of GEMMs, attention and quantisation; the signature is that of torch.utils.checkpoint."""
    ours = getattr(operation, "namespace", None) == "lowprec" and operation not in _DECODING
    return CheckpointPolicy.MUST_SAVE if ours or operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def keep_all(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

RECOMPUTE: dict[str, Recompute] = {
    "none": keep_all,
    "selective": partial(_again, context_fn=partial(create_selective_checkpoint_contexts, keep_dear)),
    "full": _again,
}
