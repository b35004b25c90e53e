"""The rows of `lowprec bench kernels` for norms and activations, most of which save the codes of their input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowprec_train.ops import library  # noqa: F401  registers torch.ops.lowprec
from lowprec_train.tools.bench.case import Case, Inputs, values

EPS, KEPT = 1e-5, ("E4M3", 16)  # format and group of the saved codes
ops = torch.ops.lowprec


def _kept(op: str, *of_matrix: int) -> Callable[[int, int, torch.device], Inputs]:
    """Return a function that makes the inputs of a backward op: dy, and its forward op's outputs at `of_matrix`."""

    def made(m: int, k: int, device: torch.device) -> Inputs:
        doubled = 2 * k if op == "quantized_gated_silu" else k
        x = torch.randn(m, doubled, device=device, dtype=torch.bfloat16)
        weight = (torch.ones(k, device=device), None, EPS, False) if op == "quantized_norm" else ()
        outputs = getattr(ops, op)(x, *weight, *KEPT)
        return torch.randn_like(outputs[0]), *(outputs[place] for place in of_matrix), *weight[:1]

    return made


def _backward(name: str, op: str, *of_matrix: int) -> Case:
    """Return the backward case of an activation; arguments as for `_kept`."""
    call = getattr(ops, f"{op}_backward")
    inputs = _kept(op, *of_matrix)
    return Case(name=name, op=f"{op}_backward", inputs=inputs, call=lambda *a: call(*a, *KEPT), shapes=("ffn",))


def _gradients_of_heads(m: int, k: int, device: torch.device) -> Inputs:
    """Gradients of queries, keys and values of k columns, and angles of m tokens."""
    parts = (torch.randn(m, k, device=device, dtype=torch.bfloat16) for _ in range(3))
    return *parts, *torch.rand(2, m, 64, device=device).unbind()


def _weighted(m: int, k: int, device: torch.device) -> Inputs:
    return torch.randn(m, k, device=device, dtype=torch.bfloat16), torch.ones(k, device=device)


def _half_and_whole(m: int, k: int, device: torch.device) -> Inputs:
    """dy [m, k] and gate_up [m, 2 k]."""
    gate_up = torch.randn(m, 2 * k, device=device, dtype=torch.bfloat16)
    return torch.randn(m, k, device=device, dtype=torch.bfloat16), gate_up


def _of_codes(name: str) -> Iterator[Case]:
    """Yield the two passes of norms and activations that recompute y from codes."""

    def coded(ways: int) -> Callable[[int, int, torch.device], Inputs]:
        def made(m: int, k: int, device: torch.device) -> Inputs:
            x = torch.randn(m, ways * k, device=device, dtype=torch.bfloat16)
            return *ops.group_codes(x, *KEPT, ways), torch.ones(k, device=device)

        return made

    def norm(codes: Tensor, exponents: Tensor, weight: Tensor) -> Any:
        return ops.norm_of_codes(codes, exponents, weight, None, EPS, False, *KEPT, torch.bfloat16)

    def gated(codes: Tensor, exponents: Tensor, _: Tensor) -> Any:
        return ops.gated_silu_of_codes(codes, exponents, *KEPT, torch.bfloat16)

    def gelu(codes: Tensor, exponents: Tensor, _: Tensor) -> Any:
        return ops.gelu_of_codes(codes, exponents, *KEPT, torch.bfloat16)

    one = lambda x: ops.group_codes(x, *KEPT, 1)  # noqa: E731
    two = lambda x: ops.group_codes(x, *KEPT, 2)  # noqa: E731
    yield Case(name=name, op="group_codes", inputs=values(), call=one, shapes=("hidden",))
    yield Case(name=f"{name}, two ways", op="group_codes", inputs=values(), call=two, shapes=("gate_up",))
    yield Case(name=name, op="norm_of_codes", inputs=coded(1), call=norm, shapes=("hidden",))
    yield Case(name=name, op="gated_silu_of_codes", inputs=coded(2), call=gated, shapes=("ffn",))
    yield Case(name=name, op="gelu_of_codes", inputs=coded(1), call=gelu, shapes=("ffn",))


def producers() -> Iterator[Case]:
    """Yield norms and activations; they read their input once."""
    hidden, ffn, gate_up, name = ("hidden",), ("ffn",), ("gate_up",), "E4M3 in 16"
    group = (KEPT[0], (1, KEPT[1]), "POW2", 1.0, 0)
    yield Case(name="E4M3 1x16", op="saved_codes", inputs=values(), call=lambda x: ops.saved_codes(x, *group))
    yield Case(name="", op="gated_silu", inputs=values(), call=lambda x: ops.gated_silu(x), shapes=gate_up)
    yield Case(
        name="",
        op="gated_silu_backward",
        inputs=_half_and_whole,
        call=lambda dy, x: ops.gated_silu_backward(dy, x),
        shapes=ffn,
    )

    ladder = (None, 128, 0.125, (1, 16), "mse", 11, True)
    yield Case(
        name="with rotated FOLD3 codes, and a copy of dy",  # over which it writes codes
        op="gated_silu_backward_ladder",
        inputs=_half_and_whole,
        call=lambda dy, x: ops.gated_silu_backward_ladder(dy.clone(), x, *ladder),
        shapes=ffn,
    )

    yield Case(
        name="heads of 128",
        op="rotary_backward",
        inputs=_gradients_of_heads,
        call=lambda *of: ops.rotary_backward(*of),
        shapes=hidden,
    )
    yield Case(
        name="heads of 128, with rotated FOLD3 codes",
        op="rotary_backward_ladder",
        inputs=_gradients_of_heads,
        call=lambda *of: ops.rotary_backward_ladder(*of, *ladder),
        shapes=hidden,
    )

    def norm(x: Tensor, weight: Tensor) -> Any:
        return ops.quantized_norm(x, weight, None, EPS, False, *KEPT)

    def norm_backward(dy: Tensor, codes: Tensor, exponents: Tensor, weight: Tensor) -> Any:
        return ops.quantized_norm_backward(dy, codes, exponents, weight, False, EPS, False, *KEPT)

    yield Case(name=name, op="quantized_norm", inputs=_weighted, call=norm, shapes=hidden)
    made = _kept("quantized_norm", 2, 3)
    yield Case(name=name, op="quantized_norm_backward", inputs=made, call=norm_backward, shapes=hidden)
    yield Case(
        name=name,
        op="quantized_gated_silu",
        inputs=values(),
        call=lambda x: ops.quantized_gated_silu(x, *KEPT),
        shapes=gate_up,
    )
    yield Case(name=name, op="quantized_gelu", inputs=values(), call=lambda x: ops.quantized_gelu(x, *KEPT), shapes=ffn)
    yield from _of_codes(name)
    yield _backward(name, "quantized_gated_silu", 2, 3, 4, 5)
    yield _backward(name, "quantized_gelu", 2, 3)
