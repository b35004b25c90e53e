"""What has no gradient comes to rest, whatever its moments are stored in: m must not stay while v decays."""

import pytest
import torch
from torch import nn

from lowprec_train.numerics.formats import parse_format
from lowprec_train.ops.codecs import decaying
from lowprec_train.optim.codecs import scaled
from lowprec_train.optim.optimizer import parameter_groups
from tests.optim.cases import BUNDLES, MOMENTS, build, model, system

LR = 1e-3
# every bundle, and every codec of m beside an FP32 v, which decays to nothing
PAIRS = {codecs[:2] for codecs in BUNDLES.values()} | {(name, "fp32") for name in MOMENTS} | {("bf16", "bf16")}


def gradients(net, step, free=None):
    """Rows of sizes over four decades; zero where `free` (rows and columns of each matrix) says so."""
    generator = torch.Generator().manual_seed(step)
    for parameter in net.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            gradient *= torch.logspace(-4, 0, parameter.shape[0]).unsqueeze(1)
        parameter.grad = gradient if free is None else gradient.masked_fill(free(gradient), 0.0)


def some(gradient):
    """Every third row, every fifth column."""
    free = torch.zeros_like(gradient, dtype=torch.bool)
    free[::3] = True
    free[..., ::5] = True
    return free


def everything(gradient):
    return torch.ones_like(gradient, dtype=torch.bool)


def moved(net, optimizer, free, steps):
    """Learning rates that weights without gradients move in `steps` after 50 with some; and in the last quarter."""
    for step in range(50):
        gradients(net, step)
        optimizer.step()
    seen = []
    for step in range(50, 50 + steps):
        if step in (50, 50 + steps - steps // 4):
            seen.append([p.detach().clone() for p in net.parameters()])
        gradients(net, step, free)
        optimizer.step()
    now = [p.detach() for p in net.parameters()]
    return [
        max(((a - b).abs()[free(a)].max() / LR).item() for a, b in zip(now, before, strict=True)) for before in seen
    ]


@pytest.mark.parametrize("free", [some, everything])
@pytest.mark.parametrize("codecs", sorted(PAIRS), ids="+".join)
def test_a_matrix_without_gradients_comes_to_rest(codecs, free):
    """Measured: at most 10.6 learning rates; FP32 9.6. With m in E4M3 to nearest 3 a step, for ever."""
    torch.manual_seed(0)
    net = nn.Linear(40, 24, bias=False)
    far, late = moved(net, build([net.weight], (*codecs, "fp32"), lr=LR, weight_decay=0.0, fused=False), free, 300)
    assert 4 < far < 20 and late < 1e-3


@pytest.mark.parametrize("name", BUNDLES)
def test_the_shipped_optimizers_let_rows_rest(name):
    """An embedding's rows and a linear layer's, with the bundle's own master weights, in 1,000 steps."""
    net = model()
    clip = name == "stable_adamw"
    optimizer = build(parameter_groups(net, 0.0), BUNDLES[name], lr=LR, clip_updates=clip)
    far, late = moved(net, optimizer, some, 1000)
    assert far < 20 and late < 0.05  # FP16 master weights move by whole steps


@pytest.mark.parametrize(
    ("name", "dtype"), [("adamw_fp8lm", torch.float32), ("adamw_fp4", torch.float32), ("bf16", torch.bfloat16)]
)
def test_what_is_looked_up_by_index_has_no_scale_for_all_rows(name, dtype):
    """Embeddings, and heads that are tied to them; other matrices are coded."""
    net = nn.Sequential(nn.Embedding(24, 48), nn.Linear(48, 24, bias=False), nn.Linear(24, 40))
    net[1].weight = net[0].weight
    optimizer = build(parameter_groups(net, 0.1), name)
    state = {key: x.dtype for key, x in optimizer.state[net[0].weight].items() if key != "step"}
    assert state == {"exp_avg": dtype, "exp_avg_sq": dtype}
    assert optimizer.state[net[2].weight]["exp_avg"].dtype != torch.float32


def test_groups_of_rows_stay_codes():
    """COAT's, in an embedding too: a row decays with its own scales."""
    net, optimizer = system("adamw_coat")
    assert optimizer.state[net[0].weight]["exp_avg"].dtype == torch.float8_e4m3fn


def every(name):
    """All codes of finite numbers but zeros, by format."""
    kind, sign, count = (torch.uint8, 0x80, 0x7F) if name[0] == "E" else (torch.int16, -0x8000, 0x7F80)
    size = torch.arange(1, {"E5M2": 0x7C, "FP16": 0x7C00}.get(name, count), dtype=kind)
    return torch.cat([size, size | sign]).view(1, -1).view(parse_format(name).carrier)


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("name", ["E4M3", "E5M2", "FP16", "BF16"])
def test_every_code_decays(name, beta):
    """By decay alone: to the nearest code where that is smaller, else to the next smaller one."""
    codes, integer = every(name), torch.uint8 if name[0] == "E" else torch.int16
    old = codes.float()
    nearest = (old * beta).to(codes.dtype)
    lower = (codes.view(integer) - 1).view(codes.dtype)
    made = decaying(nearest, None, old * beta, old, beta)
    moves = nearest.float().abs() < old.abs()
    assert torch.equal(made.float(), torch.where(moves, nearest.float(), lower.float()))
    assert bool(moves.all()) == (beta == 0.5) and bool((made.float().signbit() == old.signbit()).all())


@pytest.mark.parametrize(("beta", "share"), [(0.9, 0.99), (0.95, 0.97), (0.98, 0.8)])
def test_gradients_that_scatter_do_not_decay_the_mean(beta, share):
    """m in E4M3 of gradients N(1, 1): to nearest its mean is .995, .992 and .933 of FP32's."""
    codec, generator, sums = scaled("E4M3"), torch.Generator().manual_seed(0), [0.0, 0.0]
    exact = torch.zeros(1, 4096)
    parts = codec.encode(exact.clone().index_fill_(1, torch.tensor(0), 100.0))  # the largest, so the scale stays
    for step in range(600):
        gradient, old = 1 + torch.randn(1, 4096, generator=generator), codec.decode(parts)
        gradient[0, 0] = 100.0
        new = old + (gradient - old) * (1 - beta)
        parts = codec.encode(new)
        parts["codes"] = decaying(parts["codes"], parts["scale"], new, old, beta)
        exact += (gradient - exact) * (1 - beta)
        if step >= 300:
            sums = [a + x[0, 1:].mean().item() for a, x in zip(sums, (codec.decode(parts), exact), strict=True)]
    assert share < sums[0] / sums[1] < 1.01


@pytest.mark.parametrize("name", ["E4M3", "FP16"])
def test_all_else_is_rounded_to_nearest(name):
    """What grows, and at b1 = .9 every number of more than five steps of the grid, to the bits of the codec's own."""
    codec, generator = scaled(name), torch.Generator().manual_seed(3)
    m = torch.randn(64, 512, generator=generator) * torch.logspace(-4, 0, 64).unsqueeze(1)
    old = codec.decode(codec.encode(m))
    x = old + 0.1 * (torch.randn(old.shape, generator=generator) * old.abs().mean(1, keepdim=True) - old)
    plain = codec.encode(x)
    made = plain | {"codes": decaying(plain["codes"], plain["scale"], x, old, 0.9)}
    step = made["scale"] * 2.0 ** (-9 if name == "E4M3" else -24)
    same = codec.decode(plain) == codec.decode(made)
    assert torch.equal(plain["scale"], made["scale"]) and (~same).any() == (name == "E4M3")
    assert same[(x.abs() > 5 * step) | (x.abs() >= old.abs())].all()
    assert ((codec.decode(plain) - codec.decode(made)).abs()[~same] == step).all()
