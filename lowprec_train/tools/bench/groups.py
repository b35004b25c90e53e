"""Groups of contestants that are measured together, and the GPU memory that they need.

A group is the BF16 baseline and up to three other contestants. All models of a group are in GPU memory at once and are
measured in the same rounds, so each ratio compares steps under the same conditions. If the memory is too small, one
model is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowprec_train.tools.bench.contestant import Entrant, Work

LARGEST = 4
STATE_BYTES = {"bf16": 6, "fp32": 12}  # a parameter and its two moments
GRADIENT_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Estimated bytes of one contestant. resident: between steps. step: additional bytes during a step."""

    resident: int
    step: int

    def fits(self, budget: int) -> int:
        """Return the number of contestants that fit in `budget` bytes, at least one."""
        return max(1, (budget - self.step) // self.resident)


def memory(sizes: Mapping[str, int], work: Work) -> Memory:
    """Return the estimated memory of a BF16 step: 2 (10 dim + 4 ffn) bytes per token and layer, and 10 bytes per logit.

    The estimate is within 15 % of the measured memory of compiled BF16 blocks.
    """
    parameters = count(sizes)
    kept = 2 * (10 * sizes["dim"] + 4 * sizes["ffn"]) * sizes["layers"] + 10 * sizes["vocab_size"]
    step = work.tokens * kept + parameters * GRADIENT_BYTES[work.parameters]
    return Memory(resident=parameters * STATE_BYTES[work.parameters], step=step)


def count(sizes: Mapping[str, int]) -> int:
    """Return the number of parameters of a LLaMA model, without norms."""
    block = 4 * sizes["dim"] ** 2 + 3 * sizes["dim"] * sizes["ffn"]
    return 2 * sizes["vocab_size"] * sizes["dim"] + sizes["layers"] * block


def plan(contestants: Sequence[Entrant], largest: int = LARGEST) -> list[list[Entrant]]:
    """Split contestants into groups of at most `largest`. The first contestant is the BF16 baseline of every group.

    Raises ValueError if the first contestant is not a baseline or `largest` is below 2.
    """
    if not contestants or not contestants[0].baseline:
        raise ValueError("the first contestant must be the BF16 baseline")
    if largest < 2:
        raise ValueError(f"--groups {largest} must be at least 2: the BF16 baseline and another contestant")
    first, others = contestants[0], contestants[1:]
    size = largest - 1
    return [[first, *others[at : at + size]] for at in range(0, max(1, len(others)), size)]
