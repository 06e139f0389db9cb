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

from longfocus.errors import ConfigError, EvaluationError
from longfocus.evaluation.draw import figure
from longfocus.evaluation.record import PLOT, TABLE, Recorder, Results
from longfocus.evaluation.tables import table
from longfocus.plots import save
from longfocus.subjects.contract import CAPABILITIES, WHY_NOT, Completes
from longfocus.tasks.contract import Point, Task

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
        EvaluationError: the subject cannot do what the task needs, no point fits it, or the folder holds another run.
        InputError: a data set is missing.
    """
    check(task, subject)
    points = list(task.points(subject))
    fitting, refused = [], {}
    for point in points:
        if subject.longest is not None and point.tokens is not None and point.tokens > subject.longest:
            refused[point.key] = f"{subject.name} takes {subject.longest:,} tokens, this needs {point.tokens:,}."
        else:
            fitting.append(point)
    if not fitting:
        raise EvaluationError(
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
    recorder = Recorder(folder, results, fresh=fresh)
    total = sum(point.samples for point in fitting)
    begun, before = time.monotonic(), results.seconds
    try:
        for point in fitting:
            done = frozenset(sample.id for sample in recorder.samples if sample.values == point.values)
            for sample in task.samples(subject, point, done):
                recorder.add(sample)
                if step is not None:
                    step(point, len(recorder.samples), total)
            _write(task, recorder, before + time.monotonic() - begun)
    except KeyboardInterrupt:
        results.stopped = True
    except BaseException:
        results.stopped = True
        _write(task, recorder, before + time.monotonic() - begun)
        raise
    finally:
        recorder.close()
    _write(task, recorder, before + time.monotonic() - begun)
    return results


def check(task: Task, subject: Completes) -> None:
    """
    Raises:
        EvaluationError: the subject cannot do what the task needs.
    """
    if not isinstance(subject, CAPABILITIES[task.needs]):
        raise EvaluationError(f"{task.name} cannot be measured on {subject.name}: {WHY_NOT[task.needs]}.")


def _write(task: Task, recorder: Recorder, seconds: float) -> None:
    """Rows, table and plot of what is there."""
    results = recorder.results
    results.seconds = round(seconds, 1)
    results.rows = task.rows(recorder.samples) if recorder.samples else []
    recorder.save()
    (recorder.folder / TABLE).write_text(table(results) + "\n", "utf-8")
    if results.rows:
        with contextlib.suppress(ConfigError):  # without matplotlib there is a table
            save(figure([results]), recorder.folder / PLOT)


def _about() -> dict[str, Any]:
    return {
        "command": ["longfocus", *sys.argv[1:]],
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
