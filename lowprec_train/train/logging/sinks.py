"""Sinks of metrics: the trainer passes the same `{name: float}` to every sink at each step.

`metrics.jsonl` is always written: one JSON object per line, `{"step": 12, "train/loss": 3.25, ...}`, with floats in
full precision, so that equal runs give equal files. The loss of a skipped step is NaN, as Python's json module writes
and reads it. The configuration adds console, TensorBoard and Weights & Biases. A missing package is an error when the
sink is built, before the first step.

A resumed run repeats the steps after its checkpoint. No sink may show a step twice: metrics.jsonl and TensorBoard drop
the first attempt, W&B keeps it (docs/logging.md).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from lowprec_train.data.appending import write_whole

_SPOILED = "restore the file, or remove the line to continue without it"
RECIPE_GROUPS = ("precision", "comm", "optim")


class Sink(Protocol):
    """Receives the metrics of each logged step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts of a run that sinks may use.

    remembered: strings that the checkpoint stores (`Trainer.remembered`); sinks may add entries.
    """

    name: str
    directory: Path  # of the run, existing
    steps: int  # of the whole run
    resumed_step: int = 0  # steps done when this process started
    config: Mapping[str, Any] = field(default_factory=dict)  # resolved, plain values
    recipe: str = ""
    comparison: str | None = None  # name shared by the runs that this run can be compared with
    remembered: dict[str, str] = field(default_factory=dict)

    def recipe_text(self) -> str:
        """Return the parts of the configuration that a recipe sets, as YAML."""
        parts = {name: self.config[name] for name in RECIPE_GROUPS if name in self.config}
        return OmegaConf.to_yaml(OmegaConf.create(parts))


class StepLines:
    """A file of JSON lines, each with its `step`. A resume removes lines after its step and an incomplete last line."""

    def __init__(self, path: Path, *, resumed_step: int) -> None:
        if path.exists():
            kept = [line for line in read_lines(path) if line["step"] <= resumed_step]
            write_whole(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._path = path
        self._file = path.open("ab", buffering=0)  # a buffer that cannot be written would fail again when it is closed

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines. Raises OSError, with the path, if one cannot be written."""
        for line in lines:
            left = memoryview(json.dumps(line).encode() + b"\n")
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError as error:
                message = f"step {line['step']} cannot be written: {error.strerror}"
                raise OSError(error.errno, message, str(self._path)) from error

    def close(self) -> None:
        self._file.close()


class JsonlSink(StepLines):
    """Appends to `metrics.jsonl`, a line at a time."""

    def __init__(self, *, run: RunFacts) -> None:
        super().__init__(run.directory / "metrics.jsonl", resumed_step=run.resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line. Raises OSError if it cannot be written."""
        self.write([{"step": step, **metrics}])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read such a file without an incomplete last line. Raises ValueError if any other line is invalid."""
    lines = path.read_bytes().splitlines(keepends=True)
    return [_read(line, path, number) for number, line in enumerate(lines, start=1) if line.endswith(b"\n")]


def _read(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        read = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number} cannot be read ({error}); {_SPOILED}") from error
    if not isinstance(read, dict) or not isinstance(read.get("step"), int):
        raise ValueError(f"{path}, line {number}: {line[:80]!r} is not an object with a step; {_SPOILED}")
    return read


class OutputConsole(Console):
    """rich's console, which raises BrokenPipeError, not SystemExit, for a closed pipe: `| head`, or an ended `tee`."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that rich handles


class ConsoleSink:
    """A progress bar in 80 columns: step, loss, tokens/s, time left. Without a terminal: a line every `every` steps.

    If the output cannot be written (a closed pipe, a full disk), one warning on stderr says so and the run continues.
    """

    def __init__(self, *, run: RunFacts, every: int = 10, console: Console | None = None) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1 step")
        self._run, self._every = run, every
        self._console = console or OutputConsole(soft_wrap=True)
        self._lost = False
        self._begun: tuple[int, float] | None = None  # first logged step, and its time
        self._bar: Progress | None = None
        if self._console.is_terminal:
            text = "{task.completed:.0f}/{task.total:.0f}  {task.fields[numbers]}"
            numbers = TextColumn(text, table_column=Column(no_wrap=True))
            columns = (BarColumn(bar_width=None), numbers, TimeRemainingColumn(), TextColumn("left"))
            self._bar = Progress(*columns, console=self._console, expand=True)
            self._task = self._bar.add_task("", total=run.steps, completed=run.resumed_step, numbers="")
            self._bar.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Update the bar; print evaluations and, without a bar, every n-th step."""
        with self._surviving():
            self._show(step, metrics)

    def close(self) -> None:
        with self._surviving():
            if self._bar is not None:
                self._bar.stop()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Turn the first error of the output into a warning, and be silent after it."""
        try:
            yield
        except OSError as error:
            self._console.quiet = True
            if not self._lost:
                self._lost = True
                with suppress(OSError):
                    print(
                        f"warning: the console cannot be written ({error.strerror}); the run continues, and "
                        "metrics.jsonl has every step",
                        file=sys.stderr,
                        flush=True,
                    )

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        self._begun = self._begun or (step, time.monotonic())
        due = "valid/loss" in metrics
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=_numbers(metrics, _ON_BAR))
        elif step % self._every == 0 or step == self._run.steps:
            due = True
        if due:
            line = f"{self._run.name}  step {step}/{self._run.steps}  {_numbers(metrics, _SHOWN)}"
            self._console.print(line + ("" if self._bar is not None else self._left(step)), highlight=False)

    def _left(self, step: int) -> str:
        """Return the time left at the pace of the steps so far; "" without a pace or without steps left."""
        assert self._begun is not None
        first, when = self._begun
        if not first < step < self._run.steps:
            return ""
        seconds = (time.monotonic() - when) / (step - first) * (self._run.steps - step)
        return f"  {timedelta(seconds=round(seconds))} left"


_SHOWN = {
    "train/loss": "loss {:.4f}",
    "valid/loss": "valid {:.4f}",
    "train/grad_norm": "norm {:.3g}",
    "perf/tokens_per_sec_per_gpu": "{:,.0f} tokens/s",
    "perf/mfu_bf16peak": "mfu {:.1%}",
    "mem/peak_gib": "{:.1f} GiB",
}
_ON_BAR = {name: _SHOWN[name] for name in ("train/loss", "perf/tokens_per_sec_per_gpu")}


def _numbers(metrics: Mapping[str, float], forms: Mapping[str, str]) -> str:
    shown = [form.format(metrics[name]) for name, form in forms.items() if name in metrics]
    skipped = metrics.get("train/skipped", 0)
    return "  ".join(shown + ([f"{skipped:.0f} skipped"] if skipped else []))
