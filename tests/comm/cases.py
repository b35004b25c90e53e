"""What is reduced in the tests: gradients of each rank, and the cases that processes and the simulation both run."""

from dataclasses import dataclass, replace

import torch

from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.grad_codec import GradCodec
from lowprec_train.comm.layout import ElementRange, FlatLayout
from lowprec_train.comm.shared_scale import SharedScaleCodec
from lowprec_train.numerics.formats import BF16, E4M3, E5M2, FP32

RANKS = 4


def row(*sizes):
    """A layout; ranges of negative sizes are not coded."""
    return FlatLayout(tuple(ElementRange(abs(size), size > 0) for size in sizes))


ROW = row(1024, -40, 300, -7, 5, 513)
VECTORS = row(-12, -5)


def ranges(layout):
    return [(each.size, each.coded) for each in layout.ranges]


def gradients(size, ranks=RANKS, seed=0, spread=4.0):
    """Normal values, magnitudes that differ between ranks (by `spread` each) and along the buffer; FP32 [size] each."""
    generator = torch.Generator().manual_seed(seed)
    along = torch.linspace(-6, 6, size).exp2()
    return [torch.randn(size, generator=generator) * along * spread**-rank for rank in range(ranks)]


def with_value(flats, rank, place, value):
    """The same gradients but for one element of one rank."""
    changed = [flat.clone() for flat in flats]
    changed[rank][place] = value
    return changed


def encoded(codec, rows, layout, scales=None):
    """Rows [n, size] as bytes."""
    wire = codec.wire_layout(layout)
    return codec.encode(wire.pieces(rows), len(rows), wire, scales)


def summed(codec, wire, layout, scales=None):
    """(sum of the rows of a wire, one a sender; codes at the maximum)."""
    total, row = torch.full((layout.size,), torch.nan), codec.wire_layout(layout)
    return total, codec.decode(wire, row.pieces(total), row, scales, senders=len(wire))


@dataclass(frozen=True)
class Case:
    """One reduction: `kind` is the collective's name. apart: each range is a tensor of its own."""

    kind: str
    codec: GradCodec
    flats: list[torch.Tensor]
    layout: FlatLayout = ROW
    mu: float = 1.0
    apart: bool = False

    def given(self, rank, device="cpu"):
        """What a rank puts in."""
        flat = self.flats[rank].to(device)
        if not self.apart:
            return flat
        pieces = flat.view(-1, self.layout.size).split([each.size for each in self.layout.ranges], 1)
        return [piece.flatten() for piece in pieces]


def of_two_ranks(case):
    """The case of its last two ranks and, where rows are scattered, its first two rows."""
    rows = 1 if case.kind == "all_reduce" else 2
    return replace(case, flats=[flat[: rows * case.layout.size].clone() for flat in case.flats[-2:]])


def _scattered(name, codec, **options):
    flats = gradients(RANKS * ROW.size)
    return {f"reduce_scatter-{name}": Case("reduce_scatter", codec, flats, **options)}


def _reduced(name, codec, **options):
    return {f"all_reduce-{name}": Case("all_reduce", codec, gradients(ROW.size, seed=1), **options)}


def _shared(name, flats=None, **options):
    codec = SharedScaleCodec(every_addition=options.pop("every_addition", True))
    wide, short = flats or (gradients(RANKS * ROW.size, seed=2), gradients(ROW.size, seed=3))
    return {
        f"reduce_scatter-shared-{name}": Case("reduce_scatter", codec, wide, **options),
        f"all_reduce-shared-{name}": Case("all_reduce", codec, short, **options),
    }


def _awkward():
    """One element of rank 2 is not finite, one rank is all zeros, everything is zero, BF16 gradients, only vectors."""
    wide, short = gradients(RANKS * ROW.size), gradients(ROW.size)
    zeros = [torch.zeros_like(flat) for flat in wide]
    silent = [torch.zeros_like(flat) if rank == 1 else flat for rank, flat in enumerate(wide)]
    e4m3, few = BlockScaledCodec(E4M3), gradients(RANKS * VECTORS.size)
    return {
        "nan": Case("reduce_scatter", e4m3, with_value(wide, 2, ROW.size + 1500, torch.nan)),
        "inf": Case("reduce_scatter", e4m3, with_value(wide, 2, ROW.size + 300, torch.inf)),
        "nan-everywhere": Case("all_reduce", e4m3, with_value(short, 2, 1100, torch.nan)),
        "inf-in-bf16": Case("all_reduce", BlockScaledCodec(BF16), with_value(short, 2, 1100, -torch.inf)),
        "zeros": Case("reduce_scatter", e4m3, zeros),
        "one-rank-zero": Case("reduce_scatter", e4m3, silent),
        "bf16-gradients": Case("reduce_scatter", e4m3, [flat.bfloat16() for flat in wide]),
        "parts-of-fp32": Case("reduce_scatter", BlockScaledCodec(FP32), wide, apart=True),
        "parts-of-bf16": Case("reduce_scatter", BlockScaledCodec(BF16), [x.bfloat16() for x in wide], apart=True),
        "parts-of-fp32-in-bf16": Case("reduce_scatter", BlockScaledCodec(BF16), wide, apart=True),
        "parts-in-e4m3": Case("reduce_scatter", e4m3, wide, apart=True),
        "vectors": Case("reduce_scatter", e4m3, few, layout=VECTORS),
        "vectors-shared": Case("reduce_scatter", SharedScaleCodec(), few, layout=VECTORS),
        "matrices-shared": Case("all_reduce", SharedScaleCodec(), gradients(300), layout=row(300)),
    }


def _awkward_shared():
    wide, short = gradients(RANKS * ROW.size), gradients(ROW.size)
    return {
        **_shared("nan", (with_value(wide, 3, 1100, torch.nan), with_value(short, 3, 1100, torch.nan))),
        **_shared("inf", (with_value(wide, 3, 7, torch.inf), with_value(short, 3, 7, torch.inf))),
        **_shared("identical", ([wide[0]] * RANKS, [short[0]] * RANKS), mu=RANKS**-0.5),
        **_shared("one-rank-zero", tuple([torch.zeros_like(x[0]), *x[1:]] for x in (wide, short))),
    }


CASES = {
    **_scattered("fp32", BlockScaledCodec(FP32)),
    **_scattered("bf16", BlockScaledCodec(BF16)),
    **_scattered("e4m3", BlockScaledCodec(E4M3)),
    **_scattered("e5m2", BlockScaledCodec(E5M2)),
    **_scattered("e4m3-block-32", BlockScaledCodec(E4M3, block=32)),
    **_reduced("fp32", BlockScaledCodec(FP32)),
    **_reduced("bf16", BlockScaledCodec(BF16)),
    **_reduced("e4m3", BlockScaledCodec(E4M3)),
    **_reduced("e5m2", BlockScaledCodec(E5M2)),
    **_shared("ring"),
    **_shared("ring-mu", mu=0.3),
    **_shared("once", every_addition=False),
    **_awkward(),
    **_awkward_shared(),
}
