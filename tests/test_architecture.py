"""The import graph agrees with docs/architecture.md: arrows point one way.

python -m pytest tests/test_architecture.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/longfocus"
PAGE = ROOT / "docs/architecture.md"


def documented_layers() -> dict[str, int]:
    """Part of the package -> number of its line in the page's list."""
    section = PAGE.read_text("utf-8").partition("## Layers")[2].partition("\n## ")[0]
    lines = re.findall(r"^(\d+)\. ((?:`\w+`(?:, )?)+):", section, re.MULTILINE)
    return {name: int(number) for number, names in lines for name in re.findall(r"`(\w+)`", names)}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Parts of the package that a file imports at run time, in functions too; not those for type checkers only."""
    tree = ast.parse(path.read_text("utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("longfocus."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "longfocus":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("longfocus.")}
    return found


def test_every_part_of_the_package_is_on_the_page() -> None:
    parts = {part_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    assert parts == set(documented_layers())


def test_a_part_imports_only_from_lines_above_it() -> None:
    layers = documented_layers()
    wrong = [
        f"{path.relative_to(ROOT)} ({layers[part_of(path)]}) imports {name} ({layers[name]})"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != PACKAGE or path.name != "__init__.py"
        for name in imports(path)
        if name in layers and layers[name] > layers[part_of(path)]
    ]
    assert wrong == []


def test_the_page_names_only_files_that_exist() -> None:
    text = PAGE.read_text("utf-8")
    parts = "|".join(path.name for path in PACKAGE.iterdir() if path.is_dir())
    names = set(re.findall(rf"((?:{parts})/\w+\.py)", text))
    assert len(names) > 20
    missing = [name for name in sorted(names) if not (PACKAGE / name).exists()]
    assert missing == []
