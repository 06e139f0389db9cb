"""`attend` and `merge` in plain PyTorch, any dtype and device: the definition that the fast forms are tested against.

Axes, here and in the whole package:
    B rows of the batch, T queries, N keys, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head_dim.
Tensors are laid out (B, H, T or N, D). Query head h reads key/value head h // G, and keys are never
repeated per query head.

For one query, a set S of (key, value) pairs gives
    out_S = sum_j softmax(s)_j v_j    and    lse_S = log sum_j exp(s_j),    s_j = scale * q . k_j
and over disjoint sets lse = logsumexp(lse_S), out = sum_S exp(lse_S - lse) out_S. An empty set has
out = 0 and lse = -inf, so it changes nothing in a merge.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query over one set of keys, with the logarithm of its normaliser.

    Args:
        query: (B, Hq, T, D).
        key: (B, Hkv, N, D); Hkv divides Hq. N may be 0.
        value: (B, Hkv, N, Dv).
        mask: bool, broadcastable to (B, 1, T, N) or (B, Hkv, T, N); True where the query may attend.
        scale: multiplies the inner products; default 1/sqrt(D).
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).

    Returns:
        out: (B, Hq, T, Dv) in the query's dtype; 0 where a query has no key.
        lse: (B, Hq, T), float32 (float64 for float64 input); -inf where a query has no key.
        Both are differentiable in query, key and value.
    """
    rows, query_heads, queries, head_dim = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    if keys == 0:
        out = query.new_zeros(rows, query_heads, queries, value.shape[-1])
        return out, torch.full((rows, query_heads, queries), -torch.inf, dtype=wide, device=query.device)
    scale = head_dim**-0.5 if scale is None else scale
    grouped = query.to(wide).reshape(rows, key_heads, query_heads // key_heads, queries, head_dim)
    scores = grouped @ key.to(wide).unsqueeze(2).transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(2), -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, torch.ones_like(total), total)  # keeps gradients of empty sets finite
    out = (weights / total) @ value.to(wide).unsqueeze(2)
    lse = torch.where(empty, torch.full_like(total, -torch.inf), top + total.log()).squeeze(-1)
    out = out.reshape(rows, query_heads, queries, value.shape[-1])
    return out.to(query.dtype), lse.reshape(rows, query_heads, queries)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join partial results over disjoint key sets into the result over their union.

    Args:
        parts: one or more (out, lse) as `attend` returns them, all of one shape.

    Returns:
        (out, lse) over the union, in the first part's dtypes; differentiable in every out and lse.
    """
    assert parts, "merge needs at least one part"
    lses = torch.stack([lse for _, lse in parts])
    top = lses.detach().amax(0)
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    empty = total == 0
    total = torch.where(empty, torch.ones_like(total), total)
    lse = torch.where(empty, torch.full_like(total, -torch.inf), top + total.log())
    outs = torch.stack([out.to(lses.dtype) for out, _ in parts])
    out = ((weights / total).unsqueeze(-1) * outs).sum(0)
    return out.to(parts[0][0].dtype), lse
