"""What a task is: points to measure, samples at each, rows that sum them up, a picture.

A task is one file with one class and a line in `tasks.TASKS`, or a file of one's own (`longfocus eval capitals.py`)
with a module-level `TASK`. Everything else (models, progress, resume, intervals, tables, plots, reports) is done around
it. A whole one:

    from longfocus.subjects.contract import Prompt
    from longfocus.tasks.contract import AnswerTask, Example, Measure, Point

    CAPITALS = {
        "Asia": {"Japan": "Tokyo", "Mongolia": "Ulaanbaatar"},
        "Europe": {"France": "Paris", "Latvia": "Riga"},
    }

    class Capitals(AnswerTask):
        \"\"\"Capitals of countries, asked for in one line.\"\"\"

        name, title = "capitals", "Capitals"
        paper = "made up"
        axes = ("continent",)
        measures = (Measure("right", "share", "higher"),)
        max_new_tokens = 8

        def points(self, subject):
            return [Point({"continent": name}, samples=len(found)) for name, found in CAPITALS.items()]

        def examples(self, subject, point):
            for country, capital in CAPITALS[point.values["continent"]].items():
                yield Example(country, Prompt(f"The capital of {country} is"), expected={"answer": capital})

        def score(self, example, completion):
            return {"right": float(example.expected["answer"] in completion.text)}

    TASK = Capitals

Same options and seed give the same examples, on every machine and however often a run was stopped: draw from
`random.Random(f"{seed} …")` only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from longfocus.subjects.contract import Completes, Completion, Prompt
from longfocus.tasks.statistics import Estimate, mean_of, share_by_group, share_of, within
from longfocus.tasks.texts import Texts

Values = Mapping[str, int | float | str]
"""What is varied: axis -> value."""


class TaskOptions(BaseModel):
    """Settings of a task; `--set task.name=value`. Unknown names and impossible values are errors that name the key.

    Options named `by_…` change rows only, never samples: a finished run is summed up anew when they are changed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    seed: int = 0
    """Of everything that is drawn."""


@dataclass(frozen=True)
class Measure:
    """A number that a task gives."""

    name: str
    """Key of `Sample.scores`, and what tables and plots call it."""
    kind: Literal["share", "number"]
    """`share`: 0 to 1, shown as %; its interval is Wilson's where all scores are 0 or 1. `number`: anything."""
    better: Literal["higher", "lower", "neither"]
    unit: str = ""
    """For axes: nats, tokens/s, MB; shares need none."""
    drawn: bool = False
    """Drawn beside the first measure, in panels of its own; of the same kind as that one, and of the same unit unless the
    names say theirs."""


@dataclass(frozen=True)
class Point:
    """A place in the table: what is varied, and how many samples are taken there."""

    values: Values
    """One for each of the task's axes; or for some of them, where samples that differ in the others are measured together
    and say which they are."""
    samples: int
    """For the progress bar."""
    tokens: int | None = None
    """Longest prompt with its answer; a model that cannot take it is not asked, and the result says so."""
    refused: str | None = None
    """Why it cannot be measured, whatever the model (texts that are too short); the result says so."""

    @property
    def key(self) -> str:
        """The values as one text."""
        return ", ".join(f"{name}={value}" for name, value in self.values.items())

    def covers(self, values: Values) -> bool:
        """Whether a sample with these values is one of this point's."""
        return all(name in values and values[name] == value for name, value in self.values.items())


@dataclass(frozen=True)
class Sample:
    """One measured thing: a line of samples.jsonl."""

    id: str
    """Unique in its point, the same in every run."""
    values: Values
    """Of the point, and of the axes that the point leaves open."""
    scores: dict[str, float]
    weight: float = 1.0
    """In means: 1, or the number of tokens that a score is of."""
    details: dict[str, Any] = field(default_factory=dict)
    """What helps to judge it: prompt tokens, answer, place, seconds."""


@dataclass(frozen=True)
class Row:
    """What the samples of a point come to."""

    values: Values
    samples: int
    estimates: dict[str, Estimate]
    """One a measure."""
    chance: dict[str, float] = field(default_factory=dict)
    """What guessing would score, by measure, where that is known."""
    notes: dict[str, Any] = field(default_factory=dict)
    """More numbers for the table, not compared."""


class Task(ABC):
    """One evaluation."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    """Where it is from, with section."""
    axes: tuple[str, ...]
    """What points vary; may depend on the options. The first is the plot's x, the second its lines or, with `heat`, its y."""
    measures: tuple[Measure, ...]
    """The first is the one that is plotted. May depend on the options."""
    needs: ClassVar[str] = "complete"
    """`complete`, `losses` or `memory` (see `subjects.contract`)."""
    heat: bool = False
    """Draw colours over the first two axes instead of lines."""
    log_x: ClassVar[bool] = True
    """The x axis is logarithmic, where it is numbers."""
    Options: ClassVar[type[TaskOptions]] = TaskOptions
    quick: ClassVar[dict[str, Any]] = {}
    """Options of `--quick`: minutes for all tasks together on 2 cores."""

    def __init__(self, options: TaskOptions, texts: Texts) -> None:
        """
        Args:
            options: an instance of `Options`.
            texts: held-out texts and question sets.
        """
        self.options: Any = options
        self.texts = texts

    @abstractmethod
    def points(self, subject: Completes) -> Sequence[Point]:
        """What is measured, in order; cheap.

        Raises:
            InputError: a data set is missing.
        """

    @abstractmethod
    def samples(self, subject: Any, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        """The samples of a point but those with ids in `done`, which an earlier, stopped run has."""

    def rows(self, samples: Sequence[Sample]) -> list[Row]:
        """Means by point with 95% intervals, in the order of the first sample of each."""
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(Point(sample.values, 0).key, []).append(sample)
        return [self.row(group) for group in groups.values()]

    def row(self, group: Sequence[Sample]) -> Row:
        """Means of one point."""
        estimates = {}
        for measure in self.measures:
            taken = [sample for sample in group if measure.name in sample.scores]
            if taken:
                numbers, weights = [s.scores[measure.name] for s in taken], [s.weight for s in taken]
                clusters = [self.cluster(sample) for sample in taken]
                share = measure.kind == "share" and set(weights) == {1.0}
                finite = all(map(math.isfinite, numbers))
                if share and finite and None not in clusters:
                    estimate = share_by_group(numbers, clusters)
                elif share and set(numbers) <= {0.0, 1.0}:
                    estimate = share_of(int(sum(numbers)), len(numbers))
                else:
                    estimate = mean_of(numbers, weights)
                estimates[measure.name] = within(estimate, 0.0, 1.0) if measure.kind == "share" else estimate
        return Row(group[0].values, len(group), estimates, self.chance(group[0].values), self.notes(group))

    def cluster(self, sample: Sample) -> Hashable | None:
        """What a sample shares with others of its point (a draw of demonstrations, a paper), so that they are not
        independent and intervals must say so; None: it is independent."""
        return None

    def chance(self, values: Values) -> dict[str, float]:
        """What guessing scores at a point, by measure; none where it is not known."""
        return {}

    def notes(self, group: Sequence[Sample]) -> dict[str, Any]:
        """More numbers about a point, for the table."""
        return {}


@dataclass(frozen=True)
class Example:
    """A prompt and what would be right."""

    id: str
    prompt: Prompt
    expected: dict[str, Any]
    """What `score` compares with; it goes into the sample's details."""


class AnswerTask(Task):
    """A task whose samples are prompts with answers that can be scored."""

    max_new_tokens: ClassVar[int] = 20
    stop: ClassVar[str | None] = None
    """Regular expression that ends an answer."""
    mass: ClassVar[bool] = False
    """Ask for the attention mass of documents."""

    @abstractmethod
    def examples(self, subject: Completes, point: Point) -> Iterator[Example]:
        """The examples of a point; those that begin alike stand side by side."""

    @abstractmethod
    def score(self, example: Example, completion: Completion) -> dict[str, float]:
        """Scores of an answer, by measure."""

    def samples(self, subject: Completes, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        """Ask, score, go on."""
        yield from self.ask(subject, point, [e for e in self.examples(subject, point) if e.id not in done])

    def ask(self, subject: Completes, point: Point, examples: Sequence[Example]) -> Iterator[Sample]:
        """The samples of examples, in their order."""
        completions = subject.complete(
            [example.prompt for example in examples],
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            mass=self.mass,
        )
        for example, completion in zip(examples, completions, strict=True):
            details = {
                **example.expected,
                "answer": completion.text,
                "prompt_tokens": completion.prompt_tokens,
                "seconds": round(completion.seconds, 3),
            }
            if completion.shared_tokens:
                details["tokens_read_with_others"] = completion.shared_tokens
            if completion.document_mass is not None:
                details["document_mass"] = [round(mass, 6) for mass in completion.document_mass]
            yield Sample(example.id, point.values, self.score(example, completion), 1.0, details)
