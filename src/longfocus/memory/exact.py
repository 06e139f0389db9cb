"""Exact top-k retrieval: each query of each head takes its own k largest inner products (FoT, section 3.1).

Chunk by chunk, the best k so far are kept and compared with the chunk's best k; scores are never held for
more than one chunk and one block of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from longfocus.memory.contract import KVChunk
from longfocus.memory.dense import Scratch

_SCORES_AT_ONCE = 1 << 22  # numbers


def grouped_scores(query: Tensor, keys: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Scores (B, Hkv, G, T, n) in float32 at least; -inf where masked.

    Args:
        query: (B, Hq, T, D).
        keys: (R, Hkv, n, D) with R = 1 or B.
        mask: bool (R, n) or None.
    """
    rows, query_heads, queries, dim = query.shape
    key_heads = keys.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(rows, key_heads, query_heads // key_heads * queries, dim)
    scores = (grouped.to(wide) @ keys.to(wide).transpose(-1, -2)).mul_(scale)
    scores = scores.view(rows, key_heads, query_heads // key_heads, queries, keys.shape[2])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, None, :].to(scores.device), -torch.inf)
    return scores


def attend_top_k(
    query: Tensor,
    chunks: Callable[[], Iterable[KVChunk]],
    *,
    k: int,
    scale: float,
    softcap: float | None,
    scratch: Scratch,
) -> tuple[Tensor, Tensor] | None:
    """Partial attention over each query's k best keys.

    Args:
        query: (B, Hq, T, D).
        chunks: called once per block of queries; chunks of one layer.
        k: keys per query and head; with k >= the memory's size the result equals dense retrieval.

    Returns:
        out (B, Hq, T, D), lse (B, Hq, T); None where there is no chunk.
    """
    rows, heads, queries, _ = query.shape
    largest = max((chunk.keys.shape[2] for chunk in chunks()), default=0)
    if largest == 0:
        return None
    block = max(1, _SCORES_AT_ONCE // (rows * heads * largest))
    outs, lses = [], []
    for start in range(0, queries, block):
        part = query[:, :, start : start + block]
        scores, values = _best(part, chunks(), k, scale, softcap, scratch)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - torch.where(lse.isfinite(), lse, torch.zeros_like(lse)).unsqueeze(-1))
        out = (weights.unsqueeze(-2) @ values.to(weights.dtype)).squeeze(-2)
        outs.append(out.reshape(rows, heads, part.shape[2], -1).to(query.dtype))
        lses.append(lse.reshape(rows, heads, part.shape[2]))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _best(
    query: Tensor, chunks: Iterable[KVChunk], k: int, scale: float, softcap: float | None, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Scores (B, Hkv, G, T, k') and values (B, Hkv, G, T, k', D) of the k best keys, k' = min(k, tokens)."""
    best: tuple[Tensor, Tensor] | None = None
    for chunk in chunks:
        keys, values = scratch.widen(chunk, query)
        scores = grouped_scores(query, keys, chunk.mask, scale, softcap)
        top, index = scores.topk(min(k, scores.shape[-1]), dim=-1)
        held = _gather(values, index)
        if best is not None:
            top, held = torch.cat((best[0], top), -1), torch.cat((best[1], held), -2)
            if top.shape[-1] > k:
                top, index = top.topk(k, dim=-1)
                held = held.gather(-2, index.unsqueeze(-1).expand(*index.shape, held.shape[-1]))
        best = top, held
    assert best is not None
    return best


def _gather(values: Tensor, index: Tensor) -> Tensor:
    """values (R, Hkv, n, D) at index (B, Hkv, G, T, k) -> (B, Hkv, G, T, k, D), copied."""
    rows, key_heads, groups, queries, count = index.shape
    flat = index.reshape(rows, key_heads, groups * queries * count, 1).expand(-1, -1, -1, values.shape[-1])
    taken = values.expand(rows, -1, -1, -1).gather(2, flat)
    return taken.view(rows, key_heads, groups, queries, count, values.shape[-1])


def kth_score(
    query: Tensor, chunks: Iterable[KVChunk], *, k: int, scale: float, softcap: float | None, scratch: Scratch
) -> Tensor:
    """The smallest score (B, Hkv, G, T, 1) that is still among each query's k best; -inf with fewer than k keys."""
    best: Tensor | None = None
    for chunk in chunks:
        keys, _ = scratch.widen(chunk, query)
        scores = grouped_scores(query, keys, chunk.mask, scale, softcap)
        best = scores if best is None else torch.cat((best, scores), -1)
        best = best.topk(min(k, best.shape[-1]), dim=-1).values
    assert best is not None
    last = best[..., -1:]
    return torch.full_like(last, -torch.inf) if best.shape[-1] < k else last
