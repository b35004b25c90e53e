"""Heat maps: every row of telemetry.jsonl is the colour of its cell, wherever it stands, on one scale for all runs."""

import json
import math
import warnings

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from lowprec_train.numerics.formats import E4M3
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.tools import cli
from lowprec_train.tools.compare import heatmap
from lowprec_train.tools.compare.runs import read_runs
from lowprec_train.tools.compare.telemetry import LABELS, maps, read_rows
from lowprec_train.train.diagnostics import roundings

BLOCKS = 12
STEPS = (10, 20, 30)


def operand(step, site, gemm, side, **figures):
    return {"step": step, "site": site, "gemm": gemm, "operand": side, "what": "E4M3[*x*] POW2", **figures}


def telemetry(path, db, tail=""):
    """fprop.a of 12 blocks with SQNR db(block, step), dgrad.a of the first alone, a state of two weights."""
    rows = [operand(s, f"blocks.{i}.mlp", "fprop", "a", sqnr_db=db(i, s)) for s in STEPS for i in range(BLOCKS)]
    rows += [operand(s, "blocks.0.mlp", "dgrad", "a", sqnr_db=25.0, amax=2.0**-s) for s in STEPS]
    state = {"state": "exp_avg", "what": "E4M3", "sqnr_db": 30.0, "stalled_pct": 1.5}
    rows += [{"step": s, "parameter": f"blocks.{i}.weight", **state} for s in STEPS for i in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def by_name(found):
    return {each.name: each for each in found}


def decibels(block, step):
    return None if (block, step) == (3, 20) else 20.0 + block / 4 + step / 40


def test_every_row_has_its_cell(tmp_path):
    source = telemetry(tmp_path / "telemetry.jsonl", decibels)
    found = by_name(maps(read_rows(source), "sqnr_db"))
    assert list(found) == ["fprop.a", "dgrad.a", "exp_avg"]
    forward = found["fprop.a"]
    assert forward.layers == tuple(f"blocks.{i}.mlp" for i in range(BLOCKS)) and forward.steps == STEPS
    wanted = [[decibels(i, s) or math.nan for s in STEPS] for i in range(BLOCKS)]
    np.testing.assert_array_equal(forward.values, wanted)
    assert found["exp_avg"].layers == ("blocks.0", "blocks.1")
    assert list(by_name(maps(read_rows(source), "stalled_pct"))) == ["exp_avg"]
    np.testing.assert_array_equal(maps(read_rows(source), "amax")[0].values, [[-10, -20, -30]])
    assert maps(read_rows(source), "outlier_pct") == []


def test_torn_lines_are_left_out_and_repeated_ones_replace(tmp_path):
    again = json.dumps(operand(30, "blocks.0.mlp", "fprop", "a", sqnr_db=99.0)) + "\n"
    source = telemetry(tmp_path / "t", decibels, tail=again + '[1]\n{"step": 40}\n{"step": 40, "site": "bl')
    forward = by_name(maps(read_rows(source), "sqnr_db"))["fprop.a"]
    assert forward.steps == STEPS and forward.values[0, 2] == 99 and forward.values.shape == (BLOCKS, 3)
    assert read_rows(tmp_path / "none") == []


@pytest.fixture
def runs(make_run):
    paths = [make_run(name, [3.0, 2.0]) for name in ("bf16", "fp8", "fp4")]
    telemetry(paths[1] / "telemetry.jsonl", decibels)
    telemetry(paths[2] / "telemetry.jsonl", lambda block, step: 10.0)
    return paths


def colours_of(image):
    """How many pixels have each colour."""
    colours, counts = np.unique((image[..., :3] * 255).round().astype(int).reshape(-1, 3), axis=0, return_counts=True)
    return dict(zip(map(tuple, colours.tolist()), counts.tolist()))


def test_operands_have_the_colours_of_one_scale_over_all_runs(runs, tmp_path):
    """10 dB (all of fp4) to 25 dB (fp8's dgrad), whatever the states have: fp8's cells are found by colour, as large as
    one another.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files, notes = heatmap.save(read_runs(runs), "sqnr_db", tmp_path)
    assert [file.name for file in files] == ["heatmap-fp8.png", "heatmap-fp4.png"]
    assert notes == ["No heat map of bf16: run without telemetry (telemetry_interval=N)"]
    pictures = [colours_of(imread(file)) for file in files]
    viridis = matplotlib.colormaps["viridis"]

    def pixels(picture, value):
        """Of the cells of a value: its colour, as the PNG has it."""
        rgb = tuple(int(c) for c in viridis((value - 10) / 15, bytes=True)[:3])
        return picture.get(rgb, 0)

    cell = pixels(pictures[0], decibels(11, 30))
    assert cell > 300
    for block, step in ((0, 10), (5, 20), (11, 10)):
        assert pixels(pictures[0], decibels(block, step)) >= 0.8 * cell, (block, step)
    assert pixels(pictures[1], 10.0) > 25 * cell and pixels(pictures[0], 10.0) < cell
    blank = tuple(round(255 * c) for c in to_rgb(heatmap.BLANK))
    assert pictures[0][blank] > 0.8 * cell > pictures[1].get(blank, 0)


def test_panels_are_named_and_stand_in_the_order_of_the_gemms(tmp_path):
    found = maps(read_rows(telemetry(tmp_path / "t", decibels)), "sqnr_db")
    picture = Figure()
    heatmap.draw(picture, [found[:2], found[2:]], [2, 1], "sqnr_db", {"operands": (10, 30), "exp_avg": (29, 31)})
    titles = [ax.get_title(loc="left") or ax.get_title() for ax in picture.axes if ax.images]
    assert titles == ["fprop.a", "dgrad.a", "exp_avg"]
    images = [ax.images[0] for ax in picture.axes if ax.images]
    for image, each in zip(images, found):
        np.testing.assert_array_equal(image.get_array().filled(np.nan), each.values)
        assert image.get_clim() == ((10, 30) if "." in each.name else (29, 31))
    assert [t.get_text() for t in picture.axes[0].get_yticklabels()] == list(found[0].layers)
    assert [t.get_text() for t in picture.axes[0].get_xticklabels()] == ["10", "20", "30"]


def test_a_state_does_not_stretch_the_scale_of_the_operands():
    rows = [operand(1, f"blocks.{i}.mlp", gemm, "a", sqnr_db=18.0 + i) for i in range(3) for gemm in ("fprop", "dgrad")]
    for name, db in (("exp_avg", 32.0), ("exp_avg_sq", 75.0)):
        rows += [{"step": 1, "parameter": f"blocks.{i}.w", "state": name, "sqnr_db": db + i} for i in range(2)]
    limits = heatmap.scales(maps(rows, "sqnr_db"))
    assert limits == {"operands": (18, 20), "exp_avg": (32, 33), "exp_avg_sq": (75, 76)}


def test_many_layers_and_steps_keep_readable_labels(tmp_path):
    rows = [operand(s, f"blocks.{i}.mlp", "fprop", "a", sqnr_db=20.0) for s in range(1, 200) for i in range(160)]
    (found,) = maps(rows, "sqnr_db")
    heatmap.paint([found], "sqnr_db", heatmap.scales([found]), title="r", target=tmp_path / "h.png")
    assert 600 < imread(tmp_path / "h.png").shape[0] < 1200
    picture = Figure()
    heatmap.draw(picture, [[found]], [1], "sqnr_db", {"operands": (0, 1)})
    assert len(picture.axes[0].get_yticks()) <= heatmap.TICKS and len(picture.axes[0].get_xticks()) == 6


def test_every_figure_of_telemetry_can_be_drawn(runs, tmp_path, capsys):
    how, x = Quantizer(E4M3), torch.ones(2, 2)
    assert set(LABELS) == {
        *roundings.tally_operand(x, how(x), how).figures(),
        *roundings.tally_state(x, x, x).figures(),
    }
    assert (
        cli.main(["compare", *map(str, runs), "--out", str(tmp_path / "out"), "--heatmap", "clamped_blocks_pct"]) == 0
    )
    said = capsys.readouterr().out.splitlines()
    assert "No heat map of fp8, fp4: telemetry has no clamped_blocks_pct" in said
    assert not list((tmp_path / "out").glob("heatmap*"))
    with pytest.raises(SystemExit):
        cli.main(["compare", *map(str, runs), "--heatmap", "nonsense"])
