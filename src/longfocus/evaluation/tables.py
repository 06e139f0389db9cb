"""Rows as text: one run's Markdown table, and several runs' side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from longfocus.evaluation.record import Results
from longfocus.plots import short_number
from longfocus.tasks.contract import Measure
from longfocus.tasks.statistics import Estimate


def number(value: float) -> str:
    """Four digits that matter: 12,345; 1,234; 12.34; 0.00123."""
    if math.isnan(value):
        return "nan"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def share(value: float) -> str:
    """In %, with tenths where they matter."""
    if math.isnan(value):
        return "nan"
    percent = 100 * value
    return f"{percent:.3g}%" if 0 < percent < 10 else f"{percent:.1f}%".replace(".0%", "%")


def cell(measure: Measure, estimate: Estimate | None) -> str:
    """Value and 95% interval; empty where nothing was measured, nan where the model gave no number."""
    if estimate is None:
        return ""
    show = share if measure.kind == "share" else number
    text = show(estimate.value)
    if not (math.isnan(estimate.low) or math.isnan(estimate.high)):
        low, high = show(estimate.low), show(estimate.high)
        text += f" ({low.removesuffix('%')} to {high})"
    return text


def axis_value(value: Any) -> str:
    """What a point varies, as text: 8k, 0.25, books."""
    return short_number(value) if _is_number(value) else str(value)


def note_value(value: Any) -> str:
    """A further number of a row."""
    if _is_number(value):
        return f"{value:,}" if isinstance(value, int) else number(value)
    return str(value)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table; the first columns are words, the others numbers."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(text.replace("|", "\\|").split()) for text in cells) + " |"

    return "\n".join([line(header), "|" + "---|" * words + "---:|" * (len(header) - words), *map(line, rows)])


def header_and_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """The cells of one run's table."""
    seen = [m for m in results.measures if any(m.name in row.estimates for row in results.rows)]
    notes = list(dict.fromkeys(name for row in results.rows for name in row.notes))
    guessed = [m for m in seen if any(m.name in row.chance for row in results.rows)]
    header = [*results.axes, *(m.name for m in seen), *(f"chance, {m.name}" for m in guessed[:1]), *notes, "samples"]
    rows = []
    for row in results.rows:
        cells = [axis_value(row.values.get(axis, "all")) for axis in results.axes]
        cells += [cell(m, row.estimates.get(m.name)) for m in seen]
        cells += [cell(m, _point(row.chance.get(m.name))) for m in guessed[:1]]
        cells += [note_value(row.notes.get(name, "")) for name in notes]
        rows.append([*cells, f"{row.samples:,}"])
    return header, rows


def table(results: Results) -> str:
    """One run, as Markdown."""
    header, rows = header_and_rows(results)
    lines = [markdown(header, rows, len(results.axes))]
    for point, why in results.refused.items():
        lines.append(f"\nNot measured: {point}: {why}")
    if results.stopped:
        lines.append("\nNot finished: the same command goes on.")
    return "\n".join(lines)


def side_by_side(runs: Sequence[Results], measure: Measure) -> tuple[list[str], list[list[str]]]:
    """Header and rows of several runs of one task with the same axes: a column a model, and chance where it is known."""
    axes = runs[0].axes
    keys: dict[tuple[Any, ...], None] = {}
    cells: dict[tuple[tuple[Any, ...], int], str] = {}
    chance: dict[tuple[Any, ...], str] = {}
    for at, run in enumerate(runs):
        for row in run.rows:
            if measure.name not in row.estimates:
                continue
            key = tuple(row.values.get(axis, "all") for axis in axes)
            keys.setdefault(key)
            cells[key, at] = cell(measure, row.estimates[measure.name])
            if measure.name in row.chance:
                chance.setdefault(key, cell(measure, _point(row.chance[measure.name])))
    header = [*axes, *(run.model for run in runs), *(["chance"] if chance else [])]
    rows = [
        [
            *map(axis_value, key),
            *(cells.get((key, at), "") for at in range(len(runs))),
            *([chance.get(key, "")] if chance else []),
        ]
        for key in keys
    ]
    return header, rows


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _point(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value, math.nan, math.nan)
