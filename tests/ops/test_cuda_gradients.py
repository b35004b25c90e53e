"""The CUDA kernels that put gradients on the wire against the reference on the CPU: the same bytes and the same sums,
for one to nine simulated ranks, at odd sizes and unaligned addresses, with Inf and NaN.
"""

from __future__ import annotations

import pytest
import torch

from lowprec_train.ops import library
from lowprec_train.ops.gradients import decode_gradients, encode_gradients
from tests.ops.wire_data import DTYPES, KINDS, RANGES, gradients, payloads, rows_of, same

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
CASES = [(name, format) for name, (_, coded, _) in RANGES.items() for format in payloads(coded)]


def test_every_op_has_its_kernel():
    live = library.live_kernels(CUDA)
    assert live["encode_gradients"] == live["decode_gradients"] == "CUDA"


@pytest.mark.parametrize(("name", "format"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_sums(name, format, kind):
    sizes, coded, block = RANGES[name]
    for ranks, dtype in zip((1, 2, 3, 4, 8, 9), DTYPES * 2, strict=True):
        x = gradients(ranks, sum(sizes), kind, dtype)
        how = (ranks, sizes, coded, format, block, ranks)
        wire = rows_of(torch.ops.lowprec.encode_gradients, list(x.to(CUDA).split(sizes, 1)), *how)
        expected = rows_of(encode_gradients, list(x.split(sizes, 1)), *how)
        assert same(wire, expected), (ranks, dtype)
        for senders in {1, ranks}:
            shape = (ranks // senders,)
            total, meant = (
                [torch.full((*shape, size), 7.0, device=device) for size in sizes] for device in (CUDA, "cpu")
            )
            if senders > 1:
                total, meant = ([part[0] for part in parts] for parts in (total, meant))
            decode_gradients([expected], meant, sizes, coded, format, block, senders, 1)
            for wires in ([wire], [rows.clone() for rows in wire.split(ranks // senders)]):
                torch.ops.lowprec.decode_gradients(wires, total, sizes, coded, format, block, senders, 1)
                assert all(same(*pair) for pair in zip(total, meant, strict=True)), (ranks, dtype, senders)


@pytest.mark.parametrize("start", [0, 1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["E4M3", "BF16", "FP32"])
def test_parts_that_begin_anywhere_and_end_early(start, dtype, format):
    coded, flat = [int(format == "E4M3")] * 2, gradients(1, 9000, "normal", dtype)[0]
    for length in (0, 1, 515, 4000, 4095, 4096):
        parts = [flat[start : start + length], flat[4500 + start : 4500 + start + length]]
        how = (4, [1024, 1026], coded, format, 256)
        encode = torch.ops.lowprec.encode_gradients
        wire = rows_of(encode, [part.to(CUDA) for part in parts], *how, 2)
        moved = flat.to(CUDA)
        again = [moved[start : start + length], moved[4500 + start : 4500 + start + length]]
        assert same(wire, rows_of(encode, again, *how, 2))
        assert same(wire, rows_of(encode_gradients, parts, *how, 2))
        back, meant = torch.full((9000,), 7.0, device=CUDA), torch.full((9000,), 7.0)
        for op, out, sent in ((torch.ops.lowprec.decode_gradients, back, wire), (decode_gradients, meant, wire.cpu())):
            op([sent], [out[start : start + length], out[4500 + start : 4500 + start + length]], *how[1:], 1, 2)
        assert same(back, meant)


@pytest.mark.parametrize("ranks", [4, 64])
def test_one_kernel_whatever_the_ranks_and_parameters(ranks):
    """As a profiler counts them."""
    sizes, coded = [256 * (1 + i % 3) for i in range(30)], [1] * 30
    x = gradients(ranks, sum(sizes), "normal").to(CUDA)
    out = torch.empty(sum(sizes), device=CUDA)
    parts, how = list(x.split(sizes, 1)), (sizes, coded, "E4M3", 256)
    wire = rows_of(torch.ops.lowprec.encode_gradients, parts, ranks, *how, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.ops.lowprec.encode_gradients(wire, parts, *how, 1)
        for wires in ([wire], list(wire.split(1))):
            torch.ops.lowprec.decode_gradients(wires, list(out.split(sizes)), *how, ranks, 1)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([event for event in kernels if "ranges" in event.name]) == len(kernels) == 3
