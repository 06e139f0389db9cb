"""Memory: remembered texts as keys and values, with what is needed to say where each token came from.

The same object whether it lives in RAM or in a folder:

    memory = longfocus.Memory(model, tokenizer)          # in RAM
    memory = longfocus.Memory.create(folder, model, tokenizer)
    memory = longfocus.Memory.open(folder)               # read-only, memory-mapped
    longfocus.Reader(model, tokenizer, memory).read(source)
    model.generate(ids, memory=memory)

A model only reads a memory while it answers; nothing of a question or an answer is written to it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from longfocus.errors import MemoryFormatError, MemoryMismatchError, MemoryWriteError
from longfocus.memory.contract import KVStore
from longfocus.memory.documents import Document, Place
from longfocus.memory.fingerprint import tokenizer_fingerprint
from longfocus.memory.geometry import MemoryGeometry
from longfocus.memory.inram import RamBackend
from longfocus.memory.ondisk import MANIFEST, UNFINISHED, DiskBackend, foreign_entries, is_memory

if TYPE_CHECKING:
    from longfocus.model.focused import FocusedModel

_COPY_TOKENS = 4096
_COPY_BYTES = 1 << 22


class MemoryBackend(Protocol):
    """Where a memory's parts lie. What `append_*` and `store.append` were given counts from `commit` on."""

    geometry: MemoryGeometry
    store: Any
    tokens: int
    documents: list[Document]
    label: str
    writable: bool

    @property
    def text_bytes(self) -> int: ...
    def append_table(self, rows: np.ndarray) -> None: ...
    def append_text(self, data: bytes) -> None: ...
    def commit(self, documents: Sequence[Document]) -> None: ...
    def rollback(self) -> None: ...
    def read_table(self, start: int, stop: int) -> np.ndarray: ...
    def read_text(self, start: int, stop: int) -> bytes: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


class Memory:
    """Remembered texts."""

    def __init__(self, model: FocusedModel, tokenizer: Any = None) -> None:
        """An empty memory in RAM for an attached model.

        Args:
            model: attached; the memory can only be read by the same model with the same options.
            tokenizer: the one that will cut the texts; None if only token ids will be given.
        """
        self._backend: MemoryBackend = RamBackend(_geometry(model, tokenizer))

    @classmethod
    def _over(cls, backend: MemoryBackend) -> Memory:
        memory = cls.__new__(cls)
        memory._backend = backend
        return memory

    @classmethod
    def create(
        cls, folder: str | Path, model: FocusedModel, tokenizer: Any = None, *, model_source: str | None = None
    ) -> Memory:
        """An empty memory in a folder, open for writing.

        Args:
            folder: does not exist yet, or is empty.
            model_source: where the model can be loaded from again; kept for the command line.

        Raises:
            MemoryWriteError: the folder holds other files or cannot be written.
        """
        geometry = _geometry(model, tokenizer)
        options = model.focus.config.to_dict()
        backend = DiskBackend.create(Path(folder), geometry, focus_options=options, model_source=model_source)
        return cls._over(backend)

    @classmethod
    def open(
        cls, folder: str | Path, *, model: FocusedModel | None = None, tokenizer: Any = None, writable: bool = False
    ) -> Memory:
        """Open a saved memory; records are mapped, not loaded.

        Args:
            model: if given, checked at once to be the one that made the memory.
            writable: to add to it; one process at a time.

        Raises:
            MemoryFormatError: not a memory, or a file is missing, truncated, corrupted, foreign or newer.
            MemoryMismatchError: made by another model, tokenizer, layers, window or dtype.
            MemoryLockedError: `writable`, and another process is writing.
        """
        folder = Path(folder)
        if not is_memory(folder):
            raise MemoryFormatError(
                f"{folder} holds no memory (there is no memory.json); make one with longfocus remember."
            )
        memory = cls._over(DiskBackend(folder, writable=writable))
        if model is not None:
            try:
                memory.check(model, tokenizer)
            except BaseException:
                memory.close()
                raise
        return memory

    def save(self, folder: str | Path, *, model: FocusedModel | None = None, model_source: str | None = None) -> None:
        """Copy the memory into a new folder.

        Args:
            model: if given, its options are stored so that the command line can attach it again.

        Raises:
            MemoryWriteError: the folder holds other files, or cannot be written.
        """
        options = model.focus.config.to_dict() if model is not None else getattr(self._backend, "focus_options", {})
        source = model_source or getattr(self._backend, "model_source", None)
        target = Path(folder)
        unfinished = target / UNFINISHED
        made = not os.path.lexists(target)
        try:
            target.mkdir(parents=True, exist_ok=True)
            strangers = foreign_entries(target)
            if is_memory(target):
                raise MemoryWriteError(
                    f"{target} holds a memory already; open it with writable=True and extend it, or choose a new folder."
                )
            if strangers:
                raise MemoryWriteError(
                    f"{target} is not an empty folder (it holds {strangers[0]!r}); choose a new one."
                )
            shutil.rmtree(unfinished, ignore_errors=True)
            backend = DiskBackend.create(unfinished, self.geometry, focus_options=options, model_source=source)
            with Memory._over(backend) as copy:
                backend.durable = False
                copy.extend(self)
                backend.sync()
            names = sorted((entry.name for entry in unfinished.iterdir()), key=lambda name: name == MANIFEST)
            for name in names:  # the manifest last: with it the memory is there, whole
                os.replace(unfinished / name, target / name)
        except OSError as error:
            raise MemoryWriteError(f"{target} could not be written ({error.strerror or error}).") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            if made and not is_memory(target):
                shutil.rmtree(target, ignore_errors=True)

    # -- what is inside ----------------------------------------------------------------------------------

    @property
    def geometry(self) -> MemoryGeometry:
        """What made it."""
        return self._backend.geometry

    @property
    def store(self) -> KVStore:
        """The records; those beyond `tokens` are not committed."""
        store: KVStore = self._backend.store
        return store

    @property
    def tokens(self) -> int:
        """Committed tokens."""
        return self._backend.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.tokens * self.geometry.bytes_per_token

    @property
    def documents(self) -> tuple[Document, ...]:
        """In the order in which they were read."""
        return tuple(self._backend.documents)

    @property
    def label(self) -> str:
        """For messages."""
        return self._backend.label

    @property
    def writable(self) -> bool:
        """Whether it may be added to."""
        return self._backend.writable

    @property
    def focus_options(self) -> dict[str, Any]:
        """Options of the model that made it (saved memories), for `FocusConfig.from_dict`."""
        return dict(getattr(self._backend, "focus_options", {}))

    @property
    def model_source(self) -> str | None:
        """Path or id that the model was loaded from (saved memories)."""
        return getattr(self._backend, "model_source", None)

    def __len__(self) -> int:
        return self.tokens

    def __repr__(self) -> str:
        return f"<Memory of {len(self.documents)} documents, {self.tokens} tokens, {self.nbytes} bytes>"

    def token_ids(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """uint32 ids of tokens start … stop."""
        return self._backend.read_table(start, self.tokens if stop is None else min(stop, self.tokens))["id"]

    def document_of(self, token: int) -> Document:
        """The document that a token belongs to."""
        starts = [document.start for document in self._backend.documents]
        index = int(np.searchsorted(starts, token, side="right")) - 1
        while self._backend.documents[index].tokens == 0:
            index -= 1
        return self._backend.documents[index]

    def text_of(self, document: Document) -> str:
        """A document's whole text."""
        data = self._backend.read_text(document.text_start, document.text_start + document.text_bytes)
        return data.decode("utf-8")

    def span(self, document: Document, start: int, stop: int) -> tuple[int, int]:
        """Characters of the document that tokens start … stop (numbers in the memory) cover."""
        rows = self._backend.read_table(start, min(stop + 1, document.stop))
        first = int(rows["char"][0])
        last = int(rows["char"][stop - start]) if len(rows) > stop - start else document.chars
        return first, last

    def place(self, document: Document, text: str, char: int) -> Place:
        """Line or page of a character of the document's text."""
        if document.pages is not None:
            page = int(np.searchsorted(document.pages, char, side="right"))
            return Place(document.name, None, max(1, page))
        if document.kind == "ids":
            return Place(document.name, None, None)
        return Place(document.name, text.count("\n", 0, char) + 1, None)

    # -- adding ------------------------------------------------------------------------------------------

    def begin_document(self, name: str, **fields: Any) -> Document:
        """A new, empty document at the end; it exists from its first commit on."""
        return Document(
            id=len(self._backend.documents),
            name=name,
            start=self.tokens,
            tokens=0,
            text_start=self._backend.text_bytes,
            text_bytes=0,
            chars=0,
            **fields,
        )

    def commit_window(self, document: Document, rows: np.ndarray, text: bytes, chars: int, **changes: Any) -> Document:
        """Commit a window whose records the store has just been given.

        Args:
            document: the one being read (the last).
            rows: TOKEN_DTYPE (n,), one for each record.
            text: the document's text up to the window's end that was not committed yet.
            chars: characters in `text`.
            changes: other fields of the document to set.

        Returns:
            The document as it is now.
        """
        backend = self._backend
        if len(rows):
            backend.append_table(rows)
        if text:
            backend.append_text(text)
        document = dataclasses.replace(
            document,
            tokens=document.tokens + len(rows),
            text_bytes=document.text_bytes + len(text),
            chars=document.chars + chars,
            **changes,
        )
        assert backend.store.tokens == document.stop, "a row for every record"
        backend.commit([document])
        return document

    def check(self, model: FocusedModel, tokenizer: Any = None) -> None:
        """See that this model (and tokenizer) made the memory.

        Raises:
            MemoryMismatchError: names what differs.
        """
        self.geometry.check(_geometry(model, tokenizer), self.label)

    def rollback(self) -> None:
        """Forget records that were appended but not committed, after an interruption."""
        self._backend.rollback()

    def extend(self, other: Memory) -> None:
        """Append all documents of another memory of the same model and options.

        Raises:
            MemoryMismatchError: the other memory was made differently.
            MemoryWriteError: this memory was opened for reading, or the disk refused.
        """
        other.geometry.check(self.geometry, other.label)
        if not self.writable:
            raise MemoryWriteError(f"{self.label} is open for reading only; open it with writable=True to extend it.")
        if self.geometry.memory_positions == "absolute" and self.tokens and other.tokens:
            raise MemoryMismatchError(
                f"{other.label} cannot be joined to another: with memory_positions 'absolute' its keys carry their place "
                "in it. Read the texts into one memory instead."
            )
        backend, theirs = self._backend, other._backend
        for source in other.documents:
            kept = ("path", "kind", "pages", "source_bytes", "source_mtime_ns", "complete")
            document = self.begin_document(source.name, **{name: getattr(source, name) for name in kept})
            try:
                for start in range(source.start, source.stop, _COPY_TOKENS):
                    stop = min(start + _COPY_TOKENS, source.stop)
                    backend.store.append(_records(other, start, stop))
                    backend.append_table(theirs.read_table(start, stop))
                for at in range(0, source.text_bytes, _COPY_BYTES):
                    begin = source.text_start + at
                    end = source.text_start + min(at + _COPY_BYTES, source.text_bytes)
                    backend.append_text(theirs.read_text(begin, end))
                sizes: dict[str, Any] = {
                    "tokens": source.tokens,
                    "text_bytes": source.text_bytes,
                    "chars": source.chars,
                }
                backend.commit([dataclasses.replace(document, **sizes)])
            except BaseException:
                backend.rollback()
                raise

    @staticmethod
    def merge(memories: Iterable[Memory], model: FocusedModel, tokenizer: Any = None) -> Memory:
        """A new memory in RAM with the documents of all.

        Documents are encoded independently of each other, so the result is what reading them all would give.
        """
        merged = Memory(model, tokenizer)
        for memory in memories:
            merged.extend(memory)
        return merged

    def clear(self) -> None:
        """Forget all documents."""
        if not self.writable:
            raise MemoryWriteError(f"{self.label} is open for reading only; open it with writable=True to clear it.")
        self._backend.clear()

    def verify(self) -> None:
        """Compare every committed byte on disk with its checksum; nothing to do in RAM.

        Raises:
            MemoryFormatError: names the corrupted file.
        """
        if isinstance(self._backend, DiskBackend):
            self._backend.verify()

    def close(self) -> None:
        """Release files and the writer's lock."""
        self._backend.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _geometry(model: FocusedModel, tokenizer: Any) -> MemoryGeometry:
    geometry = model.focus.geometry
    return (
        dataclasses.replace(geometry, tokenizer=tokenizer_fingerprint(tokenizer)) if tokenizer is not None else geometry
    )


def _records(memory: Memory, start: int, stop: int) -> dict[int, torch.Tensor]:
    """Records (1, n, 2, Hkv, head_dim) of all layers, copied out of the chunks."""
    records = {}
    for layer in memory.geometry.layers:
        pieces = [
            torch.stack((chunk.keys, chunk.values), 2).permute(0, 3, 2, 1, 4)
            for chunk in memory.store.chunks(layer, start, stop)
        ]
        records[layer] = torch.cat(pieces, 1)
    return records
