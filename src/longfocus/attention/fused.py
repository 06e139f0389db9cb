"""`attend` on PyTorch's fused CPU attention kernel, which returns the log-normaliser that the merge needs.

The query heads that share a key/value head are laid side by side as queries of that head, so keys and
values are read once and never copied. The kernel's own derivative ignores lse; here the backward pass
recomputes the weights in blocks of queries and is right for both results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longfocus.attention.blocks import gradients, score_blocks

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_SPLIT = 4  # a long key set met by few queries (generation) is cut so, that all threads share the work
_SPLIT_QUERIES, _SPLIT_KEYS = 16, 1024
_BACKWARD_SCORES = 1 << 22  # scores held at once while differentiating (numbers, per row of the batch)


def _group(query: Tensor, key_heads: int) -> Tensor:
    """(B, Hq, T, D) -> (B, Hkv, G * T, D) without repeating keys."""
    rows, query_heads, queries, head_dim = query.shape
    return query.reshape(rows, key_heads, query_heads // key_heads * queries, head_dim)


def _bias(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """bool (B, 1 or Hkv, T, N) -> additive mask (B, 1 or Hkv, G * T, N) with -inf where not allowed."""
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return bias.repeat(1, 1, groups, 1) if groups > 1 else bias


def _pieces(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(1, Hkv, T, D) over (1, Hkv, N, D): results (P, Hkv, T, D) and lse (P, Hkv, T) of P equal pieces, P = `_SPLIT` or 1.

    The kernel gives each thread whole (row, head, block of queries) tasks, so one query of three heads leaves
    threads idle; pieces are rows of one call, and views: nothing is copied.
    """
    keys = key.shape[2]
    split = _SPLIT if query.shape[2] <= _SPLIT_QUERIES and keys >= _SPLIT_KEYS and keys % _SPLIT == 0 else 1
    pieces = [part.unflatten(2, (split, -1))[0].transpose(0, 1) for part in (key, value)]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.expand(split, -1, -1, -1), *pieces, 0.0, False, scale=scale
    )
    return out, lse


def _join(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The merge of pieces (P, …) that are not empty: (1, …)."""
    if out.shape[0] == 1:
        return out, lse
    shares = torch.softmax(lse, 0).to(out.dtype)
    return (shares.unsqueeze(-1) * out).sum(0, keepdim=True), torch.logsumexp(lse, 0, keepdim=True)


class StepPieces:
    """Attention of few queries over many chunks, with one merge at the end.

    For a generated token a merge costs as much as a thousand keys, so partial results, small as they are, wait.
    """

    def __init__(self, query: Tensor, scale: float) -> None:
        """
        Args:
            query: (1, Hq, T, D).
        """
        self.query, self.scale = query, scale
        self._outs: list[Tensor] = []
        self._lses: list[Tensor] = []

    @staticmethod
    def fit(query: Tensor, key_heads: int) -> bool:
        """Whether so few queries are better off this way; it has no derivative."""
        few = query.shape[1] // key_heads * query.shape[2] <= _SPLIT_QUERIES
        return few and not (torch.is_grad_enabled() and query.requires_grad)

    def add(self, key: Tensor, value: Tensor) -> None:
        """Attend to a chunk, key and value (1, Hkv, N, D) with N above 0."""
        out, lse = _pieces(_group(self.query, key.shape[1]), key, value, self.scale)
        self._outs.append(out)
        self._lses.append(lse)

    def join(self) -> tuple[Tensor, Tensor] | None:
        """out (1, Hq, T, D), lse (1, Hq, T) over all chunks; None where there was none."""
        if not self._outs:
            return None
        out, lse = _join(torch.cat(self._outs), torch.cat(self._lses))
        return out.reshape(*self.query.shape[:3], -1), lse.reshape(self.query.shape[:3])


def _forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    rows, query_heads, queries, _ = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    groups = query_heads // key_heads
    bias = None
    if mask is not None:
        mask = mask.expand(mask.shape[0], mask.shape[1], queries, keys)
        bias = _bias(mask, groups, query.dtype)
    folded = _group(query, key_heads)
    if bias is None and rows == 1:
        out, lse = _join(*_pieces(folded, key, value, scale))
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            folded, key, value, 0.0, False, attn_mask=bias, scale=scale
        )
    out = out.reshape(rows, query_heads, queries, value.shape[-1])
    lse = lse.reshape(rows, query_heads, queries)
    if mask is not None:
        empty = ~mask.any(-1)  # the kernel reports out = 0 and lse = 0 where no key is allowed
        if bool(empty.any()):
            if empty.shape[1] not in (1, query_heads):
                empty = empty.repeat_interleave(groups, dim=1)
            lse = lse.masked_fill(empty, -torch.inf)
            out = out.masked_fill(empty.unsqueeze(-1), 0.0)
    return out, lse


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Any:
        out, lse = _forward(query, key, value, mask, scale)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.scale = scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, mask, out, lse = ctx.saved_tensors
        if mask is not None:
            mask = mask.expand(*mask.shape[:2], query.shape[2], key.shape[2])
        at_once = _BACKWARD_SCORES * query.shape[0]
        blocks = score_blocks(query, key, scale=ctx.scale, at_once=at_once, mask=mask)
        normaliser = torch.where(lse.isfinite(), lse, torch.zeros_like(lse))
        dq, dk, dv = gradients(blocks, query, key, value, out, normaliser, *grads, scale=ctx.scale)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None


def attend(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """As `reference.attend` (same shapes and results), on the fused kernel; no softcap. N must not be 0."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        out, lse = _Attend.apply(query, key, value, mask, scale)
        return out, lse
    return _forward(query, key, value, mask, scale)
