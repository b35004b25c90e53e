"""What a rank does in the tests of process groups, eager and compiled."""

import torch
import torch.distributed as dist

from lowprec_train.comm.process_group import DistributedGroup
from lowprec_train.group import all_gather_rows, reduce_scatter_rows

RANKS, ROWS, WIDTH = 2, 8, 16  # rows of one rank
DTYPES = (torch.float32, torch.bfloat16)
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int64, *DTYPES)


def rows(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, WIDTH, generator=generator).to(dtype)


def weight(rank, dtype):
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(WIDTH, WIDTH, generator=generator).to(dtype)


def spoilt(rank):
    """NaN and infinities, some of them on one rank alone."""
    one = torch.tensor([1.0, -torch.inf, torch.nan, -5.0, torch.inf])
    other = torch.tensor([torch.nan, -torch.inf, 3.0, -6.0, 2.0])
    return (one, other)[rank]


def layer(x, w, group):
    """A column-parallel product and a row-parallel one, as a block has them, and a scale over all ranks."""
    y = torch.tanh(all_gather_rows(x, group) @ w)
    return reduce_scatter_rows(y @ w.t(), group), group.all_reduce_max(y)


def passes(rank, dtype, group, device, backend=None):
    """(y, scale, gradients of x and w); two such layers, so that a backward pass sums what it gathered."""

    def two(x, w):
        middle, scale = layer(x, w, group)
        return layer(middle, w, group)[0], scale

    run = two if backend is None else torch.compile(two, fullgraph=True, backend=backend)
    x, w = (make(rank, dtype).to(device).requires_grad_() for make in (rows, weight))
    y, scale = run(x, w)
    y.backward(rows(10 + rank, dtype).to(device))
    return [each.detach().cpu() for each in (y, scale, x.grad, w.grad)]


def work(rank, kind):
    """On two ranks of a kind of device: places, maxima, gathered values and passes."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    group = DistributedGroup.of(dist.new_group(list(range(RANKS))))
    compiler = "inductor" if kind == "cuda" else "aot_eager"
    saved = {"place": (group.size, group.rank), "largest": group.all_reduce_max(spoilt(rank).to(device)).cpu()}
    for dtype in CODES:
        x = rows(rank, torch.float32).mul(8).to(dtype).to(device)
        saved["gather", dtype] = [group.all_gather(x, dim).cpu() for dim in (0, 1)]
    for dtype in DTYPES:
        saved["eager", dtype] = passes(rank, dtype, group, device)
        saved["compiled", dtype] = passes(rank, dtype, group, device, compiler)
    return saved
