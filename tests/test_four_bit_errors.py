"""The figures of four-bit quantisers: what the committed ones claim, and that the script finds them again."""

from __future__ import annotations

import json

import pytest

from scripts import four_bit_errors as script

EDEN = "FOLD3, a factor per row"


@pytest.fixture(scope="module")
def committed():
    return json.loads(script.RESULTS.read_text())


def test_what_is_claimed(committed):
    forward, backward = committed["forward"], committed["backward"]
    assert forward["FOLD3"]["normal"] <= 0.0083 and forward["FOLD3"]["normal"] < forward["NVFP4"]["normal"] < 0.0092
    for figures in backward[EDEN].values():
        assert figures["slope"] == pytest.approx(1, abs=2e-4) and figures["error"] < 0.0083
    assert forward["NVFP4, 4/6"]["normal"] <= 0.0076
    for figures in backward["MS-EDEN"].values():
        assert figures["slope"] == pytest.approx(1, abs=2e-4)
    assert backward["MS-EDEN"]["normal"]["error"] == pytest.approx(0.0098, abs=5e-5)
    assert backward["FOLD3"]["normal"]["slope"] < 0.995
    assert 2.8 < backward["NVFP4, stochastic"]["normal"]["error"] / backward[EDEN]["normal"]["error"] < 2.9
    assert list(forward) == list(script.FORWARD) and list(backward) == list(script.BACKWARD)


def test_the_script_finds_them(committed):
    found = script.measure((64, 1024), (8, 512), 12)
    for name, kinds in found["forward"].items():
        assert kinds["normal"] == pytest.approx(committed["forward"][name]["normal"], rel=0.03)
    for name, kinds in found["backward"].items():
        assert kinds["normal"]["error"] == pytest.approx(committed["backward"][name]["normal"]["error"], rel=0.03)
        assert kinds["normal"]["slope"] == pytest.approx(committed["backward"][name]["normal"]["slope"], abs=3e-3)
        assert kinds["normal"]["residual"] < 1.1 * (kinds["normal"]["unbiased"] + 0.01)


def test_the_table_is_made_from_the_figures(committed):
    assert script.RESULTS.with_suffix(".md").read_text() == script.document(committed)
