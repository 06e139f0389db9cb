"""In-context learning: as many demonstrations as fit a length, then one question of the same kind.

    Question: How did serfdom develop in and then leave Russia ? Type: DESC:manner
    Question: What films featured the character Popeye Doyle ? Type: ENTY:cremat
    …
    Question: How far is it from Denver to Aspen ? Type:

**Protocol** (Focused Transformer, section 4.4, which follows Hao et al., arXiv 2212.06713, without their structured
prompting): demonstrations drawn at random from the training part, as many as fit; the mean over 20 draws. The paper's
wording of prompts is not known here; the one-line templates are those of Hao et al., and so is the exact match with any
listed answer of WebQuestions after SQuAD's normalisation (they decode with a beam, here it is greedy). Classes are
written as the data set writes them: 21 tokens a demonstration, so that about 95 fit in 2,048 tokens, and the paper speaks
of 100. The class is generated. Hao et al. choose among 6 coarse classes by probability, but the paper calls a class
without demonstration impossible, which it is only for a model that must write it.

**Decided here.** A length holds prompt and answer, as a model's limit does. All questions of a draw follow the same
demonstrations, so that a model that shares reading reads those once. The demonstrations nearest to the question are
the same at every length; longer prompts only add earlier ones. Questions are taken in turn from the shuffled test part, so
that 20 draws of 25 ask each of TREC's 500 once; `questions=null` asks the whole test part in each draw, and then
intervals are about the draw alone, not about the choice of questions. Repeated training
questions and those that are in the test part too (TREC has 72 and 11) are no demonstrations. WebQuestions is
demonstrated with its first listed answer.

**Guessing.** Chance in TREC is that of naming classes as often as they occur in the training part: 5.9% (one of 50 would be
2%). Always naming the commonest demonstrated class scores about 11%, which the table shows too. For WebQuestions
no chance level is drawn; the commonest training answer is right for 1.8%.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from longfocus.errors import ConfigError, InputError
from longfocus.settings import Sizes
from longfocus.subjects.contract import Completes, Completion, Prompt
from longfocus.tasks.contract import AnswerTask, Example, Measure, Point, Sample, TaskOptions, Values
from longfocus.tasks.scores import contains_answer, exact_match, first_line
from longfocus.tasks.texts import Texts

CLASSES = 50
FIELDS = {"trec": ("id", "text", "fine"), "webqs": ("id", "question", "answers")}
_LABEL = re.compile(r"\b(ABBR|DESC|ENTY|HUM|LOC|NUM) ?: ?([a-z]+)", re.IGNORECASE)


class FewshotOptions(TaskOptions):
    """Options of `fewshot`."""

    lengths: Sizes = [2048, 4096, 8192, 16384, 32768]
    """Tokens of demonstrations, question and answer together."""
    sets: Annotated[list[Literal["trec", "webqs"]], Field(min_length=1)] = ["trec", "webqs"]
    """`trec`: 50 classes of questions; `webqs`: WebQuestions."""
    draws: Annotated[int, Field(ge=1)] = 20
    """Draws of demonstrations a length."""
    questions: Annotated[int, Field(ge=1)] | None = 25
    """Questions after each draw; null: the whole test part, 500 and 2,032."""


@dataclass(frozen=True)
class _Item:
    """A question in its template, and what is right."""

    id: str
    asked: str
    shown: str
    """What its demonstration says."""
    expected: dict[str, Any]

    @property
    def demonstration(self) -> str:
        return f"{self.asked} {self.shown}\n"


class Fewshot(AnswerTask):
    """Question classes (TREC) and short answers (WebQuestions) after as many demonstrations as fit a length."""

    name, title = "fewshot", "In-context learning"
    paper = (
        "Focused Transformer, arXiv 2307.03170, section 4.4; after Hao et al., arXiv 2212.06713; TREC: Li and Roth 2002; "
        "WebQuestions: Berant et al. 2013"
    )
    axes: tuple[str, ...] = ("tokens", "set")
    measures = (
        Measure("right", "share", "higher"),
        Measure("right, class shown", "share", "higher"),
        Measure("coarse class right", "share", "higher"),
        Measure("right or more words", "share", "higher"),
    )
    max_new_tokens, stop = 20, r"\S[^\n]*\n"
    Options = FewshotOptions
    quick = {"lengths": [1024, 4096], "draws": 4, "questions": 2}

    def __init__(self, options: FewshotOptions, texts: Texts) -> None:
        super().__init__(options, texts)
        self._parts: dict[tuple[str, str], list[_Item]] = {}
        self._longest: dict[str, str] = {}

    # -- what is measured --------------------------------------------------------------------------------

    def points(self, subject: Completes) -> Sequence[Point]:
        """Each set and length.

        Raises:
            InputError: a data set is missing.
            ConfigError: a length holds no demonstration.
        """
        options: FewshotOptions = self.options
        for part in options.sets:
            nearest = [self._order(part, draw)[0].demonstration for draw in range(options.draws)]
            needed = max(self._tokens(subject, part, front) for front in nearest)
            if needed > options.lengths[0]:
                raise ConfigError(
                    f"fewshot.lengths: {options.lengths[0]} given; a demonstration, a question of {part} and its answer "
                    f"take {needed} tokens."
                )
        return [
            Point({"tokens": tokens, "set": part}, options.draws * len(self._asked(part, 0)), tokens)
            for part in options.sets
            for tokens in options.lengths
        ]

    def examples(self, subject: Completes, point: Point) -> Iterator[Example]:
        """Draw by draw."""
        for draw in range(self.options.draws):
            yield from self._draw(subject, point, draw)

    def samples(self, subject: Completes, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        """Draw by draw, so that one draw's prompts are held at a time."""
        part = str(point.values["set"])
        for draw in range(self.options.draws):
            if any(self._id(draw, item) not in done for item in self._asked(part, draw)):
                left = [example for example in self._draw(subject, point, draw) if example.id not in done]
                yield from self.ask(subject, point, left)

    def _draw(self, subject: Completes, point: Point, draw: int) -> list[Example]:
        part = str(point.values["set"])
        shown = self._demonstrations(subject, part, draw, int(point.values["tokens"]))
        front = "".join(item.demonstration for item in shown)
        about: dict[str, Any] = {"draw": draw, "demonstrations": len(shown)}
        classes: Counter[str] = Counter()
        if part == "trec":
            classes.update(item.shown for item in shown)
            commonest = min(classes, key=lambda name: (-classes[name], name))
            about |= {"classes": len(classes), "commonest": commonest}
        made = []
        for item in self._asked(part, draw):
            expected = {**item.expected, **about}
            if part == "trec":
                expected["class_shown"] = classes[item.shown]
            made.append(Example(self._id(draw, item), Prompt(front + item.asked), expected))
        return made

    @staticmethod
    def _id(draw: int, item: _Item) -> str:
        return f"{draw} {item.id}"

    # -- demonstrations and questions --------------------------------------------------------------------

    def _demonstrations(self, subject: Completes, part: str, draw: int, tokens: int) -> list[_Item]:
        """As many as fit beside the longest question and its answer; the first of the draw's order stands last."""
        order = self._order(part, draw)
        alone = self._tokens(subject, part, "")

        def used(count: int) -> int:
            return self._tokens(subject, part, "".join(item.demonstration for item in reversed(order[:count])))

        count = 1  # points() has seen that one fits
        for _ in range(4):  # near the answer in few steps, since counting tokens of long prompts is slow
            each = max(1.0, (used(count) - alone) / count)
            count = min(len(order), max(1, int((tokens - alone) / each)))
        while count > 1 and used(count) > tokens:
            count -= 1
        while count < len(order) and used(count + 1) <= tokens:
            count += 1
        return order[:count][::-1]

    def _tokens(self, subject: Completes, part: str, front: str) -> int:
        """Tokens of demonstrations, the set's longest question and an answer."""
        count = subject.tokenizer
        if part not in self._longest:
            asked = [item.asked for item in self._part(part, "test")]
            sizes = [len(ids) for ids in count(asked)["input_ids"]]
            self._longest[part] = asked[sizes.index(max(sizes))]
        return len(count(front + self._longest[part])["input_ids"]) + self.max_new_tokens

    def _order(self, part: str, draw: int) -> list[_Item]:
        """The training part as a draw orders it."""
        pool = list(self._part(part, "train"))
        random.Random(f"{self.options.seed} demonstrations {part} {draw}").shuffle(pool)
        return pool

    def _asked(self, part: str, draw: int) -> list[_Item]:
        """The questions of a draw, from the shuffled test part in turn."""
        pool = list(self._part(part, "test"))
        random.Random(f"{self.options.seed} questions {part}").shuffle(pool)
        count = min(len(pool), self.options.questions or len(pool))
        return [pool[(draw * count + number) % len(pool)] for number in range(count)]

    def _part(self, part: str, which: str) -> list[_Item]:
        """`train`: what may be demonstrated, without repeats and test questions; `test`: what may be asked."""
        if (part, which) not in self._parts:
            items: dict[str, _Item] = {}
            for record in self.texts.records(f"{part}/{which}", FIELDS[part]):
                item = _item(part, record)
                items.setdefault(item.asked.lower(), item)
            if which == "train":
                for item in self._part(part, "test"):
                    items.pop(item.asked.lower(), None)
            if not items:
                raise InputError(f"{part}/{which}: no questions in it.")
            self._parts[part, which] = list(items.values())
        return self._parts[part, which]

    # -- judging -----------------------------------------------------------------------------------------

    def score(self, example: Example, completion: Completion) -> dict[str, float]:
        """The first line decides, up to where the model begins a question of its own.

        TREC: the class that is named there, and no other. WebQuestions: `right` is the exact match; `right or more words`
        also takes an answer that says it in a sentence.
        """
        said = first_line(completion.text).partition("Question:")[0]
        expected = example.expected
        if "class" not in expected:
            exact = any(exact_match(said, truth) for truth in expected["answers"])
            return {
                "right": float(exact),
                "right or more words": float(exact or any(contains_answer(said, t) for t in expected["answers"])),
            }
        named = {(coarse.upper(), fine.lower()) for coarse, fine in _LABEL.findall(said)}
        coarse, _, fine = expected["class"].partition(":")
        right = float(named == {(coarse, fine)})
        scores = {"right": right, "coarse class right": float({name for name, _ in named} == {coarse})}
        return scores | ({"right, class shown": right} if expected["class_shown"] else {})

    def cluster(self, sample: Sample) -> Hashable | None:
        """The draw: its questions follow the same demonstrations."""
        return int(sample.details["draw"])

    def chance(self, values: Values) -> dict[str, float]:
        """TREC: naming classes as often as the training part has them."""
        if values["set"] != "trec":
            return {}
        train = Counter(item.shown for item in self._part("trec", "train"))
        asked = Counter(item.shown for item in self._part("trec", "test"))
        fine = _agreement(train, asked)
        return {"right": fine, "coarse class right": _agreement(_coarse(train), _coarse(asked))}

    def notes(self, group: Sequence[Sample]) -> dict[str, Any]:
        """Demonstrations, and for TREC how many of the 50 classes they cover; means over draws."""
        draws = {sample.details["draw"]: sample.details for sample in group}
        counts = [about["demonstrations"] for about in draws.values()]
        found: dict[str, Any] = {"demonstrations": round(sum(counts) / len(counts), 1)}
        if "class" in group[0].details:
            classes = sum(about["classes"] for about in draws.values()) / len(draws)
            shown = sum(sample.details["class_shown"] > 0 for sample in group) / len(group)
            commonest = sum(sample.details["class"] == sample.details["commonest"] for sample in group) / len(group)
            found["classes shown"] = f"{classes:.1f} of {CLASSES} ({100 * classes / CLASSES:.0f}%)"
            found["questions whose class is shown"] = f"{100 * shown:.1f}%"
            found["always the commonest class"] = f"{100 * commonest:.1f}%"
        return found


def _item(part: str, record: dict[str, Any]) -> _Item:
    asked = " ".join(record["text" if part == "trec" else "question"].split())
    if part == "trec":
        return _Item(record["id"], f"Question: {asked} Type:", record["fine"], {"class": record["fine"]})
    answers = list(record["answers"])
    return _Item(record["id"], f"Question: {asked} Answer:", answers[0], {"answers": answers})


def _coarse(classes: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, count in classes.items():
        found[name.partition(":")[0]] += count
    return found


def _agreement(one: Counter[str], other: Counter[str]) -> float:
    """How often a draw from the one is a draw from the other."""
    return sum(one[name] * other[name] for name in other) / (one.total() * other.total())
