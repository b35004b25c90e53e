"""The linter's rules for the machine: settings that are slow on its GPU, or that compute other numbers than a CPU.

They ask for the path that each GEMM takes on the run's own device (`precision.gemm.execution`), and say nothing on a
CPU. `small-gemm` follows the filter of torchao for H100s: one side up to SMALL and none over LARGE.
"""

from collections.abc import Callable, Iterable, Iterator

from lowprec_train.numerics.formats import E2M1, E5M2
from lowprec_train.numerics.quantizer import POWERS_OF_TWO, Quantizer, ScaleRule
from lowprec_train.ops.reference import FOLD_SPAN, FP8
from lowprec_train.precision.gemm import Path
from lowprec_train.precision.recipe import Gemm, Reuse
from lowprec_train.train.lint.recipes import gemms, operands
from lowprec_train.train.lint.rules import Fault, Operand, Plan, Rule, Severity, Site

SMALL, LARGE = 1024, 4096
ALIGNMENT = 16  # of FP8 GEMMs in cuBLASLt
ROWS = ((1, -1), (-1, -1))  # tiles whose scale leaves the sum


def on_gpu(find: Callable[[Plan], Iterable[Fault]]) -> Callable[[Plan], Iterable[Fault]]:
    """A rule that holds on a CUDA device only."""
    return lambda plan: find(plan) if plan.on_gpu else ()


def _sides(site: Site, gemm: Gemm, name: str) -> list[Quantizer]:
    """Both quantisers of a GEMM, fprop's where its codes are taken again; fewer where a side is not quantised."""
    reused = {"dgrad": site.recipe.fprop.b, "wgrad": site.recipe.fprop.a}
    b = reused[name] if isinstance(gemm.b, Reuse) else gemm.b
    return [q for q in (gemm.a, b) if isinstance(q, Quantizer)]


def _could_be_fp8(site: Site, gemm: Gemm, name: str) -> bool:
    """Both operands have FP8 carriers, and the GEMM runs in BF16 all the same."""
    sides = _sides(site, gemm, name)
    carried = len(sides) == 2 and all(q.format.carrier in FP8 for q in sides)
    return carried and site.paths[name] == Path.DEQUANTIZE.value


def _pair(gemm: Gemm) -> str:
    return f"{gemm.a} x {gemm.b}"


def _folds_into(q: Quantizer) -> int:
    """Binades of the carrier that a blocked E2M1 operand folds into: 14 (E4M3), 28 (E5M2), 0 for none."""
    if q.format is not E2M1 or q.scale not in POWERS_OF_TWO or not q.span:
        return 0
    return next((span for span in sorted(FOLD_SPAN.values()) if q.span <= span), 0)


def _in_e5m2(q: Quantizer) -> bool:
    blocked = q.tile not in ROWS
    return _folds_into(q) == FOLD_SPAN["E5M2"] if blocked else q.format is E5M2


def e5m2_pair(site: Site, name: str, gemm: Gemm) -> str:
    both = _could_be_fp8(site, gemm, name) and all(map(_in_e5m2, _sides(site, gemm, name)))
    return _pair(gemm) if both else ""


def unfolded_blocks(site: Site, name: str, gemm: Gemm) -> str:
    if not _could_be_fp8(site, gemm, name):
        return ""
    blocked = [q for q in _sides(site, gemm, name) if q.tile not in ROWS]
    stuck = any(not _folds_into(q) for q in blocked) or (bool(blocked) and isinstance(gemm.b, Reuse))
    return _pair(gemm) if stuck else ""


def unaligned(site: Site, name: str, gemm: Gemm) -> str:
    _, n, k = site.shapes[name]
    planned_fp8 = site.paths[name].startswith("fp8") or _could_be_fp8(site, gemm, name)
    return f"sizes (m, n, k) of {site.shapes[name]}" if planned_fp8 and (n % ALIGNMENT or k % ALIGNMENT) else ""


def fast_backward(site: Site, name: str, gemm: Gemm) -> str:
    fast = name != "fprop" and site.paths[name].startswith("fp8") and not gemm.split_accumulation
    return f"{_pair(gemm)} without split accumulation" if fast else ""


def twice_rounded(operand: Operand) -> bool:
    """Values of blocks with FP32 scales are no BF16 values."""
    q = operand.quantizer
    return q.format.scaled and q.scale is ScaleRule.FP32 and q.tile not in ROWS


def small_gemm(plan: Plan) -> Iterator[Fault]:
    for site in plan.sites:
        low, high = sorted((site.in_features, site.out_features))
        if low <= SMALL and high <= LARGE and any(path.startswith("fp8") for path in site.paths.values()):
            yield Fault(what=f"{site.out_features}x{site.in_features}", where=site.layers)


WARNING = Severity.WARNING
RULES: tuple[Rule, ...] = (
    Rule(
        name="e5m2-pair",
        severity=WARNING,
        find=on_gpu(gemms(e5m2_pair)),
        why="cuBLASLt multiplies no two E5M2 matrices (pytorch/pytorch#132005), so this GEMM runs at BF16 speed",
        instead="E4M3 for one side, or a span of at most 14 for one blocked side",
    ),
    Rule(
        name="unfolded-blocks",
        severity=WARNING,
        find=on_gpu(gemms(unfolded_blocks)),
        why="these block scales do not fold into FP8 carriers, so this GEMM is exact and runs at BF16 speed "
        "(docs/numerics.md, Execution)",
        instead="power-of-two blocks of E2M1 with span=28 on one side and 14 on the other, or row scales",
    ),
    Rule(
        name="unaligned-fp8",
        severity=WARNING,
        find=on_gpu(gemms(unaligned)),
        why=f"FP8 tensor cores take multiples of {ALIGNMENT} (pytorch/pytorch#106844): this GEMM runs at BF16 speed",
        instead=f"sizes, and tokens of a micro-batch, that are multiples of {ALIGNMENT}",
    ),
    Rule(
        name="fast-backward",
        severity=WARNING,
        find=on_gpu(gemms(fast_backward)),
        why="partial sums of about 14 bits cost accuracy in backward GEMMs (NVIDIA/TransformerEngine#1278)",
        instead="split_accumulation=true for dgrad and wgrad",
    ),
    Rule(
        name="twice-rounded",
        severity=WARNING,
        find=on_gpu(operands(twice_rounded)),
        why="code times an FP32 block scale is no BF16 value: a GPU rounds the operand a second time, a CPU does not "
        "(docs/numerics.md, Execution)",
        instead="scale=POW2 or E8M0_CEIL",
    ),
    Rule(
        name="small-gemm",
        severity=WARNING,
        find=on_gpu(small_gemm),
        why="at this size FP8 costs more in rounding than the GEMM gains (NVIDIA/TransformerEngine#445; pytorch/ao's "
        f"filter: a side up to {SMALL}, the other up to {LARGE})",
        instead="+recipe=bf16 for speed; numerics are as good as at any size",
    ),
)
