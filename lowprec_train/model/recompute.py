"""Activation recomputation: what a block saves for its backward pass, and what it recomputes.

`none` saves everything that no op makes again on its way (`Linear.saves_norm_input`). `full` saves the input of a block
and recomputes the block. `selective` saves the outputs of GEMMs, of attention and of collectives, and recomputes
everything else, because it is cheap: norms, activations, residual sums, casts, rotations, and the codes of X and of W.
Compiled, it saves queries and keys after the rotary embedding, which take the same memory, unless they have norms.
Tensor-parallel ranks gather X or its codes again, because the rows of all ranks are as many times larger as there are
ranks. `norms` recomputes less: norms, and the codes of what norms and attention return. It saves what the last linear
of a block takes and the codes of W (`group.kept`), but eager it is as `selective`. Where linears can round X again from
what norms and attention save for themselves (`Linear.rounds_again`), a compiled block does only that, and nothing else
is recomputed. All give the same bits: rounding is deterministic or draws from tensors that do not change between
forward and backward, so no random state is saved. Inductor computes fused operations in FP32 and rounds what it saves,
so its losses differ between the modes by what compiled and eager losses differ, 1e-5 of a loss.

Norms and activations under a `SavedActivationPolicy` compute from codes, which are smaller than the output of the GEMM
before them. Under `selective` their codes are saved instead of it, and what they compute is recomputed from the codes
(`QuantizedSavedInput.recomputes`).

A compiler saves an output only if the backward pass needs it, so the product of a GEMM in FP32 that is rounded to BF16
is saved in BF16. Eager, every listed output is saved; a product in FP32 is then saved in FP32.

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

_aten, _ours = torch.ops.aten, torch.ops.lowprec
_GEMMS = {
    _aten.mm.default,
    _aten.mm.dtype,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._int_mm.default,
    _aten._scaled_mm.default,
    _aten._scaled_mm_v2.default,
    _ours.scaled_mm.default,
    _ours.block_scaled_mm.default,
    _ours.bf16_mm.default,
}
_ATTENTION = {
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
_KEPT = _GEMMS | _ATTENTION | {_ours.saved_codes.default, _ours.group_codes.default}
_COLLECTIVES = ("_c10d_functional", "lowprec_estimate")  # namespaces: of torch, and without processes
_REPEATED = ("all_gather_again", "gathered_again")  # of X or its codes: tp times as large as a rank's rows
_LAST_ROUNDING = torch.ops.prims.convert_element_type.default  # of a product, or of a sum over ranks: `group.rounded`


def keep_dear(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save outputs of GEMMs, attention and collectives, and codes of saved inputs; the signature is that of
    torch.utils.checkpoint.
    """
    collective = getattr(operation, "namespace", None) in _COLLECTIVES and operation._opname not in _REPEATED
    kept = operation in _KEPT or collective
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def keep_rounded(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """As `keep_dear`, and allow a compiler to save a product or a sum of ranks after its last rounding."""
    if operation is _LAST_ROUNDING:
        return CheckpointPolicy.MUST_SAVE
    return keep_dear(context, operation, *args, **kwargs)


def keep_all(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def selective(function: Callable[..., Any], *args: Any) -> Any:
    policy = keep_rounded if torch.compiler.is_compiling() else keep_dear
    return _again(function, *args, context_fn=partial(create_selective_checkpoint_contexts, policy))


def norms(function: Callable[..., Any], *args: Any) -> Any:
    """`selective` in a block whose linears mark what else is saved (`Linear.keeps_x`, `Linear.keeps_w`)."""
    return selective(function, *args)


_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

RECOMPUTE: dict[str, Recompute] = {"none": keep_all, "norms": norms, "selective": selective, "full": _again}
