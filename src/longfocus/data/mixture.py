"""An endless, deterministic stream of documents from several sources, by share of tokens.

The next document comes from the source with the fewest delivered tokens in relation to its share, so at any time no
source is off by more than about one document, however different their lengths. A document is delivered whole.

    mixture = Mixture([books, code], [0.6, 0.4], seed=1, minimum_tokens=[0, 2048], join_below=512, separator_ids=[0])
    mixture.next_document()        # Drawn(source=0, ids=("pg1342",), tokens=...)

Within a tokenised source documents come in a new random order in each epoch; generated documents (a source without an
end) are counted upward; a streamed source keeps its own order. With several processes, rank r of w takes every w-th
place of each order, from r on; all apply the same rule to what they themselves delivered.

`state_dict` is a small JSON-able dict, since an order is drawn again from (seed, source, epoch) and not stored.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longfocus.data.orders import AnySource, Piece, order_of, piece_of
from longfocus.errors import ConfigError

VERSION = 1


@dataclass(frozen=True)
class Drawn:
    """A document of the mixture: one of a source, or several short ones joined."""

    source: int
    """Number of the source."""
    ids: tuple[str, ...]
    """Of the documents in it, as their source names them."""
    tokens: np.ndarray
    """int64 (tokens,), separators included."""
    indices: tuple[int, ...] | None
    """Numbers of the documents in their source; None for a streamed source."""


@dataclass(frozen=True)
class SourceReport:
    """What a source has delivered so far, on this rank."""

    name: str
    share_asked: float
    share_delivered: float
    tokens: int
    documents: int
    epochs: float
    """Passes through the source, of all ranks together; 0 for one without an end."""
    skipped: int
    """Documents shorter than the source's minimum: of a tokenised source all, of others those met so far."""


class Mixture:
    """See the module.

    Args:
        sources: tokenised, streamed or generated; names differ.
        shares: of tokens, above 0; only their ratio counts.
        seed: of the orders.
        minimum_tokens: per source; shorter documents are left out.
        join_below: a document shorter than so many tokens is joined with the next ones of its source until it is not.
        separator_ids: put between joined documents.
        leading_ids: put before each delivered document (BOS, where the model's texts begin with it).
        rank, world: this process and their number.

    Raises:
        ConfigError: numbers do not fit each other or are out of range, or a source has no document of its minimum.
    """

    def __init__(
        self,
        sources: Sequence[AnySource],
        shares: Sequence[float],
        *,
        seed: int,
        minimum_tokens: Sequence[int],
        join_below: int,
        separator_ids: Sequence[int],
        leading_ids: Sequence[int] = (),
        rank: int = 0,
        world: int = 1,
    ) -> None:
        names = [source.name for source in sources]
        _check(names, shares, minimum_tokens, seed, join_below, rank, world)
        self.sources = list(sources)
        self.shares = [share / sum(shares) for share in shares]
        self.rank, self.world = rank, world
        self._join_below = join_below
        self._separator = np.asarray(separator_ids, dtype=np.int64)
        self._leading = np.asarray(leading_ids, dtype=np.int64)
        for option, ids in (("separator_ids", separator_ids), ("leading_ids", leading_ids)):
            if any(token < 0 for token in ids):
                raise ConfigError(f"{option}: {list(ids)} given, expected token ids.")
        self._identity: dict[str, Any] = {
            "sources": [[source.name, source.documents, getattr(source, "digest", None)] for source in sources],
            "shares": self.shares,
            "seed": seed,
            "minimum_tokens": list(minimum_tokens),
            "join_below": join_below,
            "separator_ids": self._separator.tolist(),
            "leading_ids": self._leading.tolist(),
            "rank": rank,
            "world": world,
        }
        self._orders = [
            order_of(source, number=number, seed=seed, minimum=max(1, minimum), rank=rank, world=world)
            for number, (source, minimum) in enumerate(zip(sources, minimum_tokens, strict=True))
        ]
        self._tokens = [0] * len(sources)
        self._documents = [0] * len(sources)

    def next_document(self) -> Drawn:
        """The next document.

        Raises:
            InputError: a streamed source cannot be read.
            ConfigError: a streamed or generated source has no document of its minimum.
        """
        source = min(range(len(self.sources)), key=lambda number: (self._tokens[number] / self.shares[number], number))
        order = self._orders[source]
        pieces = [order.draw()]
        size = len(pieces[0].tokens)
        while size < self._join_below:
            pieces.append(order.draw())
            size += len(self._separator) + len(pieces[-1].tokens)
        drawn = self._drawn(source, pieces)
        self._tokens[source] += len(drawn.tokens)
        self._documents[source] += len(pieces)
        return drawn

    def _drawn(self, source: int, pieces: list[Piece]) -> Drawn:
        parts = [self._leading, pieces[0].tokens]
        for piece in pieces[1:]:
            parts += [self._separator, piece.tokens]
        indices = None if pieces[0].index is None else tuple(int(piece.index or 0) for piece in pieces)
        return Drawn(source, tuple(piece.id for piece in pieces), np.concatenate(parts, dtype=np.int64), indices)

    def remember(self, drawn: Drawn) -> dict[str, Any]:
        """What `recall` needs to find a drawn document again, JSON-able: its numbers, or of a streamed one its tokens."""
        if drawn.indices is not None:
            return {"source": drawn.source, "indices": list(drawn.indices)}
        packed = base64.b64encode(zlib.compress(drawn.tokens.astype("<u4").tobytes())).decode()
        return {"source": drawn.source, "ids": list(drawn.ids), "tokens": packed}

    def recall(self, record: Mapping[str, Any]) -> Drawn:
        """The document that was remembered; the stream does not move."""
        source = int(record["source"])
        if "indices" in record:
            return self._drawn(source, [piece_of(self.sources[source], int(index)) for index in record["indices"]])
        tokens = np.frombuffer(zlib.decompress(base64.b64decode(record["tokens"])), dtype="<u4").astype(np.int64)
        return Drawn(source, tuple(record["ids"]), tokens, None)

    def report(self) -> list[SourceReport]:
        """Per source, in order."""
        total = max(1, sum(self._tokens))
        return [
            SourceReport(
                name=source.name,
                share_asked=self.shares[number],
                share_delivered=self._tokens[number] / total,
                tokens=self._tokens[number],
                documents=self._documents[number],
                epochs=self._orders[number].epochs,
                skipped=self._orders[number].skipped,
            )
            for number, source in enumerate(self.sources)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next; JSON-able."""
        return {
            "version": VERSION,
            "mixture": self._identity,
            "tokens": list(self._tokens),
            "documents": list(self._documents),
            "orders": [order.state_dict() for order in self._orders],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the state was taken.

        Raises:
            ConfigError: it is of another version or another mixture (sources, shares, seed, …); names what differs.
        """
        if state.get("version") != VERSION:
            raise ConfigError(f"The saved data position has version {state.get('version')!r}, expected {VERSION}.")
        for field, mine in self._identity.items():
            if state["mixture"].get(field) != mine:
                raise ConfigError(
                    f"The saved data position was made with {field} {state['mixture'].get(field)!r}, but {mine!r} is "
                    "given now. Go on with the same data and settings, or start a new run."
                )
        self._tokens = list(map(int, state["tokens"]))
        self._documents = list(map(int, state["documents"]))
        for order, saved in zip(self._orders, state["orders"], strict=True):
            order.load_state_dict(saved)


def _check(
    names: list[str],
    shares: Sequence[float],
    minimum_tokens: Sequence[int],
    seed: int,
    join_below: int,
    rank: int,
    world: int,
) -> None:
    if not names or not len(names) == len(shares) == len(minimum_tokens):
        raise ConfigError(
            f"{len(names)} sources, {len(shares)} shares and {len(minimum_tokens)} minimum_tokens given, "
            "expected one share and one minimum for each of one or more sources."
        )
    if len(set(names)) != len(names):
        raise ConfigError(f"sources: the names {names} are not all different.")
    for name, share, minimum in zip(names, shares, minimum_tokens, strict=True):
        if not 0 < share < float("inf"):
            raise ConfigError(f"share of source {name!r}: {share!r} given, expected a number above 0.")
        if minimum < 0:
            raise ConfigError(f"minimum_tokens of source {name!r}: {minimum} given, expected 0 or more.")
    for option, value in (("seed", seed), ("join_below", join_below)):
        if value < 0:
            raise ConfigError(f"{option}: {value} given, expected 0 or more.")
    if not 0 <= rank < world:
        raise ConfigError(f"rank: {rank} of {world} given, expected a number from 0 to world - 1.")
