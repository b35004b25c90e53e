"""What offloaded states and block inputs leave on a GPU, what they take of the host, and what crosses the link.

states     all of them on the host, `SLOTS` of the largest on the GPU; there and back once a step
inputs     of every block on the host, `BUFFERS` on their way in each direction; there and back in each micro-batch
"""

from __future__ import annotations

import math

from lowprec_train.model.offload import BUFFERS
from lowprec_train.optim.host_states import SLOTS
from lowprec_train.tools.estimate.subject import Subject, Weight

BF16 = 2


def states_on_host(subject: Subject) -> int:
    """Bytes of states that leave the GPU: all of matrices but a scale that serves a whole one."""
    return sum(_moved(subject, weight) for weight in subject.weights) if subject.run.optim.offload else 0


def slots(subject: Subject) -> int:
    """Bytes of the GPU's buffers for them."""
    return SLOTS * max(_moved(subject, weight) for weight in subject.weights) if subject.run.optim.offload else 0


def block_input(subject: Subject) -> int:
    """Bytes of the input of a block, on this rank."""
    return BF16 * subject.tokens * subject.run.model.dim // subject.sizes.tp


def buffers(subject: Subject) -> int:
    """Bytes of the GPU's buffers for block inputs."""
    return BUFFERS * block_input(subject) if subject.run.model.offload else 0


def host_bytes(subject: Subject) -> int:
    """Bytes of pinned host memory."""
    inputs = subject.run.model.layers * block_input(subject) if subject.run.model.offload else 0
    return states_on_host(subject) + inputs


def link_bytes(subject: Subject) -> int:
    """Bytes of a step in each direction between GPU and host."""
    inputs = subject.run.model.layers * block_input(subject) if subject.run.model.offload else 0
    return states_on_host(subject) + subject.micro_batches * inputs


def _moved(subject: Subject, weight: Weight) -> int:
    if not weight.matrix:
        return 0
    shape, kept = weight.mine(subject.sizes), subject.codecs_of(weight).kept
    return sum(codec.state_bytes(shape) for _, codec in kept if math.prod(shape) > 1)
