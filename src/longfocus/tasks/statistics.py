"""Estimates with 95% intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from longfocus.errors import ConfigError

Z = 1.959963984540054
"""97.5% of a normal distribution lie below."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval; nan where nothing can be said."""

    value: float
    low: float
    high: float


def share_of(right: int, total: int) -> Estimate:
    """A share from counts, with Wilson's interval (1927), which holds for small counts and at 0 and 1 too."""
    if not total:
        return Estimate(math.nan, 0.0, 1.0)
    value, square = right / total, Z * Z / total
    middle = (value + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(value * (1 - value) / total + square / (4 * total))
    low = 0.0 if right == 0 else max(0.0, middle - half)
    return Estimate(value, low, 1.0 if right == total else min(1.0, middle + half))


def mean_of(numbers: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """The (weighted) mean of independent numbers; the interval from their spread, Student's t for few of them.

    With weights it is the ratio estimate sum(w x) / sum(w), whose error is that of the weighted residuals. One number that
    is not finite makes everything nan: a model that gave it was not measured.
    """
    weights = [1.0] * len(numbers) if weights is None else weights
    assert len(weights) == len(numbers)
    total = math.fsum(weights)
    if not numbers or total <= 0 or not all(map(math.isfinite, numbers)):
        return Estimate(math.nan, math.nan, math.nan)
    mean = math.fsum(w * x for w, x in zip(weights, numbers, strict=True)) / total
    count = len(numbers)
    if count < 2:
        return Estimate(mean, math.nan, math.nan)
    spread = math.fsum((w * (x - mean)) ** 2 for w, x in zip(weights, numbers, strict=True))
    error = math.sqrt(spread * count / (count - 1)) / total
    half = _student(count - 1) * error
    return Estimate(mean, mean - half, mean + half)


def median_of(numbers: Sequence[float]) -> Estimate:
    """The median; its interval reaches from one of the numbers in order to another, and holds however they are spread.

    How many of them lie below the true median is binomial, which says how far from the ends those two may stand. Fewer
    than six numbers cannot cover 95%, and the interval is nan.
    """
    if not numbers or not all(map(math.isfinite, numbers)):
        return Estimate(math.nan, math.nan, math.nan)
    ordered, count = sorted(numbers), len(numbers)
    outside, below = 0, 0.0  # numbers left out at either end, and the chance that as few lie below the median
    while below + math.comb(count, outside) / 2**count <= 0.025:
        below += math.comb(count, outside) / 2**count
        outside += 1
    middle = statistics.median(ordered)
    if not outside:
        return Estimate(middle, math.nan, math.nan)
    return Estimate(middle, ordered[outside - 1], ordered[count - outside])


def within(estimate: Estimate, least: float, most: float) -> Estimate:
    """The estimate with its interval cut to what is possible."""
    low = estimate.low if math.isnan(estimate.low) else max(least, estimate.low)
    high = estimate.high if math.isnan(estimate.high) else min(most, estimate.high)
    return Estimate(estimate.value, low, high)


def _student(degrees: int) -> float:
    """97.5% quantile of Student's t."""
    try:
        from scipy.special import stdtrit
    except ImportError:
        raise ConfigError("Intervals need scipy: pip install 'longfocus[eval]'") from None
    return float(stdtrit(degrees, 0.975))


def share_by_group(numbers: Sequence[float], groups: Sequence[Hashable]) -> Estimate:
    """The mean of numbers from 0 to 1 that come in groups, for instance questions after the same demonstrations.

    Numbers of one group resemble each other, so the interval is that of the groups' means, weighted by their sizes
    (Student's t, cut to 0 … 1). It is never narrower than that of independent numbers: few groups can agree by chance. With
    one group nothing is known of the spread, and the interval is nan.
    """
    assert len(numbers) == len(groups)
    members: dict[Hashable, list[float]] = {}
    for number, group in zip(numbers, groups, strict=True):
        members.setdefault(group, []).append(number)
    means = [math.fsum(found) / len(found) for found in members.values()]
    between = mean_of(means, [len(found) for found in members.values()])
    if len(members) < 2:
        return between
    alone = share_of(int(sum(numbers)), len(numbers)) if set(numbers) <= {0.0, 1.0} else mean_of(numbers)
    return Estimate(between.value, max(0.0, min(between.low, alone.low)), min(1.0, max(between.high, alone.high)))


def mean_by_group(numbers: Sequence[float], weights: Sequence[float], groups: Sequence[Hashable]) -> Estimate:
    """The weighted mean of numbers that come in groups, for instance losses of several blocks of each document.

    As in `share_by_group` the interval is that of the groups' means, and never narrower than that of independent numbers.
    With one group it is that of the numbers: it then speaks of other blocks of this document, not of other documents.
    """
    assert len(numbers) == len(weights) == len(groups)
    alone = mean_of(numbers, weights)
    members: dict[Hashable, list[tuple[float, float]]] = {}
    for number, weight, group in zip(numbers, weights, groups, strict=True):
        members.setdefault(group, []).append((weight * number, weight))
    if len(members) < 2:
        return alone
    totals = [(math.fsum(x for x, _ in found), math.fsum(w for _, w in found)) for found in members.values()]
    between = mean_of([total / weight for total, weight in totals], [weight for _, weight in totals])
    return Estimate(between.value, min(between.low, alone.low), max(between.high, alone.high))


def exp_of(estimate: Estimate) -> Estimate:
    """e to the estimate and to its ends: a perplexity, from a mean loss in nats."""
    return Estimate(*(math.inf if x > 700 else math.exp(x) for x in (estimate.value, estimate.low, estimate.high)))


def percent_change_of(estimate: Estimate) -> Estimate:
    """By how many percent a factor differs from 1, from an estimate of its logarithm."""
    factor = exp_of(estimate)
    return Estimate(*(100 * (x - 1) for x in (factor.value, factor.low, factor.high)))
