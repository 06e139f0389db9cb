"""A task whose scores follow from its examples, a subject to go with it, and results of any form."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from longfocus.evaluation.record import Results
from longfocus.settings import Sizes
from longfocus.subjects.contract import Completes, Completion, Prompt
from longfocus.tasks.contract import AnswerTask, Example, Measure, Point, Row, TaskOptions, Values
from longfocus.tasks.statistics import Estimate, share_of
from longfocus.tasks.texts import Texts
from tests.small_tokenizers import tokenizer


class AddingOptions(TaskOptions):
    lengths: Sizes = [100, 200]  # noqa: RUF012  a field
    samples: Annotated[int, Field(ge=1)] = 5
    broken: str | None = None
    """Id of an example whose score cannot be made."""


class Adding(AnswerTask):
    """Sums of two digits."""

    name, title, paper = "adding", "Adding", "made up"
    axes = ("tokens", "kind")
    measures = (Measure("right", "share", "higher"), Measure("off by", "number", "lower", "units"))
    Options = AddingOptions
    quick = {"lengths": [100], "samples": 2}  # noqa: RUF012  a constant

    def points(self, subject: Completes) -> Sequence[Point]:
        options = self.options
        return [
            Point({"tokens": tokens, "kind": kind}, options.samples, tokens)
            for kind in ("plain", "words")
            for tokens in options.lengths
        ]

    def examples(self, subject: Completes, point: Point) -> Iterator[Example]:
        for number in range(self.options.samples):
            rng = random.Random(f"{self.options.seed} {point.key} {number}")
            a, b = rng.randint(0, 9), rng.randint(0, 9)
            yield Example(f"{number}", Prompt(f"{a} + {b} ="), {"sum": a + b})

    def score(self, example: Example, completion: Completion) -> dict[str, float]:
        if example.id == self.options.broken:
            raise ZeroDivisionError("this task has a mistake")
        off = abs(int(completion.text) - int(example.expected["sum"]))
        return {"right": float(off == 0), "off by": float(off)}

    def chance(self, values: Values) -> dict[str, float]:
        return {"right": 1 / 19}


class Adder:
    """Adds, and is off by one now and then; may be stopped after some answers."""

    def __init__(self, name: str = "adder", *, longest: int | None = None, stop_after: int | None = None) -> None:
        self.name, self.longest, self.stop_after = name, longest, stop_after
        self.tokenizer: Any = tokenizer("byte_level")
        self.asked: list[str] = []
        self.error: BaseException = KeyboardInterrupt()

    def about(self) -> dict[str, Any]:
        return {"kind": "fake", "name": self.name}

    def complete(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, stop: str | None = None, mass: bool = False
    ) -> Iterator[Completion]:
        for prompt in prompts:
            if self.stop_after is not None and len(self.asked) >= self.stop_after:
                raise self.error
            self.asked.append(prompt.text)
            a, b = (int(digit) for digit in prompt.text.removesuffix(" =").split(" + "))
            yield Completion(str(a + b + (a == 3)), 5, 0.0)


def adding(folder: Path | None = None, **options: Any) -> Adding:
    return Adding(AddingOptions(**options), Texts(folder))


def results(
    model: str = "default",
    axes: Sequence[str] = ("tokens", "haystack"),
    *,
    task: str = "passkey",
    title: str = "Pass-key retrieval",
    rows: Sequence[tuple[Values, int, int]] | None = None,
    **changes: Any,
) -> Results:
    """Of (values, right, of how many)."""
    if rows is None:
        rows = [({"tokens": t, "haystack": h}, t // 1024, 50) for h in ("filler", "books") for t in (2048, 8192, 32768)]
    measures = [Measure("right", "share", "higher"), Measure("seconds", "number", "lower", "s")]
    made = [
        Row(v, n, {"right": share_of(r, n), "seconds": Estimate(r / 7, 0.0, float(r))}, {"right": 1e-5})
        for v, r, n in rows
    ]
    given: dict[str, Any] = {
        "task": task,
        "title": title,
        "paper": "arXiv 2307.03170",
        "axes": list(axes),
        "heat": False,
        "log_x": True,
        "measures": measures,
        "options": {"seed": 0},
        "subject": {"name": model, "kind": "focused", "parameters": 134515008},
        "rows": made,
        "about": {"command": ["longfocus", "eval", "passkey", "--name", model], "date": "2026-11-30"},
    }
    return Results(**{**given, **changes})
