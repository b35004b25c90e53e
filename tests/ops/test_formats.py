"""The tables of formats and roundings: what they hold and refuse, and that the compiled kernels have the same."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lowprec_train.numerics.corrections import Candidates
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops import kernels, library, reference
from lowprec_train.ops.formats import E2M1, E4M3, FORMATS, FP32, Format, parse_format, register_format
from lowprec_train.ops.rounding import (
    NEAREST,
    ROUNDINGS,
    STOCHASTIC,
    Rounding,
    encode,
    parse_rounding,
    register_rounding,
    round_to,
)
from lowprec_train.recipes.reduced_mantissa import FORMATS as OF_A_RECIPE
from lowprec_train.recipes.reduced_mantissa import TRUNCATE
from tests import oracle

CPU = torch.device("cpu")
COMPILED = [each for each in FORMATS.values() if each not in OF_A_RECIPE.values()]
HEADER = Path(__file__).parents[2] / "csrc" / "numerics" / "formats.h"
built = pytest.mark.skipif("cpu" not in kernels.present(), reason="_C.abi3.so is not built here (make kernels)")


def six_bits(**changes) -> Format:
    numbers = {"name": "E3M2", "carrier": torch.float8_e4m3fn, "max": 28.0, "mantissa_bits": 2, "min_exponent": -2}
    return Format(**(numbers | changes))


@pytest.fixture
def e3m2():
    yield register_format(six_bits())
    FORMATS.pop("E3M2")


@pytest.fixture
def toward_zero():
    yield register_rounding(Rounding(name="toward_zero", rule=lambda steps, bits: steps.trunc()))
    ROUNDINGS.pop("toward_zero")


# --- the compiled kernels' table ---


def in_header() -> dict[str, tuple[int, int, float, bool]]:
    """Format -> mantissa bits, smallest exponent, largest value, scaled, as csrc/numerics/formats.h writes them."""
    found = {}
    for name, body in re.findall(r"struct Grid<Format::(\w+)> \{(.*?)\};", HEADER.read_text(), flags=re.DOTALL):
        mantissa, low = re.search(r"mantissa = (-?\d+), low = (-?\d+);", body).groups()
        largest = re.search(r"max = ([^;]+)f;", body)[1]
        value = float.fromhex(largest) if largest.startswith("0x") else float(largest)
        found[name] = int(mantissa), int(low), value, "unscaled = false" in body
    return found


def test_the_header_has_the_table_s_numbers():
    table = {f.name: (f.mantissa_bits, f.min_exponent, f.max, f.scaled) for f in COMPILED}
    assert in_header() == table
    names = re.search(r"FORMAT_NAMES\[\] = \{(.*?)\}", HEADER.read_text())[1]
    assert re.findall(r'"(\w+)"', names) == list(map(str, COMPILED))
    names = re.search(r"ROUNDING_NAMES\[\] = \{(.*?)\}", HEADER.read_text())[1]
    assert re.findall(r'"(\w+)"', names) == [name for name in ROUNDINGS if name != str(TRUNCATE)]


@built
def test_a_library_says_what_it_was_built_with():
    named = {*map(str, COMPILED), *ROUNDINGS, *(each.value for each in Candidates)}
    assert library.KNOWN["cpu"] == named - {str(TRUNCATE)}


@built
def test_a_library_with_other_numbers_is_refused(monkeypatch):
    other = Format(name="E2M1", carrier=torch.float8_e4m3fn, max=4.0, mantissa_bits=1, min_exponent=0)
    monkeypatch.setitem(FORMATS, "E2M1", other)
    with pytest.raises(
        ImportError, match=r"_C.abi3.so was built from other sources: its E2M1 is \(1, 0, 6.0, True, 1\)"
    ):
        kernels.names()


# --- formats ---


@pytest.mark.parametrize("format", COMPILED, ids=str)
def test_grids_are_those_of_the_oracle(format):
    table = oracle.TABLES.get(format.name)
    if format.grid:
        assert list(format.grid) == table.tolist()
    else:
        assert format.mantissa_bits > 6


def test_native_formats_are_torch_s():
    assert {f.name for f in FORMATS.values() if f.native} == {"E4M3", "E5M2", "BF16", "FP16", "FP32"}
    assert {f.name for f in COMPILED if not f.scaled} == {"BF16", "FP32"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "e3m2"}, "in capitals"),
        ({"name": "E3 M2"}, "in capitals"),
        ({"mantissa_bits": -1}, "not within FP32"),
        ({"mantissa_bits": 24}, "not within FP32"),
        ({"min_exponent": -127}, "not within FP32"),
        ({"max": 27.0}, "27.0 is not on a grid"),
        ({"max": math.inf}, "not inf"),
        ({"max": math.nan}, "not nan"),
        ({"max": 0.0}, "not 0.0"),
        ({"carrier": torch.int8}, "cannot represent"),
        ({"mantissa_bits": 4}, "cannot represent"),
        ({"max": 512.0}, "cannot represent"),
        ({"min_exponent": -8}, "cannot represent"),
        ({"carrier": torch.float64}, "carriers are"),
        ({"carrier": torch.float32, "min_exponent": -125}, "below 2\\^-125"),
    ],
)
def test_what_is_no_format_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        six_bits(**changes)


def test_a_name_is_taken_once(e3m2):
    assert register_format(six_bits()) is e3m2 and parse_format("e3m2") is e3m2
    with pytest.raises(ValueError, match="there is a format E3M2 already"):
        register_format(six_bits(max=24.0))
    with pytest.raises(ValueError, match="unknown format 'E9M9'; formats are E2M1"):
        parse_format("E9M9")


def test_what_is_in_no_table_makes_no_quantiser():
    with pytest.raises(ValueError, match="E3M2 is in no table"):
        Quantizer(six_bits())
    with pytest.raises(ValueError, match="odd is in no table"):
        Quantizer(E4M3, rounding=Rounding(name="odd", rule=lambda steps, bits: steps))
    with pytest.raises(ValueError, match=r"rounding is one of nearest, stochastic, (truncate, )?not True"):
        Quantizer(E4M3, (1, -1), ScaleRule.FP32, True)


# --- rounding ---


def test_a_new_format_rounds_as_the_oracle_says(e3m2):
    table = oracle.minifloat(3, 2, 3, 0)
    assert list(e3m2.grid) == table.tolist()
    middles = (table[1:] + table[:-1]) / 2
    for values in (table, middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9)):
        for sign in (1, -1):
            v = torch.from_numpy((sign * values).astype(np.float32))
            got = round_to(v.clamp(-28, 28), e3m2).double().numpy()
            distance = np.abs(np.abs(v.double().numpy())[:, None] - table)
            nearest = distance.min(1)[:, None] == distance
            even = np.arange(len(table)) % 2 == 0
            want = np.array([table[row & even][0] if row.sum() > 1 else table[row][0] for row in nearest])
            assert np.array_equal(np.abs(got), want) and (np.signbit(got) == (sign < 0)).all()


@pytest.mark.parametrize("tile", [(-1, -1), (1, -1), (1, 32), (16, 16)])
@pytest.mark.parametrize("rule", [ScaleRule.FP32, ScaleRule.POW2, ScaleRule.E8M0_CEIL])
def test_a_new_format_is_quantised_by_the_reference(e3m2, tile, rule):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    how = Quantizer(e3m2, tile, rule)
    got = how(x)
    assert how.on_reference(CPU) == ("quantize" in library.SERVED["cpu"])
    assert set((got.codes.float().abs()).unique().tolist()) <= set(e3m2.grid)
    largest = x.unflatten(1, (-1, 64 if tile[1] == -1 else tile[1])).unflatten(
        0, (-1, 32 if tile[0] == -1 else tile[0])
    )
    step = largest.abs().amax((1, 3)) / 28 * 4 / 2 * (1 if rule is ScaleRule.FP32 else 2)
    error = (got.dequantize() - x).abs().unflatten(1, (step.shape[1], -1)).unflatten(0, (step.shape[0], -1))
    assert (error <= step[:, None, :, None] * (1 + 1e-6)).all()
    assert torch.equal(got.dequantize(), how(got.dequantize()).dequantize())


def test_a_new_rule_reaches_every_scale(toward_zero):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    for how in (
        Quantizer(E4M3, (1, -1), rounding=toward_zero),
        Quantizer(E2M1, (1, 32), ScaleRule.E8M0_CEIL, toward_zero),
        Quantizer(E2M1, (1, 16), ScaleRule.NVFP4, toward_zero),
    ):
        nearest = Quantizer(how.format, how.tile, how.scale)
        got, other = how(x).dequantize(), nearest(x).dequantize()
        assert (got.abs() <= x.abs() * (1 + 1e-6)).all() and (got.abs() < other.abs()).any()
        assert "toward_zero" in str(how) and how.on_reference(CPU) == bool(library.SERVED["cpu"])
        assert not nearest.on_reference(CPU)


def test_a_rule_that_draws_gets_sixteen_bits_of_each_element():
    seen = []

    def watched(steps, bits):
        seen.append(bits)
        return STOCHASTIC.rule(steps, bits)

    rule = register_rounding(Rounding(name="watched", rule=watched, stochastic=True))
    try:
        x, seed = torch.randn(8, 32), torch.tensor(5)
        got = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, rule)(x, seed)
        want = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, STOCHASTIC)(x, seed)
    finally:
        ROUNDINGS.pop("watched")
    assert torch.equal(got.codes.float(), want.codes.float()) and torch.equal(got.scale, want.scale)
    assert np.array_equal(torch.cat(seen).numpy(), oracle.random_bits(5, 8, 32))


@pytest.mark.parametrize("op", library.NAMED)
def test_a_seed_is_not_what_makes_rounding_stochastic(op):
    """To nearest beside a seed is to nearest; without a seed, stochastic rounding is an error."""
    x, seed = torch.randn(32, 64), torch.tensor(3)
    calls = {
        "quantize": (x, "E4M3", [1, -1], "FP32", 1.0, 0),
        "quantize_nvfp4": (x, [1, 16], 1.0),
        "quantize_by": (x, x.abs().amax(1, keepdim=True), None, "E4M3", [1, -1], "FP32", 1.0, 0),
        "quantize_nvfp4_by": (x, x.abs().unflatten(1, (-1, 16)).amax(2), x.abs().amax().reshape(1, 1), [1, 16], 1.0),
        "rotate_fold": (x, None, False, seed, 32, "E8M0_CEIL", 1.0, 14, "E4M3"),
    }
    if op not in calls:
        return
    for run in (getattr(torch.ops.lowprec, op).default, getattr(torch.ops.lowprec, op).reference):
        plain, seeded = run(*calls[op], "nearest", None, None), run(*calls[op], "nearest", seed, None)
        drawn = run(*calls[op], "stochastic", seed, None)
        assert torch.equal(plain[0].float(), seeded[0].float()) and not torch.equal(plain[0].float(), drawn[0].float())
        with pytest.raises((RuntimeError, ValueError), match="seed"):
            run(*calls[op], "stochastic", None, None)
        with pytest.raises((RuntimeError, ValueError), match="unknown rounding"):
            run(*calls[op], "upwards", seed, None)


def test_names_of_rules():
    assert parse_rounding("Nearest") is NEAREST and register_rounding(STOCHASTIC) is STOCHASTIC
    with pytest.raises(ValueError, match="unknown rounding 'up'; roundings are nearest, stochastic"):
        parse_rounding("up")
    with pytest.raises(ValueError, match="there is a rounding nearest already"):
        register_rounding(Rounding(name="nearest", rule=lambda steps, bits: steps))
    with pytest.raises(ValueError, match="small letters"):
        Rounding(name="To zero", rule=lambda steps, bits: steps)


def test_fp32_is_not_rounded():
    v = torch.tensor([1e-45, 1.0000001, torch.nan, torch.inf])
    assert torch.equal(encode(v, FP32).nan_to_num(), v.nan_to_num())
    with pytest.raises(ValueError, match="FP32 is not rounded"):
        Quantizer(FP32, rounding=STOCHASTIC)


@pytest.mark.parametrize(
    "arguments",
    [
        ("E3M2", [1, -1], "FP32", 1.0, 0, "nearest", None, None),
        ("E3M2", [1, 32], "E8M0_FLOOR", 0.75, 0, "toward_zero", None, None),
        ("INT8", [1, -1], "FP32", 1.0, 0, "stochastic", torch.tensor(3), None),
        ("BF16", [1, -1], "FP32", 1.0, 0, "stochastic", torch.tensor(3), None),
    ],
    ids=lambda a: f"{a[0]} {a[5]}",
)
def test_the_reference_is_one_graph(e3m2, toward_zero, arguments):
    """As it runs on a GPU for what no kernel knows (`library._on_cuda`)."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    torch._dynamo.reset()
    compiled = torch.compile(reference.quantize, fullgraph=True, dynamic=False, backend="eager")(x, *arguments)
    assert torch.equal(compiled[0].float(), reference.quantize(x, *arguments)[0].float())
    torch._dynamo.reset()
