"""Documents inside a memory, and where a token stands in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

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

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.start + self.tokens

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        data = dataclasses.asdict(self)
        data["pages"] = list(self.pages) if self.pages is not None else None
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Document:
        """Inverse of `to_dict`; unknown or missing keys raise TypeError."""
        pages = data["pages"]
        return cls(**{**data, "pages": tuple(pages) if pages is not None else None})


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
