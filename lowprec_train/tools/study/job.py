"""Process of one run of a study: train it or resume it, then evaluate it.

    python -m lowprec_train.tools.study.job [OVERRIDE ...]

with the overrides of `lowprec train`, including `name` and `run_root`. Training ends with DONE, with PREEMPTED after a
signal, or with an error and status 1. A run that is DONE is evaluated in the same process.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from lowprec_train.tools import train
from lowprec_train.train import signals


def main(overrides: Sequence[str]) -> int:
    """Return the exit status of the training, or 1 if the evaluation fails."""
    given = dict(text.partition("=")[::2] for text in overrides)
    run = Path(given["run_root"]) / given["name"]
    with signals.blocked():
        try:
            train.here(overrides)
        except SystemExit as end:
            if end.code:
                raise
    if (run / "DONE").exists():
        from lowprec_train.tools.study.evaluation import evaluated

        try:
            evaluated(run, device=given.get("device", "auto"))
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
