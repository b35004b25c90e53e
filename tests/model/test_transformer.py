"""The decoder against an FP64 re-implementation, and the properties that a decoder must have."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.model.transformer import Transformer
from lowprec_train.precision.linear import Linear

BOTH = pytest.mark.parametrize("family", ["llama", "gpt"])


# --- the reference: one token at a time where that is plainest, complex numbers for rotary, one loop per head ---
def reference_norm(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    if f"{name}.bias" in p:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"]
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def reference_linear(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def turn(x_TH: Tensor, theta: float) -> Tensor:
    half = x_TH.shape[1] // 2
    angles = [[t * theta ** (-i / half) for i in range(half)] for t in range(x_TH.shape[0])]
    phase = torch.polar(torch.ones(len(angles), half, dtype=torch.float64), torch.tensor(angles, dtype=torch.float64))
    turned = torch.complex(x_TH[:, :half], x_TH[:, half:]) * phase
    return torch.cat((turned.real, turned.imag), dim=1)


def reference_attention(x_TD: Tensor, p: dict[str, Tensor], name: str, model: Transformer, rotary: bool) -> Tensor:
    tokens, group, width = x_TD.shape[0], model.heads // model.kv_heads, model.head_dim
    qkv = reference_linear(x_TD, p, f"{name}.qkv").reshape(tokens, model.kv_heads, group + 2, width)
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    heads = []
    for head in range(model.heads):
        rows = qkv[:, head // group]
        q, k, v = rows[:, head % group], rows[:, group], rows[:, group + 1]
        if rotary:
            q, k = turn(q, 10000.0), turn(k, 10000.0)
        heads.append((q @ k.T / math.sqrt(width)).masked_fill(later, -math.inf).softmax(-1) @ v)
    return reference_linear(torch.cat(heads, dim=-1), p, f"{name}.out")


def reference_mlp(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    if f"{name}.gate_up.weight" in p:
        both = reference_linear(x, p, f"{name}.gate_up")
        gate, up = both[..., 0::2], both[..., 1::2]
        return reference_linear(gate / (1 + (-gate).exp()) * up, p, f"{name}.down")
    up = reference_linear(x, p, f"{name}.up")
    inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
    return reference_linear(0.5 * up * (1 + inner.tanh()), p, f"{name}.down")


def reference_logits(tokens_T: Tensor, p: dict[str, Tensor], model: Transformer) -> Tensor:
    x = p["embedding.weight"][tokens_T]
    rotary = "position.weight" not in p
    if not rotary:
        x = x + p["position.weight"][: len(tokens_T)]
    for i in range(model.layers):
        block = f"blocks.{i}"
        x = x + reference_attention(
            reference_norm(x, p, f"{block}.attention_norm"), p, f"{block}.attention", model, rotary
        )
        x = x + reference_mlp(reference_norm(x, p, f"{block}.mlp_norm"), p, f"{block}.mlp")
    return reference_norm(x, p, "norm") @ p.get("head.weight", p["embedding.weight"]).T


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("llama", {"kv_heads": 4}), ("llama", {"kv_heads": 1}), ("gpt", {}), ("gpt", {"tied": False})],
)
def test_logits_loss_and_gradients_equal_fp64_reference(build, batch, family: str, changes: dict[str, Any]) -> None:
    model = build(family, dtype=torch.float32, **changes)
    tokens, targets = batch()
    p = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}

    logits = model.logits(tokens)
    expected = torch.stack([reference_logits(row, p, model) for row in tokens])
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)

    loss = model.loss(tokens, targets, 7.0)
    loss.backward()
    expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum") / 7.0
    expected_loss.backward()
    assert loss.dtype is torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        error = (parameter.grad.double() - p[name].grad).norm() / p[name].grad.norm()
        assert error < 2e-5, f"{name}: {error}"


@BOTH
def test_bf16_stream_is_close_to_fp32(build, batch, family: str) -> None:
    tokens, targets = batch()
    full, half = build(family, dtype=torch.float32), build(family)
    loss = half.loss(tokens, targets, 1.0)
    loss.backward()
    assert half.hidden(tokens).dtype is torch.bfloat16 and half.logits(tokens).dtype is torch.bfloat16
    assert {parameter.grad.dtype for parameter in half.parameters()} == {torch.float32}
    assert loss.item() == pytest.approx(full.loss(tokens, targets, 1.0).item(), rel=0.02)


@BOTH
def test_a_later_token_changes_nothing_before_it(build, batch, family: str) -> None:
    model, (tokens, _) = build(family), batch()
    changed = tokens.clone()
    changed[:, 15] = (changed[:, 15] + 1) % model.vocab_size
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.equal(before[:, :15], after[:, :15])
    assert not torch.equal(before[:, 15:], after[:, 15:])


@BOTH
def test_documents_in_one_sequence_equal_documents_apart(build, family: str) -> None:
    model = build(family, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randint(0, model.vocab_size, (1, length), generator=generator) for length in (7, 1, 16)]
    documents = torch.cat([torch.full_like(part, 40 - i) for i, part in enumerate(parts)], dim=1)
    together = model.logits(torch.cat(parts, dim=1), documents)
    apart = torch.cat([model.logits(part) for part in parts], dim=1)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model.logits(torch.cat(parts, dim=1)), apart, atol=0.1)


@BOTH
def test_documents_carry_no_gradient_across(build, family: str) -> None:
    model = build(family, dtype=torch.float32)
    tokens = torch.arange(24)[None]  # every token another row of the embedding
    documents = (tokens >= 10).long()
    targets = torch.where(tokens >= 10, tokens, -100)
    model.loss(tokens, targets, 1.0, documents).backward()
    gradient = model.embedding.weight.grad
    if family == "llama":  # a tied head gives every row a gradient
        assert (gradient[:10] == 0).all()
    assert (gradient[10:24].norm(dim=1) > 0).all()


def test_tied_head_shares_the_embedding_and_its_gradient(build, batch) -> None:
    tokens, targets = batch()
    tied, untied = build("gpt", dtype=torch.float32), build("gpt", tied=False, dtype=torch.float32)
    values = {name: value.detach() for name, value in tied.named_parameters()}
    untied.load_state_dict(values | {"head.weight": values["embedding.weight"]})
    losses = [model.loss(tokens, targets, 1.0) for model in (tied, untied)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    torch.testing.assert_close(tied.embedding.weight.grad, untied.embedding.weight.grad + untied.head.weight.grad)


def test_tied_head_is_a_linear_without_a_parameter(build, batch) -> None:
    model = build("gpt")
    assert isinstance(dict(model.named_modules())["head"], Linear)
    assert "head.weight" not in dict(model.named_parameters()) and "head.weight" not in model.state_dict()
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embedding.weight and twin.head.weight is not model.head.weight


NAMES = {
    "llama": {"attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"},
    "gpt": {"attention.qkv", "attention.out", "mlp.up", "mlp.down"},
}


@BOTH
def test_linears_have_the_names_that_policies_match(build, family: str) -> None:
    linears = [name for name, module in build(family).named_modules() if isinstance(module, Linear)]
    assert sorted(linears) == sorted([f"blocks.{i}.{name}" for i in (0, 1) for name in NAMES[family]] + ["head"])


@BOTH
def test_meta_build_gives_the_values_of_a_direct_build(build, batch, family: str) -> None:
    direct = build(family, loud=False)
    with torch.device("meta"):
        model = build(family, loud=False)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(math.nan)
    model.init_weights(7)
    for (name, value), (_, expected) in zip(model.named_parameters(), direct.named_parameters()):
        assert torch.equal(value, expected), name
    tokens, targets = batch()
    assert torch.equal(model.loss(tokens, targets, 1.0), direct.loss(tokens, targets, 1.0))


def test_first_values_depend_on_seed_name_and_shape_only(build) -> None:
    torch.manual_seed(1)
    shallow = build("llama", loud=False, dtype=torch.float32)
    torch.manual_seed(2)
    deep = build("llama", loud=False, layers=4)
    p, q = dict(shallow.named_parameters()), dict(deep.named_parameters())
    assert torch.equal(p["blocks.1.attention.qkv.weight"], q["blocks.1.attention.qkv.weight"])
    assert torch.equal(p["head.weight"], q["head.weight"])
    assert not torch.equal(p["blocks.0.attention.qkv.weight"], p["blocks.1.attention.qkv.weight"])
    shallow.init_weights(8)
    assert not torch.equal(p["head.weight"], q["head.weight"])


@BOTH
def test_first_values_have_the_stated_spread(build, family: str) -> None:
    model = build(family, loud=False, dim=256, layers=8)
    for name, value in model.named_parameters():
        if value.ndim == 1:
            assert (value == (0.0 if name.endswith("bias") else 1.0)).all(), name
            continue
        std = 0.02 / 4 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
        bound = 5 / math.sqrt(2 * value.numel())  # five standard errors of a standard deviation
        assert value.std().item() == pytest.approx(std, rel=bound), name
        assert abs(value.mean().item()) < 5 * std / math.sqrt(value.numel()), name


def test_attention_flops_are_the_causal_half_of_the_products(build) -> None:
    model, seq_len = build("llama"), 32
    pairs = seq_len * seq_len / 2
    products = 2  # q k^T and p v, each 2 FLOPs a multiply-add; backward costs twice forward
    forward = model.layers * model.heads * products * 2 * pairs * model.head_dim
    assert model.attention_flops_per_token(seq_len) == 3 * forward / seq_len


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 66}, ["66", "4"]),
        ({"kv_heads": 3}, ["kv_heads 3", "heads 4"]),
        ({"dim": 80}, ["80", "20"]),
        ({"norm": "batchnorm"}, ["batchnorm", "rmsnorm", "layernorm"]),
        ({"activation": "relu"}, ["relu", "swiglu", "gelu"]),
        ({"positions": "alibi"}, ["alibi", "rotary", "learned"]),
        ({"recompute": "some"}, ["some", "none", "selective", "full"]),
        ({"recompute": "some", "full_recompute_layers": 2}, ["some", "none", "selective", "full"]),
        ({"full_recompute_layers": 3}, ["model.full_recompute_layers=3", "2 blocks"]),
        ({"full_recompute_layers": -1}, ["model.full_recompute_layers=-1", "2 blocks"]),
        ({"recompute": "norms", "recompute_layers": 3}, ["model.recompute_layers=3", "2 blocks"]),
        ({"recompute_layers": 1}, ["model.recompute_layers=1", "needs model.recompute, which is none"]),
        ({"recompute": "full", "recompute_layers": 1, "offload": True}, ["model.recompute_layers=1", "in all blocks"]),
    ],
)
def test_a_wrong_size_or_choice_is_one_clear_error(build, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        build("llama", **changes)
    assert all(word in str(error.value) for word in words), error.value


@BOTH
def test_a_sequence_without_positions_is_a_clear_error(build, batch, family: str) -> None:
    with pytest.raises(ValueError, match=r"33 tokens.*max_seq_len 32"):
        build(family).loss(*batch(1, 33), 1.0)


def attends(graph: torch.fx.GraphModule) -> bool:
    return any("scaled_dot_product" in str(node.target) for part in graph.modules() for node in part.graph.nodes)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_32_layers_compile_to_one_graph(build, batch, recompute: str) -> None:
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, eager = (build("llama", layers=32, recompute=recompute) for _ in range(2))
    model.compile_blocks(backend=count)
    tokens, targets = batch()
    loss = model.loss(tokens, targets, 9.0)
    loss.backward()
    with torch.no_grad():
        model.loss(tokens, targets, 9.0)
    blocks = [graph for graph in graphs if attends(graph)]
    assert len(blocks) == 2  # training and evaluation
    assert len(graphs) <= 9  # and the last norm, the head, both passes of the loss
    expected = eager.loss(tokens, targets, 9.0)
    expected.backward()
    assert torch.equal(loss, expected)
    for (name, value), (_, other) in zip(model.named_parameters(), eager.named_parameters()):
        assert torch.equal(value.grad, other.grad), name


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_compiled_training_step_equals_eager(build, batch, family: str) -> None:
    torch._dynamo.reset()
    compiled, eager = (build(family, dtype=torch.float32, layers=1) for _ in range(2))
    compiled.compile_blocks(backend="aot_eager")
    tokens, targets = batch()
    losses = [model.loss(tokens, targets, 9.0) for model in (compiled, eager)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for (name, value), (_, other) in zip(compiled.named_parameters(), eager.named_parameters()):
        assert (value.grad - other.grad).norm() <= 1e-5 * other.grad.norm(), name
