"""The few plot forms that tasks and analysis share; drawn without a screen, matplotlib loaded on use.

No figure is known to pyplot, so nothing has to be closed and a notebook's own plots are not touched.
"""

from __future__ import annotations

import io
import math
import os
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longfocus.errors import ConfigError
from longfocus.settings import size_name

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:gray")
MARKERS = "os^Dv<>P"
STYLES = ("-", "--", "-.", ":")
"""For the second, third, … eight lines."""

MOST_COLUMNS = 3
PANEL_INCHES = (4.4, 3.7)
_CHARS_PER_INCH = 12
"""Of small text, roughly."""
_TICKS_PER_PANEL = 10


@dataclass(frozen=True)
class Series:
    """A line: x, y and the ends of y's 95% intervals (nan where there is none)."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def short_number(value: float | str) -> str:
    """8192 -> 8k, 12500 -> 12,500, for axes; other things as they are."""
    if isinstance(value, str):
        return value
    if not float(value).is_integer() or abs(value) >= 1e15:
        return f"{value:.4g}"
    return size_name(int(value)) if value >= 1024 else f"{int(value):,}"


def lines(
    panels: Mapping[str, Sequence[Series]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = True,
    share: bool = False,
    chance: Mapping[str, Mapping[float | str, float]] | None = None,
) -> Any:
    """Lines with error bars, a panel each, three in a row; words on x get points without a line between them.

    Args:
        panels: panel title, or nothing -> series.
        share: y is a share, drawn in %.
        chance: panel title -> x -> what guessing gives, dotted.

    Returns:
        a matplotlib.figure.Figure.

    Raises:
        ConfigError: matplotlib is missing.
    """
    made, axes = _grid(len(panels), title, sharey=share)
    scale = 100 if share else 1
    order = list(dict.fromkeys(line.name for series in panels.values() for line in series))
    names: dict[str, Any] = {}
    guessed = None
    for axis, (name, series) in zip(axes, panels.items(), strict=False):
        xs = _ordered([x for line in series for x in line.x])
        words = any(isinstance(x, str) for x in xs)
        logarithmic = log_x and not words and len(xs) > 1 and float(xs[0]) >= 0 and float(xs[-1]) > 0
        zero = min(float(x) for x in xs if float(x) > 0) / 2 if logarithmic else 0.0  # 0 stands left of the others
        for line in series:
            number = order.index(line.name)  # a name has one colour in all panels
            at = [xs.index(x) if words else float(x) or zero for x in line.x]
            if len(order) > 1:  # beside each other, so that bars do not hide one another
                shift = (number - (len(order) - 1) / 2) * min(0.3 / len(order), 0.08 if words else 0.02)
                at = [x * (1 + shift) if logarithmic else x + (shift if words else 0) for x in at]
            turn = number // len(COLOURS)
            drawn = axis.errorbar(
                at,
                [scale * value for value in line.y],
                yerr=_bars(line, scale),
                marker=MARKERS[(number + turn) % len(MARKERS)],
                linestyle="" if words else STYLES[turn % len(STYLES)],
                capsize=3,
                color=COLOURS[number % len(COLOURS)],
            )
            names.setdefault(line.name, drawn)
        guesses = (chance or {}).get(name, {})
        if guesses:
            known = [x for x in xs if x in guesses]
            at = [xs.index(x) if words else float(x) or zero for x in known]
            if len(at) == 1:  # a line of one point would not show
                guessed = axis.axhline(scale * guesses[known[0]], linestyle=":", color="black")
            else:
                (guessed,) = axis.plot(at, [scale * guesses[x] for x in known], ":", color="black")
        if logarithmic:
            axis.set_xscale("log")
        _ticks(axis, xs, words=words, logarithmic=logarithmic, zero=zero)
        axis.set_title(_text(name, 0.75 * PANEL_INCHES[0]), fontsize=11)
        axis.set_xlabel(_text(x_label))
        axis.grid(alpha=0.3)
    if share:
        _share_limits(axes, panels, chance or {})
    for axis in axes[:: min(MOST_COLUMNS, len(axes))] if share else axes:
        axis.set_ylabel(_text(y_label + (", %" if share else "")))
    if guessed is not None:
        names.setdefault("chance", guessed)
    if len(names) > 1:
        labels = [_text(name) for name in names]
        made.legend(
            list(names.values()),
            labels,
            loc="outside lower center",
            ncols=_legend_columns(labels, made.get_figwidth()),
            fontsize=9,
        )
    return made


def heat(
    panels: Mapping[str, Mapping[tuple[float | str, float | str], float]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    share: bool = True,
    unit: str = "",
) -> Any:
    """Coloured cells with their numbers, a panel each, three in a row; first rows at the bottom.

    Args:
        panels: panel title, or nothing -> (x, y) -> value.
        share: values are shares, drawn in %.

    Returns:
        a matplotlib.figure.Figure.

    Raises:
        ConfigError: matplotlib is missing.
    """
    made, axes = _grid(len(panels), title, sharey=False)
    scale = 100 if share else 1
    every = [scale * value for cells in panels.values() for value in cells.values() if not math.isnan(value)]
    low, high = (0.0, 100.0) if share else (min(every, default=0.0), max(every, default=1.0))
    image = None
    for axis, (name, cells) in zip(axes, panels.items(), strict=False):
        xs, ys = _ordered([x for x, _ in cells]), _ordered([y for _, y in cells])
        grid = [[scale * cells.get((x, y), math.nan) for x in xs] for y in ys]
        image = axis.imshow(grid, vmin=low, vmax=high, cmap="viridis", aspect="auto", origin="lower")
        if len(xs) <= 16 and len(ys) <= 16:
            longest = max((len(_cell(value, share)) for row in grid for value in row), default=1)
            for row, values in enumerate(grid):
                for column, value in enumerate(values):
                    dark = math.isnan(value) or value < low + 0.55 * (high - low)
                    axis.text(
                        column,
                        row,
                        _cell(value, share),
                        ha="center",
                        va="center",
                        fontsize=max(4.5, min(9.0, 340 / (len(xs) * (longest + 1)))),
                        color="tab:gray" if math.isnan(value) else "white" if dark else "black",
                    )
        _ticks(axis, xs, words=True, logarithmic=False)
        step = max(1, math.ceil(len(ys) / 12))
        axis.set_yticks(range(0, len(ys), step), [_text(short_number(y)) for y in ys[::step]], fontsize=9)
        axis.set_title(_text(name, 0.75 * PANEL_INCHES[0]), fontsize=11)
        axis.set_xlabel(_text(x_label))
        axis.set_ylabel(_text(y_label))
    if image is not None:
        made.colorbar(image, ax=axes, label="%" if share else _text(unit), shrink=0.8)
    return made


def png(figure: Any, dpi: int = 120) -> bytes:
    """The picture."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # names in scripts that the font lacks
        figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def save(figure: Any, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(png(figure))
    os.replace(new, path)


# -- parts -------------------------------------------------------------------------------------------------


def _grid(panels: int, title: str, *, sharey: bool) -> tuple[Any, list[Any]]:
    """A figure and axes for so many panels; one axis that says so where there are none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("Plots need matplotlib: pip install 'longfocus[plots]'") from None
    columns = 2 if panels in (2, 4) else min(MOST_COLUMNS, max(1, panels))
    rows = max(1, math.ceil(panels / columns))
    width, height = max(6.8, PANEL_INCHES[0] * columns), PANEL_INCHES[1] * rows + 0.8
    made = Figure(figsize=(width, height), layout="constrained")
    axes = list(made.subplots(rows, columns, squeeze=False, sharey=sharey).flat)
    for axis in axes[max(1, panels) :]:
        axis.remove()
    if not panels:
        axes[0].text(0.5, 0.5, "nothing measured yet", ha="center", va="center")
        axes[0].set_axis_off()
    made.suptitle(_text(title, width / 1.3))
    return made, axes[: max(1, panels)]


def _ticks(axis: Any, xs: Sequence[float | str], *, words: bool, logarithmic: bool, zero: float = 0.0) -> None:
    """Labels at the values that were measured, 0 at `zero`; slanted or fewer where they would touch."""
    at: list[float] = [float(index) for index in range(len(xs))] if words else [float(x) or zero for x in xs]
    labels = [short_number(x) for x in xs]
    numbers = not any(isinstance(x, str) for x in xs)
    kept = list(range(len(at)))
    if numbers and not words and len(at) > 1:
        places = [math.log(x) for x in at] if logarithmic else at
        least = (places[-1] - places[0]) / _TICKS_PER_PANEL
        kept = [0]
        for index in range(1, len(at)):
            if places[index] - places[kept[-1]] >= least:
                kept.append(index)
    elif numbers and len(at) > 2 * _TICKS_PER_PANEL:
        kept = kept[:: math.ceil(len(at) / _TICKS_PER_PANEL)]
    shown = [labels[index] for index in kept]
    crowded = sum(len(label) + 2 for label in shown) > _CHARS_PER_INCH * (PANEL_INCHES[0] - 0.8)
    axis.set_xticks([at[index] for index in kept], [_text(label) for label in shown], fontsize=9)
    if crowded:
        for label in axis.get_xticklabels():
            label.set(rotation=35, ha="right", rotation_mode="anchor")
    axis.minorticks_off()


def _bars(line: Series, scale: float) -> list[list[float]]:
    """Distances below and above; none where an end is not known."""

    def distance(value: float) -> float:
        return 0.0 if math.isnan(value) else max(0.0, scale * value)

    below = [distance(value - low) for value, low in zip(line.y, line.low, strict=True)]
    above = [distance(high - value) for value, high in zip(line.y, line.high, strict=True)]
    return [below, above]


def _share_limits(
    axes: Sequence[Any],
    panels: Mapping[str, Sequence[Series]],
    chance: Mapping[str, Mapping[float | str, float]],
) -> None:
    """0 to 100%, or less where everything is small."""
    ends = [
        100 * (value if math.isnan(end) else end)
        for series in panels.values()
        for line in series
        for value, end in zip(line.y, line.high, strict=True)
        if not math.isnan(value)
    ]
    ends += [100 * guess for guesses in chance.values() for guess in guesses.values()]
    top = max(ends, default=100.0)
    top = 100.0 if top > 40 else max(1.0, 1.15 * top)
    for axis in axes:
        axis.set_ylim(-0.03 * top, 1.03 * top)


def _cell(value: float, share: bool) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.0f}" if share else f"{value:.3g}"


def _legend_columns(labels: Sequence[str], width_inches: float) -> int:
    longest = max(map(len, labels)) + 7  # with its line and gaps
    return max(1, min(5, len(labels), int(_CHARS_PER_INCH * width_inches / longest)))


def _text(text: str, width_inches: float | None = None) -> str:
    """Text as it stands: no mathematics between dollars, no name hidden for its underscore; wrapped to a width."""
    if text and width_inches is not None:
        text = "\n".join(textwrap.wrap(text, max(20, int(_CHARS_PER_INCH * width_inches))))
    text = text.replace("$", r"\$")
    return "\u200b" + text if text.startswith("_") else text


def _ordered(values: Sequence[float | str]) -> list[float | str]:
    """Numbers ascending; words in the order in which they come."""
    unique = list(dict.fromkeys(values))
    if all(not isinstance(value, str) for value in unique):
        return sorted(unique, key=float)
    return unique
