"""d over a run: switched, drawn, by accuracy; what a resumed run needs is in the state.

python -m pytest tests/crossbatch/test_schedules.py
"""

from __future__ import annotations

import numpy as np
import pytest

from longfocus.crossbatch.plan import documents
from longfocus.crossbatch.schedules import ByAccuracy, Drawn, Switched, constant
from longfocus.errors import ConfigError

ONE, TWO, MANY = documents(1), documents(2), documents(64)


def _at(step: int) -> np.random.Generator:
    return np.random.default_rng((3, step))


def test_switched_for_the_last_tenth() -> None:
    schedule = Switched([(0, TWO), (90, MANY)])
    assert [schedule.mix(step, _at(step)) for step in (0, 1, 89, 90, 99)] == [TWO, TWO, TWO, MANY, MANY]
    assert schedule.mixes == [TWO, MANY]
    assert constant(TWO).mix(10**6, _at(0)) == TWO


def test_drawn_takes_each_about_equally_often_and_the_same_again() -> None:
    schedule = Drawn([TWO, MANY])
    drawn = [schedule.mix(step, _at(step)) for step in range(300)]
    assert 110 < drawn.count(TWO) < 190
    assert drawn == [schedule.mix(step, _at(step)) for step in range(300)]


def test_by_accuracy_switches_once_and_for_good_also_when_resumed() -> None:
    schedule = ByAccuracy(ONE, MANY, 0.98)
    for accuracy in (0.2, 0.97):
        schedule.observe(accuracy)
        assert schedule.mix(5, _at(5)) == ONE
    schedule.observe(0.98)
    schedule.observe(0.1)
    assert schedule.mix(6, _at(6)) == MANY
    again = ByAccuracy(ONE, MANY, 0.98)
    again.load_state_dict(schedule.state_dict())
    assert again.mix(7, _at(7)) == MANY


def test_impossible_schedules_are_refused() -> None:
    for stages in ([], [(1, TWO)], [(0, TWO), (0, MANY)]):
        with pytest.raises(ConfigError, match="stages begin at"):
            Switched(stages)
    with pytest.raises(ConfigError, match="nothing to draw"):
        Drawn([])
    with pytest.raises(ConfigError, match=r"accuracy 1\.5"):
        ByAccuracy(ONE, MANY, 1.5)
