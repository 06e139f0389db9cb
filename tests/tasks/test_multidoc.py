"""One of many documents: only the right one answers, and subjects with known answers get what they must.

python -m pytest tests/tasks/test_multidoc.py
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from longfocus.data import retrieval_text
from longfocus.errors import InputError
from longfocus.evaluation.draw import figure
from longfocus.evaluation.run import evaluate
from longfocus.subjects.contract import Completion, Prompt
from longfocus.tasks.contract import Example, Row
from longfocus.tasks.haystack import Haystack
from longfocus.tasks.multidoc import FACT, QUESTION, MultiDoc, MultiDocOptions, _apart
from longfocus.tasks.texts import Texts
from tests.small_tokenizers import tokenizer
from tests.subjects.tiny_subjects import focused, text

WORDS = tokenizer("byte_level")
STATED = re.compile(r"Every guidebook puts the village of (\w+) on Lake (\w+)\.")
ASKED = re.compile(r"puts the village of (\w+) on Lake\Z")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    folder = tmp_path_factory.mktemp("texts")
    for number, words in enumerate((8000, 9000)):
        (folder / f"{number}.txt").write_text(text(words, number), "utf-8")
    return Texts(folder, {"books": str(folder), "code": str(folder / "1.txt")})


def task(found: Texts, **changes: Any) -> MultiDoc:
    options = {"documents": [2, 4, 8], "tokens": 120, "samples": 6, "texts": ["books"]}
    return MultiDoc(MultiDocOptions(**{**options, **changes}), found)


Mass = Callable[[Prompt], tuple[float, ...] | None]


class Reader:
    """A subject whose answers are made from the documents and the question."""

    name, longest, tokenizer = "reader", None, WORDS

    def __init__(self, answer: Callable[[Prompt], str], mass: Mass = lambda prompt: None) -> None:
        self.answer, self.mass = answer, mass

    def about(self) -> dict[str, Any]:
        return {"name": self.name}

    def complete(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, stop: str | None = None, mass: bool = False
    ) -> Iterator[Completion]:
        assert mass, "attention is asked for"
        for prompt in prompts:
            said = self.answer(prompt)
            found = re.search(stop, said) if stop else None
            yield Completion(said[: found.end()] if found else said, 1, 0.0, None, self.mass(prompt))


def facts(prompt: Prompt) -> dict[str, str]:
    return {village: lake for document in prompt.documents for village, lake in STATED.findall(document)}


def asked(prompt: Prompt) -> str:
    found = ASKED.search(prompt.text)
    assert found is not None
    return found[1]


def rows(made: MultiDoc, subject: Any) -> dict[int, Row]:
    samples = [s for point in made.points(subject) for s in made.samples(subject, point, frozenset())]
    return {int(row.values["documents"]): row for row in made.rows(samples)}


def examples(made: MultiDoc, documents: int, part: str = "books") -> list[Example]:
    subject = Reader(lambda prompt: "")
    (point,) = (p for p in made.points(subject) if p.values == {"documents": documents, "text": part})
    return list(made.examples(subject, point))


def test_each_document_holds_one_fact_and_the_question_is_about_one_of_them(texts: Texts) -> None:
    for count in (2, 4, 8):
        for example in examples(task(texts), count):
            prompt = example.prompt
            assert len(prompt.documents) == len(set(prompt.documents)) == len(set(prompt.names)) == count
            for document in prompt.documents:
                assert len(STATED.findall(document)) == 1
                assert 60 < len(WORDS(document)["input_ids"]) <= 124, "as long as was asked for"
                assert any(STATED.fullmatch(line) for line in document.splitlines()), "on a line of its own"
            known = facts(prompt)
            assert len(known) == len(set(known.values())) == count, "all names differ"
            assert known[asked(prompt)] == example.expected["lake"]
            assert {*example.expected["others"], example.expected["lake"]} == set(known.values())
            shown = prompt.documents[example.expected["place"]]
            assert example.expected["lake"] in shown
            words = [word.lower() for pair in known.items() for word in pair]
            assert not any(a != b and a in b for a in words for b in words), "no name is in another"
            said = prompt.joined.lower()
            assert all(said.count(lake.lower()) == 1 for lake in known.values())
            assert prompt.documents[0] not in prompt.text


def test_larger_numbers_add_documents_to_the_same_questions(texts: Texts) -> None:
    made = task(texts)
    by_count = [examples(made, count) for count in (2, 4, 8)]
    for fewer, more in pairwise(by_count):
        for one, other in zip(fewer, more, strict=True):
            assert one.id == other.id and one.prompt.text == other.prompt.text
            assert set(one.prompt.documents) < set(other.prompt.documents)
    sets: dict[int, list[Example]] = {}
    for example in by_count[2]:
        sets.setdefault(example.expected["set"], []).append(example)
    assert [len(found) for found in sets.values()] == [2, 2, 2]
    for one, other in sets.values():
        assert one.prompt.documents == other.prompt.documents, "read once for both"
        assert one.prompt.text != other.prompt.text
    places = {e.expected["place"] for e in examples(task(texts, samples=60), 8)}
    assert len(places) >= 6, "the right document stands anywhere"


def test_documents_of_a_set_have_no_text_in_common(tmp_path: Path) -> None:
    lines = "".join(f"line {number} of the text\n" for number in range(1500))
    (tmp_path / "t.txt").write_text(lines, "utf-8")
    made = task(Texts(tmp_path, {"books": str(tmp_path / "t.txt")}), documents=[6], samples=2)
    (example, _) = examples(made, 6)
    seen = [line for document in example.prompt.documents for line in document.splitlines() if "guidebook" not in line]
    assert len(seen) == len(set(seen))
    stack = Haystack(WORDS, made.texts, "books")
    with pytest.raises(InputError, match="too short for 2 different pieces"):
        _apart(stack, 200, [(0, len(stack.text))], random.Random(0))


def test_who_reads_the_right_document_is_right(texts: Texts) -> None:
    words = ("{lake}", "{lake}.", "It lies on the beautiful Lake {lake}, they say.", "LAKE {lake}?")
    for form in words:

        def right(prompt: Prompt, form: str = form) -> str:
            lake = facts(prompt)[asked(prompt)]
            return " " + form.format(lake=lake.upper() if "LAKE" in form else lake)

        found = rows(task(texts), Reader(right))
        assert all(row.estimates["right"].value == 1.0 for row in found.values()), form
        assert all(row.estimates["another's"].value == 0.0 for row in found.values()), form


def test_who_repeats_everything_is_not_right(texts: Texts) -> None:
    def echo(prompt: Prompt) -> str:
        return " ".join(prompt.joined.split())

    for row in rows(task(texts), Reader(echo)).values():
        assert row.estimates["right"].value == 0.0
        assert row.estimates["another's"].value == 1.0


def test_who_says_nothing_or_something_else_is_wrong_and_not_distracted(texts: Texts) -> None:
    for said in ("", "I do not know.", "Lake Ontario"):
        for row in rows(task(texts), Reader(lambda prompt, said=said: said)).values():
            assert row.estimates["right"].value == row.estimates["another's"].value == 0.0
    made = task(texts)
    for example in examples(made, 4):
        again = Completion(example.prompt.text, 1, 0.0)
        assert made.score(example, again) == {"right": 0.0, "another's": 0.0}, "the question holds no lake"


def test_guessing_one_of_the_lakes_scores_chance(texts: Texts) -> None:
    rng = random.Random("guess")
    found = rows(task(texts, samples=120), Reader(lambda prompt: rng.choice(sorted(facts(prompt).values()))))
    for count, row in found.items():
        assert row.samples == 120
        assert row.chance == {"right": 1 / count, "another's": 1 - 1 / count, "mass": 1 / count}
        for name in ("right", "another's"):
            assert row.estimates[name].low <= row.chance[name] <= row.estimates[name].high, (count, name)
        assert row.estimates["right"].value + row.estimates["another's"].value == pytest.approx(1)


def test_mass_is_that_of_the_right_document(texts: Texts) -> None:
    def on_right(prompt: Prompt) -> tuple[float, ...]:
        names = [asked(prompt) in document for document in prompt.documents]
        return tuple(0.7 if name else 0.3 / (len(names) - 1) for name in names)

    for row in rows(task(texts), Reader(lambda prompt: "", on_right)).values():
        assert row.estimates["mass"].value == pytest.approx(0.7)
    for row in rows(task(texts), Reader(lambda prompt: "")).values():
        assert "mass" not in row.estimates, "an endpoint tells none"


def test_a_random_model_spreads_its_attention_evenly_and_knows_nothing(texts: Texts) -> None:
    made = task(texts, documents=[2, 6], samples=2, tokens=60)
    for count, row in rows(made, focused()).items():
        assert row.estimates["right"].value == 0.0
        assert 0.3 / count < row.estimates["mass"].value < min(1.0, 2.5 / count)


def test_a_stopped_run_goes_on_with_the_same_questions(texts: Texts, tmp_path: Path) -> None:
    def last(prompt: Prompt) -> str:
        return list(facts(prompt).values())[-1]

    subject = Reader(last)
    made = task(texts)
    whole = {p.key: list(made.samples(subject, p, frozenset())) for p in made.points(subject)}
    for point in task(texts).points(subject):
        kept = frozenset(sample.id for sample in whole[point.key][1::2])
        rest = list(task(texts).samples(subject, point, kept))
        assert rest == whole[point.key][0::2]
    results = evaluate(task(texts, texts=["books", "code"]), subject, tmp_path / "run")
    assert [axis.get_title() for axis in figure([results]).axes] == ["right"], "no mass was measured"
    both = evaluate(task(texts), Reader(last, lambda p: (1 / len(p.documents),) * len(p.documents)), tmp_path / "mass")
    assert [axis.get_title() for axis in figure([both]).axes] == ["right", "mass"], "and where it was, it is drawn too"
    assert [row.values["documents"] for row in results.rows] == [2, 4, 8] * 2
    assert examples(task(texts, seed=1), 2)[0].prompt != examples(task(texts), 2)[0].prompt


def test_texts_that_are_too_short_are_refused(texts: Texts) -> None:
    points = task(texts, documents=[2, 512], texts=["code"]).points(Reader(lambda prompt: ""))
    assert points[0].refused is None
    assert "too short for 512 different pieces of 120 tokens" in str(points[1].refused)
    with pytest.raises(InputError, match="arxiv"):
        task(Texts(Path("nowhere")), texts=["arxiv"]).points(Reader(lambda prompt: ""))


def test_the_wording_is_none_of_the_training_text_s() -> None:
    own = set(re.findall(r"[a-z]+", (FACT + QUESTION).lower())) - {"the", "of", "on", "which", "does", "every"}
    assert own == {"guidebook", "puts", "put", "village", "lake"}
    source = Path(retrieval_text.__file__).read_text("utf-8").lower()
    assert not [word for word in own if re.search(rf"\b{word}\b", source)]
