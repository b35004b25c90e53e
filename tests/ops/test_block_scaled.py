"""Block-scaled GEMMs: the order of scales, what torch is handed, and the self-test that a run starts with.

torch's kernels need a Blackwell GPU. In their place stands a function that refuses what torch documents or checks as
unfit, and multiplies in FP64 what it was handed, so that packing, order and levels of scales are held to numbers.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

from lowprec_train.ops import block_scaled, library, self_test
from lowprec_train.ops.block_scaled import BLOCKS, block_scaled_mm, e8m0, swizzle, unswizzle
from lowprec_train.ops.block_scaled_cases import cases
from lowprec_train.ops.kernels import KernelError
from tests.ops.blackwell import scaled_mm

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows, blocks", [(1, 1), (3, 5), (128, 4), (129, 4), (130, 9), (257, 13)])
def test_every_scale_lies_where_cublas_reads_it(rows, blocks):
    """The offset of cuBLAS's documentation, element by element."""
    scale = torch.arange(rows * blocks).remainder(251).add(1).to(torch.uint8).reshape(rows, blocks)
    tiles = swizzle(scale)
    wide = -(-blocks // 4)
    assert tiles.shape == (-(-rows // 128) * wide * 512,)
    taken = set()
    for row, block in itertools.product(range(rows), range(blocks)):
        tile, outer = (row // 128) * wide + block // 4, row % 128
        offset = tile * 512 + (outer % 32) * 16 + (outer // 32) * 4 + block % 4
        assert tiles[offset] == scale[row, block]
        taken.add(offset)
    rest = torch.ones(len(tiles), dtype=torch.bool)
    rest[list(taken)] = False
    assert len(taken) == rows * blocks and not tiles[rest].any()
    assert torch.equal(unswizzle(tiles, rows, blocks), scale)


def test_bytes_of_powers_of_two():
    exponents = torch.arange(-126, 128)
    found = e8m0(2.0 ** exponents.double().float()[None])
    assert torch.equal(found.view(torch.uint8)[0].long(), exponents + 127)
    assert torch.equal(found.float(), 2.0 ** exponents.float()[None])
    assert e8m0(torch.tensor([[torch.inf, torch.nan]])).float().isnan().all()


@pytest.mark.parametrize("case", cases())
def test_what_torch_is_handed(case, monkeypatch):
    """Every check of torch's passes, and the FP64 product of what it is handed is the reference's, bit for bit."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    arguments = cases()[case]
    assert torch.equal(block_scaled_mm(*arguments), block_scaled.reference(*arguments))


@pytest.mark.parametrize("case", cases())
def test_sums_of_the_cases_are_exact(case):
    """In any order: no partial sum needs more than 17 bits."""
    a, scale_a, b, scale_b, *_ = cases()[case]
    left, right = (library.EAGER["dequantize"](x, s.float()).double() for x, s in ((a, scale_a), (b, scale_b)))
    most = (left.abs() @ right.abs().t()).max().item()
    step = 2.0 ** (math.frexp(most)[1] - 17)
    assert not any((row * right).remainder(step).any() for row in left)


@pytest.mark.parametrize("case", cases())
def test_torchs_own_check_of_shapes_passes(case):
    """On meta tensors, which torch judges as those of a GPU. For MXFP4 it counts the scales of half of k (torch 2.13),
    which is the same number up to k = 128.
    """
    arguments = cases()[case]
    if "MXFP4" in case and arguments[0].shape[1] > 128:
        arguments = tuple(x[:, : x.shape[1] // 5] if isinstance(x, torch.Tensor) else x for x in arguments)
    out = block_scaled_mm(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments))
    assert out.shape == (arguments[0].shape[0], arguments[2].shape[0]) and out.dtype == arguments[-1]


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"swizzle_a": SwizzleType.NO_SWIZZLE}, "swizzled"),
        ({"scale_recipe_b": ScalingType.BlockWise1x16}, "no kernel"),
        ({"scale_a": torch.zeros(512, dtype=torch.uint8).view(torch.float8_e8m0fnu)[:511]}, "512 scales"),
        ({"output_dtype": torch.float16}, "writes"),
    ],
)
def test_the_stand_in_refuses_what_torch_refuses(change, reason, monkeypatch):
    """Each argument of a good call made bad."""
    given: dict = {}

    def keep(*args, **kwargs):
        names = ("mat_a", "mat_b", "scale_a", "scale_recipe_a", "scale_b", "scale_recipe_b", "swizzle_a", "swizzle_b")
        given.update(zip(names, args, strict=True), **kwargs)
        return scaled_mm(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", keep)
    block_scaled_mm(*cases()["MXFP8, odd rows"])
    with pytest.raises(AssertionError, match=reason):
        scaled_mm(**given | {name: value if name == "output_dtype" else [value] for name, value in change.items()})


# --- the self-test ---


def test_the_self_test_passes_where_the_op_is_right():
    self_test.self_test(CPU, (), block_formats=BLOCKS)


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("fault", ["rows of scales", "blocks of scales", "one sum", "no kernel"])
def test_a_wrong_gemm_ends_the_run_with_one_error(format, fault, monkeypatch):
    """Scales in another order, a bit of one sum, a build of torch without the kernel."""

    def wrong(a, scale_a, b, scale_b, *how):
        if fault == "no kernel":
            raise NotImplementedError("MXFP4 scaling supported on ROCM and CUDA+FBGEMM_GENAI only")
        if fault == "rows of scales":
            scale_a = scale_a.flip(0)
        if fault == "blocks of scales":
            scale_b = scale_b.flip(1)
        out = block_scaled.reference(a, scale_a, b, scale_b, *how)
        if fault == "one sum":
            out[0, -1] += 2.0**-9 * out.abs().max() + 1
        return out

    class Ops:
        block_scaled_mm = staticmethod(wrong)

    monkeypatch.setattr(torch.ops, "lowprec", Ops)
    with pytest.raises(KernelError) as caught:
        self_test.self_test(CPU, (), block_formats=[format])
    told = str(caught.value)
    assert f"torch's {format} GEMM of lowprec::block_scaled_mm on cpu, case '{format}, " in told
    assert "precision.override.native_block_scales=false" in told and "make kernels" not in told


@pytest.mark.gpu
@pytest.mark.parametrize("format", BLOCKS)
def test_on_a_gpu_that_has_it(format):
    from lowprec_train.precision.gemm import native_formats

    device = torch.device("cuda", 0)
    if format not in native_formats(torch.cuda.get_device_capability(device)):
        pytest.skip(f"{torch.cuda.get_device_name(device)} has no {format}")
    self_test.self_test(device, (), block_formats=[format])
