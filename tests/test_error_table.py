"""The error table: numbers that theory knows, the committed figures measured again, tables made from them alone."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from scripts import error_table
from scripts.error_table import CASES, DATA, DOCS, RESULTS, Sizes
from tests.recipes import SYSTEMS

SMALL = Sizes(tokens=128, in_features=256, out_features=128)
E4M3, E5M2, BF16, INT8 = 0.0257, 0.0512, 0.00166, 0.0095
INT4 = math.sqrt(0.0067)
MX_NEAREST, MX_STOCHASTIC, NVFP4 = math.sqrt(0.0133), math.sqrt(0.0282), math.sqrt(0.00893)
"""Relative RMS errors of one operand of N(0, 1) values. E4M3, E5M2: plain rounding; MX: blocks of 32 under E2M1, to
nearest (arXiv 2502.20586's floor rule; ceil is as good on average) and stochastic with 3/4; NVFP4: 1x16 to nearest;
INT4: 7 steps to the
largest of 16; INT8: 127 steps to the largest of some 256 values."""


def decibel(*errors: float) -> float:
    """Of a product whose operands have independent relative errors."""
    return -10 * math.log10(sum(error**2 for error in errors))


KNOWN = {
    ("bf16", "y"): decibel(BF16),
    ("fp8", "y"): decibel(E4M3, E4M3),
    ("fp8", "dx"): decibel(E5M2, E4M3),
    ("fp8", "dw"): decibel(E5M2, E4M3),
    ("fp8_rowwise", "dw"): decibel(E4M3, E4M3),
    ("fp8_block", "dx"): decibel(E4M3, E4M3),
    ("mxfp8", "dx"): decibel(E4M3, E4M3),
    ("mxfp4", "y"): decibel(BF16),
    ("mxfp4", "dx"): decibel(MX_STOCHASTIC, MX_STOCHASTIC),
    ("mxfp4", "dw"): decibel(MX_STOCHASTIC, MX_STOCHASTIC),
    ("mxfp4, nearest", "dx"): decibel(MX_NEAREST, MX_NEAREST),
    ("nvfp4, nearest", "dw"): decibel(NVFP4, NVFP4),
    ("ufp4", "y"): decibel(INT4, INT4),
    ("int8_switchback", "y"): decibel(INT8, INT8),
    ("int8_switchback", "dw"): decibel(BF16),
}


@pytest.mark.parametrize(("name", "gemm"), KNOWN, ids=str)
def test_errors_are_those_of_their_formats(name, gemm):
    found = error_table.linear_errors(CASES[name].build(), "Gaussian", SMALL, seeds=(0,))
    assert found[gemm] == pytest.approx(KNOWN[name, gemm], abs=1.0)


def test_outliers_are_what_compensation_is_for():
    """Residual over carrier over nothing, where 8 channels are 30 times as large (arXiv 2501.17116, table 1)."""
    sizes = Sizes(tokens=128, in_features=512, out_features=128)
    names = ("fp4, residual", "fp4", "fp4, alpha 1")
    y = [error_table.linear_errors(CASES[n].build(), "outlier channels", sizes, (0,))["y"] for n in names]
    assert y[0] > y[1] + 3 > y[2] + 6


def test_the_estimator_is_told_apart():
    found = error_table.linear_errors(CASES["fp4"].build(), "Gaussian", SMALL, (0,))
    assert found["dw_estimator"] < 5 < 15 < found["dw"]
    assert "dw_estimator" not in error_table.linear_errors(CASES["fp8"].build(), "Gaussian", SMALL, (0,))


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_the_committed_figures_come_out_again(name):
    committed = json.loads(RESULTS.read_text())
    again = error_table.measure([name], Sizes(**committed["sizes"]), committed["seeds"])
    for kind in DATA:
        assert again[name][kind] == pytest.approx(committed["linears"][name][kind], abs=0.1)


CODEC_SIZES = Sizes(in_features=256, out_features=128)


def test_codecs_have_the_errors_of_their_formats():
    """Plain E4M3 and BF16 as rounding has it; range expansion divides the error by its exponents (arXiv 2410.19313)."""
    found = error_table.measure_codecs(CODEC_SIZES, seeds=(0,))
    one_scale = {name: kinds["gradients of one scale"] for name, kinds in found.items()}
    assert one_scale["m E4M3, v FP16"]["m"] == pytest.approx(100 * E4M3, rel=0.1)
    assert one_scale["m, v BF16"]["v"] == pytest.approx(100 * BF16, rel=0.1)
    assert one_scale["m E4M3, v FP16"]["v"] < 0.03
    assert one_scale["m, v E4M3 expanded"]["m"] < 0.6 * one_scale["m, v E4M3"]["m"]
    assert one_scale["m, v E4M3 expanded"]["v"] < 0.2 * one_scale["m, v E4M3"]["v"]


def test_a_second_moment_in_plain_e4m3_explodes():
    """What the linter's fp8-second-moment refuses (arXiv 2310.18313, figure 8)."""
    found = error_table.measure_codecs(CODEC_SIZES, seeds=(0,))
    spread = {name: kinds["of lognormal scales"]["update"] for name, kinds in found.items()}
    assert spread["m, v E4M3"] > 1000
    assert max(error for name, error in spread.items() if name != "m, v E4M3") < 4


def test_every_case_was_measured_and_every_recipe_is_a_case():
    committed = json.loads(RESULTS.read_text())
    assert list(committed["linears"]) == list(CASES) and list(committed["codecs"]) == list(error_table.CODECS)
    assert committed["command"] == error_table.COMMAND and len(committed["seeds"]) >= 3
    pages = {case.page for case in CASES.values()} | set(error_table.ALSO)
    assert pages == set(SYSTEMS) == {page.stem for page in error_table.pages()}


def test_the_tables_are_made_from_the_figures(tmp_path):
    """The document and every page are what the script writes from the committed JSON."""
    docs = tmp_path / "docs"
    shutil.copytree(DOCS / "recipes", docs / "recipes")
    (docs / "results").mkdir()
    error_table.render(json.loads(RESULTS.read_text()), docs)
    for path in [docs / "results" / "recipe_errors.md", *error_table.pages(docs)]:
        assert path.read_text() == (DOCS / path.relative_to(docs)).read_text(), f"run: {error_table.COMMAND} --render"
