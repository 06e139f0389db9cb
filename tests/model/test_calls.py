"""The arguments and results of `forward`, and the life of a cache: what transformers' users count on.

python -m pytest tests/model/test_calls.py
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep

from longfocus.errors import UnsupportedCallError
from longfocus.model.cache import FocusCache
from tests.model.helpers import FLOAT32, REENCODED, WINDOWS, by_force, feed, focused, planned, unless_refused
from tests.models import MODELS, PAD, assert_close, logits, tiny, tokens

EVERY = pytest.mark.parametrize("name", MODELS)


# -- logits_to_keep --------------------------------------------------------------------------------------

KEPT: list[Any] = [
    0,
    1,
    5,
    30,
    80,
    torch.tensor([79]),
    torch.tensor([2, 23, 24, 70]),
    torch.tensor([-1, -60]),
    torch.tensor([70, 2, 30]),
    torch.tensor([5, 5, 70]),
    torch.tensor([[0, 50], [79, 3]]),
]


@pytest.mark.parametrize("kept", KEPT, ids=lambda k: str(k.tolist()) if isinstance(k, Tensor) else str(k))
def test_logits_to_keep_means_what_it_means_in_transformers(kept: int | Tensor) -> None:
    """Over four windows: the same columns, in the order asked for."""
    model = focused("llama_9_heads")
    ids = tokens(2, 80)
    assert_close(
        logits(model, ids, logits_to_keep=kept), slice_logits_to_keep(logits(model, ids), kept), WINDOWS, "logits"
    )


def test_logits_to_keep_as_a_mask_means_what_it_means_in_transformers_or_is_refused() -> None:
    model = focused("llama_9_heads")
    ids = tokens(2, 80)
    kept = torch.rand(2, 80) < 0.3
    found = unless_refused(lambda: logits(model, ids, logits_to_keep=kept), "logits_to_keep")
    if found is not None:
        assert_close(found, logits(model, ids)[kept], WINDOWS, "logits")


@pytest.mark.parametrize("kept", [1, 7, 60])
def test_logits_to_keep_counts_columns_in_a_padded_batch(kept: int) -> None:
    model = focused("llama_9_heads")
    ids = tokens(2, 80)
    mask = torch.ones_like(ids)
    mask[0, :33] = 0
    everything = logits(model, ids, attention_mask=mask)
    assert_close(logits(model, ids, attention_mask=mask, logits_to_keep=kept), everything[:, -kept:], WINDOWS, "logits")


def test_logits_that_are_not_asked_for_are_not_computed() -> None:
    """CASES 33: the head never sees more columns than one window has."""
    model = focused("llama_9_heads")
    seen: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    logits(model, tokens(1, 500), logits_to_keep=1)
    hook.remove()
    assert max(seen) == 1


# -- loss, hidden states, embeddings ---------------------------------------------------------------------


@EVERY
def test_loss_of_a_text_in_one_window_is_that_of_transformers(name: str) -> None:
    ids = tokens(2, 20)
    labels = ids.clone()
    labels[0, :7] = -100
    plain, model = tiny(name), focused(name, dtype=torch.float32)
    for options in ({}, {"num_items_in_batch": torch.tensor(50)}):
        with torch.no_grad():
            expected = plain(ids, labels=labels, **options).loss
            found = model(ids, labels=labels, **options)
        assert expected > 1
        assert_close(found.loss, expected, FLOAT32, f"loss with {list(options)}")
        assert_close(found.logits, logits(plain, ids), FLOAT32, "logits beside the loss")


def test_loss_over_windows_is_the_mean_over_all_tokens() -> None:
    """Also of the first token of each window, which is predicted from the window before."""
    ids = tokens(2, 90)
    model = focused("llama_9_heads")
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    likely = [
        torch.log_softmax(by_force("llama_9_heads", row, planned(model, 90))[:-1], -1).gather(1, row[1:, None])
        for row in ids
    ]
    assert_close(loss.double(), -torch.cat(likely).mean(), WINDOWS, "loss")


@EVERY
def test_hidden_states_in_one_window_are_those_of_transformers(name: str) -> None:
    ids = tokens(2, 20)
    with torch.no_grad():
        expected = tiny(name)(ids, output_hidden_states=True).hidden_states
        found = focused(name, dtype=torch.float32)(ids, output_hidden_states=True).hidden_states
    assert len(found) == len(expected)
    for number, (state, right) in enumerate(zip(found, expected, strict=True)):
        assert_close(state, right, FLOAT32, f"hidden state {number}")


def test_hidden_states_over_windows_belong_to_the_logits() -> None:
    model = focused("llama_9_heads")
    ids = tokens(2, 80)
    mask = torch.ones_like(ids)
    mask[0, :33] = 0
    with torch.no_grad():
        found = model(ids, attention_mask=mask, output_hidden_states=True, logits_to_keep=1)
        from_states = model.lm_head(found.hidden_states[-1])
    assert [state.shape for state in found.hidden_states] == [(2, 80, 72)] * 5
    expected = logits(model, ids, attention_mask=mask)
    assert_close(from_states[mask == 1], expected[mask == 1], WINDOWS, "logits")
    embedded = model.model.embed_tokens(ids)
    assert torch.equal(found.hidden_states[0][mask == 1], embedded[mask == 1])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_embeddings_instead_of_ids(name: str) -> None:
    model = focused(name)
    ids = tokens(2, 80)
    mask = torch.ones_like(ids)
    mask[0, :33] = 0
    embedded = model.get_input_embeddings()(ids)
    with torch.no_grad():
        found = model(inputs_embeds=embedded, attention_mask=mask).logits
    assert_close(found, logits(model, ids, attention_mask=mask), WINDOWS, "logits")


def test_results_have_the_form_of_transformers() -> None:
    model = focused("llama")
    ids = tokens(1, 60)
    with torch.no_grad():
        found = model(ids, labels=ids)
        as_tuple = model(ids, labels=ids, return_dict=False)
        assert model(ids, use_cache=False).cache is None
    assert isinstance(found, CausalLMOutputWithPast)
    assert isinstance(found.cache, FocusCache)
    assert found.hidden_states is None
    assert torch.equal(found["loss"], found.loss), "Trainer reads it by name"
    assert list(found.keys()) == ["loss", "logits", "cache"]
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], found.loss)
    assert torch.equal(as_tuple[1], found.logits)


def test_use_cache_changes_no_logits() -> None:
    model = focused("llama_9_heads")
    for count in (20, 60):
        ids = tokens(1, count)
        assert torch.equal(logits(model, ids, use_cache=False), logits(model, ids, use_cache=True)), f"{count} tokens"


def test_position_ids_that_say_what_the_mask_says_are_accepted() -> None:
    model = focused("llama_9_heads")
    ids = tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, ids, attention_mask=mask, position_ids=positions)
    assert torch.equal(found, logits(model, ids, attention_mask=mask))


# -- the cache -------------------------------------------------------------------------------------------


def test_crop_is_as_if_the_tokens_had_never_been_fed() -> None:
    """CASES 14: three tokens back, then others; with and without a memory before them."""
    model = focused("llama_9_heads")
    for before in (10, 60):
        ids, wrong = tokens(1, before + 8), tokens(1, 3, seed=9)
        cache = model.new_cache()
        feed(model, ids[:, :before], before, cache=cache)
        feed(model, wrong, 3, cache=cache)
        cache.crop(-3)
        assert cache.get_seq_length() == before
        found = feed(model, ids[:, before:], 8, cache=cache)
        assert_close(found, feed(model, ids, before, 8)[:, before:], WINDOWS, f"after {before} tokens")


def test_crop_works_in_a_padded_batch_whose_rows_end_together() -> None:
    model = focused("llama_9_heads")
    ids = tokens(3, 66)
    mask = torch.ones_like(ids)
    mask[0, :52], mask[1, :33] = 0, 0
    cache = model.new_cache(last_window=12)
    logits(model, ids[:, :60], attention_mask=mask[:, :60], cache=cache)
    cache.crop(-5)
    found = logits(model, ids[:, 55:], attention_mask=mask, cache=cache)
    for row in range(3):
        text = ids[row, mask[row] == 1].unsqueeze(0)
        alone = model.new_cache(last_window=12)
        logits(model, text[:, :-6], cache=alone)
        alone.crop(-5)
        assert_close(found[row : row + 1], logits(model, text[:, -11:], cache=alone), WINDOWS, f"row {row}")


@pytest.mark.parametrize("fed", [1, 3, 13])
def test_crop_after_the_window_slid_is_exact_or_refused(fed: int) -> None:
    """Feeding moved older tokens to memory; taking the new ones back must not leave them there in silence."""
    model = focused("llama_9_heads")
    ids = tokens(1, 32)
    cache = model.new_cache()
    feed(model, ids[:, :24], 24, cache=cache)
    feed(model, tokens(1, fed, seed=9), *[1] * fed, cache=cache)
    assert cache.own_tokens > 0
    if not unless_refused(lambda: cache.crop(-fed) is None, "memory"):
        return
    found = feed(model, ids[:, 24:], *[1] * 8, cache=cache)
    assert_close(found, feed(model, ids, 24, *[1] * 8)[:, 24:], REENCODED, "logits")


def test_crop_of_what_is_in_memory_is_refused() -> None:
    model = focused("llama_9_heads")
    cache = model.new_cache()
    feed(model, tokens(1, 60), 60, cache=cache)
    assert cache.local_tokens.tolist() == [12]
    with pytest.raises(
        UnsupportedCallError, match=r"13 tokens asked back, but only 12 are still local.*moved to memory"
    ):
        cache.crop(-13)
    with pytest.raises(UnsupportedCallError, match="crop: 3 given; write -3"):
        cache.crop(3)
    cache.crop(0)
    assert cache.seen == 60


def test_a_copy_of_a_cache_goes_its_own_way() -> None:
    model = focused("llama_9_heads")
    ids = tokens(1, 110)
    other = tokens(1, 50, seed=8)
    cache = model.new_cache()
    feed(model, ids[:, :60], 60, cache=cache)
    copied = copy.deepcopy(cache)
    first = feed(model, other, *[1] * 50, cache=cache)
    second = feed(model, ids[:, 60:], *[1] * 50, cache=copied)
    for what, found, text in (
        ("the original", first, torch.cat((ids[:, :60], other), 1)),
        ("the copy", second, ids),
    ):
        expected = by_force("llama_9_heads", text[0], planned(model, 60, *[1] * 50))
        assert_close(found[0], expected[60:], REENCODED, what)


@pytest.mark.parametrize("start", [10, 60])
def test_rows_of_a_cache_can_be_reordered_and_repeated(start: int) -> None:
    model = focused("llama_9_heads")
    ids, more = tokens(3, start), tokens(4, 40, seed=4)
    cache = model.new_cache()
    feed(model, ids, start, cache=cache)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(2)
    found = feed(model, more, *[1] * 40, cache=cache)
    for row, origin in enumerate([2, 2, 1, 1]):
        text = torch.cat((ids[origin], more[row]))
        expected = by_force("llama_9_heads", text, planned(model, start, *[1] * 40))
        assert_close(found[row], expected[start:], REENCODED, f"row {row}")


def test_a_reset_cache_is_a_new_one() -> None:
    model = focused("llama_9_heads")
    cache = model.new_cache()
    feed(model, tokens(2, 60), 60, cache=cache)
    cache.reset()
    assert (cache.get_seq_length(), cache.rows, cache.own_tokens) == (0, 0, 0)
    ids = tokens(1, 60, seed=2)
    assert torch.equal(feed(model, ids, 60, cache=cache), feed(model, ids, 60))


def test_sizes_of_a_cache() -> None:
    model = focused("llama_9_heads", overlap=5)
    cache = model.new_cache()
    assert (cache.rows, cache.get_seq_length(), cache.own_tokens) == (0, 0, 0)
    ids = tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    logits(model, ids, attention_mask=mask, cache=cache)
    assert cache.get_seq_length() == 60
    assert cache.own_tokens == 43, "24 + 19: then 17 tokens stay, and 5 of the stored ones beside them"
    assert cache.local_tokens.tolist() == [22, 20]


@pytest.mark.parametrize("fails_in", ["the first window", "a later window"])
def test_a_call_that_was_interrupted_leaves_the_cache_as_it_was(fails_in: str) -> None:
    """Ctrl-C while a text is read, then the same call again: no token is fed twice, none is lost."""
    model = focused("llama_9_heads")
    ids = tokens(1, 80)
    cache = model.new_cache()
    feed(model, ids[:, :10], 10, cache=cache)
    passes = 1 if fails_in == "the first window" else 2
    calls = 0

    def interrupt(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == passes:
            raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        feed(model, ids[:, 10:], 70, cache=cache)
    hook.remove()
    assert cache.get_seq_length() == 10
    found = feed(model, ids[:, 10:], 70, cache=cache)
    assert_close(found, feed(model, ids, 10, 70)[:, 10:], WINDOWS, "logits of the second try")


# -- what is refused -------------------------------------------------------------------------------------


def _jump(count: int) -> Tensor:
    positions = torch.arange(count)
    positions[count // 2 :] += 5
    return positions.unsqueeze(0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"output_attentions": True}, "output_attentions.*longfocus.analysis"),
    ({"cache": DynamicCache()}, "a DynamicCache given, expected a FocusCache.*new_cache"),
    ({"past_key_values": DynamicCache()}, "a DynamicCache given, expected a FocusCache.*new_cache"),
    ({"cache": ((torch.zeros(1), torch.zeros(1)),)}, "a tuple given, expected a FocusCache"),
    ({"position_ids": _jump(60)}, "jump or repeat.*leave position_ids out.*rows of a batch"),
    ({"position_ids": torch.arange(60).unsqueeze(0) % 30}, "jump or repeat"),
    ({"attention_mask": torch.ones(1, 59)}, r"shape \(1, 59\) given, expected \(1, 60\)"),
    ({"attention_mask": torch.ones(2, 60)}, r"shape \(2, 60\) given, expected \(1, 60\)"),
    ({"attention_mask": torch.ones(1, 1, 60, 60)}, "shape .* given, expected"),
    ({"attention_mask": torch.zeros(1, 60)}, "every token is masked"),
    ({"inputs_embeds": torch.zeros(1, 60, 48)}, "input_ids or inputs_embeds, one of them"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda o: next(iter(o)) if isinstance(o, dict) else None)
def test_what_windows_cannot_honour_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedCallError, match=f"(?s){message}"):
        logits(focused("llama"), tokens(1, 60), **options)


def test_nothing_to_read_is_refused() -> None:
    model = focused("llama")
    with pytest.raises(UnsupportedCallError, match="input is empty; give at least one token"):
        logits(model, torch.empty(1, 0, dtype=torch.long))
    with pytest.raises(UnsupportedCallError, match="input_ids or inputs_embeds"):
        model()


def test_another_number_of_rows_than_the_cache_holds_is_refused() -> None:
    model = focused("llama")
    cache = model.new_cache()
    logits(model, tokens(2, 5), cache=cache)
    with pytest.raises(UnsupportedCallError, match="3 rows given, but the cache holds 2"):
        logits(model, tokens(3, 5), cache=cache)


def test_a_changed_attention_implementation_is_refused_and_can_be_set_back() -> None:
    model = focused("llama")
    ids = tokens(1, 60)
    expected = logits(model, ids)
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedCallError, match=r"changed to 'sdpa'.*set_attn_implementation\('longfocus'\)"):
        logits(model, ids)
    model.set_attn_implementation("longfocus")
    assert torch.equal(logits(model, ids), expected)


def test_a_refused_call_leaves_the_cache_as_it_was() -> None:
    model = focused("llama_9_heads")
    ids = tokens(1, 70)
    cache = model.new_cache()
    feed(model, ids[:, :60], 60, cache=cache)
    for options in ({"output_attentions": True}, {"position_ids": _jump(10)}, {"attention_mask": torch.ones(1, 3)}):
        with pytest.raises(UnsupportedCallError):
            logits(model, ids[:, 60:], cache=cache, **options)
    found = feed(model, ids[:, 60:], 10, cache=cache)
    assert_close(found, feed(model, ids, 60, 10)[:, 60:], WINDOWS, "logits")


def test_padding_tokens_are_not_special_without_a_mask() -> None:
    """Only the mask says what is padding: token 0 of a text is a token."""
    model = focused("llama_9_heads")
    ids = tokens(1, 60)
    ids[0, ::7] = PAD
    assert_close(logits(model, ids)[0], by_force("llama_9_heads", ids[0], planned(model, 60)), WINDOWS, "logits")
