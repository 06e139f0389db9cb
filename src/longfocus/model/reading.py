"""Reading documents into a memory, some windows at a time.

Each document is encoded by itself: its windows consult the memory of that document only (the paper's
single-document setting), so that the order of documents does not matter, memories can be merged, and one
document costs the same in a large memory as in a small one. What a pass has read (`reading_pass`)
is committed before the next begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longfocus.config import FocusConfig
from longfocus.data.documents import Source
from longfocus.data.tokens import leading_ids, stream_tokens
from longfocus.memory.asked import AskedMemory
from longfocus.memory.documents import TOKEN_DTYPE, Document
from longfocus.memory.memory import Memory
from longfocus.model.cache import FocusCache
from longfocus.model.focused import FocusedModel
from longfocus.model.reading_pass import pass_tokens, read_windows


@dataclass(frozen=True)
class Progress:
    """Where reading stands, after a pass."""

    document: Document
    tokens: int
    """Tokens of this pass."""
    source_bytes: int
    """Bytes of the source that were read so far."""


class Reader:
    """Reads sources into a memory with one model and tokenizer."""

    def __init__(self, model: FocusedModel, tokenizer: Any, memory: Memory) -> None:
        """
        Raises:
            MemoryMismatchError: the memory was made by another model or with other options.
        """
        memory.check(model, tokenizer)
        self.model, self.tokenizer, self.memory = model, tokenizer, memory

    def read(
        self, source: Source, progress: Callable[[Progress], None] | None = None, *, replace: bool = False
    ) -> Document:
        """Read a source to its end, committing each pass.

        A document whose reading was interrupted goes on where it stopped, if its text still begins the same.

        Args:
            replace: the commit that makes the document whole removes all others of the same path, so that a kill leaves what
                was remembered of the file before, or what it holds now, and never neither.

        Raises:
            InputError: the source cannot be read as text.
            MemoryWriteError: the disk refused; what was committed before is intact.
        """
        memory = self.memory
        fields = source.fields  # as it is now: a file that changes while it is read counts as changed
        document = self._interrupted(source)
        skip = document.tokens if document is not None else 0
        if document is None:
            document = memory.begin_document(source.name, **fields)
        config = self.model.focus.config
        cache = FocusCache(self.model.focus, own=memory.store, document_start=document.start)
        read_bytes = 0

        def blocks() -> Iterator[str]:
            nonlocal read_bytes
            for done, block in source.blocks():
                read_bytes = done
                yield block

        pieces = _with_leading(leading_ids(self.tokenizer), stream_tokens(self.tokenizer, blocks()))
        try:
            parts = _parts(pieces, _sizes(config, skip))
            part = next(parts, None)
            while part is not None:
                (rows, text), part = part, next(parts, None)
                ending: dict[str, Any] = {}
                if part is None:
                    ending = {**fields, "pages": tuple(source.pages) or None, "complete": True}
                    ending["removing"] = _others(memory, document) if replace else ()
                if skip:  # in the memory already
                    skip -= len(rows)
                    if ending:
                        document = memory.commit_window(document, rows[:0], b"", 0, **ending)
                    continue
                ids = torch.from_numpy(rows["id"].astype(np.int64)).unsqueeze(0)
                read_windows(self.model, ids, cache)
                document = memory.commit_window(document, rows, text.encode("utf-8"), len(text), **ending)
                if progress is not None:
                    progress(Progress(document, len(rows), read_bytes))
            return document
        except BaseException:
            memory.rollback()
            if source.pages and document.tokens and not document.complete:
                memory.commit_window(document, np.zeros(0, TOKEN_DTYPE), b"", 0, pages=tuple(source.pages))
            raise

    def _interrupted(self, source: Source) -> Document | None:
        """The memory's last document, if it is the beginning of this source and can be continued."""
        documents = self.memory.documents
        if not documents or self.model.focus.config.overlap:
            return None
        last = documents[-1]
        path = source.fields.get("path")
        window = self.model.focus.config.window_tokens
        if last.complete or path is None or last.path != path or last.tokens == 0 or not self.memory.can_continue(last):
            return None
        known = self.memory.token_ids(last.start, last.stop)
        at, more = 0, False
        blocks = (block for _, block in source.blocks())
        for rows, _ in _with_leading(leading_ids(self.tokenizer), stream_tokens(self.tokenizer, blocks)):
            take = min(len(rows), len(known) - at)
            if (rows["id"][:take] != known[at : at + take]).any():
                return None
            at += take
            more = take < len(rows)
            if more:
                break
        if at < len(known) or (more and len(known) % window):  # a short last window ends the text it was read from
            return None
        return last


def _others(memory: Memory, document: Document) -> list[Document]:
    """Documents that were read from the same file."""
    same = (other for other in memory.documents if other.path is not None and other.path == document.path)
    return [other for other in same if other.id != document.id]


def not_remembered(memory: AskedMemory, sources: Sequence[Source]) -> list[Source]:
    """The sources that the memory does not hold whole and unchanged (same path, size and time of change)."""
    keys = ("path", "source_bytes", "source_mtime_ns")
    known = {
        tuple(getattr(document, key) for key in keys)
        for document in memory.documents
        if document.complete and document.path is not None
    }
    return [source for source in sources if tuple(source.fields.get(key) for key in keys) not in known]


def read_ids(model: FocusedModel, ids: Sequence[int] | torch.Tensor, memory: Memory, name: str = "tokens") -> Document:
    """Read one text that is given as token ids; nothing is added to them, and sources have no text.

    Args:
        ids: int (N,) or (1, N).
    """
    memory.check(model)
    tokens = torch.as_tensor(ids).reshape(-1)
    document = memory.begin_document(name, kind="ids")
    config = model.focus.config
    cache = FocusCache(model.focus, own=memory.store, document_start=document.start)
    at = 0
    try:
        for size in _sizes(config):
            if at >= len(tokens):
                break
            part = tokens[at : at + size]
            read_windows(model, part.unsqueeze(0), cache)
            rows = np.zeros(len(part), dtype=TOKEN_DTYPE)
            rows["id"] = part.cpu().numpy()
            document = memory.commit_window(document, rows, b"", 0)
            at += len(part)
        return memory.commit_window(document, np.zeros(0, TOKEN_DTYPE), b"", 0, complete=True)
    except BaseException:
        memory.rollback()
        raise


def _with_leading(leading: list[int], pieces: Iterator[Any]) -> Iterator[tuple[np.ndarray, str]]:
    first = True
    for piece in pieces:
        rows = piece.rows
        if first and leading:
            head = np.zeros(len(leading), dtype=TOKEN_DTYPE)
            head["id"] = leading
            rows = np.concatenate((head, rows))
        first = False
        yield rows, piece.text


def _sizes(config: FocusConfig, read: int = 0) -> Iterator[int]:
    """Tokens of each part that is read and committed at once: what was read before, as one, and then pass by pass."""
    if read:
        yield read
    while True:
        size = pass_tokens(config, read)
        yield size
        read += size


def _parts(pieces: Iterator[tuple[np.ndarray, str]], sizes: Iterator[int]) -> Iterator[tuple[np.ndarray, str]]:
    """Cut the stream into parts of these sizes, each with the text up to the next."""
    rows, text, base = np.zeros(0, dtype=TOKEN_DTYPE), "", 0  # `base`: characters before `text`
    size = next(sizes)
    for new, new_text in pieces:
        rows, text = np.concatenate((rows, new)), text + new_text
        while len(rows) > size:  # one more token than a part, so that its end in the text is known
            end = int(rows["char"][size]) - base
            yield rows[:size], text[:end]
            rows, text, base, size = rows[size:], text[end:], base + end, next(sizes)
    if len(rows) or text:
        yield rows, text
