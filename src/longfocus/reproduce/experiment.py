"""What an experiment is: lines of a figure, each a training recipe and how its model is evaluated; the paper's numbers; claims.

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


@dataclass(frozen=True)
class Line:
    """A line of the figure: a model that is trained, with several seeds, and evaluated."""

    name: str
    """Short, for folders and claims: fot, plain, d8."""
    title: str
    """For tables and the figure."""
    recipe: Mapping[str, Any]
    """A training recipe as plain data, without run.seed and run.output. Experiments that train the same model give it the same
    name and recipe, and it is trained once."""
    plain: bool = False
    """Evaluated with full attention, without a memory."""
    focus: Mapping[str, Any] = field(default_factory=dict)
    """Fields of FocusConfig that differ in the evaluation."""
    where: Mapping[str, str] = field(default_factory=dict)
    """Which rows of the evaluation are the line's, beside `Experiment.where`."""

    def trained_as(self, scale: str, seed: int, folder: Path) -> Recipe:
        """The recipe of one seed, which trains into a folder of its own below `folder`.

        Raises:
            ConfigError: the recipe is not valid.
        """
        run = {**self.recipe["run"], "seed": seed, "output": str(folder / f"{self.name}-{scale}-seed{seed}")}
        return Recipe.check({**self.recipe, "run": run}, f"recipe of {self.name}")


@dataclass(frozen=True)
class Scale:
    """What is trained and evaluated at one scale."""

    lines: Sequence[Line]
    seeds: int
    """Each line is trained with seeds 0 to seeds - 1."""
    options: Mapping[str, Any]
    """Of the task."""
    about: str
    """Sizes in a sentence, for the page."""
    departures: Sequence[str] = ()
    """What differs from the paper, or was chosen where it is silent."""


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
    """Figure or table."""
    lines: Mapping[str, Mapping[float, Told]]
    """Line -> x -> number."""
    note: str = ""


@dataclass(frozen=True)
class Experiment:
    """One figure of the paper."""

    name: str
    title: str
    paper: str
    """Section and figure."""
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
    published: Published
    claims: Sequence[Claim]
    where: Mapping[str, str] = field(default_factory=dict)
    """Rows of the task with these values are the figure's."""
