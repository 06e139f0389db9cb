"""A memory as additional context: which records are visible, how they are retrieved, who receives the mass.

The visible records are those of a shared memory (one for all rows of a batch) followed by those that the
rows themselves have moved out of their local windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from longfocus.attention import merge
from longfocus.attention.context import AdditionalContext, LocalWindow
from longfocus.memory.contract import KVChunk, KVStore
from longfocus.memory.dense import Scratch, attend_dense
from longfocus.memory.exact import attend_top_k, grouped_scores, kth_score
from longfocus.memory.ram import RamStore


@dataclass
class Part:
    """Some records of one store: a range, or several where documents were removed or are not asked."""

    store: KVStore
    start: int = 0
    stop: int | None = None
    ranges: tuple[tuple[int, int], ...] | None = None
    """What may be seen of start … stop, as (first, one past the last), in order; None: all of it."""

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

    def last(self, count: int) -> Part:
        """The same without all but the last `count` records."""
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

    def add(self, layer: int, start: int, mass: Tensor) -> None:
        """Add mass (n,) of the tokens from `start` on."""
        total = self.mass.setdefault(layer, torch.zeros(self.tokens, dtype=torch.float64))
        total[start : start + mass.shape[0]] += mass.to(device="cpu", dtype=torch.float64)


class MemoryContext:
    """An `AdditionalContext` over one or two stores."""

    def __init__(
        self,
        shared: Part | None,
        own: Part | None,
        *,
        retrieval: str,
        k: int,
        scratch: Scratch,
        span: int | None = None,
        recorder: MassRecorder | None = None,
    ) -> None:
        """
        Args:
            shared: the memory that all rows see, or None.
            own: what the rows have added themselves, or None.
            retrieval: `dense` or `exact` (top-k).
            k: keys per query and head for `exact`.
            span: see only this many of the nearest (last) records; None: all.
            recorder: receives the mass on the shared memory.
        """
        self.shared, self.own = shared, own
        self._nearest: tuple[np.ndarray, np.ndarray] | None = None  # per row: shared and own records that may be seen
        if span is not None:
            self._see_nearest(span)
        self.retrieval, self.k = retrieval, k
        self.scratch, self.recorder = scratch, recorder

    def _see_nearest(self, span: int) -> None:
        """Narrow both parts to the last `span` records of each row."""
        shared, own = self.shared, self.own
        held = own.store.row_mask() if own is not None and isinstance(own.store, RamStore) else None
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

    def chunks(self, layer: int) -> Iterator[KVChunk]:
        """All visible chunks of a layer."""
        for number, part in enumerate((self.shared, self.own)):
            if part is None or not part.tokens:
                continue
            if self._nearest is None:
                yield from part.chunks(layer)
                continue
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
        additional = self.attend(layer, window.outer_query, scale=scale, softcap=softcap)
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
        return attend_dense(query, self.chunks(layer), scale=scale, softcap=softcap, scratch=self.scratch)

    def record_mass(self, layer: int, query: Tensor, lse: Tensor, *, scale: float, softcap: float | None) -> None:
        """Add exp(score - lse) of each shared token, meaned over heads, to the recorder (if there is one)."""
        if self.recorder is None or self.shared is None or not self.shared.tokens:
            return
        with torch.no_grad():
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
