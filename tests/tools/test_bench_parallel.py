"""`lowprec bench parallel` on two processes over gloo, and the arithmetic of its timeline."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

from lowprec_train.tools import cli
from lowprec_train.tools.bench import parallel, parallel_plot, sharded, timeline, timeline_plot
from lowprec_train.tools.bench.contestant import Work
from lowprec_train.tools.bench.timeline import Kernel
from lowprec_train.train.launch import World
from tests.distributed import free_port, run_distributed
from tests.tools.parallel_ranks import ARMS, BROKEN, RANKS, SIZES, work

ROOT = Path(__file__).parents[2]
PLAIN = "plain FSDP2 bf16"
PAIRS = f"{PLAIN}, units of two blocks"
WORK = Work(model=SIZES, batch=2, seq_len=32, micro_batches=2, device=torch.device("cpu"), compiled=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(result, what was printed)"""
    directory = tmp_path_factory.mktemp("bench")
    printed = "".join(run_distributed(work, RANKS, str(directory), free_port(), backend=None, timeout=300))
    (file,) = directory.glob("parallel_*_2.json")
    return json.loads(file.read_text()), printed


def rows(measured):
    return {row["name"]: row for row in measured[0]["rows"]}


def test_every_arm_has_a_row_and_the_baseline_is_plain(measured):
    result = measured[0]
    assert list(rows(measured)) == [PLAIN, PAIRS, *ARMS, BROKEN]
    assert (result["gpus"], result["tokens_per_step"]) == (2, 2 * 32 * 2)
    for name in (PLAIN, *ARMS):
        row = rows(measured)[name]
        assert len(row["times_ms"]) == 2 and row["tokens_per_s"] == 128 / row["ms"] * 1e3
        assert len(row["host_ms"]) == len(row["cpu_ms"]) == 2 and min(row["host_ms"]) > 0  # of each rank
        assert row["of_group"] == rows(measured)[PLAIN]["ms"] / row["ms"]


def test_every_arm_learns_its_batch(measured):
    """The same tokens in each step: ln 128 = 4.85 falls."""
    for name in (PLAIN, *ARMS):
        first, last = rows(measured)[name]["loss"]
        assert last < first < 5.2, name


def test_plain_units_of_two_blocks_learn_as_those_of_one(measured):
    assert rows(measured)[PAIRS]["loss"] == rows(measured)[PLAIN]["loss"]


def test_an_arm_that_cannot_be_built_is_a_row(measured):
    assert "out 200" in rows(measured)[BROKEN]["error"]
    assert f"| {BROKEN} | 0 | {rows(measured)[BROKEN]['error']} |" in measured[1]


def test_bytes_and_memory_are_those_of_the_estimate(measured):
    """A rank of two sends a BF16 or E4M3 half of every matrix to the other, and takes part alone in nothing."""
    found = rows(measured)
    assert found["fp8 alone"]["sent_gb"] == 0
    assert found[ARMS[1]]["sent_gb"] < 0.7 * found["bf16"]["sent_gb"]
    assert all(found[name]["estimated_gib"] > 0 for name in ARMS)


def test_rank_0_tells(measured):
    assert measured[1].count("2 GPUs; vocab_size 128") == 1


# --- the figure -------------------------------------------------------------------------------------------------------


def test_a_run_draws_its_figure(measured):
    assert measured[1].count(".svg") == 1


def test_the_figure_of_the_committed_result(tmp_path, capsys):
    """A line for each row that was measured; its parts add up to the step, as the table has them."""
    stored = ROOT / "docs" / "results" / "parallel_llama_7b_8layers_2.json"
    assert cli.main(["bench", "report", str(stored), "--figure", str(tmp_path / "figure.svg")]) == 0
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml") and stored.with_suffix(".svg").exists()
    found = [row for row in json.loads(stored.read_text())["rows"] if "ms" in row]
    rates, steps = Figure().subplots(1, 2)
    parallel_plot.draw_rates(rates, found)
    parallel_plot.draw_steps(steps, found)
    assert [bar.get_width() for bar in rates.patches] == pytest.approx([row["tokens_per_s"] for row in found])
    kernels, exposed, idle = (list(each) for each in steps.containers)
    for row, *bars in zip(found, kernels, exposed, idle, strict=True):
        assert [bar.get_width() for bar in bars[1:]] == pytest.approx([row["exposed_ms"], row["idle_ms"]])
        assert bars[2].get_x() + bars[2].get_width() == pytest.approx(row["ms"])
    labels = parallel_plot.labels(found)
    assert len(set(labels)) == len(labels) == 12 and labels[2] == "bf16" and labels[4] == "plain FSDP2 bf16 (1)"


def test_parts_of_a_step_are_never_longer_than_the_step():
    row = {"ms": 10.0, "exposed_ms": 4.0, "idle_ms": 7.0}
    assert parallel_plot.parts(row) == {"kernels": 0.0, "exposed communication": 4.0, "idle": 6.0}
    assert parallel_plot.parts({"ms": 10.0}) == {"not profiled": 10.0}


def test_nothing_to_draw(tmp_path, capsys):
    assert not parallel_plot.save({"rows": [{"name": "fp8", "error": "no"}]}, tmp_path / "figure.svg")
    stored = ROOT / "docs" / "results" / "gemm.json"
    assert cli.main(["bench", "report", str(stored), "--figure", str(tmp_path / "figure.svg")]) == 2
    assert "is from bench gemm; allowed: parallel, memory" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_tensor_parallel_parts_take_as_many_tokens_a_gpu():
    run = sharded.Arm.parse("fp8 parallel.tp=2").run(WORK, 4)
    assert (run.micro_batch, run.tokens_per_step) == (4, 4 * WORK.tokens)


def test_the_estimate_is_made_before_a_contestant_is_compiled():
    """It drops all compiled graphs, and rank 0 alone makes it."""
    made = []

    def step():
        return torch.tensor(1.0)

    contestant = sharded.Sharded(
        name="one",
        make=lambda work: made.append("built") or step,
        facts=lambda work: made.append("facts") or {"sent_gb": 1},
    )
    assert parallel.OnAllRanks(contestant, WORK, 1).facts == {"loss": [1.0, 1.0], "sent_gb": 1}
    assert made == ["facts", "built"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("fp5", "no recipe 'fp5'"), ("", "no recipe ''"), ("fp8 lonely", "'lonely' is neither an override")],
)
def test_bad_arms_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        sharded.Arm.parse(text)


def test_unknown_peers_are_refused():
    with pytest.raises(ValueError, match="no peer 'megatron'; there are plain, plain-pairs, torchao, torchao-rowwise"):
        parallel.contestants(["fp8"], ["megatron"], World(processes=2))


def test_without_peers_the_baseline_is_our_bf16():
    names = [each.name for each in parallel.contestants(["fp8", "fp8 alone"], [], World(processes=2))]
    assert names == ["bf16", "fp8", "fp8 alone"]
    found = parallel.contestants(["bf16 alone", "fp8"], [], World(processes=2))
    assert [each.name for each in found if each.baseline] == ["bf16"] and found[0].baseline, (
        "who sends nothing is a limit"
    )


def test_one_process_is_refused(capsys):
    assert cli.main(["bench", "parallel", "--device", "cpu", "--arm", "fp8"]) == 2
    assert "start it with torchrun" in capsys.readouterr().err


def test_exposed_and_idle_are_lengths_of_unions():
    """us:  gemm 0-10, 5-12   nccl 8-20   nothing 20-25   gemm 25-30   nccl 30-31"""
    calls = [("gemm", 0, 10), ("gemm", 5, 12), ("ncclKernel", 8, 20), ("gemm", 25, 30), ("ncclKernel", 30, 31)]
    found = timeline.exposure([Kernel(name=name, begin=b, end=e) for name, b, e in calls], steps=1)
    assert found == pytest.approx({"duration_ms": 0.031, "exposed_ms": 0.009, "idle_ms": 0.005})
    assert timeline.exposure([], 2) == {}


def test_kernels_are_the_gpus():
    def event(name, device, annotation=False):
        times = SimpleNamespace(start=1.0, end=3.0)
        return SimpleNamespace(name=name, device_type=device, is_user_annotation=annotation, time_range=times)

    events = [event("gemm", "DeviceType.CUDA"), event("aten::mm", "DeviceType.CPU")]
    events += [event("step", "DeviceType.CUDA", annotation=True), event("ProfilerStep#2", "DeviceType.CUDA")]
    assert timeline.kernels(events) == [Kernel(name="gemm", begin=1.0, end=3.0)]


def test_tracks_are_the_last_step_by_class_and_collective():
    """us: gemm 0-10 and 15-40 (joined), 100-110; all-gather 5-50; all-to-all 60-70; another collective 80-81"""
    first = [Kernel(name="gemm", begin=float(i), end=i + 0.5) for i in range(6)]
    calls = [("gemm", 0, 10), ("gemm", 15, 40), ("ncclDevKernel_AllGather_RING_LL", 5, 50)]
    calls += [("ncclDevKernel_SendRecv", 60, 70), ("nccl_Broadcast", 80, 81), ("gemm", 100, 110)]
    second = [Kernel(name=name, begin=1000.0 + b, end=1000.0 + e) for name, b, e in calls]
    found = timeline.tracks([*second, *first], steps=2)
    assert found == {
        "gemm": "0-40 100-110",
        "all-gather": "5-50",
        "all-to-all": "60-70",
        "communication": "80-81",
    }
    assert timeline.intervals(found["gemm"]) == [(0.0, 40.0), (100.0, 110.0)]
    assert timeline.tracks([], steps=2) == {}


def test_a_timeline_is_drawn_from_a_result(tmp_path, capsys):
    step = {"gemm": "0-4000 5000-9000", "all-gather": "0-2000", "quantise": "4000-4500"}
    profiles = {"bf16": {"timeline": {"gemm": "0-9000"}}, "fp8": {"timeline": step}, "old": {"ms": {}}}
    assert timeline_plot.save({"profiles": profiles}, tmp_path / "all.svg")
    assert timeline_plot.save({"profiles": profiles}, tmp_path / "one.svg", only=["fp8"])
    drawn = [(tmp_path / name).read_text() for name in ("all.svg", "one.svg")]
    assert [text.count("<!-- all-gather -->") for text in drawn] == [2, 1], "the panels have the same tracks"
    assert "<!-- bf16 -->" in drawn[0] and "<!-- bf16 -->" not in drawn[1]
    assert not timeline_plot.save({"profiles": {}}, tmp_path / "none.svg")
    with pytest.raises(ValueError, match="no timeline of 'old' in this result; there are bf16, fp8"):
        timeline_plot.save({"profiles": profiles}, tmp_path / "none.svg", only=["old"])
    stored = Path(__file__).parents[2] / "docs" / "results" / "gemm.json"
    assert cli.main(["bench", "report", str(stored), "--timeline", str(tmp_path / "none.svg")]) == 2
    assert "gemm.json has no profile with a timeline" in capsys.readouterr().err
    assert cli.main(["bench", "report", str(stored), "--only", "fp8"]) == 2
    printed = capsys.readouterr()
    assert "--only fp8 chooses a row of --timeline, which is not given" in printed.err and not printed.out
    assert not (tmp_path / "none.svg").exists()


def test_a_limit_leaves_out_the_updates_of_other_ranks():
    row, profiles = {"name": "fp8 alone", "ms": 100.0}, {"fp8 alone": {"ms": {"optimizer": 20.0, "gemm": 70.0}}}
    assert parallel.limit(row, profiles, 4) == 85.0
    assert parallel.limit({"name": "fp8", "ms": 100.0}, profiles, 4) is None
