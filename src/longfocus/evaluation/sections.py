"""Several runs in the order and under the names in which a page shows them, whatever form the page has."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longfocus.errors import EvaluationError
from longfocus.evaluation.record import RESULTS, Results
from longfocus.tasks import TASKS
from longfocus.tasks.contract import Measure

TITLE = "Does it use its context?"
"""What a page is called unless told otherwise."""


def find_runs(folders: Sequence[Path]) -> list[Results]:
    """The results in folders of runs, or of several runs (`longfocus eval --out` of more than one task or model).

    Raises:
        EvaluationError: a folder holds none, or a file is damaged.
    """
    found: dict[Path, Results] = {}
    for folder in folders:
        if not folder.exists():
            raise EvaluationError(f"{folder} does not exist; give the --out folders of longfocus eval.")
        paths = sorted(folder.rglob(RESULTS)) if folder.is_dir() else [folder] if folder.name == RESULTS else []
        if not paths:
            raise EvaluationError(f"{folder} holds no {RESULTS}; give the --out folders of longfocus eval.")
        for path in paths:
            if path.resolve() not in found:
                found[path.resolve()] = Results.read(path.parent)
    return list(found.values())


@dataclass(frozen=True)
class Section:
    """One task, over the same axes, of all models that were asked."""

    heading: str
    runs: list[Results]

    @property
    def shown(self) -> list[Results]:
        """Those that have rows."""
        return [run for run in self.runs if run.rows]

    @property
    def further(self) -> list[Measure]:
        """Measures beyond the first of which some model has a number."""
        held = {name for run in self.runs for row in run.rows for name in row.estimates}
        return [measure for measure in self.runs[0].measures[1:] if measure.name in held]

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before comparing."""
        found = []
        stopped = [run.model for run in self.runs if run.stopped]
        if stopped:
            found.append(f"Not finished: {', '.join(stopped)}.")
        if len({json.dumps(run.options, sort_keys=True) for run in self.runs}) > 1:
            found.append("These runs were made with different options (below): compare with care.")
        return found


def grouped(runs: Sequence[Results]) -> list[Section]:
    """A section for each task (and set of axes), in the order of the tasks; models under one name get numbers."""
    groups: dict[tuple[str, ...], list[Results]] = {}
    labels = _labels(runs)
    for run in runs:
        named = dataclasses.replace(run, subject={**run.subject, "name": labels[_identity(run)]})
        groups.setdefault((run.task, *run.axes), []).append(named)
    order = {task: number for number, task in enumerate(TASKS)}
    found = sorted(groups.values(), key=lambda some: order.get(some[0].task, len(order)))
    return [Section(_heading(some[0], [other[0] for other in found]), _apart(some)) for some in found]


def caption(measure: Measure) -> str:
    """What a table of a measure shows."""
    better = {"higher": "; higher is better", "lower": "; lower is better", "neither": ""}[measure.better]
    unit = f", {measure.unit}" if measure.unit else ""
    return f"{measure.name}{unit}{better}; in brackets the 95% interval"


def command_of(run: Results) -> str:
    """The command that made a run, for a shell."""
    return shlex.join(map(str, run.about.get("command") or []))


def models(runs: Sequence[Results]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table of the models."""
    rows = []
    for identity, label in _labels(runs).items():
        about = json.loads(identity)
        focus = about.get("focus") or {}
        memory = ""
        if focus:
            layers = ", ".join(map(str, focus.get("memory_layers") or []))
            span = f"; read span {focus['read_span']:,}" if focus.get("read_span") is not None else ""
            memory = f"layers {layers}; window {focus.get('window')}; {focus.get('retrieval')}{span}"
        parameters = about.get("parameters")
        size = f"{parameters / 1e6:,.0f}M" if parameters else ""
        rows.append([label, str(about.get("kind", "")), size, str(about.get("dtype", "")), memory])
    return ["model", "kind", "parameters", "dtype", "memory"], rows


def _identity(run: Results) -> str:
    return json.dumps(run.subject, sort_keys=True)


def _labels(runs: Sequence[Results]) -> dict[str, str]:
    """Subject -> name; different models with one name get numbers, the same on all of the page."""
    labels: dict[str, str] = {}
    for run in runs:
        if _identity(run) not in labels:
            name, number = run.model, 2
            while name in labels.values():
                name, number = f"{run.model} ({number})", number + 1
            labels[_identity(run)] = name
    return labels


def _apart(runs: Sequence[Results]) -> list[Results]:
    """Several runs of one model on one task get numbers."""
    seen: dict[str, int] = {}
    found = []
    for run in runs:
        seen[run.model] = seen.get(run.model, 0) + 1
        again = f"{run.model}, run {seen[run.model]}" if seen[run.model] > 1 else run.model
        found.append(dataclasses.replace(run, subject={**run.subject, "name": again}))
    return found


def _heading(run: Results, firsts: Sequence[Results]) -> str:
    """A task's title, with its axes where it was run over others too."""
    if sum(other.task == run.task for other in firsts) > 1:
        return f"{run.title} by {', '.join(run.axes)}"
    return run.title
