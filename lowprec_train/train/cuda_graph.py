"""The passes of a step as a CUDA graph: recorded once, and launched by one call in every later step.

    warm-up    3 steps, kernel by kernel, on the stream that is recorded later: compiles, and creates what stays
    record     prepare, forward and backward passes, collectives, sums of gradients; Python runs, the GPU does not
    repeat     inputs are copied to where the recorded step read them, the graph runs, `.grad` is set again

A step of a few thousand tokens has more kernels than the host can launch while the GPU runs them; a graph costs the
host one launch. The optimizer's step, evaluation and checkpoints stay outside. The kernels are the same, so the bits
are too. Draws of stochastic rounding are inputs (`numerics.draws`), so each step has its own.

What a recorded pass allocates belongs to the graph until it is recorded again: activations and gathered weights share
memory as they do without a graph, but an evaluation needs memory of its own (PyTorch's notes on CUDA semantics, "CUDA
Graphs"). NCCL's watchdog does not see recorded collectives; those around a graph, of the targets and of the decision to
stop, time out in their place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lowprec_train.parallel.data import DataParallelContext
from lowprec_train.parallel.fsdp_parameters import copy_all
from lowprec_train.precision.schedule import PrecisionSchedule
from lowprec_train.train.step_passes import MicroBatch, Passes

WARM_UP = 3


def prepare_nccl() -> None:
    """Keep NCCL from registering the buffers of recorded collectives, unless the user has chosen (decision 0114). NCCL
    reads it when a collective is recorded.
    """
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


class GraphedPasses:
    """Runs the passes of a step as a graph, after `WARM_UP` steps. If the shapes of the inputs or the phase of the
    precision schedule change, they are warmed up and recorded again.

    parameters: whose gradients the passes compute. schedule: of the model's recipes.
    """

    def __init__(
        self,
        passes: Passes,
        data_parallel: DataParallelContext,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        *,
        schedule: PrecisionSchedule | None = None,
    ) -> None:
        self._passes, self._data_parallel, self._schedule = passes, data_parallel, schedule
        self._parameters, self._stream = parameters, torch.cuda.Stream(device)
        prepare_nccl()
        self._kind: object = None
        self._done = 0  # steps of this kind
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._loss = torch.empty(0)
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._account: Callable[[], None] = lambda: None

    def __call__(self, micro: Sequence[MicroBatch], normalizer: Tensor) -> Tensor:
        given = [normalizer, *(tensor for each in micro for tensor in each.tensors())]
        kind = (self._schedule and self._schedule.current, [(tensor.shape, tensor.stride()) for tensor in given])
        if kind != self._kind:
            self._renew()
            self._kind, self._done = kind, 0
        self._done += 1
        if self._done <= WARM_UP:
            return self._launched(micro, normalizer)
        self._data_parallel.reshard()  # a recorded step gathers all weights, and ends with none
        if self._graph is None:
            self._record(micro, normalizer)
            self._inputs = given
        else:
            copy_all(self._inputs, given)
        assert self._graph is not None
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._account()
        return self._loss.clone()

    def close(self) -> None:
        """Free the graph. NCCL destroys no communicator that a graph still uses: it waits for the graph to go."""
        self._graph, self._loss = None, torch.empty(0)
        self._gradients.clear()

    def _renew(self) -> None:
        """Free a graph that may still run, for another one."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self.close()
            torch.cuda.empty_cache()

    def _launched(self, micro: Sequence[MicroBatch], normalizer: Tensor) -> Tensor:
        """Run the passes kernel by kernel on the graph's stream."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._passes(micro, normalizer)
        current.wait_stream(self._stream)
        return loss

    def _record(self, micro: Sequence[MicroBatch], normalizer: Tensor) -> None:
        """Record the passes. Only this thread and that of the backward pass may allocate meanwhile: the thread that
        loads batches pins memory, which a capture in the global mode forbids.
        """
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        failure: Exception | None = None
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    with self._data_parallel.recorded() as self._account:
                        self._loss = self._passes(micro, normalizer)
                except Exception as error:
                    failure = error
        except Exception as error:  # a recording that has failed may not end well
            failure = failure or error
        if failure is not None:
            raise failure
        self._graph = graph
        self._gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
