"""k chosen by query: what is skipped is the window alone, what is left is a masked softmax, and a neutral rule changes no bit.

Brute force is explicit: all scores of a query, its k largest by sorting, those above the margin, one softmax with the local
keys. On contexts with made-up records, and on tiny models that read, answer and generate.

    python -m pytest tests/memory/test_adaptive_k.py
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longfocus import FocusConfig, KRule, Memory, load, read_ids
from longfocus.analysis.attribution import token_mass
from longfocus.analysis.memory_search import HeadRecorder
from longfocus.attention.context import LocalWindow
from longfocus.errors import ConfigError, InputError
from longfocus.memory.adaptive_k import KCounts
from longfocus.memory.approximate import MemoryIndex
from longfocus.memory.context import MassRecorder, MemoryContext, Part
from longfocus.memory.dense import Scratch
from longfocus.memory.geometry import MemoryGeometry
from longfocus.memory.ram import RamStore
from tests.memory.saved import WINDOW, focused
from tests.models import MEMORY_LAYERS, assert_close, logits, tiny, tokens

# float64 throughout, sums over a few hundred keys.
EXACT = 1e-12
SCALE = 0.4
LAYER = 1
ALWAYS = -1e9
"""A number that every normaliser reaches."""
GEOMETRY = MemoryGeometry("m", "m", "float64", (LAYER,), 2, 8, "float64", 16, 0, "first", None)


def _store(records: Tensor, mask: np.ndarray | None = None, block_tokens: int = 23) -> RamStore:
    """Of records (R, n, 2, Hkv, D)."""
    rows, _, _, heads, dim = records.shape
    store = RamStore((LAYER,), heads, dim, records.dtype, rows=rows, block_tokens=block_tokens)
    store.append({LAYER: records}, mask)
    return store


def _window(rows: int, heads: int, kv_heads: int, queries: int, dim: int, *, padded: bool = False) -> LocalWindow:
    """Random; with padding, the last row has one token fewer than the others in front."""
    query = 2 * torch.randn(rows, heads, queries, dim, dtype=torch.float64)
    key, value = (torch.randn(rows, kv_heads, queries, dim, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(queries, queries, dtype=torch.bool).tril()[None, None]
    valid = None
    if padded:
        valid = torch.ones(rows, queries, dtype=torch.bool)
        valid[-1, 0] = False
        mask = mask & valid[:, None, None, :]
    return LocalWindow(query, key, value, mask, query, key, valid)


def _force(
    rule: KRule, window: LocalWindow, records: Tensor, k: int, mask: Tensor | None = None, balance: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, Hq, T, D), lse of the local window, and bool (B, Hq, T, N): the keys that are used of records (R, N, 2, Hkv, D)."""
    rows, heads, _, _ = window.query.shape
    groups = heads // window.key.shape[1]

    def scored(keys: Tensor) -> Tensor:
        keys = keys.expand(rows, -1, -1, -1).repeat_interleave(groups, 1)
        return SCALE * torch.einsum("bhtd,bhnd->bhtn", window.query, keys)

    near = scored(window.key).masked_fill(~window.mask, -torch.inf) + math.log(balance)
    far = scored(records[:, :, 0].transpose(1, 2))
    if mask is not None:
        far = far.masked_fill(~mask[:, None, None, :], -torch.inf)
    local = torch.logsumexp(near, -1)
    used = torch.zeros_like(far, dtype=torch.bool)
    used.scatter_(-1, far.argsort(-1, descending=True)[..., :k], True)
    used &= far > -torch.inf
    total = torch.logsumexp(torch.cat((near, far.masked_fill(~used, -torch.inf)), -1), -1)
    used &= torch.exp(far - total.unsqueeze(-1)) >= rule.least_share
    used &= ~(local >= torch.tensor(rule.numbers(LAYER, heads), dtype=torch.float64)[:, None]).unsqueeze(-1)
    weights = torch.softmax(torch.cat((near, far.masked_fill(~used, -torch.inf)), -1), -1)
    values = torch.cat((window.value, records[:, :, 1].transpose(1, 2).expand(rows, -1, -1, -1)), 2)
    return weights.nan_to_num(0.0) @ values.repeat_interleave(groups, 1), local, used


def _rule(local: Tensor, share: float, least_share: float = 0.0, **more: Any) -> KRule:
    """Each head skips about this share of its queries; no normaliser lies at a number but for rounding."""
    finite = local.transpose(0, 1).flatten(1).nan_to_num(neginf=0.0)
    limits = tuple((torch.quantile(finite, 1 - share, dim=1, interpolation="nearest") - 1e-9).tolist())
    return KRule(skip_from=((LAYER, limits),), least_share=least_share, **more)


def _join(context: MemoryContext, window: LocalWindow) -> Tensor:
    return context.join(LAYER, window, scale=SCALE, softcap=None)


# -- contexts over made-up records -----------------------------------------------------------------------


@given(
    rows=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 4),
    queries=st.integers(1, 9),
    count=st.integers(1, 70),
    k=st.integers(1, 80),
    least_share=st.sampled_from([0.0, 1e-9, 1e-3, 0.02, 0.3, 0.9]),
    skipped=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    own=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=80)
def test_what_the_rule_leaves_is_a_masked_softmax(
    rows: int,
    kv_heads: int,
    groups: int,
    queries: int,
    count: int,
    k: int,
    least_share: float,
    skipped: float,
    own: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    window = _window(rows, kv_heads * groups, kv_heads, queries, 8)
    records = 2 * torch.randn(rows if own else 1, count, 2, kv_heads, 8, dtype=torch.float64)
    held = np.random.default_rng(seed).random((rows, count)) < 0.8 if own else None
    local = window.attend(scale=SCALE, softcap=None)[1]
    rule = _rule(local, skipped, least_share) if skipped else KRule(least_share=least_share)
    parts = (None, Part(_store(records, held))) if own else (Part(_store(records)), None)
    counts = KCounts()
    context = MemoryContext(*parts, retrieval="exact", k=k, scratch=Scratch(), rule=rule, counts=counts)
    expected, _, used = _force(rule, window, records, k, None if held is None else torch.from_numpy(held))
    assert_close(_join(context, window), expected, EXACT, "out")
    if held is not None and not held.any():
        assert counts.retrievals == {}
        return
    asks = ~(local >= torch.tensor(rule.numbers(LAYER, kv_heads * groups), dtype=torch.float64)[:, None])
    assert counts.retrievals == {LAYER: asks.numel()}
    assert counts.skipped == {LAYER: int((~asks).sum())}
    assert counts.keys == {LAYER: int(used.sum())}


@pytest.mark.parametrize("retrieval", ["exact", "approximate"])
@pytest.mark.parametrize("queries", [1, 6])
def test_a_skipped_query_has_the_window_alone_and_nothing_is_searched_for_it(
    retrieval: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longfocus.memory.approximate.TRAIN_TOKENS", 640)
    records = 2 * torch.randn(1, 1000, 2, 2, 8, dtype=torch.float64)
    store = _store(records, block_tokens=500)
    index = MemoryIndex(store, GEOMETRY)
    index.update(((0, 1000),))
    window = _window(2, 6, 2, queries, 8)
    own = Part(_store(torch.randn(2, 9, 2, 2, 8, dtype=torch.float64)))
    alone = window.attend(scale=SCALE, softcap=None)
    whole = Part(store, ranges=((0, 1000),), search=index.view(((0, 1000),)))
    options: dict[str, Any] = {"retrieval": retrieval, "k": 5, "rerank": 200, "scratch": Scratch()}
    # all queries of the first key head, and half of one query head of the second
    some = float(alone[1][0, 4, queries // 2])
    rule = KRule(skip_from=((LAYER, (ALWAYS,) * 3 + (math.inf, some, math.inf)),))
    skips = alone[1] >= torch.tensor(rule.numbers(LAYER, 6), dtype=torch.float64)[:, None]
    assert 3 < skips.sum() / (2 * queries) < 4 + (queries == 1)
    seen: list[int] = []
    search, chunks = store.gather, store.chunks
    monkeypatch.setattr(store, "gather", lambda layer, head, some: seen.append(head) or search(layer, head, some))
    context = MemoryContext(whole, own, **options, rule=rule)
    out = _join(context, window)
    assert torch.equal(out[skips], alone[0][skips])
    without = _join(MemoryContext(whole, own, **options), window)
    assert_close(out[~skips], without[~skips], EXACT, "queries that ask")
    assert not torch.equal(without[skips], alone[0][skips])
    assert set(seen) == ({0, 1} if retrieval == "approximate" else set())  # 0 by the search without a rule
    seen.clear()
    everything = KRule(skip_from=((LAYER, (ALWAYS,) * 6),))
    monkeypatch.setattr(store, "chunks", None)
    assert torch.equal(_join(MemoryContext(whole, own, **options, rule=everything), window), alone[0])
    assert seen == []
    monkeypatch.setattr(store, "chunks", chunks)


def test_only_key_heads_that_are_asked_for_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    records = 2 * torch.randn(1, 60, 2, 3, 8, dtype=torch.float64)
    scored: list[tuple[int, ...]] = []
    from longfocus.memory import exact

    whole = exact.grouped_scores

    def noting(query: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        scored.append((keys.shape[1], query.shape[2]))
        return whole(query, keys, *rest)

    monkeypatch.setattr(exact, "grouped_scores", noting)
    window = _window(1, 6, 3, 8, 8)
    local = window.attend(scale=SCALE, softcap=None)[1][0]
    asks = local[2].sort().values[3]  # three queries of a head are below it
    numbers = (ALWAYS, ALWAYS, float(asks), ALWAYS, ALWAYS, ALWAYS)
    context = MemoryContext(
        Part(_store(records, block_tokens=60)), None, retrieval="exact", k=4, scratch=Scratch(),
        rule=KRule(skip_from=((LAYER, numbers),)),
    )  # fmt: skip
    _join(context, window)
    assert scored == [(1, 3)], "one key head, three queries"


@pytest.mark.parametrize("least_share", [0.0, 0.02])
@pytest.mark.parametrize("retrieval", ["exact", "approximate"])
def test_padding_is_not_counted_and_changes_nothing(
    retrieval: str, least_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longfocus.memory.approximate.TRAIN_TOKENS", 640)
    window = _window(3, 6, 2, 5, 8, padded=True)
    assert window.valid is not None
    records = 2 * torch.randn(1, 700, 2, 2, 8, dtype=torch.float64)
    store = _store(records, block_tokens=500)
    index = MemoryIndex(store, GEOMETRY)
    index.update(((0, 700),))
    part = Part(store, ranges=((0, 700),), search=index.view(((0, 700),)))
    local = window.attend(scale=SCALE, softcap=None)[1]
    for rule in (KRule(least_share=least_share), _rule(local, 0.4, least_share)):
        counts = KCounts()
        context = MemoryContext(
            part, None, retrieval=retrieval, k=6, rerank=120, scratch=Scratch(), rule=rule, counts=counts
        )
        found = _join(context, window)
        expected, _, used = _force(rule, window, records, 6)
        real = window.valid[:, None].expand(found.shape[:3])
        assert_close(found[real], expected[real], EXACT, "out")
        asks = ~(local >= torch.tensor(rule.numbers(LAYER, 6), dtype=torch.float64)[:, None])
        assert counts.retrievals == {LAYER: 14 * 6}
        assert counts.skipped == {LAYER: int((~asks & real).sum())}
        assert counts.keys == {LAYER: int(used[real].sum())}
        assert 0 < counts.keys[LAYER] <= 14 * 6 * 6
        assert counts.mean_k == counts.keys[LAYER] / (14 * 6)
        assert counts.to_dict()["skipped"] == pytest.approx(counts.skipped[LAYER] / (14 * 6), abs=1e-6)


@pytest.mark.parametrize("retrieval", ["exact", "approximate"])
@pytest.mark.parametrize("kind", [MassRecorder, HeadRecorder])
@pytest.mark.parametrize("skipped", [0.0, 0.5, 1.0])
def test_recorded_mass_is_that_of_the_keys_that_are_used(retrieval: str, kind: Any, skipped: float) -> None:
    shared = 2 * torch.randn(1, 40, 2, 2, 8, dtype=torch.float64)
    own = 2 * torch.randn(2, 9, 2, 2, 8, dtype=torch.float64)
    window = _window(2, 6, 2, 5, 8)
    local = window.attend(scale=SCALE, softcap=None)[1]
    rule = _rule(local, skipped, 0.03) if skipped else KRule(least_share=0.03)
    recorder = kind(40)
    context = MemoryContext(
        Part(_store(shared)),
        Part(_store(own)),
        retrieval=retrieval,
        k=7,
        scratch=Scratch(),
        recorder=recorder,
        rule=rule,
    )
    _join(context, window)
    records = torch.cat((shared.expand(2, -1, -1, -1, -1), own), 1)
    _, _, used = _force(rule, window, records, 7)
    keys = records[:, :, 0].transpose(1, 2).repeat_interleave(3, 1)
    far = (SCALE * torch.einsum("bhtd,bhnd->bhtn", window.query, keys)).masked_fill(~used, -torch.inf)
    total = torch.logaddexp(torch.logsumexp(far, -1), local)
    by_head = torch.exp(far - total.unsqueeze(-1))[..., :40].sum((0, 2))
    found, expected = (
        (recorder.heads[LAYER], by_head) if kind is HeadRecorder else (recorder.mass[LAYER], by_head.mean(0))
    )
    assert_close(found, expected, EXACT, "mass")
    assert (float(expected.sum()) > 0.1) == (skipped < 1)
    recorder.queries = 1
    assert kind is HeadRecorder or float(token_mass(recorder).sum()) == pytest.approx(float(expected.sum()))


def test_gradients_pass_through_what_is_left() -> None:
    records = torch.randn(1, 40, 2, 2, 8, dtype=torch.float64)
    window = _window(2, 6, 2, 5, 8)
    local = window.attend(scale=SCALE, softcap=None)[1]
    rule = _rule(local, 0.5, 0.02)
    gradients = []
    for way in ("rule", "force"):
        query = window.query.clone().requires_grad_()
        mine = dataclasses.replace(window, query=query, outer_query=query)
        if way == "rule":
            context = MemoryContext(Part(_store(records)), None, retrieval="exact", k=7, scratch=Scratch(), rule=rule)
            out = _join(context, mine)
        else:
            out = _force(rule, mine, records, 7)[0]
        out.sin().sum().backward()
        gradients.append(query.grad)
    assert_close(gradients[0], gradients[1], EXACT, "gradient of query")


def test_local_keys_that_count_more_make_more_queries_skip() -> None:
    """Normalisers are compared after `balance_tokens`."""
    records = 2 * torch.randn(1, 40, 2, 2, 8, dtype=torch.float64)
    window = _window(1, 6, 2, 9, 8)
    local = window.attend(scale=SCALE, softcap=None)[1]
    rule = _rule(local, 0.4, 0.02)
    counts = KCounts()
    context = MemoryContext(
        Part(_store(records)), None, retrieval="exact", k=7, scratch=Scratch(), rule=rule, counts=counts,
        balance_tokens=10,
    )  # fmt: skip
    expected, balanced, _ = _force(rule, window, records, 7, balance=1 + 40 / 10)
    assert_close(_join(context, window), expected, EXACT, "out")
    limits = torch.tensor(rule.numbers(LAYER, 6), dtype=torch.float64)[:, None]
    assert counts.skipped == {LAYER: int((balanced >= limits).sum())}
    assert counts.skipped[LAYER] > int((local >= limits).sum())


# -- models ----------------------------------------------------------------------------------------------

NEUTRAL = KRule(skip_from=tuple((layer, (math.inf,) * 6) for layer in MEMORY_LAYERS))
"""Of a tiny Llama."""


def _model(retrieval: str, rule: KRule | None, **options: Any) -> Any:
    return focused(retrieval=retrieval, k=8, rerank=8, k_rule=rule, **options)


def _read(model: Any, count: int = 700) -> Memory:
    memory = Memory(model)
    read_ids(model, tokens(1, count)[0].tolist(), memory)
    return memory


@pytest.fixture(autouse=True)
def _small_memories_are_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longfocus.memory.approximate.TRAIN_TOKENS", 320)


@pytest.mark.parametrize("span", [None, 64])
@pytest.mark.parametrize("retrieval", ["exact", "approximate"])
def test_a_neutral_rule_changes_no_bit(retrieval: str, span: int | None) -> None:
    """Reading several windows side by side, questions in a padded batch, long prompts, generation."""
    found = []
    for rule in (None, NEUTRAL):
        model = _model(retrieval, rule, read_span=span)
        memory = _read(model)
        batch = tokens(2, 40, seed=3)
        batch[1, :7] = 0
        mask = (batch != 0).long()
        records = torch.cat([chunk.records for layer in MEMORY_LAYERS for chunk in memory.store.chunks(layer)], 1)
        found.append(
            (
                records,
                logits(model, batch, attention_mask=mask, memory=memory),
                logits(model, tokens(1, 300, seed=4)),
                model.generate(batch, attention_mask=mask, memory=memory, max_new_tokens=20, do_sample=False),
            )
        )
        counts = model.focus.k_counts
        assert (counts.retrievals == {}) == (rule is None)
        assert sum(counts.skipped.values()) == 0
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert counts.mean_k == pytest.approx(8, abs=0.5)  # the second window of a text sees fewer than 8 keys of its own


def test_without_a_memory_to_see_all_is_skipped_and_the_model_is_windows_alone() -> None:
    everything = KRule(skip_from=tuple((layer, (ALWAYS,) * 6) for layer in MEMORY_LAYERS))
    model = _model("exact", everything)
    memory = _read(model)
    text = tokens(2, WINDOW, seed=5)
    assert torch.equal(logits(model, text, memory=memory), logits(model, text))
    assert model.focus.k_counts.skipped_share == dict.fromkeys(MEMORY_LAYERS, 1.0)
    assert model.focus.k_counts.mean_k == 0.0


@pytest.mark.parametrize("retrieval", ["exact", "approximate"])
def test_windows_side_by_side_follow_the_rule_as_one_after_another(
    retrieval: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = KRule(
        skip_from=tuple((layer, (4.0, 3.0, 5.0, math.inf, 4.0, 3.0)) for layer in MEMORY_LAYERS), least_share=0.01
    )
    found = []
    for passes in (2048, 1):
        monkeypatch.setattr("longfocus.model.reading_pass.PASS_TOKENS", passes)
        model = _model(retrieval, rule, dtype=torch.float64)
        memory = _read(model, 200)
        found.append(torch.cat([chunk.records for chunk in memory.store.chunks(MEMORY_LAYERS[1])], 1))
        found.append(torch.tensor([model.focus.k_counts.keys[2], model.focus.k_counts.skipped[2]]))
        assert 0.05 < model.focus.k_counts.skipped_share[2] < 0.95
    assert_close(found[0], found[2], 1e-6, "records")
    assert torch.equal(found[1], found[3])


def test_within_a_read_span_and_under_dense_retrieval_there_is_no_rule() -> None:
    everything = KRule(skip_from=tuple((layer, (ALWAYS,) * 6) for layer in MEMORY_LAYERS))
    for options in ({"retrieval": "exact", "read_span": 48}, {"retrieval": "dense"}):
        found = []
        for rule in (None, everything):
            model = focused(k=8, k_rule=rule, **options)  # type: ignore[arg-type]
            memory = _read(model, 200)
            found.append(torch.cat([chunk.records for chunk in memory.store.chunks(2)], 1))
            assert model.focus.k_counts.retrievals == {}
        assert torch.equal(*found)
    text = tokens(1, 9, seed=6)
    assert torch.equal(logits(model, text, memory=memory), logits(focused(k=8), text, memory=memory))


# -- the rule as data ------------------------------------------------------------------------------------

RULE = KRule(
    skip_from=((2, (1.5, math.inf, -2.0, 0.25, -4.0, 7)), (1, (math.inf,) * 6)),
    least_share=0.001,
    window=WINDOW,
    about="by hand",
)


def test_a_rule_goes_to_json_and_back(tmp_path: Path) -> None:
    rule = RULE
    assert rule.skip_from[0][0] == 1, "in the order of the layers"
    rule.write(tmp_path / "rule.json")
    assert KRule.read(tmp_path / "rule.json") == rule
    assert json.loads((tmp_path / "rule.json").read_text())["skip_from"]["2"] == [1.5, None, -2.0, 0.25, -4.0, 7.0]
    config = FocusConfig(k_rule=rule, retrieval="exact")
    assert FocusConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(FocusConfig(k_rule=KRule.read(tmp_path / "rule.json"), retrieval="exact"))


def test_a_checkpoint_keeps_its_rule(tmp_path: Path) -> None:
    rule = KRule(skip_from=((1, (1.0,) * 6),), least_share=0.01, window=WINDOW)
    model = focused(retrieval="exact", k_rule=rule)
    model.save_pretrained(tmp_path / "model")
    assert load(tmp_path / "model").focus.config.k_rule == rule
    assert load(tmp_path / "model", k_rule=None).focus.config.k_rule is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[1]", "expected a rule as longfocus calibrate-k writes it"),
        (b'{"skip": {}}', "'skip' is not a part of a k rule. Did you mean 'skip_from'?"),
        (b'{"skip_from": [1]}', "expected layers, each with a list of numbers"),
        (b'{"skip_from": {"1": 3}}', "expected layers, each with a list of numbers"),
        (b'{"skip_from": {"one": [3]}}', "'one' is not a layer index"),
        (b'{"skip_from": {"1": ["3"]}}', "expected a number for each query head"),
        (b'{"skip_from": {"1": [NaN]}}', "expected a number for each query head"),
        (b'{"skip_from": {"1": [-Infinity]}}', "expected a number for each query head"),
        (b'{"skip_from": {"1": []}}', "expected a number for each query head"),
        (b'{"skip_from": {"1": [1], "01": [1]}}', "names a layer twice"),
        (b'{"least_share": 2}', "least_share: 2 given, expected a number from 0 to 1"),
        (b'{"least_share": "a"}', "least_share: 'a' given"),
        (b'{"window": 0}', "window: 0 given"),
        (b'{"about": 5}', "about: 5 given, expected a text"),
    ],
    ids=str,
)
def test_a_damaged_rule_says_what_is_wrong(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "rule.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as raised:
        KRule.read(path)
    assert words in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_missing_rule_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        KRule.read(tmp_path / "rule.json")


@pytest.mark.parametrize(
    ("rule", "options", "words"),
    [
        (KRule(skip_from=((0, (1.0,) * 6),)), {}, r"layers \[0\] given, expected memory layers of the model: \[1, 2\]"),
        (KRule(skip_from=((1, (1.0,) * 4),)), {}, "4 numbers for layer 1 given, expected one for each of its 6"),
        (KRule(skip_from=((1, (1.0,) * 6),), window=99), {}, "a window of 99 tokens, and the model has one of 16"),
        (KRule(skip_from=((1, (1.0,) * 6),)), {"balance_tokens": 100}, "balance_tokens None, and the model has 100"),
    ],
)
def test_a_rule_of_another_model_is_refused(rule: KRule, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        focused(retrieval="exact", k_rule=rule, **options)


def test_a_config_refuses_what_is_no_rule() -> None:
    with pytest.raises(ConfigError, match="expected a KRule"):
        FocusConfig(k_rule="rule.json")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is not a part of a k rule"):
        FocusConfig.from_dict({"k_rule": {"layers": []}})


def test_a_gated_model_is_refused() -> None:
    from longfocus import attach
    from longfocus.model.gates import add_gates

    model = tiny("llama")
    add_gates(model, MEMORY_LAYERS, 0.0)
    with pytest.raises(ConfigError, match="joins its memory by gates"):
        attach(model, FocusConfig(memory_layers=MEMORY_LAYERS, window=WINDOW, retrieval="exact", k_rule=NEUTRAL))
