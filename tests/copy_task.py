"""A task that no dead or wrong network can pass: repeat the symbol seen eight positions ago.

64 symbols, drawn independently: nothing but attention over eight positions gets below log 64 = 4.16 nats.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.recipes import System

LAG, SYMBOLS, BATCH, LENGTH = 8, 64, 16, 64
PEAK, WARMUP = 3e-3, 20


def batches(seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, targets), the first eight targets ignored."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, SYMBOLS, (BATCH, LENGTH), generator=generator)
        targets = tokens.roll(LAG, dims=1)
        targets[:, :LAG] = -100
        yield tokens, targets


def step(system: System, index: int, batch: tuple[Tensor, Tensor]) -> float:
    """One update as the trainer makes it; returns the loss."""
    tokens, targets = batch
    system.precision.begin(system.model, index)
    loss = system.model.loss(tokens, targets, float(BATCH * (LENGTH - LAG)), draws=system.seeds.at(index, 0))
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in system.model.parameters() if p.grad is not None])
    clip = system.run.max_grad_norm or float("inf")
    system.optimizer.set_lr(PEAK * min(1.0, (index + 1) / WARMUP))
    system.optimizer.step(grad_scale=((norm + 1e-6) / clip).clamp(min=1.0), found_inf=torch.zeros(()))
    system.optimizer.zero_grad(set_to_none=True)
    return loss.item()


def losses(system: System, steps: int, goal: float) -> list[float]:
    """Of up to `steps` steps; ends early once three in a row are below the goal."""
    seen: list[float] = []
    for index, batch in zip(range(steps), batches(), strict=False):
        seen.append(step(system, index, batch))
        if len(seen) >= 3 and max(seen[-3:]) < goal:
            break
    return seen
