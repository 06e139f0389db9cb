"""Approximate retrieval is exact retrieval with fewer keys looked at: never a wrong score, never fewer keys, never a hidden one.

Codes and searches by real faiss, on random and clustered keys and on memories that a tiny random Llama has read; exact top-k
and explicit sorting are the definition. The constant from which on a memory is indexed is made small here.

    python -m pytest tests/memory/test_approximate.py
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longfocus import FocusConfig, Memory, read_ids
from longfocus.analysis.attribution import token_mass
from longfocus.analysis.memory_search import HeadRecorder, head_mass
from longfocus.errors import ConfigError, MemoryWriteError
from longfocus.memory.approximate import MemoryIndex, Ranges, best_approximate
from longfocus.memory.context import MassRecorder, MemoryContext, Part
from longfocus.memory.dense import Scratch
from longfocus.memory.exact import attend_top_k
from longfocus.memory.geometry import MemoryGeometry
from longfocus.memory.quantiser import BLOCK_TOKENS, BlockSearch, Quantiser, lists_for, pack
from longfocus.memory.ram import RamStore
from longfocus.memory.storage import storage_dtype
from tests import processes
from tests.memory.saved import WINDOW, focused, held
from tests.models import MEMORY_LAYERS, assert_close, logits, tokens

# float64 throughout, sums over a few hundred keys.
EXACT = 1e-12
SCALE = 0.4
LAYERS = (1, 5)
HEADS = 2


@pytest.fixture(autouse=True)
def _small_memories_are_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longfocus.memory.approximate.TRAIN_TOKENS", 640)


# -- made-up keys ------------------------------------------------------------------------------------------


def _keys(count: int, dim: int, *, clustered: bool = False, seed: int = 0) -> Tensor:
    """float64 (n, heads, D)."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(count, HEADS, dim, generator=generator, dtype=torch.float64)
    if clustered:
        centres = 3 * torch.randn(20, HEADS, dim, generator=generator, dtype=torch.float64)
        keys = 0.5 * keys + centres[torch.randint(20, (count,), generator=generator)]
    return keys


def _store(keys: Tensor, dtype: str = "float64", block_tokens: int = 500, seed: int = 1) -> RamStore:
    """The same keys in both layers but for a sign, with values of their own."""
    count, heads, dim = keys.shape
    store = RamStore(LAYERS, heads, dim, storage_dtype(dtype), block_tokens=block_tokens)
    values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for low, high in pairwise((0, count // 3, count // 3 + 1, count)):
        part = {
            layer: torch.stack((keys[low:high] * sign, values[low:high]), 1).unsqueeze(0)
            for layer, sign in zip(LAYERS, (1, -1), strict=True)
        }
        store.append(part)
    return store


def _geometry(dim: int, dtype: str = "float64", layers: tuple[int, ...] = LAYERS, heads: int = HEADS) -> MemoryGeometry:
    return MemoryGeometry("m", "m", "float64", layers, heads, dim, dtype, 16, 0, "first", None)


def _index(store: RamStore, dim: int, dtype: str = "float64") -> MemoryIndex:
    index = MemoryIndex(store, _geometry(dim, dtype))
    index.update(((0, store.tokens),))
    return index


def _query(rows: int = 2, groups: int = 3, queries: int = 4, dim: int = 8) -> Tensor:
    return 2 * torch.randn(rows, HEADS * groups, queries, dim, dtype=torch.float64)


def _context(part: Part, own: Part | None = None, *, k: int = 5, rerank: int = 8, **options: Any) -> MemoryContext:
    return MemoryContext(part, own, retrieval="approximate", k=k, rerank=rerank, scratch=Scratch(), **options)


def _part(store: RamStore, index: MemoryIndex, ranges: Ranges | None = None) -> Part:
    ranges = ((0, store.tokens),) if ranges is None else ranges
    return Part(store, ranges=ranges, search=index.view(ranges))


def _exact(query: Tensor, *parts: Part, k: int, layer: int = 1, softcap: float | None = None) -> Any:
    def chunks() -> Iterator[Any]:
        for part in parts:
            yield from part.chunks(layer)

    return attend_top_k(query, chunks, k=k, scale=SCALE, softcap=softcap, scratch=Scratch())


def _check(found: Any, expected: Any, tolerance: float = EXACT) -> None:
    assert (found is None) == (expected is None)
    if found is not None:
        assert_close(found[0], expected[0], tolerance, "out")
        assert_close(found[1], expected[1], tolerance, "lse")


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(8, "float64"), (7, "float16"), (12, "bfloat16"), (16, "int8"), (2, "float32")]
)
def test_it_is_exact_top_k_where_every_key_is_a_candidate(
    dim: int, dtype: str, softcap: float | None, layer: int
) -> None:
    """Also at odd head sizes and where faiss gives fewer keys than it is asked for (2 numbers)."""
    store = _store(_keys(1000, dim), dtype)
    index = _index(store, dim, dtype)
    assert index.covered == 992, "whole blocks"
    query, part = _query(dim=dim), _part(store, index)
    found = _context(part, k=5, rerank=200).attend(layer, query, scale=SCALE, softcap=softcap)
    _check(found, _exact(query, part, k=5, layer=layer, softcap=softcap))


@given(
    count=st.integers(1, 900),
    k=st.integers(1, 40),
    rerank=st.integers(1, 4),
    queries=st.integers(1, 4),
    own=st.integers(0, 40),
    cuts=st.lists(st.integers(0, 900), max_size=8),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_no_hidden_key_no_key_twice_and_never_too_few(
    count: int, k: int, rerank: int, queries: int, own: int, cuts: list[int], seed: int
) -> None:
    """Documents of any lengths, every second one removed, below and above the size from which on there is an index."""
    torch.manual_seed(seed)
    store = _store(_keys(count, 4, seed=seed))
    bounds = sorted({0, count, *(cut for cut in cuts if cut < count)})
    ranges = tuple(pairwise(bounds))[::2]
    index = _index(store, 4)
    part = _part(store, index, ranges)
    mine = Part(_store(_keys(own, 4, seed=1), block_tokens=9)) if own else None
    query = _query(queries=queries, dim=4)
    context = _context(part, mine, k=k, rerank=rerank)
    best = context.best(1, query, scale=SCALE, softcap=None)
    visible = part.tokens + own
    assert best is not None
    assert best.scores.shape[-1] == min(k, visible)
    assert best.scores.isfinite().all()
    keys = torch.cat([chunk.keys for chunk in store.chunks(1)], 2)[0]  # (Hkv, n, D)
    shown = np.zeros(count, dtype=bool)
    for low, high in ranges:
        shown[low:high] = True
    numbers = best.tokens
    assert bool(shown[numbers[numbers >= 0].numpy()].all()), "a removed token was retrieved"
    for taken in numbers.flatten(0, 3):
        shared = taken[taken >= 0]
        assert len(shared.unique()) == len(shared), "a token was retrieved twice"
    grouped = query.unflatten(1, (HEADS, 3))
    scores = SCALE * torch.einsum("bhgtd,hnd->bhgtn", grouped, keys)
    mine_of = best.scores.masked_fill(numbers < 0, 0.0)
    assert_close(mine_of, scores.gather(-1, numbers.clamp(min=0)).masked_fill(numbers < 0, 0.0), EXACT, "scores")
    if min(rerank * k, part.tokens) == part.tokens:
        parts = (part,) if mine is None else (part, mine)
        _check(context.attend(1, query, scale=SCALE, softcap=None), _exact(query, *parts, k=k))


@pytest.mark.parametrize("kind", ["random", "clustered", "uneven"])
@pytest.mark.parametrize("alike", [False, True], ids=["queries unlike the keys", "queries like the keys"])
def test_recall_after_reranking(kind: str, alike: bool) -> None:
    """Uneven: a few numbers are far larger than the others, as in real keys; without a rotation little would be found."""
    size = torch.ones(32, dtype=torch.float64)
    size[:4] = 30.0 if kind == "uneven" else 1.0
    store = _store(size * _keys(6000, 32, clustered=kind == "clustered"))
    index = _index(store, 32)
    query = _query(1, 1, 64, 32)
    if alike:
        query = (size * _keys(64, 32, clustered=kind == "clustered", seed=9)).transpose(0, 1).unsqueeze(0)
    keys = torch.cat([chunk.keys for chunk in store.chunks(1)], 2)
    true = (query @ keys.transpose(-1, -2)).topk(32).indices
    recalls = {}
    for rerank in (1, 8, 32):
        context = _context(_part(store, index), k=32, rerank=rerank)
        best = context.best(1, query, scale=SCALE, softcap=None)
        assert best is not None
        found = best.tokens[:, :, 0]
        recalls[rerank] = float((found.unsqueeze(-1) == true.unsqueeze(-2)).any(-1).double().mean())
    assert recalls[8] > 0.85
    assert recalls[32] > 0.97
    assert recalls[8] > recalls[1]


@pytest.mark.parametrize("threads", [1, 2])
def test_every_key_added_is_found_with_its_own_value(threads: int) -> None:
    """CASES 9, 10, 11: 3.5 blocks of a store, grown in uneven pieces; each key, searched, is first and brings its own value."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        keys = torch.nn.functional.normalize(_keys(1750, 16), dim=-1)
        values = torch.randn(1750, HEADS, 16, dtype=torch.float64)
        records = torch.stack((keys, values), 1).unsqueeze(0)
        store = RamStore(LAYERS, HEADS, 16, torch.float64, block_tokens=500)
        index = MemoryIndex(store, _geometry(16))
        for low, high in pairwise((0, 1, 700, 701, 1333, 1750)):
            store.append(dict.fromkeys(LAYERS, records[:, low:high]))
            index.update(((0, high),))
            assert index.covered == (high // BLOCK_TOKENS * BLOCK_TOKENS if high >= 640 else 0)
            query = keys[low:high].transpose(0, 1).unsqueeze(0)
            found = _context(_part(store, index), k=1, rerank=16).attend(5, query, scale=1.0, softcap=None)
            assert found is not None
            assert_close(found[0][0], values[low:high].transpose(0, 1), EXACT, f"values of {low} to {high}")
    finally:
        torch.set_num_threads(before)


def test_of_two_keys_in_one_direction_the_long_one_wins() -> None:
    """CASES 11: by inner product, not by distance."""
    keys = _keys(1000, 8)
    keys[17], keys[900] = 10 * keys[3], keys[3]
    store = _store(keys)
    query = keys[3].view(1, HEADS, 1, 8)
    best = _context(_part(store, _index(store, 8)), k=1).best(1, query, scale=SCALE, softcap=None)
    assert best is not None
    assert best.tokens.flatten().tolist() == [17, 17]


@pytest.mark.parametrize("dim", [2, 5, 8, 64])
def test_codes_appended_are_those_encoded_at_once(dim: int) -> None:
    keys = _keys(960, dim)[:, 0].numpy()
    quantiser = Quantiser.train(keys)
    whole = quantiser.encode(keys)
    assert whole.shape == (30, Quantiser.block_bytes(dim))
    assert whole.dtype == np.uint8
    pieces = [quantiser.encode(keys[low:high]) for low, high in ((0, 32), (32, 32), (32, 640), (640, 960))]
    assert np.array_equal(np.concatenate(pieces), whole)
    again = Quantiser.from_array(Quantiser.train(keys).to_array(), dim)
    assert len(again.to_array()) == Quantiser.numbers(dim, lists_for(960))
    assert np.array_equal(again.encode(keys), whole), "training gives the same centroids again"
    width = len(quantiser.rotation)
    np.testing.assert_allclose(quantiser.rotation @ quantiser.rotation.T, np.eye(width), atol=1e-5)
    blocks = [3, 29, 0]
    some = quantiser.search_over(whole[blocks])
    alone = quantiser.search_over(whole)
    query = np.random.default_rng(0).standard_normal((3, dim))
    mine, theirs = some.search(query, 30), alone.search(query, 950)
    chosen = [[blocks.index(n // 32) * 32 + n % 32 for n in row if n // 32 in blocks][:30] for row in theirs]
    if dim > 2:  # of fewer numbers many codes are equal, and which of the equals comes first is open
        common = [len(set(row) & set(other)) for row, other in zip(chosen, mine.tolist(), strict=True)]
        assert min(common) >= 28, "the same but for the table's rounding"
    everything = some.search(query, 100)
    assert (everything == [[*range(96), -1, -1, -1, -1]] * 3).all()


@pytest.mark.parametrize("dim", [5, 8, 64])
def test_codes_are_laid_as_faiss_lays_them(dim: int) -> None:
    import faiss

    keys = _keys(960, dim)[:, 0].numpy()
    quantiser = Quantiser.train(keys)
    width = dim + dim % 2
    index = faiss.IndexPQFastScan(width, width // 2, 4, faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(quantiser.centroids.ravel(), index.pq.centroids)
    index.is_trained = True
    residuals = np.random.default_rng(0).standard_normal((320, width)).astype(np.float32)
    index.add(residuals)
    theirs = faiss.rev_swig_ptr(index.codes.get(), index.codes.size()).reshape(10, -1)
    codes = index.pq.compute_codes(residuals)
    assert codes.shape[1] == Quantiser.code_bytes(dim)
    assert np.array_equal(pack(codes), theirs)


def test_keys_in_crowds_are_told_apart_within_them() -> None:
    """What codes of whole keys would spend on the crowd, lists give; few of them are scanned."""
    rng = np.random.default_rng(0)
    crowds = 30 * rng.standard_normal((100, 16))
    crowd = rng.integers(100, size=32 * 2000)
    keys = (crowds[crowd] + rng.standard_normal((len(crowd), 16))).astype(np.float32)
    quantiser = Quantiser.train(keys[:16384])
    search = quantiser.search_over(quantiser.encode(keys))
    queries = (keys[rng.integers(len(keys), size=50)] + rng.standard_normal((50, 16))).astype(np.float32)
    true = np.argsort(-queries @ keys.T, 1)[:, :10]
    found = search.search(queries, 100)
    recall = np.mean([len(set(row) & set(other)) / 10 for row, other in zip(true, found, strict=True)])
    assert recall > 0.95


def test_a_memory_that_grew_is_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that codes made for the first document do not stay those of all later ones."""
    monkeypatch.setattr("longfocus.memory.approximate.RETRAIN_GROWTH", 3)
    store = _store(_keys(700, 8))
    index = _index(store, 8)
    before = index.quantisers[1][0].centroids
    view = index.view(((0, 700),))
    more = _store(50 + _keys(1300, 8, seed=3))
    for chunk in pairwise((0, 500, 1300)):
        records = {layer: torch.cat([c.records for c in more.chunks(layer, *chunk)], 1) for layer in LAYERS}
        store.append(records)
        index.update(((0, store.tokens),))
    assert index.trained_on == 700, "not yet three times as many"
    store.append({layer: torch.cat([c.records for c in more.chunks(layer, 0, 200)], 1) for layer in LAYERS})
    index.update(((0, store.tokens),))
    assert (index.trained_on, index.covered) == (2200, 2176)
    assert not np.array_equal(index.quantisers[1][0].centroids, before)
    query = _query(1)
    for ranges, found in ((((0, 700),), view), (((0, 2200),), index.view(((0, 2200),)))):  # the old view goes on
        part = Part(store, ranges=ranges, search=found)
        _check(_context(part, k=5, rerank=440).attend(1, query, scale=SCALE, softcap=None), _exact(query, part, k=5))


@pytest.mark.parametrize("value", [0.0, 1e4, 1e30, float("nan"), float("inf")])
def test_keys_that_are_all_alike_or_no_numbers_do_no_harm(value: float) -> None:
    keys = _keys(1000, 8)
    keys[50:] = value
    store = _store(keys)
    part = _part(store, _index(store, 8), ((0, 50), (900, 1000)))
    if np.isfinite(value):
        query = _query()
        found = _context(part, k=5, rerank=200).attend(1, query, scale=SCALE, softcap=None)
        assert found is not None  # of equal keys any may be taken, so only the scores are compared
        assert_close(found[1], _exact(query, part, k=5)[1], EXACT, "lse")


def test_a_removed_neighbourhood_leaves_the_others_to_be_found() -> None:
    """All that a query likes best is removed, and shares blocks with what is left."""
    keys = 0.1 * _keys(1000, 8)
    keys[100:600, :, 0] += 10.0
    store = _store(keys)
    index = _index(store, 8)
    ranges = tuple((low, low + 1) for low in range(100, 600, 32)) + ((600, 1000),)
    part = _part(store, index, ranges)
    query = torch.zeros(1, HEADS, 1, 8, dtype=torch.float64)
    query[..., 0] = 1.0
    context = _context(part, k=16, rerank=1)
    best = context.best(1, query, scale=SCALE, softcap=None)
    assert best is not None
    assert sorted(best.tokens[0, 0, 0, 0].tolist()) == [low for low, high in ranges if high == low + 1]


def test_a_search_that_gives_too_few_is_made_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(_keys(1000, 8))
    part = _part(store, _index(store, 8))
    search = BlockSearch.search

    def forgetful(self: BlockSearch, queries: np.ndarray, count: int) -> np.ndarray:
        found = search(self, queries, count)
        found[1, 2:] = -1
        return found

    monkeypatch.setattr(BlockSearch, "search", forgetful)
    query = _query()
    _check(_context(part, k=5).attend(1, query, scale=SCALE, softcap=None), _exact(query, part, k=5))


def test_gradients_reach_the_query() -> None:
    store = _store(_keys(1000, 8))
    part = _part(store, _index(store, 8))
    start, gradients = _query(), []
    for way in ("approximate", "exact"):
        query = start.clone().requires_grad_()
        found = (
            _context(part, k=5, rerank=200).attend(1, query, scale=SCALE, softcap=None)
            if way == "approximate"
            else _exact(query, part, k=5)
        )
        (found[0].sin().sum() + found[1].sin().sum()).backward()
        gradients.append(query.grad)
    assert_close(gradients[0], gradients[1], EXACT, "gradient of query")


@pytest.mark.parametrize("retrieval_at_once", [1, 1 << 16])
def test_recorded_mass_is_that_of_the_retrieved_keys(retrieval_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other key is looked at for it: the store's chunks are not read again."""
    monkeypatch.setattr("longfocus.memory.approximate._RECORDS_AT_ONCE", retrieval_at_once)
    monkeypatch.setattr("longfocus.memory.exact._SCORES_AT_ONCE", 400)
    store, own = _store(_keys(1000, 8)), Part(_store(_keys(30, 8, seed=4), block_tokens=9))
    part = _part(store, _index(store, 8))
    query, queries = _query(), 2 * 4
    lse = torch.randn(2, 6, 4, dtype=torch.float64) + 12
    for kind in (MassRecorder, HeadRecorder):
        exact, found = kind(1000), kind(1000)
        contexts = [
            MemoryContext(part, own, retrieval="exact", k=7, scratch=Scratch(), recorder=exact),
            _context(part, own, k=7, rerank=150, recorder=found),
        ]
        contexts[1].attend(1, query, scale=SCALE, softcap=None)
        with monkeypatch.context() as patch:
            contexts[0].record_mass(1, query, lse, scale=SCALE, softcap=None)
            patch.setattr(RamStore, "chunks", None)
            contexts[1].record_mass(1, query, lse, scale=SCALE, softcap=None)
        mine, theirs = (r.heads[1] if isinstance(r, HeadRecorder) else r.mass[1] for r in (found, exact))
        assert_close(mine, theirs, EXACT, "mass")
        assert 7 <= int((mine.reshape(-1, 1000).sum(0) > 0).sum()) <= 7 * queries * 6
    other = kind(1000)
    context = _context(part, own, k=7, rerank=150, recorder=other)
    context.record_mass(1, query, lse, scale=SCALE, softcap=None)  # nothing was retrieved before
    assert_close(other.heads[1], exact.heads[1], EXACT, "mass without attention before")


def test_records_are_gathered_in_any_order_and_several_times() -> None:
    store = _store(_keys(1700, 8), block_tokens=64)
    wanted = torch.tensor([1699, 0, 63, 64, 64, 5, 1000, 0])
    records = torch.cat([chunk.records for chunk in store.chunks(5)], 1)[0]
    for head in range(HEADS):
        assert torch.equal(store.gather(5, head, wanted), records[wanted][:, :, head])
    assert store.gather(5, 0, wanted[:0]).shape == (0, 2, 8)


def test_best_approximate_takes_any_search() -> None:
    """The interface through which benchmarks compare other kinds."""

    class Every:
        covered = visible = 1000

        def candidates(self, layer: int, head: int, queries: np.ndarray, count: int, least: int) -> np.ndarray:
            return np.tile(np.arange(1000), (len(queries), 1))

    store, query = _store(_keys(1000, 8)), _query()
    options: dict[str, Any] = {"k": 5, "rerank": 1, "scale": SCALE, "softcap": None, "scratch": Scratch()}
    best = best_approximate(query, Every(), store, 1, ((0, 1000),), **options)
    assert best is not None
    _check(best.attention(query), _exact(query, Part(store), k=5))


# -- memories of a model -----------------------------------------------------------------------------------


def _approximate(**options: Any) -> Any:
    return focused(dtype=torch.float64, retrieval="approximate", k=8, rerank=1000, **options)


def _exactly(**options: Any) -> Any:
    return focused(dtype=torch.float64, retrieval="exact", k=8, **options)


@cache
def _plain(retrieval: str) -> Any:
    return _approximate() if retrieval == "approximate" else _exactly()


def _ids(count: int, seed: int) -> list[int]:
    return tokens(1, count, seed)[0].tolist()


def _fill(model: Any, memory: Memory, *counts: int) -> Memory:
    for number, count in enumerate(counts):
        read_ids(model, _ids(count, number + 1), memory, name=f"{number}.txt")
    return memory


def _same_answers(memory: Memory, other: Memory | None = None) -> None:
    """Approximate retrieval with every key a candidate answers as exact retrieval does: a short and a long question."""
    for count in (5, 70):
        question = tokens(2, count, 99)
        mine, theirs = (
            logits(_plain(how), question, memory=asked)
            for how, asked in (("approximate", memory), ("exact", other or memory))
        )
        assert_close(mine, theirs, 1e-9, f"logits of {count} tokens")


@pytest.fixture(scope="module")
def model() -> Any:
    return _plain("approximate")


@pytest.fixture
def folder(tmp_path: Path, model: Any) -> Path:
    """A saved, indexed memory of four documents, 1,200 tokens."""
    path = tmp_path / "m.memory"
    with Memory.create(path, model) as memory:
        _fill(model, memory, 300, 50, 500, 350)
        assert not memory.has_index
        assert memory.update_index() == 1184
    return path


def test_a_model_answers_from_ram_and_from_disk_as_with_exact_search(folder: Path, model: Any) -> None:
    in_ram = _fill(model, Memory(model), 300, 50, 500, 350)
    with Memory.open(folder) as saved:
        _same_answers(in_ram)
        _same_answers(saved, in_ram)
        assert saved.indexed_tokens == in_ram.indexed_tokens == 1184


def test_generation_and_beams_over_an_indexed_memory(folder: Path) -> None:
    with Memory.open(folder) as memory:
        for options in ({}, {"num_beams": 2}):
            made = [
                model.generate(tokens(1, 9, 5), memory=memory, max_new_tokens=WINDOW + 4, do_sample=False, **options)
                for model in (_approximate(), _exactly())
            ]
            assert made[0].tolist() == made[1].tolist()


def test_removed_and_unchosen_documents_are_not_found(folder: Path, model: Any) -> None:
    with Memory.open(folder, writable=True) as memory:
        memory.remove(memory.documents[2])
        _same_answers(memory)
        _same_answers(memory.select("0.txt", "3.txt"))
        _same_answers(memory.select("1.txt"))
        apart = Memory(model)
        for number, count in ((0, 300), (3, 350)):
            read_ids(model, _ids(count, number + 1), apart, name=f"{number}.txt")
        _same_answers(memory.select("0.txt", "3.txt"), apart)


def test_few_candidates_cost_recall_and_never_a_crash(folder: Path) -> None:
    with Memory.open(folder) as memory:
        question = tokens(1, 12, 4)
        few = logits(focused(dtype=torch.float64, retrieval="approximate", k=8, rerank=1), question, memory=memory)
        assert few.isfinite().all()


def test_attribution_takes_the_mass_of_what_was_retrieved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Memory.open(folder) as memory:
        expected = head_mass(_exactly(), memory, _ids(10, 3))
        monkeypatch.setattr("longfocus.memory.context.kth_score", None)  # the dense scan of exact retrieval
        monkeypatch.setattr("longfocus.memory.context.grouped_scores", None)
        found = head_mass(_approximate(), memory, _ids(10, 3))
        np.testing.assert_allclose(found, expected, atol=1e-9)
        recorder = MassRecorder(memory.extent)
        recorder.queries = 1
        cache = _approximate().new_cache(memory)
        cache.recorder = recorder
        logits(cache.focus.model, tokens(1, 6, 3), cache=cache, use_cache=True)
        assert 0 < token_mass(recorder).sum() <= 6


# -- growth, files -----------------------------------------------------------------------------------------


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("index*")}


def test_growing_appends_to_the_files_and_the_rest_is_searched_exactly(folder: Path, model: Any) -> None:
    before = _files(folder)
    with Memory.open(folder, writable=True) as memory:
        read_ids(model, _ids(200, 8), memory, name="4.txt")
        assert _files(folder) == before
        assert memory.indexed_tokens == 1184
        _same_answers(memory)  # what is new is encoded in RAM
        assert _files(folder) == before, "asking writes nothing"
        memory.update_index()
        after = _files(folder)
        assert json.loads(after["index.1.json"])["tokens"] == 1376 == memory.indexed_tokens
        for name, data in before.items():
            if name.endswith(".bin"):
                assert after[name].startswith(data)
                assert len(after[name]) > len(data)
        assert memory.update_index() == 0
        assert _files(folder) == after
        _same_answers(memory)
    with Memory.open(folder) as memory:
        assert memory.indexed_tokens == 1376
        _same_answers(memory)


def test_an_index_grown_in_steps_is_one_made_at_once(
    folder: Path, model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("longfocus.memory.memory._INDEX_STEP_TOKENS", 96)
    with Memory.create(tmp_path / "other.memory", model) as memory:
        _fill(model, memory, 300, 50, 500, 350)
        assert memory.update_index() == 1184
    assert _files(tmp_path / "other.memory") == _files(folder)


def test_a_reader_that_opened_before_a_writer_added_sees_its_own_tokens(folder: Path, model: Any) -> None:
    with Memory.open(folder) as reader:
        with Memory.open(folder, writable=True) as memory:
            read_ids(model, _ids(200, 8), memory, name="4.txt")
            memory.update_index()
        assert reader.indexed_tokens == 1184
        assert reader.index_problem is None
        _same_answers(reader)


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(data)


def _header(folder: Path, **changes: Any) -> None:
    path = folder / "index.1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _without(folder: Path, name: str) -> None:
    path = folder / "index.1.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != name}))


def _list_out_of_range(folder: Path) -> None:
    """A list that there is none of, with the checksum that belongs to it."""
    path = folder / "index-002.1.bin"
    data = path.read_bytes()[:-2] + b"\xff\x7f"
    path.write_bytes(data)
    header = json.loads((folder / "index.1.json").read_text())
    _header(folder, crc={**header["crc"], "index-002": zlib.crc32(data)})


DAMAGE: dict[str, Any] = {
    "no header": lambda folder: (folder / "index.1.json").unlink(),
    "no codes": lambda folder: (folder / "index-001.1.bin").unlink(),
    "empty header": lambda folder: (folder / "index.1.json").write_text(""),
    "half a header": lambda folder: os.truncate(folder / "index.1.json", 40),
    "header of something else": lambda folder: (folder / "index.1.json").write_text("[1]"),
    "header is no text": lambda folder: (folder / "index.1.json").write_bytes(b"\xff\xfe\x00"),
    "newer format": lambda folder: _header(folder, version=3),
    "nested deeply": lambda folder: (folder / "index.1.json").write_text("[" * 100_000),
    "no lists": lambda folder: _without(folder, "lists"),
    "no checksums": lambda folder: _without(folder, "crc"),
    "checksums are null": lambda folder: _header(folder, crc=None),
    "a list out of range": _list_out_of_range,
    "other kind": lambda folder: _header(folder, kind="ivf"),
    "other heads": lambda folder: _header(folder, kv_heads=3),
    "other layers": lambda folder: _header(folder, layers=[1, 3]),
    "covers less than it has codes": lambda folder: _header(folder, tokens=32),
    "covers more than it has codes": lambda folder: _header(folder, tokens=3200),
    "covers half a block": lambda folder: _header(folder, tokens=1000),
    "tokens are a word": lambda folder: _header(folder, tokens="many"),
    "truncated codes": lambda folder: os.truncate(folder / "index-002.1.bin", 5000),
    "a centroid flipped": lambda folder: _flip(folder / "index-002.1.bin", 3),
    "a code flipped": lambda folder: _flip(folder / "index-001.1.bin", -9),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_is_made_anew(folder: Path, damage: str) -> None:
    good = _files(folder)
    DAMAGE[damage](folder)
    bad = _files(folder)
    with Memory.open(folder) as memory:
        assert memory.indexed_tokens == 0
        assert (memory.index_problem is None) == (damage == "no header")
        assert damage == "no header" or "index" in str(memory.index_problem), "it names the file"
        _same_answers(memory)
        assert memory.indexed_tokens == 1184
    assert _files(folder) == bad, "a reader writes nothing"
    with Memory.open(folder, writable=True) as memory:
        memory.update_index()
        assert memory.index_problem is None
    assert _files(folder) == good


def test_an_index_of_other_records_is_noticed(folder: Path, model: Any, tmp_path: Path) -> None:
    """Such as after a folder was restored from an older copy and went on differently."""
    with Memory.create(tmp_path / "other.memory", model) as memory:
        _fill(model, memory, 300, 50)
        read_ids(model, _ids(850, 77), memory, name="2.txt")
    for name in _files(folder):
        shutil.copy(folder / name, tmp_path / "other.memory" / name)
    with Memory.open(tmp_path / "other.memory") as memory:
        assert memory.indexed_tokens == 0
        assert "other records" in str(memory.index_problem)
        _same_answers(memory)


def test_a_memory_that_cannot_be_written_is_searched_all_the_same(folder: Path) -> None:
    for name in _files(folder):
        (folder / name).unlink()
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    try:
        with Memory.open(folder) as memory:
            _same_answers(memory)
            assert memory.indexed_tokens == 1184
            with pytest.raises(MemoryWriteError, match="open for reading"):
                memory.update_index()
    finally:
        folder.chmod(0o755)


def test_compacting_makes_the_index_anew_and_clearing_removes_it(folder: Path) -> None:
    with Memory.open(folder, writable=True) as memory:
        memory.remove("1.txt")
        memory.compact()
        assert sorted(_files(folder)) == ["index-001.2.bin", "index-002.2.bin", "index.2.json"]
        assert memory.indexed_tokens == 1150 // 32 * 32
        _same_answers(memory)
    with Memory.open(folder, writable=True) as memory:
        assert memory.indexed_tokens == 1150 // 32 * 32
        memory.clear()
        assert _files(folder) == {}
        assert memory.indexed_tokens == 0


def test_a_copy_is_indexed_as_its_original_is(folder: Path, tmp_path: Path) -> None:
    with Memory.open(folder) as memory:
        memory.save(tmp_path / "copy.memory")
        memory.select("1.txt").save(tmp_path / "small.memory")
    assert _files(tmp_path / "copy.memory") == _files(folder)
    assert _files(tmp_path / "small.memory") == {}, "too few tokens"


def test_a_full_disk_leaves_memory_and_index_usable(folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _files(folder)
    with Memory.open(folder, writable=True) as memory:
        read_ids(model, _ids(200, 8), memory, name="4.txt")
        with monkeypatch.context() as patch:

            def full(*arguments: Any, **options: Any) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr("longfocus.memory.index_files.write_whole", full)
            with pytest.raises(MemoryWriteError, match="disk is full"):
                memory.update_index()
    assert _files(folder)["index.1.json"] == before["index.1.json"]
    with Memory.open(folder, writable=True) as memory:
        assert memory.indexed_tokens == 1184
        _same_answers(memory)
        memory.update_index()
        _same_answers(memory)
    assert json.loads((folder / "index.1.json").read_text())["tokens"] == 1376


def test_a_full_disk_keeps_nothing_of_an_index_that_has_no_header(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _files(folder):
        (folder / name).unlink()

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with Memory.open(folder, writable=True) as memory:
        for place in ("IndexFiles._append", "write_whole"):
            with monkeypatch.context() as patch:
                patch.setattr(f"longfocus.memory.index_files.{place}", full)
                with pytest.raises(MemoryWriteError, match="disk is full"):
                    memory.update_index()
            assert _files(folder) == {}


@pytest.mark.parametrize("anew", [False, True], ids=["appending", "making anew"])
def test_a_kill_at_any_moment_leaves_a_memory_that_answers(
    folder: Path, model: Any, tmp_path: Path, anew: bool
) -> None:
    with Memory.open(folder, writable=True) as memory:
        read_ids(model, _ids(1500, 8), memory, name="4.txt")
        expected = held(memory)
    if anew:
        _flip(folder / "index-001.1.bin", 3)
    moments = random.Random(0)
    codes = set()
    for number in range(3):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(folder, copy)
        child = processes.start("tests.memory.children:index", str(copy))
        steps = moments.randrange(1, 6)
        child.wait_for(lambda child=child, steps=steps: child.out.count("step") >= steps or "done" in child.out)
        child.kill()
        codes.add(child.wait().code)
        with Memory.open(copy) as memory:
            assert memory.tokens == expected.tokens
            if number == 0:
                _same_answers(memory)
        with Memory.open(copy, writable=True) as memory:
            memory.update_index()
            assert memory.indexed_tokens == 2688
        with Memory.open(copy) as memory:
            assert (memory.indexed_tokens, memory.index_problem) == (2688, None)
            if number == 0:
                _same_answers(memory)
    assert -9 in codes, "some of them were killed before they were done"


# -- choosing it, and living without it --------------------------------------------------------------------


def test_reading_is_dense_within_its_span_and_exact_without_one(model: Any) -> None:
    for span in (48, None):
        near = _approximate(read_span=span)
        theirs = focused(dtype=torch.float64, retrieval="dense" if span else "exact", k=8, read_span=span)
        mine, other = (_fill(one, Memory(one), 700) for one in (near, theirs))
        for layer in MEMORY_LAYERS:
            assert_close(held(mine).records[layer], held(other).records[layer], 1e-9, f"records of layer {layer}")


def test_small_memories_need_no_index(model: Any) -> None:
    memory = _fill(model, Memory(model), 300)
    _same_answers(memory)
    assert (memory.indexed_tokens, memory.has_index, memory.update_index()) == (0, False, 0)


def test_without_faiss_it_is_refused_with_the_one_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"pip install 'longfocus\[approximate\]'"):
        _approximate()
    with Memory.open(folder, writable=True) as memory:
        with pytest.raises(ConfigError, match=r"pip install 'longfocus\[approximate\]'"):
            memory.update_index()
        assert logits(_exactly(), tokens(1, 9), memory=memory).isfinite().all()
        memory.remove("0.txt")
        assert memory.compact() > 0, "the index goes, the memory stays"
        assert memory.tokens == 900
        assert _files(folder) == {}


def test_the_option_is_checked_and_stored() -> None:
    config = FocusConfig(retrieval="approximate", rerank=3)
    assert FocusConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="rerank: 0 given"):
        FocusConfig(rerank=0)
    with pytest.raises(ConfigError, match="dense, exact, approximate"):
        FocusConfig(retrieval="auto")  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["import torch, faiss", "import faiss, torch"])
def test_torch_and_faiss_live_in_one_process_whichever_comes_first(order: str) -> None:
    """CASES 35."""
    program = f"""{order}
import numpy as np
from longfocus.memory.quantiser import Quantiser
torch.randn(300, 300) @ torch.randn(300, 300)
keys = np.random.default_rng(0).standard_normal((2048, 16))
quantiser = Quantiser.train(keys)
found = quantiser.search_over(quantiser.encode(keys)).search(keys[:8], 64)
torch.randn(300, 300) @ torch.randn(300, 300)
print([n in row for n, row in enumerate(found)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{[True] * 8}\n"), done.stderr
