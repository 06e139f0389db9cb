"""The picture of a task: lines over its first axis, or colours over its first two; of one run or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longfocus import plots
from longfocus.evaluation.record import Results
from longfocus.evaluation.tables import axis_value
from longfocus.plots import Series
from longfocus.tasks.contract import Measure, Row


def figure(runs: Sequence[Results]) -> Any:
    """A matplotlib figure of the first measure (and those marked `drawn`), for runs of one task with the same axes.

    One run: a line for each value of the second axis. Several: a line a run, a panel for each value of the second axis.
    Further axes get panels of their own. With `heat`: colours over the first two axes, a panel for each run and each value
    of the other axes.

    Raises:
        ConfigError: matplotlib is missing.
    """
    first = runs[0]
    measure = first.measures[0]
    share = measure.kind == "share"
    title = first.title if len(runs) > 1 else f"{first.title}, {first.model}"
    x_axis, others = first.axes[0], first.axes[1:]
    if first.heat and others:
        cells: dict[str, dict[tuple[Any, Any], float]] = {}
        for run in runs:
            for row in run.rows:
                if measure.name in row.estimates and x_axis in row.values and others[0] in row.values:
                    rest = _values(row, others[1:])
                    panel = ", ".join(([run.model] if len(runs) > 1 else []) + rest)
                    value = row.estimates[measure.name].value
                    cells.setdefault(panel, {})[row.values[x_axis], row.values[others[0]]] = value
        label = measure.name + (f" ({measure.unit})" if measure.unit else "")
        return plots.heat(cells, title=f"{title}: {label}", x_label=x_axis, y_label=others[0], share=share)
    drawn = [measure, *(more for more in first.measures[1:] if more.drawn)]
    panels, chance = {}, {}
    for each in drawn:
        groups: dict[str, dict[str, list[Row]]] = {}
        for run in runs:
            for row in run.rows:
                if each.name not in row.estimates or x_axis not in row.values:
                    continue
                rest = _values(row, others)
                if len(runs) > 1:
                    parts, line = rest, run.model
                else:
                    parts, line = rest[1:], rest[0] if rest else run.model
                named = ", ".join([each.name, *parts] if len(drawn) > 1 else parts)
                groups.setdefault(named, {}).setdefault(line, []).append(row)
        for named, found in groups.items():
            panels[named] = [_series(line, rows, x_axis, each.name) for line, rows in found.items()]
            chance[named] = _chance([row for rows in found.values() for row in rows], x_axis, each)
    label = measure.name if len(drawn) == 1 else "share" if share else ""
    return plots.lines(
        panels,
        title=title,
        x_label=x_axis,
        y_label=label + (f" ({measure.unit})" if measure.unit else ""),
        log_x=first.log_x,
        share=share,
        chance=chance,
    )


def _chance(rows: Sequence[Row], x_axis: str, measure: Measure) -> dict[Any, float]:
    """What guessing gives by x; nothing where it is not the same for all lines, since one dotted line would be wrong then."""
    known: dict[Any, list[float]] = {}
    for row in rows:
        if measure.name in row.chance:
            known.setdefault(row.values[x_axis], []).append(row.chance[measure.name])
    tolerance = 0.01 if measure.kind == "share" else 0.0
    alike = all(max(found) - min(found) <= tolerance for found in known.values())
    return {x: found[0] for x, found in known.items()} if alike else {}


def _values(row: Row, axes: Sequence[str]) -> list[str]:
    """Words as they are, numbers with what they count: `books`, `depth 0.5`."""
    return [
        str(value) if isinstance(value := row.values[axis], str) else f"{axis} {axis_value(value)}"
        for axis in axes
        if axis in row.values
    ]


def _series(name: str, rows: Sequence[Row], x_axis: str, measure: str) -> Series:
    numbers = not any(isinstance(row.values[x_axis], str) for row in rows)
    if numbers:
        rows = sorted(rows, key=lambda row: float(row.values[x_axis]))
    estimates = [row.estimates[measure] for row in rows]
    return Series(
        name,
        [row.values[x_axis] for row in rows],
        [estimate.value for estimate in estimates],
        [estimate.low for estimate in estimates],
        [estimate.high for estimate in estimates],
    )
