"""Linter rules for linear layers: formats, scales, rounding and rotations that do not fit together.

The rules are about accuracy and apply on any machine.
"""

import math
from collections.abc import Iterator

from lowprec_train.numerics.corrections import Correction
from lowprec_train.numerics.formats import E2M1, E5M2, INT4, INT8
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.estimators import DifferentiableEstimator
from lowprec_train.precision.recipe import Gemm
from lowprec_train.train.lint.rules import Fault, LayerGroup, RoundedOperand, RunPlan, Severity, gemms, operands, rule

FOUR_BITS = (E2M1, INT4)


@rule(
    severity=Severity.ERROR,
    why="values between the format's largest value and the next power of two are clipped, which is a bias: loss 2.60 "
    "instead of 2.49 for a 345M model (arXiv 2502.20586, table 2, without rotation)",
    instead="scale=E8M0_CEIL, or headroom=0.75 for E2M1, with stochastic rounding where gradients are",
)
@operands
def floor_clips(operand: RoundedOperand) -> bool:
    """Under the floor rule amax / s lies in [2^e, 2^(e+1)), and the format ends before that."""
    q = operand.quantizer
    binade = 2.0 ** (math.floor(math.log2(q.format.max)) + 1)
    return q.scale is ScaleRule.E8M0_FLOOR and q.range_share > q.format.max / binade


@rule(
    severity=Severity.ERROR,
    why="the ceil rule clips nothing, so headroom only wastes codes (arXiv 2506.08027 rounds up, arXiv 2502.20586 "
    "uses 3/4 with floor: use one of the two)",
    instead="headroom=null",
)
@operands
def ceil_headroom(operand: RoundedOperand) -> bool:
    q = operand.quantizer
    return q.format is E2M1 and q.scale in (ScaleRule.E8M0_CEIL, ScaleRule.POW2) and q.range_share < 1


@rule(
    severity=Severity.ERROR,
    why="tiles are (rows, k): one scale per element of the reduction does not factor out of the sum, so the tile is "
    "transposed (arXiv 2310.10537 scales along the reduction)",
    instead="the tile's two numbers swapped",
)
@operands
def scale_per_step(operand: RoundedOperand) -> bool:
    """Tiles with one element along k and several rows."""
    rows, columns = operand.quantizer.tile
    return columns == 1 and rows != 1


@rule(
    why="stochastic rounding adds variance, which nothing averages out in a forward pass: worse than nearest "
    "(arXiv 2509.25149)",
    instead="precision.override.fprop.a.rounding=nearest (or b)",
)
@operands
def stochastic_forward(operand: RoundedOperand) -> bool:
    return operand.gemm == "fprop" and operand.quantizer.stochastic


@rule(
    why="nearest rounding of four-bit gradients is biased, and the bias adds up over steps (arXiv 2502.20586, "
    "perplexity 10.02 against 9.90 at 1.3B)",
    instead="rounding=stochastic under E8M0_FLOOR or NVFP4, or correction=row or group behind a rotation",
)
@operands
def nearest_gradient(operand: RoundedOperand) -> bool:
    backward, q = operand.gemm in ("dgrad", "wgrad") and operand.side == "a", operand.quantizer
    rotated = operand.group.recipe.gemms()[operand.gemm].rotation is not None
    corrected = rotated and q.correction is not Correction.NONE
    return backward and q.format in FOUR_BITS and not q.rounding.stochastic and not corrected


@rule(
    why="one scale for a whole token follows its outliers and rounds the rest to zero: four-bit activations "
    "diverged without clamping (arXiv 2501.17116, W8A4)",
    instead="OCC (precision.override.fprop.outliers.quantile=0.99), or blocks of 16 or 32",
)
@operands
def unclamped_tokens(operand: RoundedOperand) -> bool:
    activation = operand.gemm == "fprop" and operand.side == "a" and operand.quantizer.format in FOUR_BITS
    whole = operand.quantizer.tile[1] == -1
    return activation and whole and operand.group.recipe.fprop.outliers is None


@rule(
    why="the quantile clamps no value of so short a row, so outlier clamping does nothing (arXiv 2501.17116 uses rows "
    "of 2048 and more)",
    instead="a smaller quantile, or none",
)
@gemms
def idle_clamp(group: LayerGroup, name: str, gemm: Gemm) -> str:
    clamp = gemm.outliers
    channels = group.plan.shape[1]
    idle = clamp is not None and clamp.quantile < 1 and clamp.clipped(channels) == 0
    return f"OCC {clamp.quantile} of {channels} channels clamps none" if clamp is not None and idle else ""


@rule(
    why="E5M2 has two mantissa bits; weights and activations need three, gradients need range (arXiv 2209.05433)",
    instead="format=E4M3",
)
@operands
def e5m2_forward(operand: RoundedOperand) -> bool:
    return operand.gemm == "fprop" and operand.quantizer.format is E5M2


@rule(
    why="the noise of int8 grows with the length of the reduction, which runs over all tokens in wgrad (arXiv "
    "2304.13013, section 2)",
    instead="precision.override.wgrad.a=null and b=null",
)
@operands
def int8_wgrad(operand: RoundedOperand) -> bool:
    return operand.gemm == "wgrad" and operand.quantizer.format is INT8


@rule(
    why="an FP32 scale of all tokens changes every code when the batch is split differently: dW changed by 4e-2 "
    "between layouts (docs/decisions/0001-current-scaling.md)",
    instead="scale=POW2, or a row per scale",
)
@operands
def fp32_tensor_scale(operand: RoundedOperand) -> bool:
    """FP32 scales of whole tensors of tokens. Weights are excluded: they do not depend on how tokens are split."""
    q, tokens = operand.quantizer, operand.side == "a" or operand.gemm == "wgrad"
    return tokens and q.format.scaled and q.tile == (-1, -1) and q.scale is ScaleRule.FP32


@rule(
    why="training in eight bits degraded when the language-model head was quantised (arXiv 2405.18710), and published "
    "four-bit systems exclude it (arXiv 2509.25149)",
    instead="head: {_target_: lowprec_train.recipes.bf16.recipe} in the policy",
)
@operands
def quantised_head(operand: RoundedOperand) -> bool:
    return not operand.group.in_blocks


@rule(
    why="the slope of the estimator assumes absmax scales per channel; other scales leave up to half of the grid and "
    "its slopes unused (arXiv 2501.17116, section 3.1)",
    instead="scale=FP32 with tile=[1,-1] for fprop.b, or estimator=null",
)
def dge_scale(plan: RunPlan) -> Iterator[Fault]:
    for group in plan.layer_groups:
        weight = group.recipe.fprop.b
        if not isinstance(group.recipe.estimator, DifferentiableEstimator) or not isinstance(weight, Quantizer):
            continue
        if weight.scale is not ScaleRule.FP32 or weight.tile == (-1, -1):
            yield Fault(what=f"DGE on W = {weight}", where=group.layers)


@rule(
    why="an outlier is spread over less than its scale block, or unevenly over several (arXiv 2502.20586 rotates "
    "64 over blocks of 32, arXiv 2509.25149 16 over 16)",
    instead="a rotation that is a multiple of the scale block",
)
@gemms
def short_rotation(group: LayerGroup, name: str, gemm: Gemm) -> str:
    """Rotations whose size is not a multiple of the scale block."""
    blocks = [q.tile[1] for q in (gemm.a, gemm.b) if isinstance(q, Quantizer) and q.tile[1] != -1]
    if gemm.rotation is None or all(gemm.rotation.block % block == 0 for block in blocks):
        return ""
    return f"a rotation of {gemm.rotation.block} over scale blocks of {max(blocks)}"


@rule(
    why="training with all GEMMs of the last block in four bits diverged; the last blocks stay in BF16 (arXiv "
    "2509.25149)",
    instead='"blocks[85%:].*": {_target_: lowprec_train.recipes.bf16.recipe} first in the policy',
)
def four_bit_end(plan: RunPlan) -> Iterator[Fault]:
    """Last blocks with all three GEMMs in E2M1 or INT4."""
    for group in plan.layer_groups:
        forward, *backward = (gemm.a for gemm in group.recipe.gemms().values())
        if group.last and all(q is not None and q.format in FOUR_BITS for q in (forward, *backward)):
            yield Fault(what="fprop, dgrad and wgrad of the last block in four bits", where=group.layers)
