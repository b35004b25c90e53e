"""Killed without warning, in the middle of a save and again at a random step, a run that is started again by the same
command ends with the numbers of one that was left alone: for every recipe, through the real entry point.

No kill is taken on trust. The process is frozen first (SIGSTOP), and killed only if what the run directory then shows
is the moment that was meant; else it goes on, and the next such moment is waited for.
"""

import json
import random
import signal
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from tests.launches import training, write_modules
from tests.recipes import MODELS, SYSTEMS

STEPS, INTERVAL = 30, 3
DAILY = {
    "bf16": "llama_tiny",
    "fp4": "gpt_tiny",  # moments in FP8 and FP16
    "fp8_lm": "llama_tiny",  # one scale a tensor
    "coat": "gpt_tiny",  # scales of groups, and a range that is expanded
    "mxfp4": "llama_tiny",  # draws that depend on the position
}
TIMINGS = ("time/", "perf/", "mem/")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    """A run of a second on a corpus of its own, which saves every few steps."""
    root = tmp_path_factory.mktemp("sources")
    write_modules(root)
    return (
        *("model.layers=2", "model.ffn=128", "model.heads=2", "model.kv_heads=2", "model.max_seq_len=128"),
        *("model.vocab_size=320", "data.vocab_size=320", f"+data.root={root}", f"data.cache={root.parent / 'cache'}"),
        *("data.seq_len=128", "micro_batch=1", "tokens_per_step=128", f"steps={STEPS}", "eval_interval=4"),
        *("eval_batches=1", f"checkpoint_interval={INTERVAL}", "checkpoint_keep=3"),
    )


def undisturbed(command, root):
    """Run directory of a launch that nobody kills: a run's name does not depend on where it runs."""
    root.mkdir()
    process = training(root / "output", *command, f"run_root={root / 'runs'}")
    assert process.wait(300) == 0, process.output.read_text()
    (run,) = (root / "runs").iterdir()
    return run


def logged(run):
    """Number of whole lines in metrics.jsonl."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def numbers(run):
    """All that a run computes, step by step, at full precision; not what it took."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMINGS)} for line in lines]


def latest(run):
    """Step of the checkpoint that a launch would resume from; 0 without one."""
    pointer = run / "checkpoints" / "latest"
    return int(pointer.read_text().removeprefix("step-")) if pointer.exists() else 0


def in_save(run):
    """Step whose checkpoint is being written or published at this moment; 0 if none is."""
    started = [path.name.rpartition("step-")[2] for path in (run / "checkpoints").glob("*step-[0-9]*")]
    newest = max(map(int, started), default=0)
    return newest if newest > latest(run) else 0


def kill_at(moment, process, chance):
    """SIGKILL while `moment()` holds, a random delay after it has begun."""
    deadline = time.monotonic() + 120
    try:
        while True:
            assert process.poll() is None, f"ended before it could be killed:\n{process.output.read_text()}"
            assert time.monotonic() < deadline, process.output.read_text()
            if moment():
                time.sleep(chance.uniform(0, 0.02))
                freeze(process)
                if moment():
                    break
                process.send_signal(signal.SIGCONT)
            time.sleep(0.001)
    finally:
        process.kill()
    assert process.wait(60) == -signal.SIGKILL


def freeze(process):
    """SIGSTOP; returns when none of its threads runs."""
    process.send_signal(signal.SIGSTOP)
    while process.poll() is None and set(states(process.pid)) != {"T"}:
        time.sleep(0.001)


def states(pid):
    """Of a process's threads: T where they are stopped."""
    with suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            yield (thread / "stat").read_text().rpartition(")")[2].split()[0]


def killed_in_a_save(run, command, chance):
    """Step of the checkpoint that was cut short, which is not the first."""
    first = chance.randrange(2 * INTERVAL, STEPS // 2, INTERVAL)
    kill_at(lambda: in_save(run) >= first, training(run.parent / "in_a_save", *command), chance)
    cut = in_save(run)
    assert cut in range(first, STEPS, INTERVAL) and 0 < latest(run) < cut
    return cut


def killed_at_a_step(run, command, chance):
    """Number of steps that were done: a few more than at the last kill."""
    resumed, target = latest(run), logged(run) + chance.randint(1, 4)
    process = training(run.parent / "at_a_step", *command)
    kill_at(lambda: logged(run) >= target, process, chance)
    assert f"resuming after step {resumed} of {STEPS}" in process.output.read_text()
    return logged(run)


def by_day_or_night():
    """Of every kind of state that a checkpoint holds, one recipe by day with one of the models; all others by night."""
    for recipe, model in product(SYSTEMS, MODELS):
        yield pytest.param(recipe, model, marks=[] if DAILY.get(recipe) == model else pytest.mark.nightly)


@pytest.mark.parametrize(("recipe", "model"), list(by_day_or_night()))
def test_kills_leave_every_number_alone(recipe, model, overrides, tmp_path):
    chance = random.Random(f"{recipe} {model}")
    launch = (f"+recipe={recipe}", f"model={model}", *overrides)
    alone = undisturbed(launch, tmp_path / "alone")
    command, run = (*launch, f"run_root={tmp_path}"), tmp_path / alone.name
    cut = killed_in_a_save(run, command, chance)
    done = killed_at_a_step(run, command, chance)
    resumed = latest(run)
    assert 0 < resumed <= done < STEPS and cut <= done
    assert not (run / "DONE").exists() and not (run / "PREEMPTED").exists()

    rest = training(tmp_path / "rest", *command)
    assert rest.wait(120) == 0, rest.output.read_text()
    assert f"resuming after step {resumed} of {STEPS}" in rest.output.read_text()
    assert json.loads((run / "DONE").read_text())["step"] == STEPS == latest(run)
    assert not list((run / "checkpoints").glob(".tmp*"))

    expected = numbers(alone)
    assert [line["step"] for line in expected] == list(range(1, STEPS + 1))
    assert sum("valid/loss" in line for line in expected) == 8
    assert expected[-1]["train/loss"] < expected[0]["train/loss"] - 1
    assert numbers(run) == expected
    assert quantised(run) == quantised(alone) != [] or recipe == "bf16"


def quantised(run):
    """Names of the linears whose GEMMs the run has rounded operands for."""
    table = json.loads((run / "recipe.json").read_text())
    return [name for name, row in table.items() if any(text != "BF16 x BF16" for text in row["gemms"].values())]
