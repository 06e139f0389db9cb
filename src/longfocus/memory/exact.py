"""Exact top-k retrieval: each query of each head takes its own k largest inner products (FoT, section 3.1).

Chunk by chunk, the best k so far are kept and compared with the chunk's best k; scores are never held for
more than one chunk and one block of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longfocus.memory.contract import KVChunk
from longfocus.memory.dense import Scratch

_SCORES_AT_ONCE = 1 << 22  # numbers


class Best(NamedTuple):
    """The k' best keys of each query among some chunks, k' = min(k, tokens), in no order."""

    scores: Tensor
    """(B, Hkv, G, T, k'), float32 at least; -inf where a row has fewer."""
    values: Tensor
    """(B, Hkv, G, T, k', D)."""
    numbers: Tensor
    """int64 (B, Hkv, G, T, k'): number of each key in its store."""

    def attend(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Partial attention over them: out in the shape (B, Hq, T, D) and dtype of the queries `like`, lse (B, Hq, T)."""
        lse = torch.logsumexp(self.scores, -1)
        weights = torch.exp(self.scores - torch.where(lse.isfinite(), lse, torch.zeros_like(lse)).unsqueeze(-1))
        out = (weights.unsqueeze(-2) @ self.values.to(weights.dtype)).squeeze(-2)
        return out.reshape(like.shape).to(like.dtype), lse.reshape(like.shape[:-1])


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
        best = best_of(part, chunks(), k=k, scale=scale, softcap=softcap, scratch=scratch)
        assert best is not None
        out, lse = best.attend(part)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def best_of(
    query: Tensor, chunks: Iterable[KVChunk], *, k: int, scale: float, softcap: float | None, scratch: Scratch
) -> Best | None:
    """The k best keys of queries (B, Hq, T, D) among chunks of one layer; None where there is no chunk."""
    best: Best | None = None
    for chunk in chunks:
        keys, values = scratch.widen(chunk, query)
        scores = grouped_scores(query, keys, chunk.mask, scale, softcap)
        top, index = scores.topk(min(k, scores.shape[-1]), dim=-1)
        found = Best(top, _gather(values, index), index + chunk.start)
        best = found if best is None else best_among((best, found), k)
    return best


def best_among(found: Sequence[Best], k: int) -> Best:
    """The k best of what was found in several places; exact, since each place has its own k best there."""
    if len(found) == 1 and found[0].scores.shape[-1] <= k:
        return found[0]
    scores, numbers = (torch.cat([getattr(best, name) for best in found], -1) for name in ("scores", "numbers"))
    values = torch.cat([best.values for best in found], -2)
    if scores.shape[-1] > k:
        scores, index = scores.topk(k, dim=-1)
        numbers = numbers.gather(-1, index)
        values = values.gather(-2, index.unsqueeze(-1).expand(*index.shape, values.shape[-1]))
    return Best(scores, values, numbers)


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
