"""A sharded memory as additional context: what is local is attended to here, everything else where it lies.

A memory layer of one pass asks every shard that has visible tokens once. The questions to all are under way before the
local window is attended to, and that is done before the first answer is awaited. Dense, a shard answers with (out, lse);
under top-k, exact or approximate, with its k best scores and values, whose k best are those of the whole memory.

The mass for sources costs no more questions while tokens are generated. Under top-k the weights are at hand here, with the
numbers of the keys. Dense, queries and normalisers are kept (a few KB each) and the shards are asked for all of them together
when the mass is wanted.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longfocus.attention import merge
from longfocus.attention.context import LocalWindow
from longfocus.errors import ConfigError, UnsupportedCallError
from longfocus.k_rule import KRule
from longfocus.memory.adaptive_k import KCounts
from longfocus.memory.context import MassRecorder, MemoryContext, Part, balanced
from longfocus.memory.dense import Scratch, fold_rows
from longfocus.memory.distributed.processes import Call, ShardProcesses
from longfocus.memory.distributed.worker import Packed, Question, Seen
from longfocus.memory.exact import Best, best_keys

_VALUES_AT_ONCE = 1 << 22
"""Numbers in one shard's answer of k best values; longer passes ask in several blocks of queries."""
_UNSETTLED_QUERIES = 2048
"""Queries of a layer, times rows, that are kept before the shards are asked for their mass."""


class Piece(NamedTuple):
    """Consecutive tokens of one shard."""

    shard: int
    start: int
    """First token, in the shard."""
    stop: int
    number: int
    """Number of the first token in the sharded memory."""


@dataclass(frozen=True, eq=False)
class ShardedPart:
    """The tokens of a sharded memory that a cache sees: a `Visible` that does not change."""

    processes: Callable[[], ShardProcesses]
    """Started at the first question."""
    generations: tuple[int, ...]
    """Of each shard's files."""
    pieces: tuple[Piece, ...]
    """In the order of the memory."""

    side_by_side = False

    @property
    def tokens(self) -> int:
        """Tokens that may be seen."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    def last(self, count: int) -> ShardedPart:
        """The same without all but the last `count` tokens."""
        kept: list[Piece] = []
        for shard, start, stop, number in reversed(self.pieces):
            if count <= 0:
                break
            low = max(start, stop - count)
            kept.append(Piece(shard, low, stop, number + low - start))
            count -= stop - low
        return ShardedPart(self.processes, self.generations, tuple(reversed(kept)))

    def context(self, own: Part | None, **options: Any) -> ShardedContext:
        """See `Visible.context`."""
        return ShardedContext(self, own, **options)

    @cached_property
    def by_shard(self) -> dict[int, list[Piece]]:
        """The pieces of each shard that has any, in its own order."""
        found: dict[int, list[Piece]] = {}
        for piece in sorted(self.pieces):
            found.setdefault(piece.shard, []).append(piece)
        return found

    @cached_property
    def seen(self) -> dict[int, Seen]:
        """What is asked of each shard that has visible tokens; neighbouring pieces are one range."""
        found = {}
        for shard, pieces in self.by_shard.items():
            ranges: list[tuple[int, int]] = []
            for piece in pieces:
                if ranges and ranges[-1][1] == piece.start:
                    ranges[-1] = (ranges[-1][0], piece.stop)
                else:
                    ranges.append((piece.start, piece.stop))
            found[shard] = Seen(self.generations[shard], tuple(ranges))
        return found

    def ask(self, method: str, asked: Question, *more: Any) -> list[tuple[int, Call]]:
        """Ask all shards with visible tokens; the calls are under way when this returns."""
        processes = self.processes()
        question = processes.shared(asked, asked.query.array.nbytes, len(self.seen))
        return [
            (shard, processes.shards[shard].ask(method, seen, question, *more)) for shard, seen in self.seen.items()
        ]

    def numbers(self, shard: int, local: Tensor) -> Tensor:
        """Numbers in this memory of tokens that are given by their numbers in a shard; int64, any shape."""
        pieces = self.by_shard[shard]
        starts = torch.tensor([piece.start for piece in pieces])
        shifts = torch.tensor([piece.number - piece.start for piece in pieces])
        return local + shifts[torch.searchsorted(starts, local, right=True) - 1]


Rows = slice | list[int]
Partial = tuple[Tensor, Tensor]
"""out (B, Hq, T, D), lse (B, Hq, T)."""


class _How(NamedTuple):
    """How a layer attends."""

    layer: int
    scale: float
    softcap: float | None

    def question(self, query: Tensor) -> Question:
        return Question(self.layer, Packed.of(query), self.scale, self.softcap)


class ShardedContext:
    """An `AdditionalContext` over a sharded memory and a cache's own records."""

    def __init__(
        self,
        shared: ShardedPart,
        own: Part | None,
        *,
        retrieval: str,
        k: int,
        scratch: Scratch,
        rerank: int = 1,
        span: int | None = None,
        balance_tokens: int | None = None,
        recorder: MassRecorder | None = None,
        rule: KRule | None = None,
        counts: KCounts | None = None,
    ) -> None:
        """As `MemoryContext`; approximate retrieval is by the index of each shard. `counts` is for a rule.

        Raises:
            ConfigError: a rule for k by query: shards are asked before normalisers are known.
            UnsupportedCallError: a recorder that wants the weights of single heads.
        """
        local = MemoryContext(None, own, retrieval=retrieval, k=k, scratch=scratch, span=span)
        if rule is not None and local.retrieval != "dense" and span is None:
            raise ConfigError(
                "k_rule: shards are asked for the k best keys of every query; leave the rule out, or join the shards."
            )
        if recorder is not None and type(recorder).take is not MassRecorder.take:
            raise UnsupportedCallError(
                f"{type(recorder).__name__}: a sharded memory gives the mass of tokens, not the weights of single heads; "
                "join its shards into one memory first (Memory.extend)."
            )
        self._groups = _groups(shared, own, span)
        self.balance_tokens = balance_tokens
        self._retrieval: _Retrieval
        if local.retrieval == "dense":
            self._retrieval = _Dense(local, recorder)
        else:
            self._retrieval = _TopK(local, recorder, rerank if local.retrieval == "approximate" else None)

    @cached_property
    def visible(self) -> np.ndarray:
        """int (B,), or (1,) where it is the same for all rows: records that each row sees."""
        visible = self._retrieval.local.visible.copy()
        for rows, seen in self._groups:
            visible[rows] += seen.tokens
        return visible

    def join(self, layer: int, window: LocalWindow, *, scale: float, softcap: float | None) -> Tensor:
        """See `AdditionalContext.join`."""
        query, how = window.outer_query, _How(layer, scale, softcap)
        if torch.is_grad_enabled() and query.requires_grad:
            raise UnsupportedCallError(
                "No gradient passes through a sharded memory, whose keys are in other processes; call the model under "
                "torch.no_grad(), or use a memory in one folder."
            )
        result = torch.empty_like(query)
        local: Partial | None = None
        size = self._retrieval.block(query)
        for start in range(0, query.shape[2], size):
            block = (slice(None), slice(None), slice(start, start + size))
            part = query[block]
            asked = [self._retrieval.ask(seen, how, part[rows]) for rows, seen in self._groups]
            if local is None:  # while the shards are at work
                local = window.attend(scale=scale, softcap=softcap)
                if self.balance_tokens is not None:
                    local = local[0], balanced(local[1], self.visible, self.balance_tokens)
            own = self._retrieval.own(how, part)
            for (rows, seen), calls in zip(self._groups, asked, strict=True):
                mine = [tuple(tensor[rows] for tensor in own)] if own is not None else []
                found, note = self._retrieval.join(how, part[rows], mine, calls, seen)
                near = (local[0][block][rows], local[1][block][rows])
                out, lse = merge((near, found)) if found is not None else near
                result[block][rows] = out
                if note is not None:
                    if window.valid is not None:  # padding gives no mass
                        valid = window.valid[rows, None, -query.shape[2] :][block]
                        lse = lse.masked_fill(~valid, torch.inf)
                    note(lse)
        return result


class _Retrieval(ABC):
    """How shards are asked and their answers joined."""

    def __init__(self, local: MemoryContext, recorder: MassRecorder | None) -> None:
        self.local, self.recorder = local, recorder

    @abstractmethod
    def block(self, query: Tensor) -> int:
        """Queries that are asked at once."""

    @abstractmethod
    def ask(self, seen: ShardedPart, how: _How, query: Tensor) -> list[tuple[int, Call]]:
        """Ask the shards."""

    @abstractmethod
    def own(self, how: _How, query: Tensor) -> tuple[Tensor, ...] | None:
        """The part of the cache's own records, in the form of a shard's answer; None where there are none."""

    @abstractmethod
    def join(
        self,
        how: _How,
        query: Tensor,
        mine: Sequence[tuple[Tensor, ...]],
        calls: Sequence[tuple[int, Call]],
        seen: ShardedPart,
    ) -> tuple[Partial | None, Callable[[Tensor], None] | None]:
        """Partial attention over own records and those of shards, None where there are none; and what is to be told the
        final lse if mass is recorded."""


class _Dense(_Retrieval):
    def block(self, query: Tensor) -> int:
        return query.shape[2]

    def ask(self, seen: ShardedPart, how: _How, query: Tensor) -> list[tuple[int, Call]]:
        return seen.ask("attend", how.question(query))

    def own(self, how: _How, query: Tensor) -> tuple[Tensor, ...] | None:
        return self.local.attend(how.layer, query, scale=how.scale, softcap=how.softcap)

    def join(
        self,
        how: _How,
        query: Tensor,
        mine: Sequence[tuple[Tensor, ...]],
        calls: Sequence[tuple[int, Call]],
        seen: ShardedPart,
    ) -> tuple[Partial | None, Callable[[Tensor], None] | None]:
        parts = [(out, lse) for out, lse in mine]
        for _, call in calls:
            out, lse = call.result()
            parts.append((out.tensor(query.device), lse.tensor(query.device)))
        recorder = self.recorder
        if recorder is None or not calls:
            return (merge(parts) if parts else None), None
        return merge(parts), lambda lse: _UnsettledMass.of(recorder, seen).add(how, query, lse)


class _TopK(_Retrieval):
    def __init__(self, local: MemoryContext, recorder: MassRecorder | None, rerank: int | None) -> None:
        super().__init__(local, recorder)
        self.rerank = rerank

    def block(self, query: Tensor) -> int:
        rows, heads, _, dim = query.shape
        return max(1, _VALUES_AT_ONCE // (rows * heads * self.local.k * dim))

    def ask(self, seen: ShardedPart, how: _How, query: Tensor) -> list[tuple[int, Call]]:
        if self.rerank is not None and seen.seen:
            seen.processes().index()
        return seen.ask("best", how.question(query), self.local.k, self.recorder is not None, self.rerank)

    def own(self, how: _How, query: Tensor) -> tuple[Tensor, ...] | None:
        local = self.local
        chunks = local.chunks(how.layer)
        best = best_keys(query, chunks, k=local.k, scale=how.scale, softcap=how.softcap, scratch=local.scratch)
        return None if best is None else best._replace(tokens=torch.full_like(best.tokens, -1))

    def join(
        self,
        how: _How,
        query: Tensor,
        mine: Sequence[tuple[Tensor, ...]],
        calls: Sequence[tuple[int, Call]],
        seen: ShardedPart,
    ) -> tuple[Partial | None, Callable[[Tensor], None] | None]:
        found = [*(Best(*own) for own in mine), *answers(seen, calls, query.device)]
        if not found:
            return None, None
        best = functools.reduce(lambda one, other: one.join(other, self.local.k), found)
        recorder = self.recorder
        note = (lambda lse: _record_best(recorder, how.layer, best, lse)) if recorder is not None and calls else None
        return best.attention(query), note


def answers(seen: ShardedPart, calls: Sequence[tuple[int, Call]], device: torch.device | str = "cpu") -> Iterator[Best]:
    """What shards found that were asked for their best keys, with numbers in the whole memory; -1 where they were not asked for."""
    for shard, call in calls:
        scores, values, numbers = call.result()
        top = scores.tensor()
        known = torch.full(top.shape, -1) if numbers is None else seen.numbers(shard, numbers.tensor())
        yield Best(*(tensor.to(device) for tensor in (top, values.tensor(), known)))


def _record_best(recorder: MassRecorder, layer: int, best: Best, lse: Tensor) -> None:
    """Add the mass of the keys that were taken and lie in shards."""
    weights = torch.exp(best.scores - lse.reshape(*best.scores.shape[:-1], 1))
    weights = weights.masked_fill(best.tokens < 0, 0.0).cpu() / (weights.shape[1] * weights.shape[2])
    mass = torch.zeros(recorder.tokens, dtype=torch.float64)
    mass.index_add_(0, best.tokens.cpu().clamp(min=0).flatten(), weights.double().flatten())
    recorder.add(layer, 0, mass)


class _UnsettledMass:
    """Queries whose mass on a sharded memory was not asked for yet; see `MassRecorder.unsettled`."""

    def __init__(self, recorder: MassRecorder, part: ShardedPart) -> None:
        self.recorder, self.part = recorder, part
        self._kept: dict[_How, list[tuple[Tensor, Tensor]]] = {}

    @classmethod
    def of(cls, recorder: MassRecorder, part: ShardedPart) -> _UnsettledMass:
        """The one of this recorder and part, made when it is not there."""
        found = recorder.unsettled.setdefault(id(part), cls(recorder, part))
        assert isinstance(found, cls)
        return found

    def add(self, how: _How, query: Tensor, lse: Tensor) -> None:
        """Keep queries (B, Hq, T, D) and the final lse (B, Hq, T)."""
        kept = self._kept.setdefault(how, [])
        kept.append((fold_rows(query).cpu(), fold_rows(lse.unsqueeze(-1)).squeeze(-1).cpu()))
        if sum(queries.shape[2] for queries, _ in kept) >= _UNSETTLED_QUERIES:
            self._settle([how])

    def settle(self) -> None:
        """Ask the shards for the mass of all that is kept."""
        self._settle(list(self._kept))

    def _settle(self, layers: Sequence[_How]) -> None:
        asked = []
        for how in layers:
            query, lse = (torch.cat(tensors, 2) for tensors in zip(*self._kept[how], strict=True))
            asked.append((how, self.part.ask("mass", how.question(query), Packed.of(lse))))
        for how, calls in asked:
            masses = [(shard, call.result()) for shard, call in calls]
            del self._kept[how]
            for shard, mass in masses:
                self._add(how.layer, shard, torch.from_numpy(mass.copy()))

    def _add(self, layer: int, shard: int, mass: Tensor) -> None:
        at = 0
        for piece in self.part.by_shard[shard]:
            count = piece.stop - piece.start
            self.recorder.add(layer, piece.number, mass[at : at + count])
            at += count


def _groups(shared: ShardedPart, own: Part | None, span: int | None) -> list[tuple[Rows, ShardedPart]]:
    """Which rows see which of the shared tokens: all the same, unless a span leaves some rows more than others."""
    if span is None:
        return [(slice(None), shared)]
    held = own.held() if own is not None else None
    if held is None:
        return [(slice(None), shared.last(span - min(span, own.tokens if own is not None else 0)))]
    left = np.maximum(span - held.sum(1), 0)
    return [(np.flatnonzero(left == count).tolist(), shared.last(int(count))) for count in np.unique(left)]
