"""Initial weights: a function of the run's seed and of the parameter's name and shape only.

Each parameter has its own CPU generator, seeded by a hash of (seed, name). So all recipes, parallel layouts and devices
start from the same bits, and adding a layer does not change the values of the others.

Matrices are N(0, 0.02^2); the two that write into the residual stream, `attention.out` and `mlp.down`, are scaled by
1/sqrt(2 * layers) so that the stream's variance does not grow with depth (GPT-2). Norm weights are 1, biases 0.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

STD = 0.02
RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight")


def initial_value(name: str, shape: torch.Size, *, seed: int, layers: int) -> Tensor:
    """Return the initial value of a parameter, FP32 on the CPU."""
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device="cpu")
    std = STD / math.sqrt(2 * layers) if name.endswith(RESIDUAL_OUTPUTS) else STD
    return torch.empty(shape, device="cpu").normal_(0.0, std, generator=_generator(seed, name))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
