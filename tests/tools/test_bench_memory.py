"""`lowprec bench memory`: categories of a step against bytes that are known, the line to the largest, the command."""

import json

import pytest
import torch
from torch import nn

from lowprec_train.tools import cli
from lowprec_train.tools.bench import memory, peers, report
from lowprec_train.tools.bench.contestant import Built, Contestant, Work

SIZES = "dim=64,heads=2,ffn=128,layers=1,vocab_size=128"
LEAN = "coat optim/master=bf16 optim.in_backward=true"
WORK = Work(
    model=SIZES,
    batch=4,
    seq_len=32,
    device=torch.device("cpu"),
    compiled=False,
    parameters="fp32",
    overrides=("compile='off'",),
)
N, K = 32, 48


def two_layers(work: Work) -> Built:
    """Saves its input, [batch, K], and a ReLU's output [batch, N]."""
    module = nn.Sequential(nn.Linear(K, N, bias=False), nn.ReLU(), nn.Linear(N, 1, bias=False))
    x = torch.ones(work.batch, K)
    return Built(module=module, loss=lambda tokens, targets: module(x).sum())


def broken(work: Work) -> Built:
    raise RuntimeError("this one cannot be built\nfor many reasons")


def test_categories_are_the_bytes_of_known_tensors():
    known = Contestant(name="known", build=two_layers, baseline=True)
    row = memory.measure_one(known, WORK, [4], rounds=1, warm_up=1)
    matrices = 4 * (N * K + N)
    assert (row["parameters"], row["gradients"]) == (matrices, matrices)
    batch = 2 * 8 * 4 * 32 + 4 * 4 * K  # tokens, targets, x
    assert row["optimizer states"] == 2 * matrices + batch + 8  # two counts of steps
    assert row["activations"] == pytest.approx(4 * 4 * N, abs=64)  # x is the contestant's own; the loss
    marks = row["marks"]
    assert [mark["mark"] for mark in marks] == ["loss", "gradient", "gradient", "update"]
    assert [mark["gradients"] for mark in marks] == [0, 4 * N, matrices, 0]
    assert row["peak"] == max(mark["peak"] for mark in marks) >= 4 * matrices
    for mark in marks:
        assert sum(mark[name] for name in memory.CATEGORIES) >= mark["peak"]


@pytest.fixture(scope="module")
def measured():
    found = memory.contestants(["coat", LEAN, "bf16"], peers.chosen(["plain"])[:1])
    found.append(Contestant(name="broken", build=broken))
    return memory.measure(found, WORK, batches=[4, 2], limit=2**24, rounds=1, warm_up=1)


def test_rows_of_runs_and_peers(measured):
    rows = {row["name"]: row for row in measured["rows"]}
    assert list(rows) == ["plain bf16", "bf16", "coat", LEAN, "broken"]
    assert "this one cannot be built" in rows["broken"]["error"] and "peak" not in rows["broken"]
    plain, bf16, coat, lean = list(rows.values())[:4]
    assert plain["of_baseline"] == 1.0 and coat["of_baseline"] == plain["peak"] / coat["peak"]
    assert coat["activations"] < 0.7 * bf16["activations"]
    assert coat["optimizer states"] < 0.7 * bf16["optimizer states"]
    assert lean["gradients"] == 0 < coat["gradients"] and lean["parameters"] < coat["parameters"]
    for row in (bf16, coat, lean):
        assert {mark["mark"] for mark in row["marks"]} == {"block", "loss", "gradient", "update"}
        assert [batch for batch, _ in row["points"]] == [4, 2] and row["tokens_per_s"] > 0
        assert row["largest"] == memory.largest_batch(row["points"], int(0.9 * 2**24)) > 4


def test_the_largest_micro_batch_is_on_the_line_through_two():
    points = [(4, 1000), (2, 800)]  # 600 and 100 a sequence
    assert memory.largest_batch(points, 2600) == 20 and memory.largest_batch(points, 2699) == 20
    assert memory.largest_batch(points, 500) == 0
    assert memory.largest_batch(points[:1], 2600) is None and memory.largest_batch([(4, 7), (2, 7)], 2600) is None


def test_the_table_and_the_figure_come_from_the_json(tmp_path, capsys):
    options = ["--model", SIZES, "--seq-len", "32", "--batches", "2,1", "--limit", "1GB", "--out", str(tmp_path)]
    options += ["--device", "cpu", "--eager", "--rounds", "1", "--warm-up", "1", "--arm", "bf16"]
    assert cli.main(["bench", "memory", *options]) == 0
    (file,) = tmp_path.glob("memory_*.json")
    printed = capsys.readouterr().out
    assert report.markdown(json.loads(file.read_text())) in printed
    assert "| bf16 | " in printed and "micro-batches of 2 x 32 tokens" in printed and "peaks at 2 and 1" in printed
    assert "activations" in file.with_suffix(".svg").read_text() or file.with_suffix(".svg").stat().st_size > 5000


def test_without_a_gpu_nothing_begins_unless_a_cpu_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "memory"]) == 2
    error = capsys.readouterr().err
    assert "this benchmark needs a GPU" in error and "--device cpu" in error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--arm", "coat alone"], "'coat alone': every run is alone on its GPU"),
        (["--arm", "coat cuda_graph=true"], "'coat cuda_graph=true': a recorded step has no moments to sample"),
        (["--limit", "80"], "--limit 80 is not a size; write for example 24GiB"),
        (["--batches", "4,0"], "'0' is not a whole number above 0"),
    ],
)
def test_mistakes_are_one_error(options, said, capsys):
    try:
        code = cli.main(["bench", "memory", "--device", "cpu", *options])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2 and said in capsys.readouterr().err
