"""A signal asks; the trainer answers at the end of its step.

SIGTERM, SIGUSR1, SIGUSR2 and SIGINT only leave their name behind. The trainer looks after each step, saves, and the
process ends with status 0 and a PREEMPTED file; many ranks agree on the step first (`train.agreement`). A second
SIGINT aborts at once. torchrun kills its ranks 30 s after it has handed a signal on, so the scripts for Slurm give
signals to the ranks without it (docs/slurm.md).
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """Callable that tells whether to stop; `number` is the first signal's, 0 before that."""

    def __init__(self) -> None:
        self.number = 0
        self._pid = os.getpid()

    def __call__(self) -> bool:
        return self.number > 0

    @property
    def signal_name(self) -> str | None:
        """Name of the first signal that came."""
        return signal.Signals(self.number).name if self.number else None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler. A forked child (data, checkpoint writer) inherits it and must die as it would without us."""
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number == signal.SIGINT == self.number:
            raise KeyboardInterrupt
        elif not self.number:
            self.number = number


@contextmanager
def listen() -> Iterator[StopRequest]:
    """Handle the signals within a `with` block, in the main thread; the earlier handlers come back after it."""
    request = StopRequest()
    before = {number: signal.signal(number, request.handle) for number in HANDLED}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
