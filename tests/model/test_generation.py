"""`generate` on a focused model: the same tokens as plain transformers inside the window, as brute force beyond it,
in every batch; and everything around it (beams, sampling, streamers, several turns).

    python -m pytest tests/model/test_generation.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, TextStreamer
from transformers.generation.streamers import BaseStreamer

from longfocus.errors import UnsupportedCallError
from tests.model.brute_force import decode
from tests.model.helpers import REENCODED, by_force, focused, planned
from tests.models import MODELS, PAD, assert_close, tiny, tokens

EVERY = pytest.mark.parametrize("name", MODELS)


def _generate(model: Any, ids: Tensor, new: int, **kwargs: Any) -> Any:
    options = {"do_sample": False, "max_new_tokens": new, "pad_token_id": PAD, **kwargs}
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **options)


def _left_padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(len(row) for row in rows)
    ids, mask = torch.full((len(rows), longest), PAD), torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, longest - len(row) :], mask[number, longest - len(row) :] = row, 1
    return ids, mask


# -- which tokens come -----------------------------------------------------------------------------------


@EVERY
def test_greedy_inside_the_window_equals_plain_transformers(name: str) -> None:
    ids = tokens(2, 10)
    expected = _generate(tiny(name), ids, 14)
    assert torch.equal(_generate(focused(name, dtype=torch.float32), ids, 14), expected)
    assert len(set(expected[:, 10:].flatten().tolist())) > 5, "the text is not one repeated token"


@EVERY
def test_greedy_that_overflows_many_times_is_what_brute_force_would_choose(name: str) -> None:
    """Every generated token is the largest of the brute-force logits before it: 60 tokens read, 30 generated."""
    ids = tokens(1, 60)
    text = _generate(focused(name), ids, 30)
    assert text.shape == (1, 90)
    expected = by_force(name, text[0, :-1], decode([24, 24, 12], 29, window=24, keep=12))
    assert torch.equal(text[0, 60:], expected[59:].argmax(-1))


def test_scores_that_generate_returns_are_those_of_brute_force() -> None:
    ids = tokens(1, 60)
    found = _generate(focused("llama_9_heads"), ids, 30, output_logits=True, return_dict_in_generate=True)
    expected = by_force("llama_9_heads", found.sequences[0, :-1], decode([24, 24, 12], 29, window=24, keep=12))
    assert_close(torch.cat(found.logits), expected[59:], REENCODED, "logits")
    assert found.cache.own_tokens + found.cache.local_tokens.tolist()[0] == 89


def test_last_window_of_the_call_is_how_much_of_the_prompt_stays_local() -> None:
    ids = tokens(1, 60)
    for word in ("last_window", "last_context_length"):  # ours, and the one of the authors' code
        text = _generate(focused("llama_9_heads"), ids, 20, **{word: 5})
        expected = by_force("llama_9_heads", text[0, :-1], decode([24, 24, 7, 5], 19, window=24, keep=5))
        assert torch.equal(text[0, 60:], expected[59:].argmax(-1)), word


@pytest.mark.parametrize("name", ["llama_9_heads", "gpt_neox"])
def test_greedy_is_the_same_in_batches_of_1_2_4_and_8(name: str) -> None:
    """CASES 2: prompts of 13 to 16 tokens; the window of 16 overflows several times, in each row at its own time."""
    prompts = [tokens(1, 13 + number % 4, seed=number)[0] for number in range(8)]
    model = focused(name, dtype=torch.float32, window=16)
    found: dict[int, list[list[int]]] = {}
    for size in (1, 2, 4, 8):
        found[size] = []
        for first in range(0, 8, size):
            ids, mask = _left_padded(prompts[first : first + size])
            found[size] += _generate(model, ids, 20, attention_mask=mask)[:, ids.shape[1] :].tolist()
    for size in (2, 4, 8):
        assert found[size] == found[1], f"batches of {size} differ from single prompts"
    assert len({tuple(row) for row in found[1]}) == 8


@pytest.mark.parametrize("lengths", [(5, 17, 60, 20), (3, 3, 9, 1)], ids=str)
def test_padding_on_the_right_gives_the_same_tokens_behind_the_same_prompt(lengths: tuple[int, ...]) -> None:
    prompts = [tokens(1, count, seed=count)[0] for count in lengths]
    model = focused("llama_9_heads", dtype=torch.float32)
    left, left_mask = _left_padded(prompts)
    expected = _generate(model, left, 12, attention_mask=left_mask)[:, left.shape[1] :]
    right, right_mask = left.clone(), left_mask.flip(1)
    for row, prompt in enumerate(prompts):
        right[row] = torch.cat((prompt, torch.full((left.shape[1] - len(prompt),), PAD)))
    found = _generate(model, right, 12, attention_mask=right_mask)
    assert torch.equal(found[:, : left.shape[1]], right), "the prompt comes back as it was given"
    assert torch.equal(found[:, left.shape[1] :], expected)


def test_a_row_that_is_all_padding_disturbs_no_other() -> None:
    prompts = [tokens(1, count, seed=count)[0] for count in (30, 4)]
    model = focused("llama_9_heads", dtype=torch.float32)
    ids, mask = _left_padded([*prompts, torch.empty(0, dtype=torch.long)])
    found = _generate(model, ids, 30, attention_mask=mask)
    for row, prompt in enumerate(prompts):
        alone = _generate(model, prompt.unsqueeze(0), 30)[0, len(prompt) :]
        assert torch.equal(found[row, 30:], alone), f"row {row}"


# -- ways of generating ----------------------------------------------------------------------------------


def test_beams_inside_the_window_equal_plain_transformers() -> None:
    ids = tokens(2, 8)
    options = {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    expected = _generate(tiny("llama"), ids, 12, **options)
    found = _generate(focused("llama", dtype=torch.float32), ids, 12, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(found.sequences_scores, expected.sequences_scores, 1e-4, "scores of the sequences")


@pytest.mark.parametrize("start", [10, 60])
def test_each_beam_has_its_own_memory(start: int) -> None:
    """The score of each returned beam is the sum of its own tokens' log-probabilities by brute force.

    If rows of memory did not follow their beams, a beam would look back on another one's text.
    """
    ids = tokens(1, start)
    found = _generate(
        focused("llama_9_heads"),
        ids,
        40,
        num_beams=3,
        num_return_sequences=3,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    prompt = [10] if start == 10 else [24, 24, 12]
    assert len({tuple(row) for row in found.sequences.tolist()}) == 3
    for row in range(3):
        text = found.sequences[row]
        windows = decode(prompt, 39, window=24, keep=12)
        likely = torch.log_softmax(by_force("llama_9_heads", text[:-1], windows), -1)[start - 1 :]
        expected = likely.gather(1, text[start:, None]).sum()
        assert_close(found.sequences_scores[row], expected, REENCODED, f"score of beam {row}")


def test_sampling_with_a_seed_equals_plain_transformers_inside_the_window() -> None:
    ids = tokens(2, 8)
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "num_return_sequences": 3}
    torch.manual_seed(5)
    expected = _generate(tiny("llama"), ids, 12, **options)
    torch.manual_seed(5)
    assert torch.equal(_generate(focused("llama", dtype=torch.float32), ids, 12, **options), expected)


def test_sampling_beyond_the_window_is_decided_by_the_seed() -> None:
    model = focused("llama_9_heads", dtype=torch.float32)
    ids = tokens(1, 60)
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append(_generate(model, ids, 30, do_sample=True, num_return_sequences=3))
    assert found[0].shape == (3, 90)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert len({tuple(row) for row in found[0].tolist()}) == 3, "the returned sequences are different samples"


class _Listener(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_hears_the_prompt_and_each_token_once() -> None:
    ids = tokens(1, 60)
    listener = _Listener()
    text = _generate(focused("llama_9_heads"), ids, 20, streamer=listener)
    assert listener.heard == [ids[0].tolist(), *[[token] for token in text[0, 60:].tolist()]]
    assert listener.ended == 1


class _Numbers:
    """A tokenizer whose words are the numbers of the tokens."""

    def decode(self, ids: Sequence[int], **kwargs: Any) -> str:
        return "".join(f"{int(number)} " for number in ids)


def test_text_streamer_prints_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    ids = tokens(1, 60)
    streamer = TextStreamer(_Numbers(), skip_prompt=True)  # type: ignore[arg-type]
    text = _generate(focused("llama_9_heads"), ids, 20, streamer=streamer)
    assert [int(word) for word in capsys.readouterr().out.split()] == text[0, 60:].tolist()


# -- several turns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 5])
def test_a_second_call_continues_from_the_cache(overlap: int) -> None:
    """The whole sequence is passed; only what the cache has not seen is fed."""
    model = focused("llama_9_heads", overlap=overlap)
    cache = model.new_cache()
    first = _generate(model, tokens(1, 60), 15, cache=cache)
    assert cache.seen == 74, "the last generated token has not been fed"
    whole = torch.cat((first, tokens(1, 9, seed=4)), 1)
    second = _generate(model, whole, 15, cache=cache)
    assert torch.equal(second[:, :84], whole)
    windows = planned(model, 60, *[1] * 14, 10, *[1] * 14)
    expected = by_force("llama_9_heads", second[0, :-1], windows)
    assert torch.equal(second[0, 60:75], expected[59:74].argmax(-1))
    assert torch.equal(second[0, 84:], expected[83:].argmax(-1))


def test_a_cache_that_forward_filled_continues_in_generate() -> None:
    model = focused("llama_9_heads")
    cache = model.new_cache()
    ids = tokens(1, 70)
    with torch.no_grad():
        model(ids[:, :60], cache=cache, logits_to_keep=1)
    text = _generate(model, ids, 10, cache=cache)
    expected = by_force("llama_9_heads", text[0, :-1], planned(model, 60, 10, *[1] * 9))
    assert torch.equal(text[0, 70:], expected[69:].argmax(-1))


def test_two_calls_without_a_cache_know_nothing_of_each_other() -> None:
    model = focused("llama_9_heads", dtype=torch.float32)
    ids = tokens(2, 60)
    first = _generate(model, ids[:1], 20)
    _generate(model, ids[1:], 20)
    assert torch.equal(_generate(model, ids[:1], 20), first)


@pytest.mark.parametrize("select_rows", [False, True])
def test_a_cache_made_in_inference_mode_serves_outside_of_it(select_rows: bool) -> None:
    """`torch.inference_mode` is how people speed up a call; what it wrote must stay usable."""
    model = focused("llama_9_heads")
    ids = tokens(1, 60)
    with torch.inference_mode():
        cache = model.new_cache()
        model(ids, cache=cache)
        if select_rows:
            cache.batch_repeat_interleave(3)
    more = tokens(1, 40, seed=3)
    with torch.no_grad():
        steps = [model(more[:, at : at + 1].repeat(cache.rows, 1), cache=cache).logits[-1] for at in range(40)]
    expected = by_force("llama_9_heads", torch.cat((ids, more), 1)[0], planned(model, 60, *[1] * 40))
    assert_close(torch.cat(steps), expected[60:], REENCODED, "logits")


def test_generating_in_inference_mode_gives_the_same_tokens() -> None:
    model = focused("llama_9_heads", dtype=torch.float32)
    ids = tokens(1, 60)
    for beams in (1, 3):
        expected = _generate(model, ids, 30, num_beams=beams)
        with torch.inference_mode():
            assert torch.equal(_generate(model, ids, 30, num_beams=beams), expected), f"{beams} beams"


def test_a_model_config_without_cache_as_training_leaves_it_changes_nothing() -> None:
    model = focused("llama_9_heads", dtype=torch.float32)
    ids = tokens(1, 60)
    expected = _generate(model, ids, 20)
    model.config.use_cache = False
    assert torch.equal(_generate(model, ids, 20), expected)


# -- what is refused -------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"assistant_model": "another model"}, "assistant_model cannot be used.*moved to memory"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens cannot be used.*moved to memory"),
    ({"assistant_early_exit": 1}, "assistant_early_exit cannot be used"),
    ({"cache_implementation": "static"}, "cache_implementation cannot be used.*new_cache"),
    ({"use_cache": False}, "use_cache=False.*window and memory are the cache"),
    ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions.*longfocus.analysis"),
    ({"cache": DynamicCache()}, "DynamicCache given, expected a FocusCache.*new_cache"),
    ({"past_key_values": DynamicCache()}, "DynamicCache given, expected a FocusCache.*new_cache"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[next(iter(options)) for options, _ in REFUSED])
def test_what_windows_cannot_honour_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedCallError, match=f"(?s){message}"):
        _generate(focused("llama"), tokens(1, 5), 3, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens cannot be used"),
        ({"cache_implementation": "static"}, "cache_implementation cannot be used"),
        ({"use_cache": False}, "use_cache=False"),
    ],
    ids=["prompt_lookup_num_tokens", "cache_implementation", "use_cache"],
)
def test_the_same_in_a_generation_config_is_refused(options: dict[str, Any], message: str) -> None:
    """Unnoticed, use_cache=False would feed the whole text again at every token, and give other tokens."""
    config = GenerationConfig(max_new_tokens=3, pad_token_id=PAD, **options)
    with pytest.raises(UnsupportedCallError, match=message):
        focused("llama").generate(tokens(1, 5), generation_config=config)


@pytest.mark.parametrize(
    "options", [{"cache_implementation": "hybrid"}, {"use_cache": False}], ids=["hybrid", "no cache"]
)
def test_a_cache_setting_that_a_checkpoint_ships_is_overridden(options: dict[str, Any]) -> None:
    """Gemma checkpoints name a cache for long texts, and those saved after training have theirs switched off."""
    model = focused("llama")
    expected = _generate(model, tokens(1, 40), 6)
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    assert torch.equal(_generate(model, tokens(1, 40), 6), expected)
    assert {name: getattr(model.generation_config, name) for name in options} == options


def test_embeddings_with_padding_on_the_right_are_refused() -> None:
    model = focused("llama")
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    embeddings = model.get_input_embeddings()(tokens(2, 4))
    with pytest.raises(UnsupportedCallError, match="pad on the left"):
        model.generate(inputs_embeds=embeddings, attention_mask=mask, max_new_tokens=2, pad_token_id=PAD)


def test_a_cache_that_saw_the_whole_text_already_is_refused() -> None:
    model = focused("llama")
    cache = model.new_cache()
    ids = tokens(1, 10)
    with torch.no_grad():
        model(ids, cache=cache)
    with pytest.raises(UnsupportedCallError, match="the cache holds 10 tokens but only 10 were given"):
        _generate(model, ids, 3, cache=cache)
