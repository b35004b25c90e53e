"""`lowprec estimate --fit`: what is proposed fits, and no larger micro-batch would."""

import pytest

from lowprec_train.tools import cli
from lowprec_train.tools.estimate.fit import (
    FREED,
    OFFLOAD_INPUTS,
    OFFLOAD_STATES,
    RECOMPUTE,
    SHARE,
    choices,
    fits,
    parse_size,
)
from lowprec_train.tools.estimate.report import estimate
from lowprec_train.train.compose import composed

TINY = ("model=llama_tiny", "+recipe=coat", "compile='off'", "data.seq_len=64", "tokens_per_step=4096")


def total(*overrides):
    return estimate(composed(*TINY, *overrides))["memory"]["total"]


@pytest.mark.parametrize("size", ["30GB", "20MB", "12GiB", "0GiB", "24", "GiB"])
def test_sizes(size):
    known = {"30GB": 30 * 10**9, "12GiB": 12 * 2**30}
    if size in known:
        assert parse_size(size) == known[size]
        return
    with pytest.raises(ValueError, match=f"--fit {size} is not a size; write for example 24GiB"):
        parse_size(size)


def test_proposals_fit_and_twice_as_much_does_not():
    """A size between what the first choices need and what the lean ones do."""
    room = total("micro_batch=4")
    found = fits(TINY, int(room / SHARE) + 1, None)
    assert [fit.settings for fit in found] == choices(TINY) and found[0].micro_batch == 4
    for fit in found:
        proposed = total(f"micro_batch={fit.micro_batch}", *fit.settings)
        assert fit.found["memory"]["total"] == proposed <= room and 64 % fit.micro_batch == 0
        larger = 2 * fit.micro_batch
        assert larger > 64 or total(f"micro_batch={larger}", *fit.settings) > room
    assert found[3].micro_batch > found[0].micro_batch


@pytest.mark.parametrize(
    ("asked", "never"),
    [
        ("optim=adamw_fp8lm", "optim"),
        ("optim/moment@optim.first_moment=bf16", "optim"),
        ("+recipe=fp4", "optim"),
        ("+recipe=int8_switchback", "optim"),
        ("optim/master=fp16", "optim/master"),
        ("model.recompute=selective", "model.recompute"),
        ("max_grad_norm=1.0", "max_grad_norm"),
    ],
)
def test_what_was_asked_for_stays(asked, never):
    """What stores moments and masters in every proposal is what the run that was asked for has."""
    tried, run = choices((*TINY[:1], asked)), composed(*TINY[:1], asked)
    assert tried[0] == () and len(set(tried)) == len(tried) > 3
    assert not [each for settings in tried for each in settings if each.split("=")[0] == never]
    part = {"optim": "first_moment", "optim/master": "master"}.get(never)
    assert part is None or getattr(composed(*TINY[:1], asked, *tried[-1]).optim, part) == getattr(run.optim, part)


def test_a_step_of_one_micro_batch_may_fit_where_gradients_of_several_do_not():
    """With updates in the backward pass, in a model whose weights are more than its activations."""
    wide = (*TINY[:-1], "tokens_per_step=128", "model.dim=512", "model.ffn=2048")
    lean = [*wide, *choices(TINY)[3]]
    one, two = (estimate(composed(*lean, f"micro_batch={size}"))["memory"]["total"] for size in (2, 1))
    assert one < two
    found = fits(wide, int((one + two) / 2 / SHARE), None)
    assert found[3].micro_batch == 2 and found[3].found["micro_batches"] == 1


def test_what_excludes_a_choice_is_reported_and_nothing_may_fit(capsys):
    assert cli.main(["estimate", "--fit", "0.001GiB", *TINY, "telemetry_interval=5"]) == 0
    out = capsys.readouterr().out
    assert "nothing fits: take more GPUs" in out
    assert "\n(1) optim.in_backward=true frees" in out and "\n(2) optim.offload=true keeps" in out
    rows = [line.split(" | ")[1] for line in out.splitlines() if line.startswith("| ")][1:]
    assert rows == ["does not fit", *["refused (1)"] * 3, *["refused (2)"] * 2]
    assert cli.main(["estimate", "--fit", "8GiB", *TINY]) == 0
    assert "take micro_batch=64" in capsys.readouterr().out


def test_a_micro_batch_that_was_asked_for_stays(capsys):
    """Of all settings; one that does not fit is not made smaller."""
    room = total("micro_batch=4")
    for micro_batch in (2, 4, 64):
        found = fits((*TINY, f"micro_batch={micro_batch}"), int(room / SHARE) + 1, None)
        assert {fit.micro_batch for fit in found} <= {0, micro_batch}
        assert found[0].micro_batch == (0 if micro_batch == 64 else micro_batch)
    assert cli.main(["estimate", "--fit", f"{room / 8 / 2**30:.9f}GiB", *TINY, "micro_batch=64"]) == 0
    assert "take micro_batch" not in capsys.readouterr().out


def test_a_micro_batch_that_does_not_divide_the_step_is_refused_or_said(capsys):
    """As without --fit: refused where an override sets the tokens of a step, else a warning."""
    assert cli.main(["estimate", "--fit", "8GiB", *TINY, "micro_batch=3"]) == 2
    assert "is not a multiple of micro_batch * data.seq_len" in capsys.readouterr().err
    assert cli.main(["estimate", "--fit", "8GiB", "model=llama_tiny", "compile='off'", "micro_batch=3"]) == 0
    assert "and a run would be refused" in capsys.readouterr().err


def test_fewer_tokens_a_step_are_proposed_where_no_micro_batch_fits(capsys):
    """The weights' gradients, which only a step of one micro-batch does without, are most of this model."""
    wide = (*TINY[:-1], "model.dim=512", "model.ffn=2048")
    lean = composed(*wide, *choices(TINY)[-1], "tokens_per_step=128", "micro_batch=2")
    size = int(estimate(lean)["memory"]["total"] / SHARE) + 100
    assert cli.main(["estimate", "--fit", f"{size / 2**30:.9f}GiB", *wide, "tokens_per_step=4096"]) == 0
    out = capsys.readouterr().out
    assert out.count("does not fit") == len(choices(TINY))
    assert out.rstrip().endswith(" tokens_per_step=128 micro_batch=2")


def test_a_run_that_is_refused_anyway_is_an_error():
    with pytest.raises(ValueError, match="head_dim"):
        fits((*TINY, "model.heads=7"), 2**30, None)


def test_nothing_is_proposed_that_apex_does_not_compute():
    proposed = {each for settings in choices(["optim=apex_adamw"]) for each in settings}
    assert proposed == {*FREED, RECOMPUTE, OFFLOAD_STATES, OFFLOAD_INPUTS}


def test_micro_batches_that_tiles_do_not_divide_are_passed_over(monkeypatch):
    """A rotation of 128 tokens refuses one sequence of 64 tokens, and three of them."""
    asked = ("model=llama_tiny", "+recipe=fp4_fold", "compile='off'", "data.seq_len=64", "tokens_per_step=768")
    monkeypatch.setattr("lowprec_train.tools.estimate.fit.choices", lambda asked: [()])
    four, six = (estimate(composed(*asked, f"micro_batch={size}"))["memory"]["total"] for size in (4, 6))
    assert fits(asked, 2**40, None)[0].micro_batch == 12
    for room, size in ((four, 4), (six, 6), (four - 2, 2)):
        assert fits(asked, int(room / SHARE) + 1, None)[0].micro_batch == size
