"""Pass-key retrieval: prompts are what they say, answers count for the number and not for its wording.

python -m pytest tests/tasks/test_passkey.py
"""

from __future__ import annotations

import math
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from longfocus.evaluation.run import evaluate
from longfocus.subjects.contract import Completion, Prompt
from longfocus.tasks.contract import Example, Row
from longfocus.tasks.passkey import FILLER, LONGEST_ANSWER, OPENING, QUESTION, Passkey, PasskeyOptions
from longfocus.tasks.texts import Texts
from tests.small_tokenizers import KINDS
from tests.subjects.tiny_subjects import focused
from tests.tasks.fakes import Answers
from tests.tasks.small_sets import small_sets

KEY = re.compile(r"The pass key is (\d{5})\. Remember it\. (\d{5}) is the pass key\.")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts(small_sets(tmp_path_factory.mktemp("sets")))


def made(texts: Texts, **options: Any) -> Passkey:
    return Passkey(PasskeyOptions(**{"lengths": [300, 900], "samples": 12, **options}), texts)


def examples(task: Passkey, subject: Any) -> Iterator[tuple[dict[str, Any], Example]]:
    for point in task.points(subject):
        for example in task.examples(subject, point):
            yield dict(point.values), example


# -- prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_the_length_it_says_and_one_key(texts: Texts, kind: str) -> None:
    subject = Answers(lambda prompt: "", kind=kind)
    sizes: dict[int, list[int]] = {}
    for values, example in examples(made(texts), subject):
        text = example.prompt.text
        assert text.startswith(OPENING) and text.endswith("\n" + QUESTION)
        (found,) = KEY.finditer(text)
        assert found[1] == found[2] == example.expected["key"]
        assert found.start() == example.expected["key_at"]
        sizes.setdefault(int(values["tokens"]), []).append(len(subject.tokenizer(text)["input_ids"]))
        if values["haystack"] == "filler":
            rest = text[len(OPENING) : -len(QUESTION)].replace(found[0], "").split()
            assert rest == FILLER.split() * (len(rest) // len(FILLER.split()))
    for tokens, found_sizes in sizes.items():
        assert max(found_sizes) <= tokens
        assert min(found_sizes) > 0.6 * tokens


def test_places_are_spread_and_told_in_order(texts: Texts) -> None:
    depths: dict[str, list[float]] = {}
    for values, example in examples(made(texts, samples=60, lengths=[900]), Answers(lambda prompt: "")):
        text = example.prompt.text
        depths.setdefault(str(values["haystack"]), []).append(example.expected["depth"])
        at = (example.expected["key_at"] - len(OPENING)) / (len(text) - len(OPENING) - len(QUESTION))
        assert at == pytest.approx(example.expected["depth"], abs=0.15)
    for found in depths.values():
        assert found == sorted(found), "prompts that begin alike stand side by side"
        assert found[0] < 0.15 and found[-1] > 0.85 and 0.35 < sum(found) / len(found) < 0.65


def test_chosen_places_make_a_heat_map(texts: Texts) -> None:
    task = made(texts, depths=[0, 0.5, 1], samples=3, lengths=[2000])
    assert task.axes == ("tokens", "depth", "haystack") and task.heat
    for values, example in examples(task, Answers(lambda prompt: "")):
        assert example.expected["depth"] == pytest.approx(float(values["depth"]), abs=0.2)
        if values["depth"] == 0:
            assert example.expected["key_at"] == len(OPENING)
    (row, *_) = evaluate_in(task, Answers(lambda prompt: ""), texts)
    assert row.notes == {}, "thirds say nothing where places were chosen"


def test_keys_are_any_five_digits_and_follow_the_seed(texts: Texts) -> None:
    def keys(**options: Any) -> list[str]:
        return [e.expected["key"] for _, e in examples(made(texts, samples=40, **options), Answers(lambda prompt: ""))]

    found = keys()
    assert found == keys() != keys(seed=1)
    assert all(10000 <= int(key) <= 99999 for key in found)
    assert len(set(found)) > 0.95 * len(found) / 2, "the same keys in both haystacks, else different ones"
    assert set(keys(lengths=[300])) < set(found), "other lengths change no prompt"


# -- scores ------------------------------------------------------------------------------------------------


def score(answer: str, key: str = "12345", **more: Any) -> dict[str, float]:
    example = Example("0", Prompt("…"), {"key": key, "depth": 0.5, "key_at": 100})
    return Passkey(PasskeyOptions(), Texts()).score(example, Completion(answer, 9, 0.1, **more))


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (" 12345", 1.0),
        (" 12345.", 1.0),
        ("\n\nSure! I remember that number: it was **12345**, as you said.", 1.0),
        ("12,345", 1.0),
        (" the pass key is 12345", 1.0),
        ("", 0.0),
        (" 12346", 0.0),
        (" 1234", 0.0),
        (" one two three four five", 0.0),
        (" 1, 2, 3, 4, 5", 0.0),
        ("x" * LONGEST_ANSWER + "12345", 0.0),
    ],
)
def test_the_number_counts_and_not_its_wording(answer: str, right: float) -> None:
    assert score(answer) == {"right": right}


def test_beyond_the_window_means_that_all_of_the_fact_lay_in_memory() -> None:
    end = 100 + len("The pass key is 12345. Remember it. 12345 is the pass key.")
    assert score("12345", local_from=end) == {"right": 1.0, "right beyond the window": 1.0}
    assert score("", local_from=end + 1) == {"right": 0.0, "right beyond the window": 0.0}
    for place in (end - 1, 100, 0, None):
        assert score("12345", local_from=place) == {"right": 1.0}


# -- known outcomes ----------------------------------------------------------------------------------------


def evaluate_in(task: Passkey, subject: Any, texts: Texts) -> Sequence[Row]:
    with tempfile.TemporaryDirectory() as folder:
        return evaluate(task, subject, Path(folder)).rows


def knows(prompt: str) -> str:
    found = KEY.search(prompt)
    assert found is not None
    return f" {found[1]}."


def guesses(prompt: str) -> str:
    return f" {random.Random(prompt).randint(10000, 99999)}"


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        (knows, 1.0),
        (lambda prompt: prompt, 0.0),  # an echo of everything
        (lambda prompt: prompt[-len(QUESTION) :], 0.0),  # the last words again
        (lambda prompt: " the grass is green", 0.0),
        (guesses, 0.0),
        (lambda prompt: "" if int(knows(prompt)[1:6]) % 2 else knows(prompt), 0.5),
    ],
    ids=["knows", "echoes", "copies the end", "says the filler", "guesses", "knows half"],
)
def test_known_answerers_get_what_they_must(texts: Texts, answer: Callable[[str], str], share: float) -> None:
    for row in evaluate_in(made(texts, samples=40), Answers(answer), texts):
        found = row.estimates["right"]
        assert found.low <= share <= found.high
        assert abs(found.value - share) < 0.25
        assert row.chance["right"] == 1 / 90_000
        assert found.value > 0 or found.low <= 1 / 90_000
        thirds = [row.notes[name] for name in ("first third", "middle", "last third")]
        right, total = ([int(text.split(" of ")[n]) for text in thirds if text] for n in (0, 1))
        assert sum(total) == row.samples == 40
        assert sum(right) == round(found.value * 40)


def test_a_memory_sees_keys_beyond_its_window(texts: Texts) -> None:
    """A tiny random model answers none, and the table says how many lay beyond its window."""
    rows = evaluate_in(made(texts, lengths=[300], haystacks=["filler"], samples=6), focused(), texts)
    beyond = rows[0].estimates["right beyond the window"]
    assert rows[0].estimates["right"].value == beyond.value == 0.0
    assert not math.isnan(beyond.high)


def test_the_tokenizer_measures_and_not_the_characters(texts: Texts) -> None:
    sizes = {
        kind: len(next(examples(made(texts, lengths=[600]), Answers(lambda prompt: "", kind=kind)))[1].prompt.text)
        for kind in KINDS
    }
    assert len(set(sizes.values())) > 1
