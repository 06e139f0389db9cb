"""The page that compares runs: everything on it, nothing from elsewhere, and names that mean nothing to a browser.

python -m pytest tests/evaluation/test_report.py
"""

from __future__ import annotations

import base64
import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from longfocus.errors import EvaluationError
from longfocus.evaluation.record import RESULTS, Results, write_json
from longfocus.evaluation.report import page
from longfocus.evaluation.report_markdown import write_markdown
from longfocus.evaluation.sections import find_runs
from tests.evaluation.made_up import results

EVIL = "<b>&\"'</b><script>alert(1)</script><img src=http://evil/x.png>"
_VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """Tags, attributes and text; unbalanced tags are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def saved(folder: Path, made: Results) -> Path:
    folder.mkdir(parents=True)
    write_json(folder / RESULTS, made.to_dict())
    return folder


def assert_self_contained(text: str, made: Page) -> None:
    assert not made.of("script") and not made.of("link") and not made.of("iframe")
    for _, attributes in made.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert value is not None and (value.startswith(("data:image/png;base64,", "#"))), value
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style and "@import" not in style


# -- what stands on it -------------------------------------------------------------------------------------


def test_the_page_holds_every_model_task_and_number(tmp_path: Path) -> None:
    runs = [
        results(model, task=task, title=title)
        for model in ("default", "default-base, full attention")
        for task, title in (("mine", "My own task"), ("passkey", "Pass-key retrieval"))
    ]
    text = page(runs, "Before & after")
    made = Page(text)
    assert_self_contained(text, made)
    assert "<title>Before &amp; after</title>" in text and text.startswith("<!doctype html>")
    headings = re.findall(r'<h2 id="(.*?)">(.*?)</h2>', text)
    assert [title for _, title in headings] == ["Pass-key retrieval", "My own task"], "known tasks first"
    assert [link["href"] for link in made.of("a")] == [f"#{anchor}" for anchor, _ in headings]
    models, *tables = made.tables
    assert [row[0] for row in models] == ["model", "default", "default-base, full attention"]
    compared = [table for table in tables if "default" in table[0]]
    assert len(compared) == 4, "two measures of two tasks"
    assert compared[0][0] == ["tokens", "haystack", "default", "default-base, full attention", "chance"]
    assert compared[0][1][:4] == ["2k", "filler", "4% (1.1 to 13.5%)", "4% (1.1 to 13.5%)"]
    assert compared[1][0] == ["tokens", "haystack", "default", "default-base, full attention"]
    pictures = made.of("img")
    assert len(pictures) == 2
    for picture in pictures:
        data = base64.b64decode(str(picture["src"]).removeprefix("data:image/png;base64,"), validate=True)
        assert data.startswith(b"\x89PNG")
    for words in (
        "arXiv 2307.03170",
        "longfocus eval passkey --name default",
        '"seed": 0',
        "higher is better",
        "2026-11-30",
    ):
        assert words in made.text, words


def test_a_markdown_page_holds_the_same_tables_with_commands_and_pictures_beside_it(tmp_path: Path) -> None:
    unfinished = dataclasses.replace(results("a | b", task="mine", title="My own task"), stopped=True)
    runs = [results("default"), results("default-base"), unfinished]
    to = tmp_path / "page.md"
    pictures = write_markdown(runs, to, "Before and after")
    text = to.read_text("utf-8")
    assert [picture.name for picture in pictures] == [
        f"page_{name}.png" for name in ("pass-key_retrieval", "my_own_task")
    ]
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG") and f"]({picture.name})" in text
    assert text.startswith("# Before and after\n") and text.count("\n## ") == 2
    assert "| 2k | filler | 4% (1.1 to 13.5%) | 4% (1.1 to 13.5%) |" in text
    assert "longfocus eval passkey --name default   # default, 2026-11-30" in text
    assert "**Not finished: a | b.**" in text and "| a \\| b |" in text


def test_names_mean_nothing_to_the_browser() -> None:
    rows = [({"tokens": 2048, EVIL: EVIL}, 3, 50)]
    run = results(
        EVIL,
        ("tokens", EVIL),
        title=EVIL,
        rows=rows,
        paper=EVIL,
        task=EVIL,
        options={EVIL: EVIL},
        refused={EVIL: EVIL},
        stopped=True,
        about={"command": ["longfocus", EVIL], EVIL: EVIL},
    )
    run.rows[0].notes[EVIL] = EVIL
    other = results("other", ("tokens", EVIL), title=EVIL, task=EVIL, rows=rows)
    text = page([run, other], EVIL)
    made = Page(text)
    assert_self_contained(text, made)
    assert {tag for tag, _ in made.tags} <= set(
        "html head meta title style body h1 h2 nav a div table thead tbody tr th td p img details summary code ul li".split()
    )
    assert not made.of("b")
    assert made.text.count("alert(1)") >= 10
    assert [row[0] for row in made.tables[0]] == ["model", EVIL, "other"]


def test_runs_of_different_options_are_compared_with_a_warning() -> None:
    same = page([results("a"), results("b")])
    other = page([results("a"), results("b", options={"seed": 1})])
    assert "different options" not in same and "different options" in other


def test_unfinished_runs_and_lengths_that_were_not_measured_are_said() -> None:
    text = Page(
        page([results("a", stopped=True, refused={"tokens=65536": "a takes 2,048 tokens."}), results("b")])
    ).text
    assert "Not finished: a." in text
    assert "Not measured: tokens=65536: a takes 2,048 tokens." in text


def test_runs_over_other_axes_stand_apart() -> None:
    """Pass-key with chosen depths and with random ones are two tables, not one with gaps."""
    rows = [({"tokens": 2048, "depth": d, "haystack": "filler"}, 5, 50) for d in (0, 1)]
    heat = results("a", ("tokens", "depth", "haystack"), heat=True, rows=rows)
    made = Page(page([results("a"), heat, results("b")]))
    heads = [words for words in made.words if words.startswith("Pass-key retrieval by")]
    assert heads[2:] == ["Pass-key retrieval by tokens, haystack", "Pass-key retrieval by tokens, depth, haystack"]
    assert len(made.of("img")) == 2


def test_different_models_of_one_name_get_numbers_and_keep_them() -> None:
    def subject(window: int) -> dict[str, Any]:
        return {
            "name": "model",
            "kind": "focused",
            "focus": {"window": window, "memory_layers": [6], "retrieval": "dense"},
        }

    runs = [
        results("model", subject=subject(256)),
        results("model", subject=subject(512), task="other", title="Other"),
        results("model", subject=subject(512)),
        results("model", subject=subject(256), task="other", title="Other"),
    ]
    made = Page(page(runs))
    assert [row[0] for row in made.tables[0]] == ["model", "model", "model (2)"]
    assert [row[-1] for row in made.tables[0][1:]] == [f"layers 6; window {w}; dense" for w in (256, 512)]
    compared = {tuple(table[0][2:4]) for table in made.tables[1:] if "model (2)" in table[0]}
    assert compared == {("model", "model (2)"), ("model (2)", "model")}
    assert [run.model for run in runs] == ["model"] * 4, "the caller's results are left as they were"


def test_runs_of_one_model_with_other_options_get_numbers() -> None:
    made = Page(page([results("model"), results("model", options={"seed": 1}), results("model", options={"seed": 2})]))
    assert made.tables[1][0][2:5] == ["model", "model, run 2", "model, run 3"]
    assert [row[0] for row in made.tables[0]] == ["model", "model"]


def test_a_run_without_rows_is_there_too() -> None:
    made = Page(page([results("a", rows=[], stopped=True)]))
    assert "Not finished: a." in made.text and not made.of("img")


def test_what_older_or_foreign_results_lack_is_left_empty() -> None:
    made = Page(page([results("a", subject={}, about={}, options={})]))
    assert [row[0] for row in made.tables[0]] == ["model", "?"]


# -- finding runs ------------------------------------------------------------------------------------------


def test_folders_of_runs_and_of_models_are_found_once(tmp_path: Path) -> None:
    one = saved(tmp_path / "eval" / "a" / "passkey", results("a"))
    saved(tmp_path / "eval" / "a" / "other", results("a", task="other"))
    saved(tmp_path / "eval" / "b" / "passkey", results("b"))
    assert [(run.model, run.task) for run in find_runs([tmp_path / "eval"])] == [
        ("a", "other"),
        ("a", "passkey"),
        ("b", "passkey"),
    ]
    assert [run.model for run in find_runs([one])] == ["a"]
    again = [one, one / RESULTS, tmp_path / "eval" / "b", tmp_path / "eval" / "." / "a"]
    assert [(run.model, run.task) for run in find_runs(again)] == [("a", "passkey"), ("b", "passkey"), ("a", "other")]


def test_folders_without_results_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    for name, words in (("empty", "holds no results.json"), ("nowhere", "does not exist"), ("file.txt", "holds no")):
        with pytest.raises(EvaluationError, match=rf"{name} {words}.*--out folders of longfocus eval"):
            find_runs([tmp_path / name])
    damaged = saved(tmp_path / "damaged", results())
    (damaged / RESULTS).write_text('{"format": 1')
    with pytest.raises(EvaluationError, match=r"damaged/results\.json is not JSON"):
        find_runs([tmp_path / "damaged"])
