"""What rows see over a run: a mix for each step.

    constant       one mix throughout
    switched       another mix from a given part of the run on: d = 2, then 64 for the last tenth (the paper's figure 3)
    drawn          each step draws one of several: d from {2, 128}
    by_accuracy    d = 1 until 98% training accuracy, then 128 (the paper's dictionary lookup, appendix F)

Starting with many negatives makes a model ignore its additional context (section 3.2), so a run starts small.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from longfocus.crossbatch.plan import Mix, check_mix
from longfocus.errors import ConfigError


class Schedule(Protocol):
    """A mix for each step. Only `observe` changes it; its state is part of a checkpoint."""

    def mix(self, step: int, generator: np.random.Generator) -> Mix:
        """The mix of a step; `generator` is seeded by run and step."""
        ...

    def observe(self, accuracy: float) -> None:
        """Told the training accuracy of a step, in [0, 1]."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        ...

    @property
    def mixes(self) -> list[Mix]:
        """All mixes that may come up."""
        ...


class _Stateless:
    def observe(self, accuracy: float) -> None:
        """Nothing depends on it."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


@dataclass
class Switched(_Stateless):
    """Mixes one after another, each from its own step on. One mix from step 0 is the constant schedule."""

    stages: Sequence[tuple[int, Mix]]
    """(first step, mix), in order, the first from step 0."""

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.stages]
        if not steps or steps[0] != 0 or any(b <= a for a, b in itertools.pairwise(steps)):
            raise ConfigError(f"schedule: stages begin at steps {steps}; expected 0 first and then rising steps.")
        for _, mix in self.stages:
            check_mix(mix)

    @property
    def mixes(self) -> list[Mix]:
        return [mix for _, mix in self.stages]

    def mix(self, step: int, generator: np.random.Generator) -> Mix:
        """The last stage that has begun."""
        return [mix for first, mix in self.stages if first <= step][-1]


def constant(mix: Mix) -> Switched:
    """One mix throughout."""
    return Switched([(0, mix)])


@dataclass
class Drawn(_Stateless):
    """One of several mixes, drawn at each step with equal chances."""

    choices: Sequence[Mix]

    def __post_init__(self) -> None:
        if not self.choices:
            raise ConfigError("schedule: nothing to draw from; give two or more mixes.")
        for mix in self.choices:
            check_mix(mix)

    @property
    def mixes(self) -> list[Mix]:
        return list(self.choices)

    def mix(self, step: int, generator: np.random.Generator) -> Mix:
        """Drawn from the step's own generator."""
        return self.choices[int(generator.integers(len(self.choices)))]


@dataclass
class ByAccuracy:
    """The first mix until the training accuracy of a step has reached a threshold, then the second for good."""

    first: Mix
    then: Mix
    threshold: float
    switched: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"schedule: accuracy {self.threshold} given, expected a number above 0, at most 1.")
        check_mix(self.first)
        check_mix(self.then)

    @property
    def mixes(self) -> list[Mix]:
        return [self.first, self.then]

    def mix(self, step: int, generator: np.random.Generator) -> Mix:
        """By what was observed so far."""
        return self.then if self.switched else self.first

    def observe(self, accuracy: float) -> None:
        """Switch for good when the threshold is reached."""
        self.switched = self.switched or accuracy >= self.threshold

    def state_dict(self) -> dict[str, Any]:
        """Whether it has switched."""
        return {"switched": self.switched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As saved."""
        self.switched = bool(state["switched"])
