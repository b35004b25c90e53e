"""Stop requests, agreed on by all ranks: all stop after the same step.

A signal may reach one rank only, or reach the ranks in different steps. A rank that saved alone would wait forever for
the other ranks' shards. So after each step all ranks exchange a short message on the CPU (gloo). It is sent after one
step and read after the next, so neither ranks nor devices wait for it. All ranks read the same message and decide
alike, one step after the request.

The message also carries times, which give per-rank metrics at no further cost. Gradients are reduced across ranks, so
all ranks end a step together, and step times hardly differ even if one rank is slow. The ranks differ in the time at
which they have prepared a step: the rank that waits least for the message of the others is the slowest.

    late_ms of rank r = (largest wait of any rank for the previous message) - (wait of rank r)
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from lowprec_train.comm.collectives import ALL_GATHER

FIELDS = ("stop", "step_ms", "data_ms", "waited_ms")


class _Message:
    """One exchange in flight: this rank's numbers and, on arrival, those of all ranks."""

    def __init__(self, numbers: list[float], group: dist.ProcessGroup) -> None:
        local = torch.tensor([numbers], dtype=torch.float64)
        self._all = torch.empty(group.size(), len(FIELDS), dtype=torch.float64)
        self._begun = self._arrived = time.perf_counter()
        work = ALL_GATHER(self._all, local, group=group, async_op=True)
        assert work is not None
        self._work = work
        self._future = work.get_future().then(self._note_arrival)

    def _note_arrival(self, _: object) -> None:
        self._arrived = time.perf_counter()

    def read(self) -> tuple[Tensor, float]:
        """Return [rank, FIELDS] and the milliseconds from sending to arrival. Waits until the last rank has sent."""
        self._work.wait()
        self._future.wait()
        return self._all, (self._arrived - self._begun) * 1e3


class StopConsensus:
    """Turns any rank's request to stop into a decision of all ranks at the same step.

    group: of all ranks, for host tensors, used by no other thread; None: a single process, which decides at once.
    learned: the largest request of any rank that has arrived: 0 for none, else True or a signal's number.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._message: _Message | None = None
        self._waited_ms = 0.0
        self._newest: Tensor | None = None
        self.learned = 0

    def agree(self, stop: int, *, step_ms: float = 0.0, data_ms: float = 0.0) -> bool:
        """Return whether to stop now; the answer is the same on all ranks. All ranks call it once after every step.

        stop: this rank's request: False or 0, else True or the number of the signal.
        step_ms, data_ms: duration of the newest measured step, and of its wait for data.
        """
        if self._group is None:
            self.learned = max(self.learned, int(stop))
            return self.learned > 0
        self._read_message()
        if self.learned:
            return True
        self._message = _Message([float(stop), step_ms, data_ms, self._waited_ms], self._group)
        return False

    def metrics(self) -> dict[str, float]:
        """Return extremes over ranks from the newest message; empty before the first one and with one process.

        time/slowest_rank is the rank that came last, time/late_ms_max its delay behind the first.
        """
        if self._newest is None:
            return {}
        _, step_ms, data_ms, waited_ms = self._newest.unbind(1)
        late_ms = waited_ms.max() - waited_ms
        return {
            "time/step_ms_max": float(step_ms.max()),
            "time/step_ms_min": float(step_ms.min()),
            "time/data_ms_max": float(data_ms.max()),
            "time/late_ms_max": float(late_ms.max()),
            "time/slowest_rank": float(late_ms.argmax()),
        }

    def close(self) -> None:
        """Receive the message in flight, after the last step and before the group ends."""
        self._read_message()

    def _read_message(self) -> None:
        if self._message is None:
            return
        self._newest, self._waited_ms = self._message.read()
        self.learned = max(self.learned, int(self._newest[:, 0].max()))
        self._message = None
