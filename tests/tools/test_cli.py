"""What the command does for all subcommands."""

from __future__ import annotations

import os
import sys

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
