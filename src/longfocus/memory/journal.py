"""The journal of a saved memory, `journal.jsonl`: one line a commit, each with a checksum of itself.

The last whole line says what the memory holds. A line that a killed writer left unfinished does not count; the next one is
written over it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longfocus.errors import MemoryFormatError
from longfocus.files import write_whole
from longfocus.memory.documents import Document
from longfocus.memory.folder import JOURNAL, read_file


class Journal:
    """The commits of one generation of a memory, as far as they are known here."""

    def __init__(self, folder: Path) -> None:
        """Read it.

        Raises:
            MemoryFormatError: it is missing, unreadable or corrupted; names the line.
        """
        self.path = folder / JOURNAL
        self.commits: list[dict[str, Any]] = []
        self.documents: list[Document] = []
        """All, removed ones too; each stands at its id."""
        self.tokens = self.text_bytes = 0
        data = read_file(self.path)
        whole = data[: data.rfind(b"\n") + 1]
        try:
            for line in whole.splitlines():
                entry = _parse(line)
                if entry["tokens"] < self.tokens or entry["text_bytes"] < self.text_bytes:
                    raise ValueError("a commit takes tokens back")
                self._take(entry)
            self.generation = int(self.commits[0]["generation"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            number = len(self.commits) + 1
            raise MemoryFormatError(
                f"{self.path} is corrupted at line {number} ({error}); restore it from a copy."
            ) from error
        self._bytes = len(whole)

    @staticmethod
    def begin(folder: Path, generation: int) -> None:
        """Write the journal of an empty generation in place of what is there, whole or not at all.

        Raises:
            OSError: the disk refused.
        """
        write_whole(folder / JOURNAL, _line(_entry(generation, 0, 0, [], {})))

    def append(
        self, documents: Sequence[Document], *, tokens: int, text_bytes: int, crc: dict[str, int], durable: bool
    ) -> None:
        """Commit.

        Args:
            documents: new or changed ones.
            tokens: of the memory, from now on; text_bytes likewise.
            crc: checksums of what was added to the data files, by their kind.
            durable: sync it.

        Raises:
            OSError: the disk refused; nothing was committed.
        """
        entry = _entry(self.generation, tokens, text_bytes, documents, crc)
        line = _line(entry)
        file = os.open(self.path, os.O_RDWR)
        try:
            os.ftruncate(file, self._bytes)
            view, offset = memoryview(line), self._bytes
            while view:
                done = os.pwrite(file, view, offset)
                view, offset = view[done:], offset + done
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        self._bytes += len(line)
        self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        documents = [Document.from_dict(record) for record in entry["documents"]]
        self.commits.append(entry)
        self.tokens, self.text_bytes = entry["tokens"], entry["text_bytes"]
        for document in documents:
            self.documents[document.id : document.id + 1] = [document]


def _entry(
    generation: int, tokens: int, text_bytes: int, documents: Sequence[Document], crc: dict[str, int]
) -> dict[str, Any]:
    return {
        "generation": generation,
        "tokens": tokens,
        "text_bytes": text_bytes,
        "documents": [document.to_dict() for document in documents],
        "crc": crc,
    }


def _line(entry: dict[str, Any]) -> bytes:
    body = json.dumps(entry, separators=(",", ":"), ensure_ascii=True)
    return f"{zlib.crc32(body.encode()):08x} {body}\n".encode()


def _parse(line: bytes) -> dict[str, Any]:
    check, _, body = line.partition(b" ")
    if f"{zlib.crc32(body):08x}".encode() != check:
        raise ValueError("its checksum is wrong")
    entry: dict[str, Any] = json.loads(body)
    return entry
