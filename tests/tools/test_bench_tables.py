"""`lowprec bench`: rows cover the ops, bytes are those that must move, tables come out of stored JSON."""

import json

import pytest
import torch

from lowprec_train.ops.schema import SCHEMAS
from lowprec_train.tools import cli
from lowprec_train.tools.bench import exactness, gemm, kernels, linear, profile, report, result
from lowprec_train.tools.bench.case import SHAPES
from lowprec_train.tools.bench.cases import CASES
from lowprec_train.tools.bench.timing import Clock, Interval, copies

CPU = torch.device("cpu")
SMALL = {"hidden": (256, 512), "ffn": (256, 1024), "gate_up": (128, 2048), "weight": (512, 256)}
ELSEWHERE = {"scaled_mm", "block_scaled_mm", "bf16_mm"}  # by `bench gemm`, the last as torch's product
ELSEWHERE |= {"adamw"}  # as the step of whole optimizers
ELSEWHERE |= {"adamw_squares", "adamw_amax"}  # passes of that step, where parameters are shards
ELSEWHERE |= {f"{verb}_gradients{by}" for verb in ("encode", "decode") for by in ("", "_by")}  # in `bench comm`
M, K = SHAPES["hidden"]


def quick() -> Clock:
    return Clock(CPU, budget_ms=0.1, fewest=1, most=1)


def case(op, name):
    (found,) = [each for each in CASES if (each.op, each.name) == (op, name)]
    return found


def test_every_op_has_a_row():
    assert {each.op for each in CASES} | ELSEWHERE == set(SCHEMAS)
    assert len({(each.op, each.name) for each in CASES}) == len(CASES)
    assert all(set(each.shapes) <= set(SHAPES) for each in CASES)


@pytest.mark.parametrize(
    ("op", "name", "expected"),
    [
        ("quantize", "row", 3 * M * K + 4 * M),
        ("quantize", "tensor", 5 * M * K + 4),
        ("quantize", "1x128", 3 * M * K + M * K // 32),
        ("quantize_both", "tensor", 6 * M * K + 8),
        ("quantize_both", "tensor, amax", 4 * M * K + 4 * M + 8),
        ("quantize_both", "row E5M2, folds", 6 * M * K + 8 * (M + K)),
        ("quantize_transposed", "tensor, norm", 3 * M * K + 4 * (M + K) + 8),
        ("transpose", "1 byte", 2 * M * K),
        ("pack_e2m1", "E2M1", M * K + M * K // 2),
        ("unpack_e2m1", "E2M1", M * K + M * K // 2),
        ("dequantize", "row", 5 * M * K + 4 * M),
        ("rotate_fold", "rows", 3 * M * K + 4 * M + 8),
        ("rotate_fold", "columns of E4M3 codes", 3 * M * K + 4 * K + 12),
        ("hadamard", "64", 6 * M * K + 8),
        ("quantized_norm", "E4M3 in 16", 5 * M * K + M * K // 16 + 4 * (M + K)),
        ("quantized_norm_backward", "E4M3 in 16", 5 * M * K + M * K // 16 + 8 * K),
    ],
)
def test_bytes_that_must_move(op, name, expected):
    assert case(op, name).moved(M, K) == expected


def test_a_linear_layer_by_recipe():
    measured = linear.measure(
        CPU, linear.recipes(["fp8", "fp4"]), shapes=[(64, 128)], tokens=64, rounds=2, compiled=False
    )
    (row,) = measured["rows"]
    assert set(row["ms"]) == {"bf16", "fp8", "fp4"} and not row["errors"] and min(row["ms"].values()) > 0
    text = report.markdown({"bench": "linear", "environment": {"gpu": "none", "command": "x"}, **measured})
    ratio = row["ms"]["bf16"] / row["ms"]["fp4"]
    assert f"{row['ms']['fp4']:,.3f}, {ratio:.2f}x" in text and "64 to 128" in text


def test_kernels_measure_what_is_asked_for():
    measured = kernels.measure(CPU, only="*_expanded*", shapes=SMALL, copy_bytes=1 << 16, clock=quick())
    rows = measured["rows"]
    assert {row["op"] for row in rows} == {"quantize_expanded", "dequantize_expanded"}
    assert all(row["gbs"] == pytest.approx(row["bytes"] / row["ms"] / 1e6) for row in rows)
    assert all(row["of_copy"] == pytest.approx(row["gbs"] / measured["copy_gbs"]) for row in rows)


def test_an_op_that_fails_is_a_row(monkeypatch):
    monkeypatch.setattr(kernels, "CASES", (case("transpose", "1 byte"), case("quantize", "128x128")))
    shapes = SMALL | {"weight": (100, 100)}  # no tile of 128 divides it
    measured = kernels.measure(CPU, only="[tq]*", shapes=shapes, copy_bytes=1 << 16, clock=quick())
    *fine, broken = measured["rows"]
    assert len(fine) == 3 and "error" not in fine[0]
    assert "does not divide" in broken["error"]
    assert "does not divide" in report.markdown(stored("kernels", measured))


def test_optimizers_move_their_states():
    measured = kernels.measure(CPU, only="AdamW", shapes=SMALL, copy_bytes=1 << 16, clock=quick())
    moved = {row["case"]: row["bytes"] / (512 * 256) for row in measured["rows"]}
    assert moved["torch, fused FP32"] == pytest.approx(28, rel=1e-3)
    assert moved["adamw"] == pytest.approx(28, rel=1e-3)
    assert moved["adamw_coat"] == pytest.approx(4 + 2 * (4 + 2 * (1 + 12 / 32)), rel=1e-3)  # segments of 32
    assert moved["adamw_coat optim/master=bf16"] == pytest.approx(2 + 2 * (2 + 2 * (1 + 12 / 32)), rel=1e-3)
    assert moved["adamw_fp8lm"] == pytest.approx(2 * 2 + 3 * (2 + 2 + 1 + 2), rel=1e-3)  # gradients in BF16
    assert moved["adamw_fp4"] == pytest.approx(2 * 4 + 3 * (4 + 1 + 2), rel=1e-3)


def test_gemm_rows_and_exactness():
    measured = gemm.measure(CPU, shapes=[(128, 256, 128)], clock=quick(), exact=False)
    (row,) = measured["rows"]
    assert len(row["tflops"]) + len(row["errors"]) == 9 and row["tflops"]["BF16"] > 0
    exact = {each["case"]: each for each in exactness.measure(CPU, lengths=(256,), side=32)}
    unit = [each for name, each in exact.items() if "unit" in name]
    assert len(unit) == 3 and all(each["fast"] == each["split"] == 0 for each in unit[:2])
    assert unit[2]["split"] < 1e-6  # FP32 sums of numbers over some twenty binades
    rounded = [each for name, each in exact.items() if "BF16" in name]
    assert len(rounded) == 3 and all(each["split"] == pytest.approx(each["output"], rel=0.1) for each in rounded)


def stored(bench, measured):
    return {"bench": bench, "environment": {"gpu": "cpu", "torch": "2", "command": "lowprec bench"}, **measured}


STEP = {
    "sizes": {"dim": 64},
    "tokens_per_step": 1024,
    "interleaved": True,
    "rows": [
        {"name": "bf16", "group": 0, "baseline": True, "ms": 10.0, "loss": [4.8, 4.7], "of_group": 1.0}
        | {"of_fastest": 0.9, "tokens_per_s": 102400.0, "peak_gib": 3.0},
        {"name": "fp8", "group": 0, "baseline": False, "error": "RuntimeError: a | b", "device_allocations": 3},
        {"name": "TE bf16", "baseline": True, "error": "transformer_engine is not installed"},
    ],
    "profiles": {"bf16": profile.summary({"lowprec::quantize_row": 1.0, "nvjet_tst_128": 3.0})},
}


def test_the_table_is_made_again_from_json(tmp_path, capsys):
    saved, table = result.save(stored("step", STEP), tmp_path / "new", "step_tiny")
    assert json.loads(saved.read_text())["rows"] == STEP["rows"]
    assert cli.main(["bench", "report", str(saved)]) == 0
    assert capsys.readouterr().out.strip() == table.read_text().strip()
    lines = table.read_text().splitlines()
    assert "| bf16 | 0 | 10.0 | 102,400 | 1.000 | 0.900 | 3.0 | 4.80 to 4.70 |" in lines
    assert "| fp8 | 0 | RuntimeError: a / b |  |  |  |  |  |" in lines
    assert "Memory was taken from the device within timed steps, which slows them: fp8." in lines
    assert "| gemm | 3.0 | 75% |" in lines and "| quantise | 1.0 | 25% |" in lines


def test_what_is_no_result_is_refused(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    assert cli.main(["bench", "report", str(tmp_path / "other.json")]) == 2
    assert "is not a result of `lowprec bench`" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("what", ["kernels", "gemm", "step"])
def test_without_a_gpu_there_is_one_error(what, tmp_path, capsys):
    assert cli.main(["bench", what, "--out", str(tmp_path)]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void lowprec::(anonymous namespace)::quantize_rows<1>(...)", "quantise"),
        ("lowprec::adamw_step", "optimizer"),
        ("void lowprec::(anonymous namespace)::step_flat<(lowprec::Pass)2, true>(lowprec::Item const*)", "optimizer"),
        ("lowprec::(anonymous namespace)::squares(lowprec::Batch, double*)", "optimizer"),
        ("nvjet_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("triton_red_fused__to_copy_mean_mul_pow_rsqrt_0", "norm, elementwise"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("cub::DeviceRadixSortOnesweepKernel", "other"),
    ],
)
def test_kernel_classes(name, expected):
    assert profile.kernel_class(name) == expected


def test_time_is_counted_and_inputs_take_turns():
    seen = []
    clock = Clock(CPU, budget_ms=0.1, fewest=4, most=4)
    assert clock.median_ms([lambda: seen.append("a"), lambda: seen.append("b")]) >= 0
    assert seen[-4:] == ["a", "b", "a", "b"]
    assert copies(1 << 30, CPU) == 2 and copies(1, CPU) == 16
    with Interval(CPU) as interval:
        sum(range(1000))
    assert interval.ms > 0


@pytest.mark.gpu
def test_kernels_on_a_gpu():
    device = torch.device("cuda", 0)
    measured = kernels.measure(device, only="quantize_both*", copy_bytes=1 << 30)
    assert not [row for row in measured["rows"] if "error" in row]
    assert all(0 < row["of_copy"] < 1.2 for row in measured["rows"])


@pytest.mark.gpu
def test_gemms_on_a_gpu():
    measured = gemm.measure(torch.device("cuda", 0), shapes=[(1024, 11008, 1024)])
    assert not measured["rows"][0]["errors"]
    assert not [row for row in measured["exactness"] if "error" in row]
