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

import errno
import json
import mmap
import os
import re
import shutil
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
from torch import Tensor

from longfocus.errors import MemoryFormatError, MemoryLockedError, MemoryStoreError, MemoryWriteError
from longfocus.files import sync, write_whole
from longfocus.memory.approximate import MemoryIndex
from longfocus.memory.contract import CHUNK_TOKENS, KVChunk, chunk_of
from longfocus.memory.documents import TOKEN_DTYPE, Document
from longfocus.memory.geometry import MemoryGeometry
from longfocus.memory.index_files import IndexFiles
from longfocus.memory.storage import storage_dtype

FORMAT = "longfocus-memory"
VERSION = 1
VERSION_WITH_REMOVED = 2
"""Of memories that hold removed documents, which a reader of version 1 would take for live ones."""
MANIFEST, JOURNAL, LOCK = "memory.json", "journal.jsonl", "lock"
UNFINISHED = "unfinished"
"""Sub-folder that `save` and compaction fill before they move the files up, what makes them count last."""
VERIFY_ON_OPEN_BYTES = 1 << 30
"""Checksums of all data are compared when opening memories up to this size; `verify` does it for any."""

_DATA_FILE = re.compile(r"(kv-\d{3,}|tokens|text|index-\d{3,})\.(\d+)\.bin|(index)\.(\d+)\.json")
_UNFINISHED_INDEX = re.compile(r"index.*\.new")


def is_memory(folder: Path) -> bool:
    """Whether the folder looks like a saved memory."""
    try:
        return (folder / MANIFEST).is_file()
    except (OSError, ValueError):  # not a possible path
        return False


def foreign_entries(folder: Path) -> list[str]:
    """Names in a folder that keep it from becoming a memory; an unfinished `create` leaves none."""
    ours = {LOCK, JOURNAL, JOURNAL + ".new", MANIFEST, MANIFEST + ".new", UNFINISHED}
    names = [entry.name for entry in folder.iterdir()]
    if MANIFEST not in names:  # data files without a manifest: a `save` that was killed while it moved them
        names = [name for name in names if not _DATA_FILE.fullmatch(name) and not _UNFINISHED_INDEX.fullmatch(name)]
    return [name for name in names if name not in ours]


class DiskBackend:
    """See `memory.MemoryBackend`. Readers take a snapshot of what is committed; one writer appends."""

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
        try:
            manifest = _read_manifest(folder)
            self.geometry: MemoryGeometry = manifest["geometry"]
            self.focus_options: dict[str, Any] = manifest["focus"]
            self.model_source: str | None = manifest["model_source"]
            self._version: int = manifest["version"]
            self._load_snapshot()
            if writable:
                self._sweep()
            if sum(size for _, size in self._expected_sizes()) <= VERIFY_ON_OPEN_BYTES:
                self.verify()
        except BaseException:
            self.close()
            raise

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
            raise _write_error(folder, error) from error
        if strangers or is_memory(folder):
            strangers = strangers or [MANIFEST]
            raise MemoryWriteError(
                f"{folder} is not empty and not a memory (it holds {strangers[0]!r}); choose a new folder."
            )
        lock = take_lock(folder)
        try:
            if is_memory(folder):
                raise MemoryWriteError(f"{folder} became a memory just now, by another process; open it instead.")
            manifest = {
                "format": FORMAT,
                "version": VERSION,
                "geometry": geometry.to_dict(),
                "focus": dict(focus_options),
                "model_source": model_source,
            }
            write_whole(folder / JOURNAL, _first_line(generation))
            _write_manifest(folder, manifest)
        except OSError as error:
            raise _write_error(folder, error) from error
        finally:
            lock.release()
        return cls(folder, writable=True)

    def _load_snapshot(self) -> None:
        """Read the journal and open the data files, which stay readable for this object whatever a writer does."""
        self._load_journal()
        while True:
            try:
                self._check_sizes()
                return
            except MemoryFormatError:
                generation = self.generation
                self._close_files()
                self._load_journal()
                if self.generation == generation:  # not a writer that cleared or compacted the memory in between
                    raise

    # -- journal -----------------------------------------------------------------------------------------

    def _load_journal(self) -> None:
        path = self.folder / JOURNAL
        data = _read_file(path)
        self.documents: list[Document] = []
        self.tokens = self.text_bytes = 0
        self._commits: list[dict[str, Any]] = []
        whole = data[: data.rfind(b"\n") + 1]
        try:
            for line in whole.splitlines():
                entry = _parse_line(line)
                if entry["tokens"] < self.tokens or entry["text_bytes"] < self.text_bytes:
                    raise ValueError("a commit takes tokens back")
                self._commits.append(entry)
                self.tokens, self.text_bytes = entry["tokens"], entry["text_bytes"]
                for record in entry["documents"]:
                    document = Document.from_dict(record)
                    self.documents[document.id : document.id + 1] = [document]
            self.generation = int(self._commits[0]["generation"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            number = len(self._commits) + 1
            raise MemoryFormatError(
                f"{path} is corrupted at line {number} ({error}); restore it from a copy."
            ) from error
        self._journal_bytes = len(whole)
        self.store = DiskStore(self)
        self.index: MemoryIndex | None = None
        self._index_files = IndexFiles(self.folder, self.generation)

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
                found = os.fstat(self._file(path)).st_size
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
            if not self._commits[-1][counter]:
                continue
            file = self._file(path)
            for entry in self._commits:
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
        self._write(self._table_file, (self.tokens + self._pending_rows) * TOKEN_DTYPE.itemsize, rows.tobytes())
        self._pending_rows += len(rows)

    def append_text(self, data: bytes) -> None:
        """Text of the window."""
        self._write(self._text_file, self.text_bytes + self._pending_text, data)
        self._pending_text += len(data)

    def _file(self, path: Path) -> int:
        """Descriptor of a data file, opened on first use."""
        if self._closed:
            raise MemoryStoreError(f"{self.label} is closed; open it again with Memory.open.")
        file = self._files.get(path)
        if file is None:
            flags = os.O_RDWR | os.O_CREAT if self.writable else os.O_RDONLY
            file = self._files[path] = os.open(path, flags, 0o644)
        return file

    def _write(self, path: Path, offset: int, data: bytes | memoryview) -> None:
        self._require_writer()
        try:
            file = self._file(path)
            view = memoryview(data)
            while view:
                done = os.pwrite(file, view, offset)
                self._crc[_kind(path)] = zlib.crc32(view[:done], self._crc.get(_kind(path), 0))
                view, offset = view[done:], offset + done
        except OSError as error:
            self.rollback()
            raise _write_error(path, error) from error

    def rollback(self) -> None:
        """Forget what was written since the last commit; it is written over by the next window."""
        self._crc.clear()
        self._pending_rows = self._pending_text = 0
        self.store.rewind(self.tokens)

    def commit(self, documents: Sequence[Document]) -> None:
        """Make everything appended since the last commit durable, with these new or changed documents."""
        self._require_writer()
        entry: dict[str, Any] = {
            "generation": self.generation,
            "tokens": self.store.tokens,
            "text_bytes": self.text_bytes + self._pending_text,
            "documents": [document.to_dict() for document in documents],
            "crc": dict(self._crc),
        }
        line = _line(entry)
        path = self.folder / JOURNAL
        try:
            if any(document.removed for document in documents):
                self._raise_version()
            if self.durable:
                self.sync()
            journal = os.open(path, os.O_RDWR)
            try:
                os.ftruncate(journal, self._journal_bytes)  # a line that a killed writer left unfinished
                view, offset = memoryview(line), self._journal_bytes
                while view:
                    done = os.pwrite(journal, view, offset)
                    view, offset = view[done:], offset + done
                if self.durable:
                    os.fsync(journal)
            finally:
                os.close(journal)
        except OSError as error:
            self.rollback()
            raise _write_error(path, error) from error
        self._journal_bytes += len(line)
        self._commits.append(entry)
        self.tokens, self.text_bytes = entry["tokens"], entry["text_bytes"]
        for document in documents:
            self.documents[document.id : document.id + 1] = [document]
        self._crc.clear()
        self._pending_rows = self._pending_text = 0

    def _raise_version(self) -> None:
        """Make the memory one that a longfocus which knows no removed documents refuses, before it holds one."""
        if self._version < VERSION_WITH_REMOVED:
            manifest = json.loads(_read_file(self.folder / MANIFEST))
            manifest["version"] = VERSION_WITH_REMOVED
            _write_manifest(self.folder, manifest)
            self._version = VERSION_WITH_REMOVED

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
            raise _write_error(self._index_files.header_file, error) from error

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
                write_whole(self.folder / JOURNAL, _first_line(self.generation + 1))
        except OSError as error:
            raise _write_error(self.folder, error) from error
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
                if _DATA_FILE.fullmatch(path.name):
                    os.replace(path, self.folder / path.name)
            sync(self.folder)
            with self._as_on_disk():
                os.replace(made / JOURNAL, self.folder / JOURNAL)
            os.replace(made / MANIFEST, self.folder / MANIFEST)  # the new one holds nothing that is removed
            self._version = VERSION
            sync(self.folder)
        except OSError as error:
            raise _write_error(self.folder, error) from error
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
                store._mapped(layer)
        try:
            yield
        finally:
            try:
                self._close_files()
                self._crc.clear()
                self._pending_rows = self._pending_text = 0
                generation = self.generation
                self._load_snapshot()
                if self.generation == generation:
                    self.store = store
            except BaseException:  # half of it known: nothing may be written on that ground
                self.close()
                raise

    def _sweep(self) -> None:
        """Take away files that are no part of the memory: of other generations, and of what was never finished."""
        with suppress(OSError):  # they only take space
            for path in list(self.folder.iterdir()):
                data = _DATA_FILE.fullmatch(path.name)
                other = data is not None and int(data[2] or data[4]) != self.generation
                unfinished = path.name in (MANIFEST + ".new", JOURNAL + ".new") or _UNFINISHED_INDEX.fullmatch(
                    path.name
                )
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
        data = _read_at(self._file(self._table_file), start * size, (stop - start) * size, self._table_file)
        return np.frombuffer(data, TOKEN_DTYPE)

    def read_text(self, start: int, stop: int) -> bytes:
        """UTF-8 bytes."""
        if start >= stop:
            return b""
        return _read_at(self._file(self._text_file), start, stop - start, self._text_file)

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


class DiskStore:
    """The `KVStore` over a memory's record files."""

    rows = 1

    def __init__(self, backend: DiskBackend) -> None:
        geometry = backend.geometry
        self._backend = backend
        self.storage = storage_dtype(geometry.dtype)
        self._shape = (2, geometry.kv_heads, self.storage.elements(geometry.head_dim))
        self.record_bytes = 2 * geometry.kv_heads * self.storage.bytes(geometry.head_dim)
        self._tokens = backend.tokens
        self._maps: dict[int, Tensor] = {}

    @property
    def tokens(self) -> int:
        """Committed and just appended."""
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' records."""
        return self._tokens * self.record_bytes * len(self._backend.geometry.layers)

    def append(self, records: Mapping[int, Tensor], mask: np.ndarray | None = None) -> None:
        """See `KVStore.append`; written to the files, durable with the next commit."""
        assert mask is None or mask.all(), "one text has no holes"
        count = 0
        for layer, new in records.items():
            assert new.shape[0] == 1
            data = self.storage.store(new[0].detach()).to("cpu").contiguous()
            count = data.shape[0]
            raw = data.view(torch.uint8).numpy().tobytes()
            self._backend._write(self._backend.layer_file(layer), self._tokens * self.record_bytes, raw)
        self._tokens += count

    def rewind(self, tokens: int) -> None:
        """Forget records beyond `tokens`."""
        self._tokens = tokens
        self._maps.clear()

    def chunks(self, layer: int, start: int = 0, stop: int | None = None) -> Iterator[KVChunk]:
        """See `KVStore.chunks`; views of the memory-mapped file."""
        stop = self._tokens if stop is None else min(stop, self._tokens)
        if start >= stop:
            return
        mapped = self._mapped(layer)
        low = start
        while low < stop:
            high = min((low // CHUNK_TOKENS + 1) * CHUNK_TOKENS, stop)
            yield chunk_of(mapped[low:high].unsqueeze(0), None, low, self.storage)
            low = high

    @property
    def kv_heads(self) -> int:
        return self._shape[1]

    def gather(self, layer: int, head: int, tokens: Tensor) -> Tensor:
        """See `KVStore.gather`; only the pages that hold the records are read."""
        return self._mapped(layer)[:, :, head][tokens.to("cpu")]

    def _mapped(self, layer: int) -> Tensor:
        found = self._maps.get(layer)
        if found is None or found.shape[0] < self._tokens:
            shape = (self._tokens, *self._shape)
            # copy-on-write: torch wants a writable array, the file must never change
            file = self._backend._file(self._backend.layer_file(layer))
            mapped = mmap.mmap(file, self._tokens * self.record_bytes, access=mmap.ACCESS_COPY)
            found = self._maps[layer] = torch.frombuffer(mapped, dtype=self.storage.element).view(shape)
        return found


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


def _line(entry: dict[str, Any]) -> bytes:
    body = json.dumps(entry, separators=(",", ":"), ensure_ascii=True)
    return f"{zlib.crc32(body.encode()):08x} {body}\n".encode()


def _parse_line(line: bytes) -> dict[str, Any]:
    check, _, body = line.partition(b" ")
    if f"{zlib.crc32(body):08x}".encode() != check:
        raise ValueError("its checksum is wrong")
    entry: dict[str, Any] = json.loads(body)
    return entry


def _first_line(generation: int) -> bytes:
    return _line({"generation": generation, "tokens": 0, "text_bytes": 0, "documents": [], "crc": {}})


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    manifest["crc"] = _manifest_crc(manifest)
    write_whole(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise MemoryFormatError(f"{path} is missing or unreadable ({error.strerror}).") from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    data = _read_file(path)
    try:
        manifest = json.loads(data)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise MemoryFormatError(f"{path} is not the manifest of a longfocus memory.")
        if manifest["version"] not in (VERSION, VERSION_WITH_REMOVED):
            raise MemoryFormatError(
                f"{path} has format version {manifest['version']}; this longfocus reads versions {VERSION} and "
                f"{VERSION_WITH_REMOVED}. Upgrade longfocus."
            )
        if manifest["crc"] != _manifest_crc(manifest):
            raise ValueError("its checksum is wrong")
        manifest["geometry"] = MemoryGeometry.from_dict(manifest["geometry"])
        manifest["focus"] = dict(manifest["focus"])
        manifest["model_source"] = manifest["model_source"]
    except (ValueError, KeyError, TypeError) as error:
        raise MemoryFormatError(f"{path} is corrupted ({error}); restore it from a copy.") from error
    return manifest


def _manifest_crc(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "crc"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True, separators=(',', ':')).encode()):08x}"


def take_lock(folder: Path) -> filelock.BaseFileLock:
    """The writer's lock of a memory's folder, held until it is released.

    Raises:
        MemoryLockedError: somebody else holds it.
        MemoryWriteError: the disk refused.
    """
    lock = filelock.FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise MemoryLockedError(
            f"The memory in {folder} is being written to, by another process or an object of this one that was not closed; wait until it has finished. Asking it works meanwhile."
        ) from error
    except OSError as error:
        raise _write_error(folder, error) from error
    return lock


def _write_error(path: Path, error: OSError) -> MemoryWriteError:
    if error.errno == errno.ENOSPC:
        return MemoryWriteError(f"The disk is full: {path} could not be written. What was committed before is intact.")
    return MemoryWriteError(
        f"{path} could not be written ({error.strerror or error}). What was committed before is intact."
    )
