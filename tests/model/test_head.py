"""The loss in chunks of tokens against the loss of all of them, and the logits that must not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowprec_train.model.head import Head, chunked_loss
from lowprec_train.model.loss import CrossEntropy
from lowprec_train.model.transformer import Transformer
from lowprec_train.precision.split import Split
from lowprec_train.tools.estimate.report import estimate
from lowprec_train.train.compose import composed
from tests.groups import among

TOKENS, DIM, VOCAB = 72, 64, 496
HALF = 2.0**-8  # half a unit of BF16, relative


def loss_and_gradients(model: Transformer, batch: Any, upstream: float = 1.0) -> dict[str, Tensor]:
    tokens, targets = batch()
    model.zero_grad()
    loss = model.loss(tokens, targets, 7.0)
    (loss * upstream).backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("chunk", [1, 7, 72, 10**6])
def test_chunks_give_the_loss_and_gradients_of_all_tokens(build, batch, family: str, chunk: int) -> None:
    """In FP32, where orders of sums are all that differs; the gradient that comes in is no power of two."""
    whole, parts = (build(family, dtype=torch.float32, loss_chunk=each) for each in (None, chunk))
    expected, found = (loss_and_gradients(model, batch, upstream=3.0) for model in (whole, parts))
    assert found["loss"].dtype is torch.float32 and found["loss"].shape == ()
    assert all(error(found[name], value) < 1e-5 for name, value in expected.items())


@pytest.mark.parametrize("chunk", [7, 24, 10**6])
def test_in_bf16_they_differ_by_the_order_of_one_sum(build, batch, chunk: int) -> None:
    """dW: FP32 sums of the same products in another order, rounded once to BF16; so at most by a unit."""
    expected, found = (loss_and_gradients(build("llama", loss_chunk=each), batch) for each in (None, chunk))
    assert found["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-5)
    weight, right = found.pop("head.weight"), expected.pop("head.weight")
    assert torch.equal(weight, weight.bfloat16().float())
    assert ((weight - right).abs() <= 2 * HALF * right.abs() + 1e-6).all()
    assert all(error(found[name], value) < 2 * HALF for name, value in expected.items())


class Shapes(TorchDispatchMode):
    """Of everything that an operation makes, with its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[torch.dtype, torch.Size]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= {(each.dtype, each.shape) for each in tree_leaves(result) if isinstance(each, Tensor)}
        return result


def problem(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, DIM, generator=generator).to(dtype) for rows in (TOKENS, VOCAB))
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[::5] = -100
    return x.requires_grad_(), (weight * 0.2).detach().requires_grad_(), targets


def test_no_more_logits_exist_than_those_of_a_chunk() -> None:
    x, weight, targets = problem()
    with Shapes() as made:
        chunked_loss(x, weight, targets, 3.0, CrossEntropy(), tokens=8).backward()
    rows = {shape[0] for _, shape in made.seen if len(shape) == 2 and shape[1] == VOCAB}
    assert rows == {8, DIM}  # logits of a chunk; the weight, transposed


def test_an_evaluation_makes_no_gradients() -> None:
    x, weight, targets = problem()
    with torch.no_grad(), Shapes() as made:
        loss = chunked_loss(x, weight, targets, 3.0, CrossEntropy(), tokens=8)
    assert (torch.float32, weight.shape) not in made.seen
    assert loss.item() == chunked_loss(x, weight, targets, 3.0, CrossEntropy(), tokens=8).item()


def test_the_sum_of_the_weights_gradient_may_take_its_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bits."""
    found = []
    for rows in (VOCAB, 100):
        monkeypatch.setattr("lowprec_train.precision.gemm.PRODUCT_BYTES", 4 * DIM * rows)
        x, weight, targets = problem()
        chunked_loss(x, weight, targets, 3.0, CrossEntropy(), tokens=24).backward()
        found.append(weight.grad)
    assert torch.equal(*found)


def test_a_second_backward_raises() -> None:
    x, weight, targets = problem()
    loss = chunked_loss(x, weight, targets, 3.0, CrossEntropy(), tokens=8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_words_on_two_ranks_are_the_words_of_one() -> None:
    """A rank's own rows of x go in, and their gradients come out; FP32."""
    x, weight, targets = problem(torch.float32)
    expected = chunked_loss(x, weight, targets, 3.0, CrossEntropy(), tokens=7)
    expected.backward()

    def rank(group: Any) -> tuple[Tensor, Tensor, Tensor]:
        head, cross_entropy = Head(DIM, VOCAB, bias=False), CrossEntropy()
        head.split = cross_entropy.split = Split(dim=0, group=group, whole=VOCAB)
        head.weight = torch.nn.Parameter(weight.detach().chunk(2)[group.rank].clone())
        mine = x.detach().chunk(2)[group.rank].clone().requires_grad_()

        def loss(rows: Tensor, words: Tensor) -> Tensor:
            return chunked_loss(rows, words, targets, 3.0, cross_entropy, tokens=7)

        value = head(mine[None], loss=loss)
        value.backward()
        return value.detach(), mine.grad, head.weight.grad

    losses, dx, dw = zip(*among(2, rank))
    assert torch.equal(losses[0], losses[1]) and error(losses[0], expected.detach()) < 1e-6
    assert error(torch.cat(dx), x.grad) < 1e-5 and error(torch.cat(dw), weight.grad) < 1e-5


@pytest.mark.parametrize(
    ("backend", "device"), [("aot_eager", "cpu"), pytest.param("inductor", "cuda", marks=pytest.mark.gpu)]
)
def test_compiled_equals_eager(build, batch, backend: str, device: str) -> None:
    """In FP32: in BF16 a fused kernel leaves out roundings that eager has."""
    torch._dynamo.reset()
    eager, compiled = (build("llama", dtype=torch.float32, loss_chunk=16).to(device) for _ in range(2))
    compiled.compile_blocks(backend=backend)
    there = [each.to(device) for each in batch()]
    expected, found = (loss_and_gradients(model, lambda: there) for model in (eager, compiled))
    assert all(error(found[name], value) < 1e-5 for name, value in expected.items())


@pytest.mark.parametrize("chunk", [0, -8])
def test_a_chunk_without_tokens_is_refused(build, chunk: int) -> None:
    with pytest.raises(ValueError, match=f"loss_chunk={chunk} must be a number of tokens above 0"):
        build("llama", loss_chunk=chunk)


def test_a_head_with_a_recipe_is_refused() -> None:
    run = composed(
        "+recipe=fp8", "model.loss_chunk=64", "precision.policy.head._target_=lowprec_train.recipes.fp8.recipe"
    )
    with pytest.raises(ValueError, match="model.loss_chunk=64 computes the head in chunks.*quantises the head"):
        estimate(run)


@pytest.mark.gpu
def test_gradients_on_a_gpu_are_sums_in_fp32() -> None:
    x, weight, targets = (each.detach().cuda() for each in problem())
    x.requires_grad_(), weight.requires_grad_()
    chunked_loss(x, weight, targets, 3.0, CrossEntropy(), tokens=16).backward()
    doubles = [each.detach().double().requires_grad_() for each in (x, weight)]
    logits = doubles[0] @ doubles[1].t()
    (torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / 3.0).backward()
    for found, right in zip((x.grad, weight.grad), (each.grad for each in doubles), strict=True):
        assert error(found, right) < 4 * HALF


@pytest.mark.gpu
def test_peak_on_a_gpu_is_that_of_a_chunk() -> None:
    tokens, dim, vocab, chunk = 8192, 1024, 32000, 512

    def peak(loss_chunk: int) -> int:
        x, weight = (torch.randn(n, dim, device="cuda", dtype=torch.bfloat16).mul_(0.1) for n in (tokens, vocab))
        x.requires_grad_(), weight.requires_grad_()
        targets, loss = torch.randint(0, vocab, (tokens,), device="cuda"), CrossEntropy()
        loss.compile()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        chunked_loss(x, weight, targets, 1.0, loss, tokens=loss_chunk).backward()
        return torch.cuda.max_memory_allocated() - before

    peak(chunk)
    needed = 4 * vocab * dim + 2 * vocab * dim + 2 * tokens * dim + 2 * chunk * vocab
    assert peak(chunk) < 1.1 * needed < 0.6 * peak(tokens)
