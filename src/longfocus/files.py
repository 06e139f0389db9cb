"""Files that are never seen, or left by a kill, half-written; and what holds them open, closed in time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


def write_whole(path: Path, data: str | bytes, *, errors: str = "strict") -> None:
    """Write a file, whole or not at all: a kill leaves it as it was.

    Args:
        data: bytes, or text, which is written in UTF-8 with Unix line ends.
        errors: what becomes of characters that UTF-8 cannot hold, as in `open`.

    Raises:
        OSError: the disk refused it.
    """
    content = data.encode("utf-8", errors) if isinstance(data, str) else data
    unfinished = path.with_name(path.name + ".new")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, durable.

    Raises:
        OSError: the disk refused it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Closeable(Protocol):
    """What holds files open."""

    def close(self) -> None: ...


@contextmanager
def closed_on_error(opened: Closeable) -> Iterator[None]:
    """Close what was opened if what is done inside fails or is interrupted."""
    try:
        yield
    except BaseException:
        opened.close()
        raise
