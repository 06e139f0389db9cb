"""Scores of continuations: probabilities that add up, the same in batches and alone, and a memory beyond the window.

python -m pytest tests/subjects/test_scoring.py
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from longfocus import FocusConfig, attach
from longfocus.subjects import scoring
from longfocus.subjects.contract import Prompt
from longfocus.subjects.local import FocusedSubject, PlainModel
from longfocus.subjects.scoring import Scorer
from tests.models import MEMORY_LAYERS, VOCABULARY, logits, tiny, tokens
from tests.small_tokenizers import tokenizer

WINDOW, SMALL = 32, 16
NEAR = 2e-4
"""Sums of up to a hundred float32 log-probabilities, added in another order."""


def plain(family: str = "llama") -> Scorer:
    return Scorer(PlainModel(tiny(family), tokenizer("byte_level"), "plain"))


def focused(family: str = "llama", layers: tuple[int, ...] = MEMORY_LAYERS, **options: Any) -> Scorer:
    config = FocusConfig(**{"memory_layers": layers, "window": WINDOW, **options})
    return Scorer(FocusedSubject(attach(tiny(family), config), tokenizer("byte_level"), "focused"))


def some(count: int, seed: int = 1) -> list[int]:
    return [int(token) for token in tokens(1, count, seed)[0]]


def after(scorer: Scorer, context: list[int], rests: list[list[int]]) -> list[tuple[float, bool]]:
    with torch.no_grad():
        return [tuple(score) for score in scorer.after(context, rests)]


def by_hand(model: Any, context: list[int], rest: list[int]) -> tuple[float, bool]:
    """From the logits of one pass, in float64."""
    found = logits(model, torch.tensor([[*context, *rest]]))[0].double().log_softmax(-1)
    rows = found[len(context) - 1 : -1]
    return sum(float(row[token]) for row, token in zip(rows, rest, strict=True)), [
        int(t) for t in rows.argmax(-1)
    ] == rest


RESTS = [[5, 6, 7], [5, 6, 8], [9], [10], some(9)]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "mistral_sliding"])
@pytest.mark.parametrize("length", [1, 2, 20])
def test_a_plain_model_scores_what_one_pass_over_all_tokens_gives(family: str, length: int) -> None:
    context = some(length, 7)
    found = after(plain(family), context, RESTS)
    for (score, greedy), rest in zip(found, RESTS, strict=True):
        expected = by_hand(tiny(family), context, rest)
        assert score == pytest.approx(expected[0], abs=NEAR)
        assert greedy == expected[1]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("length", [1, 2, 20, WINDOW - 8])
def test_inside_one_window_a_memory_changes_nothing(family: str, length: int) -> None:
    context = some(length, 7)
    for mine, expected in zip(
        after(focused(family), context, RESTS), after(plain(family), context, RESTS), strict=True
    ):
        assert mine[0] == pytest.approx(expected[0], abs=NEAR)
        assert mine[1] == expected[1]


def test_greedy_is_said_of_what_greedy_decoding_gives_and_of_nothing_else() -> None:
    context, model = some(11, 3), tiny("llama")
    likely = list(context)
    for _ in range(6):
        likely.append(int(logits(model, torch.tensor([likely]))[0, -1].argmax()))
    right = likely[len(context) :]
    wrong_last, wrong_first = [*right[:-1], (right[-1] + 1) % VOCABULARY], [(right[0] + 1) % VOCABULARY, *right[1:]]
    for scorer in (plain(), focused()):
        assert [greedy for _, greedy in after(scorer, context, [right, right[:2], wrong_last, wrong_first])] == [
            True,
            True,
            False,
            False,
        ]


@pytest.mark.parametrize(
    "length", [5, WINDOW - 3, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW - 3, 3 * WINDOW]
)
def test_probabilities_of_continuations_of_unlike_lengths_add_up_on_either_side_of_the_window(length: int) -> None:
    """p(ab) summed over all b is p(a), which holds only where both saw the same context."""
    context, start = some(length, 5), [11, 12, 13]
    longer = [[*start, token] for token in range(VOCABULARY)]
    for scorer in (focused(), focused(overlap=8), focused(overflow="all"), plain()):
        scores = [score for score, _ in after(scorer, context, [start, *longer, some(6, 2)])]
        assert math.fsum(map(math.exp, scores[1:-1])) == pytest.approx(math.exp(scores[0]), rel=1e-4)


@pytest.mark.parametrize("length", [1, 10, WINDOW - 5, WINDOW + 7, 3 * WINDOW + 1])
def test_a_score_does_not_depend_on_what_is_scored_beside_it(length: int) -> None:
    context, scorer = some(length, 4), focused()
    rests = [some(count, count) for count in (1, 4, 12, 40)] + [[*some(4, 4)[:3], 9]]
    together = after(scorer, context, rests)
    for rest, found in zip(rests, together, strict=True):
        ((alone, greedy),) = after(scorer, context, [rest])
        assert found[0] == pytest.approx(alone, abs=NEAR)
        assert found[1] == greedy


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": 4},
        {"last_window": 1},
        {"last_window": SMALL - 1},
        {"overflow": "all"},
        {"overflow": "all", "last_window": 5},
        {"retrieval": "exact", "k": 5},
        {"memory_positions": "none"},
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [1, SMALL - 2, 2 * SMALL + 5])
def test_a_score_is_that_of_tokens_fed_one_by_one(options: dict[str, Any], length: int) -> None:
    """As `generate` feeds what it has chosen."""
    scorer, context, rest = focused(window=SMALL, **options), some(length, 3), some(SMALL + 9, 4)
    cache, expected, fed = scorer.model.new_cache(), 0.0, context
    with torch.no_grad():
        for token in rest:
            output = scorer.model(torch.tensor([fed]), cache=cache, use_cache=True, logits_to_keep=1)
            expected += float(output.logits[0, -1].double().log_softmax(-1)[token])
            fed = [token]
    assert cache.own_tokens >= SMALL // 2
    ((found, _),) = after(scorer, context, [rest])
    assert found == pytest.approx(expected, abs=NEAR)


def test_a_long_context_scores_as_the_subject_itself_scores_a_prompt() -> None:
    """`choice_losses` reads the prompt in its own way, with copies of the cache."""
    words = tokenizer("byte_level")
    model = attach(tiny("llama", vocab_size=400), FocusConfig(memory_layers=MEMORY_LAYERS, window=WINDOW))
    subject = FocusedSubject(model, words, "focused")
    prompt = "It was late; she said that it was neither the captain nor the mate. " * 5
    choices = ["It was", "Neither", "a"]
    expected = subject.choice_losses(Prompt(prompt), choices)
    context = list(words(prompt)["input_ids"])
    assert len(context) > 2 * WINDOW
    rests = [list(words(prompt + choice)["input_ids"])[len(context) :] for choice in choices]
    found = after(Scorer(subject), context, rests)
    assert [-score for score, _ in found] == pytest.approx(expected, abs=NEAR)


def test_what_left_the_window_counts_through_the_memory_and_only_through_it() -> None:
    context, rests = some(3 * WINDOW, 6), [[5, 6, 7], [9]]
    changed = [(context[0] + 1) % VOCABULARY, *context[1:]]
    near = [*context[:-2], (context[-2] + 1) % VOCABULARY, context[-1]]

    def differences(scorer: Scorer, other: list[int]) -> float:
        pairs = zip(after(scorer, context, rests), after(scorer, other, rests), strict=True)
        return max(abs(one - two) for (one, _), (two, _) in pairs)

    assert differences(focused(), changed) > 1e-3
    assert differences(focused(layers=()), changed) == 0
    assert differences(focused(layers=()), near) > 1e-3


def test_a_long_text_needs_no_logits_of_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some(5 * WINDOW + 5, 8)
    monkeypatch.setattr(scoring, "PIECE_LOGITS", 10 * VOCABULARY)
    for scorer, most in ((plain(), 10 + 1), (focused(), WINDOW - 1)):
        seen: list[int] = []
        inner = scorer.model.forward

        def forward(*args: Any, _inner: Any = inner, _seen: list[int] = seen, **kwargs: Any) -> Any:
            output = _inner(*args, **kwargs)
            _seen.append(output.logits.shape[1])
            return output

        scorer.model.forward = forward
        ((found, _),) = after(scorer, ids[:1], [ids[1:]])
        assert max(seen) == most
        if scorer.window is None:
            assert found == pytest.approx(by_hand(tiny("llama"), ids[:1], ids[1:])[0], abs=NEAR)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_a_batch_scores_as_each_text_alone(family: str) -> None:
    texts = [(some(length, length), [some(count, count)]) for length, count in ((1, 1), (20, 3), (7, 12), (16, 16))]
    texts.append((some(5, 9), [[4, 5, 6], [4, 5, 7], [4, 5, 8]]))
    for scorer in (plain(family), focused(family)):
        with torch.no_grad():
            together = scorer.batch(texts)
        for (context, rests), found in zip(texts, together, strict=True):
            alone = after(scorer, context, rests)
            assert [score for score, _ in found] == pytest.approx([score for score, _ in alone], abs=NEAR)
            assert [greedy for _, greedy in found] == [greedy for _, greedy in alone]
