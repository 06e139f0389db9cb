"""Intervals of numbers that come in groups: by hand, at the edges, and in simulation.

python -m pytest tests/tasks/test_share_by_group.py
"""

from __future__ import annotations

import math
import random

import pytest

from longfocus.tasks.statistics import mean_of, share_by_group, share_of


def test_by_hand() -> None:
    """Four draws of 25 questions: 10, 20, 5 and 15 right."""
    rights = {0: 10, 1: 20, 2: 5, 3: 15}
    numbers = [float(n < right) for right in rights.values() for n in range(25)]
    groups = [draw for draw in rights for _ in range(25)]
    found = share_by_group(numbers, groups)
    deviation = math.sqrt(((0.4 - 0.5) ** 2 + (0.8 - 0.5) ** 2 + (0.2 - 0.5) ** 2 + (0.6 - 0.5) ** 2) / 3)
    half = 3.182446 * deviation / 2  # t of 3 degrees of freedom, a square root of 4 draws
    assert found.value == pytest.approx(0.5)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    alone = share_of(50, 100)
    assert found.high - found.low > 3 * (alone.high - alone.low)


def test_groups_that_agree_by_chance_get_the_interval_of_independent_numbers() -> None:
    assert share_by_group([1.0] * 20, [0, 1] * 10) == share_of(20, 20)
    assert share_by_group([1.0, 0.0] * 10, sorted([0, 1] * 10)) == share_of(10, 20)
    numbers = [0.25, 0.75] * 10
    assert share_by_group(numbers, sorted([0, 1] * 10)) == mean_of(numbers)


def test_one_group_says_nothing_about_the_spread() -> None:
    found = share_by_group([1.0, 0.0, 1.0, 1.0], ["draw"] * 4)
    assert found.value == 0.75
    assert math.isnan(found.low) and math.isnan(found.high)


def test_groups_of_different_size_weigh_as_they_are_large_and_shares_stay_shares() -> None:
    found = share_by_group([1.0] * 9 + [0.0], ["a"] * 9 + ["b"])
    assert found.value == pytest.approx(0.9)
    assert 0 <= found.low <= 0.9 <= found.high <= 1


def test_it_holds_the_truth_where_samples_are_correlated_and_the_interval_of_independent_ones_does_not() -> None:
    """20 draws of 25 questions whose chance of being right is 0.2 or 0.8 by draw: the truth is 0.5."""
    rng = random.Random("intervals")
    held = [0, 0]
    for _ in range(200):
        numbers, groups = [], []
        for draw in range(20):
            chance = rng.choice((0.2, 0.8))
            numbers += [float(rng.random() < chance) for _ in range(25)]
            groups += [draw] * 25
        for which, estimate in enumerate((share_by_group(numbers, groups), share_of(int(sum(numbers)), 500))):
            held[which] += estimate.low <= 0.5 <= estimate.high
    assert held[0] >= 182, held
    assert held[1] <= 120, held
