"""What the command does for all subcommands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowprec_train.tools import cli
from lowprec_train.tools.estimate import command


def test_an_output_that_its_reader_has_closed_is_no_error(monkeypatch, capsys):
    """As of `lowprec estimate ... | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(command, "run", lambda arguments: print("a line", file=closed, flush=True))
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["estimate"]) == 141
        print("more", file=closed, flush=True)
    assert capsys.readouterr().err == ""


def test_another_pipe_that_is_closed_is_an_error(monkeypatch, capfd):
    def broken(arguments):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(command, "run", broken)
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    assert cli.main(["estimate"]) == 2
    assert capfd.readouterr().err == "lowprec estimate: error: [Errno 32] Broken pipe\n"


def values(found):
    """The words that a subcommand's list has taken."""
    return [str(each) for name in ("overrides", "runs", "inputs") for each in getattr(found, name, ())]


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("estimate a=1 --gpus 2 b=2 --json c=3", ["a=1", "b=2", "c=3"]),
        ("estimate --gpus 2 a=1 --device h200 +b=2 ~c", ["a=1", "+b=2", "~c"]),
        ("compare runs/a --out x runs/b", ["runs/a", "runs/b"]),
        ("compare --out x runs/a runs/b --html runs/c", ["runs/a", "runs/b", "runs/c"]),
        ("study evaluate runs/a --device cpu runs/b", ["runs/a", "runs/b"]),
        ("prepare-data a --tokenizer t b --out c d", ["a", "b", "d"]),
        ("train-tokenizer a --vocab-size 384 b --out c", ["a", "b"]),
        ("train a=1 --nproc 2 b=2 --cfg job", ["a=1", "b=2", "--cfg", "job"]),
    ],
)
def test_options_stand_between_the_values_of_a_list(line, taken):
    found = cli.parse(line.split())
    assert values(found) == taken
    assert {type(each) for each in getattr(found, "runs", ())} <= {type(Path())}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("estimate a=1 --banana b=2", "lowprec estimate: error: there is no argument --banana b=2"),
        ("estimate a=1 --gpus 2 b=2 --devcie x", "there is no argument --devcie x; did you mean --device?"),
        ("compare runs/a --out x runs/b -z", "lowprec compare: error: there is no argument -z"),
        ("compare --out runs/a", "the following arguments are required: RUN"),
        ("export-hf runs/a --out b runs/c", "lowprec export-hf: error: there is no argument runs/c"),
        ("bench gemm --out x y", "there is no argument y"),
    ],
)
def test_what_no_list_takes_is_one_error(line, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.parse(line.split())
    told = capsys.readouterr().err
    assert said in told and len(told.splitlines()) == 2


def test_torch_is_imported_by_no_command_before_it_runs():
    """So that `--help`, a mistake and what needs no torch take half a second."""
    code = "import sys; from lowprec_train.tools import cli; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
