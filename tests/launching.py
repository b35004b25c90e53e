"""Launches through `main` in this process, on a corpus of a few small modules in a directory of the test's own."""

import sys

import pytest

from lowprec_train import main


def launcher(overrides, tmp_path, monkeypatch, capfd):
    """A function of a command line, which follows `overrides`, that returns (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for number in range(20):
        lines = [f"def scale_{i}(x): return x * {i * 7 + number} + 'block {number}'" for i in range(40)]
        (tmp_path / f"module_{number}.py").write_text("\n".join(lines))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["train.py", *overrides, f"+data.root={tmp_path}", *arguments])
        with pytest.raises(SystemExit) as end:
            main.main()
        out, err = capfd.readouterr()
        return end.value.code or 0, out, err

    return call
