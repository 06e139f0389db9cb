"""Held-out documents as the tokens that a model reads, and places in them, drawn evenly over the documents."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longfocus.data.tokens import leading_ids, stream_tokens
from longfocus.tasks.texts import Texts

_BLOCK_CHARS = 1 << 18


@dataclass(frozen=True)
class TokenDocument:
    """A document, or its beginning."""

    name: str
    """Unique in its set."""
    ids: Sequence[int]
    """With what the tokenizer puts in front of a text (BOS), as when it is read into a memory."""
    byte_at: np.ndarray
    """int64 (tokens + 1,): UTF-8 bytes of the text before each token, and before the end."""

    def __len__(self) -> int:
        return len(self.ids)


class TokenDocuments:
    """Tokenises each set once."""

    def __init__(self, tokenizer: Any, texts: Texts, up_to: int | None = None) -> None:
        """
        Args:
            tokenizer: a fast one, which tells where tokens start.
            up_to: tokens of each document that are wanted; None: all.
        """
        self.tokenizer, self.texts, self.up_to = tokenizer, texts, up_to
        self._found: dict[str, list[TokenDocument]] = {}

    def of(self, part: str) -> list[TokenDocument]:
        """The documents of a set, in its order.

        Raises:
            InputError: the set is not there, or the tokenizer is no fast one.
        """
        if part not in self._found:
            names: dict[str, int] = {}
            documents = []
            for name, text in self.texts.documents(part):
                name = Path(name).name if part in self.texts.own else name  # wherever they lie
                names[name] = names.get(name, 0) + 1
                unique = name if names[name] == 1 else f"{name} ({names[name]})"
                documents.append(self._tokenised(unique, text))
            self._found[part] = documents
        return self._found[part]

    def _tokenised(self, name: str, text: str) -> TokenDocument:
        leading = leading_ids(self.tokenizer)
        ids, starts, size = list(leading), [np.zeros(len(leading), dtype=np.int64)], 0
        blocks = (text[at : at + _BLOCK_CHARS] for at in range(0, len(text), _BLOCK_CHARS))
        for piece in stream_tokens(self.tokenizer, blocks):
            ids += piece.rows["id"].tolist()
            starts.append(piece.rows["byte"].astype(np.int64))
            size += len(piece.text.encode("utf-8"))
            if self.up_to is not None and len(ids) >= self.up_to:
                break
        byte_at = np.concatenate([*starts, [size]])
        if self.up_to is not None and len(ids) > self.up_to:
            ids, byte_at = ids[: self.up_to], byte_at[: self.up_to + 1]
        return TokenDocument(name, ids, byte_at)


def draw_evenly(places: Mapping[int, Sequence[int]], count: int, rng: random.Random) -> list[tuple[int, int]]:
    """(document, place) pairs without repeats: each document in turn gives one of its places at random.

    Args:
        places: document -> its places.
        count: how many at most; all where there are fewer.
    """
    left = {document: rng.sample(list(found), len(found)) for document, found in places.items()}
    drawn: list[tuple[int, int]] = []
    while len(drawn) < count and any(left.values()):
        drawn += [(document, found.pop()) for document, found in left.items() if found]
    return drawn[:count]
