"""The fused AdamW on CUDA: the bits of the eager path, on CUDA and on the CPU, for every pair of moment codecs and
every master; with update clipping, whose RMS is a sum in another order, within a bound.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowprec_train.ops.library import SERVED
from lowprec_train.optim.codecs import expanded
from lowprec_train.optim.fused import FusedAdamW
from tests.optim.cases import MASTERS, MOMENTS, adamw

pytestmark = pytest.mark.gpu
# rows of one number; columns that neither 8 nor 128 divides; short last groups; 128 in each of 8 segments; 3-D
SHAPES = [(1, 1), (5, 1), (3, 7), (9, 130), (4, 1000), (6, 8 * 172), (17, 1024), (3, 2, 2048), (2, 8 * 130), (31, 129)]
PAIRS = [(first, second) for first in MOMENTS for second in MOMENTS]


@pytest.fixture(autouse=True)
def built():
    if "adamw" not in SERVED["cuda"]:
        pytest.skip("no CUDA kernel was built for adamw")


def make(codecs, master, device, shapes=SHAPES, **options):
    generator = torch.Generator().manual_seed(5)
    weights = [nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device)) for shape in shapes]
    moments = tuple(MOMENTS.get(codec, codec) for codec in codecs)
    return adamw(weights, lr=1e-2, moments=moments, master=MASTERS[master], fused=False, seed=99, **options)


def stepped(optimizer, fused, **scalars):
    """One step, by the kernel or tensor by tensor in the reference."""
    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr(FusedAdamW, "serves", staticmethod(lambda batch: False))
        optimizer.step(**scalars)


def gradients(optimizer, step, *, scale=1e-3, dtype=torch.float32, edges=True):
    """Rows over twelve binades, some zeros, a row of zeros, negative zeros."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in optimizer.param_groups[0]["params"]:
        g = torch.randn(parameter.shape, generator=generator) * scale
        g = g * torch.exp2(torch.randint(-6, 6, (*parameter.shape[:-1], 1), generator=generator).float())
        if edges and parameter.shape[0] > 3:
            g[0], g[1] = 0.0, g[1] * (torch.rand(g[1].shape, generator=generator) > 0.3)
            g[2] *= 1e-18
        if parameter.grad_dtype != dtype:
            parameter.grad_dtype = dtype
        parameter.grad = g.to(parameter.device, dtype)


def tensors(optimizer):
    found = {}
    for place, parameter in enumerate(optimizer.param_groups[0]["params"]):
        found[f"{place} {tuple(parameter.shape)}"] = parameter.detach()
        found |= {f"{place} {tuple(parameter.shape)} {name}": x for name, x in optimizer.state[parameter].items()}
    return {name: x.reshape(-1).view(torch.uint8).cpu().clone() for name, x in found.items()}


def assert_same(mine, wanted):
    assert mine.keys() == wanted.keys()
    different = {name: int((mine[name] != x).sum()) for name, x in wanted.items() if not torch.equal(mine[name], x)}
    assert not different, different


def compare(codecs, master, *, steps=3, scale=None, dtype=torch.float32, edges=True, shapes=SHAPES):
    """Fused against one by one on CUDA and against the CPU, after every step."""
    ours, theirs = make(codecs, master, "cuda", shapes), make(codecs, master, "cuda", shapes)
    cpu = make(codecs, master, "cpu", shapes)
    for step in range(steps):
        for optimizer, fused in ((ours, True), (theirs, False), (cpu, True)):
            device = optimizer.param_groups[0]["params"][0].device
            gradients(optimizer, step, dtype=dtype, edges=edges)
            divisor = None if scale is None else torch.tensor(scale, device=device)
            stepped(optimizer, fused, grad_scale=divisor, found_inf=torch.zeros((), device=device))
        assert_same(tensors(ours), tensors(theirs))
        assert_same(tensors(ours), tensors(cpu))


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_fused_has_the_bits_of_the_eager_path(first, second, master):
    compare((first, second), master)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.95, 0.95), (0.999, 0.999)])
@pytest.mark.parametrize("codecs", [("e4m3", "fp16"), ("fp16", "fp32"), ("bf16", "bf16"), ("e4m3", "e4m3_expanded")])
def test_first_moments_without_gradients_decay_as_in_the_reference(codecs, betas):
    """Three steps with gradients, then twelve in which every third row has none; with b1 = .999 every code is slow."""
    ours, theirs = (make(codecs, "fp32", "cuda", betas=betas) for _ in range(2))
    for step in range(15):
        for optimizer, fused in ((ours, True), (theirs, False)):
            gradients(optimizer, step, edges=False)
            for parameter in optimizer.param_groups[0]["params"] if step >= 3 else ():
                parameter.grad[::3] = 0.0
            stepped(optimizer, fused)
        assert_same(tensors(ours), tensors(theirs))


@pytest.mark.parametrize("codec", ["e4m3_expanded", "e5m2_expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 1.0, 3.7])
@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_the_fast_expanded_kernel(codec, dtype, scale, master):
    """Numbers enough that some hundred codes lie within the approximation's band; no zeros: lanes are regular."""
    compare(
        (codec, codec), master, scale=scale, dtype=dtype, edges=False, shapes=[(256, 4096), (64, 8 * 172), (8, 1024)]
    )


@pytest.mark.parametrize("size", [0.0, 1e-38, 2.0**-118, 2.0**-117, 1e38, float("inf"), float("nan")])
def test_bf16_weights_of_any_size(size):
    """Weights below 2^-118 are rounded on a coarser grid than BF16's, and those next to the largest become infinite."""
    ours, theirs = (make(("e4m3_expanded",) * 2, "bf16", "cuda", [(16, 1024)], weight_decay=0.5) for _ in range(2))
    for optimizer in (ours, theirs):
        (weight,) = optimizer.param_groups[0]["params"]
        weight.data *= 1e3 * size
        weight.data[::3, ::5] = size
    for step in range(3):
        for optimizer, fused in ((ours, True), (theirs, False)):
            gradients(optimizer, step, scale=0.0 if step == 1 else 1e-3, edges=False)
            optimizer.set_lr(min(size, 1.0) if size == size else 1e-3)
            stepped(optimizer, fused)
        assert_same(tensors(ours), tensors(theirs))


@pytest.mark.parametrize("group", [1, 3, 64, 128, 1000])
def test_groups_of_any_length(group):
    codec = expanded("E4M3", group)
    compare((codec, codec), "fp32")


@pytest.mark.parametrize(
    "names", [("e4m3", "fp16", "fp16_nearest"), ("bf16", "bf16", "bf16"), ("fp32", "fp32", "fp32")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_divided(names, dtype):
    compare(names[:2], names[2], scale=7.3, dtype=dtype)


@pytest.mark.parametrize("codec", ["e4m3_expanded", "e5m2_expanded"])
@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e12])
def test_sizes_far_from_one(codec, size):
    """Subnormal squares, and moments beyond the range where quotients take the short way."""
    ours, theirs = make((codec, codec), "fp32", "cuda"), make((codec, codec), "fp32", "cuda")
    for step in range(3):
        for optimizer, fused in ((ours, True), (theirs, False)):
            gradients(optimizer, step, scale=size)
            stepped(optimizer, fused)
        assert_same(tensors(ours), tensors(theirs))


def test_a_group_that_is_not_finite_stays_visible_and_alone():
    """NaN payloads differ between devices, so they are compared as NaN, everything else by bits."""
    ours, theirs = (make(("e4m3_expanded", "e4m3_expanded"), "fp32", "cuda", [(8, 1024)]) for _ in range(2))
    for step in range(3):
        for optimizer, fused in ((ours, True), (theirs, False)):
            gradients(optimizer, step)
            if step == 1:
                optimizer.param_groups[0]["params"][0].grad[4, 200] = torch.nan
                optimizer.param_groups[0]["params"][0].grad[5, 900] = torch.inf
            stepped(optimizer, fused)
    mine, wanted = (optimizer.param_groups[0]["params"][0] for optimizer in (ours, theirs))
    pairs = [(mine.detach(), wanted.detach())]
    pairs += [(ours.state[mine][name], theirs.state[wanted][name]) for name in theirs.state[wanted]]
    for a, b in pairs:
        a, b = a.float(), b.float()
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))
    assert 0 < mine.isnan().sum() <= 2 * 128


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("codecs", [("fp32", "fp32"), ("e4m3", "fp16"), ("e4m3_expanded", "e4m3_expanded")])
def test_a_skip_leaves_every_bit(codecs, master):
    optimizer = make(codecs, master, "cuda")
    gradients(optimizer, 0)
    optimizer.step()
    before = tensors(optimizer)
    gradients(optimizer, 1)
    optimizer.param_groups[0]["params"][0].grad.fill_(torch.nan)
    optimizer.step(grad_scale=torch.tensor(2.0, device="cuda"), found_inf=torch.ones((), device="cuda"))
    assert_same(tensors(optimizer), before)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("master", ["fp32", "bf16"])
@pytest.mark.parametrize("codecs", [("fp32", "fp32"), ("e4m3", "fp16"), ("e4m3_expanded", "e4m3_expanded")])
def test_each_of_many_tensors_may_be_skipped(codecs, master, clip):
    """More than one launch's table takes, of all kernels of a codec in turn: as one by one, and as on the CPU."""
    shapes = [[(256, 4096), (8, 1024), (9, 130)][place % 3] for place in range(30)]
    ours, theirs, cpu = (make(codecs, master, device, shapes, clip_updates=clip) for device in ("cuda", "cuda", "cpu"))
    for step in range(3):
        found = torch.tensor([float((place // 2 + step) % 2) for place in range(len(shapes))])
        for optimizer in (ours, theirs, cpu):
            gradients(optimizer, step)
            parameters = optimizer.param_groups[0]["params"]
            here = found.to(parameters[0].device)
            if optimizer is theirs:
                for parameter, skip in zip(parameters, here, strict=True):
                    optimizer.step_only([parameter], found_inf=skip)
            else:
                optimizer.step_only(parameters, found_inf=here)
        assert_same(tensors(ours), tensors(theirs))
        assert_same(tensors(ours), tensors(cpu))


@pytest.mark.parametrize("codecs", [("e4m3", "fp16"), ("e4m3_expanded", "e4m3_expanded")])
def test_many_tensors_and_counters_of_their_own(codecs):
    """More tensors than one launch's table takes, in every order of sizes, two of them a step behind."""
    compare(codecs, "fp16", steps=2, shapes=[SHAPES[i % len(SHAPES)] for i in range(70)])
    ours, theirs = make(codecs, "fp32", "cuda"), make(codecs, "fp32", "cuda")
    for step in range(3):
        for optimizer, fused in ((ours, True), (theirs, False)):
            gradients(optimizer, step)
            for parameter in optimizer.param_groups[0]["params"][5:7] if step == 0 else ():
                parameter.grad = None
            stepped(optimizer, fused)
    assert_same(tensors(ours), tensors(theirs))


def test_what_is_not_contiguous_or_aligned():
    """A transposed gradient, a gradient at 4 bytes from 16, a transposed parameter (which takes the eager path)."""
    results = []
    for fused in (True, False):
        optimizer = make(("e4m3_expanded", "e4m3_expanded"), "fp32", "cuda", [(64, 1024), (16, 1024), (24, 40)])
        first, second, third = optimizer.param_groups[0]["params"]
        gradients(optimizer, 0)
        first.grad = first.grad.t().contiguous().t()
        spare = torch.empty(second.numel() + 1, device="cuda")
        spare[1:] = second.grad.flatten()
        second.grad = spare[1:].view(second.shape)
        third.data = third.data.t().contiguous().t()
        stepped(optimizer, fused)
        results.append(tensors(optimizer))
    assert_same(*results)


@pytest.mark.parametrize("codecs", [("fp32", "fp32"), ("e4m3_expanded", "e4m3_expanded")])
def test_update_clipping_is_that_of_the_reference(codecs):
    """The rate is lr / max(1, RMS); torch's FP32 mean of n terms is a tree, within log2 n U of the exact one, each term
    within 5 U, and the update is proportional to the rate.
    """
    ours, theirs = (make(codecs, "fp32", "cuda", clip_updates=True) for _ in range(2))
    start = [p.detach().clone() for p in ours.param_groups[0]["params"]]
    for optimizer, fused in ((ours, True), (theirs, False)):
        gradients(optimizer, 0)
        stepped(optimizer, fused)
        gradients(optimizer, 1, scale=1.0)
        stepped(optimizer, fused)
    for old, a, b in zip(start, ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        moved = (b - old).abs().max().item()
        assert (a - b).abs().max().item() <= 64 * 2.0**-24 * (moved + old.abs().max().item())
