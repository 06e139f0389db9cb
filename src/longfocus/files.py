"""Files that are never seen, or left by a kill, half-written."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a text file, UTF-8 with Unix line ends, whole or not at all: a kill leaves the file as it was.

    Args:
        errors: what becomes of characters that UTF-8 cannot hold, as in `open`.

    Raises:
        OSError: the disk refused it.
    """
    unfinished = path.with_name(path.name + ".new")
    with unfinished.open("w", encoding="utf-8", errors=errors, newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
