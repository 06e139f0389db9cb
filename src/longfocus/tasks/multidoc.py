"""Many documents: N texts of one kind, each with one made-up fact in the same words, and a question about one of them.

The paper measures how attention is spread over documents, but never whether a question about one of many is answered. Here
each document is a piece of real held-out text (of books, of code, …) into which one line was put:

    Every guidebook puts the village of Dratukvem on Lake Spirolan.

The names are invented, so that nothing but that line gives the answer, and all N lines differ only in them, so that only
the right document answers. The same questions are asked at every N: larger N add documents to the same set (in
another order), nothing else. A focused model reads each document by itself into one memory; other models have
all of them in front of the question.

Right is an answer that names the lake, whatever stands around it, and no other document's lake; whoever repeats all documents has
named all lakes and is not right. `another's` are answers that name another document's lake: distraction. `mass` is the
share of the attention on memory, while the question's last token and the answer are read, that lies on the right
document (focused models; first tokens of windows left out, which draw attention whatever they say).

Unlike the default model's training text (`longfocus.data.retrieval_text`: codes, numbers and English words that belong to
persons and places, in its wordings) and pass-key: other wording, and values that are invented words.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from longfocus.errors import InputError
from longfocus.settings import Size, Sizes
from longfocus.subjects.contract import Completes, Completion, Prompt
from longfocus.tasks.contract import AnswerTask, Example, Measure, Point, Sample, TaskOptions, Values
from longfocus.tasks.haystack import Haystack, place_in
from longfocus.tasks.texts import Texts

FACT = "Every guidebook puts the village of {village} on Lake {lake}."
QUESTION = "On which lake does every guidebook put the village of {village}? Every guidebook puts the village of {village} on Lake"
_ONSETS = (*"bdfghjklmnprstvwz", "br", "dr", "fl", "gr", "kl", "qu", "sk", "sp", "st", "tr", "vl")
_VOWELS = "aeiou"
_CODAS = (*"lmnrsx", "th", "nd", "rk")
_TRIES = 1000


class MultiDocOptions(TaskOptions):
    """Options of `multidoc`."""

    documents: Sizes = [2, 4, 8, 16, 32]
    """Documents in memory."""
    tokens: Size = 1024
    """Of a document."""
    samples: Annotated[int, Field(ge=1)] = 20
    """Questions a number of documents, two a set of documents."""
    texts: Annotated[list[Literal["books", "code", "arxiv", "isabelle"]], Field(min_length=1)] = ["books", "code"]
    """What the documents are pieces of."""


@dataclass(frozen=True)
class Piece:
    """A document with its fact."""

    text: str
    village: str
    lake: str


class MultiDoc(AnswerTask):
    """A question about one of 2 to 32 documents with like facts; chance is to name the lake of any of them, 1 of N."""

    name, title = "multidoc", "One of many documents"
    paper = "longfocus; a follow-up to Focused Transformer, arXiv 2307.03170, section 3.3, that the paper lacks"
    axes: tuple[str, ...] = ("documents", "text")
    measures = (
        Measure("right", "share", "higher"),
        Measure("another's", "share", "lower"),
        Measure("mass", "share", "higher", drawn=True),
    )
    max_new_tokens, mass = 32, True
    stop = r"\A\s*\w+[.?]|[^\s:][ \t]*\n"  # one word and a full stop, or a line that does not announce another
    Options = MultiDocOptions
    quick = {"documents": [2, 8, 16], "tokens": 512, "samples": 8, "texts": ["books"]}

    def __init__(self, options: MultiDocOptions, texts: Texts) -> None:
        super().__init__(options, texts)
        self._stacks: dict[str, Haystack] = {}
        self._sets: dict[tuple[str, int], list[Piece]] = {}

    def points(self, subject: Completes) -> Sequence[Point]:
        """Each kind of text and number of documents.

        Raises:
            InputError: a set of texts is missing.
        """
        options: MultiDocOptions = self.options
        found = []
        for part in options.texts:
            stack = self._stack(subject, part)
            length = len(stack.cut(0, options.tokens))
            for count in options.documents:
                refused = None
                if 2 * count * length > len(stack.text):
                    refused = f"{part} is too short for {count} different pieces of {options.tokens:,} tokens."
                tokens = count * (options.tokens + 4) + 200
                found.append(Point({"documents": count, "text": part}, options.samples, tokens, refused))
        return found

    def examples(self, subject: Completes, point: Point) -> Iterator[Example]:
        """Questions about one set stand side by side, and see it in the same order."""
        options: MultiDocOptions = self.options
        part, count = str(point.values["text"]), int(point.values["documents"])
        asked = min(2, min(options.documents))
        for number in range(options.samples):
            chosen, target = divmod(number, asked)
            made = self._set(subject, part, chosen)[:count]
            order = list(range(count))
            random.Random(f"{options.seed} {part} {options.tokens} {chosen} {count} order").shuffle(order)
            shown = [made[index] for index in order]
            village, lake = made[target].village, made[target].lake
            expected = {
                "lake": lake,
                "village": village,
                "set": chosen,
                "place": order.index(target),
                "others": [piece.lake for piece in shown if piece.lake != lake],
            }
            prompt = Prompt(
                QUESTION.format(village=village),
                tuple(piece.text for piece in shown),
                tuple(f"{part} {chosen}.{index}" for index in order),
            )
            yield Example(f"{chosen} {target}", prompt, expected)

    def _set(self, subject: Completes, part: str, number: int) -> list[Piece]:
        """A set of documents; smaller N see its first ones."""
        if (part, number) not in self._sets:
            options: MultiDocOptions = self.options
            stack = self._stack(subject, part)
            rng = random.Random(f"{options.seed} {part} {options.tokens} {number}")
            words: set[str] = set()
            taken: list[tuple[int, int]] = []
            pieces = []
            for _ in range(max(options.documents)):
                village, lake = (_new_word(rng, words, stack.text) for _ in range(2))
                fact = FACT.format(village=village, lake=lake) + "\n"
                room = options.tokens - len(subject.tokenizer(fact)["input_ids"])
                lines = _apart(stack, max(1, room), taken, rng).splitlines(keepends=True)
                at = place_in(lines, rng.random())
                before = "".join(lines[:at])
                before += "" if not before or before.endswith("\n") else "\n"
                pieces.append(Piece(before + fact + "".join(lines[at:]), village, lake))
            self._sets[part, number] = pieces
        return self._sets[part, number]

    def _stack(self, subject: Completes, part: str) -> Haystack:
        if part not in self._stacks:
            self._stacks[part] = Haystack(subject.tokenizer, self.texts, part)
        return self._stacks[part]

    def score(self, example: Example, completion: Completion) -> dict[str, float]:
        """Whose lakes are named, and the mass on the right document."""
        said = completion.text.lower()
        own = example.expected["lake"].lower() in said
        other = any(lake.lower() in said for lake in example.expected["others"])
        scores = {"right": float(own and not other), "another's": float(other)}
        if completion.document_mass is not None:
            scores["mass"] = completion.document_mass[example.expected["place"]]
        return scores

    def cluster(self, sample: Sample) -> Hashable:
        """Questions about one set share its documents."""
        return int(sample.details["set"])

    def chance(self, values: Values) -> dict[str, float]:
        """The lake of any of the documents, and even attention."""
        count = int(values["documents"])
        return {"right": 1 / count, "another's": 1 - 1 / count, "mass": 1 / count}


def _new_word(rng: random.Random, known: set[str], text: str) -> str:
    """An invented word that is in no text, and in no other invented word."""
    while True:
        syllables = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(3)) + rng.choice(_CODAS)
        word = syllables.capitalize()
        if (
            not any(syllables in other or other in syllables for other in known)
            and word not in text
            and syllables not in text
        ):
            known.add(syllables)
            return word


def _apart(stack: Haystack, tokens: int, taken: list[tuple[int, int]], rng: random.Random) -> str:
    """Whole lines of a text that no earlier piece has, about so many tokens.

    Raises:
        InputError: there is no room left.
    """
    for _ in range(_TRIES):
        start = stack.text.rfind("\n", 0, rng.randrange(len(stack.text))) + 1
        piece = stack.cut(start, tokens)
        stop = start + len(piece)
        if stop <= len(stack.text) and all(stop <= low or start >= high for low, high in taken):
            taken.append((start, stop))
            return piece
    raise InputError(f"The texts are too short for {len(taken) + 1} different pieces of {tokens:,} tokens.")
