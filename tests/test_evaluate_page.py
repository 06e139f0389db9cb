"""docs/evaluate.md: names every task, and the task of one's own works as it stands there.

python -m pytest tests/test_evaluate_page.py
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from longfocus.cli import app
from longfocus.evaluation.record import Results
from longfocus.tasks import TASKS, find_task
from longfocus.tasks.texts import HELD_OUT
from tests.commands.conftest import longfocus, tiny_model
from tests.tasks.small_sets import small_sets

PAGE = (Path(__file__).resolve().parents[1] / "docs/evaluate.md").read_text("utf-8")

__all__ = ["tiny_model"]


def test_every_task_is_in_the_table_with_what_it_needs() -> None:
    rows = {name: cells for name, *cells in re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|", PAGE, re.MULTILINE)}
    assert [name for name in rows if name in TASKS] == list(TASKS)
    words = {"complete": "any model", "losses": "a model that runs here", "memory": "a model with a memory"}
    for name in TASKS:
        needs = words[find_task(name).needs]
        assert rows[name][1] == needs or (name, rows[name][1]) == ("cost", "a model that runs here")


def test_its_commands_are_ones_that_there_are() -> None:
    import typer

    group: Any = typer.main.get_command(app)
    lines = [line.partition("#")[0].strip() for line in PAGE.splitlines() if line.startswith("longfocus ")]
    assert len(lines) > 6
    for line in lines:
        _, command, *arguments = shlex.split(line)
        group.commands[command].make_context(command, [a for a in arguments if a != "--list"])


def test_the_sets_that_it_describes_are_those_that_tasks_ask_for(tmp_path: Path) -> None:
    written = {str(path.relative_to(tmp_path)) for path in small_sets(tmp_path).rglob("*.gz")}
    named = set(re.findall(r"`([\w/]+\.jsonl\.gz)`", PAGE))
    named |= {f"{part}/test.jsonl.gz" for part in HELD_OUT if f"`{part}`" in PAGE}
    assert named == {name for name in written if not name.startswith("fewshot/")}


@pytest.mark.parametrize("more", [[], ["--plain"]])
def test_the_task_of_ones_own_works_as_it_stands(more: list[str], tiny_model: Path, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "coats.py").write_text(code)
    data = small_sets(tmp_path / "data")
    command = ("eval", "coats.py", "--model", tiny_model, "--data", data, "--lengths", "300,600", "--samples", "3")
    done = longfocus(*command, "--out", tmp_path / "run", *more, cwd=tmp_path)
    assert done.code == 0, done.err
    found = Results.read(tmp_path / "run" / "coats")
    assert [(row.values, row.samples) for row in found.rows] == [({"tokens": 300}, 3), ({"tokens": 600}, 3)]
    assert found.rows[0].chance == {"right": 1 / 6}
    sizes = [
        int(size) for size in re.findall(r'"prompt_tokens": (\d+)', (tmp_path / "run/coats/samples.jsonl").read_text())
    ]
    assert all(size <= limit + 2 for size, limit in zip(sizes, [300] * 3 + [600] * 3, strict=True))
