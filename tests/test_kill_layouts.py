"""Forty-four random kills over five layouts and five recipes, one of which with all that saves memory too: every logged
number of the resumed run equals that of a run which was left alone, all keys but times.

What is killed is drawn too: one rank, the launcher, or all processes at once; so is the moment: a step, a save, or
anywhere in the start of a launch. Each layout meets two recipes and each recipe two layouts, four kills a run.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launches import ROOT, environment
from tests.test_kill import in_save, latest, logged, numbers, overrides

__all__ = ["overrides"]
STEPS, KILLS = 40, 4
LAYOUTS = {
    "one process": (1, ()),
    "dp 2": (2, ()),
    "tp 2": (2, ("parallel.tp=2",)),
    "dp 2 x tp 2": (4, ("parallel.tp=2",)),
    "replicate 2 x shard 2": (4, ("parallel.dp_replicate=2",)),
}
RECIPES = ("fp8_lm", "coat", "fp4", "mxfp4", "int8_switchback")
PAIRS = [(layout, RECIPES[(i + shift) % 5]) for i, layout in enumerate(LAYOUTS) for shift in (0, 2)]
PAIRS += [("dp 2 x tp 2", "lean coat")]
LEAN = ("+recipe=coat", "optim/master=bf16", "max_grad_norm=0.5", "optim.in_backward=true", "optim.offload=true")
LEAN += ("model.recompute=full", "model.offload=true")
MOMENTS = ("step", "step", "save", "start")
VICTIMS = ("rank", "launcher", "all")


class Launch:
    """torchrun and its ranks; the output goes to a file, which nobody has to read for them to go on."""

    def __init__(self, processes, output, arguments):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
        self.output = output
        with output.open("w") as file:
            self.launcher = subprocess.Popen(
                [str(part) for part in (*command, ROOT / "train.py", *arguments)],
                env=environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def ranks(self):
        """Process ids of the ranks that have been started."""
        try:
            return [
                int(pid)
                for pid in Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children").read_text().split()
            ]
        except FileNotFoundError:
            return []

    def kill(self, victim, chance):
        """SIGKILL, then wait until no process of the launch is left."""
        ranks = self.ranks()
        if victim == "rank" and ranks:
            send(chance.choice(ranks))
        else:
            self.launcher.kill()
        for rank in ranks if victim == "all" else ():
            send(rank)
        self.launcher.wait(120)
        wait_for(lambda: not any(alive(rank) for rank in ranks), self.output)


def send(pid):
    if alive(pid):
        os.kill(pid, signal.SIGKILL)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, output, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.002)


def killed(run, launch, moment, chance, cap):
    """Let a launch come to `moment`, kill a victim, and return how that went. cap: logged steps it may not pass."""
    if moment == "start":
        time.sleep(chance.uniform(0, 10))
    else:
        reached = min(max(latest(run), 1) + chance.randint(1, 8), cap)
        due = {"step": lambda: logged(run) >= reached, "save": lambda: logged(run) >= reached - 4 and in_save(run)}
        wait_for(lambda: launch.launcher.poll() is not None or due[moment]() or logged(run) >= cap, launch.output)
        time.sleep(chance.uniform(0, 0.1))
    assert launch.launcher.poll() is None, f"ended before it could be killed:\n{launch.output.read_text()}"
    victim = chance.choice(VICTIMS)
    launch.kill(victim, chance)
    return f"{moment}: {victim}, {logged(run)} steps logged, checkpoint {latest(run)}"


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "recipe"), PAIRS)
def test_kills_of_ranks_and_launchers_leave_every_number_alone(layout, recipe, overrides, tmp_path):
    chance = random.Random(f"{layout} {recipe}")
    processes, axes = LAYOUTS[layout]
    sizes = ("tokens_per_step=512", f"steps={STEPS}", "checkpoint_interval=4")
    launch = (*(LEAN if recipe == "lean coat" else (f"+recipe={recipe}",)), *overrides, *axes, *sizes, "name=run")

    (tmp_path / "alone").mkdir()
    alone = Launch(processes, tmp_path / "alone.out", (*launch, f"run_root={tmp_path / 'alone'}"))
    assert alone.launcher.wait(600) == 0, alone.output.read_text()
    expected = numbers(tmp_path / "alone" / "run")
    assert [line["step"] for line in expected] == list(range(1, STEPS + 1))

    run, history = tmp_path / "run", []
    for count in range(KILLS):
        again = Launch(processes, tmp_path / f"{count}.out", (*launch, f"run_root={tmp_path}"))
        moment = chance.choice(MOMENTS)
        history.append(killed(run, again, moment, chance, cap=STEPS * (count + 1) // (KILLS + 1)))
    print(layout, recipe, history)
    last = Launch(processes, tmp_path / "last.out", (*launch, f"run_root={tmp_path}"))
    assert last.launcher.wait(600) == 0, f"{history}\n{last.output.read_text()}"
    assert (run / "DONE").exists() and numbers(run) == expected, history
