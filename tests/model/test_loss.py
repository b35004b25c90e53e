"""The chunked cross-entropy against FP64, and the memory it must not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowprec_train.model.loss import CrossEntropy

TOKENS, VOCAB = 96, 500


def problem(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(3, TOKENS // 3, VOCAB, generator=generator)).to(dtype)
    targets = torch.randint(0, VOCAB, (3, TOKENS // 3), generator=generator)
    targets[0, ::3] = -100
    targets[2] = -100
    return logits.to(device), targets.to(device)


def loss_and_gradient(loss: Any, logits: Tensor, targets: Tensor, normalizer: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    value = loss(leaf * 1, targets, normalizer)
    (value * 3).backward()
    return value.detach(), leaf.grad


def fp64(logits: Tensor, targets: Tensor, normalizer: float) -> Tensor:
    return F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="sum") / normalizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, TOKENS, 10**6])
def test_loss_and_gradient_equal_fp64(dtype: torch.dtype, rows: int) -> None:
    logits, targets = problem(dtype)
    loss = CrossEntropy(chunk_bytes=rows * VOCAB * 4)
    assert loss.rows(VOCAB, TOKENS) == rows
    value, gradient = loss_and_gradient(loss, logits, targets, 17.0)
    double = logits.double()
    expected, expected_gradient = loss_and_gradient(fp64, double, targets, 17.0)
    assert value.dtype is torch.float32 and gradient.dtype is dtype
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert gradient[targets == -100].abs().max() == 0
    # one rounding to BF16: half a unit in the last of 8 bits
    unit = 2.0**-8 if dtype is torch.bfloat16 else 1e-5
    assert ((gradient.double() - expected_gradient).abs() <= unit * expected_gradient.abs() + 1e-7).all()


def test_bits_do_not_depend_on_the_chunk() -> None:
    logits, targets = problem(torch.bfloat16)
    results = [loss_and_gradient(CrossEntropy(rows * VOCAB * 4), logits, targets, 5.0) for rows in (3, TOKENS)]
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_normalizer_may_be_a_tensor() -> None:
    logits, targets = problem(torch.bfloat16)
    number = loss_and_gradient(CrossEntropy(), logits, targets, 12.0)
    for tensor in (torch.tensor(12.0), torch.tensor(12), torch.tensor(12.0, dtype=torch.float64)):
        value, gradient = loss_and_gradient(CrossEntropy(), logits, targets, tensor)
        assert value.dtype is torch.float32 and torch.equal(value, number[0]) and torch.equal(gradient, number[1])


def test_all_ignored_is_zero_and_nan_stays_visible() -> None:
    logits, targets = problem(torch.bfloat16)
    value, gradient = loss_and_gradient(CrossEntropy(), logits, torch.full_like(targets, -100), 1.0)
    assert value.item() == 0 and gradient.abs().max() == 0
    logits[1, 2, 3] = float("nan")
    value, gradient = loss_and_gradient(CrossEntropy(), logits, targets, 1.0)
    assert value.isnan() and gradient[1, 2].isnan().all() and not gradient[1, 3].isnan().any()


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e3, 0.0], [-1e3, -1e3]])
    value, gradient = loss_and_gradient(CrossEntropy(), logits, torch.tensor([0, 1]), 1.0)
    assert value.item() == pytest.approx(0.6931472, abs=1e-4) and gradient.isfinite().all()


def test_a_second_backward_raises() -> None:
    logits, targets = problem(torch.bfloat16)
    leaf = logits.requires_grad_()
    value = CrossEntropy()(leaf * 1, targets, 1.0)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


class _Fp32Bytes(TorchDispatchMode):
    """Largest sum of the FP32 storages that operations made and that live at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype is torch.float32:
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for ref, size in self.storages.values() if not ref.expired()))
        return result


def test_fp32_logits_never_exceed_two_chunks() -> None:
    logits, targets = problem(torch.bfloat16)
    chunk = 8 * VOCAB * 4
    with _Fp32Bytes() as ours:
        CrossEntropy(chunk_bytes=chunk)(logits.requires_grad_() * 1, targets, 1.0).backward()
    per_token = 8 * TOKENS * 4  # losses, log-sum-exp, scales, ...
    assert ours.peak <= 2 * chunk + per_token
    with _Fp32Bytes() as plain:
        F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
    assert plain.peak >= 2 * TOKENS * VOCAB * 4  # the counter does see what it should


def test_default_compilation_is_accepted_by_torch() -> None:
    CrossEntropy().compile()  # torch.compile checks the names of its options at once
    CrossEntropy().compile(mode="max-autotune")


BACKENDS = [("aot_eager", "cpu"), pytest.param("inductor", "cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_compiled_equals_fp64(backend: str, device: str) -> None:
    torch._dynamo.reset()
    logits, targets = problem(torch.bfloat16, device)
    loss = CrossEntropy()
    loss.compile(backend=backend)
    value, gradient = loss_and_gradient(loss, logits, targets, 17.0)
    expected, expected_gradient = loss_and_gradient(fp64, logits.double(), targets, 17.0)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert ((gradient.double() - expected_gradient).abs() <= 2.0**-8 * expected_gradient.abs() + 1e-7).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        repeated = loss(logits.requires_grad_() * 1, targets, 1.0)
        repeated.backward(retain_graph=True)
        repeated.backward()


@pytest.mark.gpu
def test_compiled_loss_takes_no_memory_on_the_gpu() -> None:
    torch._dynamo.reset()
    tokens, vocab = 4096, 32000
    loss = CrossEntropy()
    loss.compile()
    targets = torch.randint(0, vocab, (tokens,), device="cuda")

    def peak() -> float:
        logits = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16).requires_grad_().view(tokens, vocab)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss(logits, targets, 1.0).backward()
        return (torch.cuda.max_memory_allocated() - before) / (tokens * vocab * 2)

    peak()
    assert peak() < 0.05  # of the BF16 logits
