"""A watched run from the command line: the same losses, telemetry.jsonl, resume, and the heat maps of `compare`."""

import json
import math
from pathlib import Path

import pytest
from matplotlib.image import imread

from lowprec_train.tools import cli
from tests.launching import launcher

SMALL = (
    *("model.layers=2", "model.dim=64", "model.ffn=64", "model.heads=2", "model.kv_heads=2", "model.vocab_size=320"),
    *("data.vocab_size=320", "data.seq_len=64", "micro_batch=2", "tokens_per_step=256", "steps=12", "eval_batches=1"),
    *("data.cache=cache", "checkpoint_interval=6", "eval_interval=6"),
)


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd):
    return launcher(SMALL, tmp_path, monkeypatch, capfd)


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def training(run):
    """What training did: metrics without times, memory and what telemetry adds."""
    left = ("quant/", "opt/", "time/", "perf/", "mem/")
    return [{k: v for k, v in line.items() if not k.startswith(left)} for line in lines(f"runs/{run}/metrics.jsonl")]


def interrupted(run, step):
    """As if the last launch had ended right after the checkpoint of `step`, its files going further."""
    (Path("runs") / run / "DONE").unlink()
    (Path("runs") / run / "checkpoints" / "latest").write_text(f"step-{step}\n")


@pytest.mark.parametrize("recipe", ["fp4", "coat"])
def test_twelve_steps_watched_every_fourth(launch, recipe):
    assert launch(f"+recipe={recipe}", "name=plain")[0] == 0
    status, _, err = launch(f"+recipe={recipe}", "name=watched", "telemetry_interval=4")
    assert (status, err) == (0, "")
    assert training("watched") == training("plain") and len(training("plain")) == 12
    assert not Path("runs/plain/telemetry.jsonl").exists()
    rows = lines("runs/watched/telemetry.jsonl")
    assert {row["step"] for row in rows} == {4, 8, 12}
    per_step = [sum(row["step"] == step for row in rows) for step in (4, 8, 12)]
    assert per_step[0] == per_step[1] == per_step[2] > 20
    assert {row["gemm"] for row in rows if "site" in row} == {"fprop", "dgrad"} | (
        {"wgrad"} if recipe == "fp4" else {"saved"}
    )
    assert {row["state"] for row in rows if "state" in row} == {"exp_avg", "exp_avg_sq"}
    numbers = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert all(map(math.isfinite, numbers)) and all(0 <= v <= 100 for r in rows for k, v in r.items()
                                                     if k.endswith("_pct") and v is not None)  # fmt: skip
    series = [line for line in lines("runs/watched/metrics.jsonl") if "quant/fprop.a/sqnr_db_min" in line]
    assert [line["step"] for line in series] == [4, 8, 12] and all("opt/exp_avg_sqnr_db" in line for line in series)
    fprop = [
        row["sqnr_db"] for row in rows if row.get("gemm") == "fprop" and row["operand"] == "a" and row["step"] == 8
    ]
    assert series[1]["quant/fprop.a/sqnr_db_min"] == min(fprop)

    status, out, _ = launch(f"+recipe={recipe}", "name=plain", "telemetry_interval=3")  # a launch fact: the same run
    assert status == 0 and "is done" in out


def test_a_resumed_run_writes_the_same_file(launch):
    launch("+recipe=coat", "name=whole", "telemetry_interval=2")
    launch("+recipe=coat", "name=parts", "telemetry_interval=2")
    interrupted("parts", 6)
    with Path("runs/parts/telemetry.jsonl").open("a") as file:
        file.write('{"step": 12, "site": "blo')
    status, out, _ = launch("+recipe=coat", "name=parts", "telemetry_interval=2")
    assert status == 0 and "resuming after step 6 of 12" in out
    assert Path("runs/parts/telemetry.jsonl").read_bytes() == Path("runs/whole/telemetry.jsonl").read_bytes()
    assert training("parts") == training("whole")
    interrupted("parts", 6)
    assert launch("+recipe=coat", "name=parts")[0] == 0  # telemetry is off now; what it saw beyond step 6 goes
    assert {row["step"] for row in lines("runs/parts/telemetry.jsonl")} == {2, 4, 6}
    assert training("parts") == training("whole")


def test_a_negative_interval_is_an_error(launch):
    status, _, err = launch("telemetry_interval=-2")
    assert (
        status == 1
        and "telemetry_interval=-2 must be at least 1, or 0 (no telemetry)" in err
        and not Path("runs").exists()
    )


def test_compare_draws_what_was_watched(launch, capfd):
    launch("+recipe=bf16", "name=bf16", "steps=4")
    launch("+recipe=fp4", "name=fp4", "steps=4", "telemetry_interval=1")
    status = cli.main(["compare", "runs/bf16", "runs/fp4", "--out", "report", "--heatmap", "underflow_pct"])
    out, _ = capfd.readouterr()
    assert status == 0 and "heatmap-fp4.png" in out
    assert "No heat map of bf16: run without telemetry (telemetry_interval=N)" in out.splitlines()
    assert sorted(path.name for path in Path("report").glob("heatmap*")) == ["heatmap-fp4.png"]
    assert "(heatmap-fp4.png)" in Path("report/report.md").read_text()
    assert imread("report/heatmap-fp4.png").shape[1] == 1760
