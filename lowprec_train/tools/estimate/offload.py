"""Bytes of offloaded states and block inputs on the GPU, on the host, and over the link.

states     all on the host, `SLOTS` buffers of the largest size on the GPU; copied in both directions once a step
inputs     of all blocks on the host, `BUFFERS` buffers on the GPU; copied in both directions in each micro-batch
"""

from __future__ import annotations

import math

from lowprec_train.model.offload import BUFFERS
from lowprec_train.optim.host_states import SLOTS
from lowprec_train.tools.estimate.subject import Subject, Weight

BF16 = 2


def states_on_host(subject: Subject) -> int:
    """Return the bytes of states on the host: all states of matrices except per-tensor scales."""
    return sum(_moved(subject, weight) for weight in subject.weights) if subject.run.optim.offload else 0


def slots(subject: Subject) -> int:
    """Return the bytes of the GPU's buffers for states."""
    return SLOTS * max(_moved(subject, weight) for weight in subject.weights) if subject.run.optim.offload else 0


def block_input(subject: Subject) -> int:
    """Return the bytes of a block's input on this rank."""
    return BF16 * subject.tokens * subject.run.model.dim // subject.sizes.tp


def buffers(subject: Subject) -> int:
    """Return the bytes of the GPU's buffers for block inputs."""
    return BUFFERS * block_input(subject) if subject.run.model.offload else 0


def host_bytes(subject: Subject) -> int:
    """Return the bytes of pinned host memory."""
    return states_on_host(subject) + _inputs(subject)


def link_bytes(subject: Subject) -> int:
    """Return the bytes per step in each direction between GPU and host."""
    return states_on_host(subject) + subject.micro_batches * _inputs(subject)


def _inputs(subject: Subject) -> int:
    return subject.run.model.layers * block_input(subject) if subject.run.model.offload else 0


def _moved(subject: Subject, weight: Weight) -> int:
    if not weight.matrix:
        return 0
    shape, kept = weight.mine(subject.sizes), subject.codecs_of(weight).kept
    return sum(codec.state_bytes(shape) for _, codec in kept if math.prod(shape) > 1)
