"""From paths to texts: files, folders, PDF and standard input, read in blocks and never whole.

A file named by the user must be readable text, or the command stops before anything is encoded. Files found
inside a named folder are skipped when they are binary, empty or unreadable, and the reasons are reported.
Text is decoded and otherwise left alone: line ends, byte for byte, come back as they were.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from longfocus.errors import InputError

BLOCK_BYTES = 1 << 16
MEMORY_MARKS = ("memory.json", "sharded-memory.json")
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "node_modules", "venv", "build", "dist", "site-packages", "target", "htmlcov"}
)
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass
class Source:
    """One document to be read."""

    name: str
    """As shown to people."""
    kind: str
    """text, pdf or stdin."""
    path: Path | None = None
    encoding: str | None = None
    """None: by byte-order mark, else UTF-8."""
    pages: list[int] = field(default_factory=list)
    """Character at which each page began, filled while a PDF is read."""
    _spool: Any = None

    @classmethod
    def of_text(cls, name: str, text: str) -> Source:
        """A document that is at hand as text."""
        return cls(name, "text", _spool=io.BytesIO(text.encode("utf-8")))

    @property
    def size_bytes(self) -> int | None:
        """Bytes to read, for the progress bar; None where unknown."""
        if self._spool is not None:
            return int(self._spool.seek(0, io.SEEK_END))
        return self._status().st_size if self.path is not None else None

    def _status(self) -> os.stat_result:
        assert self.path is not None
        try:
            return self.path.stat()
        except OSError as error:
            raise InputError(f"{self.name} cannot be read: {error.strerror or error}.") from error

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the memory's Document that describe this source."""
        if self.path is None:
            return {"kind": self.kind}
        status = self._status()
        return {
            "kind": self.kind,
            "path": str(self.path.absolute()),
            "source_bytes": status.st_size,
            "source_mtime_ns": status.st_mtime_ns,
        }

    def check(self) -> None:
        """Read it through once, without keeping anything, so that mistakes show before the encoding starts.

        Raises:
            InputError: missing, a device or socket, empty, binary, undecodable, no permission, a PDF without text.
        """
        empty = True
        for _, block in self.blocks():
            empty = empty and not block.strip()
        if empty:
            what = "has no text in it (scanned pages need OCR first)" if self.kind == "pdf" else "is empty"
            raise InputError(f"{self.name} {what}; there is nothing to read.")

    def blocks(self) -> Iterator[tuple[int, str]]:
        """The text in pieces, each with the bytes read so far.

        Raises:
            InputError: as `check`.
        """
        try:
            if self.kind == "pdf":
                yield from self._pdf_blocks()
            elif self.path is not None:
                with self.path.open("rb") as file:
                    yield from self._text_blocks(file)
            else:
                self._spool.seek(0)
                yield from self._text_blocks(self._spool)
        except OSError as error:
            raise InputError(f"{self.name} cannot be read: {error.strerror or error}.") from error

    def _text_blocks(self, file: BinaryIO) -> Iterator[tuple[int, str]]:
        data = file.read(BLOCK_BYTES)
        encoding = self.encoding
        if encoding is None:
            encoding = next((name for mark, name in _BOMS if data.startswith(mark)), None)
            if encoding is None and b"\0" in data:
                raise InputError(f"{self.name} is a binary file (it holds NUL bytes), not text.")
            encoding = encoding or "utf-8"
        decoder = _decoder(encoding)
        done = 0
        while True:
            try:
                text = decoder.decode(data, final=not data)
                if not text.isascii():
                    text.encode("utf-8")  # some codecs let halves of characters through
            except UnicodeError as error:
                near = done + (error.start if isinstance(error, UnicodeDecodeError) else 0)
                raise InputError(
                    f"{self.name} is not {encoding} text (near byte {near}); "
                    "name its encoding, for instance --encoding latin-1 (in a recipe: encoding: latin-1)."
                ) from error
            done += len(data)
            if text:
                if "\0" in text:
                    raise InputError(f"{self.name} is a binary file (it holds NUL bytes), not text.")
                yield done, text
            if not data:
                return
            data = file.read(BLOCK_BYTES)

    def _pdf_blocks(self) -> Iterator[tuple[int, str]]:
        import logging

        from pypdf import PdfReader
        from pypdf.errors import DependencyError, PyPdfError

        logging.getLogger("pypdf").setLevel(logging.ERROR)
        assert self.path is not None
        self.pages.clear()
        chars = 0
        size = self.path.stat().st_size
        try:
            reader = PdfReader(self.path)
            if reader.is_encrypted and not reader.decrypt(""):
                raise InputError(f"{self.name} is an encrypted PDF; save a copy without the password first.")
            total = len(reader.pages)
            for number, page in enumerate(reader.pages):
                text = page.extract_text().encode("utf-8", "replace").decode("utf-8") + "\n\n"
                self.pages.append(chars)
                chars += len(text)
                yield size * (number + 1) // total, text
        except InputError:
            raise
        except DependencyError as error:
            raise InputError(
                f"{self.name} is an encrypted PDF; save a copy without encryption first ({error})."
            ) from error
        except (PyPdfError, ValueError, KeyError, TypeError, RecursionError, AttributeError, IndexError) as error:
            raise InputError(f"{self.name} is not a readable PDF ({error}).") from error


@dataclass
class Found:
    """What `find_sources` came back with."""

    sources: list[Source]
    skipped: list[tuple[str, str]]
    """(name, reason) of files inside folders that are left out."""


def find_sources(paths: str | Path | Sequence[str | Path], *, encoding: str | None = None) -> Found:
    """Expand one or more files, folders and `-` (standard input) into checked sources, folders in sorted order.

    Hidden files, version control, caches and build folders are passed over.

    Raises:
        InputError: a named file cannot be read as text, or nothing readable was found.
    """
    if isinstance(paths, (str, Path)):
        paths = [paths]
    sources: list[Source] = []
    skipped: list[tuple[str, str]] = []
    for given in paths:
        if str(given) == "-":
            source = Source("standard input", "stdin", encoding=encoding, _spool=_spool_stdin())
            weakref.finalize(source, source._spool.close)
            source.check()
            sources.append(source)
            continue
        path = Path(given)
        try:
            path.stat()
        except FileNotFoundError:
            raise InputError(f"{path} does not exist.") from None
        except (OSError, ValueError) as error:
            shown = str(path) if len(str(path)) < 80 else f"{str(path)[:77]}…"
            raise InputError(
                f"{shown!r} cannot be opened as a path ({getattr(error, 'strerror', None) or error})."
            ) from None
        if path.is_dir():
            found = list(_walk(path, skipped))
            for file in found:
                source = _source(file, str(path / file.relative_to(path)), encoding)
                try:
                    source.check()
                except InputError as error:
                    skipped.append((source.name, str(error).removeprefix(f"{source.name} ").rstrip(".")))
                else:
                    sources.append(source)
            continue
        if not path.is_file():
            raise InputError(f"{path} is neither a file nor a folder.")
        source = _source(path, str(path), encoding)
        source.check()
        sources.append(source)
    sources = list({source.path.absolute() if source.path else id(source): source for source in sources}.values())
    if not sources:
        reasons = "; ".join(f"{name} {why}" for name, why in skipped[:3])
        raise InputError(f"Nothing to read in {', '.join(map(str, paths))}" + (f" ({reasons})." if reasons else "."))
    return Found(sources, skipped)


def _decoder(encoding: str) -> codecs.IncrementalDecoder:
    try:
        codec = codecs.lookup(encoding)
        if codec.incrementaldecoder is None or not getattr(codec, "_is_text_encoding", True):
            raise LookupError(encoding)
        return codec.incrementaldecoder()
    except (LookupError, ValueError) as error:
        raise InputError(f"encoding: {encoding!r} is not one for text; try utf-8, latin-1 or utf-16.") from error


def _source(path: Path, name: str, encoding: str | None) -> Source:
    return Source(name, "pdf" if path.suffix.lower() == ".pdf" else "text", path, encoding)


def _walk(folder: Path, skipped: list[tuple[str, str]]) -> Iterator[Path]:
    def refused(error: OSError) -> None:
        skipped.append((str(error.filename), f"cannot be opened: {error.strerror}"))

    for base, folders, files in os.walk(folder, onerror=refused):
        folders[:] = sorted(
            name
            for name in folders
            if not any(
                os.path.isfile(os.path.join(base, name, mark)) for mark in MEMORY_MARKS
            )  # a saved memory, not a text
            and not name.startswith(".")
            and name not in SKIPPED_FOLDERS
            and not name.endswith(".egg-info")
        )
        for name in sorted(files):
            path = Path(base, name)
            if not name.startswith(".") and (os.path.isfile(path) or not os.access(base, os.X_OK)):
                yield path  # in a folder that may be listed but not entered, the source says what is wrong


def _spool_stdin() -> Any:
    """Standard input cannot be read twice: keep it in a temporary file (in RAM while small)."""
    if sys.stdin is None:
        raise InputError("standard input is closed; there is nothing to read.")
    spool = tempfile.SpooledTemporaryFile(max_size=1 << 24)  # noqa: SIM115  (lives as long as its Source)
    while data := sys.stdin.buffer.read(1 << 20):
        spool.write(data)
    return spool
