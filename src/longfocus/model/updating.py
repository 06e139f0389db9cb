"""What of a memory no longer agrees with the files that it was read from.

A file is unchanged while its size and time of change are; else its text decides, so that a file that was only touched is
not encoded again. Files are known by their absolute path, as they were named.

    update = compare(memory, find_sources(paths).sources)
    settle(memory, update)                              # no model needed
    for source in update.to_read:
        reader.read(source, replace=True)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longfocus.data.documents import Source
from longfocus.memory.documents import Document
from longfocus.memory.memory import Memory


@dataclass
class Update:
    """What has to be done so that a memory holds the files as they are."""

    new: list[Source] = field(default_factory=list)
    """The memory holds nothing of them, or they come without a path (standard input)."""
    changed: list[Source] = field(default_factory=list)
    """Their text differs from what is remembered."""
    unfinished: list[Source] = field(default_factory=list)
    """Only a beginning of them was read."""
    unchanged: list[Document] = field(default_factory=list)
    touched: list[tuple[Document, dict[str, Any]]] = field(default_factory=list)
    """Of another size or time, with the same text: only these new fields are to be noted."""
    outdated: list[Document] = field(default_factory=list)
    """Earlier versions, copies and beginnings beside a whole document of the same, unchanged file."""

    @property
    def to_read(self) -> list[Source]:
        """Sources for `Reader.read` with `replace`."""
        return [*self.new, *self.changed, *self.unfinished]


def compare(memory: Memory, sources: Sequence[Source]) -> Update:
    """Compare sources with what a memory holds of them.

    Raises:
        InputError: a source cannot be read as text.
    """
    update = Update()
    by_path: dict[str, list[Document]] = {}
    for document in memory.documents:
        if document.path is not None:
            by_path.setdefault(document.path, []).append(document)
    for source in sources:
        fields = source.fields
        documents = by_path.get(fields.get("path", ""), [])
        whole = [document for document in documents if document.complete]
        if not whole:
            (update.unfinished if documents else update.new).append(source)
            continue
        now = {name: fields[name] for name in ("source_bytes", "source_mtime_ns")}
        same = [document for document in whole if {name: getattr(document, name) for name in now} == now]
        if not same:
            same = [document for document in whole[-1:] if has_text(memory, document, source)]
            update.touched += [(document, now) for document in same]
        if not same:
            update.changed.append(source)
            continue
        update.unchanged.append(same[-1])
        update.outdated += [document for document in documents if document.id != same[-1].id]
    return update


def has_text(memory: Memory, document: Document, source: Source) -> bool:
    """Whether a source's text is a document's, compared block by block."""
    at = 0
    for _, block in source.blocks():
        data = block.encode("utf-8")
        if memory.text_bytes_of(document, at, at + len(data)) != data:
            return False
        at += len(data)
    return at == document.text_bytes


def settle(memory: Memory, update: Update) -> None:
    """Do what needs no model: note new times and sizes, remove outdated documents."""
    for document, fields in update.touched:
        memory.note(document, **fields)
    memory.remove(*update.outdated)


def vanished(memory: Memory, within: Sequence[str | Path] | None = None) -> list[Document]:
    """Documents whose files are gone.

    Args:
        within: only files of these names or in these folders; None: all.
    """
    roots = None if within is None else [str(Path(path).absolute()) for path in within]
    gone = []
    for document in memory.documents:
        path = document.path
        if path is None:
            continue
        inside = roots is None or any(path == root or path.startswith(root.rstrip(os.sep) + os.sep) for root in roots)
        if inside and _is_gone(path):
            gone.append(document)
    return gone


def _is_gone(path: str) -> bool:
    """A file that may not be looked at is not gone."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
