#!/usr/bin/env python
"""Errors of four-bit quantisers: squared errors of the forward ones, slope and noise of the backward ones.

    forward     mean |Q(x) - x|^2 / mean |x|^2 on N(0, 1), Student t (4 degrees), Laplace
    backward    over R random Hadamard transforms:  error     mean |Q(y) - y|^2 / |y|^2 of a draw
                                                    slope     mean <y, Q(y)> / |y|^2        1: no shrinkage
                                                    residual  |mean of Q(y), rotated back, - x| / |x|
                                                    unbiased  sqrt(error / R): the residual of an unbiased quantiser

Rows of normal data, and of tokens of lognormal size with eight channels 30 times as large. FP64 over FP32 codes.

    python scripts/four_bit_errors.py             measure, write docs/results/four_bit_errors.json and its .md
    python scripts/four_bit_errors.py --render    write the .md again from the JSON
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowprec_train.numerics.corrections import Candidates, Correction
from lowprec_train.numerics.draws import Operand
from lowprec_train.numerics.formats import E2M1, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.hadamard import RandomHadamard
from lowprec_train.recipes import fp4_fold

COMMAND = "python scripts/four_bit_errors.py"
RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "four_bit_errors.json"
SHAPE, ROWS, ROTATIONS, BLOCK = (1024, 4096), (32, 1024), 200, 128

NVFP4 = Quantizer(E2M1, (1, 16), ScaleRule.NVFP4)
FORWARD: dict[str, Quantizer] = {
    "FOLD3": fp4_fold.operand(),
    "NVFP4": NVFP4,
    "NVFP4, 4/6": replace(NVFP4, candidates=Candidates.MSE),
    "MXFP4, ceil": Quantizer(E2M1, (1, 32), ScaleRule.E8M0_CEIL),
}
BACKWARD: dict[str, Quantizer] = {
    "FOLD3, a factor per row": fp4_fold.backward().a or fp4_fold.operand(),
    "FOLD3": fp4_fold.operand(),
    "MS-EDEN": replace(NVFP4, correction=Correction.GROUP),
    "NVFP4, stochastic": replace(NVFP4, rounding=STOCHASTIC),
    "MXFP4 3/4, stochastic": Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, rounding=STOCHASTIC),
}


def normal(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g)


def student(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    square = sum(torch.randn(shape, generator=g).square() for _ in range(4)) / 4
    return torch.randn(shape, generator=g) / torch.as_tensor(square).sqrt()


def laplace(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=g) - 0.5
    return -uniform.sign() * torch.log1p(-2 * uniform.abs())


def outlier_channels(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=g) * torch.randn(shape[0], 1, generator=g).exp()
    x[:, torch.randperm(shape[1], generator=g)[:8]] *= 30
    return x


FORWARD_DATA = {"normal": normal, "Student t, 4": student, "Laplace": laplace}
BACKWARD_DATA = {"normal": normal, "outlier channels": outlier_channels}


def forward_error(how: Quantizer, x: Tensor) -> float:
    return float((how(x).dequantize() - x).double().square().sum() / x.double().square().sum())


def backward_errors(how: Quantizer, x: Tensor, rotations: int) -> dict[str, float]:
    """Return the figures above of one quantiser after `rotations` rotations of x."""
    size = x.double().square().sum(1)
    total, slope, error = torch.zeros_like(x, dtype=torch.float64), 0.0, 0.0
    rotation = RandomHadamard(BLOCK, half=how.scale is ScaleRule.LADDER)  # as in the recipes
    orthonormal = 1 / (rotation.gain(Operand.A) * BLOCK**0.5) if rotation.half else 1.0
    for draw in range(rotations):
        signs = torch.tensor(2 * draw + 1)
        y = rotation(x, signs)
        made = how(y, torch.tensor(2 * draw) if how.stochastic else None).dequantize()
        y, made = y.double() * orthonormal, made.double() * orthonormal
        slope += float(((made * y).sum(1) / size).mean()) / rotations
        error += float(((made - y).square().sum(1) / size).mean()) / rotations
        total += turned_back(made, signs)
    residual = ((total / rotations - x).square().sum(1) / size).mean().sqrt()
    return {"error": error, "slope": slope, "residual": float(residual), "unbiased": (error / rotations) ** 0.5}


def turned_back(y: Tensor, signs: Tensor) -> Tensor:
    """x diag(s) H from y: the transform is symmetric, so H y diag(s); its own signs are those of a row of ones."""
    drawn = torch.ops.lowprec.hadamard(torch.eye(BLOCK), signs, BLOCK)[:, 0].sign()
    plain = torch.ops.lowprec.hadamard(y, None, BLOCK)
    return (plain.unflatten(1, (-1, BLOCK)) * drawn).flatten(1).double()


def measure(
    shape: tuple[int, int] = SHAPE, rows: tuple[int, int] = ROWS, rotations: int = ROTATIONS
) -> dict[str, dict[str, Any]]:
    """Quantiser -> data -> figures, of both passes."""

    def of(data: Any, size: tuple[int, int]) -> Tensor:
        made: Tensor = data(size, torch.Generator().manual_seed(0))
        return made

    return {
        "forward": {
            name: {kind: forward_error(how, of(data, shape)) for kind, data in FORWARD_DATA.items()}
            for name, how in FORWARD.items()
        },
        "backward": {
            name: {kind: backward_errors(how, of(data, rows), rotations) for kind, data in BACKWARD_DATA.items()}
            for name, how in BACKWARD.items()
        },
    }


def document(results: Mapping[str, Any]) -> str:
    """The Markdown of the figures."""
    lines = [
        "# What four bits lose",
        "",
        f"    {results['command']}",
        "",
        f"torch {results['torch']}, CPU, FP32 codes.",
    ]
    lines += [
        "",
        "Mean squared error over mean square, to nearest:",
        "",
        "| quantiser | " + " | ".join(FORWARD_DATA) + " |",
    ]
    lines += ["|---" * (1 + len(FORWARD_DATA)) + "|"]
    for name, kinds in results["forward"].items():
        lines.append(f"| {name} | " + " | ".join(f"{kinds[kind]:.5f}" for kind in FORWARD_DATA) + " |")
    figures = ("error", "slope", "residual", "unbiased")
    lines += [
        "",
        f"Behind {results['rotations']} rotations of {BLOCK}: squared error of a draw, slope, relative residual of",
    ]
    lines += ["the mean, and what that is without a bias:", ""]
    lines += [
        "| quantiser | " + " | ".join(f"{kind}: error | slope | residual | unbiased" for kind in BACKWARD_DATA) + " |"
    ]
    lines += ["|---" * (1 + len(figures) * len(BACKWARD_DATA)) + "|"]
    for name, kinds in results["backward"].items():
        row = [f"{kinds[kind][figure]:.5f}" for kind in BACKWARD_DATA for figure in figures]
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of four-bit quantisers.")
    parser.add_argument("--render", action="store_true", help="only write the table again from the JSON")
    if not parser.parse_args().render:
        results = {"command": COMMAND, "torch": torch.__version__, "rotations": ROTATIONS} | measure()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(document(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
