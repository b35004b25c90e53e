"""Signals that ask a run to stop; the trainer stops after the current step.

The handlers of SIGTERM, SIGUSR1, SIGUSR2 and SIGINT only record the signal. The trainer checks after each step, saves,
and the process ends with status 0 and a PREEMPTED file; many ranks agree on the step first (`train.stop_consensus`). A
second SIGINT aborts at once. torchrun kills its ranks 30 s after it has handed a signal on, so the scripts for Slurm
give signals to the ranks without it (docs/slurm.md).
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NOTICE = b"\nInterrupted: saving at the end of this step, then ending. Again: abort without saving.\n"
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """Callable that tells whether to stop. number: of the first signal, 0 before that. aborted: by a second SIGINT."""

    def __init__(self) -> None:
        self.number = 0
        self.aborted = False
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
            self.aborted = True
            raise KeyboardInterrupt
        elif not self.number:
            self.number = number
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                os.write(2, NOTICE)  # print may be what was interrupted


@contextmanager
def listen() -> Iterator[StopRequest]:
    """Handle the signals within a `with` block, in the main thread; the earlier handlers come back after it.

    Signals that came while they were `blocked`, here or in the process that started this one, come now.
    """
    request = StopRequest()
    with handled(request.handle):
        yield request


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Give the signals to `handler` within a `with` block, those that were `blocked` too."""
    before = {number: signal.signal(number, handler) for number in HANDLED}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def blocked() -> Iterator[None]:
    """Let the signals wait within a `with` block, as while torch is imported; processes started in it inherit it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
