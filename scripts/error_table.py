"""Error of each recipe's three GEMMs relative to exact products of the same BF16 inputs, as signal-to-noise in dB.

    SQNR = 10 log10( sum |exact|^2 / sum |computed - exact|^2 )        6.02 dB are one bit

Y = X W^T, dX = dY W and dW = dY^T X of one linear layer, against FP64, on three kinds of data; medians over seeds. The
rounding of a BF16 result alone gives 55.6 dB. For optimizer codecs: relative RMS errors of Adam's moments and of the
update m / (sqrt(v) + eps) computed from them. The data is synthetic: the table orders recipes and sets tolerances, and
says nothing about a loss.

    python scripts/error_table.py               measure, write docs/results/recipe_errors.json, its .md and the pages
    python scripts/error_table.py --render      write .md and pages again from the JSON
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor

from lowprec_train.numerics.draws import SeedTable
from lowprec_train.precision.estimators import StraightThrough
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.recipe import LinearRecipe

DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS = DOCS / "results" / "recipe_errors.json"
COMMAND = "python scripts/error_table.py"
SEEDS = (0, 1, 2)
MARKS = ("<!-- errors, written by scripts/error_table.py -->", "<!-- end of errors -->")


@dataclass(frozen=True)
class Sizes:
    """Sizes of one linear layer and its batch."""

    tokens: int = 512
    in_features: int = 512
    out_features: int = 512


@dataclass(frozen=True)
class Case:
    """A recipe with options, by the name of its function under `lowprec_train.recipes`, on the page of a recipe."""

    page: str
    target: str
    options: Mapping[str, Any]

    def build(self) -> LinearRecipe:
        recipe: LinearRecipe = instantiate({"_target_": f"lowprec_train.recipes.{self.target}", **self.options})
        return recipe


CASES: dict[str, Case] = {
    "bf16": Case("bf16", "bf16.recipe", {}),
    "fp8": Case("fp8", "fp8.recipe", {}),
    "fp8, dY E4M3": Case("fp8", "fp8.recipe", {"gradient": "E4M3"}),
    "fp8_rowwise": Case("fp8_rowwise", "fp8_rowwise.recipe", {}),
    "fp8_block": Case("fp8_block", "fp8_block.recipe", {}),
    "fp4_fold": Case("fp4_fold", "fp4_fold.recipe", {}),
    "fp8_eden4": Case("fp8_eden4", "fp8_eden4.recipe", {}),
    "mxfp8": Case("mxfp8", "mxfp8.recipe", {}),
    "fp4": Case("fp4", "fp4.recipe", {}),
    "fp4, residual": Case("fp4", "fp4.recipe", {"outliers": "residual"}),
    "fp4, alpha 0.97": Case("fp4", "fp4.recipe", {"alpha": 0.97}),
    "fp4, alpha 1": Case("fp4", "fp4.recipe", {"alpha": 1.0}),
    "fp4_mixed": Case("fp4_mixed", "fp4_mixed.feed_forward", {}),
    "mxfp4": Case("mxfp4", "mxfp4.recipe", {}),
    "mxfp4, no rotation": Case("mxfp4", "mxfp4.recipe", {"rotation": 0}),
    "mxfp4, nearest": Case("mxfp4", "mxfp4.recipe", {"stochastic": False}),
    "mxfp4_fp8": Case("mxfp4_fp8", "mxfp4_fp8.recipe", {}),
    "nvfp4": Case("nvfp4", "nvfp4.recipe", {}),
    "nvfp4, nearest": Case("nvfp4", "nvfp4.recipe", {"stochastic": False}),
    "nvfp4, W in 1x16": Case("nvfp4", "nvfp4.recipe", {"square": False}),
    "nvfp4, X row-scaled": Case("nvfp4", "nvfp4.recipe", {"row_scaled": True}),
    "quartet2": Case("quartet2", "quartet2.recipe", {}),
    "ufp4": Case("ufp4", "ufp4.recipe", {}),
    "w4a8": Case("w4a8", "w4a8.recipe", {}),
    "E8M6": Case("reduced_mantissa", "reduced_mantissa.recipe", {"mantissa_bits": 6}),
    "E8M5": Case("reduced_mantissa", "reduced_mantissa.recipe", {"mantissa_bits": 5}),
    "E8M4": Case("reduced_mantissa", "reduced_mantissa.recipe", {"mantissa_bits": 4}),
    "E8M3": Case("reduced_mantissa", "reduced_mantissa.recipe", {"mantissa_bits": 3}),
    "E8M3, nearest": Case("reduced_mantissa", "reduced_mantissa.recipe", {"rounding": "nearest"}),
    "averis": Case("averis", "averis.recipe", {"of": {"_target_": "lowprec_train.recipes.nvfp4.recipe"}}),
    "nvfp4, 4over6": Case("nvfp4", "nvfp4.recipe", {"select": "4over6"}),
    "int8_switchback": Case("int8_switchback", "int8_switchback.recipe", {}),
}
ALSO = {"fp8_lm": ["fp8"], "coat": ["fp8"], "fp4_mixed": ["fp4_mixed", "fp8"]}
"""Pages whose linears are another recipe's, too."""

Node = dict[str, Any]
E4M3: Node = {"_target_": "lowprec_train.optim.codecs.scaled", "format": "E4M3"}
FP16: Node = {"_target_": "lowprec_train.optim.codecs.scaled", "format": "FP16"}
BF16: Node = {"_target_": "lowprec_train.optim.codecs.plain", "format": "BF16"}
EXPANDED: Node = {"_target_": "lowprec_train.optim.codecs.expanded", "format": "E4M3"}
EXPANDED_E5M2: Node = {"_target_": "lowprec_train.optim.codecs.expanded", "format": "E5M2"}
CODECS: dict[str, tuple[Node, Node]] = {
    "m, v BF16": (BF16, BF16),
    "m E4M3, v FP16": (E4M3, FP16),
    "m, v E4M3 expanded": (EXPANDED, EXPANDED),
    "m E4M3 expanded, v E5M2 expanded": (EXPANDED, EXPANDED_E5M2),
    "m E4M3, v E4M3 expanded": (E4M3, EXPANDED),
    "m, v E4M3": (E4M3, E4M3),
}
OPTIMIZERS = {"fp8_lm": "m E4M3, v FP16", "fp4": "m E4M3, v FP16", "coat": "m, v E4M3 expanded"}
"""Pages of recipes with an optimizer of their own."""
SPREADS = {"gradients of one scale": 0.0, "of lognormal scales": 1.0}
BETAS, EPS, STEPS, GRADIENT = (0.9, 0.95), 1e-8, 60, 1e-3


# --- data -----------------------------------------------------------------------------------------------------------


def gaussian(shape: tuple[int, int], draws: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=draws)


def student(shape: tuple[int, int], draws: torch.Generator) -> Tensor:
    """Student's t with 3 degrees of freedom."""
    squares = torch.randn((3, *shape), generator=draws).square().sum(0)
    return torch.randn(shape, generator=draws) / (squares / 3).sqrt()


def outlier_channels(shape: tuple[int, int], draws: torch.Generator) -> Tensor:
    """Gaussian, 8 of the columns 30 times as large."""
    x = torch.randn(shape, generator=draws)
    x[:, torch.randperm(shape[1], generator=draws)[:8]] *= 30
    return x


Sampler = Callable[[tuple[int, int], torch.Generator], Tensor]
DATA: dict[str, tuple[Sampler, Sampler, Sampler]] = {  # of X, W, dY
    "Gaussian": (gaussian, gaussian, gaussian),
    "Student t, 3": (student, student, student),
    "outlier channels": (outlier_channels, gaussian, gaussian),
}


def inputs(kind: str, sizes: Sizes, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """X [tokens, in], W [out, in] and dY [tokens, out] as BF16 values; W in FP32, as a parameter is."""
    draws = torch.Generator().manual_seed(seed)
    tokens, k, n = sizes.tokens, sizes.in_features, sizes.out_features
    shapes = ((tokens, k), (n, k), (tokens, n))
    x, w, dy = (make(shape, draws).bfloat16() for make, shape in zip(DATA[kind], shapes, strict=True))
    return x, (w * 2**-6).float(), dy


# --- measurement ----------------------------------------------------------------------------------------------------


def sqnr(computed: Tensor, exact: Tensor) -> float:
    """Return 10 log10 of signal to noise power."""
    noise = (computed.double() - exact).square().sum().item()
    return 10 * math.log10(exact.square().sum().item() / noise) if noise else math.inf


def one(recipe: LinearRecipe, kind: str, sizes: Sizes, seed: int) -> dict[str, float]:
    """SQNR of y, dx and dw of one draw of the data."""
    x, w, dy = inputs(kind, sizes, seed)
    layer = Linear(sizes.in_features, sizes.out_features, bias=False)
    layer.draws, layer.recipe = SeedTable(seed, 1).at(0, 0).site(0), recipe
    with torch.no_grad():
        layer.weight.copy_(w)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    exact_x, exact_w, exact_dy = x.detach().double(), w.double(), dy.double()
    assert x.grad is not None and layer.weight.grad is not None
    return {
        "y": sqnr(y.detach(), exact_x @ exact_w.t()),
        "dx": sqnr(x.grad, exact_dy @ exact_w),
        "dw": sqnr(layer.weight.grad, exact_dy.t() @ exact_x),
    }


def linear_errors(recipe: LinearRecipe, kind: str, sizes: Sizes, seeds: Sequence[int]) -> dict[str, float]:
    """Medians over seeds, in dB, two decimals. `dw` is taken straight through; `dw_estimator` with the recipe's
    estimator, if it has one that changes dW by design.
    """
    straight = replace(recipe, estimator=StraightThrough())
    found = medians([one(straight, kind, sizes, seed) for seed in seeds])
    if straight != recipe:
        found["dw_estimator"] = medians([one(recipe, kind, sizes, seed) for seed in seeds])["dw"]
    return found


def medians(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(values[key] for values in each), 2) for key in each[0]}


def measure(names: Iterable[str] = CASES, sizes: Sizes = Sizes(), seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Case -> kind of data -> SQNR."""
    return {name: {kind: linear_errors(CASES[name].build(), kind, sizes, seeds) for kind in DATA} for name in names}


def moments(spread: float, shape: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Adam's m and v after STEPS steps of N(0, s^2) gradients, s = GRADIENT exp(spread N(0, 1)) for an element."""
    draws = torch.Generator().manual_seed(seed)
    scale = GRADIENT * (spread * torch.randn(shape, generator=draws)).exp()
    m, v = torch.zeros(shape), torch.zeros(shape)
    for _ in range(STEPS):
        g = scale * torch.randn(shape, generator=draws)
        m.lerp_(g, 1 - BETAS[0])
        v.lerp_(g.square(), 1 - BETAS[1])
    return m, v


def relative(computed: Tensor, exact: Tensor) -> float:
    """Return the RMS of the error over the RMS of the exact values, in per cent."""
    return 100 * ((computed.double() - exact.double()).norm() / exact.double().norm()).item()


def codec_errors(nodes: tuple[Node, Node], spread: float, sizes: Sizes, seeds: Sequence[int]) -> dict[str, float]:
    """Medians over seeds of the errors of m, v and the update, in per cent."""
    first, second = map(instantiate, nodes)
    found = []
    for seed in seeds:
        m, v = moments(spread, (sizes.out_features, sizes.in_features), seed)
        m_kept, v_kept = first.decode(first.encode(m)), second.decode(second.encode(v))
        wanted, update = (a.double() / (b.double().sqrt() + EPS) for a, b in ((m, v), (m_kept, v_kept)))
        found.append({"m": relative(m_kept, m), "v": relative(v_kept, v), "update": relative(update, wanted)})
    return medians(found)


def measure_codecs(sizes: Sizes = Sizes(), seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Pair of codecs -> spread of the gradients -> errors in per cent."""
    return {
        name: {kind: codec_errors(nodes, spread, sizes, seeds) for kind, spread in SPREADS.items()}
        for name, nodes in CODECS.items()
    }


# --- tables ---------------------------------------------------------------------------------------------------------


def linear_table(results: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return a Markdown table with a row per case: Y, dX, dW for each kind of data."""
    kinds = list(DATA)
    lines = ["| SQNR, dB | " + " | ".join(f"{kind}: Y | dX | dW" for kind in kinds) + " |", "|---" * 10 + "|"]
    for name in names:
        cells = [f"{results[name][kind][key]:.1f}" for kind in kinds for key in ("y", "dx", "dw")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    estimated = [name for name in names if "dw_estimator" in results[name][kinds[0]]]
    if estimated:
        lines.append("\ndW with the estimator's slope, which changes it by design, on the three kinds of data:\n")
    for name in estimated:
        values = ", ".join(f"{results[name][kind]['dw_estimator']:.1f}" for kind in kinds)
        lines.append(f"- {name}: {values} dB")
    return "\n".join(lines)


def codec_table(results: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return a Markdown table with a row per pair of codecs: m, v, update for each spread, in per cent."""
    head = " | ".join(f"{kind}: m | v | update" for kind in SPREADS)
    lines = [f"| relative RMS error, % | {head} |", "|---" * (1 + 3 * len(SPREADS)) + "|"]
    for name in names:
        cells = [f"{results[name][kind][key]:.3g}" for kind in SPREADS for key in ("m", "v", "update")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def document(results: Mapping[str, Any]) -> str:
    """docs/results/recipe_errors.md."""
    sizes = results["sizes"]
    shape = f"{sizes['tokens']} tokens, {sizes['in_features']} inputs, {sizes['out_features']} outputs"
    return f"""# Errors of the recipes

Signal-to-noise of the three GEMMs of one linear layer against FP64 products of the same BF16 inputs:
{shape}, median of {len(results["seeds"])} seeds, CPU, torch {results["torch"]}.
Made by `{COMMAND}` from [recipe_errors.json](recipe_errors.json).

- *Gaussian*: X, W and dY. *Student t, 3*: all three, with 3 degrees of freedom. *outlier channels*: Gaussian, with 8
  channels of X 30 times as large.
- dW is taken straight through the rounding of W; the slope of an estimator changes it by design.
- The rounding of a BF16 result alone leaves 55.6 dB; 6.02 dB are one bit.
- Synthetic data: the table orders recipes and sets tolerances. It does not predict a loss.

{linear_table(results["linears"], CASES)}

## Optimizer codecs

Adam's moments after {STEPS} steps of N(0, s^2) gradients (betas {BETAS[0]} and {BETAS[1]}), encoded and decoded
once, and the update m / (sqrt(v) + {EPS:g}) made of them. s is {GRADIENT:g} for every element, or {GRADIENT:g} times a
lognormal number of each element's own. A second moment in plain E4M3 loses its small values, and their updates explode.

{codec_table(results["codecs"], CODECS)}
"""


def page_table(results: Mapping[str, Any], page: str) -> str:
    """Return the text between the marks of a recipe's page."""
    names = ALSO.get(page, [name for name, case in CASES.items() if case.page == page])
    tables = [linear_table(results["linears"], names)]
    if page in OPTIMIZERS:
        tables.append(codec_table(results["codecs"], [OPTIMIZERS[page]]))
    return "\n\n".join([*tables, "See [how it was measured](../results/recipe_errors.md)."])


def with_table(text: str, table: str) -> str:
    """Return the page with the text between its marks replaced."""
    begin, end = map(re.escape, MARKS)
    assert len(re.findall(f"{begin}.*?{end}", text, flags=re.DOTALL)) == 1, "a page has its marks once"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{MARKS[0]}\n{table}\n{MARKS[1]}", text, flags=re.DOTALL)


def pages(docs: Path = DOCS) -> list[Path]:
    """Return the pages that have a table: those of recipes whose GEMMs this project computes."""
    return sorted(page for page in (docs / "recipes").glob("*.md") if MARKS[0] in page.read_text())


def render(results: Mapping[str, Any], docs: Path = DOCS) -> None:
    """Write the document and the tables of the pages."""
    (docs / "results" / "recipe_errors.md").write_text(document(results))
    for page in pages(docs):
        page.write_text(with_table(page.read_text(), page_table(results, page.stem)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Signal-to-noise of every recipe's GEMMs.")
    parser.add_argument("--render", action="store_true", help="only write the tables again from the JSON")
    if not parser.parse_args().render:
        sizes = Sizes()
        results = {"command": COMMAND, "sizes": vars(sizes), "seeds": list(SEEDS), "torch": torch.__version__}
        results |= {"linears": measure(sizes=sizes), "codecs": measure_codecs(sizes=sizes)}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    render(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
