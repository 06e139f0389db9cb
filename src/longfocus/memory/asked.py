"""What a model, its answers and their sources need of a memory, wherever its records lie.

`Memory` keeps them in this process, mapped from files or in RAM; `distributed.ShardedMemory` leaves them with other
processes and asks those. Nothing that answers knows which one it has.
"""

from __future__ import annotations

from typing import Any, Protocol

from longfocus.memory.documents import Document, Place
from longfocus.memory.geometry import MemoryGeometry


class AskedMemory(Protocol):
    """A memory as it is asked. Tokens have the numbers 0 … extent - 1."""

    @property
    def geometry(self) -> MemoryGeometry: ...
    @property
    def documents(self) -> tuple[Document, ...]:
        """In order; `start` counts in this memory."""
        ...

    @property
    def tokens(self) -> int: ...
    @property
    def extent(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes of the documents' keys and values."""
        ...

    @property
    def label(self) -> str:
        """For messages."""
        ...

    def check(self, model: Any, tokenizer: Any = None) -> None:
        """Raise MemoryMismatchError unless this model (and tokenizer) made the memory."""
        ...

    def visible(self) -> Any:
        """What a cache reads, as it is now: a `context.Visible`."""
        ...

    def is_current(self, visible: Any) -> bool:
        """Whether the numbers of `visible` still mean this memory's tokens."""
        ...

    def text_of(self, document: Document) -> str: ...
    def span(self, document: Document, start: int, stop: int) -> tuple[int, int]: ...
    def place(self, document: Document, text: str, char: int) -> Place: ...
    def close(self) -> None: ...
