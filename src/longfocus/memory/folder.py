"""The folder of a saved memory: what its files are called, and who may write to them."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import filelock

from longfocus.errors import MemoryFormatError, MemoryLockedError, MemoryWriteError

MANIFEST, JOURNAL, LOCK = "memory.json", "journal.jsonl", "lock"
UNFINISHED = "unfinished"
"""Sub-folder that `save` and compaction fill before they move the files up, what makes them count last."""
DATA_FILE = re.compile(r"(kv-\d{3,}|tokens|text|index-\d{3,})\.(\d+)\.bin|(index)\.(\d+)\.json")
UNFINISHED_INDEX = re.compile(r"index.*\.new")


def is_memory(folder: Path) -> bool:
    """Whether the folder looks like a saved memory."""
    try:
        return (folder / MANIFEST).is_file()
    except (OSError, ValueError):  # not a possible path
        return False


def foreign_entries(folder: Path) -> list[str]:
    """Names in a folder that keep it from becoming a memory; an unfinished `create` leaves none."""
    ours = {LOCK, JOURNAL, JOURNAL + ".new", MANIFEST, MANIFEST + ".new", UNFINISHED}
    names = [entry.name for entry in folder.iterdir()]
    if MANIFEST not in names:  # data files without a manifest: a `save` that was killed while it moved them
        names = [name for name in names if not DATA_FILE.fullmatch(name) and not UNFINISHED_INDEX.fullmatch(name)]
    return [name for name in names if name not in ours]


def take_lock(folder: Path) -> filelock.BaseFileLock:
    """The writer's lock of a memory's folder, held until it is released.

    Raises:
        MemoryLockedError: somebody else holds it.
        MemoryWriteError: the disk refused.
    """
    lock = filelock.FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise MemoryLockedError(
            f"The memory in {folder} is being written to, by another process or an object of this one that was not closed; wait until it has finished. Asking it works meanwhile."
        ) from error
    except OSError as error:
        raise write_error(folder, error) from error
    return lock


def read_file(path: Path) -> bytes:
    """
    Raises:
        MemoryFormatError: it is missing or unreadable.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise MemoryFormatError(f"{path} is missing or unreadable ({error.strerror}).") from error


def write_error(path: Path, error: OSError) -> MemoryWriteError:
    """What the disk refused, as users meet it."""
    if error.errno == errno.ENOSPC:
        return MemoryWriteError(f"The disk is full: {path} could not be written. What was committed before is intact.")
    return MemoryWriteError(
        f"{path} could not be written ({error.strerror or error}). What was committed before is intact."
    )
