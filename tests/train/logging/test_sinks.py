"""Sinks: what is written, what a resume takes back, and what is said when a package is missing."""

import errno
import io
import math
import resource

import pytest
from rich.console import Console
from rich.text import Text

from lowprec_train.train.logging import sinks
from lowprec_train.train.logging.sinks import ConsoleSink, JsonlSink, OutputConsole, RunFacts, read_lines

LINE = {"train/loss": 2.5, "perf/tokens_per_sec_per_gpu": 1234.0, "train/skipped": 0.0}


def facts(tmp_path, **changes):
    return RunFacts(**{"name": "r", "directory": tmp_path, "steps": 100, **changes})


def write(tmp_path, steps, **changes):
    sink = JsonlSink(run=facts(tmp_path, **changes))
    for step in steps:
        sink.log(step, {"train/loss": step / 3})
    return sink


def test_a_line_that_cannot_be_written_is_one_error_with_the_path(tmp_path):
    """The limit of a file's size stands for a full disk. Closing the file afterwards is no second error."""
    sink, path = write(tmp_path, range(1, 4)), tmp_path / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        with pytest.raises(OSError, match=f"step 4 cannot be written: File too large.*{path}"):
            sink.log(4, {"train/loss": 1.0})
        sink.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3], "what lies before is intact"


def test_jsonl_keeps_full_precision_and_is_flushed_per_line(tmp_path):
    sink = write(tmp_path, range(1, 4))
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"step": s, "train/loss": s / 3} for s in (1, 2, 3)
    ]  # not closed yet
    sink.log(4, {"train/loss": math.nan})
    assert math.isnan(read_lines(tmp_path / "metrics.jsonl")[-1]["train/loss"])
    sink.close()


def test_jsonl_resume_drops_later_lines_and_a_torn_one(tmp_path):
    write(tmp_path, range(1, 8)).close()
    path = tmp_path / "metrics.jsonl"
    uninterrupted = path.read_bytes()
    with path.open("a") as file:
        file.write('{"step": 8, "train/lo')
    write(tmp_path, range(6, 8), resumed_step=5).close()
    assert path.read_bytes() == uninterrupted
    write(tmp_path, [1]).close()  # a run that died before its first checkpoint starts over
    assert [line["step"] for line in read_lines(path)] == [1]


@pytest.mark.parametrize("broken", [b"\0\0\0", b"{\xff}", b"", b"[5]", b'{"train/loss": 3}'])
def test_a_broken_line_is_named(tmp_path, broken):
    write(tmp_path, range(1, 4)).close()
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], broken, *lines[2:]]))
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2\b.*remove the line"):
        write(tmp_path, [], resumed_step=3)


def test_console_without_a_terminal_prints_every_n_steps_and_evaluations(tmp_path):
    out = io.StringIO()
    sink = ConsoleSink(run=facts(tmp_path, steps=25), every=10, console=Console(file=out, width=200))
    for step in range(1, 26):
        sink.log(step, LINE | ({"valid/loss": 3.5} if step == 13 else {}))
    sink.close()
    lines = out.getvalue().splitlines()
    assert [line.split()[2] for line in lines] == ["10/25", "13/25", "20/25", "25/25"]
    assert "loss 2.5000" in lines[0] and "1,234 tokens/s" in lines[0] and "skipped" not in lines[0]
    assert "valid 3.5000" in lines[1]


def test_console_on_a_terminal_shows_a_bar_in_80_columns(tmp_path):
    out = io.StringIO()
    run = facts(tmp_path, name="llama_350m-fp8_rowwise-1a2b3c4d", steps=1_000_000, resumed_step=400_000)
    sink = ConsoleSink(run=run, console=Console(file=out, force_terminal=True, width=80))
    sink.log(500_000, LINE | {"perf/tokens_per_sec_per_gpu": 123_456.0, "train/skipped": 2.0, "train/grad_norm": 1e-5})
    sink.close()
    bar = Text.from_ansi(out.getvalue().split("\n")[-2]).plain.split("\r")[-1].strip()
    assert "500000/1000000  loss 2.5000  123,456 tokens/s  2 skipped " in bar and bar.endswith("left")
    assert len(bar) <= 80 and "…" not in bar and "╺" in bar, "nothing is cut, and a bar remains"


def test_console_on_a_terminal_prints_evaluations_above_the_bar(tmp_path):
    out = io.StringIO()
    sink = ConsoleSink(run=facts(tmp_path), console=Console(file=out, force_terminal=True, width=80))
    sink.log(50, LINE | {"valid/loss": 3.5})
    sink.close()
    assert "r  step 50/100  loss 2.5000  valid 3.5000" in out.getvalue()


def test_console_without_a_terminal_tells_the_time_left(tmp_path, monkeypatch):
    out = io.StringIO()
    seconds = iter([100.0, 130.0, 190.0])
    sink = ConsoleSink(run=facts(tmp_path, steps=25), every=10, console=Console(file=out, width=200))
    monkeypatch.setattr(sinks.time, "monotonic", lambda: next(seconds))
    for step in range(5, 26, 5):
        sink.log(step, LINE)
    ends = [line.split("tokens/s")[1].strip() for line in out.getvalue().splitlines()]
    assert ends == ["0:01:30 left", "0:00:30 left", ""]


class Pipe(io.StringIO):
    read = True  # by someone

    def write(self, text):
        if not self.read:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return len(text)


def test_console_of_a_closed_pipe_warns_once(tmp_path, capsys):
    """What `| head` and a `tee` that Ctrl-C ended leave; rich's own console ends the process there."""
    pipe = Pipe()
    console = OutputConsole(file=pipe, width=80)
    sink = ConsoleSink(run=facts(tmp_path, steps=25), every=1, console=console)
    pipe.read = False
    for step in range(1, 26):
        sink.log(step, LINE | {"valid/loss": 3.5})
    sink.close()
    assert capsys.readouterr().err.count("the console cannot be written (Broken pipe); the run continues") == 1


def test_console_interval_is_checked(tmp_path):
    with pytest.raises(ValueError, match="every=0"):
        ConsoleSink(run=facts(tmp_path), every=0)
