"""Claims on hand-worked numbers: what holds, what does not, and what cannot be said.

python -m pytest tests/reproduce/test_claims.py
"""

from __future__ import annotations

import math

import pytest

from longfocus.evaluation.tables import number
from longfocus.reproduce.claims import Alike, AtLeast, Better, Falls, Near, Number


def _numbers(lines: dict[str, dict[float, list[float]]]) -> list[Number]:
    """line -> x -> a value a seed."""
    return [
        Number(line, seed, x, value, math.nan, math.nan, 1)
        for line, points in lines.items()
        for x, values in points.items()
        for seed, value in enumerate(values)
    ]


A_ABOVE_B = {"a": {1.0: [0.8, 0.9, 1.0], 2.0: [0.7, 0.8, 0.9]}, "b": {1.0: [0.6, 0.7, 0.8], 2.0: [0.5, 0.6, 0.7]}}


def test_an_ordering_holds_where_the_interval_of_differences_is_above_nothing() -> None:
    # differences 0.2 for each seed at both x, without spread
    found = Better("a above b", "a", "b").check(_numbers(A_ABOVE_B), number)
    assert found.outcome == "held"
    assert found.detail == "better by, at 1: 0.2 (0.2 to 0.2); at 2: 0.2 (0.2 to 0.2)"


def test_the_same_numbers_the_other_way_round_do_not_hold() -> None:
    assert Better("b above a", "b", "a").check(_numbers(A_ABOVE_B), number).outcome == "did not hold"
    assert (
        Better("lower is better", "b", "a", lower_is_better=True).check(_numbers(A_ABOVE_B), number).outcome == "held"
    )


def test_differences_are_taken_seed_by_seed() -> None:
    """Seeds differ by far more than the lines do; paired, the difference is 0.01, 0.02, 0.03: 0.02 -+ 4.303 * 0.01 / sqrt 3."""
    lines = {"a": {1.0: [0.11, 0.52, 0.93]}, "b": {1.0: [0.10, 0.50, 0.90]}}
    found = Better("a above b", "a", "b").check(_numbers(lines), number)
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert found.outcome == "undecided" and half > 0.02
    assert found.detail == f"better by, at 1: 0.02 ({number(0.02 - half)} to {number(0.02 + half)})"
    lines["a"][1.0] = [0.119, 0.52, 0.921]  # 0.019, 0.020, 0.021: 0.02 -+ 0.0025
    assert Better("a above b", "a", "b").check(_numbers(lines), number).outcome == "held"


def test_one_wrong_x_is_enough_and_x_below_the_least_do_not_count() -> None:
    lines = {"a": {1.0: [0.1, 0.1], 8.0: [0.9, 0.8]}, "b": {1.0: [0.5, 0.5], 8.0: [0.2, 0.1]}}
    assert Better("everywhere", "a", "b").check(_numbers(lines), number).outcome == "did not hold"
    found = Better("from 8 on", "a", "b", least=8).check(_numbers(lines), number)
    assert found.outcome == "held" and "at 1" not in found.detail


@pytest.mark.parametrize(
    "lines",
    [
        {"a": {1.0: [0.9]}, "b": {1.0: [0.1]}},  # one seed: no spread
        {"a": {1.0: [0.9, 0.9]}, "b": {2.0: [0.1, 0.1]}},  # nowhere both
        {"a": {1.0: [0.9, 0.9]}},
        {"a": {1.0: [0.9, math.nan]}, "b": {1.0: [0.1, 0.1]}},  # one pair is left
        {"a": {1.0: [0.5, 0.5]}, "b": {1.0: [0.5, 0.5]}},  # exactly equal
    ],
)
def test_what_cannot_be_said_is_undecided(lines: dict[str, dict[float, list[float]]]) -> None:
    assert Better("a above b", "a", "b").check(_numbers(lines), number).outcome == "undecided"


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([0.95, 0.96, 0.97], "held"),  # 0.96 -+ 0.025
        ([0.92, 0.92], "held"),  # the level itself
        ([0.91, 0.91], "did not hold"),
        ([0.90, 0.96, 0.93], "undecided"),
        ([0.80, 0.81, 0.82], "did not hold"),
        ([0.99], "undecided"),
        ([], "undecided"),
    ],
)
def test_a_level_is_reached_by_the_whole_interval(values: list[float], outcome: str) -> None:
    assert AtLeast("92%", "a", 16.0, 0.92).check(_numbers({"a": {16.0: values}}), number).outcome == outcome


def test_nearness_is_a_factor_around_what_is_expected() -> None:
    claim = Near("1 / d", "plain", lambda d: 1 / d, factor=1.5, least=2)
    held = {"plain": {1.0: [1.0, 1.0], 4.0: [0.26, 0.27, 0.28], 64.0: [0.0160, 0.0161, 0.0162]}}
    found = claim.check(_numbers(held), number)
    assert found.outcome == "held" and "at 1:" not in found.detail and "expected 0.25" in found.detail
    assert claim.check(_numbers({"plain": {4.0: [0.5, 0.51]}}), number).outcome == "did not hold"  # 0.38 at most
    assert claim.check(_numbers({"plain": {4.0: [0.36, 0.40]}}), number).outcome == "undecided"
    assert claim.check(_numbers({"plain": {4.0: [0.25]}}), number).outcome == "undecided"


@pytest.mark.parametrize(
    ("a", "outcome"),
    [
        ([10.05, 10.06, 10.04], "held"),  # 0.5% -+ 0.25%
        ([9.95, 9.96, 9.94], "held"),  # as far below
        ([10.2, 10.21, 10.19], "did not hold"),
        ([9.8, 9.81, 9.79], "did not hold"),
        ([10.05, 10.2, 9.9], "undecided"),
        ([10.05], "undecided"),
    ],
)
def test_likeness_is_a_share_of_the_second_line_on_both_sides(a: list[float], outcome: str) -> None:
    claim = Alike("a like b", "a", "b", within=0.01, least=2)
    lines = {"a": {1.0: [50.0, 50.0, 50.0][: len(a)], 2.0: a}, "b": {1.0: [1.0] * 3, 2.0: [10.0] * 3}}
    found = claim.check(_numbers(lines), number)
    assert found.outcome == outcome and "at 1:" not in found.detail
    if a == [10.05, 10.06, 10.04]:  # 0.5% -+ 4.303 * 0.1% / sqrt 3
        assert found.detail == "differs, at 2: +0.50% (+0.25% to +0.75%)"


def test_a_fall_is_from_the_first_x_to_the_last_seed_by_seed() -> None:
    lines = {"a": {0.0: [1.0, 1.0], 2.0: [9.0, 5.0], 4.0: [9.9, 9.9], 8.0: [8.0, 4.0]}}
    claim = Falls("a falls", "a", least=2)
    assert claim.check(_numbers(lines), number).outcome == "held"
    assert claim.check(_numbers(lines), number).detail == "from 2 lower by, at 8: 1 (1 to 1)"
    assert Falls("a falls", "a").check(_numbers(lines), number).outcome == "undecided"  # -7 and -3
    lines["a"][8.0] = [10.0, 6.0]
    assert claim.check(_numbers(lines), number).outcome == "did not hold"
    assert Falls("a falls", "a", least=8).check(_numbers(lines), number).outcome == "undecided"
