"""A tokenised source whose long documents are cut into pieces, for variety in a short run.

A document keeps its place in the batch until it ends: a novel of 200,000 tokens holds one for hundreds of steps, and a
run of a million tokens sees two of them. Cut into pieces of some windows, it sees a bit of all. What stands more than a
piece apart is then never seen together; a long run with large memories wants whole documents.
"""

from __future__ import annotations

import numpy as np

from longfocus.data.orders import FiniteSource


class Pieces:
    """The same tokens as documents of at most so many tokens; nothing is copied.

    All pieces of a document but its last have exactly so many tokens: with `minimum_tokens` of that number, every document
    of a run fills whole steps. Their ids say which they are: `pg1342[2/14]`.
    """

    def __init__(self, source: FiniteSource, tokens: int) -> None:
        """
        Args:
            tokens: longest piece, at least 1.
        """
        assert tokens >= 1
        self.source, self.name = source, source.name
        self.digest = f"{getattr(source, 'digest', None)} in pieces of {tokens}"
        counts = -(-source.lengths // tokens)
        self._first = np.concatenate([[0], np.cumsum(counts)])
        self._counts, self._tokens = counts, tokens
        self.documents = int(self._first[-1])

    @property
    def tokens(self) -> int:
        """All of them."""
        return int(self.source.lengths.sum())

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each piece, int64."""
        bounds = [self._bounds(index) for index in range(self.documents)]
        return np.array([stop - start for _, start, stop, _ in bounds], dtype=np.int64)

    def document(self, index: int) -> np.ndarray:
        """Token ids of a piece: a view."""
        document, start, stop, _ = self._bounds(index)
        return self.source.document(document)[start:stop]

    def document_id(self, index: int) -> str:
        """The document's id, and which piece of it this is."""
        document, _, _, number = self._bounds(index)
        return f"{self.source.document_id(document)}[{number + 1}/{self._counts[document]}]"

    def _bounds(self, index: int) -> tuple[int, int, int, int]:
        """(document, first token, end, number of the piece)."""
        assert 0 <= index < self.documents
        document = int(np.searchsorted(self._first, index, side="right")) - 1
        number = index - int(self._first[document])
        length = int(self.source.lengths[document])
        return document, number * self._tokens, min(length, (number + 1) * self._tokens), number
