"""A signal asks; the trainer answers at the end of its step.

SIGTERM, SIGUSR1, SIGUSR2 and SIGINT only leave their name behind. The trainer looks after each step, saves, and the
process ends with status 0 and a PREEMPTED file. torchrun hands on SIGTERM and SIGINT by itself, and the rest if its
--signals-to-handle (or PET_SIGNALS_TO_HANDLE) names them: it overwrites TORCHELASTIC_SIGNALS_TO_HANDLE. It kills
after 30 s, so ask early. A second SIGINT aborts at once.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """Callable that tells whether to stop; `signal_name` says which signal came first, None before that."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._pid = os.getpid()

    def __call__(self) -> bool:
        return self.signal_name is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler. A forked child (data, checkpoint writer) inherits it and must die as it would without us."""
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number == signal.SIGINT and self.signal_name == "SIGINT":
            raise KeyboardInterrupt
        elif self.signal_name is None:
            self.signal_name = signal.Signals(number).name


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
