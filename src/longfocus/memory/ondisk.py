"""A memory's records, token table and text in files: append-only, with a commit point, memory-mapped.

The format, described for other programs in docs/formats.md, versions 1 and 2. In one folder:

    memory.json        what made it (geometry, options, model): written once, whole or not at all
    journal.jsonl      the commit point: one line per committed window, each with a checksum of itself
    kv-008.1.bin       records of memory layer 8, generation 1: (tokens, 2, Hkv, head_dim), key before value, in a storage dtype
    tokens.1.bin       one row per token: character u64, byte u64, id u32, little-endian, packed
    text.1.bin         the documents' texts in UTF-8, one after another
    lock               held by the one writer
    index….1.…         an index of the keys, which the memory can do without (index_files.py)

A commit writes the data, syncs it, and then appends its journal line. What lies beyond the last whole line
was never committed: it is not read, and the next writer writes over it. `clear` and `take_over` (compaction)
start a new generation of data files with a new journal, moved into place at once, so that readers of the old
one are not disturbed: they hold its files open, and files that are unlinked stay until they are closed.
"""

from __future__ import annotations

import os
import shutil
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from longfocus.errors import MemoryFormatError, MemoryStoreError, MemoryWriteError
from longfocus.files import closed_on_error, sync
from longfocus.memory.approximate import MemoryIndex
from longfocus.memory.disk_store import DiskStore
from longfocus.memory.documents import TOKEN_DTYPE, Document
from longfocus.memory.folder import (
    DATA_FILE,
    JOURNAL,
    MANIFEST,
    UNFINISHED,
    UNFINISHED_INDEX,
    foreign_entries,
    is_memory,
    take_lock,
    write_error,
)
from longfocus.memory.geometry import MemoryGeometry
from longfocus.memory.index_files import IndexFiles
from longfocus.memory.journal import Journal
from longfocus.memory.manifest import VERSION_WITH_REMOVED, Manifest

VERIFY_ON_OPEN_BYTES = 1 << 30
"""Checksums of all data are compared when opening memories up to this size; `verify` does it for any."""


class DiskBackend:
    """See `backend.MemoryBackend`. Readers take a snapshot of what is committed; one writer appends."""

    def __init__(self, folder: Path, *, writable: bool) -> None:
        """Open an existing memory.

        Raises:
            MemoryFormatError: a file is missing, truncated, corrupted, foreign or newer; names it.
            MemoryLockedError: `writable`, and another process is writing.
        """
        self.folder = folder
        self.label = f"The memory in {folder}"
        self.writable = writable
        self._closed = False
        self.durable = True  # sync every commit; `save` syncs once, at its end
        self._files: dict[Path, int] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._files)  # for memories that nobody closes
        self._crc: dict[str, int] = {}  # running checksums of what was written since the last commit, by file kind
        self._pending_rows = self._pending_text = 0  # token rows and bytes of text since the last commit
        self._lock = take_lock(folder) if writable else None
        with closed_on_error(self):
            self._manifest = Manifest.read(folder)
            self._load_snapshot()
            if writable:
                self._sweep()
            if sum(size for _, size in self._expected_sizes()) <= VERIFY_ON_OPEN_BYTES:
                self.verify()

    @classmethod
    def create(
        cls,
        folder: Path,
        geometry: MemoryGeometry,
        *,
        focus_options: Mapping[str, Any],
        model_source: str | None,
        generation: int = 1,
    ) -> DiskBackend:
        """Make an empty memory in a folder that does not exist or is empty, and open it for writing.

        Raises:
            MemoryWriteError: the folder holds other files, or cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            strangers = foreign_entries(folder)
        except OSError as error:
            raise write_error(folder, error) from error
        if strangers or is_memory(folder):
            strangers = strangers or [MANIFEST]
            raise MemoryWriteError(
                f"{folder} is not empty and not a memory (it holds {strangers[0]!r}); choose a new folder."
            )
        lock = take_lock(folder)
        try:
            if is_memory(folder):
                raise MemoryWriteError(f"{folder} became a memory just now, by another process; open it instead.")
            Journal.begin(folder, generation)
            Manifest(geometry, dict(focus_options), model_source).write(folder)
        except OSError as error:
            raise write_error(folder, error) from error
        finally:
            lock.release()
        return cls(folder, writable=True)

    @classmethod
    @contextmanager
    def fill(
        cls, folder: Path, geometry: MemoryGeometry, *, focus_options: Mapping[str, Any], model_source: str | None
    ) -> Iterator[DiskBackend]:
        """An empty memory to be filled inside; afterwards it is in the folder, whole. If anything fails, it is not there at all.

        Raises:
            MemoryWriteError: the folder holds other files, or cannot be written.
        """
        unfinished = folder / UNFINISHED
        made = not os.path.lexists(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            strangers = foreign_entries(folder)
            if is_memory(folder):
                raise MemoryWriteError(
                    f"{folder} holds a memory already; open it with writable=True and extend it, or choose a new folder."
                )
            if strangers:
                raise MemoryWriteError(
                    f"{folder} is not an empty folder (it holds {strangers[0]!r}); choose a new one."
                )
            shutil.rmtree(unfinished, ignore_errors=True)
            with closing(
                cls.create(unfinished, geometry, focus_options=focus_options, model_source=model_source)
            ) as backend:
                backend.durable = False
                yield backend
                backend.sync()
            names = sorted((entry.name for entry in unfinished.iterdir()), key=lambda name: name == MANIFEST)
            for name in names:  # the manifest last: with it the memory is there, whole
                os.replace(unfinished / name, folder / name)
        except OSError as error:
            raise MemoryWriteError(f"{folder} could not be written ({error.strerror or error}).") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            if made and not is_memory(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _load_snapshot(self) -> None:
        """Read the journal and open the data files, which stay readable for this object whatever a writer does."""
        failed: int | None = None
        while True:
            self._journal = Journal(self.folder)
            self.store = DiskStore(self)
            self.index: MemoryIndex | None = None
            self._index_files = IndexFiles(self.folder, self.generation)
            try:
                self._check_sizes()
                return
            except MemoryFormatError:
                self._close_files()
                if self.generation == failed:  # not a writer that cleared or compacted the memory in between
                    raise
                failed = self.generation

    # -- what it is --------------------------------------------------------------------------------------

    @property
    def geometry(self) -> MemoryGeometry:
        """What made it."""
        return self._manifest.geometry

    @property
    def focus_options(self) -> dict[str, Any]:
        """Options of the model that made it."""
        return self._manifest.focus_options

    @property
    def model_source(self) -> str | None:
        """Where that model was loaded from."""
        return self._manifest.model_source

    @property
    def generation(self) -> int:
        """Of the data files."""
        return self._journal.generation

    @property
    def documents(self) -> list[Document]:
        """See `Journal`."""
        return self._journal.documents

    @property
    def tokens(self) -> int:
        """Committed tokens."""
        return self._journal.tokens

    @property
    def text_bytes(self) -> int:
        """Committed bytes of text."""
        return self._journal.text_bytes

    def layer_file(self, layer: int) -> Path:
        """Records of a layer."""
        return self.folder / f"kv-{layer:03d}.{self.generation}.bin"

    @property
    def _table_file(self) -> Path:
        return self.folder / f"tokens.{self.generation}.bin"

    @property
    def _text_file(self) -> Path:
        return self.folder / f"text.{self.generation}.bin"

    def _expected_sizes(self) -> list[tuple[Path, int]]:
        record = self.store.record_bytes
        sizes = [(self.layer_file(layer), self.tokens * record) for layer in self.geometry.layers]
        sizes.append((self._table_file, self.tokens * TOKEN_DTYPE.itemsize))
        sizes.append((self._text_file, self.text_bytes))
        return sizes

    def _check_sizes(self) -> None:
        for path, size in self._expected_sizes():
            if size == 0:
                continue
            try:
                found = os.fstat(self.file(path)).st_size
            except OSError as error:
                raise MemoryFormatError(f"{path} is missing or unreadable ({error.strerror}).") from error
            if found < size:
                raise MemoryFormatError(
                    f"{path} is truncated: {found} bytes found, {size} were committed; restore it from a copy."
                )

    def verify(self) -> None:
        """Compare every committed byte with its checksum.

        Raises:
            MemoryFormatError: names the file that differs, and the tokens.
        """
        record = self.store.record_bytes
        spans = [(self.layer_file(layer), record, "tokens") for layer in self.geometry.layers]
        spans += [(self._table_file, TOKEN_DTYPE.itemsize, "tokens"), (self._text_file, 1, "text_bytes")]
        for path, unit, counter in spans:
            done = 0
            if not self._journal.commits[-1][counter]:
                continue
            file = self.file(path)
            for entry in self._journal.commits:
                length = (entry[counter] - done) * unit
                if length and _crc_of(file, done * unit, length) != entry["crc"].get(_kind(path)):
                    where = f"between {counter.replace('_', ' ')} {done} and {entry[counter]}"
                    raise MemoryFormatError(f"{path} is corrupted {where}; restore it from a copy.")
                done = entry[counter]

    # -- writing -----------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make everything that was written durable."""
        for file in self._files.values():
            os.fsync(file)

    def _require_writer(self) -> None:
        if self._closed:
            raise MemoryStoreError(f"{self.label} is closed; open it again with Memory.open.")
        if not self.writable:
            raise MemoryStoreError(f"{self.label} was opened for reading; open it with writable=True to add to it.")

    def append_table(self, rows: np.ndarray) -> None:
        """Token rows of the window that `store` was just given."""
        self.write(self._table_file, (self.tokens + self._pending_rows) * TOKEN_DTYPE.itemsize, rows.tobytes())
        self._pending_rows += len(rows)

    def append_text(self, data: bytes) -> None:
        """Text of the window."""
        self.write(self._text_file, self.text_bytes + self._pending_text, data)
        self._pending_text += len(data)

    def file(self, path: Path) -> int:
        """Descriptor of a data file, opened on first use."""
        if self._closed:
            raise MemoryStoreError(f"{self.label} is closed; open it again with Memory.open.")
        file = self._files.get(path)
        if file is None:
            flags = os.O_RDWR | os.O_CREAT if self.writable else os.O_RDONLY
            file = self._files[path] = os.open(path, flags, 0o644)
        return file

    def write(self, path: Path, offset: int, data: bytes | memoryview) -> None:
        """Write to a data file, beyond what is committed."""
        self._require_writer()
        try:
            file = self.file(path)
            view = memoryview(data)
            while view:
                done = os.pwrite(file, view, offset)
                self._crc[_kind(path)] = zlib.crc32(view[:done], self._crc.get(_kind(path), 0))
                view, offset = view[done:], offset + done
        except OSError as error:
            self.rollback()
            raise write_error(path, error) from error

    def rollback(self) -> None:
        """Forget what was written since the last commit; it is written over by the next window."""
        self._begin_window()
        self.store.rewind(self.tokens)

    def commit(self, documents: Sequence[Document]) -> None:
        """Make everything appended since the last commit durable, with these new or changed documents."""
        self._require_writer()
        try:
            if any(document.removed for document in documents):
                self._raise_version()
            if self.durable:
                self.sync()
            self._journal.append(
                documents,
                tokens=self.store.tokens,
                text_bytes=self.text_bytes + self._pending_text,
                crc=dict(self._crc),
                durable=self.durable,
            )
        except OSError as error:
            self.rollback()
            raise write_error(self._journal.path, error) from error
        self._begin_window()

    def _begin_window(self) -> None:
        """Nothing is written since the last commit."""
        self._crc.clear()
        self._pending_rows = self._pending_text = 0

    def _raise_version(self) -> None:
        """Make the memory one that a longfocus which knows no removed documents refuses, before it holds one."""
        if self._manifest.version < VERSION_WITH_REMOVED:
            raised = replace(self._manifest, version=VERSION_WITH_REMOVED)
            raised.write(self.folder)
            self._manifest = raised

    # -- the index ---------------------------------------------------------------------------------------

    def load_index(self) -> MemoryIndex:
        """The saved index, mapped, or an empty one; `index_problem` says what was wrong with a saved one."""
        index = MemoryIndex(self.store, self.geometry)
        self._index_files.load(index, self.tokens)
        return index

    def save_index(self, index: MemoryIndex) -> None:
        """Save what an index of this memory holds.

        Raises:
            MemoryWriteError: the disk refused; the memory is intact, and the index as it was or gone.
        """
        self._require_writer()
        try:
            self._index_files.save(index)
        except OSError as error:
            raise write_error(self._index_files.header_file, error) from error

    @property
    def has_saved_index(self) -> bool:
        """Whether there is one, usable or not."""
        return self._index_files.header_file.exists()

    @property
    def index_problem(self) -> str | None:
        """Why a saved index was not used."""
        return self._index_files.problem

    # -- new generations ---------------------------------------------------------------------------------

    def clear(self) -> None:
        """Start over, empty, in a new generation of files."""
        self._require_writer()
        try:
            with self._as_on_disk():
                Journal.begin(self.folder, self.generation + 1)
        except OSError as error:
            raise write_error(self.folder, error) from error
        self._sweep()

    @property
    def stored_bytes(self) -> int:
        """Bytes of all files of the memory, what nobody can read any more included."""
        return sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())

    def successor(self) -> DiskBackend:
        """An empty memory of the next generation, to be filled and given to `take_over` or `discard`."""
        self._require_writer()
        folder = self.folder / UNFINISHED
        shutil.rmtree(folder, ignore_errors=True)
        made = DiskBackend.create(
            folder,
            self.geometry,
            focus_options=self.focus_options,
            model_source=self.model_source,
            generation=self.generation + 1,
        )
        made.durable = False
        return made

    def take_over(self, successor: DiskBackend) -> None:
        """Hold what the successor holds from now on, and let go of everything else.

        The new journal counts: until it is moved into place the memory is the old one, from then on the new one.

        Raises:
            MemoryWriteError: the disk refused; the memory is the old one.
        """
        made = successor.folder
        try:
            successor.sync()
            sync(made / JOURNAL)
            successor.close()
            for path in list(made.iterdir()):
                if DATA_FILE.fullmatch(path.name):
                    os.replace(path, self.folder / path.name)
            sync(self.folder)
            with self._as_on_disk():
                os.replace(made / JOURNAL, self.folder / JOURNAL)
            os.replace(made / MANIFEST, self.folder / MANIFEST)  # the new one holds nothing that is removed
            self._manifest = successor._manifest
            sync(self.folder)
        except OSError as error:
            raise write_error(self.folder, error) from error
        finally:
            self.discard(successor)

    def discard(self, successor: DiskBackend) -> None:
        """Take away a successor, and whatever it leaves behind."""
        successor.close()
        self._sweep()

    @contextmanager
    def _as_on_disk(self) -> Iterator[None]:
        """Whatever happens inside to the journal, also an interruption, this object is afterwards what the disk says."""
        store = self.store
        if store.tokens:
            for layer in self.geometry.layers:  # chunks of the old store stay readable without its files
                store.mapped(layer)
        try:
            yield
        finally:
            with closed_on_error(self):  # half of it known: nothing may be written on that ground
                self._close_files()
                self._begin_window()
                generation = self.generation
                self._load_snapshot()
                if self.generation == generation:
                    self.store = store

    def _sweep(self) -> None:
        """Take away files that are no part of the memory: of other generations, and of what was never finished."""
        with suppress(OSError):  # they only take space
            for path in list(self.folder.iterdir()):
                data = DATA_FILE.fullmatch(path.name)
                other = data is not None and int(data[2] or data[4]) != self.generation
                unfinished = path.name in (MANIFEST + ".new", JOURNAL + ".new") or UNFINISHED_INDEX.fullmatch(path.name)
                if other or unfinished:
                    path.unlink(missing_ok=True)
                elif path.name == UNFINISHED:
                    shutil.rmtree(path, ignore_errors=True)

    # -- reading -----------------------------------------------------------------------------------------

    def read_table(self, start: int, stop: int) -> np.ndarray:
        """Rows of TOKEN_DTYPE."""
        if start >= stop:
            return np.zeros(0, dtype=TOKEN_DTYPE)
        size = TOKEN_DTYPE.itemsize
        data = _read_at(self.file(self._table_file), start * size, (stop - start) * size, self._table_file)
        return np.frombuffer(data, TOKEN_DTYPE)

    def read_text(self, start: int, stop: int) -> bytes:
        """UTF-8 bytes."""
        if start >= stop:
            return b""
        return _read_at(self.file(self._text_file), start, stop - start, self._text_file)

    def _close_files(self) -> None:
        _close_all(self._files)

    def close(self) -> None:
        """Release files and the writer's lock; may be called twice."""
        self._close_files()
        self._closed = True
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self.writable = False


def _close_all(files: dict[Path, int]) -> None:
    for file in files.values():
        os.close(file)
    files.clear()


def _kind(path: Path) -> str:
    return path.name.split(".")[0]


def _crc_of(file: int, offset: int, length: int) -> int:
    check = 0
    while length > 0:
        data = os.pread(file, min(length, 1 << 20), offset)
        if not data:
            return -1
        check, offset, length = zlib.crc32(data, check), offset + len(data), length - len(data)
    return check


def _read_at(file: int, offset: int, length: int, path: Path) -> bytes:
    pieces = []
    while length:
        data = os.pread(file, min(length, 1 << 24), offset)
        if not data:
            raise MemoryFormatError(f"{path} became shorter while it was in use.")
        pieces.append(data)
        offset, length = offset + len(data), length - len(data)
    return b"".join(pieces)
