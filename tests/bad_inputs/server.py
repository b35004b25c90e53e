"""`python -m tests.bad_inputs.server`: runs commands in forked children, so that the imports are paid for once.

Reads a JSON object a line, {"arguments": ["train" | "lowprec", ...], "directory": ..., "environment": {...}}, answers
each with {"status", "out", "err"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import traceback

from lowprec_train import main
from lowprec_train.tools import cli

PR_SET_PDEATHSIG = 1
LIMIT = 120  # seconds; then the child is killed, and its status is -9


def enter(arguments: list[str]) -> int:
    """What the process of this command line would exit with."""
    entry, *rest = arguments
    sys.argv = ["train.py" if entry == "train" else "lowprec", *rest]
    try:
        code = main.main() if entry == "train" else cli.main(rest)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    return int(code or 0)


def child(asked: dict, out: int, err: int) -> None:
    """Never returns."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a case that never ends must not outlive the tests
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(asked["directory"])
    os.environ.update(asked["environment"])
    code = enter(asked["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(asked: dict) -> dict:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = os.fork()
        if not process:
            child(asked, out.fileno(), err.fileno())
        signal.signal(signal.SIGALRM, lambda *_: os.kill(process, signal.SIGKILL))
        signal.alarm(LIMIT)
        _, status = os.waitpid(process, 0)
        signal.alarm(0)
        texts = [(file.seek(0), file.read().decode(errors="replace"))[1] for file in (out, err)]
    return {"status": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
