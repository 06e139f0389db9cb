"""Estimates and their 95% intervals: against scipy, by hand, at the edges, and in simulation.

python -m pytest tests/tasks/test_statistics.py
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from longfocus.tasks.statistics import Estimate, mean_of, share_of, within


@pytest.mark.parametrize(
    ("right", "total"), [(0, 1), (1, 1), (0, 8), (8, 8), (1, 8), (25, 50), (49, 50), (3, 7), (1, 1000)]
)
def test_a_share_has_the_interval_of_wilson(right: int, total: int) -> None:
    expected = stats.binomtest(right, total).proportion_ci(method="wilson")
    found = share_of(right, total)
    assert found.value == right / total
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_by_hand() -> None:
    """4 of 10: (0.4 + 1.96²/20 ± 1.96 √(0.024 + 1.96²/400)) / (1 + 1.96²/10)."""
    found = share_of(4, 10)
    half = 1.96 * math.sqrt(0.4 * 0.6 / 10 + 1.96**2 / 400)
    ends = [(0.4 + 1.96**2 / 20 + sign * half) / (1 + 1.96**2 / 10) for sign in (-1, 1)]
    assert (found.low, found.high) == pytest.approx(ends, abs=1e-4)


def test_at_0_and_1_a_share_is_not_certain() -> None:
    none, every = share_of(0, 50), share_of(50, 50)
    assert (none.value, none.low, every.value, every.high) == (0.0, 0.0, 1.0, 1.0)
    assert none.high == pytest.approx(0.0714, abs=1e-4)
    assert every.low == pytest.approx(1 - none.high)


def test_nothing_measured_leaves_everything_possible() -> None:
    found = share_of(0, 0)
    assert math.isnan(found.value)
    assert (found.low, found.high) == (0.0, 1.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40))
def test_a_mean_has_the_interval_of_students_t(numbers: list[float]) -> None:
    found = mean_of(numbers)
    error = stats.sem(numbers)
    low, high = (
        stats.t.interval(0.95, len(numbers) - 1, loc=np.mean(numbers), scale=error) if error else [found.value] * 2
    )
    scale = max(1.0, *map(abs, numbers))
    assert found.value / scale == pytest.approx(float(np.mean(numbers)) / scale, abs=1e-12)
    assert (found.low / scale, found.high / scale) == pytest.approx((low / scale, high / scale), abs=1e-6)


def test_a_weighted_mean_by_hand() -> None:
    """Losses 2, 3 and 5 of 10, 10 and 20 tokens: 150 / 40; residuals -17.5, -7.5 and 25 in sum."""
    found = mean_of([2.0, 3.0, 5.0], [10, 10, 20])
    assert found.value == 3.75
    half = 4.302653 * math.sqrt((17.5**2 + 7.5**2 + 25**2) * 3 / 2) / 40
    assert (found.low, found.high) == pytest.approx((3.75 - half, 3.75 + half), abs=1e-5)


def test_equal_weights_change_nothing() -> None:
    numbers = [1.0, 2.5, 4.0, 8.0]
    plain, weighted = mean_of(numbers), mean_of(numbers, [7.0] * 4)
    assert (weighted.value, weighted.low, weighted.high) == pytest.approx((plain.value, plain.low, plain.high))


def test_a_sample_without_weight_counts_for_nothing() -> None:
    assert mean_of([1.0, 3.0, 99.0], [1, 1, 0]).value == 2.0


@pytest.mark.parametrize(
    ("numbers", "weights"),
    [([], None), ([1.0], [0.0]), ([1.0, math.nan], None), ([math.inf, 1.0], None), ([math.inf, -math.inf], [1, 2])],
)
def test_what_is_no_number_gives_no_estimate(numbers: list[float], weights: list[float] | None) -> None:
    found = mean_of(numbers, weights)
    assert all(map(math.isnan, (found.value, found.low, found.high)))


def test_one_number_has_no_interval() -> None:
    found = mean_of([2.0])
    assert found.value == 2.0
    assert math.isnan(found.low) and math.isnan(found.high)


def test_an_interval_is_cut_to_what_is_possible() -> None:
    assert within(Estimate(0.1, -0.2, 0.4), 0, 1) == Estimate(0.1, 0.0, 0.4)
    assert within(Estimate(0.9, 0.7, 1.1), 0, 1) == Estimate(0.9, 0.7, 1.0)
    assert math.isnan(within(Estimate(0.5, math.nan, math.nan), 0, 1).low)


def covered(interval: Estimate, truth: float) -> bool:
    return interval.low <= truth <= interval.high


@pytest.mark.parametrize("total", [8, 20, 50, 200])
def test_intervals_of_shares_hold_the_truth_19_times_of_20(total: int) -> None:
    """Exactly, from the binomial distribution, for shares from 2% to 98%; a single share's coverage swings about 95%."""
    intervals = [share_of(right, total) for right in range(total + 1)]
    coverage = []
    for percent in range(2, 99):
        truth = percent / 100
        chances = stats.binom.pmf(range(total + 1), total, truth)
        coverage.append(sum(p for p, interval in zip(chances, intervals, strict=True) if covered(interval, truth)))
    assert 0.945 < np.mean(coverage) < 0.965
    assert min(coverage) > 0.83


@pytest.mark.parametrize("count", [3, 10, 100])
def test_intervals_of_means_hold_the_truth_19_times_of_20(count: int) -> None:
    rng = random.Random(count)
    held = sum(covered(mean_of([rng.gauss(5, 2) for _ in range(count)]), 5) for _ in range(2000))
    assert 0.935 < held / 2000 < 0.965


def test_intervals_of_weighted_means_hold_the_truth() -> None:
    """Losses of documents of very different lengths; the truth is the loss of a token."""
    rng = random.Random(0)
    held = 0
    for _ in range(2000):
        weights = [rng.choice([50, 100, 200, 400]) for _ in range(60)]
        losses = [rng.gauss(3.0, 12 / math.sqrt(weight)) for weight in weights]
        held += covered(mean_of(losses, weights), 3.0)
    assert 0.93 < held / 2000 < 0.965
