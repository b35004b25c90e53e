"""Times of steps: against the measured ones, and what must hold of them by arithmetic."""

import importlib.util
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from lowprec_train.precision.gemm import Path as GemmPath
from lowprec_train.tools import cli
from lowprec_train.tools.estimate.device import H100, H200
from lowprec_train.tools.estimate.report import estimate
from lowprec_train.tools.estimate.step_time import step_time
from lowprec_train.tools.estimate.subject import Subject
from lowprec_train.train import build
from lowprec_train.train.compose import composed

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
SMALL = ("model=llama_7b", "model.layers=2", "micro_batch=4", "data.seq_len=2048", "tokens_per_step=8192")


def script():
    spec = importlib.util.spec_from_file_location("estimate_time", ROOT / "scripts" / "estimate_time.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seconds(*overrides, gpus=1, device=H200):
    run = composed(*SMALL, *overrides)
    return step_time(Subject(run=run, gpus=gpus), build.construct(run.comm), device)


@pytest.fixture(scope="module")
def measured():
    return json.loads((RESULTS / "estimate_time.json").read_text())["rows"]


def test_measured_steps_lie_within_15_percent(measured):
    """Of one, two and four GPUs of two models, and of the whole 7B model; but for the five that the page names."""
    assert len(measured) >= 78 and sum(row["of"] == "memory" for row in measured) == 4
    far = [row for row in measured if abs(row["off"]) > 0.15]
    assert len(far) == 5 and sum("optim.in_backward=true" in row["step"] for row in far) == 3
    assert not any("no_copy" in row["of"] for row in far)
    for gpu in (H100, H200):
        assert abs(statistics.median(row["off"] for row in measured if row["GPU"] == gpu.name)) <= 0.05


def test_the_table_is_what_the_script_computes_today(measured):
    """One row of each kind; all of them take half a minute."""
    made = script()
    row = next(made._of_steps("step_llama_1b3", made.SMALL))
    assert row == next(each for each in measured if each["of"] == "step_llama_1b3")
    asked, length, batch, rate = made.WHOLE["7B, offload, one sequence"]
    again = made._row(
        "memory",
        "7B, offload, one sequence",
        batch * length / rate * 1e3,
        made._seconds(made._run(asked, batch, length)),
    )
    assert again == next(each for each in measured if each["step"] == again["step"])
    assert (RESULTS / "estimate_time.md").read_text() == made.markdown(measured)


def test_rates_of_gemms_are_the_medians_of_the_measured_shapes():
    rows = json.loads((RESULTS / "gemm.json").read_text())["rows"]
    named = {
        "FP8 tensor-wise, fast": (GemmPath.FP8_TENSOR, False),
        "FP8 tensor-wise, split": (GemmPath.FP8_TENSOR, True),
        "FP8 row-wise, fast": (GemmPath.FP8_ROW, False),
        "FP8 row-wise, split": (GemmPath.FP8_ROW, True),
        "FP8 1x128 x 128x128": (GemmPath.FP8_BLOCK, False),
        "INT8": (GemmPath.INT8, False),
        "BF16": (GemmPath.DEQUANTIZE, False),
    }
    for name, key in named.items():
        found = [row["tflops"][name] for row in rows]
        assert H200.gemm[key] == pytest.approx(1e12 * statistics.median(found), rel=2e-3), name


def test_twice_the_tensor_core_rate_halves_the_gemms_and_nothing_else():
    faster = replace(H200, gemm={path: 2 * rate for path, rate in H200.gemm.items()})
    before, after = seconds("+recipe=fp8"), seconds("+recipe=fp8", device=faster)
    assert after.pop("gemm") == pytest.approx(before.pop("gemm") / 2)
    assert after == before


def test_gemms_take_six_flops_a_weight_and_token():
    run = composed(*SMALL, "+recipe=bf16")
    weights = sum(math.prod(w.shape) for w in Subject(run=run, gpus=1).weights if w.matrix and not w.indexed)
    assert seconds("+recipe=bf16")["gemm"] == pytest.approx(6 * weights * 8192 / H200.gemm[GemmPath.BF16, False])


def test_micro_batches_repeat_the_passes_and_not_the_update():
    one, four = seconds("+recipe=fp8"), seconds("+recipe=fp8", "tokens_per_step=32768")
    assert four["gemm"] == pytest.approx(4 * one["gemm"]) and four["optimizer"] == one["optimizer"]


def test_recomputation_adds_a_forward_pass_of_the_blocks():
    plain, again = seconds("+recipe=bf16"), seconds("+recipe=bf16", "model.recompute=full")
    run = composed(*SMALL, "+recipe=bf16")
    blocks = sum(
        math.prod(w.shape) for w in Subject(run=run, gpus=1).weights if w.matrix and w.unit.startswith("blocks")
    )
    more = 2 * blocks * 8192 / H200.gemm[GemmPath.BF16, False]
    assert again["gemm"] - plain["gemm"] == pytest.approx(more)
    assert again["attention"] == pytest.approx(plain["attention"] * 4 / 3)


def test_blocks_that_are_recomputed_as_a_whole_are_counted_one_by_one():
    """SMALL has two blocks."""
    none, one, full = (
        seconds("+recipe=coat", word)
        for word in ("model.recompute=none", "model.full_recompute_layers=1", "model.recompute=full")
    )
    for what in ("gemm", "attention", "quantise", "elementwise"):
        assert one[what] - none[what] == pytest.approx((full[what] - none[what]) / 2), what


@pytest.mark.parametrize(
    ("comm", "of_block", "of_head", "of_embedding"),  # bytes: read, written as it is sent, read again, written as a sum
    [
        (("comm=fp32",), 4 + 2, 2 + 4 + 4 + 2, 4 + 2),
        (("comm=bf16",), 2 + 2, 2 + 2, 4 + 2 + 2 + 2),
        (("comm=fp8",), 2 + 1 + 1 + 2, 2 + 1 + 1 + 2, 4 + 1 + 1 + 2),
        (("comm=fp8", "comm.exclude=[embedding.*]"), 2 + 1 + 1 + 2, 2 + 1 + 1 + 2, 4 + 2 + 2 + 2),
        (("comm=fp8_lm",), 4 + 1 + 1 + 2, 2 + 1 + 1 + 2, 4 + 1 + 1 + 2),
    ],
)
def test_gradients_cost_what_is_read_and_written(comm, of_block, of_head, of_embedding):
    """On two ranks, whose parts are half of a sum. What has the dtype of the wire already is sent from where it lies;
    the head's GEMM is BF16, so that its gradient has not with FP32.
    """
    words = (*SMALL, "+recipe=fp8", "parallel.dp_shard=2", "tokens_per_step=16384", *comm)
    one = Subject(run=composed(*words), gpus=2)
    matrices = [w for w in one.weights if w.matrix]
    of = {"head": of_head, "embedding": of_embedding}
    gradients = sum(math.prod(w.shape) * of.get(w.unit, of_block) for w in matrices)
    rounded = sum(math.prod(w.mine(one.sizes)) * (4 + 2) for w in matrices if one.rounded_bytes(w))
    stored = sum(2 * one.gathered_bytes(w) for w in matrices if one.gather_format(w) is None)
    found = step_time(one, build.construct(one.run.comm), H200)["sharding"]
    assert found == pytest.approx((gradients + rounded + stored) / H200.sharding)


def test_every_recipe_has_a_time():
    from lowprec_train.config import choices

    for recipe in choices("recipe"):
        if recipe != "te_fp8":  # refused: a library runs its layers
            assert 0 < sum(seconds(f"+recipe={recipe}").values()) < 1, recipe


@pytest.mark.parametrize("model", ["gpt_tiny", "qwen3_0b6"])
def test_a_tied_head_reads_the_embedding(model):
    run = composed(
        "+recipe=fp8", f"model={model}", "model.layers=2", "micro_batch=1", "data.seq_len=64", "tokens_per_step=64"
    )
    assert step_time(Subject(run=run, gpus=1), build.construct(run.comm), H200)["gemm"] > 0


def test_selective_recomputation_repeats_no_gemm_and_full_launches_more():
    modes = ("none", "norms", "selective", "full")
    plain, few, cheap, full = (seconds("+recipe=fp8_rowwise", f"model.recompute={how}") for how in modes)
    assert cheap["gemm"] == plain["gemm"] and cheap["attention"] == plain["attention"]
    assert full["elementwise"] > cheap["elementwise"] > few["elementwise"] > plain["elementwise"]
    assert cheap["quantise"] == full["quantise"] > few["quantise"] > plain["quantise"]
    assert full["launches"] == pytest.approx(plain["launches"] * 4 / 3, rel=0.01)


def test_norms_that_linears_recompute_cost_nothing_more():
    none, norms = (seconds("+recipe=fp8", f"model.recompute={how}") for how in ("none", "norms"))
    assert none == norms and none["quantise"] < seconds("+recipe=fp8", "model.recompute=selective")["quantise"]


def test_sums_of_gradients_cost_their_bytes():
    run = composed(*SMALL, "+recipe=fp8")
    weights = sum(math.prod(w.shape) for w in Subject(run=run, gpus=1).weights if w.matrix)
    assert "accumulation" not in seconds("+recipe=fp8")
    found = seconds("+recipe=fp8", "tokens_per_step=16384")["accumulation"]
    assert found == pytest.approx(2 * weights * 10 / H200.memory)


def test_proposals_have_a_rate_and_the_table_of_layouts_refuses_a_device(capsys):
    asked = ["estimate", "--device", "h200", "model=llama_tiny", "data.seq_len=64", "tokens_per_step=128"]
    assert cli.main([*asked, "--fit", "24GiB"]) == 0
    first = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| as asked for"))
    assert float(first.split("|")[-2].replace(",", "")) > 0
    assert cli.main(["estimate", "--device", "h200", "--table"]) == 2
    assert "--table has no times; remove --device h200" in capsys.readouterr().err


def test_shards_communicate_and_tensor_parallel_gemms_are_cut():
    alone, cut = seconds("+recipe=fp8"), seconds("+recipe=fp8", "parallel.tp=2", gpus=2)
    assert cut["gemm"] == pytest.approx(alone["gemm"] / 2, rel=0.01) and cut["communication"] > 0
    sharded = seconds("+recipe=fp8", "parallel.dp_shard=2", "tokens_per_step=16384", gpus=2)
    assert sharded["gemm"] == pytest.approx(alone["gemm"]) and sharded["sharding"] > 0


def test_larger_units_take_less_time_of_a_slow_host_and_none_of_a_fast_one():
    slow, fast = (replace(H100, host=(0.0, host), unit=unit) for host, unit in ((1e-3, 0.02), (0.0, 0.0)))
    layers = ("+recipe=fp8", "model.layers=8", "parallel.dp_shard=2", "tokens_per_step=16384")

    def launches(device, blocks):
        return seconds(*layers, f"parallel.blocks_per_unit={blocks}", gpus=2, device=device)["launches"]

    assert launches(slow, 1) - launches(slow, 2) > 0.95 * 4 * 0.02  # less a longer first all-gather
    assert launches(fast, 1) == launches(fast, 2)


def test_a_slow_link_bounds_an_offloaded_step():
    slow = replace(H200, pcie=1e9)
    away = ("+recipe=coat", "optim.offload=true")
    assert seconds(*away, device=slow)["host link"] > 5 * sum(v for k, v in seconds(*away).items() if k != "host link")


def test_without_compilation_there_is_no_time():
    with pytest.raises(ValueError, match="compile=off has no estimate of time"):
        seconds("+recipe=fp8", "compile='off'")


def test_the_command_prints_the_time_and_refuses_an_unknown_device(capsys):
    asked = ["estimate", *SMALL, "+recipe=fp8"]
    assert cli.main([*asked, "--device", "h200"]) == 0
    out = capsys.readouterr().out
    assert "time of a step on NVIDIA H200" in out and "tokens/s and GPU" in out
    assert cli.main(asked) == 0
    assert "--device NAME adds the time of a step; measured rates: h100, h200" in capsys.readouterr().out
    assert cli.main([*asked, "--device", "b300"]) == 2
    assert "--device b300: there are measured rates for h100, h200 only" in capsys.readouterr().err


def test_tokens_a_second_are_those_of_the_step():
    found = estimate(composed(*SMALL, "+recipe=fp8"), 1, H200)["time"]
    assert found["step"] == pytest.approx(sum(found["seconds"].values()))
    assert found["tokens_per_s"] == pytest.approx(8192 / found["step"]) and 0.2 < found["mfu_bf16peak"] < 1


def test_more_tokens_never_take_less_time_where_the_host_is_the_slowest():
    model, steps = ("+recipe=fp8", "model=llama_130m", "model.layers=2", "data.seq_len=64"), []
    for size in (1, 8):
        run = composed(*model, f"micro_batch={size}", f"tokens_per_step={256 * size}", "parallel.dp_shard=4")
        steps.append(sum(step_time(Subject(run=run, gpus=4), build.construct(run.comm), H200).values()))
    assert steps == pytest.approx(sorted(steps))
