"""What keeps a memory's records, token rows, texts and documents: in RAM (`inram.py`) or in a folder (`ondisk.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from longfocus.memory.approximate import MemoryIndex
from longfocus.memory.documents import Document
from longfocus.memory.geometry import MemoryGeometry


class MemoryBackend(Protocol):
    """Where a memory's parts lie. What `append_*` and `store.append` were given counts from `commit` on."""

    label: str
    """For messages."""
    writable: bool
    store: Any
    """The `KVStore`; another one after `clear` and `take_over`."""
    index: MemoryIndex | None
    """Of this store, once it was asked for."""

    @property
    def geometry(self) -> MemoryGeometry: ...
    @property
    def documents(self) -> list[Document]:
        """All, removed ones too; each stands at its id."""
        ...

    @property
    def tokens(self) -> int:
        """Committed ones."""
        ...

    @property
    def text_bytes(self) -> int:
        """Committed bytes of text."""
        ...

    @property
    def stored_bytes(self) -> int:
        """Bytes that it takes, removed and unused ones included."""
        ...

    def append_table(self, rows: np.ndarray) -> None:
        """Token rows (TOKEN_DTYPE) of records that the store was just given."""
        ...

    def append_text(self, data: bytes) -> None:
        """Their text, UTF-8."""
        ...

    def commit(self, documents: Sequence[Document]) -> None:
        """Make what was appended count, with these new or changed documents."""
        ...

    def rollback(self) -> None:
        """Forget what was appended since the last commit."""
        ...

    def read_table(self, start: int, stop: int) -> np.ndarray: ...
    def read_text(self, start: int, stop: int) -> bytes: ...
    def clear(self) -> None:
        """Forget everything."""
        ...

    def successor(self) -> Any:
        """An empty backend like this one, to be filled and given to `take_over` or `discard`."""
        ...

    def take_over(self, successor: Any) -> None:
        """Hold what the successor holds instead; whole, or not at all."""
        ...

    def discard(self, successor: Any) -> None: ...
    def close(self) -> None: ...
    def load_index(self) -> MemoryIndex: ...
    def save_index(self, index: MemoryIndex) -> None: ...
    @property
    def has_saved_index(self) -> bool: ...
    @property
    def index_problem(self) -> str | None:
        """Why a saved index was not used."""
        ...
