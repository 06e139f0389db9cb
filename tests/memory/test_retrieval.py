"""What goes into memory comes out: in order, in its own row, attended to whole or by the k best keys.

Shows: records appended in uneven pieces stay in order with their rows; dense retrieval over chunks of any
size equals attention over all keys at once; top-k equals a brute-force search of every query and head; the
mass that a recorder sums is the explicit softmax weight.

    python -m pytest tests/memory/test_retrieval.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longfocus.attention import merge, reference
from longfocus.memory.context import MassRecorder, MemoryContext, Part
from longfocus.memory.contract import KVChunk
from longfocus.memory.dense import Scratch, attend_dense
from longfocus.memory.exact import attend_top_k
from longfocus.memory.ram import RamStore
from tests.models import assert_close

# float64 throughout, sums over a few hundred keys.
EXACT = 1e-12
SCALE = 0.4
LAYERS = (1, 5)


def _records(
    rows: int, count: int, heads: int = 2, dim: int = 4, dtype: torch.dtype = torch.float64
) -> dict[int, Tensor]:
    """Different records (R, n, 2, Hkv, D) for each layer."""
    return {layer: 2 * torch.randn(rows, count, 2, heads, dim, dtype=torch.float64).to(dtype) for layer in LAYERS}


def _store(
    records: dict[int, Tensor],
    pieces: Sequence[int],
    *,
    mask: np.ndarray | None = None,
    dtype: torch.dtype | None = None,
    block_tokens: int = 7,
) -> RamStore:
    """Records appended in pieces that end at the given tokens."""
    rows, count, _, heads, dim = records[LAYERS[0]].shape
    dtype = dtype or records[LAYERS[0]].dtype
    store = RamStore(LAYERS, heads, dim, dtype, rows=rows, block_tokens=block_tokens)
    for low, high in pairwise([0, *pieces, count]):
        piece = {layer: kv[:, low:high] for layer, kv in records.items()}
        store.append(piece, None if mask is None else mask[:, low:high])
    return store


def _held(store: RamStore, layer: int, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """keys (R, Hkv, N, D), values, mask (R, N) of all chunks put together; checks that they are consecutive."""
    keys, values, masks = [], [], []
    at = start
    for chunk in store.chunks(layer, start, stop):
        assert chunk.start == at
        assert chunk.keys.shape == chunk.values.shape
        count = chunk.keys.shape[2]
        assert 0 < count <= store.block_tokens
        at += count
        keys.append(chunk.keys)
        values.append(chunk.values)
        masks.append(torch.ones(store.rows, count, dtype=torch.bool) if chunk.mask is None else chunk.mask)
    return torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 1)


def _all_scores(query: Tensor, keys: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B, Hq, T, N), key heads repeated, float64."""
    keys = keys.double().expand(query.shape[0], -1, -1, -1).repeat_interleave(query.shape[1] // keys.shape[1], 1)
    scores = SCALE * torch.einsum("bhtd,bhnd->bhtn", query.double(), keys)
    return scores if mask is None else scores.masked_fill(~mask[:, None, None, :], -torch.inf)


def _softmax_over(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """out, lse of scores (B, Hq, T, N) and values (R, Hkv, N, D); empty queries are 0 and -inf."""
    values = (
        values.double().expand(scores.shape[0], -1, -1, -1).repeat_interleave(scores.shape[1] // values.shape[1], 1)
    )
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights @ values, torch.logsumexp(scores, -1)


def _only_best(scores: Tensor, k: int) -> Tensor:
    """Every score but each query's k largest becomes -inf, by sorting."""
    if k >= scores.shape[-1]:
        return scores
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(-1, scores.argsort(-1, descending=True)[..., :k], True)
    return scores.masked_fill(~kept, -torch.inf)


def _check(found: tuple[Tensor, Tensor] | None, expected: tuple[Tensor, Tensor], tolerance: float = EXACT) -> None:
    assert found is not None
    out, lse = found
    assert_close(out, expected[0], tolerance, "out")
    assert torch.equal(lse == -torch.inf, expected[1] == -torch.inf), "lse is -inf in other places than expected"
    finite = expected[1] != -torch.inf
    assert_close(lse[finite], expected[1][finite], tolerance, "lse")


def _query(rows: int = 2, heads: int = 6, queries: int = 5, dim: int = 4) -> Tensor:
    return 2 * torch.randn(rows, heads, queries, dim, dtype=torch.float64)


# -- the store -------------------------------------------------------------------------------------------


@given(
    count=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    rows=st.integers(1, 3),
    block_tokens=st.integers(1, 20),
    masked=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_records_appended_in_uneven_pieces_come_back_in_order(
    count: int, cuts: list[int], rows: int, block_tokens: int, masked: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    records = _records(rows, count)
    mask = np.random.default_rng(seed).random((rows, count)) < 0.7 if masked else None
    store = _store(records, sorted(min(cut, count) for cut in cuts), mask=mask, block_tokens=block_tokens)
    assert (store.rows, store.tokens) == (rows, count)
    assert store.nbytes == count * rows * len(LAYERS) * 2 * 2 * 4 * 8
    expected_mask = np.ones((rows, count), dtype=bool) if mask is None else mask
    assert store.row_counts().tolist() == expected_mask.sum(1).tolist()
    for layer in LAYERS:
        keys, values, held = _held(store, layer)
        assert torch.equal(keys, records[layer][:, :, 0].transpose(1, 2)), f"keys of layer {layer}"
        assert torch.equal(values, records[layer][:, :, 1].transpose(1, 2)), f"values of layer {layer}"
        assert np.array_equal(held.numpy(), expected_mask)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, None), (0, 50), (3, 18), (6, 7), (7, 14), (49, 50), (13, 13), (20, 99)]
)
def test_a_range_of_chunks_is_that_range_of_records(start: int, stop: int | None) -> None:
    records = _records(1, 50)
    store = _store(records, (4, 5, 33))
    end = 50 if stop is None else min(stop, 50)
    if start == end:
        assert list(store.chunks(1, start, stop)) == []
        return
    keys, _, _ = _held(store, 1, start, stop)
    assert torch.equal(keys, records[1][:, start:end, 0].transpose(1, 2))


def test_append_copies_what_it_is_given() -> None:
    records = _records(1, 9)
    before = records[1].clone()
    store = _store(records, ())
    records[1].zero_()
    keys, values, _ = _held(store, 1)
    assert torch.equal(keys, before[:, :, 0].transpose(1, 2))
    assert torch.equal(values, before[:, :, 1].transpose(1, 2))


def test_the_contract_example() -> None:
    store = RamStore((8,), 1, 2, torch.float32)
    store.append({8: torch.arange(8.0).view(1, 2, 2, 1, 2)})
    chunk = next(store.chunks(8))
    assert chunk.keys.shape == (1, 1, 2, 2)
    assert chunk.keys.flatten().tolist() == [0, 1, 4, 5]
    assert chunk.values.flatten().tolist() == [2, 3, 6, 7]


def test_an_empty_store_has_no_chunk_and_no_attention() -> None:
    store = RamStore(LAYERS, 2, 4, torch.float64)
    assert list(store.chunks(1)) == []
    query = _query()
    assert attend_dense(query, store.chunks(1), scale=SCALE, softcap=None, scratch=Scratch()) is None
    chunks = lambda: store.chunks(1)  # noqa: E731
    assert attend_top_k(query, chunks, k=3, scale=SCALE, softcap=None, scratch=Scratch()) is None


@pytest.mark.parametrize("index", [[1, 0, 2], [2, 2], [0, 0, 1, 1, 2, 2]])
def test_rows_can_be_reordered_and_repeated_and_then_grow(index: list[int]) -> None:
    records = _records(3, 20)
    mask = np.random.default_rng(0).random((3, 20)) < 0.7
    store = _store(records, (9,), mask=mask)
    store.select_rows(torch.tensor(index))
    more = _records(len(index), 6)
    store.append(more)
    assert (store.rows, store.tokens) == (len(index), 26)
    keys, values, held = _held(store, 5)
    together = torch.cat((records[5][index], more[5]), 1)
    assert torch.equal(keys, together[:, :, 0].transpose(1, 2))
    assert torch.equal(values, together[:, :, 1].transpose(1, 2))
    assert np.array_equal(held.numpy(), np.concatenate((mask[index], np.ones((len(index), 6), dtype=bool)), 1))


# -- dense -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_tokens", [1, 3, 7, 64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (9, 3), (5, 1)], ids=str)
def test_dense_equals_attention_over_all_keys_at_once(heads: tuple[int, int], masked: bool, block_tokens: int) -> None:
    records = _records(3, 47, heads[1])
    mask = None
    if masked:
        mask = np.random.default_rng(0).random((3, 47)) < 0.6
        mask[1] = False  # a row that has nothing in memory
    store = _store(records, (5, 6, 31), mask=mask, block_tokens=block_tokens)
    query = _query(3, heads[0])
    found = attend_dense(query, store.chunks(1), scale=SCALE, softcap=None, scratch=Scratch())
    keys, values = records[1][:, :, 0].transpose(1, 2), records[1][:, :, 1].transpose(1, 2)
    torch_mask = None if mask is None else torch.from_numpy(mask)
    _check(found, _softmax_over(_all_scores(query, keys, torch_mask), values))
    reference_mask = None if torch_mask is None else torch_mask[:, None, None, :]
    _check(found, reference.attend(query, keys, values, mask=reference_mask, scale=SCALE))


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_one_memory_is_shared_by_all_rows(rows: int, softcap: float | None) -> None:
    records = _records(1, 33)
    store = _store(records, (10,))
    query = _query(rows)
    found = attend_dense(query, store.chunks(5), scale=SCALE, softcap=softcap, scratch=Scratch())
    keys, values = (records[5][:, :, i].transpose(1, 2).expand(rows, -1, -1, -1) for i in (0, 1))
    _check(found, reference.attend(query, keys, values, scale=SCALE, softcap=softcap))


@pytest.mark.parametrize("retrieval", ["dense", "top_k"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_half_precision_storage_rounds_records_and_nothing_else(rows: int, dtype: torch.dtype, retrieval: str) -> None:
    """Two layers and several chunks through one scratch buffer, in uneven sizes."""
    records = _records(rows, 40)
    store = _store(records, (13,), dtype=dtype, block_tokens=9)
    scratch = Scratch()
    query = _query(rows)
    for layer in (*LAYERS, *LAYERS):
        rounded = records[layer].to(dtype)
        assert not torch.equal(rounded.double(), records[layer])
        keys, values = rounded[:, :, 0].transpose(1, 2), rounded[:, :, 1].transpose(1, 2)
        scores = _all_scores(query, keys)
        if retrieval == "dense":
            found = attend_dense(query, store.chunks(layer), scale=SCALE, softcap=None, scratch=scratch)
        else:
            found = _top_k(query, store, 6, layer, scratch=scratch)
            scores = _only_best(scores, 6)
        _check(found, _softmax_over(scores, values))


@pytest.mark.parametrize("retrieval", ["dense", "top_k"])
def test_gradients_reach_the_query_through_memory(retrieval: str) -> None:
    records = _records(2, 40)
    store = _store(records, (13,), dtype=torch.float32, block_tokens=9)
    start = _query()
    gradients = []
    for way in ("found", "expected"):
        query = start.clone().requires_grad_()
        keys, values = (records[1][:, :, i].transpose(1, 2).float().double() for i in (0, 1))
        scores = _all_scores(query, keys)
        if way == "expected":
            out, lse = _softmax_over(scores if retrieval == "dense" else _only_best(scores, 4), values)
        elif retrieval == "dense":
            out, lse = attend_dense(query, store.chunks(1), scale=SCALE, softcap=None, scratch=Scratch())
        else:
            out, lse = _top_k(query, store, 4)
        (out.sin().sum() + lse.sin().sum()).backward()
        gradients.append(query.grad)
    assert_close(gradients[0], gradients[1], EXACT, "gradient of query")


# -- top-k -----------------------------------------------------------------------------------------------


def _top_k(
    query: Tensor, store: RamStore, k: int, layer: int = 1, softcap: float | None = None, scratch: Scratch | None = None
) -> tuple[Tensor, Tensor] | None:
    chunks = lambda: store.chunks(layer)  # noqa: E731
    return attend_top_k(query, chunks, k=k, scale=SCALE, softcap=softcap, scratch=scratch or Scratch())


@pytest.mark.parametrize("k", [1, 2, 5, 16, 46])
@pytest.mark.parametrize("block_tokens", [3, 7, 64])
@pytest.mark.parametrize("case", ["own rows", "masked rows", "shared"])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (9, 3)], ids=str)
def test_top_k_equals_a_search_of_every_key(
    heads: tuple[int, int], case: str, block_tokens: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longfocus.memory.exact._SCORES_AT_ONCE", 2 * 3 * heads[0] * block_tokens)  # 2 queries at once
    rows = 1 if case == "shared" else 3
    records = _records(rows, 47, heads[1])
    mask = None
    if case == "masked rows":
        mask = np.random.default_rng(0).random((3, 47)) < 0.4
        mask[1] = False
        mask[2, 3:] = False  # fewer records than most k
    store = _store(records, (5, 6, 31), mask=mask, block_tokens=block_tokens)
    query = _query(3, heads[0])
    keys, values = records[1][:, :, 0].transpose(1, 2), records[1][:, :, 1].transpose(1, 2)
    scores = _all_scores(query, keys, None if mask is None else torch.from_numpy(mask))
    _check(_top_k(query, store, k), _softmax_over(_only_best(scores, k), values))


@pytest.mark.parametrize("k", [47, 48, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_k_of_the_memorys_size_or_more_is_dense(k: int, softcap: float | None) -> None:
    store = _store(_records(2, 47), (5, 6, 31))
    query = _query()
    dense = attend_dense(query, store.chunks(1), scale=SCALE, softcap=softcap, scratch=Scratch())
    assert dense is not None
    _check(_top_k(query, store, k, softcap=softcap), dense)


def _alone(key: Tensor) -> Tensor:
    """A query (1, 1, n, D) of size 1 for each key (n, D)."""
    return (key / key.norm(dim=-1, keepdim=True)).view(1, 1, *key.shape)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_key_added_in_uneven_pieces_is_found_with_its_own_value(threads: int) -> None:
    """CASES 9, 10, 11: 3.5 blocks of keys; search each; the best key is itself and brings its own value."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        count = 224
        keys = torch.nn.functional.normalize(torch.randn(count, 8, dtype=torch.float64), dim=-1)
        values = torch.randn(count, 8, dtype=torch.float64)
        records = torch.stack((keys, values), 1).view(1, count, 2, 1, 8)
        store = RamStore((1,), 1, 8, torch.float64, block_tokens=64)
        for low, high in pairwise((0, 1, 70, 71, 190, count)):
            store.append({1: records[:, low:high]})
            just_added = _top_k(_alone(keys[high - 1 : high]), store, 1)
            assert just_added is not None
            assert_close(just_added[0][0, 0, 0], values[high - 1], EXACT, f"value of token {high - 1}, just added")
        found = _top_k(_alone(keys), store, 1)
        assert found is not None
        assert_close(found[0][0, 0], values, EXACT, "values")
        assert_close(found[1][0, 0], torch.full((count,), SCALE, dtype=torch.float64), EXACT, "scores")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("long_first", [False, True])
def test_of_two_keys_in_one_direction_the_long_one_wins(long_first: bool) -> None:
    """CASES 11: retrieval is by inner product, not by distance; the query equals the short key."""
    direction = torch.nn.functional.normalize(torch.randn(4, dtype=torch.float64), dim=0)
    lengths = [10.0, 1.0] if long_first else [1.0, 10.0]
    keys = torch.stack([length * direction for length in lengths])
    values = torch.tensor(lengths, dtype=torch.float64)[:, None].expand(2, 4)
    store = RamStore((1,), 1, 4, torch.float64, block_tokens=1)
    store.append({1: torch.stack((keys, values), 1).view(1, 2, 2, 1, 4)})
    found = _top_k(direction.view(1, 1, 1, 4), store, 1)
    assert found is not None
    assert_close(found[0].flatten(), torch.full((4,), 10.0, dtype=torch.float64), EXACT, "value of the long key")


@given(
    count=st.integers(1, 40),
    block_tokens=st.integers(1, 16),
    k=st.integers(1, 45),
    queries=st.integers(1, 5),
    shared=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_retrieval_at_any_size(
    count: int, block_tokens: int, k: int, queries: int, shared: bool, masked: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    rows = 1 if shared else 2
    records = _records(rows, count)
    mask = np.random.default_rng(seed).random((rows, count)) < 0.5 if masked and not shared else None
    store = _store(records, (count // 3,), mask=mask, block_tokens=block_tokens)
    query = _query(2, 6, queries)
    keys, values = records[1][:, :, 0].transpose(1, 2), records[1][:, :, 1].transpose(1, 2)
    scores = _all_scores(query, keys, None if mask is None else torch.from_numpy(mask))
    dense = attend_dense(query, store.chunks(1), scale=SCALE, softcap=None, scratch=Scratch())
    _check(dense, _softmax_over(scores, values))
    _check(_top_k(query, store, k), _softmax_over(_only_best(scores, k), values))


# -- a memory as additional context ----------------------------------------------------------------------


def _context(
    shared: RamStore | None, own: RamStore | None, retrieval: str = "dense", k: int = 4, **options: object
) -> MemoryContext:
    parts = [None if store is None else Part(store) for store in (shared, own)]
    return MemoryContext(parts[0], parts[1], retrieval=retrieval, k=k, scratch=Scratch(), **options)  # type: ignore[arg-type]


def _together(query: Tensor, shared: dict[int, Tensor], own: dict[int, Tensor], layer: int) -> tuple[Tensor, Tensor]:
    """keys and values (B, Hkv, N, D) of a shared memory followed by each row's own records."""
    both = torch.cat((shared[layer].expand(query.shape[0], -1, -1, -1, -1), own[layer]), 1)
    return both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2)


@pytest.mark.parametrize("retrieval", ["dense", "exact"])
def test_shared_and_own_records_share_one_softmax(retrieval: str) -> None:
    shared, own = _records(1, 20), _records(2, 9)
    context = _context(_store(shared, (3,)), _store(own, (2,)), retrieval)
    query = _query()
    keys, values = _together(query, shared, own, 5)
    scores = _all_scores(query, keys)
    scores = scores if retrieval == "dense" else _only_best(scores, 4)
    _check(context.attend(5, query, scale=SCALE, softcap=None), _softmax_over(scores, values))


@pytest.mark.parametrize("retrieval", ["dense", "exact"])
@pytest.mark.parametrize("span", [0, 1, 5, 9, 10, 17, 29, 100])
def test_span_sees_the_nearest_records_only(span: int, retrieval: str) -> None:
    shared, own = _records(1, 20), _records(2, 9)
    context = _context(_store(shared, (3,)), _store(own, (2,)), retrieval, span=span)
    query = _query()
    found = context.attend(1, query, scale=SCALE, softcap=None)
    if span == 0:
        assert found is None
        return
    keys, values = _together(query, shared, own, 1)
    scores = _all_scores(query, keys[:, :, -span:])
    scores = scores if retrieval == "dense" else _only_best(scores, 4)
    _check(found, _softmax_over(scores, values[:, :, -span:]))


def test_parts_of_stores_are_seen_alone() -> None:
    shared = _records(1, 20)
    context = MemoryContext(Part(_store(shared, (3,)), 4, 11), None, retrieval="dense", k=1, scratch=Scratch())
    query = _query(1)
    keys, values = shared[1][:, 4:11, 0].transpose(1, 2), shared[1][:, 4:11, 1].transpose(1, 2)
    _check(context.attend(1, query, scale=SCALE, softcap=None), _softmax_over(_all_scores(query, keys), values))


def test_nothing_visible_adds_nothing() -> None:
    empty = RamStore(LAYERS, 2, 4, torch.float64)
    for shared, own in ((None, None), (empty, None), (empty, empty)):
        for retrieval in ("dense", "exact"):
            context = _context(shared, own, retrieval)
            assert context.attend(1, _query(), scale=SCALE, softcap=None) is None
            recorder = MassRecorder(0)
            context.recorder = recorder
            context.record_mass(1, _query(), torch.zeros(2, 6, 5), scale=SCALE, softcap=None)
            assert recorder.mass == {}


@pytest.mark.parametrize("retrieval", ["dense", "exact"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_own", [False, True])
def test_recorded_mass_is_the_explicit_softmax_weight(retrieval: str, softcap: float | None, with_own: bool) -> None:
    """Over shared, own and local keys together; only the shared tokens are accounted, summed over two passes."""
    shared, own = _records(1, 20), _records(2, 9)
    recorder = MassRecorder(20)
    own_store = _store(own, (2,)) if with_own else None
    context = _context(_store(shared, (3,)), own_store, retrieval, recorder=recorder)
    expected = {layer: torch.zeros(20, dtype=torch.float64) for layer in LAYERS}
    for layer in (*LAYERS, LAYERS[0]):
        query = _query()
        local_keys, local_values = (torch.randn(2, 2, 6, 4, dtype=torch.float64) for _ in range(2))
        local = reference.attend(query, local_keys, local_values, scale=SCALE, softcap=softcap)
        additional = context.attend(layer, query, scale=SCALE, softcap=softcap)
        assert additional is not None
        out, lse = merge((local, additional))
        context.record_mass(layer, query, lse, scale=SCALE, softcap=softcap)

        keys, values = _together(query, shared, {layer: own[layer] if with_own else own[layer][:, :0]}, layer)
        far, near = _all_scores(query, keys), _all_scores(query, local_keys)
        if softcap is not None:
            far, near = (softcap * torch.tanh(scores / softcap) for scores in (far, near))
        far = far if retrieval == "dense" else _only_best(far, 4)
        weights = torch.softmax(torch.cat((far, near), -1), -1)
        everything = torch.cat((values, local_values), 2)
        assert_close(out, weights @ everything.repeat_interleave(3, 1), EXACT, "out")
        expected[layer] += weights[..., :20].mean(1).sum((0, 1))
    for layer in LAYERS:
        assert_close(recorder.mass[layer], expected[layer], EXACT, f"mass of layer {layer}")
        assert 0.1 < float(expected[layer].sum()) < 2 * 2 * 5


def test_mass_of_a_part_is_written_at_its_place_in_the_store() -> None:
    shared = _records(1, 20)
    recorder = MassRecorder(20)
    context = MemoryContext(
        Part(_store(shared, (3,)), 9, 17), None, retrieval="dense", k=1, scratch=Scratch(), recorder=recorder
    )
    query = _query(1)
    found = context.attend(1, query, scale=SCALE, softcap=None)
    assert found is not None
    context.record_mass(1, query, found[1], scale=SCALE, softcap=None)
    weights = torch.softmax(_all_scores(query, shared[1][:, 9:17, 0].transpose(1, 2)), -1)
    expected = torch.zeros(20, dtype=torch.float64)
    expected[9:17] = weights.mean(1).sum((0, 1))
    assert_close(recorder.mass[1], expected, EXACT, "mass")


def test_chunks_handed_out_are_views() -> None:
    """Reading a memory must not copy it: what costs in dense retrieval is memory traffic (DESIGN, section 2)."""
    store = _store(_records(1, 20), ())

    def addresses(chunks: Iterator[KVChunk]) -> list[tuple[int, int]]:
        return [(chunk.keys.data_ptr(), chunk.values.data_ptr()) for chunk in chunks]

    assert addresses(store.chunks(1)) == addresses(store.chunks(1))
