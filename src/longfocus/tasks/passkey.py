"""Pass-key retrieval: a number in a long text, asked for at the end."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from longfocus.settings import Sizes
from longfocus.subjects.contract import Completes, Completion, Prompt
from longfocus.tasks.contract import AnswerTask, Example, Measure, Point, Sample, TaskOptions, Values
from longfocus.tasks.haystack import Haystack, place_in
from longfocus.tasks.texts import Texts

OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = "What is the pass key? The pass key is"
LONGEST_ANSWER = 100
"""Characters of an answer that are looked at: more than its ten tokens, less than any echo of a prompt up to a key."""


class PasskeyOptions(TaskOptions):
    """Options of `passkey`."""

    lengths: Sizes = [2048, 8192, 32768]
    """Prompt lengths in tokens."""
    samples: Annotated[int, Field(ge=1)] = 50
    """Prompts a length (and a depth)."""
    haystacks: list[Literal["filler", "books", "code", "arxiv", "isabelle"]] = ["filler", "books"]
    """`filler`: the paper's sentences over and over; others: held-out text from a random place on."""
    depths: list[Annotated[float, Field(ge=0, le=1)]] | None = None
    """Places of the number, 0 the beginning, 1 the end; random unless given. Given, they make a heat map."""


class Passkey(AnswerTask):
    """A random five-digit number at a random place; right when it is in the answer, whatever stands around it."""

    name, title = "passkey", "Pass-key retrieval"
    paper = "Focused Transformer, arXiv 2307.03170, section 4.2; after Mohtashami and Jaggi, arXiv 2305.16300"
    axes: tuple[str, ...] = ("tokens", "haystack")
    measures = (
        Measure("right", "share", "higher"),
        Measure("right beyond the window", "share", "higher"),
    )
    max_new_tokens, stop = 10, r"\d{5}"
    Options = PasskeyOptions
    quick = {"lengths": [1024, 4096], "samples": 8}

    def __init__(self, options: PasskeyOptions, texts: Texts) -> None:
        super().__init__(options, texts)
        self._stacks: dict[str, Haystack] = {}
        if options.depths is not None:
            self.axes, self.heat = ("tokens", "depth", "haystack"), True

    def points(self, subject: Completes) -> Sequence[Point]:
        """Each haystack and length (and depth)."""
        options: PasskeyOptions = self.options
        for part in options.haystacks:
            if part != "filler":
                self.texts.documents(part)
        found = []
        for part in options.haystacks:
            for tokens in options.lengths:
                depths: Sequence[float | None] = options.depths or [None]
                for depth in depths:
                    values: Values = {"tokens": tokens, "haystack": part}
                    if depth is not None:
                        values = {**values, "depth": depth}
                    found.append(Point(values, options.samples, tokens + self.max_new_tokens))
        return found

    def examples(self, subject: Completes, point: Point) -> Iterator[Example]:
        """Ordered by depth, so that prompts of filler share as much of their beginning as they can."""
        part, tokens = str(point.values["haystack"]), int(point.values["tokens"])
        depth = point.values.get("depth")
        made = []
        for number in range(self.options.samples):
            rng = random.Random(f"{self.options.seed} {tokens} {number}" + ("" if depth is None else f" {depth}"))
            key = str(rng.randint(10000, 99999))
            fact = f"The pass key is {key}. Remember it. {key} is the pass key."
            make = self._in_filler if part == "filler" else self._in_text
            text, at = make(subject, part, tokens, fact, rng, None if depth is None else float(depth))
            expected = {"key": key, "depth": round(at, 4), "key_at": text.index(fact)}
            made.append(Example(f"{number}", Prompt(text), expected))
        yield from sorted(made, key=lambda example: example.expected["depth"])

    def _in_filler(
        self, subject: Completes, part: str, tokens: int, fact: str, rng: random.Random, depth: float | None
    ) -> tuple[str, float]:
        count = subject.tokenizer
        fixed = len(count(f"{OPENING}{fact}\n{QUESTION}")["input_ids"])
        fillers = max(1, (tokens - fixed) // len(count(f" {FILLER}")["input_ids"]))
        before = rng.randint(0, fillers) if depth is None else round(depth * fillers)
        lines = [FILLER] * before + [fact] + [FILLER] * (fillers - before)
        return OPENING + " ".join(lines) + "\n" + QUESTION, before / fillers

    def _in_text(
        self, subject: Completes, part: str, tokens: int, fact: str, rng: random.Random, depth: float | None
    ) -> tuple[str, float]:
        if part not in self._stacks:
            self._stacks[part] = Haystack(subject.tokenizer, self.texts, part)
        fixed = len(subject.tokenizer(f"{OPENING}\n{fact}\n\n{QUESTION}")["input_ids"])
        lines = self._stacks[part].lines(max(1, tokens - fixed), rng)
        before = place_in(lines, rng.random() if depth is None else depth)
        front, back = "".join(lines[:before]), "".join(lines[before:])
        text = f"{OPENING}{front}{fact}\n{back}\n{QUESTION}"
        return text, len(front) / max(1, len(front) + len(back))

    def score(self, example: Example, completion: Completion) -> dict[str, float]:
        """Right when the number is there, also as 12,345; beyond the window when it lay in memory whole.

        Only the beginning of an answer counts, so that an endpoint that answers with all of the prompt has nothing right.
        """
        said = re.sub(r"(?<=\d),(?=\d)", "", completion.text[:LONGEST_ANSWER])
        right = float(example.expected["key"] in said)
        end = example.expected["key_at"] + len("The pass key is 12345. Remember it. 12345 is the pass key.")
        beyond = completion.local_from is not None and end <= completion.local_from
        return {"right": right} | ({"right beyond the window": right} if beyond else {})

    def chance(self, values: Values) -> dict[str, float]:
        """One of 90,000 numbers."""
        return {"right": 1 / 90_000, "right beyond the window": 1 / 90_000}

    def notes(self, group: Sequence[Sample]) -> dict[str, Any]:
        """Right answers by third of the text, where places are random."""
        if self.options.depths is not None:
            return {}
        thirds = [[0, 0], [0, 0], [0, 0]]
        for sample in group:
            third = thirds[min(2, int(3 * sample.details["depth"]))]
            third[0] += int(sample.scores["right"])
            third[1] += 1
        names = ("first third", "middle", "last third")
        return {
            name: f"{right} of {total}" if total else "" for name, (right, total) in zip(names, thirds, strict=True)
        }
