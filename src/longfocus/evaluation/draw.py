"""The picture of a task: lines over its first axis, or colours over its first two; of one run or several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from longfocus import plots
from longfocus.evaluation.record import Results
from longfocus.evaluation.tables import _value
from longfocus.plots import Series
from longfocus.tasks.contract import Row


def figure(runs: Sequence[Results]) -> Any:
    """A matplotlib figure of runs of one task.

    One run: a line for each value of the second axis. Several: a line a run, a panel for each value of the second axis.
    Further axes get panels of their own.

    Raises:
        ConfigError: matplotlib is missing.
    """
    first = runs[0]
    measure = first.measures[0]
    share = measure.kind == "share"
    label = measure.name + (f" ({measure.unit})" if measure.unit else "")
    title = first.title if len(runs) > 1 else f"{first.title}, {first.model}"
    x_axis, others = first.axes[0], first.axes[1:]
    if first.heat and len(first.axes) > 1:
        cells: dict[str, dict[tuple[Any, Any], float]] = {}
        for run in runs:
            for row in run.rows:
                rest = [str(row.values[axis]) for axis in others[1:]]
                panel = ", ".join(([run.model] if len(runs) > 1 else []) + rest) or measure.name
                cells.setdefault(panel, {})[row.values[x_axis], row.values[others[0]]] = _estimate(row, measure.name)
        return plots.heat(cells, title=title, x_label=x_axis, y_label=others[0], share=share, unit=measure.unit)
    groups: dict[str, dict[str, list[Row]]] = {}
    for run in runs:
        for row in run.rows:
            if measure.name not in row.estimates or x_axis not in row.values:
                continue
            rest = [_value(row.values[axis]) for axis in others if axis in row.values]
            if len(runs) > 1:
                panel, line = ", ".join(rest) or measure.name, run.model
            else:
                panel, line = ", ".join(rest[1:]) or measure.name, rest[0] if rest else run.model
            groups.setdefault(panel, {}).setdefault(line, []).append(row)
    panels = {
        panel: [
            Series(
                line,
                [row.values[x_axis] for row in rows],
                [row.estimates[measure.name].value for row in rows],
                [row.estimates[measure.name].low for row in rows],
                [row.estimates[measure.name].high for row in rows],
            )
            for line, rows in found.items()
        ]
        for panel, found in groups.items()
    }
    chance = {
        panel: {
            row.values[x_axis]: row.chance[measure.name]
            for rows in found.values()
            for row in rows
            if measure.name in row.chance
        }
        for panel, found in groups.items()
    }
    return plots.lines(
        panels, title=title, x_label=x_axis, y_label=label, log_x=first.log_x, share=share, chance=chance
    )


def _estimate(row: Row, name: str) -> float:
    found = row.estimates.get(name)
    return found.value if found is not None else math.nan
