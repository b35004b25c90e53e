"""Figures of the recipes' pages that the code can compute: bytes, slopes, dtypes of products."""

import re
from pathlib import Path

import pytest
import torch

from lowprec_train.numerics.formats import E4M3, E5M2
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops.codecs import row_segments
from lowprec_train.ops.schema import segment_groups
from lowprec_train.optim.codecs import expanded
from lowprec_train.precision.linear import Linear
from tests.recipes import RECIPES

PAGES = Path(__file__).parent.parent / "docs" / "recipes"


def test_bytes_of_coats_moments_by_width():
    """The table of coat.md: both moments of a row, and the length of its groups."""
    rows = re.findall(r"^\| (\d+) \| .* \| (\d+)(?:, the last of an eighth (\d+))? \| ([\d.]+) \|$", page("coat"), re.M)
    assert len(rows) >= 7
    codec = expanded()
    for width, group, last, stated in ((int(w), int(g), int(rest or g), float(b)) for w, g, rest, b in rows):
        assert f"{2 * codec.state_bytes((3, width)) / (3 * width):.2f}" == f"{stated:.2f}"
        part = width // row_segments(width)
        count = segment_groups(width, codec.group, row_segments(width))
        assert (min(part, codec.group), part - (count - 1) * codec.group if count > 1 else part) == (group, last)


@pytest.mark.parametrize(("format", "slope"), [(E5M2, 0.9971), (E4M3, 0.9993)])
def test_slope_of_rounded_gradients(format, slope):
    x = torch.randn(1 << 11, 1 << 11, generator=torch.Generator().manual_seed(0))
    rounded = Quantizer(format, scale=ScaleRule.POW2)(x).dequantize()
    measured = ((rounded.double() * x).sum() / x.double().square().sum()).item()
    assert measured == pytest.approx(slope, abs=1e-4) and f"{slope}" in page("fp8")


@pytest.mark.parametrize("name", sorted(path.stem for path in PAGES.glob("*.md")))
def test_pages_say_what_codes_are_made_of(name):
    assert "(../numerics.md#three-gemms)" in page(name) and "W is" in page(name)


@pytest.mark.parametrize(("recipe", "rounded"), [("bf16", True), ("int8_switchback", True), ("fp8", False)])
def test_what_dw_was_rounded_to(recipe, rounded):
    """numerics.md: dW is FP32, but what the `bf16` path wrote was BF16; `dequantize`, the CPU's path, writes FP32."""
    generator = torch.Generator().manual_seed(0)
    layer = Linear(64, 64, bias=False)
    layer.recipe = RECIPES[recipe]
    x, dy = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    layer(x).backward(dy)
    gradient = layer.weight.grad
    assert gradient.dtype == torch.float32 and torch.equal(gradient, gradient.bfloat16().float()) is rounded


def page(name):
    return (PAGES / f"{name}.md").read_text()
