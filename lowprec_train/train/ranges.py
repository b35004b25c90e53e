"""Allowed ranges of the configuration's numbers, key by key. NaN and infinity are never allowed.

Classes of `_target_` nodes (`data`, `comm`, `optim.schedule`, recipes) check their own arguments; NODES adds ranges for
some of them. Sizes have upper limits too: above them tensors have too many elements to index, or a model takes too
long to build.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import reduce
from typing import Any

from lowprec_train.config import RunConfig
from lowprec_train.numerics.draws import LAST_TOKEN
from lowprec_train.ops.adamw import EPS


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`."""

    low: float
    high: float = math.inf
    above: bool = False  # excludes `low`
    below: bool = False  # excludes `high`
    or_zero: str = ""  # allows 0 too, with this meaning
    whole: bool = False  # integers only

    def holds(self, value: Any) -> bool:
        """Return whether a value is in the range."""
        kinds = (int,) if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            return False
        low = self.low < value if self.above else self.low <= value
        high = value < self.high if self.below else value <= self.high
        return (low and high) or bool(self.or_zero and value == 0)

    def __str__(self) -> str:
        low = "a number above" if self.above else "a whole number of at least" if self.whole else "at least"
        high = "" if math.isinf(self.high) else f" and {'below' if self.below else 'at most'} {self.high:g}"
        return f"{low} {self.low:g}{high}" + (f", or 0 ({self.or_zero})" if self.or_zero else "")


COUNT = Range(1, 1 << 53)
RANGES: dict[str, Range] = {
    **dict.fromkeys(
        ("steps", "micro_batch", "eval_interval", "eval_batches", "checkpoint_interval", "checkpoint_keep"), COUNT
    ),
    **dict.fromkeys(("log_interval", "max_nonfinite_steps"), COUNT),
    "tokens_per_step": Range(1, LAST_TOKEN),
    "telemetry_interval": Range(1, or_zero="no telemetry"),
    "gc_interval": Range(1, or_zero="Python's own schedule"),
    "max_grad_norm": Range(1e-12, 1e30, or_zero="no clipping"),
    "model.vocab_size": Range(1, 1 << 24),
    "model.dim": Range(1, 1 << 18),
    "model.layers": Range(1, 1 << 12),
    "model.heads": Range(1, 1 << 12),
    "model.kv_heads": Range(1, 1 << 12),
    "model.ffn": Range(1, 1 << 20),
    "model.max_seq_len": Range(1, 1 << 24),
    "model.full_recompute_layers": Range(0, 1 << 12),
    "model.rope_theta": Range(1, 1e30),
    "model.norm_eps": Range(1e-18, 1),
    "optim.lr": Range(0, 1e30, above=True),
    "optim.beta1": Range(0, 1, below=True),
    "optim.beta2": Range(0, 1, below=True),
    "optim.eps": Range(*EPS),
    "optim.weight_decay": Range(0, 1e6),
    **dict.fromkeys(("profile.steps", "profile.allocations"), Range(0)),
    "profile.first": COUNT,
    "parallel.blocks_per_unit": COUNT,
    "parallel.timeout_minutes": Range(0, 1e6, above=True, below=True),
}
WHOLE, SHARE = Range(1, whole=True), Range(0, 1)
NODES: dict[str, Range] = {  # checked if a node has the key with a value other than null
    "data.vocab_size": Range(1, 1 << 24, whole=True),
    "data.seed": Range(-(1 << 63), (1 << 63) - 1, whole=True),
    "data.valid_fraction": Range(0, 1, above=True, below=True),
    "comm.block": Range(1, 1 << 30, whole=True),
    "comm.node_size": WHOLE,
    "logger.console.every": WHOLE,
    "optim.schedule.peak": Range(0, 1e30, above=True),
    "optim.schedule.steps": WHOLE,
    "optim.schedule.warmup_steps": Range(0, whole=True),
    "optim.schedule.warmup_fraction": Range(0, 1, below=True),
    "optim.schedule.decay_steps": WHOLE,
    "optim.schedule.decay_fraction": Range(0, 1, above=True),
    "optim.schedule.final_fraction": SHARE,
    "optim.first_moment.group": WHOLE,
    "optim.second_moment.group": WHOLE,
}


def check(run: RunConfig) -> None:
    """Raise ValueError for the first key whose value is out of its range."""
    for key, allowed in (RANGES | NODES).items():
        value = reduce(_entry, key.split("."), run)
        if not (allowed.holds(value) or (value is None and key in NODES)):
            raise ValueError(f"{key}={value} must be {allowed}")


def _entry(tree: Any, name: str) -> Any:
    """Return an entry of a tree; None if a node does not have the key, or is no node."""
    return tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name) if is_dataclass(tree) else None
