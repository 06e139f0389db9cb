"""Consecutive windows of one text as rows of one pass: each sees the memory and the windows before it.

A memory layer's keys of a window do not depend on that layer's attention, so in one pass the keys of all windows are
there before any of them attends. The result is that of reading them one after another, up to rounding; products of
many rows are several times faster than those of one window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from longfocus.attention import attend, merge
from longfocus.attention.context import LocalWindow
from longfocus.memory.context import MemoryContext, balanced
from longfocus.memory.contract import KVChunk, chunk_of
from longfocus.memory.dense import Scratch
from longfocus.memory.exact import attend_top_k, best_keys, queries_at_once
from longfocus.memory.storage import StorageDtype


class WindowsContext:
    """An `AdditionalContext` of a pass whose rows are consecutive windows, each full."""

    def __init__(
        self,
        before: MemoryContext | None,
        storage: StorageDtype,
        check: Callable[[int, Tensor], None],
        *,
        retrieval: str,
        k: int,
        scratch: Scratch,
        span: int | None = None,
        replace_first: bool = False,
        balance_tokens: int | None = None,
    ) -> None:
        """
        Args:
            before: what the first window sees, None: nothing.
            storage: how records are written; windows see those of the others as they will be read back.
            check: told each layer's records before they are written, to refuse what cannot be.
            retrieval: `dense`, `exact` (top-k) or `approximate`: as `before` has it, and exact among the windows; within a
                `span` it is dense.
            k: keys per query and head for top-k.
            scratch: buffers.
            span: each window sees only this many of the nearest records; None: all.
            replace_first, balance_tokens: as `window_first` and `balance_tokens` of FocusConfig.
        """
        self.replace_first, self.balance_tokens = replace_first, balance_tokens
        self.before, self.storage, self.check, self.span = before, storage, check, span
        self.retrieval = "dense" if retrieval == "approximate" and span is not None else retrieval
        self.k, self.scratch = k, scratch
        self.records: dict[int, Tensor] = {}
        """The pass's own, by layer: (1, R * T, 2, Hkv, elements) as stored."""

    def join(self, layer: int, window: LocalWindow, *, scale: float, softcap: float | None) -> Tensor:
        """See `AdditionalContext.join`; rows of the window are the text's windows in order."""
        own = self._write(layer, window)
        if self.retrieval == "approximate":
            return self._approximately(layer, window, own, scale, softcap)
        chunks = [*(self.before.chunks(layer) if self.before is not None else ()), own]
        rows, _, tokens, _ = window.query.shape
        stop = sum(chunk.keys.shape[2] for chunk in chunks) - rows * tokens
        seen = []
        for _ in range(rows):
            seen.append((0 if self.span is None else max(0, stop - self.span), stop))
            stop += tokens
        out, lse = window.attend(scale=scale, softcap=softcap)
        if self.balance_tokens is not None:
            lse = balanced(lse, np.array([last - first for first, last in seen]), self.balance_tokens)
        queries = window.outer_query.split(1)
        if self.retrieval == "exact":
            parts = self._top_k(queries, chunks, seen, scale, softcap)
        else:
            parts = self._dense(queries, chunks, seen, scale, softcap)
        locally = zip(out.split(1), lse.split(1), strict=True)
        return torch.cat([merge((local, *part))[0] for local, part in zip(locally, parts, strict=True)])

    def _approximately(
        self, layer: int, window: LocalWindow, own: KVChunk, scale: float, softcap: float | None
    ) -> Tensor:
        """The k best of what was before, by its search, and of the windows before each, exactly."""
        tokens = window.query.shape[2]
        held = int(self.before.visible[0]) if self.before is not None else 0
        out, lse = window.attend(scale=scale, softcap=softcap)
        if self.balance_tokens is not None:
            lse = balanced(lse, held + tokens * np.arange(len(lse)), self.balance_tokens)
        joined = []
        for row, query in enumerate(window.outer_query.split(1)):
            earlier = list(_between([own], 0, row * tokens))
            at_once = queries_at_once(query, earlier) or tokens
            if self.before is not None:
                at_once = min(at_once, self.before.queries_at_once(layer, query))
            parts = []
            for some in query.split(at_once, 2):
                best = best_keys(some, earlier, k=self.k, scale=scale, softcap=softcap, scratch=self.scratch)
                if self.before is not None:
                    before = self.before.best(layer, some, scale=scale, softcap=softcap)
                    best = before.join(best, self.k) if before is not None else best
                if best is not None:
                    parts.append(best.attention(some))
            local = out[row : row + 1], lse[row : row + 1]
            if parts:
                local = merge(
                    (local, (torch.cat([one for one, _ in parts], 2), torch.cat([one for _, one in parts], 2)))
                )
            joined.append(local[0])
        return torch.cat(joined)

    def _write(self, layer: int, window: LocalWindow) -> KVChunk:
        """The windows' records as stored, one after another."""
        both = torch.stack((window.outer_key, window.value), 2).permute(0, 3, 2, 1, 4)  # (R, T, 2, Hkv, D)
        if self.replace_first:
            both = torch.cat((both[:, 1:2], both[:, 1:]), 1)
        plain = both.flatten(0, 1).unsqueeze(0)
        self.check(layer, plain)
        self.records[layer] = self.storage.store(plain)
        return chunk_of(self.records[layer], None, 0, self.storage)

    def _dense(
        self,
        queries: Sequence[Tensor],
        chunks: Sequence[KVChunk],
        seen: Sequence[tuple[int, int]],
        scale: float,
        softcap: float | None,
    ) -> list[list[tuple[Tensor, Tensor]]]:
        """Partial results of each row; a chunk is widened once for all."""
        parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in queries]
        at = 0
        for chunk in chunks:
            count = chunk.keys.shape[2]
            keys, values = self.scratch.widen(chunk, queries[0])
            for query, (first, last), part in zip(queries, seen, parts, strict=True):
                low, high = max(0, first - at), min(count, last - at)
                if low < high:
                    own = keys[:, :, low:high], values[:, :, low:high]
                    part.append(attend(query, *own, scale=scale, softcap=softcap))
            at += count
        return parts

    def _top_k(
        self,
        queries: Sequence[Tensor],
        chunks: Sequence[KVChunk],
        seen: Sequence[tuple[int, int]],
        scale: float,
        softcap: float | None,
    ) -> list[list[tuple[Tensor, Tensor]]]:
        parts = []
        for query, (first, last) in zip(queries, seen, strict=True):
            found = attend_top_k(
                query,
                functools.partial(_between, chunks, first, last),
                k=self.k,
                scale=scale,
                softcap=softcap,
                scratch=self.scratch,
            )
            parts.append([] if found is None else [found])
        return parts


def _between(chunks: Sequence[KVChunk], first: int, last: int) -> Iterator[KVChunk]:
    """Views of the records numbered first … last, counted over the chunks."""
    at = 0
    for chunk in chunks:
        count = chunk.keys.shape[2]
        low, high = max(0, first - at), min(count, last - at)
        if low < high:
            yield chunk._replace(
                keys=chunk.keys[:, :, low:high],
                values=chunk.values[:, :, low:high],
                records=None if chunk.records is None else chunk.records[:, low:high],
            )
        at += count
