"""Dictionary lookup finds what a model that looks up finds, and nothing where the memory is not seen.

python -m pytest tests/tasks/test_dictionary.py
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import longfocus.tasks.dictionary as module
from longfocus import FocusConfig, Memory, attach
from longfocus.data.dictionary import Dictionary, DictionaryFormat
from longfocus.errors import ConfigError, UnsuitableError
from longfocus.evaluation.run import evaluate
from longfocus.settings import validated
from longfocus.subjects.contract import BlockLosses
from longfocus.subjects.local import FocusedSubject, PlainModel
from longfocus.tasks.contract import Sample
from longfocus.tasks.dictionary import DictionaryLookup, DictionaryOptions, remember
from longfocus.tasks.texts import Texts
from tests.models import tiny
from tests.small_tokenizers import tokenizer
from tests.tasks.looking_up import LOOKING, lookup_model

SMALL: dict[str, Any] = {"symbols": 80, "key_tokens": 1, "value_tokens": 1, "window": 32}
FORM = DictionaryFormat(80, 1, 1, 0, 32)
WORDS = tokenizer("byte_level")  # for a subject's sake: no text is cut


def task(**changes: Any) -> DictionaryLookup:
    options: dict[str, Any] = {"lengths": [32, 64, 256], "samples": 24, **SMALL}
    return DictionaryLookup(DictionaryOptions(**{**options, **changes}), Texts())


def focused(layers: tuple[int, ...] = (LOOKING,), **options: Any) -> FocusedSubject:
    model = attach(lookup_model(FORM), FocusConfig(memory_layers=layers, window=32, **options))
    return FocusedSubject(model, WORDS, "looks up")


def measured(made: DictionaryLookup, subject: Any) -> list[list[Sample]]:
    return [list(made.samples(subject, point, frozenset())) for point in made.points(subject)]


def right(samples: Sequence[Sample]) -> float:
    return sum(sample.scores["right"] for sample in samples) / len(samples)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"retrieval": "exact", "k": 1},
        {"memory_dtype": "float16"},
        {"memory_positions": "none"},
        {"memory_positions": "absolute"},
        {"read_span": 8},
    ],
    ids=str,
)
def test_a_model_that_looks_up_finds_everything_in_its_memory(options: dict[str, Any]) -> None:
    for samples in measured(task(), focused(**options)):
        assert len(samples) == 24
        assert right(samples) == 1.0


def test_a_plain_model_that_looks_up_finds_everything_in_its_window() -> None:
    subject = PlainModel(lookup_model(FORM), WORDS, "plain")
    assert [right(samples) for samples in measured(task(), subject)] == [1.0, 1.0, 1.0]


def test_nothing_is_found_where_the_memory_is_not_seen_by_the_layer_that_looks() -> None:
    for samples in measured(task(), focused(layers=(1,))):
        assert right(samples) < 0.2


def test_a_random_model_finds_nothing() -> None:
    made = DictionaryLookup(DictionaryOptions(lengths=[96, 960], window=48, symbols=60, samples=100), Texts())
    model = attach(tiny("llama"), FocusConfig(memory_layers=(1, 2), window=48))
    for samples in measured(made, FocusedSubject(model, WORDS, "random")):
        assert right(samples) == 0.0
        tokens = sum(sample.scores["right tokens"] for sample in samples) / len(samples)
        assert tokens < 0.1, "one of 97 ids, about"


class Guesser:
    """A model that names the value of any definition that it sees."""

    name, longest, tokenizer = "guesses", None, WORDS

    def __init__(self) -> None:
        self.rng = random.Random("guess")

    def about(self) -> dict[str, Any]:
        return {"name": self.name}

    def complete(self, prompts: Any, **options: Any) -> Iterator[Any]:
        raise AssertionError("nothing is generated")

    def choice_losses(self, prompt: Any, choices: Any) -> list[float]:
        raise AssertionError("nothing is chosen")

    def block_losses(
        self, ids: Sequence[int], starts: Sequence[int], block: int, contexts: Sequence[int], before: Any = ()
    ) -> Iterator[BlockLosses]:
        (start,), (context,) = starts, contexts
        assert start == context and start + block == len(ids), "all definitions are seen, and the questions are last"
        defined = [ids[at + 3 : at + 4] for at in range(start) if ids[at] == FORM.define]
        hit = np.zeros(block - 1, dtype=bool)
        for at in range(0, block, FORM.record_tokens):
            assert ids[start + at] == FORM.ask
            hit[at + 2] = self.rng.choice(defined) == ids[start + at + 3 : start + at + 4]
        yield BlockLosses(start, context, np.zeros(block - 1), hit)


def test_guessing_scores_chance() -> None:
    made = task(lengths=[32, 64, 128], samples=400)
    for samples in measured(made, Guesser()):
        row = made.row(samples)
        assert len(samples) == 400
        assert row.estimates["right"].low < row.chance["right"] < row.estimates["right"].high, row


def test_chance_by_hand() -> None:
    found = DictionaryLookup(DictionaryOptions(), Texts()).chance({"tokens": 1024})
    assert found["right"] == pytest.approx(1 / 100 + 0.99 / 60**4)
    assert found["right tokens"] == pytest.approx(1 / 100 + 0.99 / 60)


def test_the_scores_of_some_questions_by_hand() -> None:
    """Value tokens are judged one by one: two of four right is half, and not right."""
    hits = np.array([[True, True, True, True], [True, False, True, False], [False] * 4])
    made = DictionaryLookup(DictionaryOptions(lengths=[256], samples=3), Texts())
    subject = PlainModel(tiny("llama"), WORDS, "plain")
    (point,) = made.points(subject)
    made._hits = lambda *given: hits  # type: ignore[method-assign]
    samples = list(made.samples(subject, point, frozenset()))
    assert [sample.scores for sample in samples] == [
        {"right": 1.0, "right tokens": 1.0},
        {"right": 0.0, "right tokens": 0.5},
        {"right": 0.0, "right tokens": 0.0},
    ]


def test_what_is_judged_are_the_answers_and_no_other_tokens() -> None:
    """A subject that hits exactly the tokens that a loss is taken on is all right; one that hits all others is all wrong."""

    class Hits(Guesser):
        def __init__(self, form: DictionaryFormat, turned: bool) -> None:
            super().__init__()
            self.form, self.turned = form, turned

        def block_losses(self, ids: Any, starts: Any, block: int, contexts: Any, before: Any = ()) -> Any:
            hit = np.zeros(block - 1, dtype=bool)
            for at in range(0, block, 10):
                hit[at + 5 : at + 9] = True  # tokens 6, 7, 8 and 9 of each question, predicted from the one before
            yield BlockLosses(starts[0], contexts[0], np.zeros(block - 1), ~hit if self.turned else hit)

    made = DictionaryLookup(DictionaryOptions(lengths=[256], samples=30, first_id=0), Texts())
    for turned, expected in ((False, 1.0), (True, 0.0)):
        (samples,) = measured(made, Hits(DictionaryFormat(), turned))
        assert len(samples) == 30
        assert all(set(sample.scores.values()) == {expected} for sample in samples)


def test_no_definition_is_asked_for_twice_and_small_memories_ask_several_dictionaries() -> None:
    by_point = measured(task(samples=20), focused())
    for samples, definitions in zip(by_point, (8, 16, 64), strict=True):
        asked = [(sample.details["dictionary"], sample.details["definition"]) for sample in samples]
        assert len(set(asked)) == len({sample.id for sample in samples}) == 20
        assert all(0 <= definition < definitions for _, definition in asked)
        assert {number for number, _ in asked} == set(range(-(-20 // definitions)))


def test_a_stopped_run_goes_on_with_the_same_questions(tmp_path: Path) -> None:
    whole = evaluate(task(), focused(), tmp_path / "whole")
    made = task()
    point = made.points(focused())[2]
    samples = list(made.samples(focused(), point, frozenset()))
    done = frozenset(sample.id for sample in samples[::3])
    again = list(task().samples(focused(), point, done))
    assert [s for s in samples if s.id not in done] == again
    assert list(task().samples(focused(), point, frozenset(s.id for s in samples))) == []
    assert [row.values for row in whole.rows] == [{"tokens": 32}, {"tokens": 64}, {"tokens": 256}]
    other = list(task(seed=1).samples(focused(), point, frozenset()))
    assert [s.id for s in other] != [s.id for s in samples]


def test_a_dictionary_is_read_once_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    inner = module.read_ids

    def counted(model: Any, ids: Any, memory: Any, name: str) -> Any:
        read.append(name)
        return inner(model, ids, memory, name)

    monkeypatch.setattr(module, "read_ids", counted)
    measured(task(samples=8), focused())
    assert read == [f"definitions {window}" for window in range(256 // 32)]


def test_a_memory_in_a_folder_is_filled_in_several_sittings(tmp_path: Path) -> None:
    subject = focused()
    made = Dictionary(FORM, "disk")
    in_ram = Memory(subject.model)
    remember(subject.model, in_ram, made, 9)
    with Memory.create(tmp_path / "memory", subject.model) as memory:
        remember(subject.model, memory, made, 4)
    with Memory.open(tmp_path / "memory", model=subject.model, writable=True) as memory:
        remember(subject.model, memory, made, 9)
        assert memory.tokens == in_ram.tokens == 288
        assert (memory.token_ids() == in_ram.token_ids()).all()
        asked = torch.from_numpy(made.questions(range(60, 68))).unsqueeze(0)
        with torch.no_grad():
            one, other = (subject.model(asked, memory=m).logits for m in (memory, in_ram))
        assert torch.equal(one, other)


def test_a_hit_is_the_likeliest_token() -> None:
    ids = torch.randint(0, 97, (96,), generator=torch.Generator().manual_seed(1)).tolist()
    plain = tiny("llama")
    with torch.no_grad():
        likeliest = plain(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    ids = ids[:64] + [likeliest[at - 1] if at % 3 == 0 else ids[at] for at in range(64, 96)]
    with torch.no_grad():
        logits = plain(torch.tensor([ids])).logits[0]
    expected = [int(logits[at - 1].argmax()) == ids[at] for at in range(65, 96)]
    assert 2 <= sum(expected) < 31
    (told,) = PlainModel(plain, WORDS, "plain").block_losses(ids, [64], 32, [64])
    assert told.hit is not None and told.hit.tolist() == expected
    attached = FocusedSubject(attach(tiny("llama"), FocusConfig(memory_layers=(1,), window=32)), WORDS, "focused")
    (seen,) = attached.block_losses(ids, [64], 32, [64])
    assert seen.hit is not None and seen.hit.shape == seen.nll.shape == (31,)
    assert all(seen.hit[seen.nll < np.log(2)]), "more than half of the probability"


def test_an_ordinary_vocabulary_is_used_from_a_thousand_on() -> None:
    large = PlainModel(tiny("llama", vocab_size=3000), WORDS, "large")
    small = PlainModel(tiny("llama"), WORDS, "small")
    assert DictionaryLookup(DictionaryOptions(), Texts())._form(large) == DictionaryFormat(first_id=1000)
    assert DictionaryLookup(DictionaryOptions(), Texts())._form(small) == DictionaryFormat(first_id=0)
    assert DictionaryLookup(DictionaryOptions(first_id=7), Texts())._form(large) == DictionaryFormat(first_id=7)


def test_what_cannot_be_measured_is_refused() -> None:
    small = PlainModel(tiny("llama"), WORDS, "small")
    with pytest.raises(UnsuitableError, match=r"has 97 ids; dictionary\.symbols=200"):
        task(symbols=200).points(small)
    narrow = FocusedSubject(attach(tiny("llama"), FocusConfig(memory_layers=(1,), window=24)), WORDS, "narrow")
    with pytest.raises(UnsuitableError, match="window of 24 tokens"):
        DictionaryLookup(DictionaryOptions(), Texts()).points(narrow)
    points = task(lengths=[256, 320, 352]).points(focused())
    assert [point.refused is None for point in points] == [True, True, False]
    assert "80 keys, and 88 are defined" in str(points[2].refused)
    with pytest.raises(ConfigError, match="options of dictionary: window: 9 given, but a record is 10 tokens"):
        validated(DictionaryOptions, {"window": 9}, "options of dictionary")
    # lengths are whole windows, and a plain model is asked up to where its positions go
    assert [point.tokens for point in task(lengths=[10, 33, 70]).points(focused())] == [64, 96]
