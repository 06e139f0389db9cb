"""Approximate top-k retrieval: codes of all keys find candidates, the true keys choose among them.

A `MemoryIndex` holds 4-bit codes (`quantiser.py`) of the keys of a store: of every memory layer and key head, for the
records 0 … `covered`, in blocks of 32. It grows with the store and is never the truth: what it does not cover is searched
exactly, and what it finds is scored again with the keys themselves. So a bad index costs recall, never correctness.

    index = MemoryIndex(store, geometry)
    index.update(ranges)                        # train when there are enough keys, encode what is new
    view = index.view(ranges)                   # a search over the documents that may be seen, and no others
    best_approximate(query, view, store, layer, k=64, rerank=8, …)

* Training: on keys only, evenly spread over the documents, once there are TRAIN_TOKENS of them, and again each time the
  memory has become RETRAIN_GROWTH times larger, up to LAST_TRAINING_TOKENS: so a key is encoded twice on average.
* Removed and unchosen documents: a view copies the blocks of what may be seen, so their keys are not even looked at;
  those that share a block with visible ones are dropped from the candidates. If a search gives fewer than k keys
  that may be seen, it is repeated with more candidates, and in the end made exactly.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from longfocus.memory.contract import KVStore
from longfocus.memory.dense import Scratch
from longfocus.memory.exact import Best, best_keys, of_head
from longfocus.memory.geometry import MemoryGeometry
from longfocus.memory.quantiser import BLOCK_TOKENS, BlockSearch, Quantiser, require_faiss
from longfocus.memory.storage import storage_dtype

TRAIN_TOKENS = 16_384
"""Keys from which on there is an index: fewer are searched exactly as fast."""
_SAMPLE_TOKENS = 65_536
"""Keys that are trained on, at most."""
RETRAIN_GROWTH = 2
"""Keys of another kind than those that were trained on are found less well, until the next training."""
LAST_TRAINING_TOKENS = 1 << 20
_ENCODE_TOKENS = 1 << 15
"""Keys of a layer that are widened and encoded together."""
_RECORDS_AT_ONCE = 1 << 16
"""Candidates that are read together."""
_LARGEST = 1e12

Ranges = tuple[tuple[int, int], ...]
"""Numbers of tokens, as (first, one past the last), in order, none empty."""


class MemoryIndex:
    """Codes of the keys of a store with one text. One thread updates it; views may be searched by several."""

    def __init__(self, store: KVStore, geometry: MemoryGeometry) -> None:
        """An index of nothing so far."""
        assert store.rows == 1, "an index is of one text"
        self.store, self.geometry = store, geometry
        self.storage = storage_dtype(geometry.dtype)
        self.covered = 0
        """Records whose codes it holds, a multiple of BLOCK_TOKENS."""
        self.trained_on = 0
        """Tokens that the memory held when the quantisers were trained; 0: they are not."""
        self.quantisers: dict[int, list[Quantiser]] = {}
        """By layer, one for each key head."""
        self.pieces: list[dict[int, np.ndarray]] = []
        """Codes of consecutive records, by layer: uint8 (blocks, Hkv, block_bytes)."""
        self._views: weakref.WeakValueDictionary[tuple[Ranges, int, int], IndexView] = weakref.WeakValueDictionary()
        self._last: IndexView | None = None  # so that the next cache finds it
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        heads = len(self.geometry.layers) * self.geometry.kv_heads
        return self.covered // BLOCK_TOKENS * heads * Quantiser.block_bytes(self.geometry.head_dim)

    def wants_training(self, tokens: int) -> bool:
        """Whether centroids are to be made (anew) for a memory of so many tokens."""
        if tokens < TRAIN_TOKENS:
            return False
        return not self.trained_on or (self.trained_on * RETRAIN_GROWTH <= tokens and self._may_retrain)

    @property
    def _may_retrain(self) -> bool:
        return self.trained_on < LAST_TRAINING_TOKENS

    def update(self, ranges: Ranges, stop: int | None = None, *, limit: int | None = None) -> int:
        """Cover the store's records up to `stop`, as far as they fill blocks.

        Args:
            ranges: what may be trained on.
            stop: one past the last record that is there for good; None: all are.
            limit: encode at most about so many now, so that they can be saved before the next ones.

        Returns:
            How many records were encoded; 0 when there is nothing to do.

        Raises:
            ConfigError: faiss is missing.
        """
        with self._lock:
            tokens = sum(high - low for low, high in ranges)
            if self.wants_training(tokens):
                self._train(ranges, tokens)
            if not self.trained_on:
                return 0
            stop = self.store.tokens if stop is None else stop
            high = stop // BLOCK_TOKENS * BLOCK_TOKENS
            if limit is not None:
                high = min(high, self.covered + max(1, limit // BLOCK_TOKENS) * BLOCK_TOKENS)
            begun = self.covered
            while self.covered < high:
                end = min(self.covered + _ENCODE_TOKENS, high)
                self.pieces = [*self.pieces, self.encode(self.covered, end)]  # views keep the lists they were made from
                self.covered = end
            return self.covered - begun

    def _train(self, ranges: Ranges, tokens: int) -> None:
        _use_threads()
        chosen = _evenly(ranges, min(tokens, _SAMPLE_TOKENS))
        heads = range(self.geometry.kv_heads)
        self.quantisers = {
            layer: [Quantiser.train(self._keys_of(self.store.gather(layer, head, chosen))) for head in heads]
            for layer in self.geometry.layers
        }
        self.trained_on, self.covered, self.pieces = tokens, 0, []

    def encode(self, start: int, stop: int) -> dict[int, np.ndarray]:
        """Codes of records start … stop, multiples of 32, by layer: uint8 (blocks, Hkv, block_bytes)."""
        _use_threads()
        codes = {}
        for layer, quantisers in self.quantisers.items():
            wide = torch.empty(self.geometry.kv_heads, stop - start, self.geometry.head_dim)
            for chunk in self.store.chunks(layer, start, stop):
                low = chunk.start - start
                self.storage.decode_into(wide[:, low : low + chunk.keys.shape[2]], chunk.keys[0])
            keys = _tame(wide).numpy()
            by_head = [quantiser.encode(each) for quantiser, each in zip(quantisers, keys, strict=True)]
            codes[layer] = np.stack(by_head, 1)
        return codes

    def _keys_of(self, records: Tensor) -> np.ndarray:
        """float32 (n, D) of gathered records (n, 2, elements)."""
        keys = torch.empty(records.shape[0], self.geometry.head_dim)
        self.storage.decode_into(keys, records[:, 0])
        numbers: np.ndarray = _tame(keys).numpy()
        return numbers

    def view(self, ranges: Ranges) -> IndexView:
        """A search over these records, as far as they are covered now."""
        with self._lock:
            key = (ranges, self.trained_on, self.covered)
            found = self._views.get(key)
            if found is None:
                found = self._views[key] = IndexView(self, ranges)
            self._last = found
            return found


class Candidates(Protocol):
    """What proposes keys: an `IndexView`, or in benchmarks other kinds of search."""

    covered: int
    """Records below this number are searched by it, as far as they are visible."""

    @property
    def visible(self) -> int:
        """How many of them may be seen."""
        ...

    def candidates(self, layer: int, head: int, queries: np.ndarray, count: int, least: int) -> np.ndarray | None:
        """int64 (m, n) numbers of different visible records for each query float32 (m, D), -1 where there is none: about
        `count`, and `least` of each query's at least; None where the search gives fewer."""
        ...


class IndexView:
    """A search over some records of an index, which neither grows nor shrinks; codes are copied when first searched."""

    def __init__(self, index: MemoryIndex, ranges: Ranges) -> None:
        self.covered = index.covered
        self._quantisers, self._pieces = index.quantisers, index.pieces
        inside = [(low, min(high, self.covered)) for low, high in ranges if low < self.covered]
        self.visible = sum(high - low for low, high in inside)
        numbers = [np.arange(first, last) for first, last in _block_runs(inside)]
        self._blocks = np.concatenate(numbers) if numbers else np.zeros(0, dtype=np.int64)
        self._hidden: np.ndarray | None = None  # bool (keys,): in a block with visible ones, but not visible
        if self.visible < len(self._blocks) * BLOCK_TOKENS:
            self._hidden = np.ones(len(self._blocks) * BLOCK_TOKENS, dtype=bool)
            first_of = np.searchsorted(self._blocks, [low // BLOCK_TOKENS for low, _ in inside])
            for (low, high), block in zip(inside, first_of, strict=True):
                at = int(block) * BLOCK_TOKENS + low % BLOCK_TOKENS
                self._hidden[at : at + high - low] = False
        self._searches: dict[tuple[int, int], BlockSearch] = {}
        self._lock = threading.Lock()

    def candidates(self, layer: int, head: int, queries: np.ndarray, count: int, least: int) -> np.ndarray | None:
        """See `Candidates`."""
        search = self._search(layer, head)
        asked = count if self._hidden is None else -(-count * search.keys // max(1, self.visible))
        while True:
            found = search.search(queries, min(asked, search.keys))
            seen = found >= 0
            if self._hidden is not None:
                seen &= ~self._hidden[found]
            if seen.sum(1).min(initial=least) >= least:
                tokens = self._blocks[found // BLOCK_TOKENS] * BLOCK_TOKENS + found % BLOCK_TOKENS
                return np.where(seen, tokens, -1)
            asked *= 2
            if asked >= search.keys:  # then exactly, rather than with every key as a candidate
                return None

    def _search(self, layer: int, head: int) -> BlockSearch:
        with self._lock:
            found = self._searches.get((layer, head))
            if found is None:
                blocks = self._codes(layer, head)
                found = self._searches[layer, head] = self._quantisers[layer][head].search_over(blocks)
            return found

    def _codes(self, layer: int, head: int) -> np.ndarray:
        """Blocks of the view, copied: uint8 (blocks, block_bytes)."""
        some, at = [], 0
        for piece in self._pieces:
            codes = piece[layer]
            low, high = np.searchsorted(self._blocks, (at, at + len(codes)))
            all_of_it = high - low == len(codes)
            some.append(codes[:, head] if all_of_it else codes[self._blocks[low:high] - at, head])
            at += len(codes)
        return np.concatenate(some)


def best_approximate(
    query: Tensor,
    search: Candidates,
    store: KVStore,
    layer: int,
    ranges: Iterable[tuple[int, int]],
    *,
    k: int,
    rerank: int,
    scale: float,
    softcap: float | None,
    scratch: Scratch,
    head: int | None = None,
) -> Best | None:
    """The best of each query's candidates by their true scores: min(k, visible) keys of what the search covers.

    Args:
        query: (B, Hq, T, D).
        store: of one text; the search is over its records.
        ranges: the visible records that the search covers, for the case that it gives fewer than there are.
        rerank: candidates for each of the k.
        head: only this key head, for queries (B, n, T, D) of heads that share it; None: all.

    Returns:
        None where nothing is covered.
    """
    least = min(k, search.visible)
    if not least:
        return None
    heads = range(store.kv_heads) if head is None else range(head, head + 1)
    dims, kv_heads, groups = query.shape[3], len(heads), query.shape[1] // len(heads)
    by_head = query.unflatten(1, (kv_heads, groups)).transpose(0, 1).flatten(1, 3)  # (Hkv, B G T, D)
    asked = by_head.detach().to(device="cpu", dtype=torch.float32).numpy()
    count = min(rerank * k, search.visible)

    def find(head: int) -> np.ndarray | None:
        return search.candidates(layer, head, asked[head - heads.start], count, least)

    found = _each(find, heads)
    if any(each is None for each in found):
        chunks = (chunk for low, high in ranges for chunk in store.chunks(layer, low, high))
        return best_keys(query, of_head(chunks, head), k=k, scale=scale, softcap=softcap, scratch=scratch)
    best = []
    for each, some, tokens in zip(heads, by_head, found, strict=True):
        assert tokens is not None
        best.append(_rerank(some, torch.from_numpy(tokens), store, layer, each, least, scale, softcap))
    shape = (query.shape[0], kv_heads, groups, query.shape[2], least)
    scores, values, numbers = (torch.stack(parts) for parts in zip(*best, strict=True))

    def arranged(part: Tensor) -> Tensor:  # (Hkv, B G T, …) -> (B, Hkv, G, T, …)
        return part.unflatten(1, (shape[0], groups, shape[3])).transpose(0, 1)

    assert values.shape[-1] == dims
    return Best(arranged(scores), arranged(values), arranged(numbers))


def _rerank(
    query: Tensor, tokens: Tensor, store: KVStore, layer: int, head: int, k: int, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (m, k), values (m, k, D) and numbers (m, k) of the best of candidates int64 (m, n) for queries (m, D)."""
    step = max(1, _RECORDS_AT_ONCE // tokens.shape[1])
    parts = []
    for low in range(0, len(query), step):
        some, numbers = query[low : low + step], tokens[low : low + step]
        stored = store.gather(layer, head, numbers.clamp(min=0).flatten())
        records = torch.empty(*stored.shape[:2], query.shape[1], dtype=query.dtype, device=query.device)
        store.storage.decode_into(records, stored)
        keys, values = records.unflatten(0, numbers.shape).unbind(2)
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (keys.to(wide) @ some.to(wide).unsqueeze(2)).squeeze(2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        numbers = numbers.to(scores.device)
        scores, index = scores.masked_fill(numbers < 0, -torch.inf).topk(k, dim=-1)
        chosen = values.gather(1, index.unsqueeze(2).expand(-1, -1, values.shape[2]))
        parts.append((scores, chosen, numbers.gather(1, index)))
    joined = [torch.cat(each) for each in zip(*parts, strict=True)]
    return joined[0], joined[1], joined[2]


def _tame(keys: Tensor) -> Tensor:
    """Keys whose squares are numbers, for training and encoding; their scores are made from the keys as they are."""
    return torch.nan_to_num(keys, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST).clamp(-_LARGEST, _LARGEST)


def _evenly(ranges: Ranges, count: int) -> Tensor:
    """int64 (count,): that many numbers of the ranges, equally far from each other."""
    sizes = np.array([high - low for low, high in ranges])
    ends = np.cumsum(sizes)
    at = np.arange(count) * int(ends[-1]) // count
    which = np.searchsorted(ends, at, side="right")
    starts = np.array([low for low, _ in ranges])
    return torch.from_numpy(starts[which] + at - (ends - sizes)[which])


def _block_runs(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Blocks in which the ranges lie, as (first, one past the last), in order; none twice."""
    runs: list[tuple[int, int]] = []
    for low, high in ranges:
        first, last = low // BLOCK_TOKENS, -(-high // BLOCK_TOKENS)
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((first, last))
    return runs


def _use_threads() -> None:
    """As many threads in faiss, where this thread calls it, as torch has."""
    require_faiss().omp_set_num_threads(torch.get_num_threads())


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads that call faiss, each by itself; of this process, since a fork does not take them along."""
    return ThreadPoolExecutor(threads, "longfocus-search", lambda: require_faiss().omp_set_num_threads(1))


def _each(function: Callable[[int], Any], heads: Sequence[int]) -> list[Any]:
    """The function's results; heads are searched side by side, since one scan of codes serves all queries of a head."""
    threads = min(torch.get_num_threads(), len(heads))
    if threads == 1:
        _use_threads()
        return [function(head) for head in heads]
    return list(_pool(os.getpid(), torch.get_num_threads()).map(function, heads))
