"""Estimates with 95% intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats


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
    interval = stats.binomtest(right, total).proportion_ci(method="wilson")
    return Estimate(right / total, float(interval.low), float(interval.high))


def mean_of(numbers: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """The (weighted) mean of independent numbers; the interval from their spread, Student's t for few of them.

    With weights it is the ratio estimate sum(w x) / sum(w), whose error is that of the weighted residuals.
    """
    weights = [1.0] * len(numbers) if weights is None else weights
    assert len(weights) == len(numbers)
    total = math.fsum(weights)
    if not numbers or total <= 0:
        return Estimate(math.nan, math.nan, math.nan)
    mean = math.fsum(w * x for w, x in zip(weights, numbers, strict=True)) / total
    count = len(numbers)
    if count < 2:
        return Estimate(mean, math.nan, math.nan)
    spread = math.fsum((w * (x - mean)) ** 2 for w, x in zip(weights, numbers, strict=True))
    error = math.sqrt(spread * count / (count - 1)) / total
    half = float(stats.t.ppf(0.975, count - 1)) * error
    return Estimate(mean, mean - half, mean + half)
