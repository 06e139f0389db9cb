"""What every task must keep, for a tiny real model with a memory. A new task joins by a line in TINY.

python -m pytest tests/tasks/test_conformance.py
"""

from __future__ import annotations

import copy
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from longfocus.evaluation.draw import figure
from longfocus.evaluation.record import SAMPLES, Results
from longfocus.evaluation.run import evaluate
from longfocus.evaluation.tables import table
from longfocus.plots import png
from longfocus.settings import validated
from longfocus.subjects.contract import CAPABILITIES
from longfocus.subjects.local import FocusedSubject
from longfocus.tasks import TASKS, find_task
from longfocus.tasks.contract import AnswerTask, Point, Task
from longfocus.tasks.texts import Texts
from tests.subjects.tiny_subjects import focused
from tests.tasks.small_sets import small_sets

TINY: dict[str, dict[str, Any]] = {
    "passkey": {"lengths": [250, 400], "samples": 3},
    "perplexity": {
        "lengths": [128, 256], "texts": ["books", "code"], "tokens": 192, "block": 64, "stride": 64, "own": 64,
        "up_to": 1024,
    },
    "distraction": {"documents": [1, 2, 4], "texts": ["books"], "samples": 3, "up_to": 512},
    "fewshot": {"lengths": [300], "draws": 2, "questions": 2},
    "qasper": {"lengths": [400, 900], "samples": 2},
    "valprobe": {"lengths": [500], "positions": 2, "samples": 1, "sets": 1},
    "retrieval": {
        "texts": ["books"], "tokens": 1500, "samples": 3, "choice_tokens": 800, "choice_samples": 2,
        "retrievers": ["BM25", "memory"],
    },
    "dictionary": {"lengths": [128, 256], "samples": 3, "window": 64},
    "copying": {"lengths": [400], "samples": 2, "substrings": [20], "texts": ["books", "random"], "words": 100},
    "multidoc": {"documents": [2, 4], "tokens": 100, "samples": 2, "texts": ["books"]},
    "cost": {"lengths": [100, 200], "samples": 2, "new_tokens": 2},
}  # fmt: skip
"""Options that take seconds. Sets come from tests/tasks/small_sets.py."""

MEASURES_TIME = {"cost"}
"""Scores differ from run to run, so only the samples' names are compared."""

every_task = pytest.mark.parametrize("name", TASKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_sets(tmp_path_factory.mktemp("sets"))


@cache
def subject() -> FocusedSubject:
    return focused(window=64)


def task(name: str, folder: Path, **changes: Any) -> Task:
    """A new one, with its tiny options."""
    assert name in TINY, f"add tiny options of {name} to TINY in {Path(__file__).name}"
    kind = find_task(name)
    return kind(validated(kind.Options, {**TINY[name], **changes}, name), Texts(folder))


def samples(place: Path) -> list[dict[str, Any]]:
    """Lines of samples.jsonl, without how long things took and what was read with others."""
    found = [json.loads(line) for line in (place / SAMPLES).read_text("utf-8").splitlines()]
    for line in found:
        for name in ("seconds", "tokens_read_with_others"):
            line["details"].pop(name, None)
    return found


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name -> (results, folder) of an unbroken run; made when first asked for."""
    made: dict[str, tuple[Results, Path]] = {}

    def run(name: str) -> tuple[Results, Path]:
        if name not in made:
            place = tmp_path_factory.mktemp(name)
            made[name] = evaluate(task(name, folder), subject(), place), place
        return made[name]

    return run


# -- what a task says of itself ----------------------------------------------------------------------------


@every_task
def test_it_says_what_it_is(name: str, folder: Path) -> None:
    kind = find_task(name)
    made = task(name, folder)
    assert kind.name == name and re.fullmatch(r"[a-z][\w-]*", name)
    assert kind.title.strip() and kind.title[0].isupper()
    assert (kind.__doc__ or "").strip().splitlines()[0].endswith((".", ":", "?"))
    assert len(kind.paper) > 10, "where it is from, with section"
    assert kind.needs in CAPABILITIES
    assert made.axes and len(set(made.axes)) == len(made.axes)
    names = [measure.name for measure in kind.measures]
    assert names and len(set(names)) == len(names)
    for measure in kind.measures:
        assert measure.kind in ("share", "number") and measure.better in ("higher", "lower", "neither")
        assert not (measure.kind == "share" and measure.unit), "shares are shown in %"


def test_titles_tell_tasks_apart() -> None:
    titles = [find_task(name).title for name in TASKS]
    assert len(set(titles)) == len(titles)


@every_task
def test_its_options_have_defaults_meanings_and_a_quick_form(name: str) -> None:
    kind = find_task(name)
    defaults = kind.Options()
    assert defaults.seed == 0
    for key, field in kind.Options.model_fields.items():
        assert field.description, f"say under {key} of {kind.Options.__name__} what it means"
    before = copy.deepcopy(kind.quick)
    quick = validated(kind.Options, kind.quick, "quick")
    assert kind.quick, "sizes that take a minute"
    assert quick != defaults
    assert kind.quick == before
    again = validated(kind.Options, json.loads(quick.model_dump_json()), "stored")
    assert again == quick, "options come back from JSON as they were"


# -- points ------------------------------------------------------------------------------------------------


@every_task
def test_points_are_the_same_each_time_and_told_apart(name: str, folder: Path) -> None:
    points = list(task(name, folder).points(subject()))
    made = task(name, folder)
    assert points == list(made.points(subject())) == list(made.points(subject()))
    assert len({point.key for point in points}) == len(points) > 0
    for point in points:
        assert set(point.values) <= set(made.axes)
        assert all(type(value) in (int, float, str) for value in point.values.values())
        assert point.samples > 0 or point.refused
        assert point.tokens is None or point.tokens > 0


# -- samples -----------------------------------------------------------------------------------------------


@every_task
def test_samples_have_names_of_their_own_and_declared_scores(name: str, folder: Path, runs: Any) -> None:
    results, place = runs(name)
    made = task(name, folder)
    found = samples(place)
    assert found
    names = [(json.dumps(line["values"], sort_keys=True), line["id"]) for line in found]
    assert len(set(names)) == len(names)
    points = [point for point in made.points(subject()) if not point.refused]
    declared = {measure.name: measure for measure in made.measures}
    for line in found:
        assert set(line["values"]) <= set(made.axes)
        holders = [point for point in points if point.covers(line["values"])]
        assert len(holders) == 1, "it belongs to one point"
        assert line["scores"] and set(line["scores"]) <= set(declared)
        assert line["weight"] > 0
        for measure, score in line["scores"].items():
            assert score is not None and math.isfinite(score), measure
            assert declared[measure].kind != "share" or 0 <= score <= 1, measure
    for point in points:
        of_point = [line for line in found if point.covers(line["values"])]
        assert 0 < len(of_point) <= point.samples, f"the progress bar is told of {point.samples} at {point.key}"
    assert not results.stopped


@every_task
def test_rows_give_every_point_with_intervals_and_chance(name: str, folder: Path, runs: Any) -> None:
    results, place = runs(name)
    measures = [measure.name for measure in results.measures]
    assert results.rows
    assert any(measures[0] in row.estimates and results.axes[0] in row.values for row in results.rows), "what is drawn"
    keys = [Point(row.values, 0).key for row in results.rows]
    assert len(set(keys)) == len(keys)
    for row in results.rows:
        assert set(row.values) <= set(results.axes)
        assert row.samples > 0
        assert row.estimates and set(row.estimates) <= set(measures)
        assert set(row.chance) <= set(measures)
        for estimate in row.estimates.values():
            assert math.isfinite(estimate.value)
            assert math.isnan(estimate.low) or estimate.low <= estimate.value <= estimate.high
        json.dumps(row.notes)
    assert repr(Results.read(place)) == repr(results)


@every_task
def test_a_table_and_a_picture_are_made(name: str, runs: Any) -> None:
    results, place = runs(name)
    assert (place / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (place / "table.md").read_text("utf-8").strip() == table(results).strip()
    made = figure([results])
    drawn = [axis for axis in made.axes if axis.containers or axis.images]
    assert drawn, "something is drawn"
    other = copy.deepcopy(results)
    other.subject["name"] = "another"
    assert png(figure([results, other])).startswith(b"\x89PNG")


# -- seeds and stops ---------------------------------------------------------------------------------------


class _Stops:
    """Ctrl-C after so many samples."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, point: Point, done: int, total: int) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def comparable(name: str, place: Path) -> Any:
    """What must be the same in two runs."""
    found = samples(place)
    if name in MEASURES_TIME:
        return [(line["values"], line["id"]) for line in found]
    return found


@every_task
def test_stopped_and_gone_on_it_gives_the_samples_of_an_unbroken_run(
    name: str, folder: Path, runs: Any, tmp_path: Path
) -> None:
    results, place = runs(name)
    whole = len(samples(place))
    for after in (1, max(1, whole // 2)):
        evaluate(task(name, folder), subject(), tmp_path, step=_Stops(after))
    found = evaluate(task(name, folder), subject(), tmp_path)
    assert not found.stopped
    assert comparable(name, tmp_path) == comparable(name, place)
    if name not in MEASURES_TIME:
        assert repr(found.rows) == repr(results.rows)


@every_task
def test_another_seed_gives_other_samples(name: str, folder: Path, runs: Any, tmp_path: Path) -> None:
    _, place = runs(name)
    made = task(name, folder, seed=1)
    if isinstance(made, AnswerTask):
        asked = [
            [example.prompt for point in one.points(subject()) if not point.refused for example in one.examples(subject(), point)]
            for one in (task(name, folder), task(name, folder), made)
        ]  # fmt: skip
        assert asked[0] == asked[1]
        assert asked[0] != asked[2]
    else:
        evaluate(made, subject(), tmp_path)
        assert samples(tmp_path) != samples(place)


def test_tiny_options_are_of_tasks_that_there_are() -> None:
    assert set(TINY) == set(TASKS)
