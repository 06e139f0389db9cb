"""A training source, tokenised once: raw tokens in a folder, opened as a memory map.

    source = tokenize_source(spec, tokenizer, cache_folder)
    source.documents, source.tokens, source.document(0), source.document_id(0)

One folder of the cache is one entry, named by a digest of how the source is read, of its files and of the tokenizer,
so that a changed source or another tokenizer gets another entry:

    tokens.bin         token ids of all documents, one after another: u16 or u32, little-endian
    offsets.bin        where each document begins in tokens.bin, and the end: i64 (documents + 1)
    ids.bin            the documents' ids in UTF-8, one after another
    id_offsets.bin     where each id begins in ids.bin, and the end: i64 (documents + 1)
    manifest.json      format, counts, dtype, the files' checksums; of itself too. Written last

An entry is filled as `<digest>.unfinished` under a lock and renamed when whole: a killed process leaves nothing that
could be taken for an entry, and of several processes one tokenises while the others wait and open what it made.
No BOS or separator is stored: what stands between documents is the mixture's choice.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from longfocus.data.corpus import Corpus
from longfocus.data.source_spec import SourceSpec
from longfocus.data.tokens import BLOCK_CHARS, stream_tokens
from longfocus.errors import InputError
from longfocus.files import sync
from longfocus.memory.fingerprint import tokenizer_fingerprint

FORMAT = "longfocus-tokens"
VERSION = 1
MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"
HASHED_FILE_BYTES = 1 << 20
HASHED_TOTAL_BYTES = 1 << 26
"""Files up to the first size count by their contents, until so many bytes were hashed; others by path, size and time."""
VERIFY_ON_OPEN_BYTES = 1 << 30
"""Up to this size tokens.bin is compared with its checksum when opened; `verify` does it for any. The rest always is."""
_FILES = ("tokens.bin", "offsets.bin", "ids.bin", "id_offsets.bin")


@dataclass(frozen=True)
class Progress:
    """How far the tokenisation of a source is."""

    documents: int
    tokens: int
    bytes_read: int
    bytes_total: int | None
    """None where unknown (a hub data set)."""


class TokenizedSource:
    """An entry of the cache, opened for reading; safe to share between threads and forked processes."""

    def __init__(self, folder: Path, name: str) -> None:
        """
        Args:
            folder: of the entry.
            name: as shown in reports.

        Raises:
            InputError: a file is missing, truncated, corrupted, foreign or newer; names it.
        """
        self.folder, self.name = folder, name
        manifest = self._manifest = _read_manifest(folder)
        self.digest: str = manifest["digest"]
        """Of how the source was read, its files and the tokenizer."""
        self.documents: int = manifest["documents"]
        self.tokens: int = manifest["tokens"]
        self.skipped: int = manifest["skipped"]
        """Records and files that were passed over."""
        self.skipped_examples: list[tuple[str, str]] = [(what, why) for what, why in manifest["skipped_examples"]]
        self._tokens = self._map("tokens.bin", manifest["dtype"], self.tokens)
        self._offsets = self._map("offsets.bin", "<i8", self.documents + 1)
        self._id_offsets = self._map("id_offsets.bin", "<i8", self.documents + 1)
        self._ids = self._map("ids.bin", "u1", manifest["bytes"]["ids.bin"])
        self.verify(tokens=manifest["bytes"]["tokens.bin"] <= VERIFY_ON_OPEN_BYTES)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 (documents,); at least 1."""
        return np.diff(self._offsets)

    def document(self, index: int) -> np.ndarray:
        """Token ids of a document: a read-only view (tokens,) of the file, uint16 or uint32."""
        assert 0 <= index < self.documents
        return self._tokens[self._offsets[index] : self._offsets[index + 1]]

    def document_id(self, index: int) -> str:
        """The id that the document has in its source."""
        assert 0 <= index < self.documents
        return bytes(self._ids[self._id_offsets[index] : self._id_offsets[index + 1]]).decode(
            "utf-8", "surrogateescape"
        )

    def verify(self, *, tokens: bool = True) -> None:
        """Compare every byte with its checksum, those of tokens.bin only if asked for.

        Raises:
            InputError: names the file that differs.
        """
        for name in _FILES if tokens else _FILES[1:]:
            path, check = self.folder / name, 0
            with path.open("rb") as file:
                while data := file.read(1 << 20):
                    check = zlib.crc32(data, check)
            if check != self._manifest["crc"][name]:
                raise _corrupted(path, "its checksum is wrong")

    def _map(self, name: str, dtype: str, count: int) -> np.ndarray:
        path, expected = self.folder / name, count * np.dtype(dtype).itemsize
        try:
            size = path.stat().st_size
        except OSError as error:
            raise _corrupted(path, f"missing or unreadable: {error.strerror}") from error
        if size != expected or size != self._manifest["bytes"].get(name):
            raise _corrupted(path, f"{size} bytes found, {expected} expected")
        return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


def tokenize_source(
    spec: SourceSpec,
    tokenizer: Any,
    cache_folder: Path | str,
    progress: Callable[[Progress], None] | None = None,
) -> TokenizedSource:
    """Open a source's entry in the cache; tokenise the source first where there is none.

    Args:
        tokenizer: a fast `transformers` tokenizer.
        cache_folder: made when missing. Old entries are never removed; delete what is not needed.
        progress: called after each block of text, and once at the end. Not called when the entry is there.

    Raises:
        InputError: the source cannot be read, has no document, or changed while it was read; the cache cannot be
            written; an existing entry is corrupted.
    """
    folder = Path(cache_folder)
    corpus = Corpus(spec)
    description = _describe(corpus, tokenizer)
    digest = _digest(description)
    entry = folder / digest
    try:
        if not (entry / MANIFEST).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(folder / f"{digest}.lock"):
                if not (entry / MANIFEST).is_file():
                    _remove_abandoned(folder, digest)
                    _make_entry(entry, corpus, tokenizer, description, progress)
    except OSError as error:
        raise InputError(
            f"The token cache {folder} could not be written ({error.strerror or error}); free the disk or name another folder."
        ) from error
    return TokenizedSource(entry, spec.name)


def token_ids(tokenizer: Any, text: str) -> Iterator[np.ndarray]:
    """Token ids of a text, uint32, in pieces; the same as of the whole text, without special tokens."""
    blocks = (text[start : start + BLOCK_CHARS] for start in range(0, len(text), BLOCK_CHARS))
    for piece in stream_tokens(tokenizer, blocks):
        yield piece.rows["id"]


def _make_entry(
    entry: Path,
    corpus: Corpus,
    tokenizer: Any,
    description: dict[str, Any],
    progress: Callable[[Progress], None] | None,
) -> None:
    unfinished = entry.with_name(entry.name + UNFINISHED)
    unfinished.mkdir()
    try:
        manifest = _fill(unfinished, corpus, tokenizer, progress)
        if _digest(_describe(Corpus(corpus.spec), tokenizer)) != entry.name:
            raise InputError(
                f"Source {corpus.spec.name!r} changed while it was being tokenised; run again when nothing writes to it."
            )
        manifest |= {"format": FORMAT, "version": VERSION, "digest": entry.name, "source": description}
        manifest["self_crc"] = _manifest_crc(manifest)
        _write_synced(unfinished / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        if entry.exists():  # without a manifest: whatever it is, it is no entry
            shutil.rmtree(entry)
        os.replace(unfinished, entry)
        sync(entry.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _fill(folder: Path, corpus: Corpus, tokenizer: Any, progress: Callable[[Progress], None] | None) -> dict[str, Any]:
    """Write the data files and return what the manifest says of them."""
    largest = max(tokenizer.get_vocab().values(), default=0)
    dtype = "<u2" if largest < 1 << 16 else "<u4"
    offsets, id_offsets = array.array("q", [0]), array.array("q", [0])
    tokens = bytes_read = empty = 0
    crc = dict.fromkeys(_FILES, 0)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("wb")) for name in _FILES}

        def write(name: str, data: bytes) -> None:
            files[name].write(data)
            crc[name] = zlib.crc32(data, crc[name])

        for document in corpus:
            for ids in token_ids(tokenizer, document.text):
                assert ids.max(initial=0) <= largest, "a token outside the vocabulary"
                write("tokens.bin", ids.astype(dtype).tobytes())
                tokens += len(ids)
                if progress is not None:
                    progress(Progress(len(offsets) - 1, tokens, bytes_read, corpus.bytes_total))
            bytes_read = document.bytes_read
            if tokens == offsets[-1]:
                empty += 1  # a text of which the tokenizer keeps nothing
                continue
            name = document.id.encode("utf-8", "surrogateescape")
            write("ids.bin", name)
            offsets.append(tokens)
            id_offsets.append(id_offsets[-1] + len(name))
        if not tokens:
            raise InputError(f"Source {corpus.spec.name!r}: the tokenizer makes no token of its texts.")
        write("offsets.bin", np.asarray(offsets, dtype="<i8").tobytes())
        write("id_offsets.bin", np.asarray(id_offsets, dtype="<i8").tobytes())
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    documents = len(offsets) - 1
    if progress is not None:
        progress(Progress(documents, tokens, bytes_read, corpus.bytes_total))
    return {
        "documents": documents,
        "tokens": tokens,
        "dtype": dtype,
        "bytes": {name: (folder / name).stat().st_size for name in _FILES},
        "crc": crc,
        "skipped": corpus.skipped_count + empty,
        "skipped_examples": corpus.skipped,
    }


def _describe(corpus: Corpus, tokenizer: Any) -> dict[str, Any]:
    """All that decides which tokens an entry holds; JSON-ready."""
    spec = corpus.spec.to_dict()
    del spec["name"]
    files, hashed = [], 0
    for file in corpus.files:
        if file.size_bytes <= HASHED_FILE_BYTES and hashed + file.size_bytes <= HASHED_TOTAL_BYTES:
            hashed += file.size_bytes
            try:
                what = hashlib.sha256(file.path.read_bytes()).hexdigest()
            except OSError as error:
                what = f"unreadable: {error.strerror}"  # reading it will say more
        else:
            what = f"{file.path.absolute()} {file.mtime_ns}"
        files.append([file.name, file.size_bytes, what])
    tokenizer_digest = tokenizer_fingerprint(tokenizer)
    return {"spec": spec, "files": _digest(files), "tokenizer": tokenizer_digest, "format": [FORMAT, VERSION]}


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def _remove_abandoned(folder: Path, ours: str) -> None:
    """Delete what killed processes left: unfinished entries whose lock nobody holds, or this process (`ours`)."""
    for path in folder.glob("*" + UNFINISHED):
        if path.name == ours + UNFINISHED:
            shutil.rmtree(path)
            continue
        lock = filelock.FileLock(path.with_suffix(".lock"))
        with contextlib.suppress(filelock.Timeout), lock.acquire(timeout=0):
            shutil.rmtree(path, ignore_errors=True)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        if manifest.get("format") != FORMAT:
            raise InputError(f"{path} is not the manifest of a longfocus token cache.")
        if manifest["version"] != VERSION:
            raise InputError(
                f"{path} has format version {manifest['version']}; this longfocus reads version {VERSION}. Upgrade longfocus."
            )
        if manifest["self_crc"] != _manifest_crc(manifest):
            raise ValueError("its checksum is wrong")
    except OSError as error:
        raise _corrupted(path, f"missing or unreadable: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupted(path, str(error)) from error
    return manifest


def _manifest_crc(manifest: dict[str, Any]) -> int:
    rest = {key: value for key, value in manifest.items() if key != "self_crc"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _corrupted(path: Path, what: str) -> InputError:
    return InputError(
        f"{path} is corrupted ({what}). Delete the folder {path.parent}: it is made anew from the source."
    )


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
