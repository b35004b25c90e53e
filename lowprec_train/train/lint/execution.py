"""Linter rules for the device: settings that are slow on a GPU, or that give other numbers there than on a CPU.

The rules read each layer's plan (`precision.plan`), which has the path of every GEMM on the run's device. They do not
apply on a CPU. `small-gemm` follows torchao's filter for H100s: one side up to SMALL, the other up to LARGE.
"""

from collections.abc import Iterator

from lowprec_train.numerics.quantizer import ScaleRule
from lowprec_train.ops.reference import FP8
from lowprec_train.precision.gemm_path import Path
from lowprec_train.precision.linear_plan import GemmPlan
from lowprec_train.precision.recipe import Gemm
from lowprec_train.train.lint.rules import Fault, LayerGroup, RoundedOperand, RunPlan, gemms, operands, rule

SMALL, LARGE = 1024, 4096
ALIGNMENT = 16  # of FP8 GEMMs in cuBLASLt
ROWS = ((1, -1), (-1, -1))  # tiles whose scale factors out of the sum


def _slow(group: LayerGroup, name: str) -> GemmPlan | None:
    """Return the plan of a GEMM that runs in BF16 although both operands have FP8 carriers; None for others."""
    gemm = group.plan.gemms()[name]
    carried = all(codes.dtype in FP8 for codes in gemm.codes)
    return gemm if carried and gemm.path is Path.DEQUANTIZE else None


def _pair(gemm: Gemm) -> str:
    return f"{gemm.a} x {gemm.b}"


@rule(
    on_gpu=True,
    why="cuBLASLt cannot multiply two E5M2 matrices (pytorch/pytorch#132005), so this GEMM runs at BF16 speed",
    instead="E4M3 for one side, or a span of at most 14 for one blocked side",
)
@gemms
def e5m2_pair(group: LayerGroup, name: str, gemm: Gemm) -> str:
    slow = _slow(group, name)
    return _pair(gemm) if slow and all(codes.carrier == "E5M2" for codes in slow.codes) else ""


@rule(
    on_gpu=True,
    why="these block scales do not fold into FP8 carriers, so this GEMM is exact and runs at BF16 speed "
    "(docs/numerics.md, Execution)",
    instead="power-of-two blocks of E2M1 with exponent_span=28 on one side and 14 on the other, or row scales",
)
@gemms
def unfolded_blocks(group: LayerGroup, name: str, gemm: Gemm) -> str:
    slow = _slow(group, name)
    return _pair(gemm) if slow and any(codes.carrier is None for codes in slow.codes) else ""


@rule(
    on_gpu=True,
    why=f"FP8 tensor cores need multiples of {ALIGNMENT} (pytorch/pytorch#106844): this GEMM runs at BF16 speed",
    instead=f"sizes, and tokens of a micro-batch, that are multiples of {ALIGNMENT}",
)
@gemms
def unaligned_fp8(group: LayerGroup, name: str, gemm: Gemm) -> str:
    slow = _slow(group, name)
    return f"sizes (m, n, k) of {slow.sizes}" if slow and any(size % ALIGNMENT for size in slow.sizes[1:]) else ""


@rule(
    on_gpu=True,
    why="partial sums of about 14 bits cost accuracy in backward GEMMs (NVIDIA/TransformerEngine#1278)",
    instead="split_accumulation=true for dgrad and wgrad",
)
@gemms
def fast_backward(group: LayerGroup, name: str, gemm: Gemm) -> str:
    fast = name != "fprop" and group.plan.peaks()[name] == "fp8" and not gemm.split_accumulation
    return f"{_pair(gemm)} without split accumulation" if fast else ""


@rule(
    on_gpu=True,
    why="a code times an FP32 block scale is not a BF16 value: a GPU rounds the operand a second time, a CPU does not "
    "(docs/numerics.md, Execution)",
    instead="scale=POW2 or E8M0_CEIL",
)
@operands
def twice_rounded(operand: RoundedOperand) -> bool:
    """Values of blocks with FP32 scales are not exact in BF16."""
    q = operand.quantizer
    return q.format.scaled and q.scale is ScaleRule.FP32 and q.tile not in ROWS


@rule(
    on_gpu=True,
    why="at this size quantising to FP8 takes longer than the GEMM saves (NVIDIA/TransformerEngine#445; pytorch/ao's "
    f"filter: a side up to {SMALL}, the other up to {LARGE})",
    instead="+recipe=bf16 for speed; the size does not affect accuracy",
)
def small_gemm(plan: RunPlan) -> Iterator[Fault]:
    for group in plan.layer_groups:
        low, high = sorted(group.plan.shape)
        if low <= SMALL and high <= LARGE and "fp8" in group.plan.peaks().values():
            yield Fault(what="x".join(map(str, group.plan.shape)), where=group.layers)
