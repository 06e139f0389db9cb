"""Training texts, one document after another: files, folders, JSON Lines, parquet, code, data sets of the hub.

    spec = SourceSpec("books", kind="jsonl", paths=("books/train.jsonl.gz",))
    for document in Corpus(spec):
        document.id, document.text

What one document is: a text file; a record of JSON Lines or parquet; a repository (see repositories.py); a row of a
hub data set. Files are read in a stream and a document is whole in RAM, never a file of many. A `Corpus` keeps its
place, so that reading can stop and go on elsewhere without reading again what came before in other files.

Texts come as they are: nothing is stripped, normalised or deduplicated. What cannot be a document (an empty record,
a binary file inside a folder) is passed over and reported; a file that the user named, or a damaged one, is an error.
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from longfocus.data.documents import Source
from longfocus.data.repositories import join_files, repositories
from longfocus.data.source_spec import SourceFile, SourceSpec, list_files
from longfocus.errors import InputError

SKIPPED_KEPT = 20
"""Reasons that are kept of documents passed over; all are counted."""
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class TextDocument:
    """One document of a source."""

    id: str
    text: str
    bytes_read: int
    """Bytes of the source read by now in this pass (of the files as they lie, compressed or not)."""


@dataclass(frozen=True)
class _Skipped:
    name: str
    reason: str


class Corpus:
    """The documents of a source, from its place on; a finished pass leaves the place at the beginning.

    Raises:
        InputError: a path is missing or unreadable, or nothing is there to read; while iterating also: a file is
            damaged, a record has no such field, a package is missing or the hub is out of reach, no document at all.
    """

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        self.files = list_files(spec)
        self.bytes_total = sum(file.size_bytes for file in self.files) if spec.kind != "hub" else None
        self.skipped: list[tuple[str, str]] = []
        """(name, reason) of the first that were passed over."""
        self.skipped_count = 0
        self._units = repositories(self.files) if spec.kind == "code" else [(file.name, [file]) for file in self.files]
        self._unit = self._record = 0
        self._hub_state: dict[str, Any] | None = None
        self._hub: Any = None

    def __iter__(self) -> Iterator[TextDocument]:
        from_start = (self._unit, self._record) == (0, 0)
        found = 0
        done = sum(file.size_bytes for _, files in self._units[: self._unit] for file in files)
        units = [("", [])] if self.spec.kind == "hub" else self._units
        while self._unit < len(units):
            name, files = units[self._unit]
            for record, read in self._documents(name, files, self._record, done):
                self._record = record
                if isinstance(read, _Skipped):
                    self._note(read)
                else:
                    found += 1
                    yield read
            self._unit, self._record = self._unit + 1, 0
            done += sum(file.size_bytes for file in files)
        self._unit = 0
        self._hub = self._hub_state = None
        if from_start and not found:
            reasons = "; ".join(f"{name} {reason}" for name, reason in self.skipped[:3])
            where = self.spec.dataset or ", ".join(self.spec.paths)
            raise InputError(
                f"Source {self.spec.name!r} has no document: nothing to read in {where}"
                + (f" ({reasons})." if reasons else ".")
            )

    def state_dict(self) -> dict[str, Any]:
        """The place after the last document given out; JSON-ready."""
        hub = self._hub.state_dict() if hasattr(self._hub, "state_dict") else self._hub_state
        return {"unit": self._unit, "record": self._record, "hub": hub}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place; for iterations begun afterwards."""
        self._unit, self._record, self._hub_state = int(state["unit"]), int(state["record"]), state["hub"]
        self._hub = None

    def _note(self, skipped: _Skipped) -> None:
        self.skipped_count += 1
        if len(self.skipped) < SKIPPED_KEPT:
            self.skipped.append((skipped.name, skipped.reason))

    def _documents(
        self, name: str, files: list[SourceFile], start: int, done: int
    ) -> Iterator[tuple[int, TextDocument | _Skipped]]:
        """Documents of a unit from record `start` on, each with the number of records consumed by then."""
        kind = self.spec.kind
        if kind == "hub":
            yield from self._hub_rows(start)
        elif kind == "jsonl":
            yield from self._lines(files[0], start, done)
        elif kind == "parquet":
            yield from self._parquet_rows(files[0], start, done)
        elif start == 0 and kind == "text":
            read = self._text(files[0])
            yield 1, read if isinstance(read, _Skipped) else TextDocument(name, read, done + files[0].size_bytes)
        elif start == 0:
            texts = []
            for file in files:
                read = self._text(file)
                if isinstance(read, _Skipped):
                    yield 0, read
                else:
                    texts.append((file, read))
            if texts:
                yield 1, TextDocument(name, join_files(texts), done + sum(file.size_bytes for file in files))

    def _text(self, file: SourceFile) -> str | _Skipped:
        kind = "pdf" if file.path.suffix.lower() == ".pdf" and self.spec.kind == "text" else "text"
        try:
            text = "".join(block for _, block in Source(file.name, kind, file.path, self.spec.encoding).blocks())
            if not text.strip():
                raise InputError(f"{file.name} is empty; there is nothing to read.")
        except InputError as error:
            if file.root is None:
                raise
            return _Skipped(file.name, str(error).removeprefix(f"{file.name} ").rstrip("."))
        return text

    def _lines(self, file: SourceFile, start: int, done: int) -> Iterator[tuple[int, TextDocument | _Skipped]]:
        number = 0
        try:
            with file.path.open("rb") as raw:
                packed = file.path.suffix == ".gz"
                with gzip.GzipFile(fileobj=raw) if packed else raw as lines:
                    for number, line in enumerate(lines, 1):
                        if number > start and line.strip():
                            yield number, self._line(file, number, line, done + raw.tell())
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"{file.name} cannot be read beyond line {number}: {getattr(error, 'strerror', None) or error}. "
                "Is it a whole file?"
            ) from error

    def _line(self, file: SourceFile, number: int, line: bytes, bytes_read: int) -> TextDocument | _Skipped:
        where = f"{file.name}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} is not JSON ({error}); expected one JSON object a line.") from error
        if not isinstance(record, dict):
            raise InputError(f"{where} is a {type(record).__name__}; expected a JSON object with the text in a field.")
        return self._record_document(record, f"{file.name}:{number}", where, bytes_read)

    def _parquet_rows(self, file: SourceFile, start: int, done: int) -> Iterator[tuple[int, TextDocument | _Skipped]]:
        why = f"{file.name} is a parquet file"
        parquet = needed_package("pyarrow.parquet", "pyarrow", why)
        failures = (OSError, needed_package("pyarrow", "pyarrow", why).ArrowException)
        try:
            with parquet.ParquetFile(file.path, memory_map=True) as table:
                rows = max(1, table.metadata.num_rows)
                wanted = [
                    name for name in (self.spec.text_field, self.spec.id_field) if name in table.schema_arrow.names
                ]
                if self.spec.text_field not in wanted:
                    raise self._no_field(file.name, table.schema_arrow.names)
                number = 0
                for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=wanted):
                    if number + len(batch) <= start:
                        number += len(batch)
                        continue
                    for record in batch.to_pylist():
                        number += 1
                        if number > start:
                            bytes_read = done + file.size_bytes * number // rows
                            name = f"{file.name}:{number}"
                            yield number, self._record_document(record, name, name, bytes_read)
        except failures as error:
            raise InputError(f"{file.name} is not a readable parquet file ({error}).") from error

    def _hub_rows(self, start: int) -> Iterator[tuple[int, TextDocument | _Skipped]]:
        self._hub = open_hub(self.spec)
        if self._hub_state is not None:
            self._hub.load_state_dict(self._hub_state)
        rows = iter(self._hub if self._hub_state is not None or not start else self._hub.skip(start))
        number, size = start, 0
        while True:
            try:
                record = next(rows)
            except StopIteration:
                return
            except Exception as error:  # whatever the network, the decoder and the set's own code can raise
                raise InputError(
                    f"The data set {self.spec.dataset!r} cannot be read beyond row {number} ({error})."
                ) from error
            number += 1
            name = f"{self.spec.dataset}:{number}"
            read = self._record_document(record, name, name, size)
            if isinstance(read, TextDocument):
                size += len(read.text.encode("utf-8"))
                read = dataclasses.replace(read, bytes_read=size)
            yield number, read

    def _record_document(
        self, record: Mapping[str, Any], name: str, where: str, bytes_read: int
    ) -> TextDocument | _Skipped:
        if self.spec.text_field not in record:
            raise self._no_field(where, list(record))
        text = record[self.spec.text_field]
        if text is None or text == "":
            return _Skipped(name, "has no text")
        if not isinstance(text, str):
            raise InputError(
                f"{where}: field {self.spec.text_field!r} is a {type(text).__name__}; expected a text. "
                "Name another field with text_field."
            )
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                return _Skipped(name, "holds halves of characters (lone surrogates)")
        given = record.get(self.spec.id_field)
        return TextDocument(str(given) if given not in (None, "") else name, text, bytes_read)

    def _no_field(self, where: str, names: list[str]) -> InputError:
        return InputError(
            f"{where} has no field {self.spec.text_field!r}; it has {', '.join(names) or 'none'}. "
            "Name the field of the text with text_field."
        )


def open_hub(spec: SourceSpec) -> Any:
    """The streaming data set of a `hub` source.

    Raises:
        InputError: `datasets` is not installed, the hub is out of reach, or there is no such set, subset or split.
    """
    datasets = needed_package("datasets", "datasets", f"Source {spec.name!r} is a data set of the hub")
    try:
        return datasets.load_dataset(
            spec.dataset, spec.subset, split=spec.split, revision=spec.revision, streaming=True
        )
    except Exception as error:  # of the network, of the hub, or of the set's own description
        advice = "Check its name, subset and split"
        if isinstance(error, ConnectionError) or datasets.config.HF_HUB_OFFLINE:
            advice = (
                "The hub is out of reach (offline, or HF_HUB_OFFLINE is set): connect, or download the set "
                "elsewhere and name its files with kind 'jsonl' or 'parquet'"
            )
        raise InputError(
            f"Source {spec.name!r}: the data set {spec.dataset!r} cannot be opened ({error}). {advice}."
        ) from error


def needed_package(module: str, package: str, why: str) -> Any:
    """Import a package that only some sources need.

    Raises:
        InputError: it is not installed; names the command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{why}, which needs the package {package}. Install it with: pip install {package}") from error
