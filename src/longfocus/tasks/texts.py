"""Held-out texts and question sets that tasks measure on.

They lie in one folder, a set a subfolder, JSON lines compressed with gzip: `books/test.jsonl.gz`,
`trec/train.jsonl.gz`, … (fields as in docs/evaluate.md). The folder is given by `--data`, by the
environment variable LONGFOCUS_DATA, or is `../shared/data`. Own texts take the place of `books`, `code` and the other
held-out sets with `--text NAME=PATH` (a file or folder, read as `longfocus ask` reads them).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longfocus.data.documents import find_sources
from longfocus.errors import InputError

HELD_OUT = ("books", "code", "arxiv", "isabelle")
"""Sets of held-out documents that come with longfocus' own measurements."""


def default_folder() -> Path:
    """Where the sets are looked for unless `--data` says otherwise."""
    return Path(os.environ.get("LONGFOCUS_DATA") or "../shared/data")


class Texts:
    """Reads sets once."""

    def __init__(self, folder: Path | None = None, own: Mapping[str, str] | None = None) -> None:
        """
        Args:
            folder: of the sets; None: `default_folder()`.
            own: name -> file or folder with texts of one's own.
        """
        self.folder = folder if folder is not None else default_folder()
        self.own = dict(own or {})
        self._records: dict[str, list[dict[str, Any]]] = {}
        self._documents: dict[str, list[tuple[str, str]]] = {}
        self._asked: set[str] = set()

    def about(self) -> dict[str, Any]:
        """For a result's settings: own texts change what is measured, wherever they lie.

        Raises:
            InputError: an own text cannot be read.
        """
        return {"own_texts": {part: self._digest(part) for part in self.own}} if self.own else {}

    @property
    def unused(self) -> list[str]:
        """Names of own texts that no task has asked for."""
        return [part for part in self.own if part not in self._asked]

    def _digest(self, part: str) -> str:
        digest, documents = hashlib.sha256(), self._read(part)
        for _, text in documents:
            digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        return f"{len(documents)} document" + "s" * (len(documents) != 1) + f", sha256 {digest.hexdigest()[:16]}"

    def documents(self, part: str) -> list[tuple[str, str]]:
        """(id, text) of the held-out documents of a set, or of one's own texts of that name.

        Raises:
            InputError: the set is not there, or an own text cannot be read.
        """
        self._asked.add(part)
        return self._read(part)

    def _read(self, part: str) -> list[tuple[str, str]]:
        if part not in self._documents:
            if part in self.own:
                found = find_sources([self.own[part]])
                texts = [(s.name, "".join(block for _, block in s.blocks())) for s in found.sources]
            else:
                texts = [(r["id"], r["text"]) for r in self.records(f"{part}/test", ("id", "text"))]
                for number, (_, text) in enumerate(texts, 1):
                    if not isinstance(text, str):
                        raise InputError(
                            f"{self.folder / part}/test.jsonl.gz, line {number}: text is a {type(text).__name__}, expected a string."
                        )
            if not any(text for _, text in texts):
                raise InputError(f"{part}: no text in it.")
            self._documents[part] = texts
        return self._documents[part]

    def records(self, name: str, fields: Sequence[str] = ()) -> list[dict[str, Any]]:
        """The records of `SET/FILE`, for instance `trec/train`.

        Args:
            fields: what each must have.

        Raises:
            InputError: the file is not there, is no gzipped JSON lines, or a record lacks a field.
        """
        if name not in self._records:
            path = self.folder / f"{name}.jsonl.gz"
            if not path.is_file():
                raise InputError(
                    f"{path} is not there; say with --data (or LONGFOCUS_DATA) which folder holds the sets, see docs/evaluate.md"
                    + (", or give texts of your own: --text NAME=PATH." if name.endswith("/test") else ".")
                )
            try:
                with gzip.open(path, "rt", encoding="utf-8") as lines:
                    self._records[name] = [json.loads(line) for line in lines if line.strip()]
            except (OSError, EOFError, ValueError) as error:
                raise InputError(f"{path} is not gzip-compressed JSON lines: {error}") from error
        for number, record in enumerate(self._records[name], 1):
            lacking = [key for key in fields if not isinstance(record, dict) or key not in record]
            if lacking:
                raise InputError(f"{self.folder / name}.jsonl.gz, line {number}: no {', '.join(lacking)} in it.")
        return self._records[name]

    def has(self, name: str) -> bool:
        """Whether `SET/FILE` is there."""
        return (self.folder / f"{name}.jsonl.gz").is_file()
