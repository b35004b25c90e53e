"""Seeds for all stochastic operands of all linears: a table for each micro-batch, which is an argument of the model.

    seed[site, stream] = first 63 bits of Philox4x32-10(counter = (site, stream, step + 2^36 u), key = run seed)
    u = 0 for an operand with tokens;   u = the micro-batch's first token / 8 for weights and for signs

A site is a linear layer; a stream is the rotation or an operand of one of its GEMMs. No random state changes inside the
graph, and tables are never modified: compiled, recomputed and resumed runs read the same numbers, and several
micro-batches may be in flight. First tokens are counted within the global step, so they identify a micro-batch
independently of rank and order.

An operand with tokens (X, dY and their transposes) has the same seed in all micro-batches of a step, with an offset
`origin` for its tokens: their draws do not depend on how the batch is split. Weights and the signs of rotations have
new seeds in each micro-batch, as in arXiv 2502.20586, so that accumulation and data parallelism also average the noise
of W.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_train.ops.philox import philox


class Gemms(IntEnum):
    """The three GEMMs of a linear layer."""

    FPROP = 0
    DGRAD = 1
    WGRAD = 2


class Operand(IntEnum):
    """Operands of a GEMM a[m, k] @ b[n, k]^T, by the stream of their rounding; stream 0 is the rotation's."""

    A = 1
    B = 2


PER_GEMM = 1 + len(Operand)
STREAMS = len(Gemms) * PER_GEMM
ROW = 16  # numbers that a site takes in memory: 128 bytes, so that no row is misaligned for a compiled kernel
BY_TOKEN = ((Gemms.FPROP, Operand.A), (Gemms.DGRAD, Operand.A), (Gemms.WGRAD, Operand.A), (Gemms.WGRAD, Operand.B))
"""Operands with tokens: X; dY; dY^T and X^T. The rest are W, W^T and signs."""

GROUP = 8  # tokens, or elements of a row: what one call of Philox serves
LAST_TOKEN = GROUP << 28  # 64 bits of the counter hold a step below 2^36 and a group


@dataclass(frozen=True)
class SiteDraws:
    """Draws of one linear: seeds int64 [9]; origins of token-major and channel-major operands, int64 [2] each."""

    seeds: Tensor
    token_rows: Tensor
    token_columns: Tensor

    def seed(self, gemm: Gemms, operand: Operand) -> Tensor:
        """Return the seed of an operand's stochastic rounding, 0-dim int64."""
        return self.seeds[gemm * PER_GEMM + operand]

    def signs(self, gemm: Gemms) -> Tensor:
        """Return the seed of the signs of a GEMM's rotation, 0-dim int64."""
        return self.seeds[gemm * PER_GEMM]


class Draws(NamedTuple):
    """Draws of one micro-batch, an argument of the model's forward pass: seeds int64 [sites, 9], and origins shared by
    all sites. These tensors are never modified, so the backward pass and a recomputed forward pass use the same bits,
    even if other micro-batches started in between.
    """

    seeds: Tensor
    token_rows: Tensor
    token_columns: Tensor

    def site(self, index: int) -> SiteDraws:
        """Return the draws of one linear layer."""
        return SiteDraws(self.seeds[index], self.token_rows, self.token_columns)

    def part(self, first: int, count: int) -> Draws:
        """Return the draws of `count` sites from `first` on, renumbered from 0: equal blocks have equal indices."""
        return self._replace(seeds=self.seeds[first : first + count])


class SeedTable:
    """The seeds of one run. `seed`: any int; `sites`: number of linear layers."""

    def __init__(self, seed: int, sites: int, device: torch.device | str = "cpu") -> None:
        self.run_seed, self.sites = torch.tensor(seed & 0x7FFFFFFFFFFFFFFF), sites
        self.device = torch.device(device)

    def at(self, step: int, first_token: int) -> Draws:
        """Return the draws of a micro-batch, given by its first token (counted within the step, a multiple of 8).

        Raises ValueError for a token that is not a multiple of 8 or exceeds the counter.
        """
        if first_token % GROUP or not 0 <= first_token < LAST_TOKEN:
            raise ValueError(
                f"draws come in groups of {GROUP} tokens and for {LAST_TOKEN} tokens a step: "
                f"no micro-batch starts at token {first_token}"
            )
        table = torch.zeros((self.sites + 1, ROW), dtype=torch.int64)
        table[:-1, :STREAMS] = self._seeds(step, first_token // GROUP)
        table[-1, 0] = table[-1, 3] = first_token
        table = self._sent(table)
        return Draws(table[:-1, :STREAMS], table[-1, :2], table[-1, 2:4])

    def _sent(self, table: Tensor) -> Tensor:
        """Copy asynchronously from pinned host memory to the device."""
        return (table.pin_memory() if self.device.type == "cuda" else table).to(self.device, non_blocking=True)

    def _seeds(self, step: int, micro_batch: int) -> Tensor:
        site = torch.arange(self.sites).unsqueeze(1)
        by_token = torch.zeros(STREAMS, dtype=torch.bool)
        by_token[[gemm * PER_GEMM + operand for gemm, operand in BY_TOKEN]] = True
        stream = torch.arange(STREAMS).unsqueeze(0)
        low, high = torch.tensor(step & 0xFFFFFFFF), (step >> 32) + (micro_batch << 4) * (~by_token).unsqueeze(0)
        words = philox((site, stream, low, high), self.run_seed)
        return (words[1] & 0x7FFFFFFF) << 32 | words[0]
