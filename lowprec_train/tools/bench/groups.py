"""Groups of contestants that share the GPU's memory and take turns, and the memory that they need.

A group is a BF16 baseline and up to three others. All its models live on the device together, so that a round of steps
meets one state of the machine, and every ratio has its baseline beside it. Where memory does not allow that, one model
lives at a time.
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
    """Estimated bytes of one contestant: what stays between steps, and what a step adds."""

    resident: int
    step: int

    def fits(self, budget: int) -> int:
        """How many contestants live together in `budget` bytes, at least one."""
        return max(1, (budget - self.step) // self.resident)


def memory(sizes: Mapping[str, int], work: Work) -> Memory:
    """Of a BF16 step: 2 (10 dim + 4 ffn) bytes a token and layer, and 10 of every logit, within 15 % of what compiled
    BF16 blocks took.
    """
    parameters = count(sizes)
    kept = 2 * (10 * sizes["dim"] + 4 * sizes["ffn"]) * sizes["layers"] + 10 * sizes["vocab_size"]
    step = work.tokens * kept + parameters * GRADIENT_BYTES[work.parameters]
    return Memory(resident=parameters * STATE_BYTES[work.parameters], step=step)


def count(sizes: Mapping[str, int]) -> int:
    """Parameters of a LLaMA, its norms left out."""
    block = 4 * sizes["dim"] ** 2 + 3 * sizes["dim"] * sizes["ffn"]
    return 2 * sizes["vocab_size"] * sizes["dim"] + sizes["layers"] * block


def plan(contestants: Sequence[Entrant], largest: int = LARGEST) -> list[list[Entrant]]:
    """Groups of at most `largest`, the first contestant in each; it is the BF16 baseline.

    Raises ValueError where it is none, and for groups that hold no other.
    """
    if not contestants or not contestants[0].baseline:
        raise ValueError("the first contestant is the BF16 baseline that every group has")
    if largest < 2:
        raise ValueError(f"a group holds the BF16 baseline and another, so at least 2, not {largest}")
    first, others = contestants[0], contestants[1:]
    size = largest - 1
    return [[first, *others[at : at + size]] for at in range(0, max(1, len(others)), size)]
