"""The scripts for Slurm, run as Slurm would run them: stand-ins for srun and scontrol, torchrun recorded or real."""

import importlib.util
import json
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests import test_main_interruption as interruption

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts" / "slurm"
STEPS = 60
TORCHRUN = f'exec {sys.executable} -m torch.distributed.run "$@"'
RECORDER = """printf '%s\\n' "$@" >"torchrun-$SLURM_NODEID"
env | grep ^TORCH_ >"environment-$SLURM_NODEID"
[ -z "${OUTCOME:-}" ] || { mkdir -p "$(dirname "$OUTCOME")"; touch "$OUTCOME"; }
"""

arguments = interruption.arguments


def free_job():
    """A job number whose port is free: tests may run side by side."""
    for job in range(4000 + os.getpid() % 1000, 6000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", 29500 + job % 1000))
            return job
    raise AssertionError("no free port")


class Cluster:
    """A checkout, and a machine on which sbatch has started a script in it."""

    def __init__(self, path: Path, torchrun: str, nodes: int = 1) -> None:
        self.path = path
        (path / "scripts").symlink_to(ROOT / "scripts")
        self.script("bin/torchrun", torchrun)
        self.script("bin/srun", f'exec {sys.executable} {ROOT}/tests/slurm/srun.py "$@"')
        self.script("bin/scontrol", 'echo "$@" >>scontrol.txt; tr , "\\n" <<<"$NODES"')
        self.script(".venv/bin/activate", f"PATH={path}/bin:$PATH")
        (path / "train.py").symlink_to(ROOT / "tests" / "slurm" / "rank.py")
        self.nodes, self.job = nodes, free_job()

    def script(self, name, content):
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/usr/bin/env bash\n{content}\n")
        file.chmod(0o755)

    def start(self, *overrides, script="train.sbatch", **variables):
        """What sbatch starts, with the variables of its environment."""
        ours = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "TORCH", "VENV"))}
        nodes = ",".join(["localhost"] * self.nodes)
        ours |= {"SLURM_JOB_ID": str(self.job), "SLURM_SUBMIT_DIR": str(self.path), "SLURM_NNODES": str(self.nodes)}
        ours |= {"SLURM_JOB_NODELIST": "n[1-2]", "NODES": nodes, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            ["bash", str(SCRIPTS / script), *overrides],
            env=ours | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *overrides, **variables):
        """Exit status and output."""
        process = self.start(*overrides, **variables)
        out, _ = process.communicate(timeout=200)
        return process.returncode, out

    def lines(self, name):
        file = self.path / name
        return file.read_text().splitlines() if file.exists() else []

    def requeued(self):
        return [line.removeprefix("requeue ") for line in self.lines("scontrol.txt") if line.startswith("requeue")]

    def wait_for(self, name, lines, process):
        deadline = time.monotonic() + 150
        while len(self.lines(name)) < lines:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def stop(self, process, number):
        """Slurm's warning: the signal goes to the tasks of the step. Exit status and output."""
        os.kill(int((self.path / "srun.pid").read_text()), number)
        out, _ = process.communicate(timeout=200)
        return process.returncode, out


def options(lines):
    """{option: value} of torchrun, and what follows them."""
    begin = lines.index("train.py")
    return dict(line[2:].split("=", 1) for line in lines[:begin]), lines[begin + 1 :]


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (2, 8)])
def test_rendezvous(tmp_path, nodes, gpus):
    cluster = Cluster(tmp_path, RECORDER, nodes)
    cluster.run("+recipe=fp4", "name=a", "model.dim=64", SLURM_GPUS_ON_NODE=str(gpus), SLURM_CPUS_PER_TASK="24")
    for node in range(nodes):
        given, overrides = options(cluster.lines(f"torchrun-{node}"))
        assert overrides == ["+recipe=fp4", "name=a", "model.dim=64"]
        assert given == {
            "nnodes": str(nodes),
            "nproc-per-node": str(gpus),
            "max-restarts": "3",
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"localhost:{29500 + cluster.job % 1000}",
            "rdzv-id": f"{cluster.job}-0",
            "rdzv-conf": f"is_host={int(node == 0)}",
            "local-addr": "localhost",
            "signals-to-handle": "SIGINT",
        }
        recorder = dict(line.split("=", 1) for line in cluster.lines(f"environment-{node}"))
        assert recorder == {
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/slurm-{cluster.job}.flight/rank_",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        }
    assert {"--ntasks-per-node=1", "--cpus-per-task=24", "--kill-on-bad-exit=1"} <= set(cluster.lines("srun.options"))
    assert "show hostnames n[1-2]" in cluster.lines("scontrol.txt")
    assert not (tmp_path / f"slurm-{cluster.job}.flight").exists(), "no recording, no directory"


def test_the_recorder_listens_to_these_names():
    """A variable that torch has renamed would be set in vain."""
    text = (SCRIPTS / "train.sbatch").read_text()
    names = re.findall(r"\b(TORCH_\w+)=", text)
    torch_directory = Path(importlib.util.find_spec("torch").origin).parent
    files = [
        *torch_directory.glob("include/torch/csrc/distributed/c10d/*.hpp"),
        *torch_directory.glob("lib/libtorch_cpu.*"),
    ]
    found = set()
    for file in files:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found |= {name for name in names if content.find(name.encode()) >= 0}
    assert len(names) == 3 and found == set(names)


def test_a_requeue_is_another_rendezvous(tmp_path):
    cluster = Cluster(tmp_path, RECORDER)
    cluster.run("name=a", SLURM_RESTART_COUNT="2")
    assert options(cluster.lines("torchrun-0"))[0]["rdzv-id"] == f"{cluster.job}-2"


@pytest.mark.parametrize(
    ("outcome", "status", "requeued", "said"),
    [
        ("DONE", 0, False, "runs/a is done"),
        ("PREEMPTED", 0, True, "requeueing"),
        (None, 1, False, "neither finished nor saved"),
    ],
)
def test_the_outcome_decides(tmp_path, outcome, status, requeued, said):
    """Also where an earlier launch was preempted, and this one did not get as far as to say anything."""
    cluster = Cluster(tmp_path, RECORDER)
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/PREEMPTED").touch()
    ended, out = cluster.run("name=a", OUTCOME=f"runs/a/{outcome}" if outcome else "")
    assert (ended, cluster.requeued()) == (status, [str(cluster.job)] * requeued) and said in out


@pytest.mark.parametrize(("exits", "writes", "status"), [(0, False, 0), (1, False, 1), (1, True, 0)])
def test_an_older_done_counts_only_if_the_launch_succeeds(tmp_path, exits, writes, status):
    """A launch that is refused leaves it in place; one that ends the run writes another, whatever torchrun returns."""
    ends = "rm runs/a/DONE; sleep 0.01; touch runs/a/DONE\n" if writes else ""
    cluster = Cluster(tmp_path, f"{ends}exit {exits}")
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/DONE").touch()
    ended, out = cluster.run("name=a")
    assert ended == status and ("runs/a is done" in out) == (not status) and not cluster.requeued()


SAVES = """mkdir -p runs/a/checkpoints
echo "$SAVED" >runs/a/checkpoints/latest
exit 1
"""


def test_a_crash_is_requeued_while_checkpoints_come(tmp_path):
    """Up to the limit; a job of another number begins to count anew."""
    cluster = Cluster(tmp_path, SAVES)
    for crash in range(3):
        status, out = cluster.run("name=a", SAVED=f"step-{crash}", CRASH_REQUEUES="2")
        again = crash < 2
        assert (status, len(cluster.requeued())) == (int(not again), min(crash + 1, 2)) and "neither finished" in out
        assert (f"after crash {crash + 1} of at most 2" if again else "requeued after 2 crashes already") in out
    cluster.job += 1
    status, _ = cluster.run("name=a", SAVED="step-9")
    assert status == 0 and cluster.requeued()[-1] == str(cluster.job)


@pytest.mark.parametrize("saved", ["step-7", ""])
def test_a_crash_without_a_new_checkpoint_is_the_last(tmp_path, saved):
    cluster = Cluster(tmp_path, SAVES if saved else "exit 1")
    if saved:
        (tmp_path / "runs/a/checkpoints").mkdir(parents=True)
        (tmp_path / "runs/a/checkpoints/latest").write_text(f"{saved}\n")
    status, out = cluster.run("name=a", SAVED=saved)
    assert status == 1 and not cluster.requeued() and "no checkpoint is newer than the launch" in out


def test_what_another_launch_wrote_stays(tmp_path):
    """A second job of the same name must not remove the PREEMPTED of the first, which holds the run's lock."""
    cluster = Cluster(tmp_path, "[ -e runs/a/PREEMPTED ] && echo there >seen; exit 1")
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/PREEMPTED").write_text("{}")
    assert cluster.run("name=a")[0] == 1
    assert cluster.lines("seen") == ["there"] and (tmp_path / "runs/a/PREEMPTED").read_text() == "{}"


@pytest.mark.parametrize(
    ("nodes", "given", "found"),
    [
        (2, {}, ["ib0", "ib0"]),
        (2, {"GLOO_SOCKET_IFNAME": "eth7"}, ["eth7", "eth7"]),
        (2, {"NCCL_SOCKET_IFNAME": "=lo"}, ["lo", "lo"]),
        (2, {"NCCL_SOCKET_IFNAME": "^docker"}, ["ib0", "ib0"]),
        (2, {"ROUTE": "none"}, ["", ""]),
        (1, {}, [""]),
    ],
)
def test_gloo_takes_the_interface_to_the_other_nodes(tmp_path, nodes, given, found):
    cluster = Cluster(tmp_path, 'echo "${GLOO_SOCKET_IFNAME:-}" >"gloo-$SLURM_NODEID"', nodes)
    cluster.script("bin/ip", '[ -n "${ROUTE:-}" ] || echo "$4 via 10.0.0.254 dev ib0 src 10.0.0.1 uid 0"')
    _, out = cluster.run("name=a", **given)
    assert [cluster.lines(f"gloo-{node}")[0] for node in range(nodes)] == found
    assert ("no interface found" in out) == ("ROUTE" in given)


def test_names_and_places(tmp_path):
    cluster = Cluster(tmp_path, RECORDER)
    status, out = cluster.run("+recipe=fp4")
    assert status != 0 and "give the run a name" in out and not cluster.lines("torchrun-0")
    assert cluster.run("name=a", "run_root=else/where", OUTCOME="else/where/a/DONE")[0] == 0


def test_a_sweep_is_an_array(tmp_path):
    """Each task trains its recipe, and requeues itself: the job's number alone may stand for the whole array."""
    cluster = Cluster(tmp_path, RECORDER)
    array = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "0"}
    words = ("bf16,fp8,mxfp4", "steps=20", "name=s")
    for task, recipe in enumerate(("bf16", "fp8", "mxfp4")):
        outcome = f"runs/s-{recipe}/PREEMPTED"
        status, _ = cluster.run(*words, script="sweep.sbatch", SLURM_ARRAY_TASK_ID=str(task), OUTCOME=outcome, **array)
        assert status == 0 and cluster.requeued()[-1] == f"70_{task}"
        assert options(cluster.lines("torchrun-0"))[1] == [f"+recipe={recipe}", "steps=20", f"name=s-{recipe}"]
    status, out = cluster.run("bf16,fp8", "name=s", script="sweep.sbatch", SLURM_ARRAY_TASK_ID="0", **array)
    assert status == 1 and "2 recipes need sbatch --array=0-1" in out


def test_directives():
    """What sbatch is asked for: the same for a run and for each run of a sweep, and signals for the steps."""
    train, sweep = (
        dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", (SCRIPTS / name).read_text(), flags=re.MULTILINE))
        for name in ("train.sbatch", "sweep.sbatch")
    )
    assert {key: train[key] for key in ("signal", "requeue", "open-mode", "ntasks-per-node")} == {
        "signal": "USR1@300",
        "requeue": "",
        "open-mode": "append",
        "ntasks-per-node": "1",
    }
    own = {"job-name", "output"}
    assert {key: train[key] for key in train if key not in own} == {key: sweep[key] for key in sweep if key not in own}


@pytest.mark.parametrize(("number", "nodes"), [(signal.SIGUSR1, 2), (signal.SIGTERM, 1)])
def test_signals_reach_the_ranks_and_not_torchrun(tmp_path, number, nodes):
    """Ranks save for seconds, end well, and are requeued; the next launch goes on and ends."""
    cluster = Cluster(tmp_path, TORCHRUN, nodes)
    process = cluster.start("do=wait", "name=a", SLURM_GPUS_ON_NODE="2")
    cluster.wait_for("ranks.txt", 2 * nodes, process)
    status, out = cluster.stop(process, number)
    assert status == 0 and cluster.requeued() == [str(cluster.job)], out
    assert "srun: status" not in out and "closing signal" not in out, "torchrun ended as after any other run"
    status, out = cluster.run("do=wait", "name=a", SLURM_GPUS_ON_NODE="2", SLURM_RESTART_COUNT="1")
    assert status == 0 and "runs/a is done" in out and cluster.requeued() == [str(cluster.job)]
    expected = [f"{rank} of {2 * nodes}, restart 0" for rank in range(2 * nodes)]
    assert sorted(cluster.lines("ranks.txt")) == sorted(2 * expected)


def test_a_crashed_rank_starts_again_on_all_nodes(tmp_path):
    cluster = Cluster(tmp_path, TORCHRUN, nodes=2)
    status, out = cluster.run("do=crash", "name=a", "save=0")
    assert status == 0 and "runs/a is done" in out, out
    starts = cluster.lines("ranks.txt")
    assert len(starts) == 4 and {line.split(",")[0] for line in starts[2:]} == {"0 of 2", "1 of 2"}


def test_training_is_preempted_requeued_and_done(tmp_path, arguments):
    """The trainer itself, in one process: it saves at Slurm's signal and goes on after it."""
    cluster = Cluster(tmp_path, TORCHRUN)
    (tmp_path / "train.py").unlink()
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    words = (*arguments, "name=run", "run_root=runs", "tokens_per_step=512", f"steps={STEPS}")
    process = cluster.start(*words)
    cluster.wait_for("runs/run/metrics.jsonl", 3, process)
    status, out = cluster.stop(process, signal.SIGUSR1)
    assert status == 0 and cluster.requeued() == [str(cluster.job)], out
    saved = json.loads((tmp_path / "runs/run/PREEMPTED").read_text())
    assert saved["signal"] == "SIGUSR1" and 3 <= saved["step"] < STEPS
    status, out = cluster.run(*words, SLURM_RESTART_COUNT="1")
    assert (
        status == 0
        and f"resuming after step {saved['step']} of {STEPS}" in out
        and cluster.requeued() == [str(cluster.job)]
    )
    assert [json.loads(line)["step"] for line in cluster.lines("runs/run/metrics.jsonl")] == list(range(1, STEPS + 1))
