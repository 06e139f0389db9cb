"""One task over one subject, from its first sample to its table and plot; stopped anywhere, it goes on there."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longfocus.errors import ConfigError, EvaluationError, UnsuitableError, UnsupportedCallError
from longfocus.evaluation.draw import figure
from longfocus.evaluation.record import PLOT, Recorder, Results
from longfocus.evaluation.tables import table
from longfocus.plots import save
from longfocus.subjects.contract import CAPABILITIES, WHY_NOT, Completes
from longfocus.tasks.contract import Point, Sample, Task
from longfocus.tasks.statistics import mean_of

Step = Callable[[Point, int, int], None]
"""(point, samples of all points that are there, samples of all points)."""


def evaluate(task: Task, subject: Completes, folder: Path, *, fresh: bool = False, step: Step | None = None) -> Results:
    """Measure a task's points that are not measured yet, and write its files.

    Args:
        folder: of this task's run (see `record`).
        fresh: begin anew.
        step: told after each sample.

    Returns:
        The results; `stopped` after Ctrl-C, when what was measured is kept.

    Raises:
        UnsuitableError: the subject cannot do what the task needs, or no point fits it.
        EvaluationError: the folder holds another run, or cannot be written.
        InputError: a data set is missing.
    """
    check(task, subject)
    mean_of([0.0, 1.0])  # intervals need scipy, which is said now and not after the first point
    points = list(task.points(subject))
    fitting, refused = [], {}
    for point in points:
        if point.refused is not None:
            refused[point.key] = point.refused
        elif subject.longest is not None and point.tokens is not None and point.tokens > subject.longest:
            refused[point.key] = f"{subject.name} takes {subject.longest:,} tokens, this needs {point.tokens:,}."
        else:
            fitting.append(point)
    if not fitting:
        raise UnsuitableError(
            f"{task.name}: nothing fits. " + next(iter(refused.values()), "The options leave no point to measure.")
        )
    options = {**task.options.model_dump(mode="json"), **task.texts.about()}
    results = Results(
        task=task.name,
        title=task.title,
        paper=task.paper,
        axes=list(task.axes),
        heat=task.heat,
        log_x=task.log_x,
        measures=list(task.measures),
        options=options,
        subject=subject.about(),
        refused=refused,
        about=_about(),
    )
    total = sum(point.samples for point in fitting)
    with Recorder(folder, results, fresh=fresh) as recorder:
        begun, before = time.monotonic(), results.seconds

        def write(*, picture: bool = False) -> None:
            results.seconds = round(before + time.monotonic() - begun, 1)
            _write(task, recorder, picture)

        results.stopped = True  # until the end, whatever ends it
        try:
            for point in fitting:
                done = frozenset(sample.id for sample in recorder.samples if point.covers(sample.values))
                here = set(done)
                added = recorder.added
                try:
                    for sample in task.samples(subject, point, done):
                        _check_sample(task, sample, here)
                        recorder.add(sample)
                        if step is not None:
                            step(point, len(recorder.samples), total)
                except (UnsupportedCallError, torch.OutOfMemoryError) as error:
                    refused[point.key] = " ".join(str(error).split())
                if recorder.added != added:
                    write()
            results.stopped = False
        except KeyboardInterrupt:
            pass
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one that tells
                write()
            raise
        if not recorder.samples and not results.stopped:
            raise UnsuitableError(
                f"{task.name}: nothing fits. " + next(iter(refused.values()), "There are no examples.")
            )
        earlier = recorder.earlier
        if not recorder.added and earlier is not None and not earlier.stopped and earlier.options == results.options:
            results.about, before, begun = earlier.about, results.seconds, time.monotonic()
        write(picture=True)
    return results


def check(task: Task, subject: Completes) -> None:
    """
    Raises:
        UnsuitableError: the subject cannot do what the task needs.
    """
    if not isinstance(subject, CAPABILITIES[task.needs]):
        raise UnsuitableError(f"{task.name} cannot be measured on {subject.name}: {WHY_NOT[task.needs]}.")


def _check_sample(task: Task, sample: Sample, seen: set[str]) -> None:
    """What would be lost or counted twice in silence; `seen` gets the sample's id.

    Raises:
        EvaluationError: the task does not keep to `tasks.contract`.
    """
    names = [measure.name for measure in task.measures]
    scores = sample.scores
    wrong = None
    if not isinstance(scores, dict) or not all(isinstance(score, (int, float)) for score in scores.values()):
        wrong = f"has scores {scores!r}, expected a dict of numbers"
    elif not set(names) & set(scores):
        wrong = (
            f"has scores of {', '.join(scores) or 'nothing'}, expected some of the task's measures: {', '.join(names)}"
        )
    elif sample.id in seen:
        wrong = "comes twice; give each example of a point an id of its own"
    elif type(task).rows is Task.rows and (lacking := [axis for axis in task.axes if axis not in sample.values]):
        wrong = f"has no value for {', '.join(lacking)} (axes), only for {', '.join(sample.values)}"
    if wrong:
        raise EvaluationError(f"{task.name}: sample {sample.id!r} {wrong}; see longfocus.tasks.contract.")
    seen.add(sample.id)


def _write(task: Task, recorder: Recorder, picture: bool) -> None:
    """Rows and table of what is there, and a plot."""
    results = recorder.results
    results.rows = task.rows(recorder.samples) if recorder.samples else []
    recorder.save(table(results))
    if picture and results.rows:
        try:
            save(figure([results]), recorder.folder / PLOT)
        except ConfigError:
            pass  # without matplotlib there is a table
        except OSError as error:
            raise EvaluationError(f"{recorder.folder / PLOT} cannot be written: {error.strerror or error}.") from error


def _about() -> dict[str, Any]:
    return {
        "command": ["longfocus", *sys.argv[1:]],
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
