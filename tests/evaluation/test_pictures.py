"""Tables and plots of results: what stands in which cell, which line in which panel, and names of any form.

python -m pytest tests/evaluation/test_pictures.py
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from longfocus import plots
from longfocus.errors import ConfigError
from longfocus.evaluation.draw import figure
from longfocus.evaluation.tables import cell, header_and_rows, markdown, side_by_side, table
from longfocus.plots import Series, short_number
from longfocus.tasks.contract import Measure, Row
from longfocus.tasks.statistics import Estimate, share_of
from tests.evaluation.made_up import results

SHARE, NUMBER = Measure("right", "share", "higher"), Measure("loss", "number", "lower", "nats")
NOTHING = math.nan

# -- tables ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measure", "estimate", "text"),
    [
        (SHARE, Estimate(0.5, 0.25, 0.75), "50% (25 to 75%)"),
        (SHARE, Estimate(0.123, 0.0, 1.0), "12.3% (0 to 100%)"),
        (SHARE, Estimate(1 / 90000, NOTHING, NOTHING), "0.00111%"),
        (SHARE, Estimate(0.0999, 0.0123, 0.5), "9.99% (1.23 to 50%)"),
        (SHARE, Estimate(NOTHING, NOTHING, NOTHING), "nan"),
        (SHARE, None, ""),
        (NUMBER, Estimate(3.14159, 3.0, 3.3), "3.142 (3 to 3.3)"),
        (NUMBER, Estimate(12345.6, 12000, 13000), "12,346 (12,000 to 13,000)"),
        (NUMBER, Estimate(-0.00123, NOTHING, NOTHING), "-0.00123"),
        (NUMBER, Estimate(math.inf, NOTHING, NOTHING), "inf"),
    ],
)
def test_a_cell_is_value_and_interval(measure: Measure, estimate: Estimate | None, text: str) -> None:
    assert cell(measure, estimate) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8192, "8k"),
        (1 << 20, "1M"),
        (1536, "1,536"),
        (5000, "5,000"),
        (64, "64"),
        (0, "0"),
        (0.25, "0.25"),
        (1 / 3, "0.3333"),
        (1e9, "1,000,000,000"),
        (1e300, "1e+300"),
        (-2048, "-2,048"),
        ("books", "books"),
    ],
)
def test_numbers_on_axes(value: Any, text: str) -> None:
    assert short_number(value) == text


def test_one_runs_table() -> None:
    run = results(
        rows=[({"tokens": 2048, "haystack": "a|b\nc"}, 1, 50)], stopped=True, refused={"tokens=9": "too long"}
    )
    run.rows[0].notes.update({"first third": "1 of 3", "bytes": 4096, "ratio": 0.33333})
    header, rows = header_and_rows(run)
    assert header == [
        "tokens",
        "haystack",
        "right",
        "seconds",
        "chance, right",
        "first third",
        "bytes",
        "ratio",
        "samples",
    ]
    assert rows == [
        ["2k", "a|b\nc", "2% (0.354 to 10.5%)", "0.1429 (0 to 1)", "0.001%", "1 of 3", "4,096", "0.3333", "50"]
    ]
    text = table(run)
    assert "| 2k | a\\|b c | 2% (0.354 to 10.5%) |" in text
    assert text.count("\n| ") == 1, "one row a line, whatever a name holds"
    assert text.endswith("Not measured: tokens=9: too long\n\nNot finished: the same command goes on.")
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---:|\n| 1 | 2 |"


def test_several_runs_stand_side_by_side_where_they_agree() -> None:
    one = results("one", rows=[({"tokens": t, "haystack": "books"}, 25, 50) for t in (2048, 8192)])
    two = results("two", rows=[({"tokens": t, "haystack": "books"}, 50, 50) for t in (8192, 65536)])
    header, rows = side_by_side([one, two], one.measures[0])
    assert header == ["tokens", "haystack", "one", "two", "chance"]
    half, whole = "50% (36.6 to 63.4%)", "100% (92.9 to 100%)"
    assert rows == [
        ["2k", "books", half, "", "0.001%"],
        ["8k", "books", half, whole, "0.001%"],
        ["64k", "books", "", whole, "0.001%"],
    ]


# -- plots -------------------------------------------------------------------------------------------------


def drawn(made: Any) -> dict[str, list[list[tuple[float, float]]]]:
    """Panel title -> points of each line with error bars, as they stand in the figure."""
    panels: dict[str, list[list[tuple[float, float]]]] = {}
    for axis in made.axes:
        lines = [container.lines[0].get_data() for container in axis.containers]
        panels[axis.get_title()] = [[(float(x), float(y)) for x, y in zip(*line, strict=True)] for line in lines]
    return panels


def test_one_run_draws_a_line_for_each_value_of_the_second_axis() -> None:
    made = figure([results()])
    (panel,) = drawn(made).values()
    assert [[y for _, y in points] for points in panel] == [[4, 16, 64], [4, 16, 64]]
    (axis,) = made.axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["2k", "8k", "32k"]
    assert (axis.get_xscale(), axis.get_xlabel(), axis.get_ylabel()) == ("log", "tokens", "right, %")
    assert [text.get_text() for text in made.legends[0].get_texts()] == ["filler", "books", "chance"]
    bar = axis.containers[0].lines[2][0].get_segments()[0]
    expected = share_of(2, 50)
    assert [y for _, y in bar] == pytest.approx([100 * expected.low, 100 * expected.high])


def test_several_runs_draw_a_panel_for_each_value_of_the_second_axis() -> None:
    made = figure([results("one"), results("two", rows=[({"tokens": 8192, "haystack": "books"}, 50, 50)])])
    panels = drawn(made)
    assert {name: [len(points) for points in lines] for name, lines in panels.items()} == {
        "filler": [3],
        "books": [3, 1],
    }
    assert [text.get_text() for text in made.legends[0].get_texts()] == ["one", "two", "chance"]


def test_a_run_has_one_colour_in_all_panels() -> None:
    only = {name: [({"tokens": t, "haystack": name}, 5, 50) for t in (1024, 2048)] for name in ("filler", "books")}
    runs = [results("one", rows=only["filler"]), results("two", rows=only["filler"] + only["books"])]
    filler, books = figure(runs).axes
    colours = [container.lines[0].get_color() for container in filler.containers]
    assert colours == ["tab:blue", "tab:orange"]
    assert [container.lines[0].get_color() for container in books.containers] == ["tab:orange"]


def test_further_axes_get_panels_and_numbers_say_what_they_count() -> None:
    rows = [
        ({"tokens": t, "documents": d, "set": s}, 5, 50) for s in ("a", "b") for d in (2, 4096) for t in (1024, 2048)
    ]
    one = figure([results(axes=("tokens", "documents", "set"), rows=rows)])
    assert [axis.get_title() for axis in one.axes] == ["a", "b"]
    assert [text.get_text() for text in one.legends[0].get_texts()] == ["documents 2", "documents 4k", "chance"]
    two = figure([results(name, axes=("tokens", "documents", "set"), rows=rows) for name in ("x", "y")])
    assert [axis.get_title() for axis in two.axes] == [
        "documents 2, a",
        "documents 4k, a",
        "documents 2, b",
        "documents 4k, b",
    ]


def test_many_panels_are_wrapped_into_rows() -> None:
    rows = [({"tokens": t, "set": f"set {s}"}, 5, 50) for s in range(7) for t in (1024, 2048)]
    made = figure([results(name, axes=("tokens", "set"), rows=rows) for name in ("x", "y")])
    rows_of = {axis.get_subplotspec().rowspan.start for axis in made.axes}
    assert (len(made.axes), rows_of) == (7, {0, 1, 2})
    assert made.get_figwidth() < 14 and made.get_figheight() > 11


def test_heat_maps_have_a_panel_for_each_run_and_rest() -> None:
    rows = [
        ({"tokens": t, "depth": d, "haystack": h}, t // 2048, 50)
        for h in ("a", "b")
        for t in (2048, 8192)
        for d in (0, 0.5, 1)
    ]
    made = figure([results(name, axes=("tokens", "depth", "haystack"), heat=True, rows=rows) for name in ("x", "y")])
    assert [axis.get_title() for axis in made.axes[:4]] == ["x, a", "x, b", "y, a", "y, b"]
    axis = made.axes[0]
    assert [text.get_text() for text in axis.texts] == ["2", "8", "2", "8", "2", "8"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["2k", "8k"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["0", "0.5", "1"]


def inside(made: Any) -> None:
    """No text leaves the picture, and no tick label touches its neighbour."""
    canvas = FigureCanvasAgg(made)
    canvas.draw()
    renderer = canvas.get_renderer()
    whole = made.bbox
    texts = [made._suptitle, *(t for legend in made.legends for t in legend.get_texts())]
    for axis in made.axes:
        texts += [axis.title, axis.xaxis.label, axis.yaxis.label]
        labels = [label for label in axis.get_xticklabels() if label.get_text()]
        boxes = [label.get_window_extent(renderer) for label in labels]
        if labels and labels[0].get_rotation() == 0:
            for left, right in itertools.pairwise(boxes):
                assert left.x1 < right.x0 + 1, f"{[label.get_text() for label in labels]} touch"
        for label, box in zip(labels, boxes, strict=True):
            assert whole.x0 - 1 <= box.x0 and box.x1 <= whole.x1 + 1, label.get_text()
    for text in texts:
        box = text.get_window_extent(renderer)
        if text.get_text():
            assert whole.x0 - 1 <= box.x0 and box.x1 <= whole.x1 + 1, text.get_text()
            assert whole.y0 - 1 <= box.y0 and box.y1 <= whole.y1 + 1, text.get_text()
    for legend in made.legends:
        for axis in made.axes:
            assert not legend.get_window_extent(renderer).overlaps(axis.get_window_extent(renderer))


LONG = "a model with a very long name/that-nobody-would-type-twice/checkpoint-2000"


@pytest.mark.parametrize(
    "runs",
    [
        [results()],
        [results(name) for name in ("one", LONG, "$x^2$ and $y_1$", "_hidden", "a & <b>", "50%", "\\frac{1}{")],
        [results(title="A title " * 20)],
        [results(axes=("layer", "d"), rows=[({"layer": x, "d": d}, x, 50) for x in range(30) for d in range(12)])],
        [results(axes=("tokens",), rows=[({"tokens": 1000 + x}, 3, 50) for x in range(20)])],
        [results(axes=("style",), rows=[({"style": f"style {x} with words"}, 3, 50) for x in range(9)])],
        [results(axes=("style", "set"), rows=[({"style": f"word {x}", "set": LONG}, 3, 5) for x in range(3)])] * 2,
        [results(axes=("x",), rows=[({"x": 2048}, 3, 50)])],
        [results(axes=("x",), rows=[({"x": x}, 3, 50) for x in (0, 1, 2048)])],
        [
            results(n, axes=("x", "y", LONG), heat=True, rows=[({"x": x, "y": y, LONG: 7}, y, 50) for x in range(16) for y in range(16)])
            for n in ("one", LONG)
        ],
    ],
    ids=range(10),
)  # fmt: skip
def test_nothing_is_cut_off_or_covered(runs: list[Any]) -> None:
    inside(figure(runs))


@pytest.mark.parametrize("heat", [False, True])
def test_nothing_measured_is_a_picture_that_says_so(heat: bool, tmp_path: Path) -> None:
    run = results(axes=("tokens", "depth"), heat=heat, rows=[])
    only_second = [Row({"tokens": 2048, "depth": 0.5}, 3, {"seconds": Estimate(1.0, 0.5, 2.0)})]
    for rows in ([], only_second):
        run.rows = rows
        made = figure([run])
        assert [text.get_text() for text in made.axes[0].texts] == ["nothing measured yet"]
        plots.save(made, tmp_path / "plot.png")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]


def test_names_in_scripts_that_the_font_lacks_are_drawn_without_a_warning(tmp_path: Path) -> None:
    plots.save(figure([results("日本語 👍🏽")]), tmp_path / "plot.png")


def test_what_is_no_number_leaves_a_gap() -> None:
    run = results()
    run.rows[1].estimates["right"] = Estimate(NOTHING, NOTHING, NOTHING)
    run.rows[2].estimates["right"] = Estimate(0.5, NOTHING, NOTHING)
    made = figure([run])
    (panel,) = drawn(made).values()
    first = panel[0]
    assert first[0][1] == 4 and math.isnan(first[1][1]) and first[2][1] == 50
    plots.png(made)
    heat = figure([results(heat=True, axes=("tokens", "haystack"), rows=[({"tokens": 1, "haystack": "a"}, 1, 2)]), run])
    plots.png(heat)


def test_small_shares_fill_the_picture_and_chance_is_in_it() -> None:
    def limits(value: float, guess: float) -> tuple[float, float]:
        line = Series("a", [1, 2], [value, value], [0.0, 0.0], [value, value])
        made = plots.lines(
            {"": [line]}, title="", x_label="x", y_label="y", share=True, chance={"": {1: guess, 2: guess}}
        )
        low, high = made.axes[0].get_ylim()
        return low, high

    assert limits(0.9, 0.1)[1] == pytest.approx(103)
    assert 3 < limits(0.03, 0.01)[1] < 5
    assert 25 < limits(0.03, 0.25)[1] < 35
    assert limits(0.0, 0.0)[1] >= 1


def test_drawing_leaves_no_figure_behind_and_no_backend_changed() -> None:
    import matplotlib
    import matplotlib.pyplot as plt

    before = matplotlib.get_backend()
    plots.png(figure([results()]))
    assert plt.get_fignums() == []
    assert matplotlib.get_backend() == before


def test_without_matplotlib_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'longfocus\[plots\]'"):
        figure([results()])
    importlib.import_module("longfocus.plots")
