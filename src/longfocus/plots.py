"""The few plot forms that tasks and analysis share; drawn without a screen, matplotlib loaded on use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longfocus.errors import ConfigError
from longfocus.settings import size_name

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:gray")
MARKERS = "os^Dv<>P"


@dataclass(frozen=True)
class Series:
    """A line: x, y and the ends of y's 95% intervals (nan where there is none)."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def pyplot() -> Any:
    """matplotlib.pyplot, without a screen.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("Plots need matplotlib: pip install 'longfocus[plots]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def short_number(value: float | str) -> str:
    """8192 -> 8k, for axes; other things as they are."""
    if isinstance(value, str):
        return value
    return size_name(int(value)) if value >= 1024 and value % 1024 == 0 else f"{value:g}"


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
    """Lines with error bars, a panel each.

    Args:
        panels: panel title -> series.
        share: y is a share, drawn in % from 0 to 100.
        chance: panel title -> x -> what guessing gives, dotted.

    Returns:
        the figure.
    """
    plt = pyplot()
    made, axes = plt.subplots(
        1, len(panels), figsize=(max(6.5, 4.4 * len(panels)), 4.4), layout="constrained", squeeze=False, sharey=share
    )
    scale = 100 if share else 1
    names: dict[str, Any] = {}
    for axis, (name, series) in zip(axes[0], panels.items(), strict=True):
        xs = _ordered([x for line in series for x in line.x])
        words = any(isinstance(x, str) for x in xs)
        logarithmic = log_x and not words and all(float(x) > 0 for x in xs) and len(xs) > 1
        for number, line in enumerate(series):
            at = [xs.index(x) if words else float(x) for x in line.x]
            if len(series) > 1:  # beside each other, so that bars do not hide one another
                shift = (number - (len(series) - 1) / 2) * (0.08 if words else 0.02)
                at = [x * (1 + shift) if logarithmic else x + (shift if words else 0) for x in at]
            y = [scale * value for value in line.y]
            error = [
                [
                    0.0 if math.isnan(low) else max(0.0, value - scale * low)
                    for value, low in zip(y, line.low, strict=True)
                ],
                [
                    0.0 if math.isnan(high) else max(0.0, scale * high - value)
                    for value, high in zip(y, line.high, strict=True)
                ],
            ]
            colour = COLOURS[number % len(COLOURS)]
            drawn = axis.errorbar(
                at, y, yerr=error, marker=MARKERS[number % len(MARKERS)], capsize=3, color=colour, label=line.name
            )
            names.setdefault(line.name, drawn)
        guesses = (chance or {}).get(name, {})
        if guesses:
            at = [xs.index(x) if words else float(x) for x in xs if x in guesses]
            drawn = axis.plot(at, [scale * guesses[x] for x in xs if x in guesses], ":", color="black", label="chance")[
                0
            ]
            names.setdefault("chance", drawn)
        if logarithmic:
            axis.set_xscale("log")
        axis.set_xticks(range(len(xs)) if words else [float(x) for x in xs], [short_number(x) for x in xs])
        axis.minorticks_off()
        axis.set(title=name, xlabel=x_label)
        if share:
            axis.set_ylim(-3, 103)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(y_label + (", %" if share else ""))
    if len(names) > 1:
        made.legend(list(names.values()), list(names), loc="outside lower center", ncols=min(4, len(names)), fontsize=9)
    made.suptitle(title)
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
    """Coloured cells with their numbers, a panel each.

    Args:
        panels: panel title -> (x, y) -> value.

    Returns:
        the figure.
    """
    plt = pyplot()
    made, axes = plt.subplots(
        1, len(panels), figsize=(max(6.5, 4.4 * len(panels)), 4.4), layout="constrained", squeeze=False
    )
    every = [value for cells in panels.values() for value in cells.values() if not math.isnan(value)]
    low, high = (0.0, 1.0) if share else (min(every, default=0.0), max(every, default=1.0))
    image = None
    for axis, (name, cells) in zip(axes[0], panels.items(), strict=True):
        xs, ys = _ordered([x for x, _ in cells]), _ordered([y for _, y in cells])
        grid = [[cells.get((x, y), math.nan) for x in xs] for y in ys]
        image = axis.imshow(
            grid, vmin=low, vmax=high, cmap="RdYlGn" if share else "viridis", aspect="auto", origin="lower"
        )
        for row, y in enumerate(ys):
            for column, x in enumerate(xs):
                value = cells.get((x, y), math.nan)
                if not math.isnan(value) and len(xs) * len(ys) <= 120:
                    axis.text(
                        column,
                        row,
                        f"{100 * value:.0f}" if share else f"{value:.3g}",
                        ha="center",
                        va="center",
                        fontsize=9,
                    )
        axis.set_xticks(range(len(xs)), [short_number(x) for x in xs])
        axis.set_yticks(range(len(ys)), [short_number(y) for y in ys])
        axis.set(title=name, xlabel=x_label)
    axes[0][0].set_ylabel(y_label)
    if image is not None:
        made.colorbar(image, ax=axes[0].tolist(), label="share" if share else unit, shrink=0.8)
    made.suptitle(title)
    return made


def save(figure: Any, path: Path) -> None:
    """Write a PNG and forget the figure."""
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


def _ordered(values: Sequence[float | str]) -> list[float | str]:
    """Numbers ascending; words in the order in which they come."""
    unique = list(dict.fromkeys(values))
    if all(not isinstance(value, str) for value in unique):
        return sorted(unique, key=float)
    return unique
