"""Exact top-k retrieval: each query of each head takes its own k largest inner products (FoT, section 3.1).

Chunk by chunk, the best k so far are kept and compared with the chunk's best k; scores are never held for
more than one chunk and one block of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

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
    block = queries_at_once(query, chunks())
    if block is None:
        return None
    parts = []
    for part in query.split(block, 2):
        best = best_keys(part, chunks(), k=k, scale=scale, softcap=softcap, scratch=scratch)
        assert best is not None
        parts.append(best.attention(part))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def queries_at_once(query: Tensor, chunks: Iterable[KVChunk]) -> int | None:
    """How many of the queries (B, Hq, T, D) are scored together; None where there is no chunk."""
    largest = max((chunk.keys.shape[2] for chunk in chunks), default=0)
    return max(1, _SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * largest)) if largest else None


class Best(NamedTuple):
    """The best n keys found so far, for each query of each head; which n is the same for all."""

    scores: Tensor
    """(B, Hkv, G, T, n), float32 at least; -inf where a query has fewer."""
    values: Tensor
    """(B, Hkv, G, T, n, D)."""
    tokens: Tensor
    """int64, the shape of `scores`: their numbers in their store."""

    def join(self, other: Best | None, k: int) -> Best:
        """The k best of both, which share no key."""
        if other is None:
            return self
        scores, values, tokens = (torch.cat(both, 4) for both in zip(self, other, strict=True))
        if scores.shape[-1] <= k:
            return Best(scores, values, tokens)
        scores, index = scores.topk(k, dim=-1)
        values = values.gather(-2, index.unsqueeze(-1).expand(*index.shape, values.shape[-1]))
        return Best(scores, values, tokens.gather(-1, index))

    def attention(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """out (B, Hq, T, D) in the dtype of the queries (B, Hq, T, D), and lse (B, Hq, T): one softmax over these keys."""
        lse = torch.logsumexp(self.scores, -1)
        weights = torch.exp(self.scores - torch.where(lse.isfinite(), lse, torch.zeros_like(lse)).unsqueeze(-1))
        out = (weights.unsqueeze(-2) @ self.values.to(weights.dtype)).squeeze(-2)
        rows, heads, queries, _ = query.shape
        return out.reshape(rows, heads, queries, -1).to(query.dtype), lse.reshape(rows, heads, queries)


def best_keys(
    query: Tensor, chunks: Iterable[KVChunk], *, k: int, scale: float, softcap: float | None, scratch: Scratch
) -> Best | None:
    """The min(k, tokens) best keys of chunks of one layer for queries (B, Hq, T, D); None where there is no chunk."""
    best: Best | None = None
    for chunk in chunks:
        keys, values = scratch.widen(chunk, query)
        scores = grouped_scores(query, keys, chunk.mask, scale, softcap)
        top, index = scores.topk(min(k, scores.shape[-1]), dim=-1)
        found = Best(top, _gather(values, index), index + chunk.start)
        best = found if best is None else best.join(found, k)
    return best


def of_head(chunks: Iterable[KVChunk], head: int | None) -> Iterator[KVChunk]:
    """Views of the chunks with one key head; None: all of them, as they are."""
    for chunk in chunks:
        if head is None:
            yield chunk
        else:
            one = slice(head, head + 1)
            yield chunk._replace(keys=chunk.keys[:, one], values=chunk.values[:, one], records=None)


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
