"""The linter in a run: an error ends it before it has a directory, a waiver is on record, warnings are printed. So does
a block-scaled GEMM of torch that is wrong, where a plan takes it.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from lowprec_train import main
from lowprec_train.ops import library
from lowprec_train.precision import gemm
from lowprec_train.train import build
from tests.recipes import composed

SMALL = (
    *("model.layers=1", "model.dim=64", "model.ffn=64", "model.heads=2", "model.kv_heads=2", "model.vocab_size=320"),
    *("data.vocab_size=320", "data.seq_len=64", "micro_batch=2", "tokens_per_step=128", "steps=1", "eval_batches=1"),
    *("+recipe=mxfp4", "precision.override.dgrad.a.rounding=nearest", "name=a"),
)


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd):
    """Call main with a command line; returns (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for number in range(20):
        lines = [f"def scale_{i}(x): return x * {i * 7 + number} + 'block {number}'" for i in range(40)]
        (tmp_path / f"module_{number}.py").write_text("\n".join(lines))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, f"+data.root={tmp_path}", "data.cache=cache", *arguments])
        with pytest.raises(SystemExit) as end:
            main.main()
        out, err = capfd.readouterr()
        return end.value.code or 0, out, err

    return call


def test_an_error_ends_the_run_before_it_begins(launch):
    status, _, err = launch()
    assert status == 1 and not Path("runs").exists() and "Traceback" not in err
    assert "floor-clips: dgrad.a = E2M1[1x32] E8M0_FLOOR in blocks.*.attention.qkv" in err
    assert "(lint_allow=[floor-clips] waives it)" in err


def test_a_waived_run_says_so(launch):
    status, out, err = launch("lint_allow=[floor-clips]")
    assert (status, err) == (0, "")
    facts = json.loads(Path("runs/a/run.json").read_text())
    assert [(f["rule"], f["severity"], f["waived"]) for f in facts["lint"]] == [
        ("floor-clips", "error", True),
        ("nearest-gradient", "warning", False),
    ]
    assert facts["overrides"] == ["precision.override.dgrad.a.rounding=nearest", "lint_allow=floor-clips"]
    assert "warning: waived by lint_allow: floor-clips" in out and "warning: nearest-gradient: dgrad.a" in out
    assert "lint_allow=floor-clips" in out.splitlines()[0]


def test_a_waiver_does_not_make_another_run(launch):
    launch("lint_allow=[floor-clips]")
    status, out, _ = launch("lint_allow=[floor-clips,nearest-gradient]")
    assert status == 0 and "is done" in out


def test_an_unknown_rule_is_refused(launch):
    status, _, err = launch("lint_allow=[floor]")
    assert status == 1 and "'floor' is not a rule; the rules are floor-clips, ceil-headroom" in err


def test_a_wrong_block_scaled_gemm_ends_the_run(launch, monkeypatch):
    """One error with the path and the switch; switched off, nobody asks for the GEMM."""
    right = library.EAGER["block_scaled_mm"]
    monkeypatch.setattr(gemm, "capability_of", lambda device: (10, 0))
    monkeypatch.setitem(library.EAGER, "block_scaled_mm", lambda *arguments: right(*arguments) + 1)
    status, _, err = launch("lint_allow=[floor-clips]")
    assert status == 1 and not Path("runs").exists() and "Traceback" not in err
    assert "torch's MXFP4 GEMM of lowprec::block_scaled_mm on cpu" in err and "native_block_scales=false" in err
    status, _, _ = launch("lint_allow=[floor-clips]", "precision.override.native_block_scales=false")
    assert status == 0 and "mxfp4" not in str(paths_of("runs/a/recipe.json"))
    monkeypatch.setitem(library.EAGER, "block_scaled_mm", right)
    status, out, _ = launch("lint_allow=[floor-clips]", "name=b", "verbose=true")
    assert status == 0 and paths_of("runs/b/recipe.json") == {"bf16", "mxfp4"} and "[mxfp4]" in out


@pytest.mark.parametrize(("recipe", "decoded"), [("nvfp4", True), ("fp8", False)])
def test_gemms_of_decoded_values_are_checked_on_gpus(recipe, decoded):
    laid_out = build.layout(composed(f"+recipe={recipe}", "model=llama_tiny"))
    plans = laid_out.plans(torch.device("meta"))  # as of compute capability 9.0
    assert build.gemms_to_check(plans, torch.device("cuda")) == {"block_formats": set(), "decoded": decoded}
    assert not build.gemms_to_check(plans, torch.device("cpu"))["decoded"], "the CPU multiplies them in FP32"


def paths_of(table: str) -> set[str]:
    """Of all GEMMs of a run."""
    return {path for row in json.loads(Path(table).read_text()).values() for path in row["execution"].values()}
