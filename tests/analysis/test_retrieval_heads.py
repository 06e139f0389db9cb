"""The measure of copying heads: what it sums, and that it names the head that was built to copy.

python -m pytest tests/analysis/test_retrieval_heads.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longfocus import FocusConfig, attach
from longfocus.analysis.retrieval_heads import (
    Probe,
    measure,
    narrow_layers,
    propose,
    rank,
    text_probes,
    token_probes,
)
from longfocus.errors import ConfigError, InputError, LongfocusError, UnsupportedCallError, UnsupportedModelError
from tests.analysis.copying import HEADS, LAYERS, copying_model
from tests.models import MODELS, VOCABULARY, tiny, tokens
from tests.small_tokenizers import KINDS, talking, tokenizer

WORDS = 48
"""Vocabulary of the model that was built to copy."""


@pytest.mark.parametrize(("previous", "copying"), [((0, 1), (2, 3)), ((1, 2), (3, 0)), ((0, 0), (1, 1))])
def test_it_names_the_head_that_was_built_to_copy(previous: tuple[int, int], copying: tuple[int, int]) -> None:
    model = copying_model(WORDS, previous=previous, copying=copying)
    measured = measure(model, token_probes(WORDS, 4, tokens=80))
    best = rank(measured.scores)[0]
    assert (best.layer, best.head) == copying
    assert best.score > 0.95
    others = measured.scores.clone()
    others[copying] = 0
    assert others.max() < 0.05, "all other heads look everywhere alike, or one token back"
    assert measured.accuracy > 0.97, "the head's reading is what the model says next (the first token has two sources)"
    assert propose(measured.scores, 4) == (copying[0],)
    assert measured.scores.shape == (LAYERS, HEADS)


def test_the_head_that_was_built_to_copy_is_found_by_text_too() -> None:
    words = talking()
    model = copying_model(len(words), previous=(0, 1), copying=(2, 3))
    measured = measure(model, text_probes(words, 2, tokens=500))
    best = rank(measured.scores)[0]
    assert (best.layer, best.head) == (2, 3)
    # a byte of a text stands in many places, and this head sees one token back only
    assert best.score > 2 * rank(measured.scores)[1].score


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_the_mean_of_the_attention_maps(name: str) -> None:
    model: Any = tiny(name)
    probes = [
        Probe(tuple(tokens(1, 50, seed=seed)[0].tolist()), (20, 30, 44), (3, 19 + seed, 44)) for seed in (1, 2, 3)
    ]
    before = model.config._attn_implementation
    measured = measure(model, probes)
    assert model.config._attn_implementation == before
    eager: Any = tiny(name)
    eager.set_attn_implementation("eager")
    expected = torch.zeros_like(measured.scores)
    with torch.no_grad():
        for probe in probes:
            maps = eager(torch.tensor([probe.ids]), output_attentions=True).attentions
            for layer, attention in enumerate(maps):
                for query, source in zip(probe.queries, probe.sources, strict=True):
                    expected[layer] += attention[0, :, query, source].double() / 9
    assert expected.max() > 0.05
    assert (measured.scores - expected).abs().max() < 1e-6


def test_accuracy_is_that_of_the_model_itself() -> None:
    model = tiny("llama")
    ids = tokens(1, 30)
    with torch.no_grad():
        said = model(ids).logits[0].argmax(-1)
    ids[0, 11] = said[10]
    ids[0, 21] = said[20] = (said[20] + 1) % VOCABULARY
    with torch.no_grad():
        said = model(ids).logits[0].argmax(-1)
    expected = float((said[[10, 20]] == ids[0, [11, 21]]).float().mean())
    measured = measure(model, [Probe(tuple(ids[0].tolist()), (10, 20), (2, 3))])
    assert (measured.accuracy, measured.answer_tokens, measured.prompts) == (expected, 2, 1)


def test_the_model_is_left_as_it_was() -> None:
    model: Any = tiny("llama")
    model.train()
    ids = tokens(1, 30)
    before = model(ids).logits
    seen: list[int] = []
    measure(model, token_probes(VOCABULARY, 3, tokens=20), seen.append)
    assert seen == [1, 2, 3]
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(model(ids).logits, before)


def test_it_is_left_so_after_an_error_too() -> None:
    model: Any = tiny("llama")

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(model, token_probes(VOCABULARY, 3, tokens=20), stop)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())


def test_what_cannot_be_measured_is_refused() -> None:
    probes = token_probes(VOCABULARY, 1, tokens=20)
    focused = attach(tiny("llama"), FocusConfig(memory_layers=(1,), window=24))
    with pytest.raises(UnsupportedCallError, match="attached"):
        measure(focused, probes)
    assert focused.focus.config.layers == (1,)
    short = tiny("llama", max_position_embeddings=16)
    with pytest.raises(ConfigError, match="20 tokens given, expected at most the 16"):
        measure(short, probes)
    import transformers

    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=50))
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        measure(other, probes)
    assert issubclass(UnsupportedCallError, LongfocusError)


# -- prompts -----------------------------------------------------------------------------------------------


def test_token_prompts_repeat() -> None:
    for probe in token_probes(WORDS, 3, tokens=40, without=(0, 1)):
        assert len(probe.ids) == 40
        assert probe.ids[:20] == probe.ids[20:]
        assert len(set(probe.ids)) == 20
        assert not {0, 1} & set(probe.ids)
        assert probe.queries == tuple(range(20, 39))
        assert [probe.ids[query + 1] for query in probe.queries] == [probe.ids[source] for source in probe.sources]
        assert probe.sources == tuple(range(1, 20))
    few = token_probes(4, 1, tokens=40)[0]
    assert len(few.ids) == 40 and set(few.ids) <= set(range(4))
    assert token_probes(WORDS, 2, seed=5) == token_probes(WORDS, 2, seed=5) != token_probes(WORDS, 2, seed=6)


@pytest.mark.parametrize("kind", KINDS)
def test_text_prompts_ask_for_facts_that_they_told(kind: str) -> None:
    words = tokenizer(kind)
    made = text_probes(words, 3, tokens=1200)
    assert text_probes(words, 3, tokens=1200) == made
    for probe in made:
        assert len(probe.ids) > 1000
        assert [probe.ids[query + 1] for query in probe.queries] == [probe.ids[source] for source in probe.sources]
        assert all(source < query for query, source in zip(probe.queries, probe.sources, strict=True))
        if kind not in ("byte_level", "digits"):  # the others do not give a text back as it was
            continue
        text = words.decode(list(probe.ids))
        assert text.count("Question: What is the") == 3
        sources = words.decode([probe.ids[source] for source in probe.sources]).replace(" ", "")
        assert sources == "".join(part.partition(" is ")[2].partition(".")[0] for part in text.split("Answer:")[1:])
        assert "pass key" not in text


def test_a_tokenizer_that_does_not_tell_where_tokens_start_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(InputError, match="fast tokenizer"):
        text_probes(Slow(), 1)


# -- proposals ---------------------------------------------------------------------------------------------

SCORES = torch.tensor([[0.1, 0.3, 0.0], [0.9, 0.2, 0.8], [0.05, 0.0, 0.04], [0.5, 0.5, 0.1], [0.0, 0.0, 0.6]])


def test_layers_are_ranked_by_their_best_head() -> None:
    found = [
        (entry.layer, entry.head, round(entry.score, 3), entry.second_head, round(entry.second_score, 3))
        for entry in rank(SCORES)
    ]
    assert found == [
        (1, 0, 0.9, 2, 0.8),
        (4, 2, 0.6, 0, 0.0),
        (3, 0, 0.5, 1, 0.5),
        (0, 1, 0.3, 0, 0.1),
        (2, 0, 0.05, 2, 0.04),
    ]
    assert rank(torch.tensor([[0.5]]))[0].second_head is None


def test_the_best_layers_are_proposed_in_order_of_depth() -> None:
    assert propose(SCORES, 2) == (1, 4)
    assert propose(SCORES, 3) == (1, 3, 4)
    assert propose(SCORES, 9, threshold=0.2) == (0, 1, 3, 4)
    assert propose(SCORES, 9, threshold=0.95) == ()
    assert propose(SCORES, 2, without=(4,)) == (1, 3)


def test_layers_with_a_narrow_sliding_window_are_known() -> None:
    assert narrow_layers(tiny("gemma3_mixed"), 24) == (0, 3)
    assert narrow_layers(tiny("gemma3_mixed"), 12) == ()
    assert narrow_layers(tiny("llama"), 24) == ()
