"""Activation recomputation: what a block saves for its backward pass, and what it computes again.

`none` keeps everything. `full` keeps a block's input and runs the block again. `selective` runs again only what is
cheap (norms, activations, rotary, residual sums, casts, decoding) and keeps what is dear: the outputs of GEMMs, of
attention, and of our own operations, `torch.ops.lowprec.*`, so that backward meets the very codes that forward made.
The three give the same bits: all draws are functions of tensors that do not change between forward and backward, so no
random state is saved. Under a `SavedActivationPolicy` it has little left
to drop: the codes are what it would save.

The choice sits inside a block's forward, where both eager autograd and a compiled graph see it.
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
    """Keep GEMMs, attention and quantisation; the signature is torch.utils.checkpoint's."""
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
