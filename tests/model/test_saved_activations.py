"""Norms and activations that keep codes: the plain layers at the rounded input, forward bit for bit, backward straight
through the rounding.

The reference is the plain layer with its input rounded by a hook, gradients passing it unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec_train.model.layers import GELU, LayerNorm, RMSNorm, SwiGLU
from lowprec_train.numerics.draws import Draws
from lowprec_train.numerics.formats import E2M1, E4M3
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.saved_activations import (
    QuantizedSavedInput,
    SavedActivationPolicy,
    apply_saved_activations,
    saved_inputs,
)
from lowprec_train.recipes import coat
from tests.recipes import MODELS, system

DIM, FFN, CHOICES = 64, 96, ("none", "selective", "full")
COAT = coat.saved_activations().norm
QUANTIZERS = {
    "coat": COAT,
    "groups of 32": Quantizer(E4M3, tile=(1, 32), scale=ScaleRule.POW2),
    "E2M1": Quantizer(E2M1, tile=(1, 16), scale=ScaleRule.E8M0_CEIL),
}
LAYERS: dict[str, Callable[[], QuantizedSavedInput]] = {
    "rmsnorm": lambda: RMSNorm(DIM, 1e-5),
    "layernorm": lambda: LayerNorm(DIM, 1e-5),
    "layernorm, no bias": lambda: LayerNorm(DIM, 1e-5, bias=False),
    "swiglu": lambda: SwiGLU(DIM, FFN, bias=False),
    "gelu": lambda: GELU(DIM, FFN, bias=True),
}
DTYPES = {"FP32": (torch.float32, 2e-6), "BF16": (torch.bfloat16, 4e-3)}


class Through(torch.autograd.Function):
    """x -> Q(x) in x's dtype, which holds it exactly; dx = dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer) -> Tensor:
        return quantizer(x.flatten(end_dim=-2)).dequantize().view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def round_by_hook(layer: QuantizedSavedInput, quantizer: Quantizer) -> None:
    """Rounds what the layer's non-linear part takes; the layer itself computes as if nothing were kept in codes.

    SwiGLU's halves lie interleaved, and torch's FP32 silu of a strided tensor differs in last bits from that of a
    contiguous one: its formula is said once more.
    """

    def gated(x: Tensor, draws: Draws | None = None) -> Tensor:
        both = layer.gate_up(x, draws=draws).unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = (Through.apply(part, quantizer) for part in both)
        return layer.down((F.silu(gate.float()) * up.float()).to(x.dtype), draws=draws)

    if isinstance(layer, SwiGLU):
        layer.forward = gated
    elif isinstance(layer, GELU):
        layer.up.register_forward_hook(lambda module, args, y: Through.apply(y, quantizer))
    else:
        layer.register_forward_pre_hook(lambda module, args: Through.apply(args[0], quantizer))


def twins(name: str) -> tuple[QuantizedSavedInput, QuantizedSavedInput]:
    """Two layers of the same uneven weights."""
    one, other = LAYERS[name](), LAYERS[name]()
    for parameter in one.parameters():
        parameter.data.add_(torch.empty_like(parameter).normal_(0, 0.3))
    other.load_state_dict(one.state_dict())
    return one, other


def values(dtype: torch.dtype) -> Tensor:
    """[2, 9, D]: tokens of several magnitudes, one of zeros, a channel of outliers."""
    x = torch.randn(2, 9, DIM) * torch.logspace(-2, 2, 9)[:, None]
    x[..., 5] *= 50
    x[:, 4] = 0
    return x.to(dtype)


def passes(layer: nn.Module, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(dtype))
    return y.detach(), {"x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


def close(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Each gradient, relative to its norm."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is value.dtype
        error = ((found[name].double() - value.double()).norm() / value.double().norm()).item()
        assert error <= bound, (name, error)


@pytest.mark.parametrize("how", QUANTIZERS)
@pytest.mark.parametrize("stream", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_plain_one_at_the_rounded_input(name: str, stream: str, how: str) -> None:
    (dtype, bound), quantizer = DTYPES[stream], QUANTIZERS[how]
    kept, plain = twins(name)
    kept.quantizer = quantizer
    round_by_hook(plain, quantizer)
    x = values(dtype)
    (y, found), (expected_y, expected) = passes(kept, x, dtype), passes(plain, x, dtype)
    assert y.dtype is dtype and torch.equal(y, expected_y)
    close(found, expected, bound)


class Calls(TorchDispatchMode):
    """The operations that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def as_ever(name: str, layer: Any, x: Tensor) -> Tensor:
    """The layers as they are without the choice."""
    if name == "swiglu":
        gate, up = layer.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1)
        return layer.down((F.silu(gate.float()) * up.float()).to(x.dtype))
    if name == "gelu":
        return layer.down(F.gelu(layer.up(x), approximate="tanh"))
    if name == "rmsnorm":
        return F.rms_norm(x.float(), layer.weight.shape, layer.weight, layer.eps).to(x.dtype)
    return F.layer_norm(x.float(), layer.weight.shape, layer.weight, layer.bias, layer.eps).to(x.dtype)


@pytest.mark.parametrize("stream", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_without_a_quantizer_nothing_has_changed(name: str, stream: str) -> None:
    """The same operations in the same order, and the same bits; SwiGLU's op writes its derivative in another form."""
    dtype, _ = DTYPES[stream]
    layer, x = LAYERS[name](), values(dtype)
    layer.quantizer = COAT
    layer.quantizer = None
    with Calls() as ours:
        y, found = passes(layer, x, dtype)
    layer.zero_grad()
    with Calls() as theirs:
        layer.forward = lambda x: as_ever(name, layer, x)
        expected, gradients = passes(layer, x, dtype)
    assert torch.equal(y, expected)
    if name == "swiglu":
        for each in found:
            rtol, largest = 1e-5 if dtype == torch.float32 else 2**-7, float(gradients[each].abs().max())
            torch.testing.assert_close(found[each], gradients[each], rtol=rtol, atol=1e-6 * max(1.0, largest))
        return
    assert ours.names == theirs.names
    assert all(torch.equal(found[each], gradients[each]) for each in found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("stream", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_not_finite_reaches_the_output(name: str, stream: str, bad: float) -> None:
    """In its token, forward and backward, and in no other token."""
    dtype, _ = DTYPES[stream]
    layer, x = LAYERS[name](), values(dtype)
    layer.quantizer = COAT
    x[1, 3, 20] = bad
    y, found = passes(layer, x, dtype)
    for tensor in (y, found["x"]):
        broken = ~tensor.isfinite().all(-1)
        assert broken[1, 3] and broken.sum() == 1


# --- whole models ---


def loss_and_gradients(one: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model = one.model
    model.zero_grad()
    tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(2))
    loss = model.loss(tokens, tokens.roll(-1, 1), float(tokens.numel()), draws=one.seeds.at(0, 0))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def same(a: tuple[Tensor, dict[str, Tensor]], b: tuple[Tensor, dict[str, Tensor]]) -> bool:
    return torch.equal(a[0], b[0]) and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_the_plain_one_with_its_inputs_rounded(model: str) -> None:
    """Two blocks in FP32, without FP8 GEMMs, whose codes would blow up a last bit."""
    kept, plain = (system("bf16", model) for _ in range(2))
    kept.model.dtype = plain.model.dtype = torch.float32
    apply_saved_activations(kept.model, coat.saved_activations())
    for _, layer in saved_inputs(plain.model):
        round_by_hook(layer, COAT)
    (loss, found), (expected_loss, expected) = loss_and_gradients(kept), loss_and_gradients(plain)
    assert torch.equal(loss, expected_loss)
    close(found, expected, 1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_a_policy_may_come_and_go_in_mid_run(model: str) -> None:
    one = system("fp8", model)
    results = []
    for keep in (
        SavedActivationPolicy(),
        coat.saved_activations(),
        SavedActivationPolicy(),
        SavedActivationPolicy(norm=COAT),
        coat.saved_activations(),
    ):
        apply_saved_activations(one.model, keep)
        results.append(loss_and_gradients(one))
    assert same(results[0], results[2]) and same(results[1], results[4])
    assert not same(results[0], results[1]) and not same(results[3], results[0]) and not same(results[3], results[1])


@pytest.mark.parametrize("model", MODELS)
def test_norms_and_activations_of_blocks_report_their_inputs(model: str) -> None:
    one, seen = system("coat", model), Counter[tuple[str, tuple[int, ...]]]()
    for name, layer in saved_inputs(one.model):
        layer.observer = lambda x, codes, how, name=name: seen.update([(name.split(".")[-1], tuple(x.shape))])
    loss_and_gradients(one)
    ffn, inputs = (384, 2) if model == "llama_tiny" else (512, 1)
    blocks, tokens = 2, 64
    norms = {(name, (tokens, 128)): blocks for name in ("attention_norm", "mlp_norm")}
    assert seen == norms | {("mlp", (tokens, ffn)): inputs * blocks}


@pytest.mark.parametrize("family, name", [("llama", "mlp"), ("gpt", "mlp")])
def test_a_width_that_groups_do_not_divide_is_named(build: Any, family: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"blocks.0.{name}: groups of 16 do not divide the 88 channels"):
        coat.saved_activations().check(build(family, ffn=88))
    with pytest.raises(ValueError, match="blocks.0.attention_norm: groups of 48 do not divide the 64 channels"):
        coat.saved_activations(group=48).check(build(family))
    coat.saved_activations(group=32).check(build(family))


@pytest.mark.parametrize("model", MODELS)
def test_recompute_meets_the_same_codes(model: str) -> None:
    """Losses and gradients bit for bit. `selective` makes codes of saved inputs once and those of X and W twice, `full`
    all of the forward pass twice.
    """
    results, rounded, saved = {}, {}, {}
    for choice in CHOICES:
        one = system("coat", model, f"model.recompute={choice}")
        with Calls() as calls:
            results[choice] = loss_and_gradients(one)
        rounded[choice] = sum(name.startswith("lowprec.quantize") for name in calls.names)
        saved[choice] = sum(name.startswith("lowprec.saved_codes") for name in calls.names)
    assert same(results["selective"], results["none"]) and same(results["full"], results["none"])
    inputs, linears, blocks = (4 if model == "llama_tiny" else 3), 4, 2
    forward, backward = inputs + 2 * linears, linears + 1  # x and w; dy, and the transpose of what attention returns
    assert rounded["none"] == blocks * (forward + backward)
    assert rounded["selective"] == blocks * (2 * 2 * linears + backward)
    assert saved == {"none": 0, "selective": blocks * inputs, "full": 0}
    assert rounded["full"] == rounded["none"] + blocks * forward
