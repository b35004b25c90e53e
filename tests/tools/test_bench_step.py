"""`lowprec bench step`: groups, contestants, and tiny steps on the CPU."""

import os
import pickle
import signal
from dataclasses import replace

import pytest
import torch

from lowprec_train.tools import cli
from lowprec_train.tools.bench import configuration, groups, ours, peers, report, step, turns
from lowprec_train.tools.bench.contestant import Built, Contestant, Work
from lowprec_train.train.compose import composed

WORK = Work(
    model="dim=64,heads=2,ffn=128,layers=2,vocab_size=128",
    batch=2,
    seq_len=32,
    device=torch.device("cpu"),
    compiled=False,
)


def named(name, baseline=False, needs=None):
    return Contestant(name=name, build=broken, baseline=baseline, needs=needs)


def broken(work: Work) -> Built:
    raise RuntimeError("this one cannot be built\nfor many reasons")


@pytest.mark.parametrize(("others", "sizes"), [(0, [1]), (3, [4]), (4, [4, 2]), (7, [4, 4, 2])])
def test_groups_hold_four_at_most_and_bf16_each(others, sizes):
    contestants = [named("bf16", baseline=True), *(named(str(index)) for index in range(others))]
    made = groups.plan(contestants)
    assert [len(group) for group in made] == sizes
    assert all(group[0] is contestants[0] for group in made)
    assert [each for group in made for each in group[1:]] == contestants[1:]


def test_groups_refuse_what_they_cannot_compare():
    with pytest.raises(ValueError, match="BF16 baseline"):
        groups.plan([named("fp8")])
    with pytest.raises(ValueError, match="--groups 1 must be at least 2"):
        groups.plan([named("bf16", baseline=True)], 1)


@pytest.mark.parametrize(
    ("model", "batch", "parameters", "peak_gib"),
    [("llama_7b_8layers", 8, 1.88e9, 35.8), ("llama_1b3", 16, 1.35e9, 76.8)],
)
def test_memory_is_estimated_well_enough(model, batch, parameters, peak_gib):
    """Against the peaks of compiled BF16 steps on an H200."""
    work = replace(WORK, model=model, batch=batch, seq_len=2048)
    need = groups.memory(work.sizes, work)
    assert groups.count(work.sizes) == pytest.approx(parameters, rel=0.01)
    assert (need.resident + need.step) / 2**30 == pytest.approx(peak_gib, rel=0.15)
    assert need.fits(int(0.9 * 141e9)) >= 4


def test_recipes_take_modifiers():
    found = ours.contestants(["fp8", "bf16", "fp8+head", "coat+own"])
    assert [each.name for each in found] == ["bf16", "fp8", "fp8 (fp8 head)", "coat (own optimizer)"]
    assert [each.baseline for each in found] == [True, False, False, False]
    assert [each.name for each in ours.contestants(["fp4"], head="fp8", own=True)][1] == "fp4 (fp8 head, own optimizer)"
    run = ours.Ours.parse("fp4+head").run(WORK)
    assert run.precision.policy["head"] == {"_target_": "lowprec_train.recipes.fp8.recipe"}
    assert run.model.recompute == "none" and ours.Ours.parse("w4a8+norms").run(WORK).model.recompute == "norms"
    assert ours.Ours.parse("w4a8+norms").contestant.name == "w4a8 (norms recomputed)"
    with pytest.raises(ValueError, match="no recipe 'fp9'"):
        ours.contestants(["fp9"])
    for text in ("fp8+tail", "fp8+current", "te_fp8+current+block"):
        with pytest.raises(
            ValueError, match=r"a recipe takes \+own, \+head and \+norms, and te_fp8 one of its scalings"
        ):
            ours.contestants([text])


def test_a_library_s_recipe_is_apart():
    """In a process of its own without being asked, as the peers of that library are, and under its scaling."""
    found = ours.contestants(["fp8", "te_fp8", "te_fp8+current"])[1:] + peers.chosen(["te"])
    apart = ["te_fp8", "te_fp8 (current)", "TE bf16", "TE DelayedScaling"]
    apart += ["TE Float8CurrentScaling", "TE Float8BlockScaling"]
    assert [each.name for each in found if each.apart] == apart == [each.name for each in found[1:]]
    policy = ours.Ours.parse("te_fp8+current").run(WORK).precision.policy["blocks.*"]
    assert policy == {"_target_": "lowprec_train.recipes.te_fp8.recipe", "scaling": "current"}
    assert {each.missing for each in found[1:]} == {"transformer_engine is not installed"}


def test_peers_are_chosen_by_family_and_part():
    assert [each.name for each in peers.chosen(["plain", "te:Delayed"])] == [
        *("plain bf16", "plain bf16 (whole model)"),
        "TE DelayedScaling",
    ]
    with pytest.raises(ValueError, match="no peer 'apex'; there are linear, plain"):
        peers.chosen(["apex"])


def test_models_are_names_or_sizes():
    assert composed(*configuration.model_overrides("llama_7b_8layers")).model.layers == 8
    assert WORK.sizes == {"vocab_size": 128, "dim": 64, "layers": 2, "heads": 2, "ffn": 128}
    with pytest.raises(ValueError, match="no model 'llama_8b'"):
        configuration.model_overrides("llama_8b")
    with pytest.raises(ValueError, match="gpt_tiny is not"):
        _ = replace(WORK, model="gpt_tiny").sizes


@pytest.mark.parametrize("parameters", ["bf16", "fp32"])
def test_tiny_steps_run(parameters):
    contestants = ours.contestants(["fp8", "mxfp4"]) + peers.chosen(["plain:plain bf16", "linear"])
    contestants = [each for each in contestants if "whole" not in each.name] + [named("broken")]
    work = replace(WORK, parameters=parameters, clip=1.0 if parameters == "fp32" else 0.0)
    measured = step.measure(contestants, work, rounds=1, warm_up=2, profiled=["fp8"])
    rows = measured["rows"]
    assert [(row["name"], row["group"]) for row in rows] == [
        *(("bf16", 0), ("fp8", 0), ("mxfp4", 0), ("plain bf16", 0)),
        *(("bf16", 1), ("bf16 (torch.nn.Linear)", 1), ("broken", 1)),
    ]
    *fine, failed = rows
    assert failed["error"] == "RuntimeError: this one cannot be built"
    assert [row["error"] for row in fine if "error" in row] == []
    assert all(row["tokens_per_s"] == pytest.approx(64 / row["ms"] * 1e3) for row in fine)
    assert all(4.5 < loss < 5.2 for row in fine for loss in row["loss"])  # log 128 = 4.85
    assert max(row["of_fastest"] for row in fine if row["baseline"]) == pytest.approx(1.0)
    assert list(measured["profiles"]) == ["fp8"]
    about = {"bench": "step", "environment": {"gpu": "cpu", "command": ""}}
    assert "| broken | 1 | RuntimeError: this one cannot be built |" in report.markdown(about | measured)


def test_matrices_take_the_dtype_asked_for():
    made = ours.Ours("fp8").build(WORK).module
    assert {p.dtype for p in made.parameters() if p.ndim == 2} == {torch.bfloat16}
    own = ours.Ours("coat", own=True).build(WORK).module
    assert {p.dtype for p in own.parameters()} == {torch.float32}


def test_one_at_a_time_where_memory_is_short():
    contestants, said = ours.contestants(["fp8"]), []
    measured = step.measure(contestants, WORK, resident=1, rounds=1, warm_up=1, say=said.append)
    medians = [f"{row['name']}: {row['ms']:.1f} ms, median of 1 steps" for row in measured["rows"]]
    assert said[1::2] == medians  # each before the next one is built: what an early end leaves
    assert not measured["interleaved"] and [row["name"] for row in measured["rows"]] == ["bf16", "fp8"]
    assert all("of_group" in row for row in measured["rows"])


def test_ratios_go_by_the_baseline_beside_them():
    """The second group met a slower machine; the fastest BF16 was in it."""
    rows = [
        {"name": "bf16", "group": 0, "baseline": True, "ms": 10.0},
        {"name": "fp8", "group": 0, "baseline": False, "ms": 5.0},
        {"name": "bf16", "group": 1, "baseline": True, "ms": 20.0},
        {"name": "plain", "group": 1, "baseline": True, "ms": 16.0},
        {"name": "fp4", "group": 1, "baseline": False, "error": "no"},
        {"name": "TE", "baseline": False, "error": "not installed"},
    ]
    rated = step.rates(rows, tokens=100)
    assert [row.get("of_group") for row in rated] == [1.0, 2.0, 1.0, 1.25, None, None]
    assert [row.get("of_fastest") for row in rated] == [0.8, 1.6, 0.8, 1.0, None, None]


def test_a_dry_run_builds_on_the_meta_device(capsys):
    sizes = ["--model", "dim=256,heads=2,ffn=512,layers=2", "--seq-len", "256"]
    assert cli.main(["bench", "step", *sizes, "--dry-run", "--recipes", "fp8,coat+own", "--peers", "plain,te"]) == 0
    out = capsys.readouterr().out
    assert "group 0: bf16, fp8, coat (own optimizer), plain bf16" in out
    assert "| coat (own optimizer) | 17.7 M |" in out and "TE bf16" in out


def test_an_invalid_model_is_one_error(capsys):
    sizes = ("--model", "dim=100,heads=3,ffn=16,layers=1")
    assert cli.main(["bench", "step", *sizes, "--dry-run", "--recipes", "fp8", "--peers", "none"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("lowprec bench: error: dim 100, heads 3") and err.count("\n") == 1


def test_a_profile_of_nobody_is_refused(capsys):
    given = f"bench step --model {WORK.model} --seq-len 32 --dry-run --recipes fp8 --peers none".split()
    assert cli.main([*given, "--profile", "bf16,fp8", "--profile", "all"]) == 0
    assert cli.main([*given, "--profile", "fp8,coat"]) == 2
    assert "--profile 'coat': no contestant has it in its name; there are bf16, fp8" in capsys.readouterr().err
    assert step.profile_filters(["all", "fp"], ["bf16", "fp8"]) == ["", "fp"]
    with pytest.raises(ValueError, match="--profile ''"):
        step.profile_filters(["bf16", ""], ["bf16"])


def test_recomputation_is_for_recipes_and_not_for_the_bf16_beside_them():
    again = ("model.recompute=norms", "model.recompute_layers=2", "model.full_recompute_layers=1")
    work = replace(WORK, overrides=(*again, "model.norm_eps=0.5"))
    bf16, fp8 = (ours.Ours(name).run(work).model for name in ("bf16", "fp8"))
    assert (bf16.recompute, bf16.recompute_layers, bf16.full_recompute_layers, bf16.norm_eps) == ("none", None, 0, 0.5)
    assert (fp8.recompute, fp8.recompute_layers, fp8.full_recompute_layers, fp8.norm_eps) == ("norms", 2, 1, 0.5)


def test_settings_of_precision_are_for_recipes_and_not_for_the_bf16_beside_them(capsys):
    policy = "+precision.policy={blocks.*: {_target_: lowprec_train.recipes.fp8.recipe}}"
    work = replace(WORK, overrides=("precision.override.recompute_weight_codes=true", policy))
    work.check()
    bf16, w4a8 = (ours.Ours(name).run(work).precision for name in ("bf16", "w4a8"))
    assert bf16 == composed("+recipe=bf16").precision
    assert w4a8.override == {"recompute_weight_codes": True} and "fp8" in w4a8.policy["blocks.*"]["_target_"]
    given = f"bench step --model {WORK.model} --seq-len 32 --dry-run --peers none --set {work.overrides[0]}".split()
    assert cli.main([*given, "--recipes", "w4a8"]) == 0
    capsys.readouterr()
    assert cli.main([*given, "--recipes", "w4a8,mxfp4"]) == 2
    assert "recompute_weight_codes=true needs a dgrad that uses fprop's codes of W" in capsys.readouterr().err


def test_a_dry_run_says_what_does_not_fit(capsys):
    sizes = ["--model", "dim=96,heads=2,ffn=160,layers=2", "--seq-len", "64"]
    assert cli.main(["bench", "step", *sizes, "--dry-run", "--recipes", "fp8_block", "--peers", "none"]) == 1
    assert "fp8_block | ValueError" in capsys.readouterr().out


def test_missing_packages_are_rows():
    contestants = [*ours.contestants([]), named("ghost", needs="no_such_package")]
    rows = step.measure(contestants, WORK, rounds=1, warm_up=1)["rows"]
    assert rows[-1]["error"] == "no_such_package is not installed"


def of_process(work: Work) -> Built:
    """A model whose loss is its process's id, and which dies at its fourth step where the batch has three sequences."""
    module = torch.nn.Linear(2, 2)
    seen = []

    def loss(tokens, targets):
        seen.append(tokens)
        if work.batch == 3 and len(seen) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return module.weight.sum() * 0 + os.getpid()

    return Built(module=module, loss=loss)


def test_contestants_apart_take_turns_in_processes_of_their_own():
    """A child and this process: each has its own id and times; an error in a child is a row, the rest go on."""
    contestants = [
        replace(named("here", baseline=True), build=of_process),
        replace(named("one"), build=of_process, apart=True),
        replace(named("broken"), apart=True),
    ]
    measured = step.measure(contestants, WORK, rounds=3, warm_up=2, profiled=["one"])
    *fine, failed = measured["rows"]
    ids = [row["loss"][0] for row in fine]
    assert ids[0] == os.getpid() and len(set(ids)) == 2 and all(row["loss"][0] == row["loss"][1] for row in fine)
    assert all(len(row["times_ms"]) == 3 and min(row["times_ms"]) > 0 for row in fine)
    assert all(len(row["host_ms"]) == len(row["cpu_ms"]) == 1 and row["host_ms"][0] > 0 for row in fine)
    assert [row.get("apart") for row in fine] == [None, True] and list(measured["profiles"]) == ["one"]
    assert failed["error"] == "RuntimeError: this one cannot be built"
    about = {"bench": "step", "environment": {"gpu": "cpu", "command": ""}}
    assert "own, a step at a time in turn with the others: one." in report.markdown(about | measured)
    for process in ids[1:]:
        with pytest.raises(ProcessLookupError):
            os.kill(int(process), 0)


def test_a_child_that_dies_is_a_row():
    apart = turns.InChildProcess(replace(named("dies"), build=of_process), replace(WORK, batch=3), 1)
    assert apart.turn()[1] == 0 and apart.turn()[0] > 0
    with pytest.raises(turns.ChildError, match="its process ended with exit code -9"):
        apart.turn()
    apart.close()


def test_te_is_apart_and_everyone_can_be(capsys):
    """TE's contestants travel to their process: they can be pickled, and so can ours."""
    chosen = peers.chosen(["te", "torchao", "plain", "linear"]) + ours.contestants(["fp8+head", "coat+own"])
    assert {each.name for each in chosen if each.apart} == {each.name for each in chosen if each.name.startswith("TE ")}
    for each in chosen:
        assert pickle.loads(pickle.dumps(each)).name == each.name
    profiled = {"longest": [{"kernel": "gemm", "class": "gemm"}, {"kernel": "cudnn_fmha", "class": "attention"}]}
    assert turns.attention(profiled) == "cudnn_fmha" and turns.attention({"longest": []}) == ""
