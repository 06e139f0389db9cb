"""Tokens of a long text, in a stream, as if the tokenizer had been given the whole text at once.

A block is tokenised together with some text before and after it, since the first and last tokens of a piece
depend on where it was cut. Tokens near the end of a block are left for the next one; the next block must
agree with the tokens before its own first one, or it is tokenised again with more text before it. So the
result does not depend on block sizes, nor on where the model's windows fall. (A text without any place where
tokens could be agreed upon within HISTORY_CHARS, such as a megabyte of one repeated letter, may be cut once
per block where the tokenizer would not have.)

Documents are data: text that spells a special token is tokenised as ordinary characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from longfocus.errors import InputError
from longfocus.memory.documents import TOKEN_DTYPE

BLOCK_CHARS = 1 << 16
MARGIN_CHARS = 1 << 9
HISTORY_CHARS = 1 << 14
_AGREEING_TOKENS = 8


@dataclass
class TokenPiece:
    """Consecutive tokens and the text from the first one's start to the next piece's."""

    rows: np.ndarray
    """TOKEN_DTYPE (n,)."""
    text: str


def stream_tokens(
    tokenizer: Any,
    blocks: Iterable[str],
    *,
    block_chars: int = BLOCK_CHARS,
    margin_chars: int = MARGIN_CHARS,
    history_chars: int = HISTORY_CHARS,
) -> Iterator[TokenPiece]:
    """Tokenise a text that arrives in blocks.

    Args:
        tokenizer: a fast `transformers` tokenizer.
        blocks: the text, in pieces of any size.
        block_chars, margin_chars, history_chars: sizes of the working buffer.

    Yields:
        Pieces whose texts join to the whole text and whose ids are those of the whole text.

    Raises:
        InputError: the tokenizer is not a fast one, which alone tells where tokens start.
    """
    stream = _Stream(tokenizer, margin_chars, history_chars)
    pending: list[str] = []
    size = 0
    for block in blocks:
        pending.append(block)
        size += len(block)
        if size >= block_chars:
            yield from stream.feed("".join(pending), last=False)
            pending, size = [], 0
    yield from stream.feed("".join(pending), last=True)


def leading_ids(tokenizer: Any) -> list[int]:
    """Special tokens that the tokenizer puts before a text (for instance BOS)."""
    with_special = tokenizer("a", add_special_tokens=True)["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    for count in range(len(with_special) - len(plain) + 1):
        if with_special[count : count + len(plain)] == plain:
            return list(with_special[:count])
    return []


_COPIES: list[tuple[Any, int, Any]] = []  # (tokenizer, its vocabulary's size, copy), newest last


def _private_copy(tokenizer: Any) -> Any:
    """The tokenizer's backend, copied, as documents need it: the caller's may pad, truncate, or be in use elsewhere."""
    backend = tokenizer.backend_tokenizer
    size = backend.get_vocab_size()
    for known, known_size, copy in _COPIES:
        if known is tokenizer and known_size == size:
            return copy
    copy = backend.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = True
    del _COPIES[:-1]  # one tokenizer is in use at a time, two when models are compared
    _COPIES.append((tokenizer, size, copy))
    return copy


class _Stream:
    def __init__(self, tokenizer: Any, margin: int, history: int) -> None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise InputError(
                f"{type(tokenizer).__name__} does not tell where tokens start in the text; a fast tokenizer is needed."
            )
        self.backend = _private_copy(tokenizer)
        self.margin, self.history = margin, history
        self.buffer = ""  # text from `base` on
        self.base = 0  # characters before the buffer
        self.done = 0  # characters whose tokens were given out
        self.done_bytes = 0
        self.tail: list[tuple[int, int]] = []  # (start, id) of the last tokens given out

    def feed(self, text: str, *, last: bool) -> Iterator[TokenPiece]:
        self.buffer += text
        start = self.done - self.base
        if not last and len(self.buffer) - start < 2 * self.margin:
            return
        if start >= len(self.buffer):
            return
        ids, starts = self._agreed(start)
        stop = len(ids) if last else self._stop(ids, starts, start)
        if stop == 0:
            return
        end = len(self.buffer) if stop == len(ids) else int(starts[stop])
        piece = self.buffer[start:end]
        rows = np.zeros(stop, dtype=TOKEN_DTYPE)
        rows["id"] = ids[:stop]
        rows["char"] = starts[:stop] + self.base
        rows["byte"] = _byte_offsets(piece, starts[:stop] - start) + self.done_bytes
        self.done += len(piece)
        self.done_bytes += len(piece.encode("utf-8"))
        recent = zip(rows["char"][-_AGREEING_TOKENS:], rows["id"][-_AGREEING_TOKENS:], strict=True)
        self.tail = [*self.tail, *((int(char), int(token)) for char, token in recent)][-_AGREEING_TOKENS:]
        cut = max(0, self.done - self.base - self.history)
        self.buffer, self.base = self.buffer[cut:], self.base + cut
        yield TokenPiece(rows, piece)

    def _agreed(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and buffer positions of the tokens from `start` on, tokenised with enough text before."""
        before = self.margin
        while True:
            low = max(0, start - before)
            ids, starts = self._encode(self.buffer[low:])
            starts = starts + low
            first = int(np.searchsorted(starts, start, side="left"))
            if self._agrees(ids, starts, first, start, whole=low == 0 and self.base == 0):
                return ids[first:], starts[first:]
            if low == 0:
                ids, starts = self._encode(self.buffer[start:])
                return ids, starts + start
            before *= 2

    def _agrees(self, ids: np.ndarray, starts: np.ndarray, first: int, start: int, *, whole: bool) -> bool:
        if first >= len(ids):
            return False
        if starts[first] != start and not (start == 0 and self.base == 0):
            return False
        known = self.tail
        if not whole and first < len(known):
            return False
        low = max(0, first - len(known))
        mine = [
            (int(char) + self.base, int(token)) for char, token in zip(starts[low:first], ids[low:first], strict=True)
        ]
        return mine == known[len(known) - len(mine) :]

    def _stop(self, ids: np.ndarray, starts: np.ndarray, start: int) -> int:
        """How many tokens to give out: up to a place near the end where no token reaches across."""
        limit = len(self.buffer) - self.margin
        count = int(np.searchsorted(starts, limit, side="right"))
        fallback = 0
        for index in range(min(count, len(ids) - 1), 0, -1):
            at = int(starts[index])
            if at <= start or at == int(starts[index - 1]):
                continue  # several tokens of one character
            fallback = fallback or index
            if self.buffer[at - 1] == "\n" and not self.buffer[at].isspace():
                return index
            if limit - at > self.margin:
                break
        return fallback

    def _encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        encoding = self.backend.encode(text, add_special_tokens=False)
        starts = np.array([offset[0] for offset in encoding.offsets], dtype=np.int64)
        return np.array(encoding.ids, dtype=np.int64), np.maximum.accumulate(starts) if len(starts) else starts


def _byte_offsets(text: str, chars: np.ndarray) -> np.ndarray:
    """UTF-8 byte at which each character position of the text lies."""
    if text.isascii():
        return chars
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    ends = np.concatenate(([0], np.cumsum(widths)))
    result: np.ndarray = ends[np.clip(chars, 0, len(text))]
    return result
