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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from longfocus.errors import (
    DocumentNotFoundError,
    MemoryFormatError,
    MemoryMismatchError,
    MemoryStoreError,
    MemoryWriteError,
)
from longfocus.files import closed_on_error
from longfocus.memory.approximate import IndexView, MemoryIndex, Ranges
from longfocus.memory.backend import MemoryBackend
from longfocus.memory.context import Part
from longfocus.memory.contract import KVStore
from longfocus.memory.documents import TOKEN_DTYPE, Document, Place, choose, ranges_of
from longfocus.memory.fingerprint import tokenizer_fingerprint
from longfocus.memory.folder import is_memory
from longfocus.memory.geometry import MemoryGeometry
from longfocus.memory.inram import RamBackend
from longfocus.memory.ondisk import DiskBackend
from longfocus.memory.quantiser import has_faiss, require_faiss

if TYPE_CHECKING:
    from longfocus.model.focused import FocusedModel

_COPY_TOKENS = 4096
_COPY_BYTES = 1 << 22
_INDEX_STEP_TOKENS = 1 << 20
"""Tokens that are indexed before they are saved."""


class Memory:
    """Remembered texts.

    Tokens are numbered in the order in which they were read. A document that is removed keeps its numbers until the memory is
    compacted; nobody sees it meanwhile, and an answer is what it would be without it: the same bits where the tokens that are
    left fall into the same chunks (nothing before them was removed, or whole multiples of CHUNK_TOKENS, or they are one range
    inside a chunk), else to float tolerance. After compaction it is the same bits always.
    """

    _chosen: tuple[Document, ...] | None = None  # of a view made by `select`
    _chosen_from: Any = None  # the store that the numbers of `_chosen` count in

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
            if (folder / "sharded-memory.json").is_file():
                raise MemoryFormatError(
                    f"{folder} is a sharded memory; open it with ShardedMemory.open, or ask it by itself."
                )
            raise MemoryFormatError(
                f"{folder} holds no memory (there is no memory.json); make one with longfocus remember."
            )
        memory = cls._over(DiskBackend(folder, writable=writable))
        if model is not None:
            with closed_on_error(memory):
                memory.check(model, tokenizer)
        return memory

    def save(self, folder: str | Path, *, model: FocusedModel | None = None, model_source: str | None = None) -> None:
        """Copy the memory, without what was removed, into a new folder.

        Args:
            model: if given, its options are stored so that the command line can attach it again.

        Raises:
            MemoryWriteError: the folder holds other files, or cannot be written.
        """
        options = model.focus.config.to_dict() if model is not None else getattr(self._backend, "focus_options", {})
        source = model_source or getattr(self._backend, "model_source", None)
        with DiskBackend.fill(Path(folder), self.geometry, focus_options=options, model_source=source) as backend:
            copy = Memory._over(backend)
            copy.extend(self)
            if self.has_index and has_faiss():
                copy.update_index()

    # -- what is inside ----------------------------------------------------------------------------------

    @property
    def geometry(self) -> MemoryGeometry:
        """What made it."""
        return self._backend.geometry

    @property
    def store(self) -> KVStore:
        """The records, removed ones included; those beyond `extent` are not committed."""
        store: KVStore = self._backend.store
        return store

    @property
    def tokens(self) -> int:
        """Committed tokens of the documents."""
        return sum(document.tokens for document in self.documents)

    @property
    def extent(self) -> int:
        """One past the number of the last committed token; more than `tokens` where documents were removed."""
        return self._backend.tokens

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The numbers of the documents' tokens, as (first, one past the last), in order."""
        return ranges_of(self.documents)

    @property
    def generation(self) -> int:
        """Of the files: tokens have other numbers in another generation, after `compact` and `clear`. 0 in RAM."""
        return int(getattr(self._backend, "generation", 0))

    def visible(self) -> Part:
        """What a cache reads: the documents' records, as they are now."""
        return Part(self.store, ranges=self.ranges)

    def is_current(self, visible: Part) -> bool:
        """Whether the numbers of `visible` still mean this memory's tokens."""
        return visible.store is self.store

    @property
    def nbytes(self) -> int:
        """Bytes of the documents' keys and values."""
        return self.tokens * self.geometry.bytes_per_token

    @property
    def documents(self) -> tuple[Document, ...]:
        """In the order in which they were read, without removed ones.

        Raises:
            MemoryStoreError: chosen by `select` from a memory that was compacted or cleared since.
        """
        if self._chosen is None:
            return tuple(document for document in self._backend.documents if not document.removed)
        if self._backend.store is not self._chosen_from:
            raise MemoryStoreError(
                f"{self.label} was compacted or cleared after documents were selected; select again."
            )
        return tuple(document for document in self._chosen if not self._backend.documents[document.id].removed)

    @property
    def removed(self) -> tuple[Document, ...]:
        """Removed documents that still take space."""
        return tuple(document for document in self._backend.documents if document.removed)

    @property
    def removed_bytes(self) -> int:
        """Bytes of their records, token rows and texts, which `compact` gives back."""
        per_token = self.geometry.bytes_per_token + TOKEN_DTYPE.itemsize
        return sum(document.tokens * per_token + document.text_bytes for document in self.removed)

    @property
    def label(self) -> str:
        """For messages."""
        return self._backend.label

    @property
    def writable(self) -> bool:
        """Whether it may be added to and removed from."""
        return self._backend.writable and self._chosen is None

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
        """uint32 ids of the tokens numbered start … stop, removed ones included."""
        return self._backend.read_table(start, self.extent if stop is None else min(stop, self.extent))["id"]

    def document_of(self, token: int) -> Document:
        """The document that a token, given by its number, belongs to."""
        starts = [document.start for document in self._backend.documents]
        index = int(np.searchsorted(starts, token, side="right")) - 1
        while self._backend.documents[index].tokens == 0:
            index -= 1
        return self._backend.documents[index]

    def text_of(self, document: Document) -> str:
        """A document's whole text."""
        return self.text_bytes_of(document, 0, document.text_bytes).decode("utf-8")

    def text_bytes_of(self, document: Document, start: int, stop: int) -> bytes:
        """Bytes start … stop of a document's text in UTF-8, as far as there are any."""
        begin = document.text_start
        return self._backend.read_text(begin + start, begin + min(stop, document.text_bytes))

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

    # -- choosing and removing ---------------------------------------------------------------------------

    def find(self, *patterns: str) -> tuple[Document, ...]:
        """The documents that any of the patterns means, in order.

        Args:
            patterns: a name or a path, a glob over them (`*` also matches `/`), or a folder; the first of these that finds any.

        Raises:
            DocumentNotFoundError: a pattern means none.
        """
        documents = self.documents
        named = [(document.name, document.path) for document in documents]
        return tuple(documents[index] for index in choose(patterns, named, self.label))

    def _those(self, chosen: Sequence[Document | str]) -> tuple[Document, ...]:
        """Documents of this memory, given themselves or by patterns; as they are now, in order."""
        live = {document.id: document for document in self.documents}
        ids: set[int] = set()
        for given in chosen:
            if isinstance(given, str):
                ids.update(document.id for document in self.find(given))
                continue
            found = live.get(given.id)
            if found is None or (found.name, found.start) != (given.name, given.start):
                raise DocumentNotFoundError(
                    f"{self.label} does not hold {given.name!r} (document {given.id}) any more."
                )
            ids.add(given.id)
        return tuple(live[number] for number in sorted(ids))

    def select(self, *documents: Document | str) -> Memory:
        """The same memory with only some of its documents, to be asked or copied; nothing is copied, and closing it closes
        nothing. Documents that are removed later leave it too.

        Args:
            documents: of this memory, or patterns as for `find`.

        Raises:
            DocumentNotFoundError: a document is not, or no longer, in the memory; a pattern means none.
            MemoryMismatchError: the memory was made with memory_positions `absolute`.
        """
        self._require_free_places("asked in part")
        view = Memory._over(self._backend)
        view._chosen, view._chosen_from = self._those(documents), self._backend.store
        return view

    def remove(self, *documents: Document | str) -> tuple[Document, ...]:
        """Remove documents, all or none of them; durable at once. They take space until `compact`.

        Args:
            documents: of this memory, or patterns as for `find`.

        Returns:
            What was removed, in order.

        Raises:
            DocumentNotFoundError: a document is not, or no longer, in the memory; a pattern means none.
            MemoryMismatchError: the memory was made with memory_positions `absolute`.
            MemoryWriteError: this memory was opened for reading, or the disk refused; nothing was removed.
        """
        self._require_writable("remove from it")
        self._require_free_places("reduced")
        chosen = self._those(documents)
        if chosen:
            self._backend.commit([dataclasses.replace(document, removed=True) for document in chosen])
        return chosen

    def compact(self) -> int:
        """Write the memory anew without what was removed: whole, or not at all. Documents get new ids and token numbers.

        Needs room for the live documents beside the old ones meanwhile. Other objects that have the memory open go on with what
        they opened; caches and selections made from this object must be made again.

        Returns:
            Bytes that were given back; 0 where nothing was removed, and then nothing is done.

        Raises:
            MemoryWriteError: this memory was opened for reading, or the disk refused; the memory is as it was.
        """
        self._require_writable("compact it")
        if not self.removed:
            return 0
        backend = self._backend
        before = backend.stored_bytes
        fresh = backend.successor()
        try:
            Memory._over(fresh).extend(self)
        except BaseException:
            backend.discard(fresh)
            raise
        indexed = self.has_index and has_faiss()
        backend.take_over(fresh)
        if indexed:
            with suppress(MemoryWriteError):  # the memory is compacted; what it lacks is a cache
                self.update_index()
        return before - backend.stored_bytes

    def _require_writable(self, purpose: str) -> None:
        if not self.writable:
            how = "was chosen by select" if self._chosen is not None else "is open for reading only"
            what = "use the whole memory" if self._chosen is not None else "open it with writable=True"
            raise MemoryWriteError(f"{self.label} {how}; {what} to {purpose}.")

    def _require_free_places(self, what: str) -> None:
        if self.geometry.memory_positions == "absolute":
            raise MemoryMismatchError(
                f"{self.label} cannot be {what}: with memory_positions 'absolute' its keys carry their place in it. "
                "Read the texts into another memory instead."
            )

    # -- approximate search ------------------------------------------------------------------------------

    def search(self, ranges: Ranges | None = None) -> IndexView:
        """What approximate retrieval searches these tokens with: the index, brought up to date in RAM.

        Args:
            ranges: numbers of tokens as `ranges` has them; None: all documents.

        Raises:
            ConfigError: faiss is missing.
        """
        index = self._index()
        index.update(ranges_of(self._live), self.extent)
        return index.view(self.ranges if ranges is None else ranges)

    def update_index(self) -> int:
        """Index what is not indexed yet and save it beside the memory (in RAM: keep it). Nothing is done to a memory with fewer
        than `approximate.TRAIN_TOKENS` tokens.

        Returns:
            How many tokens were encoded.

        Raises:
            ConfigError: faiss is missing.
            MemoryWriteError: this memory was opened for reading, or the disk refused; the memory is intact.
        """
        self._require_writable("index it")
        index, done = self._index(), 0
        while True:
            encoded = index.update(ranges_of(self._live), self.extent, limit=_INDEX_STEP_TOKENS)
            self._backend.save_index(index)
            done += encoded
            if encoded < _INDEX_STEP_TOKENS:
                return done

    @property
    def is_saved(self) -> bool:
        """Whether it lies in a folder."""
        return isinstance(self._backend, DiskBackend)

    @property
    def has_index(self) -> bool:
        """Whether an index is saved beside the memory, or in use."""
        return self._backend.has_saved_index or (self._backend.index is not None and self._backend.index.covered > 0)

    @property
    def indexed_tokens(self) -> int:
        """Tokens, by number, that the index covers now; for memories on disk a saved index is opened.

        Raises:
            ConfigError: faiss is missing.
        """
        return self._index().covered

    @property
    def index_problem(self) -> str | None:
        """Why a saved index is not used but made anew, for people; None: it is, or there is none."""
        return self._backend.index_problem

    @property
    def _live(self) -> list[Document]:
        return [document for document in self._backend.documents if not document.removed]

    def _index(self) -> MemoryIndex:
        require_faiss()
        backend = self._backend
        if backend.index is None or backend.index.store is not backend.store:
            backend.index = backend.load_index()
        return backend.index

    # -- adding ------------------------------------------------------------------------------------------

    def begin_document(self, name: str, **fields: Any) -> Document:
        """A new, empty document at the end; it exists from its first commit on."""
        if self._chosen is not None:
            self._require_writable("add to it")
        return Document(
            id=len(self._backend.documents),
            name=name,
            start=self.extent,
            tokens=0,
            text_start=self._backend.text_bytes,
            text_bytes=0,
            chars=0,
            **fields,
        )

    def can_continue(self, document: Document) -> bool:
        """Whether nothing lies behind a document, so that more of it may be added."""
        documents = self._backend.documents
        return (
            self._chosen is None and bool(documents) and documents[-1].id == document.id and not documents[-1].removed
        )

    def note(self, document: Document, **changes: Any) -> Document:
        """Commit other fields of a document of this memory, such as the time of its file."""
        self._require_writable("change it")
        changed = dataclasses.replace(self._backend.documents[document.id], **changes)
        self._backend.commit([changed])
        return changed

    def commit_window(
        self,
        document: Document,
        rows: np.ndarray,
        text: bytes,
        chars: int,
        *,
        removing: Sequence[Document] = (),
        **changes: Any,
    ) -> Document:
        """Commit a window whose records the store has just been given.

        Args:
            document: the one being read (the last).
            rows: TOKEN_DTYPE (n,), one for each record.
            text: the document's text up to the window's end that was not committed yet.
            chars: characters in `text`.
            removing: documents that are removed by the same commit, so that one takes the place of others.
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
        backend.commit([document, *(dataclasses.replace(other, removed=True) for other in removing)])
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
        """Append all documents (not the removed ones) of another memory of the same model and options.

        Raises:
            MemoryMismatchError: the other memory was made differently.
            MemoryWriteError: this memory was opened for reading, or the disk refused.
        """
        other.geometry.check(self.geometry, other.label)
        self._require_writable("extend it")
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
        self._require_writable("clear it")
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
        if self._chosen is None:
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
