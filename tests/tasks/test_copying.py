"""Copying: prompts repeat what stood early, once; tokens count up to the first error; known answerers get what they must.

python -m pytest tests/tasks/test_copying.py
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from longfocus import FocusConfig, attach
from longfocus.errors import InputError
from longfocus.evaluation.run import evaluate
from longfocus.subjects.contract import Completion, Prompt
from longfocus.subjects.endpoint import Endpoint
from longfocus.subjects.local import FocusedSubject, PlainModel
from longfocus.tasks.contract import Row, Sample
from longfocus.tasks.copying import Copying, CopyingOptions, Repeat, words_of_one_token
from longfocus.tasks.texts import Texts
from tests.analysis.copying import copying_model
from tests.machine import data_folder
from tests.small_tokenizers import KINDS, tokenizer
from tests.subjects.tiny_subjects import focused, plain

_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


def book(lines: int, seed: int) -> str:
    """Lines of made-up words, none twice."""
    rng = random.Random(seed)

    def word() -> str:
        return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 3)))

    return "".join(f"  {word()} {word()}, {word()} {word()} {word()}.\n"[2 * (n % 7 > 0) :] for n in range(lines))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "book.txt").write_text(book(800, 0), "utf-8")
    (folder / "two lines.txt").write_text("One line.\nAnother one.\n" * 300, "utf-8")
    return Texts(folder, {"books": str(folder / "book.txt"), "code": str(folder / "two lines.txt")})


@cache
def whole_words(count: int = 300) -> PreTrainedTokenizerFast:
    """A token a word."""
    rng = random.Random("words")
    words = sorted({"".join(rng.choice(_SYLLABLES) for _ in range(3)) for _ in range(count)})
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(["<unk>", *words])}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<unk>")


def task(found: Texts, **changes: Any) -> Copying:
    options: dict[str, Any] = {"lengths": [400], "samples": 4, "substrings": [20, 50], "texts": ["books"], "words": 200}
    return Copying(CopyingOptions(**{**options, **changes}), found)


class Says:
    """A subject whose answers are made from the prompt's text."""

    name, longest = "says", None

    def __init__(self, answer: Callable[[Prompt], str], words: Any = None) -> None:
        self.answer, self.tokenizer = answer, words or tokenizer("byte_level")
        self.most: list[int] = []

    def about(self) -> dict[str, Any]:
        return {"name": self.name}

    def complete(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, stop: str | None = None, mass: bool = False
    ) -> Iterator[Completion]:
        self.most.append(max_new_tokens)
        for prompt in prompts:
            yield Completion(self.answer(prompt), len(self.tokenizer(prompt.text)["input_ids"]), 0.0)


def copied_on(prompt: Prompt) -> str:
    """What followed when the end of the prompt stood there before; the longest end that did."""
    text = prompt.text
    low, high = 0, len(text)
    while low < high:  # the longest suffix that occurs earlier
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[-middle:] in text[:-1] else (low, middle - 1)
    at = text.find(text[-low:]) + low if low > 3 else len(text)
    return text[at : at + 2000]


def measured(made: Copying, subject: Any) -> list[Sample]:
    return [
        s for point in made.points(subject) if point.refused is None for s in made.samples(subject, point, frozenset())
    ]


def rows(made: Copying, subject: Any) -> list[Row]:
    return made.rows(measured(made, subject))


def prompts(made: Copying, subject: Any, part: str = "books", tokens: int = 400) -> list[tuple[int, Repeat]]:
    return [(size, repeat) for _, size, repeat in made.repeats(subject, part, tokens)]


NOBODY = Says(lambda prompt: "")


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_prompt_stood_early_in_it_once_and_went_on_with_what_is_wanted(texts: Texts, kind: str) -> None:
    subject = Says(lambda prompt: "", tokenizer(kind))
    found = prompts(task(texts), subject)
    assert [size for size, _ in found] == [20, 50] * 4
    for size, one in found:
        ids = subject.tokenizer(one.prompt)["input_ids"]
        assert 300 < len(ids) <= 400
        substring = one.prompt[slice(*one.before)]
        cue = substring[: len(substring) - len(one.rest)]
        assert one.prompt.endswith("\n" + cue)
        assert one.prompt.count(cue) == 2 and one.prompt.index(cue) == one.before[0]
        assert one.prompt[one.before[0] - 1] == "\n", "it begins with a line"
        assert one.prompt.count(one.rest) >= 1 and cue + one.rest == substring
        assert len(one.ends) == size - 10 and one.ends[-1] == len(one.rest)
        assert list(one.ends) == sorted(one.ends)
        before = len(subject.tokenizer(one.prompt[: one.before[0]], add_special_tokens=False)["input_ids"])
        assert before <= 101, "in the first quarter"
        assert abs(len(ids) - before - size - one.distance) <= 3
        assert one.unseen is not None and one.prompt.endswith(one.unseen) and one.rest not in one.unseen
        assert len(subject.tokenizer(one.unseen)["input_ids"]) <= 270


def test_the_same_text_is_asked_about_every_length(texts: Texts) -> None:
    found = prompts(task(texts), NOBODY)
    for (_, one), (_, other) in zip(found[::2], found[1::2], strict=True):
        shared = one.prompt.rindex("\n") + 1
        assert one.prompt[:shared] == other.prompt[:shared]
    assert len({one.prompt[:200] for _, one in found}) == 4, "and each sample has its own text"


def test_random_text_is_words_of_one_token(texts: Texts) -> None:
    words = whole_words()
    subject = Says(lambda prompt: "", words)
    for size, one in prompts(task(texts, texts=["random"]), subject, "random"):
        assert len(words(one.prompt)["input_ids"]) <= 400
        assert len(one.prompt[slice(*one.before)].split()) == size
        assert len(one.rest.split()) == len(one.ends) == size - 10
        assert one.unseen is None
    known = words_of_one_token(words)
    assert 250 < len(known) <= 300 and "<unk>" not in known
    for kind in KINDS:
        for word in words_of_one_token(tokenizer(kind)):
            assert re.fullmatch("[a-z]{3,12}", word)
            whole = tokenizer(kind)(f"a {word}", add_special_tokens=False)["input_ids"]
            assert len(whole) == len(tokenizer(kind)("a", add_special_tokens=False)["input_ids"]) + 1


def test_the_paper_s_form_repeats_a_substring_up_to_the_length(texts: Texts) -> None:
    for size, one in prompts(task(texts, texts=["repeated"], substrings=[20, 50, 100]), NOBODY, "repeated"):
        copy = one.prompt[one.before[0] :]
        assert one.prompt == copy * (len(one.prompt) // len(copy)) and len(one.prompt) > 2 * len(copy)
        tokens = len(NOBODY.tokenizer(one.prompt)["input_ids"])
        assert 400 - size - 3 <= tokens <= 404
        assert copy.startswith(one.rest) and len(one.ends) == 10 and one.unseen is None


def test_who_copies_is_right_everywhere_and_does_not_guess(texts: Texts) -> None:
    made = task(texts, texts=["books", "repeated"])
    for row in rows(made, Says(copied_on)):
        assert row.estimates["copied"].value == row.estimates["copied whole"].value == 1.0, row.values
        if row.values["text"] == "books":
            assert row.estimates["guessed"].value < 0.1
        assert row.samples == 4
    made = task(texts, texts=["random"])
    for row in rows(made, Says(copied_on, whole_words())):
        assert row.estimates["copied"].value == 1.0
        assert "guessed" not in row.estimates, "chance is known there"


def test_who_knows_the_book_copies_and_guesses_alike(texts: Texts) -> None:
    for row in rows(task(texts), Says(lambda prompt: prompt.wanted or "")):
        assert row.estimates["copied"].value == row.estimates["guessed"].value == 1.0


def test_who_repeats_the_prompt_or_the_cue_or_says_nothing_has_nothing_right(texts: Texts) -> None:
    answers: list[Callable[[Prompt], str]] = [
        lambda prompt: prompt.text,
        lambda prompt: prompt.text.rsplit("\n", 1)[1] + (prompt.wanted or ""),
        lambda prompt: "",
    ]
    for answer in answers:
        for row in rows(task(texts), Says(answer)):
            assert row.estimates["copied"].value < 0.1, "a letter or two by chance"


def test_tokens_count_up_to_the_first_error() -> None:
    one = Repeat("", " of wisdom, it was", (3, 10, 11, 14, 18), (0, 1), 5)
    for answer, right in [
        (" of wisdom, it was", 5),
        (" of wisdom, it was the age", 5),
        ("of wisdom, it was", 5),
        ("\nof wisdom, it was", 5),
        (" of wisdom, it wa", 4),
        (" of wisdom. it was", 2),
        (" of folly, it was", 1),
        (" off", 1),
        (" wisdom, it was", 0),
        ("", 0),
        ("   ", 0),
    ]:
        assert one.right(answer) == right, answer


def test_scores_of_an_answer_that_breaks_off(texts: Texts) -> None:
    def half(prompt: Prompt) -> str:
        return (prompt.wanted or "")[: len(prompt.wanted or "") // 2]

    for sample in measured(task(texts), Says(half)):
        details = sample.details
        assert sample.scores["copied whole"] == 0.0
        assert sample.scores["copied"] == details["right_tokens"] / details["of_tokens"]
        assert 0.2 < sample.scores["copied"] < 0.8


def test_naming_words_at_random_scores_chance(texts: Texts) -> None:
    rng = random.Random("guess")
    words = whole_words()
    made = task(texts, texts=["random"], words=6, substrings=[24], lengths=[100], samples=150)
    known = made._some_words(Says(lambda prompt: "", words))
    assert len(known) == 6
    (row,) = rows(made, Says(lambda prompt: " " + " ".join(rng.choice(known) for _ in range(20)), words))
    assert row.chance["copied"] == pytest.approx(sum(6.0**-n for n in range(1, 15)) / 14)
    assert row.estimates["copied"].low < row.chance["copied"] < row.estimates["copied"].high
    assert row.estimates["copied whole"].value == 0.0


def test_a_model_with_a_copying_head_copies_from_memory_and_one_that_does_not_see_it_cannot(texts: Texts) -> None:
    words = whole_words()
    made = task(texts, texts=["random"], words=280, substrings=[8], lengths=[96], samples=6)
    shares = {}
    for name, layers in (("memory", (2,)), ("elsewhere", (1,)), ("plain", None)):
        model = copying_model(len(words), previous=(0, 1), copying=(2, 3))
        subject: Any = PlainModel(model, words, name)
        if layers is not None:
            subject = FocusedSubject(attach(model, FocusConfig(memory_layers=layers, window=32)), words, name)
        samples = measured(made, subject)
        shares[name] = sum(sample.scores["copied"] for sample in samples) / len(samples)
        assert all(sample.details["beyond_window"] == (layers is not None) for sample in samples)
    assert shares["memory"] > 0.4, "some words come twice by chance, and this head sees one word back"
    assert shares["plain"] > 0.4
    assert shares["elsewhere"] < 0.15


def test_generation_ends_with_the_first_error_and_says_the_same_as_without(texts: Texts) -> None:
    """What is generated after the first error is not scored, so it need not be generated."""
    made = task(texts, lengths=[120], substrings=[20], samples=2)
    for subject in (focused(), plain()):
        for _, one in prompts(made, subject, tokens=120):
            whole = next(iter(subject.complete([Prompt(one.prompt)], max_new_tokens=12))).text
            cut = next(iter(subject.complete([Prompt(one.prompt, wanted=one.rest)], max_new_tokens=12))).text
            assert whole.startswith(cut) and len(cut) < len(whole)
            assert one.right(whole) == one.right(cut)
            known = next(iter(subject.complete([Prompt(one.prompt, wanted=whole)], max_new_tokens=12))).text
            assert known == whole


def test_an_endpoint_is_asked_for_no_more_than_the_rest(texts: Texts) -> None:
    asked: list[tuple[str, int]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append((body["prompt"], body["max_tokens"]))
        return httpx.Response(200, json={"choices": [{"text": copied_on(Prompt(body["prompt"]))}]})

    transport = httpx.MockTransport(answer)
    subject = Endpoint("http://there/v1", "m", tokenizer("byte_level"), transport=transport)
    made = task(texts, samples=1)
    for row in rows(made, subject):
        assert row.estimates["copied"].value == 1.0
    wanted = prompts(made, subject)
    assert [text for text, _ in asked[::2]] == [one.prompt for _, one in wanted]
    assert [most for _, most in asked[::2]] == [2 * 10 + 8, 48], "twice the rest, and never more than the task asks for"


def test_a_stopped_run_goes_on_with_the_same_samples(texts: Texts, tmp_path: Path) -> None:
    subject = Says(copied_on)
    made = task(texts, texts=["books", "repeated"])
    for point in made.points(subject):
        whole = list(made.samples(subject, point, frozenset()))
        kept = frozenset(sample.id for sample in whole[::3])
        rest = list(task(texts, texts=["books", "repeated"]).samples(subject, point, kept))
        assert rest == [sample for sample in whole if sample.id not in kept]
        assert len({sample.id for sample in whole}) == point.samples == 8
        assert all(point.covers(sample.values) for sample in whole)
    evaluate(task(texts), subject, tmp_path / "run")
    again = evaluate(task(texts), Says(lambda prompt: "nothing is asked again"), tmp_path / "run")
    assert [row.estimates["copied"].value for row in again.rows] == [1.0, 1.0]
    assert prompts(task(texts, seed=1), subject)[0] != prompts(task(texts), subject)[0]


def test_what_cannot_be_asked_is_refused_with_its_reason(texts: Texts) -> None:
    def refused(made: Copying, subject: Any = NOBODY) -> dict[str, str]:
        return {point.key: point.refused for point in made.points(subject) if point.refused}

    assert refused(task(texts, lengths=[100, 400], substrings=[20, 50])) == {
        "tokens=100, text=books, substring=50 tokens": "a substring of 50 tokens in the first quarter needs 200 tokens or more."
    }
    assert "holds less text" in refused(task(texts, lengths=[1 << 20]))["tokens=1048576, text=books"]
    few = refused(task(texts, texts=["random"], words=5000), Says(lambda prompt: "", whole_words()))
    assert "copying.words asks for 5,000" in few["tokens=400, text=random"]
    with pytest.raises(InputError, match="no substring whose beginning occurs once"):
        prompts(task(texts, texts=["code"]), NOBODY, "code")
    made = task(texts)
    measured(made, subject := Says(copied_on))
    (point,) = made.points(subject)
    assert point.tokens == 400 + max(subject.most), "the longest prompt and its answer"


@pytest.mark.model
@pytest.mark.data
@pytest.mark.parametrize("part", ["books", "code", "arxiv", "isabelle", "random", "repeated"])
def test_real_texts_and_the_default_tokenizer(part: str, default_tokenizer: Any) -> None:
    folder = data_folder("books", "code", "arxiv", "isabelle")
    made = Copying(CopyingOptions(lengths=[2048], samples=2, texts=[part]), Texts(folder))
    for row in rows(made, Says(copied_on, default_tokenizer)):
        assert row.estimates["copied"].value > 0.9
        assert row.samples == 2
