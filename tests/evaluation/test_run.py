"""One task over one subject: whatever stops it, going on gives the results of a run that was never stopped.

Kills and Ctrl-C of real processes are in tests/commands/test_eval.py.

    python -m pytest tests/evaluation/test_run.py
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longfocus.errors import ConfigError, EvaluationError, InputError, UnsuitableError, UnsupportedCallError
from longfocus.evaluation import run
from longfocus.evaluation.record import PLOT, RESULTS, SAMPLES, TABLE, Results
from longfocus.evaluation.run import evaluate
from longfocus.subjects.contract import Completes
from longfocus.tasks.contract import Measure, Point, Sample, Task, TaskOptions
from longfocus.tasks.passkey import Passkey, PasskeyOptions
from longfocus.tasks.statistics import Estimate, mean_of, share_of
from longfocus.tasks.texts import Texts
from tests.evaluation.made_up import Adder, Adding, AddingOptions, adding
from tests.subjects.tiny_subjects import focused

PNG = b"\x89PNG\r\n\x1a\n"


def without_times(results: Results) -> dict[str, Any]:
    data = results.to_dict()
    return {name: value for name, value in data.items() if name not in ("seconds", "about")}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / SAMPLES).read_text("utf-8").splitlines()]


# -- a run that is not stopped -----------------------------------------------------------------------------


def test_rows_are_the_means_of_the_samples_with_their_intervals(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    found = evaluate(
        adding(samples=7), Adder(), tmp_path, step=lambda point, done, total: steps.append((point.key, done, total))
    )
    samples = lines(tmp_path)
    assert len(samples) == 28
    assert [row.values for row in found.rows] == [
        {"tokens": tokens, "kind": kind} for kind in ("plain", "words") for tokens in (100, 200)
    ]
    for row in found.rows:
        scores = [sample["scores"] for sample in samples if sample["values"] == row.values]
        assert row.samples == len(scores) == 7
        assert row.estimates["right"] == share_of(int(sum(score["right"] for score in scores)), 7)
        assert row.estimates["off by"] == mean_of([score["off by"] for score in scores])
        assert row.chance == {"right": 1 / 19}
    assert [done for _, done, _ in steps] == list(range(1, 29))
    assert {total for _, _, total in steps} == {28}
    assert steps[0][0] == "tokens=100, kind=plain" and steps[-1][0] == "tokens=200, kind=words"


def test_its_files_say_everything(tmp_path: Path) -> None:
    found = evaluate(adding(), Adder(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "lock",
        "plot.png",
        "results.json",
        "run.json",
        "samples.jsonl",
        "table.md",
    ]
    assert repr(Results.read(tmp_path)) == repr(found)
    assert (found.stopped, found.refused) == (False, {})
    assert (tmp_path / PLOT).read_bytes().startswith(PNG)
    table = (tmp_path / TABLE).read_text()
    assert table.startswith("| tokens | kind | right | off by | chance, right | samples |\n|---|---|---:|")
    assert len(table.splitlines()) == 6
    run = json.loads((tmp_path / "run.json").read_text())
    assert run == {
        "format": 1,
        "task": "adding",
        "options": {"seed": 0, "lengths": [100, 200], "samples": 5, "broken": None},
        "subject": {"kind": "fake", "name": "adder"},
    }
    assert lines(tmp_path)[0] == {
        "id": "0",
        "values": {"tokens": 100, "kind": "plain"},
        "scores": lines(tmp_path)[0]["scores"],
        "weight": 1.0,
        "details": {**lines(tmp_path)[0]["details"], "prompt_tokens": 5, "seconds": 0.0},
    }


def test_the_same_command_again_measures_nothing_and_changes_nothing(tmp_path: Path) -> None:
    first = evaluate(adding(), Adder(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    again = Adder()
    second = evaluate(adding(), again, tmp_path)
    assert again.asked == []
    assert repr(second) == repr(first)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_fresh_begins_anew(tmp_path: Path) -> None:
    evaluate(adding(), Adder(), tmp_path)
    again = Adder()
    evaluate(adding(), again, tmp_path, fresh=True)
    assert len(again.asked) == 20 == len(lines(tmp_path))
    other = evaluate(adding(seed=1), Adder(), tmp_path, fresh=True)
    assert other.options["seed"] == 1 and len(lines(tmp_path)) == 20


def test_another_seed_asks_other_questions(tmp_path: Path) -> None:
    asked = []
    for seed in (0, 0, 1):
        subject = Adder()
        evaluate(adding(seed=seed), subject, tmp_path / f"{len(asked)}")
        asked.append(subject.asked)
    assert asked[0] == asked[1] != asked[2]


# -- a run that is stopped ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "error"),
    [
        *(([stop], KeyboardInterrupt()) for stop in (0, 3, 5, 19)),
        ([1, 1, 4, 2, 7], KeyboardInterrupt()),
        ([6, 5, 4], RuntimeError("it broke")),
        ([4], SystemExit(3)),
        ([7], MemoryError()),
    ],
)
def test_going_on_gives_the_results_of_an_unbroken_run(tmp_path: Path, stops: list[int], error: BaseException) -> None:
    expected = evaluate(adding(), Adder(), tmp_path / "unbroken")
    folder, done = tmp_path / "stopped", 0
    for stop_after in stops:
        subject = Adder(stop_after=stop_after)
        subject.error = error
        if isinstance(error, KeyboardInterrupt):
            found = evaluate(adding(), subject, folder)
            assert found.stopped
        else:
            with pytest.raises(type(error)):
                evaluate(adding(), subject, folder)
        done += stop_after
        assert len(lines(folder)) == done
        kept = Results.read(folder)
        assert kept.stopped and sum(row.samples for row in kept.rows) == done
        assert ("Not finished" in (folder / TABLE).read_text()) is True
    last = Adder()
    found = evaluate(adding(), last, folder)
    assert len(last.asked) == 20 - done, "nothing is measured twice"
    assert without_times(found) == without_times(expected)
    assert (folder / SAMPLES).read_bytes() == (tmp_path / "unbroken" / SAMPLES).read_bytes()
    assert (folder / TABLE).read_bytes() == (tmp_path / "unbroken" / TABLE).read_bytes()


def test_until_the_end_results_say_that_they_are_not_all(tmp_path: Path) -> None:
    """As a kill would leave them: results.json is written after each point."""
    seen: list[tuple[bool, int]] = []

    def step(point: Point, done: int, total: int) -> None:
        if (tmp_path / RESULTS).exists():
            kept = Results.read(tmp_path)
            seen.append((kept.stopped, sum(row.samples for row in kept.rows)))

    evaluate(adding(), Adder(), tmp_path, step=step)
    assert seen == [(True, 5)] * 5 + [(True, 10)] * 5 + [(True, 15)] * 5
    assert Results.read(tmp_path).stopped is False


def test_a_mistake_in_a_task_shows_itself_and_keeps_what_was_measured(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="this task has a mistake"):
        evaluate(adding(broken="3"), Adder(), tmp_path)
    assert [line["id"] for line in lines(tmp_path)] == ["0", "1", "2"]
    assert Results.read(tmp_path).stopped


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scores": {"wrong": 1.0}}, "has scores of wrong, expected some of the task's measures: right, off by"),
        ({"scores": {}}, "has scores of nothing, expected"),
        ({"scores": None}, "has scores None, expected a dict of numbers"),
        ({"scores": {"right": "yes"}}, "has scores {'right': 'yes'}, expected a dict of numbers"),
        ({"id": "2"}, "'2' comes twice"),
        ({"values": {"tokens": 100}}, "has no value for kind (axes), only for tokens"),
    ],
)
def test_a_sample_that_would_be_lost_in_silence_is_an_error(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    class Wrong(Adding):
        def samples(self, subject: Any, point: Point, done: frozenset[str]) -> Iterator[Sample]:
            for sample in super().samples(subject, point, done):
                yield dataclasses.replace(sample, **change) if sample.id == "3" else sample

    with pytest.raises(EvaluationError, match=re.escape(words)):
        evaluate(Wrong(AddingOptions(), Texts()), Adder(), tmp_path)
    assert [line["id"] for line in lines(tmp_path)] == ["0", "1", "2"]


def test_seconds_of_all_sittings_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 100.0
        strftime = staticmethod(run.time.strftime)

        def monotonic(self) -> float:
            return self.now

        def __call__(self, point: Point, done: int, total: int) -> None:
            self.now += 2.5

    clock = Clock()
    monkeypatch.setattr(run, "time", clock)
    first = evaluate(adding(), Adder(stop_after=10), tmp_path, step=clock)
    assert first.seconds == 25.0
    clock.now += 1e6
    second = evaluate(adding(), Adder(), tmp_path, step=clock)
    assert second.seconds == 50.0
    clock.now += 1e6
    assert evaluate(adding(), Adder(), tmp_path, step=clock).seconds == 50.0


def test_a_run_of_a_tiny_real_model_goes_on_with_the_same_answers(tmp_path: Path) -> None:
    """Prompts are read together; which were done before must not change the others."""

    def task() -> Passkey:
        return Passkey(PasskeyOptions(lengths=[250, 400], samples=4, haystacks=["filler"]), Texts(tmp_path))

    class Stops:
        def __init__(self, after: int) -> None:
            self.after = after

        def __call__(self, point: Point, done: int, total: int) -> None:
            self.after -= 1
            if self.after == 0:
                raise KeyboardInterrupt

    subject = focused()
    expected = evaluate(task(), subject, tmp_path / "unbroken")
    for stop_after in (1, 2, 3):
        evaluate(task(), subject, tmp_path / "stopped", step=Stops(stop_after))
    found = evaluate(task(), subject, tmp_path / "stopped")
    assert without_times(found) == without_times(expected)

    def answers(folder: Path) -> dict[Any, Any]:
        return {(line["values"]["tokens"], line["id"]): line["details"]["answer"] for line in lines(folder)}

    assert answers(tmp_path / "stopped") == answers(tmp_path / "unbroken")
    assert len(answers(tmp_path / "stopped")) == 8


# -- what does not fit -------------------------------------------------------------------------------------


def test_a_length_that_the_model_cannot_take_is_not_measured_and_said(tmp_path: Path) -> None:
    subject = Adder(longest=150)
    found = evaluate(adding(), subject, tmp_path)
    assert {row.values["tokens"] for row in found.rows} == {100}
    reason = "adder takes 150 tokens, this needs 200."
    assert found.refused == {f"tokens=200, kind={kind}": reason for kind in ("plain", "words")}
    assert Results.read(tmp_path).refused == found.refused
    assert f"Not measured: tokens=200, kind=words: {reason}" in (tmp_path / TABLE).read_text()
    assert len(subject.asked) == 10


def test_where_nothing_fits_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UnsuitableError, match=r"adding: nothing fits\. adder takes 50 tokens, this needs 100"):
        evaluate(adding(), Adder(longest=50), tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Losses(Adding):
    needs = "losses"


class Memories(Adding):
    needs = "memory"


@pytest.mark.parametrize(("kind", "words"), [(Losses, "an endpoint gives only text"), (Memories, "memory layers")])
def test_what_a_subject_cannot_do_is_said_before_anything_is_written(
    tmp_path: Path, kind: type[Adding], words: str
) -> None:
    with pytest.raises(UnsuitableError, match=f"adding cannot be measured on adder: .*{words}"):
        evaluate(kind(AddingOptions(), Texts()), Adder(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("error", [UnsupportedCallError("a prompt\nis too long"), torch.OutOfMemoryError("no memory")])
def test_a_point_that_turns_out_not_to_fit_leaves_the_others(tmp_path: Path, error: Exception) -> None:
    class Short(Adding):
        def examples(self, subject: Completes, point: Point) -> Iterator[Any]:
            if point.values["tokens"] == 200 and point.values["kind"] == "plain":
                raise error
            yield from super().examples(subject, point)

    found = evaluate(Short(AddingOptions(), Texts()), Adder(), tmp_path)
    assert found.refused == {"tokens=200, kind=plain": " ".join(str(error).split())}
    assert len(found.rows) == 3 and not found.stopped


def test_a_missing_data_set_is_said_before_anything_is_written(tmp_path: Path) -> None:
    task = Passkey(PasskeyOptions(haystacks=["books"]), Texts(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"books/test.jsonl.gz is not there; say with --data"):
        evaluate(task, Adder(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_scipy_nothing_is_measured_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    subject = Adder()
    with pytest.raises(ConfigError, match=r"Intervals need scipy: pip install 'longfocus\[eval\]'"):
        evaluate(adding(), subject, tmp_path / "run")
    assert subject.asked == [] and not (tmp_path / "run").exists()


# -- rows --------------------------------------------------------------------------------------------------


class Plain(Task):
    """Whatever samples a test wants."""

    name, title, paper = "plain", "Plain", "made up"
    axes = ("x",)
    measures = (Measure("share", "share", "higher"), Measure("loss", "number", "lower"))

    def points(self, subject: Completes) -> list[Point]:
        return [Point({"x": 1}, len(GIVEN))]

    def samples(self, subject: Any, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        yield from (sample for sample in GIVEN if sample.id not in done)


GIVEN: list[Sample] = []


def measured(*samples: Sample) -> dict[str, Estimate]:
    return Plain(TaskOptions(), Texts()).row(samples).estimates


def test_a_share_of_whole_answers_has_wilsons_interval() -> None:
    found = measured(*(Sample(f"{n}", {"x": 1}, {"share": float(n < 3)}) for n in range(4)))
    assert found == {"share": share_of(3, 4)}


def test_a_share_of_parts_has_its_interval_within_0_and_1() -> None:
    found = measured(*(Sample(f"{n}", {"x": 1}, {"share": score}) for n, score in enumerate((0.9, 1.0, 0.1))))["share"]
    assert found.value == pytest.approx(2 / 3)
    assert (found.low, found.high) == (0.0, 1.0)


def test_a_loss_is_weighted_by_its_tokens() -> None:
    found = measured(Sample("0", {"x": 1}, {"loss": 2.0}, 100), Sample("1", {"x": 1}, {"loss": 4.0}, 300))
    assert found == {"loss": mean_of([2.0, 4.0], [100, 300])}
    assert found["loss"].value == 3.5


def test_samples_without_a_measure_do_not_count_for_it() -> None:
    found = measured(Sample("0", {"x": 1}, {"share": 1.0, "loss": 2.0}), Sample("1", {"x": 1}, {"loss": 4.0}))
    assert found["share"] == share_of(1, 1) and found["loss"].value == 3.0


def test_one_score_that_is_no_number_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that gives nan is not silently measured on the rest."""
    given = [Sample(f"{n}", {"x": 1}, {"share": s, "loss": s}) for n, s in enumerate((1.0, math.nan, math.inf))]
    monkeypatch.setattr("tests.evaluation.test_run.GIVEN", given)
    for _ in range(2):  # measured, and read back
        found = evaluate(Plain(TaskOptions(), Texts()), Adder(), tmp_path)
        for estimate in found.rows[0].estimates.values():
            assert all(map(math.isnan, (estimate.value, estimate.low, estimate.high)))
        assert "| 1 | nan | nan | 3 |" in (tmp_path / TABLE).read_text()
        assert (tmp_path / PLOT).read_bytes().startswith(PNG)


def test_without_samples_there_is_an_error_and_with_odd_ones_no_mixture(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"nothing fits\. There are no examples\."):
        evaluate(Plain(TaskOptions(), Texts()), Adder(), tmp_path)


def test_examples_that_are_done_are_not_asked_whatever_their_order() -> None:
    """The samples that are left are those of the whole run, for any that were done."""
    task, whole = adding(samples=9), Adder()
    point = task.points(whole)[0]
    every = {sample.id: sample for sample in task.samples(whole, point, frozenset())}
    rng = random.Random(0)
    for _ in range(20):
        done = frozenset(rng.sample(sorted(every), rng.randint(0, 9)))
        rest = list(task.samples(Adder(), point, done))
        assert [sample.id for sample in rest] == [name for name in every if name not in done]
        assert all(sample == every[sample.id] for sample in rest)
