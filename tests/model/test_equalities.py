"""A focused model computes what DESIGN section 3 defines: equal to plain transformers where the memory is empty,
equal to brute force in every window, and to itself however the text is fed, batched or padded.

Every family of the table takes part (tests/models.py); brute force is tests/model/brute_force.py.

    python -m pytest tests/model/test_equalities.py
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longfocus.memory.context import MassRecorder, Part
from longfocus.model.attach import attach
from longfocus.model.attention_function import NAME, register
from longfocus.model.cache import FocusCache
from longfocus.model.families import FAMILIES as TABLE
from tests.model.brute_force import decode, read, walk
from tests.model.helpers import (
    FLOAT32,
    REENCODED,
    WINDOW,
    WINDOWS,
    by_force,
    feed,
    focused,
    planned,
    steps_of,
    unless_refused,
)
from tests.models import FAMILIES, MODELS, PAD, assert_close, logits, tiny, tokens

EVERY = pytest.mark.parametrize("name", MODELS)
AWKWARD = ["llama_9_heads", "qwen3", "gpt_neox", "llama_yarn", "gemma3_mixed", "gemma2"]
"""Uneven heads, norms of queries and keys, partial and scaled rotation, sliding layers, capped scores."""
SOME = pytest.mark.parametrize("name", AWKWARD)
POSITIONS = pytest.mark.parametrize("positions", ["first", "none", "absolute"])


def test_every_family_of_the_table_is_tested() -> None:
    assert {tiny(name).config.model_type for name in FAMILIES} == set(TABLE)


# -- the measuring instruments themselves ----------------------------------------------------------------


@EVERY
def test_brute_force_equals_transformers_in_one_window(name: str) -> None:
    ids = tokens(1, 40)
    assert_close(by_force(name, ids[0], read([40])), logits(tiny(name, dtype=torch.float64), ids)[0], WINDOWS, "logits")


@EVERY
def test_a_mistake_would_show(name: str) -> None:
    """Logits are large, and a memory that is forgotten, or encoded by one position off, changes them a lot."""
    ids = tokens(1, 60)[0]
    right = by_force(name, ids, read([24, 24, 12]))
    assert right.std() > 1
    last = right[48:]
    forgotten = by_force(name, ids, read([24, 24, 12]), memory_layers=())[48:]
    assert (forgotten - last).abs().mean() > 0.1
    one_less = by_force(name, ids, read([24, 23, 13]))[48:]
    assert (one_less - last).abs().mean() > 0.1
    assert (by_force(name, ids, read([24, 24, 12]), positions="absolute")[48:] - last).abs().mean() > 0.1


# -- the memory is empty ---------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("count", [1, 7, 24])
def test_empty_memory_equals_plain_transformers(name: str, count: int) -> None:
    ids = tokens(2, count)
    plain = logits(tiny(name), ids)
    assert plain.abs().max() > 1
    assert_close(logits(focused(name, dtype=torch.float32), ids), plain, FLOAT32, "logits")


@EVERY
@pytest.mark.parametrize("side", ["left", "right"])
def test_empty_memory_equals_plain_transformers_in_a_padded_batch(name: str, side: str) -> None:
    """Plain transformers alone, without padding, is what a padded row must give (CASES 1, 13)."""
    ids, mask = _padded([tokens(1, count, seed=count)[0] for count in (17, 24, 1, 23)], side)
    found = logits(focused(name, dtype=torch.float32), ids, attention_mask=mask)
    for row in range(4):
        alone = logits(tiny(name), ids[row, mask[row] == 1].unsqueeze(0))[0]
        assert_close(found[row, mask[row] == 1], alone, FLOAT32, f"logits of row {row}")


@pytest.mark.parametrize("memory_layers", [(0,), (3,), (0, 1, 2, 3)], ids=str)
def test_any_choice_of_memory_layers(memory_layers: tuple[int, ...]) -> None:
    ids = tokens(1, 60)
    model = focused("llama_9_heads", memory_layers=memory_layers)
    assert_close(
        logits(model, ids[:, :24]),
        logits(tiny("llama_9_heads", dtype=torch.float64), ids[:, :24]),
        WINDOWS,
        "one window",
    )
    expected = by_force("llama_9_heads", ids[0], planned(model, 60), memory_layers=memory_layers)
    assert_close(logits(model, ids)[0], expected, WINDOWS, "three windows")


def test_no_memory_layer_is_windows_alone_or_refused() -> None:
    """The plain model read window by window, unless the options are refused for what they are."""
    ids = tokens(1, 60)
    model = unless_refused(lambda: focused("llama_9_heads", memory_layers=()), "memory_layers")
    if model is None:
        return
    expected = by_force("llama_9_heads", ids[0], planned(model, 60), memory_layers=())
    assert_close(logits(model, ids)[0], expected, WINDOWS, "three windows")


# -- windows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 5])
@pytest.mark.parametrize(
    ("name", "positions"),
    [*[(name, "first") for name in MODELS], *[(name, other) for name in AWKWARD for other in ("none", "absolute")]],
)
def test_reading_in_windows_equals_brute_force(name: str, positions: str, overlap: int) -> None:
    """All logits of all windows, of a text read beside another."""
    ids = tokens(2, 90)
    model = focused(name, overlap=overlap, memory_positions=positions)
    expected = by_force(name, ids[1], planned(model, 90), positions=positions)
    assert_close(logits(model, ids)[1], expected, REENCODED if overlap else WINDOWS, "logits")


@pytest.mark.parametrize("overlap", [0, 5, 23])
@pytest.mark.parametrize("last_window", [None, 1, 24])
@pytest.mark.parametrize("count", [25, 49, 61])
def test_any_last_window_and_overlap_equals_brute_force(last_window: int | None, overlap: int, count: int) -> None:
    ids = tokens(1, count)
    model = focused("llama_9_heads", overlap=overlap, last_window=last_window)
    expected = by_force("llama_9_heads", ids[0], planned(model, count))
    assert_close(logits(model, ids)[0], expected, REENCODED if overlap else WINDOWS, "logits")


BALANCED: dict[str, dict[str, Any]] = {
    "replaced": {"window_first": "replaced"},
    "balanced": {"balance_tokens": 10},
    "both": {"window_first": "replaced", "balance_tokens": 10},
}


def _forced(options: dict[str, Any]) -> dict[str, Any]:
    return {"replaced": options.get("window_first") == "replaced", "balance": options.get("balance_tokens")}


@pytest.mark.parametrize("options", BALANCED.values(), ids=BALANCED)
@pytest.mark.parametrize("more", [{}, {"overlap": 5}, {"retrieval": "exact", "k": 7}, {"read_span": 30}], ids=str)
def test_window_firsts_and_balance_equal_brute_force(options: dict[str, Any], more: dict[str, Any]) -> None:
    """Of a text that is read in windows, then goes on token by token and slides; and they change the result."""
    ids = tokens(2, 100)
    model = focused("llama_9_heads", **options, **more)
    windows = planned(model, 90, *[1] * 10)
    asked = {"k": more.get("k"), "span": more.get("read_span")}
    expected = by_force("llama_9_heads", ids[1], windows, **asked, **_forced(options))
    found = feed(model, ids, 90, *[1] * 10)[1]
    assert_close(found, expected, REENCODED, "logits")
    assert (found - by_force("llama_9_heads", ids[1], windows, **asked)).abs().mean() > 0.01


@pytest.mark.parametrize("name", ["gemma2", "gpt_neox"])
@pytest.mark.parametrize("positions", ["first", "none", "absolute"])
def test_window_firsts_and_balance_in_other_families(name: str, positions: str) -> None:
    ids = tokens(1, 75)
    model = focused(name, memory_positions=positions, **BALANCED["both"])
    expected = by_force(name, ids[0], planned(model, 75), positions=positions, **_forced(BALANCED["both"]))
    assert_close(logits(model, ids)[0], expected, WINDOWS, "logits")


def test_a_window_of_one_token_is_not_replaced() -> None:
    """Nothing was beside it when it went to memory."""
    ids = tokens(1, 20)
    model = focused("llama_9_heads", **BALANCED["replaced"])
    cache = model.new_cache()
    with torch.no_grad():
        model.read_window(ids[:, :1], cache)
        found = model(ids[:, 1:], cache=cache, use_cache=True).logits[0]
    expected = by_force("llama_9_heads", ids[0], walk([(1, 0, True), (19, 0, False)]), replaced=True)
    assert_close(found, expected[1:], WINDOWS, "logits")


def test_last_window_of_a_cache_overrides_the_models() -> None:
    ids = tokens(1, 60)
    model = focused("llama_9_heads", last_window=20)
    found = logits(model, ids, cache=model.new_cache(last_window=9))
    assert_close(found[0], by_force("llama_9_heads", ids[0], read([24, 24, 3, 9])), WINDOWS, "logits")


@SOME
@pytest.mark.parametrize(("k", "overlap"), [(1, 0), (4, 5), (16, 0)])
def test_top_k_equals_brute_force(name: str, k: int, overlap: int) -> None:
    ids = tokens(1, 90)
    model = focused(name, overlap=overlap, retrieval="exact", k=k)
    expected = by_force(name, ids[0], planned(model, 90), k=k)
    assert_close(logits(model, ids)[0], expected, REENCODED if overlap else WINDOWS, "logits")
    assert (expected - by_force(name, ids[0], planned(model, 90))).abs().max() > 1e-3, "k makes a difference"


@SOME
def test_k_of_the_memorys_size_is_dense(name: str) -> None:
    ids = tokens(2, 90)
    dense = logits(focused(name), ids)
    # 90 tokens in windows of 24: never more than 78 are in memory
    assert_close(logits(focused(name, retrieval="exact", k=78), ids), dense, WINDOWS, "logits")


@pytest.mark.parametrize("retrieval", ["dense", "exact"])
@pytest.mark.parametrize("span", [0, 1, 10, 24, 30, 1000])
def test_read_span_limits_reading_and_not_the_last_window(span: int, retrieval: str) -> None:
    ids = tokens(1, 120)
    model = focused("llama_9_heads", read_span=span, retrieval=retrieval, k=6, overlap=3)
    k = 6 if retrieval == "exact" else None
    expected = by_force("llama_9_heads", ids[0], planned(model, 120), span=span, k=k)
    assert_close(logits(model, ids)[0], expected, REENCODED, "logits")


@pytest.mark.parametrize("memory_dtype", ["float32", "float16", "bfloat16"])
def test_memory_dtype_rounds_what_moves_to_memory_and_nothing_else(memory_dtype: str) -> None:
    ids = tokens(1, 90)
    model = focused("llama_9_heads", memory_dtype=memory_dtype)
    windows = planned(model, 90)
    expected = by_force("llama_9_heads", ids[0], windows, memory_dtype=getattr(torch, memory_dtype))
    assert_close(logits(model, ids)[0], expected, WINDOWS, "logits")
    if memory_dtype != "float32":
        assert (expected - by_force("llama_9_heads", ids[0], windows)).abs().max() > 10 * WINDOWS


@pytest.mark.parametrize("last_window", [None, 8, 30])
def test_the_authors_overflow_equals_brute_force(last_window: int | None) -> None:
    ids = tokens(1, 100)
    model = focused("llama_9_heads", overflow="all", last_window=last_window)
    feeds = (61, *[1] * 39)
    expected = by_force("llama_9_heads", ids[0], planned(model, *feeds))
    assert_close(feed(model, ids, *feeds)[0], expected, WINDOWS, "logits")


def test_three_windows_at_once_equal_three_calls_of_one_window() -> None:
    """CASES 39. Here each call fills the window, so the next one starts afresh."""
    ids = tokens(1, 72)
    once = logits(focused("llama_9_heads", last_window=24), ids)
    assert_close(feed(focused("llama_9_heads", last_window=24), ids, 48, 24), once, WINDOWS, "two calls")


# -- token by token --------------------------------------------------------------------------------------


@EVERY
def test_prefill_then_single_tokens_equals_one_pass(name: str) -> None:
    """A memory of 50 tokens, then 20 local ones: at once, one by one, and in uneven pieces."""
    ids = tokens(2, 70)
    model = focused(name, last_window=20)
    once = logits(model, ids)
    expected = by_force(name, ids[0], read([24, 24, 2, 20]))
    assert_close(once[0], expected, WINDOWS, "one pass")
    for pieces in ([1] * 10, [3, 1, 4, 2]):
        cache = model.new_cache(last_window=10)
        found = feed(model, ids, 60, *pieces, cache=cache)
        assert_close(found, once, WINDOWS, f"60 tokens, then {pieces}")
        assert cache.local_tokens.tolist() == [20, 20]
        assert cache.own_tokens == 50


@EVERY
def test_generation_that_overflows_many_times_equals_brute_force(name: str) -> None:
    """The recent half stays, the older half slides into memory, five times."""
    ids = tokens(1, 75)
    model = focused(name)
    cache = model.new_cache()
    found = feed(model, ids, 22, *[1] * 53, cache=cache)
    assert_close(found[0], by_force(name, ids[0], decode([22], 53, window=24, keep=12)), REENCODED, "logits")
    assert cache.own_tokens == 5 * 12
    assert cache.local_tokens.tolist() == [15]


@POSITIONS
@pytest.mark.parametrize(("last_window", "overlap"), [(1, 0), (5, 7), (23, 0)])
def test_sliding_after_a_long_prompt_equals_brute_force(positions: str, overlap: int, last_window: int) -> None:
    ids = tokens(1, 84)
    model = focused("llama_9_heads", memory_positions=positions, overlap=overlap, last_window=last_window)
    found = feed(model, ids, 57, *[1] * 27)
    windows = planned(model, 57, *[1] * 27)
    assert_close(found[0], by_force("llama_9_heads", ids[0], windows, positions=positions), REENCODED, "logits")


@SOME
def test_sliding_without_an_anchor_equals_brute_force(name: str) -> None:
    ids = tokens(1, 80)
    model = focused(name, overflow="slide")
    found = feed(model, ids, 22, *[1] * 58)[0]
    assert_close(found, by_force(name, ids[0], planned(model, 22, *[1] * 58)), REENCODED, "logits")


@SOME
@pytest.mark.parametrize("last_window", [None, 2, 1])
def test_an_anchored_window_equals_brute_force(name: str, last_window: int | None) -> None:
    """Its first token stays through five overflows, and goes when all of the window does."""
    ids = tokens(1, 124)
    model = focused(name, last_window=last_window, window_first="replaced")
    assert model.focus.config.anchored, "unless told otherwise"
    cache = model.new_cache()
    feeds = (22, *[1] * 53, 30, *[1] * 19)
    found = feed(model, ids, *feeds, cache=cache)[0]
    windows = planned(model, *feeds)
    assert_close(found, by_force(name, ids[0], windows, replaced=True), REENCODED, "logits")
    slid = by_force(name, ids[0], walk(steps_of(model, *feeds)), replaced=True)
    assert ((found - slid).abs().max() > 1e-3) == (last_window != 1), "it matters, unless nothing else would stay"
    assert cache.own_tokens + int(cache.local_tokens[0]) == 124


@SOME
@pytest.mark.parametrize("retrieval", ["dense", "exact"])
def test_a_conversation_of_uneven_turns_equals_brute_force(name: str, retrieval: str) -> None:
    ids = tokens(1, 150)
    turns = (10, 5, 40, 1, 1, 30, 12, 51)
    model = focused(name, overlap=4, retrieval=retrieval, k=9)
    k = 9 if retrieval == "exact" else None
    assert_close(feed(model, ids, *turns)[0], by_force(name, ids[0], planned(model, *turns), k=k), REENCODED, "logits")


# -- batches ---------------------------------------------------------------------------------------------


def _padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """ids and attention mask (B, longest)."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), PAD)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = row, 1
    return ids, mask


LENGTHS = (5, 40, 300, 1000)
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {"window": 40},
    "overlap": {"window": 40, "overlap": 9},
    "top-k": {"window": 40, "retrieval": "exact", "k": 8},
    "absolute": {"window": 40, "memory_positions": "absolute"},
    "read_span": {"window": 40, "read_span": 50},
    "balanced": {"window": 40, "window_first": "replaced", "balance_tokens": 9},
    "balanced within a span": {"window": 40, "read_span": 50, "balance_tokens": 9},
    "sliding": {"window": 40, "overflow": "slide"},
}


@pytest.mark.parametrize(("options", "side"), [*[(options, "left") for options in OPTIONS], ("dense", "right")])
def test_a_prompt_alone_equals_the_same_in_a_padded_batch(options: str, side: str) -> None:
    """CASES 1: rows that fit the window, cross it, and cross it 25 times; and a row that is all padding."""
    model = focused("llama_9_heads", dtype=torch.float32, **OPTIONS[options])
    texts = [tokens(1, count, seed=count)[0] for count in LENGTHS]
    ids, mask = _padded([*texts, torch.empty(0, dtype=torch.long)], side)
    found = logits(model, ids, attention_mask=mask)
    for row, text in enumerate(texts):
        assert_close(found[row, mask[row] == 1], logits(model, text.unsqueeze(0))[0], FLOAT32, f"{len(text)} tokens")
    assert (found[mask == 0] == 0).all(), "columns that hold padding have logits 0"


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3_mixed", "gpt_neox", "mistral_sliding", "phi3_partial"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_in_other_families(name: str, side: str) -> None:
    model = focused(name)
    texts = [tokens(1, count, seed=count)[0] for count in (5, 24, 25, 100)]
    ids, mask = _padded(texts, side)
    found = logits(model, ids, attention_mask=mask)
    for row, text in enumerate(texts):
        alone = by_force(name, text, planned(model, len(text)))
        assert_close(found[row, mask[row] == 1], alone, WINDOWS, f"{len(text)} tokens")


def test_padding_anywhere_is_as_if_it_were_not_there() -> None:
    model = focused("llama_9_heads", overlap=5)
    ids = tokens(3, 120)
    mask = (torch.rand(3, 120) < 0.6).long()
    found = logits(model, ids, attention_mask=mask)
    for row in range(3):
        alone = logits(model, ids[row, mask[row] == 1].unsqueeze(0))[0]
        assert_close(found[row, mask[row] == 1], alone, REENCODED, f"row {row}")


@pytest.mark.parametrize("options", OPTIONS)
def test_rows_of_a_padded_batch_slide_each_at_its_own_time(options: str) -> None:
    """A ragged prompt, 20 tokens one by one, a long second turn, and again single tokens; each row as if alone."""
    model = focused("llama_9_heads", **{**OPTIONS[options], "window": 24, "last_window": 7})
    lengths = (5, 24, 31, 90)
    turns = (*[1] * 20, 70, *[1] * 5)
    more = tokens(4, sum(turns), seed=3)
    texts = [tokens(1, count, seed=count)[0] for count in lengths]
    ids, mask = _padded(texts, "left")
    cache = model.new_cache()
    parts = [logits(model, ids, attention_mask=mask, cache=cache)]
    at = 0
    for count in turns:
        mask = torch.cat((mask, torch.ones(4, count, dtype=torch.long)), 1)
        parts.append(logits(model, more[:, at : at + count], attention_mask=mask, cache=cache))
        at += count
    together = torch.cat(parts, 1)
    for row, text in enumerate(texts):
        alone = feed(model, torch.cat((text, more[row])).unsqueeze(0), len(text), *turns)
        assert_close(together[row, mask[row] == 1], alone[0], REENCODED, f"row of {len(text)} tokens")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("retrieval", ["dense", "exact"])
def test_half_precision_has_no_nan_where_a_row_is_all_padding(dtype: torch.dtype, retrieval: str) -> None:
    """CASES 5: memory is present but empty for one row, and one row has no token at all."""
    model = focused("llama_9_heads", dtype=dtype, retrieval=retrieval)
    texts = [tokens(1, count, seed=count)[0] for count in (3, 100)]
    ids, mask = _padded([*texts, torch.empty(0, dtype=torch.long)], "left")
    cache = model.new_cache()
    assert logits(model, ids, attention_mask=mask, cache=cache).isfinite().all()
    for number in range(22):
        mask = torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), 1)
        step = logits(model, tokens(3, 1, seed=number), attention_mask=mask, cache=cache)
        assert step.isfinite().all(), f"step {number}"


# -- what sees what --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_9_heads", "gemma3_mixed"])
@pytest.mark.parametrize("overlap", [0, 5])
def test_a_future_token_changes_no_past_logits(name: str, overlap: int) -> None:
    ids = tokens(1, 80)
    model = focused(name, overlap=overlap)
    before = logits(model, ids)
    for place in (1, 23, 24, 47, 48, 79):
        changed = ids.clone()
        changed[0, place] = 3 + (ids[0, place] - 2) % 90
        assert changed[0, place] != ids[0, place]
        after = logits(model, changed)
        assert torch.equal(after[:, :place], before[:, :place]), f"token {place} changed an earlier one"
        assert not torch.equal(after[:, place], before[:, place]), f"token {place} does not see itself"


@pytest.mark.parametrize("name", ["llama_9_heads", "qwen3", "gpt_neox", "gemma3_mixed"])
@pytest.mark.parametrize("overlap", [0, 5])
def test_every_token_in_memory_and_window_reaches_the_last_logits(name: str, overlap: int) -> None:
    """CASES 43: change each token in turn; the last logits must change."""
    ids = tokens(1, 70).repeat(71, 1)
    for place in range(70):
        ids[place, place] = 3 + (ids[place, place] - 2) % 90
    last = logits(focused(name, overlap=overlap), ids, logits_to_keep=1)[:, 0]
    change = (last[:70] - last[70]).abs().amax(1)
    assert (change > 1e-7).all(), f"tokens without effect: {torch.nonzero(change <= 1e-7).flatten().tolist()}"


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox"])
def test_switched_on_by_name_alone_it_is_causal_and_masks_padding(name: str) -> None:
    """CASES 4: set_attn_implementation only, without attach."""
    register()
    plain = tiny(name)
    ids, mask = _padded([tokens(1, count, seed=count)[0] for count in (20, 13)], "left")
    expected = logits(plain, ids, attention_mask=mask)
    switched = tiny(name)
    switched.set_attn_implementation(NAME)
    found = logits(switched, ids, attention_mask=mask)
    assert_close(found[mask == 1], expected[mask == 1], FLOAT32, "logits")
    changed = ids.clone()
    changed[:, 15] = 3 + (ids[:, 15] - 2) % 90
    after = logits(switched, changed, attention_mask=mask)
    assert torch.equal(after[:, :15][mask[:, :15] == 1], found[:, :15][mask[:, :15] == 1])
    assert not torch.equal(after[:, 16], found[:, 16])


# -- one memory, many questions --------------------------------------------------------------------------


def _remembered(model: Any, ids: Tensor) -> SimpleNamespace:
    """A memory of one text of whole windows, as `FocusCache` asks for one: what of a store it may see."""
    store = model.focus.new_store()
    with torch.no_grad():
        model(torch.cat((ids, ids[:, :1]), 1), cache=FocusCache(model.focus, own=store, last_window=1))
    assert store.tokens == ids.shape[1]
    visible = Part(store, ranges=((0, store.tokens),))
    return SimpleNamespace(store=store, tokens=store.tokens, visible=lambda: visible, is_current=lambda _: True)


@SOME
def test_questions_to_one_memory_equal_brute_force_and_do_not_see_each_other(name: str) -> None:
    text, questions = tokens(1, 48), tokens(3, 30, seed=5)
    model = focused(name)
    memory: Any = _remembered(model, text)
    expected = [
        by_force(name, torch.cat((text[0], question)), decode([24, 24, 10], 20, window=24, keep=12))[48:]
        for question in questions
    ]
    together = feed(model, questions, 10, *[1] * 20, cache=FocusCache(model.focus, memory))
    for row in range(3):
        assert_close(together[row], expected[row], REENCODED, f"question {row} beside the others")
        alone = feed(model, questions[row : row + 1], 10, *[1] * 20, cache=FocusCache(model.focus, memory))
        assert_close(alone[0], expected[row], REENCODED, f"question {row} after the others")
    assert memory.store.tokens == 48


def test_mass_recorded_in_a_padded_batch_is_the_sum_of_the_single_ones() -> None:
    """Padding asks no question, so it gives no mass."""
    model = focused("llama_9_heads")
    memory: Any = _remembered(model, tokens(1, 48))
    texts = [tokens(1, count, seed=count)[0] for count in (3, 20)]
    ids, mask = _padded(texts, "left")

    def mass(ids: Tensor, mask: Tensor | None) -> dict[int, Tensor]:
        cache = FocusCache(model.focus, memory)
        cache.recorder = MassRecorder(48)
        logits(model, ids, attention_mask=mask, cache=cache)
        return cache.recorder.mass

    together = mass(ids, mask)
    single = [mass(text.unsqueeze(0), None) for text in texts]
    for layer in (1, 2):
        expected = sum(found[layer] for found in single)
        assert isinstance(expected, Tensor)
        assert 0.1 < float(expected.sum()) < 23
        assert_close(together[layer], expected, WINDOWS, f"mass of layer {layer}")


def test_attaching_at_another_dtype_than_the_config_says() -> None:
    """Rotary tables follow the weights, also those cast after loading."""
    ids = tokens(1, 60)
    model = attach(tiny("llama_yarn"), memory_layers=(1, 2), window=WINDOW).double()
    assert_close(logits(model, ids)[0], by_force("llama_yarn", ids[0], planned(model, 60)), 1e-4, "logits")
