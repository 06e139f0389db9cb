"""Made-up retrieval text: exact lengths, one document for one number, every recall answerable and far where it should be.

python -m pytest tests/data/test_retrieval_text.py
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfocus.data.retrieval_text import Fact, RetrievalText
from tests.small_tokenizers import tokenizer

TOKENIZER = tokenizer("byte_level")


def hay(rng: random.Random, characters: int) -> str:
    words = "the old road went down to the river and nobody had been there since the flood".split()
    return " ".join(rng.choice(words) for _ in range(characters // 4))[:characters]


class Told(RetrievalText):
    """Notes which facts are stated and asked for, in order, and how many words stand before."""

    def __init__(self, **options: Any) -> None:
        super().__init__(TOKENIZER, hay, seed=3, tokens=(900, 1200), **options)
        self.told: list[tuple[str, Fact]] = []

    def _statement(self, rng: random.Random, fact: Fact) -> str:
        self.told.append(("stated", fact))
        return super()._statement(rng, fact)

    def _recall(self, rng: random.Random, fact: Fact) -> str:
        self.told.append(("asked", fact))
        return super()._recall(rng, fact)


@given(number=st.integers(0, 10**6), tokens=st.tuples(st.integers(40, 700), st.integers(0, 700)))
def test_a_document_has_a_length_in_its_range_and_is_always_the_same(number: int, tokens: tuple[int, int]) -> None:
    span = (tokens[0], tokens[0] + tokens[1])
    ids = RetrievalText(TOKENIZER, hay, seed=1, tokens=span).document(number)
    assert span[0] <= len(ids) <= span[1]
    assert (ids == RetrievalText(TOKENIZER, hay, seed=1, tokens=span).document(number)).all()
    if len(ids) > 100:
        other = RetrievalText(TOKENIZER, hay, seed=2, tokens=span).document(number)
        assert len(other) != len(ids) or (other != ids).any()


@pytest.mark.parametrize("form", ["far", "lone", "mixed"])
def test_what_is_asked_was_stated_before(form: str) -> None:
    source = Told(far=float(form == "far"), lone=float(form == "lone"))
    for number in range(40):
        source.told.clear()
        source.text(random.Random(number), 1000)
        stated: list[Fact] = []
        for what, fact in source.told:
            if what == "stated":
                assert (fact.thing, fact.who) not in {(other.thing, other.who) for other in stated}
                stated.append(fact)
            else:
                assert fact in stated
        kinds = [what for what, _ in source.told]
        asked = [fact for what, fact in source.told if what == "asked"]
        if form != "mixed":
            assert kinds == sorted(kinds, reverse=True), "all statements come first"
            assert len(asked) == len(set(asked)), "each is asked for once"
        if form == "lone":
            assert 1 <= len(stated) <= 3 and sorted(map(repr, asked)) == sorted(map(repr, stated))


def test_far_recalls_stand_beyond_a_window() -> None:
    source = Told(far=1.0, lone=0.0, chat=0.0)
    apart = []
    for number in range(20):
        source.told.clear()
        text = source.text(random.Random(number), 3000)
        for fact in [fact for what, fact in source.told if what == "asked"]:
            apart.append(text.rfind(fact.value) - text.find(fact.value))
    assert len(apart) > 100
    assert sum(distance > 1500 for distance in apart) / len(apart) > 0.8  # characters: some 300 words


def test_the_wording_of_the_evaluation_is_not_in_it() -> None:
    source = RetrievalText(TOKENIZER, None, seed=0)
    for number in range(30):
        text = source.text(random.Random(number), 2000).lower()
        assert "pass key" not in text and "grass is green" not in text
