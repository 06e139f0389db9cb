"""Sources whose tokens say where they come from, so that a token out of place shows.

A token is source * 10^8 + document * 10^4 + position; separators are 10^9 and above.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from longfocus.data.source_spec import SourceSpec
from longfocus.data.streamed import StreamedSource
from tests.small_tokenizers import tokenizer


def marks(source: int, document: int, length: int) -> np.ndarray:
    return source * 10**8 + document * 10**4 + np.arange(length, dtype=np.int64)


class Marked:
    """A finite source with documents of these lengths."""

    def __init__(self, number: int, lengths: Sequence[int], name: str = "") -> None:
        self.number, self.name = number, name or f"source {number}"
        self.lengths = np.asarray(lengths)
        self.documents = len(lengths)

    def document(self, index: int) -> np.ndarray:
        return marks(self.number, index, int(self.lengths[index]))

    def document_id(self, index: int) -> str:
        return f"{self.number}/{index}"


class Endless:
    """A generated source whose lengths repeat."""

    documents = None

    def __init__(self, number: int, lengths: Sequence[int]) -> None:
        self.number, self.name, self.lengths_in_turn = number, f"endless {number}", lengths

    def document(self, index: int) -> np.ndarray:
        return marks(self.number, index, self.lengths_in_turn[index % len(self.lengths_in_turn)])


def streamed(path: Path, letters: Sequence[int], name: str = "streamed") -> StreamedSource:
    """A streamed source: document n has so many letters, each a token (0 letters: passed over)."""
    if not path.exists():
        lines = (json.dumps({"id": f"s{n}", "text": chr(97 + n % 26) * count}) for n, count in enumerate(letters))
        path.write_text("\n".join(lines) + "\n")
    return StreamedSource(SourceSpec(name, "jsonl", (str(path),)), tokenizer("byte_level"))
