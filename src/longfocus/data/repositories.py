"""A repository as one document: its files joined by folder, as the paper's training data has them.

Files stand in the order of their directories, and by name within one (a folder's own files before its sub-folders'),
each after a line that names it. The paper (section 4.1 and appendix: code is concatenated by repository) leaves the
form of that line open; this one is also the form of the project's own code documents:

    === src/flask/app.py ===
    from __future__ import annotations
    ...
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longfocus.data.source_spec import SourceFile


def repositories(files: Sequence[SourceFile]) -> list[tuple[str, list[SourceFile]]]:
    """Group the files of named folders into repositories: each top-level folder is one, in sorted order.

    Files that lie in the named folder itself, beside the repositories, make one document of the folder's name.

    Returns:
        (document id, files in the order in which they are joined).
    """
    groups: dict[tuple[Path, str], list[SourceFile]] = {}
    for file in files:
        assert file.root is not None, "a source of code is a folder"
        parts = file.path.relative_to(file.root).parts
        groups.setdefault((file.root, parts[0] if len(parts) > 1 else ""), []).append(file)
    return [
        (repository or root.resolve().name, sorted(group, key=_directory_then_name))
        for (root, repository), group in groups.items()
    ]


def join_files(texts: Sequence[tuple[SourceFile, str]]) -> str:
    """One text of (file, its text) pairs; an empty line stands between files."""
    parts = []
    for file, text in texts:
        parts.append(f"=== {path_inside(file)} ===\n{text}" + ("" if text.endswith("\n") else "\n"))
    return "\n".join(parts)


def path_inside(file: SourceFile) -> str:
    """The path of a file inside its repository."""
    assert file.root is not None
    parts = file.path.relative_to(file.root).parts
    return "/".join(parts[1:] if len(parts) > 1 else parts)


def _directory_then_name(file: SourceFile) -> tuple[tuple[str, ...], str]:
    return file.path.parent.parts, file.path.name
