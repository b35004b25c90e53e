"""Signals that stop a run; the trainer stops after the current step.

The handlers of SIGTERM, SIGUSR1, SIGUSR2, SIGINT and SIGHUP only record the signal. The trainer checks it after each
step and saves, and the process ends with status 0 and a PREEMPTED file. Several ranks first agree on the step
(`train.stop_consensus`). A second SIGINT aborts at once. torchrun kills its ranks 30 s after it forwards a signal, so
the Slurm scripts send signals to the ranks directly (docs/slurm.md). A closed terminal sends SIGHUP; under `nohup`,
which ignores it, it stays ignored.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NOTICE = b"\nInterrupted: the run saves after this step and stops. Interrupt again to abort without saving.\n"
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class StopRequest:
    """Callable that returns whether to stop. number: of the first signal, 0 before it. aborted: by a second SIGINT."""

    def __init__(self) -> None:
        self.number = 0
        self.aborted = False
        self._pid = os.getpid()

    def __call__(self) -> bool:
        return self.number > 0

    @property
    def signal_name(self) -> str | None:
        """Name of the first signal; None before it."""
        return signal.Signals(self.number).name if self.number else None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler. A forked child (data, checkpoint writer) inherits it and must die as it would by default."""
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number == signal.SIGINT == self.number:
            self.aborted = True
            raise KeyboardInterrupt
        elif not self.number:
            self.number = number
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                os.write(2, NOTICE)  # the signal may have interrupted a print


@contextmanager
def listen() -> Iterator[StopRequest]:
    """Handle the signals within a `with` block, in the main thread; restore the earlier handlers after it.

    Signals that arrived while they were `blocked`, here or in the parent process, are handled now.
    """
    request = StopRequest()
    with handled(request.handle):
        yield request


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Pass the signals to `handler` within a `with` block, including those that arrived while `blocked`."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    before = {number: signal.signal(number, handler) for number in HANDLED if number not in ignored}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def blocked() -> Iterator[None]:
    """Block the signals within a `with` block, e.g. while torch is imported; processes started in it inherit this."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
