"""`lowprec estimate`: a step that no run would take is refused if it is asked for, and said if it is not."""

import json

import pytest

from lowprec_train.tools import cli
from lowprec_train.tools.estimate.subject import MOST_GPUS, grid
from lowprec_train.train import checks
from lowprec_train.train.compose import composed
from lowprec_train.train.launch import World

QUICK = ("model=llama_tiny", "model.layers=1", "compile='off'", "micro_batch=2", "data.seq_len=64")


def estimated(capsys, *arguments):
    """The status, the standard output and the errors of a command."""
    return cli.main(["estimate", *QUICK, *arguments]), *capsys.readouterr()


@pytest.mark.parametrize("override", ["tokens_per_step=4097", "++tokens_per_step=4097"])
def test_an_uneven_step_is_refused_in_the_words_of_train(override, capsys):
    status, out, err = estimated(capsys, override)
    with pytest.raises(ValueError, match="tokens_per_step=4097 is not a multiple of .* = 128") as refused:
        checks.configuration(composed(*QUICK, "device=cpu", override))
    assert (status, out, err) == (2, "", f"lowprec estimate: error: {refused.value}\n")


def test_of_several_gpus_too(capsys):
    status, out, err = estimated(capsys, "tokens_per_step=128", "--gpus", "2", "--json")
    with pytest.raises(ValueError, match=r"2 \* 64 \* 2 = 256") as refused:
        checks.configuration(composed(*QUICK, "device=cpu", "tokens_per_step=128"), World(processes=2))
    assert (status, out, err) == (2, "", f"lowprec estimate: error: {refused.value}\n")


def test_a_layout_is_tried_with_one_warning(capsys):
    """tokens_per_step is 4096 unless it is given."""
    status, out, err = estimated(capsys, "--gpus", "48", "--json")
    assert status == 0 and json.loads(out)["tokens_per_step"] == 48 * 128
    assert err.startswith("warning: tokens_per_step=4096 is not a multiple of ") and len(err.splitlines()) == 1
    assert "= 2 * 64 * 48 = 6144; this estimate is of 6,144 tokens a step" in err


@pytest.mark.parametrize("arguments", [(), ("--gpus", "2"), ("tokens_per_step=8192", "--gpus", "4"), ("--gpus", "32")])
def test_an_even_step_has_none(arguments, capsys):
    status, out, err = estimated(capsys, *arguments)
    assert (status, err) == (0, "") and ("8,192" if "--gpus 4" in " ".join(arguments) else "4,096") in out


def test_the_table_refuses_it_before_it_counts(monkeypatch, capsys):
    monkeypatch.setattr("lowprec_train.tools.estimate.table.Subject", None)
    assert cli.main(["estimate", "--table", "tokens_per_step=4097"]) == 2
    assert "tokens_per_step=4097 is not a multiple of" in capsys.readouterr().err


def test_grids_end_somewhere(capsys):
    assert grid(composed().parallel, MOST_GPUS).processes == MOST_GPUS
    for gpus in (0, -8, MOST_GPUS + 1, 10**30):
        assert estimated(capsys, "--gpus", str(gpus)) == (
            *(2, ""),
            f"lowprec estimate: error: --gpus {gpus} must be at least 1 and at most 1,048,576\n",
        )
    status, out, err = estimated(capsys, "parallel.dp_replicate=1024", "parallel.dp_shard=2048")
    assert (status, out) == (2, "") and "parallel.dp_shard=2048, parallel.tp=1 need 2,097,152 GPUs" in err


def test_the_largest_grid_is_estimated(capsys):
    status, out, _ = estimated(capsys, "--gpus", str(MOST_GPUS), "--json")
    assert status == 0 and json.loads(out)["sizes"]["dp_shard"] == MOST_GPUS
