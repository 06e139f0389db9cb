"""Documents inside a memory, how they are named by patterns, and where a token stands in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from longfocus.errors import DocumentNotFoundError, did_you_mean

TOKEN_DTYPE = np.dtype([("char", "<u8"), ("byte", "<u8"), ("id", "<u4")])
"""One remembered token: where it starts in its document's text, in characters and in UTF-8 bytes, and its id."""


@dataclass(frozen=True)
class Document:
    """A text in a memory; its tokens and its text are consecutive in the memory's files."""

    id: int
    name: str
    """As shown to people: a relative path, a page-less title, `standard input`."""
    start: int
    """Its first token in the memory."""
    tokens: int
    text_start: int
    """Byte at which its text begins in the memory's text."""
    text_bytes: int
    chars: int
    path: str | None = None
    """Absolute path of the file it was read from."""
    kind: str = "text"
    """text, pdf, stdin or ids (token ids without a text)."""
    pages: tuple[int, ...] | None = None
    """Character at which each page begins (pdf)."""
    complete: bool = False
    """False while it is being read, and for good after an interruption."""
    source_bytes: int | None = None
    source_mtime_ns: int | None = None
    removed: bool = False
    """It is no part of the memory any more; its tokens and text take space until the memory is compacted."""

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.start + self.tokens

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        data = dataclasses.asdict(self)
        data["pages"] = list(self.pages) if self.pages is not None else None
        if not self.removed:
            del data["removed"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Document:
        """Inverse of `to_dict`; unknown or missing keys raise TypeError."""
        pages = data["pages"]
        return cls(**{**data, "pages": tuple(pages) if pages is not None else None})


def matching(pattern: str, named: Sequence[tuple[str, str | None]]) -> list[int]:
    """Which documents a pattern means, by the first of these rules that finds any: the document's name or path itself; a
    glob over names and paths, in which `*` also matches `/` (as in git); a folder in which they lie.

    Args:
        pattern: upper and lower case differ.
        named: name and absolute path (or None) of each document.

    Returns:
        Their indices in `named`, in order; none where nothing matches.
    """
    folder = pattern.rstrip("/") + "/"
    rules = (
        lambda text: text == pattern,
        lambda text: fnmatchcase(text, pattern),
        lambda text: text.startswith(folder),
    )
    for rule in rules:
        found = [index for index, texts in enumerate(named) if any(text is not None and rule(text) for text in texts)]
        if found:
            return found
    return []


def choose(patterns: Sequence[str], named: Sequence[tuple[str, str | None]], what: str) -> list[int]:
    """Indices in `named`, in order, of the documents that any of the patterns means; see `matching`.

    Args:
        what: where the documents are, for the message.

    Raises:
        DocumentNotFoundError: a pattern means none; says which names are nearly it.
    """
    chosen: set[int] = set()
    for pattern in patterns:
        found = matching(pattern, named)
        if not found:
            names = [name for name, _ in named]
            ending = [name for name in names if name.endswith(f"/{pattern}")]
            hint = f" Did you mean {ending[0]!r}?" if ending else did_you_mean(pattern, names)
            if not hint:
                hint = f" It holds {_listed(names)}." if names else " It holds no documents."
            raise DocumentNotFoundError(f"{what} has no document {pattern!r}.{hint}")
        chosen.update(found)
    return sorted(chosen)


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def ranges_of(documents: Sequence[Document]) -> tuple[tuple[int, int], ...]:
    """The tokens of documents that are in order, as (first, one past the last); neighbours are joined."""
    ranges: list[tuple[int, int]] = []
    for document in documents:
        if ranges and ranges[-1][1] == document.start:
            ranges[-1] = (ranges[-1][0], document.stop)
        elif document.tokens:
            ranges.append((document.start, document.stop))
    return tuple(ranges)


@dataclass(frozen=True)
class Place:
    """Where a passage stands: a document, and its line or page, both counted from 1."""

    document: str
    line: int | None
    page: int | None

    def __str__(self) -> str:
        if self.page is not None:
            return f"{self.document}, page {self.page}"
        return f"{self.document}:{self.line}" if self.line is not None else self.document
