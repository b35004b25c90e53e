"""Causal attention with rotary positions and grouped queries, on PyTorch's fused kernels.

The q, k and v projections are one GEMM. Its rows are grouped by key-value head, (K, G + 2, H): the G query heads that
share a key-value head, then that key, then that value. A tensor-parallel shard of the rows then has whole groups.
`forward` reads the number of groups from its input, so it works on shards too.

PyTorch selects the kernel among those that support the call; we rank cuDNN first, which is the fastest on Hopper. The
ranking is set around the call, so it also applies in compiled graphs and when a block is recomputed.

Shapes: B batch, T tokens, D model width, K key-value heads, G query heads per key-value head, H head width.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowprec_train.group import rounded_and_kept
from lowprec_train.model.cache import LayerCache
from lowprec_train.model.layers import RMSNorm
from lowprec_train.model.rotary import Angles, queries_keys_values, rotate, rotated_with_codes
from lowprec_train.numerics.draws import Draws
from lowprec_train.precision.linear import Linear, NormInput

_aten = torch.ops.aten
_RANKING = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Attention(nn.Module):
    """x [B, T, D] -> [B, T, D]: causal, scaled by 1/sqrt(H), within documents if a mask is given.

    head_dim: H; None: dim / heads. qkv_bias: of queries, keys and values; None: as bias.
    """

    fed_by_norm = "qkv"
    across_heads = False  # whether it needs all heads of a token, which tensor parallel cuts

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        bias: bool,
        *,
        head_dim: int | None = None,
        qkv_bias: bool | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.queries = heads // kv_heads
        widths = kv_heads * (self.queries + 2) * self.head_dim
        self.qkv = Linear(dim, widths, bias=bias if qkv_bias is None else qkv_bias)
        self.out = Linear(heads * self.head_dim, dim, bias=bias)
        self.out.compiled_x, self.out.x_is_saved = False, True  # a result of an attention kernel, which saves it

    def forward(
        self,
        x_BTD: Tensor,
        angles: Angles | None = None,
        mask_B1TT: Tensor | None = None,
        seq_len: int | None = None,
        cache: LayerCache | None = None,
        draws: Draws | None = None,
        *,
        norm_input: NormInput | None = None,
    ) -> Tensor:
        """seq_len: T, if x has a rank's share of all tokens, [1, BT / ranks, D]. cache: keys and values of earlier
        tokens; those of x are appended. draws: of the block. norm_input: of x (`Linear.saves_norm_input`).
        """
        if angles is not None and self.is_plain and torch.is_grad_enabled():
            qkv_BTN, codes = self.qkv.with_grad_codes(x_BTD, draws, norm_input)
        else:
            qkv_BTN, codes = self.qkv(x_BTD, draws=draws, norm_input=norm_input), None
        if seq_len is not None:
            qkv_BTN = qkv_BTN.view(-1, seq_len, qkv_BTN.shape[-1])
        if angles is not None and codes is not None:
            q_BTKGH, k_BTKGH, v_BTKGH = rotated_with_codes(qkv_BTN, codes, angles, self.queries, self.head_dim)
        else:
            q_BTKGH, k_BTKGH, v_BTKGH = self._rotated(qkv_BTN, angles)
        q, k, v = (each.flatten(2, 3).transpose(1, 2) for each in (q_BTKGH, k_BTKGH, v_BTKGH))
        if cache is not None:
            k, v = cache.extend(k, v)
        return self.out(scaled_dot_product(q, k, v, mask_B1TT).transpose(1, 2).flatten(2), draws=draws)

    @property
    def is_plain(self) -> bool:
        """True if nothing but the rotation changes queries and keys."""
        return type(self).queries_and_keys is Attention.queries_and_keys

    def _rotated(self, qkv_BTN: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, T, K, G, H], k and v [B, T, K, 1, H]."""
        q, k, v = queries_keys_values(qkv_BTN, self.queries, self.head_dim)
        q, k = self.queries_and_keys(q, k)
        if angles is None:
            return q, k, v
        plain = self.is_plain
        q, k = (rotate(each, angles, keeps=plain) for each in (q, k))
        v = v.contiguous()  # a view would keep the q and k of before the rotation for backward
        return q, k, rounded_and_kept(v, v.dtype) if plain else v

    def queries_and_keys(self, q_BTKGH: Tensor, k_BTKGH: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys before the rotation. Variants override this (docs/adding_a_model.md)."""
        return q_BTKGH, k_BTKGH


class QKNorm(Attention):
    """Queries and keys are RMS-normalised over each head's channels (arXiv 2302.05442; Qwen 3): two weights [H]."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        bias: bool,
        *,
        head_dim: int | None = None,
        qkv_bias: bool | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(dim, heads, kv_heads, bias, head_dim=head_dim, qkv_bias=qkv_bias)
        self.q_norm, self.k_norm = (RMSNorm(width, norm_eps) for width in self.norm_widths(heads, kv_heads))

    def norm_widths(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Return the number of channels of the norm of queries and of the norm of keys."""
        return self.head_dim, self.head_dim

    def queries_and_keys(self, q_BTKGH: Tensor, k_BTKGH: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(q_BTKGH), self.k_norm(k_BTKGH)


class FullQKNorm(QKNorm):
    """Queries and keys are RMS-normalised over the channels of all heads (OLMo 2, arXiv 2501.00656): weights [K*G*H]
    and [K*H].
    """

    across_heads = True

    def norm_widths(self, heads: int, kv_heads: int) -> tuple[int, int]:
        return heads * self.head_dim, kv_heads * self.head_dim

    def queries_and_keys(self, q_BTKGH: Tensor, k_BTKGH: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.q_norm(q_BTKGH.flatten(2)), self.k_norm(k_BTKGH.flatten(2))
        return q.view_as(q_BTKGH), k.view_as(k_BTKGH)


def scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask_B1TT: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(H)) v for q [B, K*G, T, H] and k, v [B, K, T, H]; causal unless a mask is given. A
    single query attends to all keys; otherwise more keys than queries need a mask.
    """
    if q.is_meta:
        return _without_memory(q, k, v, mask_B1TT)
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(_RANKING, set_priority=True):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_B1TT, is_causal=mask_B1TT is None and q.shape[2] > 1, enable_gqa=grouped
        )


def _without_memory(q: Tensor, k: Tensor, v: Tensor, mask_B1TT: Tensor | None) -> Tensor:
    """Return the output shape and the saved tensors of a fused kernel; on the meta device torch would use products of
    shape [T, T].
    """
    output, _ = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, mask_B1TT is None, attn_mask=mask_B1TT)
    return output


def document_mask(documents_BT: Tensor) -> Tensor:
    """Return the mask [B, 1, T, T], True if a query attends to a key: not later, and of the same document.

    The mask is dense: B*T^2 bytes per micro-batch (67 MB for 16 sequences of 2048). Kernels with masks also compute the
    half that is masked, so attention takes about twice the time of the causal kernel.
    """
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT.tril()[:, None]


def attention_backend(
    device: torch.device | str,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seq_len: int,
    dtype: torch.dtype = torch.bfloat16,
    documents: bool = False,
) -> str:
    """Return the kernel of attention for this shape: "cudnn", "flash", "efficient" or "math".

    Runs it once, for one sequence and one key-value head, and reads the recorded backward.
    """
    queries = heads // kv_heads
    q = torch.zeros(1, seq_len, queries, head_dim, device=device, dtype=dtype, requires_grad=True).transpose(1, 2)
    k = torch.zeros(1, seq_len, 1, head_dim, device=device, dtype=dtype, requires_grad=True).transpose(1, 2)
    mask = document_mask(torch.zeros(1, seq_len, device=device, dtype=torch.int64)) if documents else None
    with torch.enable_grad():
        return _recorded_backend(scaled_dot_product(q, k, k, mask))


def _recorded_backend(output: Tensor) -> str:
    """Find the autograd node of the fused kernel; attention composed of plain operations has none."""
    pending, seen = [output.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for backend in ("cudnn", "flash", "efficient"):
            if node.name().lower().startswith(f"scaleddotproduct{backend}attention"):
                return backend
        pending.extend(parent for parent, _ in node.next_functions)
    return "math"
