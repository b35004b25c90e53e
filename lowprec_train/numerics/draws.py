"""Seeds for every stochastic operand of every linear, as data: a table that is rewritten in place at each micro-batch.

    seed[site, stream] = first 63 bits of Philox4x32-10(counter = (site, stream, step + 2^36 u), key = run seed)
    u = 0 for an operand with tokens;   u = the micro-batch's first token / 8 for weights and for signs

A site is a linear layer, a stream one of its (gemm, purpose) pairs. Nothing inside the graph draws: compiled,
recomputed and resumed runs read the same table. First tokens are counted within the global step, so they name a
micro-batch whatever rank and turn it falls to.

An operand with tokens (X, dY and their transposes) has the same seed in all micro-batches of a step, and `origin` moves
it to its tokens: their draws do not depend on how the batch is split. A weight has no tokens, and the signs of a
rotation belong to a whole GEMM: their seeds are new in each micro-batch, as arXiv 2502.20586 draws them, so that
accumulation and data-parallel ranks average the noise of W too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from lowprec_train.ops.philox import philox


class Gemms(IntEnum):
    """The three GEMMs of a linear layer."""

    FPROP = 0
    DGRAD = 1
    WGRAD = 2


class Purpose(IntEnum):
    """What a GEMM draws for: the signs of its rotation, the rounding of operand a, of operand b."""

    ROTATION = 0
    A = 1
    B = 2


STREAMS = len(Gemms) * len(Purpose)
BY_TOKEN = ((Gemms.FPROP, Purpose.A), (Gemms.DGRAD, Purpose.A), (Gemms.WGRAD, Purpose.A), (Gemms.WGRAD, Purpose.B))
"""Operands with tokens: X; dY; dY^T and X^T. The rest are W, W^T and signs."""

GROUP = 8  # tokens, or elements of a row: what one call of Philox serves
LAST_TOKEN = GROUP << 28  # 64 bits of the counter hold a step below 2^36 and a group


@dataclass(frozen=True)
class SiteDraws:
    """One linear's view: seeds int64 [9]; origins of token-major and channel-major operands, int64 [2] each."""

    seeds: Tensor
    token_rows: Tensor
    token_columns: Tensor

    def seed(self, gemm: Gemms, purpose: Purpose) -> Tensor:
        """0-dim int64."""
        return self.seeds[gemm * len(Purpose) + purpose]


class Draws:
    """The seeds of one run. `seed`: any int; `sites`: number of linear layers."""

    def __init__(self, seed: int, sites: int, device: torch.device | str = "cpu") -> None:
        self.run_seed = torch.tensor(seed & 0x7FFFFFFFFFFFFFFF)
        self.table = torch.zeros((sites, STREAMS), dtype=torch.int64, device=device)
        self.token_rows = torch.zeros(2, dtype=torch.int64, device=device)
        self.token_columns = torch.zeros(2, dtype=torch.int64, device=device)
        self.address: tuple[int, int] | None = None

    def begin(self, step: int, first_token: int) -> None:
        """Point all draws at a step and at a micro-batch's first token (counted within the step, a multiple of 8).

        ValueError for a token that is not, or that the counter cannot hold.
        """
        if first_token % GROUP or not 0 <= first_token < LAST_TOKEN:
            raise ValueError(
                f"draws come in groups of {GROUP} tokens and for {LAST_TOKEN} tokens a step: "
                f"no micro-batch starts at token {first_token}"
            )
        if self.address == (step, first_token):
            return
        self._set(self.table, self._seeds(step, first_token // GROUP))
        self._set(self.token_rows, torch.tensor([first_token, 0]))
        self._set(self.token_columns, torch.tensor([0, first_token]))
        self.address = step, first_token

    def _set(self, target: Tensor, value: Tensor) -> None:
        """Host to device without waiting, from pinned memory of its own: no later call overwrites it too soon."""
        target.copy_(value.pin_memory() if target.is_cuda else value, non_blocking=True)

    def _seeds(self, step: int, micro_batch: int) -> Tensor:
        site = torch.arange(self.table.shape[0]).unsqueeze(1)
        by_token = torch.zeros(STREAMS, dtype=torch.bool)
        by_token[[gemm * len(Purpose) + purpose for gemm, purpose in BY_TOKEN]] = True
        stream = torch.arange(STREAMS).unsqueeze(0)
        low, high = torch.tensor(step & 0xFFFFFFFF), (step >> 32) + (micro_batch << 4) * (~by_token).unsqueeze(0)
        words = philox((site, stream, low, high), self.run_seed)
        return (words[1] & 0x7FFFFFFF) << 32 | words[0]

    def site(self, index: int) -> SiteDraws:
        """The view of one linear layer; it stays valid over `begin`."""
        return SiteDraws(self.table[index], self.token_rows, self.token_columns)
