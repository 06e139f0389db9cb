"""The command line with a few small tasks of every kind in place of the real ones; see tests/processes.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longfocus.subjects.contract import Completes, Prompt
from longfocus.tasks.contract import AnswerTask, Example, Measure, Point, Sample, Task


class Letters(AnswerTask):
    """Whether an answer holds letters."""

    name, title, paper = "letters", "Letters", "made up"
    axes = ("words",)
    measures = (Measure("letters", "share", "higher"),)
    max_new_tokens = 3

    def points(self, subject: Completes) -> list[Point]:
        return [Point({"words": 2}, 2, 20)]

    def examples(self, subject: Completes, point: Point) -> Iterator[Example]:
        for number in range(2):
            yield Example(f"{number}", Prompt(f"The captain said {number}"), {})

    def score(self, example: Example, completion: Any) -> dict[str, float]:
        return {"letters": float(any(map(str.isalpha, completion.text)))}


class Loss(Task):
    """The loss of two choices."""

    name, title, paper = "loss", "Loss", "made up"
    axes = ("choice",)
    measures = (Measure("loss", "number", "lower", "nats"),)
    needs = "losses"

    def points(self, subject: Completes) -> list[Point]:
        return [Point({"choice": choice}, 1) for choice in ("captain", "mate")]

    def samples(self, subject: Any, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        if not done:
            (loss,) = subject.choice_losses(Prompt("The"), [f" {point.values['choice']}"])
            yield Sample("only", point.values, {"loss": loss})


class Records(Loss):
    """How much a memory holds of a text."""

    name, title = "records", "Records"
    needs = "memory"

    def samples(self, subject: Any, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        if not done:
            memory = subject.memory_of(Prompt("Why?", (str(point.values["choice"]),)))
            yield Sample("only", point.values, {"loss": float(memory.tokens)})


class Missing(Letters):
    """Needs a set that is not there."""

    name, title = "missing", "Missing"

    def points(self, subject: Completes) -> list[Point]:
        self.texts.documents("books")
        return super().points(subject)


class TooLong(Letters):
    """Longer than anything takes."""

    name, title = "toolong", "Too long"

    def points(self, subject: Completes) -> list[Point]:
        return [Point({"words": 2}, 2, 1 << 50)]


def with_small_tasks(*arguments: str) -> None:
    """`longfocus` with the tasks above."""
    import longfocus.tasks
    from tests.commands.children import longfocus as run

    kinds = (Letters, Loss, Records, Missing, TooLong)
    longfocus.tasks.TASKS = {kind.name: f"tests.evaluation.children:{kind.__name__}" for kind in kinds}
    run(*arguments)
