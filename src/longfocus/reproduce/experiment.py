"""What an experiment is: lines of a figure, each a trained model and how it is evaluated; the paper's numbers; claims.

A whole one is `reproduce/dictionary.py`. An experiment has the same lines at every scale:

    smoke    a minute or two on 2 CPU cores; shows that everything runs, not that the paper is right
    small    at most a few hours on 2 CPU cores
    paper    the paper's own recipe, for people with GPUs

Neither torch nor transformers is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longfocus.reproduce.claims import Claim
from longfocus.training.recipes import Recipe

SCALES = ("smoke", "small", "paper")
RESULT_FOLDER = "model"
"""In a run's folder."""
_SEEDS_APART = 1000


@dataclass(frozen=True)
class Model:
    """What is trained, with several seeds. Experiments that need the same model give it the same name, recipe and base, and it is
    trained once."""

    name: str
    """Short, for folders: fot, lm-plain, lm-d8."""
    recipe: Mapping[str, Any]
    """A training recipe as plain data, without run.seed and run.output; with a base, without model too."""
    base: Model | None = None
    """Trained before; training goes on from the base of the same seed."""

    def folder(self, scale: str, seed: int, within: Path) -> Path:
        """Where the run of one seed lies in the folder of all models."""
        return within / f"{self.name}-{scale}-seed{seed}"

    def trained_as(self, scale: str, seed: int, within: Path) -> Recipe:
        """The recipe of one seed, which trains into a folder of its own below `within`.

        Raises:
            ConfigError: the recipe is not valid.
        """
        recipe = dict(self.recipe)
        if self.base is not None:
            assert "model" not in recipe, "a base or a model"
            recipe["model"] = str(self.base.folder(scale, seed, within) / RESULT_FOLDER)
        draws = seed + _SEEDS_APART * (len(self.lineage) - 1)  # other documents than the base began with
        recipe["run"] = {**recipe["run"], "seed": draws, "output": str(self.folder(scale, seed, within))}
        return Recipe.check(recipe, f"recipe of {self.name}")

    @property
    def lineage(self) -> tuple[Model, ...]:
        """The first base, what began from it, and so on to this model."""
        return (*(self.base.lineage if self.base is not None else ()), self)


@dataclass(frozen=True)
class Line:
    """A line of the figure: a model, and how it is evaluated."""

    name: str
    """Short, for claims and folders."""
    title: str
    """For tables and the figure."""
    model: Model
    plain: bool = False
    """Evaluated with full attention, without a memory."""
    focus: Mapping[str, Any] = field(default_factory=dict)
    """Fields of FocusConfig that differ in the evaluation."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task that differ from the scale's."""
    where: Mapping[str, str | int] = field(default_factory=dict)
    """Which rows of the evaluation are the line's, beside `Experiment.where`."""
    group: str = ""
    """Lines of a group share a panel of the figure and a table."""

    def evaluated_as(self, other: Line) -> bool:
        """Whether one evaluation serves both lines."""
        ours, theirs = ((x.model, x.plain, x.focus, x.options) for x in (self, other))
        return ours == theirs


@dataclass(frozen=True)
class Evaluation:
    """One model, measured once a seed for all lines that read its rows."""

    name: str
    """That of its first line."""
    lines: Sequence[Line]
    options: Mapping[str, Any]
    """Of the task, all of them."""


@dataclass(frozen=True)
class Scale:
    """What is trained and evaluated at one scale."""

    lines: Sequence[Line]
    seeds: int
    """Each model is trained with seeds 0 to seeds - 1."""
    options: Mapping[str, Any]
    """Of the task."""
    about: str
    """Sizes in a sentence, for the page."""
    departures: Sequence[str] = ()
    """What differs from the paper, or was chosen where it is silent."""

    @property
    def models(self) -> tuple[Model, ...]:
        """Every model once, a base before what begins from it."""
        found: dict[str, Model] = {}
        for line in self.lines:
            for model in line.model.lineage:
                assert found.setdefault(model.name, model) == model, f"two models are called {model.name}"
        return tuple(found.values())

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """What is measured, in the order of the lines."""
        shared: list[list[Line]] = []
        for line in self.lines:
            known = next((lines for lines in shared if lines[0].evaluated_as(line)), None)
            if known is None:
                shared.append([line])
            else:
                known.append(line)
        return tuple(Evaluation(lines[0].name, lines, {**self.options, **lines[0].options}) for lines in shared)


@dataclass(frozen=True)
class Told:
    """A number of the paper."""

    value: float
    how: str = ""
    """`about` where it was read off a figure, `above` where only a bound is given."""


@dataclass(frozen=True)
class Published:
    """The paper's numbers, typed in."""

    where: str
    """Figure or table; empty where the paper has no such numbers."""
    lines: Mapping[str, Mapping[float, Told]]
    """Line -> x -> number."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One figure of the paper, or one that it lacks."""

    name: str
    title: str
    paper: str = ""
    """Section and figure; empty where it has none."""
    scale: Callable[[str, Path], Scale]
    """(name of a scale, folder of texts) -> what is done there."""
    task: str
    """Name in `longfocus.tasks`."""
    axis: str
    """The task's axis that is the figure's x."""
    axis_title: str
    measure: str
    """The task's measure that is the figure's y."""
    share: bool
    """The measure is a share, told in %."""
    published: Published = Published("", {})
    claims: Sequence[Claim]
    where: Mapping[str, str | int] = field(default_factory=dict)
    """Rows of the task with these values are the figure's."""


def of_perplexity(*, axis_title: str = "tokens in memory", **fields: Any) -> Experiment:
    """An experiment whose figure is perplexity against context; `fields` are the others of `Experiment`."""
    return Experiment(
        task="perplexity", axis="context", axis_title=axis_title, measure="perplexity", share=False, **fields
    )
