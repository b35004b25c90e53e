"""Stands in for srun: runs its command once a node, all on this machine, and gives the tasks the signals it receives.

As Slurm does, to the tasks alone and not to their children. NODES in its environment are the nodes' names.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


def main(arguments):
    begin = next(index for index, word in enumerate(arguments) if not word.startswith("--"))
    Path("srun.options").write_text("\n".join(arguments[:begin]))
    nodes = os.environ["NODES"].split(",")
    tasks = [
        subprocess.Popen(arguments[begin:], env=os.environ | {"SLURM_NODEID": str(index), "SLURMD_NODENAME": node})
        for index, node in enumerate(nodes)
    ]
    for number in SIGNALS:
        signal.signal(number, lambda number, _: [task.send_signal(number) for task in tasks])
    Path("srun.pid").write_text(str(os.getpid()))
    while None in (states := [task.poll() for task in tasks]):
        if "--kill-on-bad-exit=1" in arguments and any(states):
            for task in tasks:
                task.terminate()
        time.sleep(0.05)
    return max(map(abs, states))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
