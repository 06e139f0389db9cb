"""What the paper claims, as checks on what was measured, with 95% intervals over seeds.

    held            the whole interval is on the claimed side, at every x that was measured
    did not hold    the whole interval is on the other side at some x
    undecided       neither; also with a single seed, whose spread is not known, and where nothing was measured

A difference between two lines is taken seed by seed: equal seeds see the same documents in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from longfocus.tasks.statistics import Estimate, mean_of

Outcome = Literal["held", "did not hold", "undecided"]


@dataclass(frozen=True)
class Number:
    """One measured number: a line's model of one seed at one x."""

    line: str
    seed: int
    x: float
    value: float
    low: float
    """End of its own 95% interval, over samples."""
    high: float
    samples: int


@dataclass(frozen=True)
class Verdict:
    """What a claim came to."""

    outcome: Outcome
    detail: str
    """By how much, at which x."""


class Claim(Protocol):
    """A statement that can be checked."""

    @property
    def text(self) -> str:
        """The claim in a sentence, with its place in the paper."""
        ...

    def check(self, numbers: Sequence[Number], show: Callable[[float], str]) -> Verdict:
        """Compare with what was measured; `show` writes a number of the measure."""
        ...


def by_seed(numbers: Sequence[Number], line: str, x: float) -> dict[int, float]:
    """Seed -> value; numbers that are none are left out."""
    return {n.seed: n.value for n in numbers if n.line == line and n.x == x and math.isfinite(n.value)}


def _xs(numbers: Sequence[Number], *lines: str) -> list[float]:
    """Where all of the lines were measured."""
    found = [{n.x for n in numbers if n.line == line} for line in lines]
    return sorted(set.intersection(*found)) if found else []


def side(estimate: Estimate) -> Outcome:
    """Whether an estimate that is claimed to be above 0 is."""
    if estimate.low > 0:
        return "held"
    return "did not hold" if estimate.high < 0 else "undecided"


def _all(outcomes: Sequence[Outcome]) -> Outcome:
    if "did not hold" in outcomes:
        return "did not hold"
    return "held" if outcomes and set(outcomes) == {"held"} else "undecided"


def _said(x: float, estimate: Estimate, show: Callable[[float], str]) -> str:
    ends = "one seed" if math.isnan(estimate.low) else f"{show(estimate.low)} to {show(estimate.high)}"
    return f"at {x:,.0f}: {show(estimate.value)} ({ends})"


def _paired(
    numbers: Sequence[Number], line: str, than: str, least: float
) -> Iterator[tuple[float, list[tuple[float, float]]]]:
    """At each x from `least` on that both lines have: the numbers of both, seed by seed."""
    for x in _xs(numbers, line, than):
        if x >= least:
            ours, other = by_seed(numbers, line, x), by_seed(numbers, than, x)
            yield x, [(ours[seed], other[seed]) for seed in sorted(ours.keys() & other.keys())]


@dataclass(frozen=True)
class Better:
    """One line is better than another at every x from `least` on."""

    text: str
    line: str
    than: str
    lower_is_better: bool = False
    least: float = 0.0

    def check(self, numbers: Sequence[Number], show: Callable[[float], str]) -> Verdict:
        """By the mean difference over seeds."""
        outcomes: list[Outcome] = []
        said = []
        sign = -1.0 if self.lower_is_better else 1.0
        for x, pairs in _paired(numbers, self.line, self.than, self.least):
            estimate = mean_of([sign * (ours - other) for ours, other in pairs])
            outcomes.append(side(estimate))
            said.append(_said(x, estimate, show))
        return Verdict(_all(outcomes), "better by, " + "; ".join(said) if said else "not measured")


@dataclass(frozen=True)
class Alike:
    """Two lines differ by at most a share of the second one's number, at every x from `least` on."""

    text: str
    line: str
    than: str
    within: float
    """0.01: by 1%."""
    least: float = 0.0

    def check(self, numbers: Sequence[Number], show: Callable[[float], str]) -> Verdict:
        """By the mean difference over seeds; held where its whole interval is inside, not where it is wholly outside."""
        outcomes: list[Outcome] = []
        said = []
        for x, pairs in _paired(numbers, self.line, self.than, self.least):
            estimate = mean_of([ours / other - 1 for ours, other in pairs])
            if -self.within <= estimate.low and estimate.high <= self.within:
                outcomes.append("held")
            elif estimate.high < -self.within or estimate.low > self.within:
                outcomes.append("did not hold")
            else:
                outcomes.append("undecided")
            said.append(_said(x, estimate, lambda value: f"{100 * value:+.2f}%"))
        return Verdict(_all(outcomes), "differs, " + "; ".join(said) if said else "not measured")


@dataclass(frozen=True)
class Falls:
    """A line's number at the largest x is lower than at the smallest one from `least` on."""

    text: str
    line: str
    least: float = 0.0

    def check(self, numbers: Sequence[Number], show: Callable[[float], str]) -> Verdict:
        """By the mean fall over seeds."""
        xs = [x for x in _xs(numbers, self.line) if x >= self.least]
        if len(xs) < 2:
            return Verdict("undecided", "not measured at two x")
        first, last = by_seed(numbers, self.line, xs[0]), by_seed(numbers, self.line, xs[-1])
        estimate = mean_of([first[seed] - last[seed] for seed in sorted(first.keys() & last.keys())])
        return Verdict(side(estimate), f"from {xs[0]:,.0f} lower by, {_said(xs[-1], estimate, show)}")


@dataclass(frozen=True)
class AtLeast:
    """A line reaches a level at one x."""

    text: str
    line: str
    x: float
    level: float

    def check(self, numbers: Sequence[Number], show: Callable[[float], str]) -> Verdict:
        """By the mean over seeds."""
        found = by_seed(numbers, self.line, self.x)
        if not found:
            return Verdict("undecided", f"not measured at {self.x:,.0f}")
        mean = mean_of(list(found.values()))
        above = Estimate(*(value - self.level for value in (mean.value, mean.low, mean.high)))
        if len(set(found.values())) == 1 and len(found) > 1:  # no spread: the level itself counts as reached
            reached: Outcome = "held" if above.value >= 0 else "did not hold"
        else:
            reached = side(above)
        return Verdict(reached, _said(self.x, mean, show))


@dataclass(frozen=True)
class Near:
    """A line lies within a factor of an expected number at every x from `least` on."""

    text: str
    line: str
    expected: Callable[[float], float]
    factor: float
    least: float = 0.0

    def check(self, numbers: Sequence[Number], show: Callable[[float], str]) -> Verdict:
        """Held where the whole interval over seeds is inside, not where it is wholly outside."""
        outcomes: list[Outcome] = []
        said = []
        for x in _xs(numbers, self.line):
            if x < self.least:
                continue
            mean = mean_of(list(by_seed(numbers, self.line, x).values()))
            low, high = self.expected(x) / self.factor, self.expected(x) * self.factor
            if low <= mean.low and mean.high <= high:
                outcomes.append("held")
            elif mean.high < low or mean.low > high:
                outcomes.append("did not hold")
            else:
                outcomes.append("undecided")
            said.append(f"{_said(x, mean, show)}, expected {show(self.expected(x))}")
        return Verdict(_all(outcomes), "; ".join(said) or "not measured")
