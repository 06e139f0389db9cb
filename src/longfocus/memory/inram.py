"""A memory's records, token table and text in RAM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longfocus.memory.approximate import MemoryIndex
from longfocus.memory.documents import TOKEN_DTYPE, Document
from longfocus.memory.geometry import MemoryGeometry
from longfocus.memory.ram import RamStore
from longfocus.memory.storage import storage_dtype


class RamBackend:
    """See `backend.MemoryBackend`."""

    label = "This memory"
    writable = True

    def __init__(self, geometry: MemoryGeometry) -> None:
        self.geometry = geometry
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        geometry = self.geometry
        dtype = storage_dtype(geometry.dtype)
        self.store = RamStore(geometry.layers, geometry.kv_heads, geometry.head_dim, dtype)
        self._table: list[np.ndarray] = []
        self._text = bytearray()
        self._committed_text = 0
        self.tokens = 0
        self.documents: list[Document] = []
        self.index: MemoryIndex | None = None

    def load_index(self) -> MemoryIndex:
        return MemoryIndex(self.store, self.geometry)

    def save_index(self, index: MemoryIndex) -> None:
        """It is where the memory is."""

    has_saved_index = False
    index_problem = None

    @property
    def text_bytes(self) -> int:
        return self._committed_text

    def append_table(self, rows: np.ndarray) -> None:
        self._table.append(rows.copy())

    def append_text(self, data: bytes) -> None:
        self._text += data

    def commit(self, documents: Sequence[Document]) -> None:
        for document in documents:
            self.documents[document.id : document.id + 1] = [document]
        self.tokens = self.store.tokens
        self._committed_text = len(self._text)

    def rollback(self) -> None:
        self.store.rewind(self.tokens)
        while self._table and sum(map(len, self._table)) > self.tokens:
            self._table.pop()
        del self._text[self._committed_text :]

    def read_table(self, start: int, stop: int) -> np.ndarray:
        if len(self._table) > 1:
            self._table = [np.concatenate(self._table)]
        return self._table[0][start:stop] if self._table else np.zeros(0, dtype=TOKEN_DTYPE)

    def read_text(self, start: int, stop: int) -> bytes:
        return bytes(self._text[start:stop])

    @property
    def stored_bytes(self) -> int:
        return self.store.nbytes + self.tokens * TOKEN_DTYPE.itemsize + self._committed_text

    def successor(self) -> RamBackend:
        return RamBackend(self.geometry)

    def take_over(self, successor: RamBackend) -> None:
        vars(self).update(vars(successor))

    def discard(self, successor: RamBackend) -> None:
        """Nothing to take away."""

    def close(self) -> None:
        """Nothing to release."""
