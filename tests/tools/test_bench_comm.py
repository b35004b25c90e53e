"""`lowprec bench comm` on two processes over gloo: every payload has its row, its bytes and its error."""

import json

import pytest
import torch

from lowprec_train.tools import cli
from lowprec_train.tools.bench import comm, report
from tests.distributed import free_port, run_distributed
from tests.tools.comm_ranks import RANKS, work

KINDS = ("reduce_scatter", "all_reduce")
NAMES = ("FP32", "BF16", "E4M3", "E5M2", "library FP32", "library BF16", "shared-scale E4M3")
ELEMENTS = 4 * 128 * 128 + 3 * 128 * 384  # a block of llama_tiny


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(result, directory, what was printed)"""
    directory = tmp_path_factory.mktemp("bench")
    printed = "".join(run_distributed(work, RANKS, str(directory), free_port(), backend=None, timeout=300))
    return json.loads((directory / "comm_2.json").read_text()), directory, printed


def rows(measured):
    return {(row["kind"], row["name"]): row for row in measured[0]["rows"]}


def test_every_payload_has_a_row(measured):
    result = measured[0]
    assert (result["ranks"], result["backend"], result["elements"]) == (2, "gloo", ELEMENTS)
    assert list(rows(measured)) == [(kind, name) for kind in KINDS for name in NAMES]
    timed = [row for row in result["rows"] if "error" not in row]
    assert all(len(row["times_ms"]) == 3 and row["gbs"] == row["sent"] / row["ms"] / 1e6 for row in timed)
    assert {name for _, name in rows(measured)} - {row["name"] for row in timed} <= {"library FP32", "library BF16"}


@pytest.mark.parametrize(
    ("name", "of_element"),
    [("FP32", 4), ("library FP32", 4), ("BF16", 2), ("library BF16", 2), ("E4M3", 257 / 256), ("shared-scale E4M3", 1)],
)
def test_bytes_that_a_rank_sends(measured, name, of_element):
    """Half of the buffer to the other rank; an all-reduce sends the whole."""
    for kind, share in zip(KINDS, (0.5, 1.0), strict=True):
        assert rows(measured)[kind, name]["sent"] == pytest.approx(share * of_element * ELEMENTS, rel=1e-3)


@pytest.mark.parametrize(("name", "low", "high"), [("BF16", 53, 60), ("E4M3", 30, 33), ("E5M2", 24, 27)])
def test_errors_are_those_of_the_payloads(measured, name, low, high):
    """docs/communication.md: 55.6, 31.5 and 25.5 dB."""
    assert all(low < rows(measured)[kind, name]["sqnr_db"] < high for kind in KINDS)
    assert all(rows(measured)[kind, "FP32"]["sqnr_db"] is None for kind in KINDS)


def test_rank_0_tells(measured, capsys):
    _, directory, printed = measured
    assert sorted(path.name for path in directory.iterdir()) == ["comm_2.json", "comm_2.md"]
    assert printed.count("2 ranks over gloo") == 1 and (directory / "comm_2.md").read_text() in printed
    assert cli.main(["bench", "report", str(directory / "comm_2.json")]) == 0
    assert capsys.readouterr().out.strip() == (directory / "comm_2.md").read_text().strip()


def test_gradients_in_bf16(tmp_path):
    """A sum of BF16 gradients in FP32 has the same bits in rank order and by the library, of two ranks; E4M3 rounds as
    often as from FP32.
    """
    options = ("--device", "cpu", "--gradients", "bf16")
    printed = "".join(run_distributed(work, RANKS, str(tmp_path), free_port(), options, backend=None, timeout=300))
    found = json.loads((tmp_path / "comm_2_bf16.json").read_text())
    assert found["gradients"] == "BF16"
    assert f"{ELEMENTS:,} BF16 gradients" in printed and "with its casts to or from FP32." in printed
    made = {(row["kind"], row["name"]): row for row in found["rows"] if "error" not in row}
    exact = {name for (kind, name), row in made.items() if row["sqnr_db"] is None and kind == "reduce_scatter"}
    assert {"FP32", "BF16"} <= exact <= {"FP32", "BF16", "library FP32"}, "nothing is rounded before the sum"
    assert all(30 < made[kind, "E4M3"]["sqnr_db"] < 33 for kind in KINDS)


def test_ratios_go_by_the_library_in_bf16():
    made = [("FP32", 8.0), ("library BF16", 4.0), ("E4M3", 2.0)]
    found = comm.compared([{"kind": "all_reduce", "name": name, "ms": ms, "sent": 10**6} for name, ms in made])
    assert [row["of_library"] for row in found] == [0.5, 1.0, 2.0] and found[0]["gbs"] == 0.125
    broken = {"kind": "all_reduce", "name": "library FP32", "sent": 1, "error": "RuntimeError: a | b"}
    table = report.comm({"ranks": 2, "backend": "gloo", "elements": 1, "rounds": 1, "rows": comm.compared([broken])})
    assert table[-1] == "| all_reduce | library FP32 | RuntimeError: a / b |  |  |  |  |"


def test_a_graph_needs_gpus():
    with pytest.raises(ValueError, match="--cuda-graph needs CUDA GPUs, and this is --device cpu"):
        comm.measure(torch.device("cpu"), {}, cuda_graph=True)


@pytest.mark.gpu
def test_recorded_sums_are_the_sums(tmp_path):
    """The errors of FP32 sums in rank order, and those of the payloads."""
    run_distributed(work, RANKS, str(tmp_path), free_port(), ("--cuda-graph",), backend=None, on_gpu=True, timeout=200)
    result = json.loads((tmp_path / "comm_2_graph.json").read_text())
    assert result["cuda_graph"] and "recorded as CUDA graphs" in report.markdown(result)
    found = {(row["kind"], row["name"]): row.get("sqnr_db") for row in result["rows"]}
    for kind in KINDS:
        assert found[kind, "FP32"] is None and 53 < found[kind, "BF16"] < 60 and 30 < found[kind, "E4M3"] < 33


def test_one_process_sends_nothing(capsys):
    assert cli.main(["bench", "comm", "--device", "cpu"]) == 2
    assert "start it with torchrun" in capsys.readouterr().err
