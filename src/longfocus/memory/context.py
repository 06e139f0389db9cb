"""A memory as additional context: which records are visible, how they are retrieved, who receives the mass.

The visible records are those of a shared memory (one for all rows of a batch) followed by those that the
rows themselves have moved out of their local windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from longfocus.attention import merge
from longfocus.attention.context import AdditionalContext, LocalWindow
from longfocus.k_rule import KRule
from longfocus.memory.adaptive_k import KCounts, attend_by_rule
from longfocus.memory.approximate import Candidates, best_approximate
from longfocus.memory.contract import KVChunk, KVStore
from longfocus.memory.dense import Scratch, attend_dense
from longfocus.memory.exact import Best, attend_top_k, best_keys, grouped_scores, kth_score, of_head, queries_at_once
from longfocus.memory.ram import RamStore

_OWN = 1 << 60
"""Taken off the numbers of the rows' own keys, so that they are told from those of the shared memory."""


@dataclass
class Part:
    """Some records of one store: a range, or several where documents were removed or are not asked."""

    store: KVStore
    start: int = 0
    stop: int | None = None
    ranges: tuple[tuple[int, int], ...] | None = None
    """What may be seen of start … stop, as (first, one past the last), in order; None: all of it."""
    search: Candidates | None = None
    """Finds keys among these records, for approximate retrieval; None: they are searched exactly."""

    def pieces(self) -> list[tuple[int, int]]:
        """The ranges that are there, as (first, one past the last), in order; none is empty."""
        stop = self.store.tokens if self.stop is None else min(self.stop, self.store.tokens)
        ranges = ((self.start, stop),) if self.ranges is None else self.ranges
        cut = ((max(low, self.start), min(high, stop)) for low, high in ranges)
        return [(low, high) for low, high in cut if low < high]

    @property
    def tokens(self) -> int:
        """Records that may be seen."""
        return sum(high - low for low, high in self.pieces())

    def held(self) -> np.ndarray | None:
        """bool (R, tokens of the store): which records each row has, where rows differ; None: all."""
        return self.store.row_mask() if isinstance(self.store, RamStore) else None

    def split(self, at: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The pieces before and from a number on."""
        pieces = self.pieces()
        before = [(low, min(high, at)) for low, high in pieces if low < at]
        return before, [(max(low, at), high) for low, high in pieces if high > at]

    def last(self, count: int) -> Part:
        """The same without all but the last `count` records, to be searched exactly."""
        start, left = self.store.tokens, count
        for low, high in reversed(self.pieces()):
            if left <= 0:
                break
            start = max(low, high - left)
            left -= high - start
        return Part(self.store, start, self.stop, self.ranges)

    def chunks(self, layer: int) -> Iterator[KVChunk]:
        """Chunks of the ranges, `start` still counted in the store."""
        for low, high in self.pieces():
            yield from self.store.chunks(layer, low, high)

    side_by_side = True
    """Windows that are read in one pass may see it."""

    def context(self, own: Part | None, **options: Any) -> MemoryContext:
        """This and a cache's own records as additional context; `options` as for `MemoryContext`."""
        return MemoryContext(self, own, **options)


class Visible(Protocol):
    """What a cache reads of a memory: `Part`, or what attends by itself where its records lie."""

    side_by_side: bool

    @property
    def tokens(self) -> int: ...
    def context(self, own: Part | None, **options: Any) -> AdditionalContext: ...


class Unsettled(Protocol):
    """Mass that others have still to work out."""

    def settle(self) -> None: ...


@dataclass
class MassRecorder:
    """Sums the attention mass that recorded queries gave to each token of the shared memory.

    `mass[layer]` is float64 (tokens,), by number in the store: the sum over rows, heads' mean, and recorded queries.
    Records that no query may see, such as those of removed documents, receive none.
    """

    tokens: int
    mass: dict[int, Tensor] = field(default_factory=dict)
    queries: int = 0
    unsettled: dict[int, Unsettled] = field(default_factory=dict)
    """By who is to be asked; what lies in other processes is asked for many queries at once."""

    def settle(self) -> None:
        """Have everything in `mass`."""
        for unsettled in self.unsettled.values():
            unsettled.settle()

    def take(self, layer: int, start: int, weights: Tensor) -> None:
        """Take the attention weights (B, Hkv, G, T, n) of some queries on the tokens from `start` on; G query heads share a
        key head. What is kept of them is up to the recorder: here the sum over rows and queries and the mean of heads."""
        self.add(layer, start, weights.sum((0, 1, 2, 3)) / (weights.shape[1] * weights.shape[2]))

    def take_some(self, layer: int, tokens: Tensor, weights: Tensor) -> None:
        """As `take`, where each query attended to tokens of its own: numbers int64 and weights (B, Hkv, G, T, k)."""
        spread = torch.zeros(self.tokens, dtype=torch.float64)
        spread.index_add_(0, tokens.flatten().cpu(), weights.flatten().double().cpu())
        self.add(layer, 0, spread / (weights.shape[1] * weights.shape[2]))

    def add(self, layer: int, start: int, mass: Tensor) -> None:
        """Add mass (n,) of the tokens from `start` on."""
        total = self.mass.setdefault(layer, torch.zeros(self.tokens, dtype=torch.float64))
        total[start : start + mass.shape[0]] += mass.to(device="cpu", dtype=torch.float64)


def balanced(lse: Tensor, seen: np.ndarray, balance_tokens: int) -> Tensor:
    """The local window's normaliser (B, Hq, T), its keys counted as often as FocusConfig.balance_tokens asks.

    Args:
        seen: int (B,) or (1,): records of memory that each row sees.
    """
    return lse + torch.from_numpy(np.log1p(seen / balance_tokens)).to(lse)[:, None, None]


class MemoryContext:
    """An `AdditionalContext` over one or two stores."""

    def __init__(
        self,
        shared: Part | None,
        own: Part | None,
        *,
        retrieval: str,
        k: int,
        rerank: int = 1,
        scratch: Scratch,
        span: int | None = None,
        balance_tokens: int | None = None,
        recorder: MassRecorder | None = None,
        rule: KRule | None = None,
        counts: KCounts | None = None,
    ) -> None:
        """
        Args:
            shared: the memory that all rows see, or None.
            own: what the rows have added themselves, or None.
            retrieval: `dense`, `exact` (top-k) or `approximate`: top-k, by the part's `search` where it has one and exactly in all
                else; within a `span` it is dense.
            k: keys per query and head for `exact` and `approximate`.
            rerank: candidates for each of the k, for `approximate`.
            span: see only this many of the nearest (last) records; None: all.
            balance_tokens: as in FocusConfig.
            recorder: receives the mass on the shared memory.
            rule: chooses k by query, for `exact` and `approximate` without a span; it is `join` that follows it.
            counts: told what the rule does.
        """
        self.shared, self.own, self.balance_tokens = shared, own, balance_tokens
        self._nearest: tuple[np.ndarray, np.ndarray] | None = None  # per row: shared and own records that may be seen
        if span is not None:
            self._see_nearest(span)
        self.retrieval = "dense" if retrieval == "approximate" and span is not None else retrieval
        self.k, self.rerank = k, rerank
        self.scratch, self.recorder = scratch, recorder
        self.rule, self.counts = (None if self.retrieval == "dense" or span is not None else rule), counts
        self._retrieved: tuple[int, Tensor, Tensor, Tensor] | None = (
            None  # layer, query, scores, tokens of the last attend
        )

    def _see_nearest(self, span: int) -> None:
        """Narrow both parts to the last `span` records of each row."""
        shared, own = self.shared, self.own
        held = own.held() if own is not None else None
        if own is None or held is None:
            kept = min(span, own.tokens) if own is not None else 0
            if own is not None:
                self.own = own.last(kept)
            if shared is not None:
                self.shared = shared.last(span - kept)
            return
        assert own.start == 0, "records of several rows begin with the first"
        from_end = np.cumsum(held[:, ::-1], 1)[:, ::-1]
        own_seen = held & (from_end <= span)
        left = np.maximum(span - held.sum(1), 0)
        tokens = shared.tokens if shared is not None else 0
        self._nearest = (np.arange(tokens)[None] >= tokens - left[:, None], own_seen)

    @cached_property
    def visible(self) -> np.ndarray:
        """int (B,), or (1,) where it is the same for all rows: records that each row sees."""
        if self._nearest is not None:
            return np.asarray(sum(seen.sum(1) for seen in self._nearest))
        own = self.own
        held = own.held() if own is not None else None
        mine = np.array([own.tokens if own is not None else 0]) if held is None else held.sum(1)
        return np.asarray(mine + (self.shared.tokens if self.shared is not None else 0))

    def chunks(self, layer: int) -> Iterator[KVChunk]:
        """All visible chunks of a layer, shared ones first."""
        yield from self._chunks_of(0, layer)
        yield from self._chunks_of(1, layer)

    def _chunks_of(self, number: int, layer: int) -> Iterator[KVChunk]:
        """Those of the shared part (0) or the rows' own (1)."""
        part = (self.shared, self.own)[number]
        if part is not None and part.tokens:
            if self._nearest is None:
                yield from part.chunks(layer)
                return
            seen = self._nearest[number]
            low = 0  # records seen so far: `seen` has no holes
            for chunk in part.chunks(layer):
                mask = torch.from_numpy(seen[:, low : low + chunk.keys.shape[2]]).to(chunk.keys.device)
                rows = (mask.shape[0], -1, -1, -1)
                yield chunk._replace(
                    keys=chunk.keys.expand(rows), values=chunk.values.expand(rows), mask=mask, records=None
                )
                low += chunk.keys.shape[2]

    def join(self, layer: int, window: LocalWindow, *, scale: float, softcap: float | None) -> Tensor:
        """See `AdditionalContext.join`."""
        out, lse = window.attend(scale=scale, softcap=softcap)
        if self.balance_tokens is not None:
            lse = balanced(lse, self.visible, self.balance_tokens)
        if self.rule is None:
            additional = self.attend(layer, window.outer_query, scale=scale, softcap=softcap)
        else:
            additional = self._attend_by_rule(self.rule, layer, window, lse, scale, softcap)
        if additional is None:
            return out
        out, lse = merge(((out, lse), additional))
        if window.valid is not None:  # padding gives no mass
            lse = lse.masked_fill(~window.valid[:, None, -lse.shape[2] :], torch.inf)
        self.record_mass(layer, window.outer_query, lse, scale=scale, softcap=softcap)
        return out

    def attend(self, layer: int, query: Tensor, *, scale: float, softcap: float | None) -> tuple[Tensor, Tensor] | None:
        """Partial attention of queries (B, Hq, T, D) over the visible records of one layer: out and lse; None where
        there are none."""
        if self.retrieval == "exact":
            return attend_top_k(
                query, lambda: self.chunks(layer), k=self.k, scale=scale, softcap=softcap, scratch=self.scratch
            )
        if self.retrieval == "approximate":
            return self._attend_approximate(layer, query, scale, softcap)
        return attend_dense(query, self.chunks(layer), scale=scale, softcap=softcap, scratch=self.scratch)

    def _attend_by_rule(
        self, rule: KRule, layer: int, window: LocalWindow, lse: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor] | None:
        """As `attend`, where `lse` are the local normalisers."""
        if not self.visible.any():
            return None
        query = window.outer_query
        store = (self.shared or self.own).store  # type: ignore[union-attr]  # something is visible
        chosen = attend_by_rule(
            rule,
            layer,
            query,
            lse,
            lambda some, head: self.best(layer, some, scale=scale, softcap=softcap, head=head),
            lambda some: self.queries_at_once(layer, some),
            kv_heads=store.kv_heads,
            valid=None if window.valid is None else window.valid[:, -query.shape[2] :],
            counts=self.counts,
            keep=self.recorder is not None,
        )
        if self.recorder is not None:
            self._retrieved = layer, query, chosen.scores, chosen.tokens
        return chosen.out, chosen.lse

    def _attend_approximate(
        self, layer: int, query: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor] | None:
        parts, found = [], []
        for some in query.split(self.queries_at_once(layer, query), 2):
            best = self.best(layer, some, scale=scale, softcap=softcap)
            if best is None:
                return None
            parts.append(best.attention(some))
            found.append(best)
        if self.recorder is not None:
            scores, tokens = (torch.cat([each[at] for each in found], 3) for at in (0, 2))
            self._retrieved = layer, query, scores, tokens
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def queries_at_once(self, layer: int, query: Tensor) -> int:
        """How many queries (B, Hq, T, D) `best` should be given together."""
        chunks = self.chunks(layer) if self.retrieval == "exact" else self._searched_exactly(layer)
        return queries_at_once(query, chunks) or max(1, query.shape[2])

    def _searched_exactly(self, layer: int) -> Iterator[KVChunk]:
        """The chunks that no search covers."""
        if self.shared is not None:
            rest = self.shared.split(self.shared.search.covered if self.shared.search is not None else 0)[1]
            for low, high in rest:
                yield from self.shared.store.chunks(layer, low, high)
        if self.own is not None and self.own.tokens:
            yield from self.own.chunks(layer)

    def best(
        self, layer: int, query: Tensor, *, scale: float, softcap: float | None, head: int | None = None
    ) -> Best | None:
        """The k best visible keys of queries (B, Hq, T, D), numbered in the shared memory, below 0 where they are the rows' own;
        None where nothing is visible. With a key head, only its keys, for query heads (B, n, T, D) that share it."""
        exactly: dict[str, Any] = {"k": self.k, "scale": scale, "softcap": softcap, "scratch": self.scratch}
        own_chunks = (chunk._replace(start=chunk.start - _OWN) for chunk in self._chunks_of(1, layer))
        if self.retrieval == "exact":
            return best_keys(query, of_head(itertools.chain(self._chunks_of(0, layer), own_chunks), head), **exactly)
        best: Best | None = None

        def add(found: Best | None) -> None:
            nonlocal best
            best = found if best is None else best.join(found, self.k)

        if self.shared is not None:
            store, search = self.shared.store, self.shared.search
            covered, rest = self.shared.split(search.covered if search is not None else 0)
            if search is not None and covered:
                add(best_approximate(query, search, store, layer, covered, rerank=self.rerank, head=head, **exactly))
            uncovered = (chunk for piece in rest for chunk in store.chunks(layer, *piece))
            add(best_keys(query, of_head(uncovered, head), **exactly))
        add(best_keys(query, of_head(own_chunks, head), **exactly))
        return best

    def record_mass(self, layer: int, query: Tensor, lse: Tensor, *, scale: float, softcap: float | None) -> None:
        """Add exp(score - lse) of each shared token, meaned over heads, to the recorder (if there is one)."""
        if self.recorder is None or self.shared is None or not self.shared.tokens:
            return
        with torch.no_grad():
            if self.retrieval == "approximate" or self.rule is not None:
                self._record_retrieved(layer, query, lse, scale, softcap)
                return
            least = None
            if self.retrieval == "exact":
                chunks = self.chunks(layer)
                least = kth_score(query, chunks, k=self.k, scale=scale, softcap=softcap, scratch=self.scratch)
            for chunk in self.shared.chunks(layer):
                keys, _ = self.scratch.widen(chunk, query)
                scores = grouped_scores(query, keys, chunk.mask, scale, softcap)
                if least is not None:
                    scores = scores.masked_fill(scores < least, -torch.inf)
                self.recorder.take(layer, chunk.start, torch.exp(scores - lse.reshape(*scores.shape[:-1], 1)))

    def _record_retrieved(self, layer: int, query: Tensor, lse: Tensor, scale: float, softcap: float | None) -> None:
        """The mass of the keys that `attend` retrieved for these queries; no others are looked at."""
        assert self.recorder is not None
        if self._retrieved is None or self._retrieved[0] != layer or self._retrieved[1] is not query:
            assert self.rule is None, "`join` attends by the rule and records at once"
            self._attend_approximate(layer, query, scale, softcap)
        assert self._retrieved is not None
        _, _, scores, tokens = self._retrieved
        self._retrieved = None
        weights = torch.exp(scores - lse.reshape(*scores.shape[:-1], 1)).masked_fill(tokens < 0, 0.0)
        self.recorder.take_some(layer, tokens.clamp(min=0), weights)
