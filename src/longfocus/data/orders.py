"""In which order documents are taken from one source: a rank's place in it, for each kind of source.

    order = order_of(source, number=0, seed=1, minimum=2, rank=0, world=1)
    order.draw()               # Piece(id, tokens, index)
    order.state_dict()         # a few numbers

A tokenised source is permuted anew in each epoch, a generated one counted upward, a streamed one taken as it comes.
Rank r of w takes places r, r + w, r + 2w, … of the order; ranks never meet within an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from longfocus.data.streamed import StreamedSource
from longfocus.errors import ConfigError

LONGEST_SEARCH_DOCUMENTS = 10_000
"""So many generated documents in a row that are too short mean that none will do."""


class FiniteSource(Protocol):
    """Documents that can be had by number; `TokenizedSource` is one."""

    name: str
    documents: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document (documents,)."""

    def document(self, index: int) -> np.ndarray:
        """Token ids (tokens,)."""

    def document_id(self, index: int) -> str:
        """What the document is called."""


class GeneratorSource(Protocol):
    """Documents for every number from 0 on, the same at every call; its `documents` is None.

    It may have a method `targets`: int64 (rows, window) of its tokens -> bool of that shape, those that a loss is taken on.
    """

    name: str
    documents: None

    def document(self, index: int) -> np.ndarray:
        """Token ids (tokens,)."""


AnySource = FiniteSource | GeneratorSource | StreamedSource


@dataclass(frozen=True)
class Piece:
    """A document of a source."""

    id: str
    tokens: np.ndarray
    index: int | None


def piece_of(source: Any, index: int) -> Piece:
    """Document number `index` of a finite or generated source."""
    name = source.document_id(index) if hasattr(source, "document_id") else f"{source.name}:{index}"
    return Piece(name, source.document(index), index)


class Order(Protocol):
    """A rank's place in a source."""

    skipped: int
    """Documents left out for being too short: of a tokenised source all, of others those met so far."""

    @property
    def epochs(self) -> float:
        """Passes through the source, of all ranks together; 0 for one without an end."""

    def draw(self) -> Piece:
        """The next document.

        Raises:
            ConfigError: none of a streamed or generated source is long enough.
        """

    def state_dict(self) -> dict[str, Any]:
        """The place; JSON-able."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place."""


def order_of(source: AnySource, *, number: int, seed: int, minimum: int, rank: int, world: int) -> Order:
    """The order of a source of any kind.

    Args:
        number: of the source in its mixture; with `seed` and the epoch it decides the permutation.
        minimum: tokens; shorter documents are left out. At least 1.

    Raises:
        ConfigError: no document of a tokenised source is so long.
    """
    if isinstance(source, StreamedSource):
        return _InOrder(source, minimum, rank, world)
    if source.documents is None:
        return _Counted(source, minimum, rank, world)
    return _Shuffled(source, (seed, number), minimum, rank, world)


class _Shuffled:
    """Places r, r + w, r + 2w, … of all epochs' orders, one after another: disjoint between ranks in each epoch."""

    def __init__(self, source: Any, seeds: tuple[int, int], minimum: int, rank: int, world: int) -> None:
        self._source, self._seeds, self._rank, self._world = source, seeds, rank, world
        self._long = np.flatnonzero(np.asarray(source.lengths) >= minimum)
        self.skipped = source.documents - len(self._long)
        if not len(self._long):
            raise ConfigError(
                f"minimum_tokens of source {source.name!r}: {minimum} given, but none of its {source.documents} documents is so long."
            )
        self._drawn = 0
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def epochs(self) -> float:
        return self._drawn * self._world / len(self._long)

    def draw(self) -> Piece:
        epoch, place = divmod(self._rank + self._world * self._drawn, len(self._long))
        self._drawn += 1
        if self._order is None or self._order[0] != epoch:
            # raw numbers of a bit generator are the same in every version of numpy; `permutation` is not promised to be
            numbers = np.random.PCG64(np.random.SeedSequence([*self._seeds, epoch])).random_raw(len(self._long))
            self._order = epoch, np.argsort(numbers, kind="stable")
        return piece_of(self._source, int(self._long[self._order[1][place]]))

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = int(state["drawn"])


class _Counted:
    """Generated documents number r, r + w, r + 2w, …"""

    epochs = 0.0

    def __init__(self, source: Any, minimum: int, rank: int, world: int) -> None:
        self._source, self._minimum, self._rank, self._world = source, minimum, rank, world
        self._drawn = self.skipped = 0

    def draw(self) -> Piece:
        for _ in range(LONGEST_SEARCH_DOCUMENTS):
            piece = piece_of(self._source, self._rank + self._world * self._drawn)
            self._drawn += 1
            if len(piece.tokens) >= self._minimum:
                return piece
            self.skipped += 1
        raise _none_long_enough(self._source.name, self._minimum)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn, self.skipped = int(state["drawn"]), int(state["skipped"])


class _InOrder:
    """Documents of a streamed source, counted through all passes: every w-th from r on, the others not tokenised."""

    def __init__(self, source: StreamedSource, minimum: int, rank: int, world: int) -> None:
        self._source, self._minimum, self._rank, self._world = source, minimum, rank, world
        self._seen = self._passes = self.skipped = 0

    @property
    def epochs(self) -> float:
        return float(self._passes)

    def draw(self) -> Piece:
        last_pass = self._passes + self._world  # by then each document was this rank's turn
        while self._passes <= last_pass:
            if self._seen % self._world != self._rank:
                found: Any = self._source.skip_document()
            else:
                found = self._source.next_document()
            if not found:
                self._passes += 1
                continue
            self._seen += 1
            if found is not True and len(found[1]) >= self._minimum:
                return Piece(id=found[0], tokens=found[1], index=None)
            self.skipped += found is not True and not self._passes
        raise _none_long_enough(self._source.name, self._minimum)

    def state_dict(self) -> dict[str, Any]:
        state = {"seen": self._seen, "passes": self._passes, "skipped": self.skipped}
        return {**state, "source": self._source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen, self._passes, self.skipped = (int(state[name]) for name in ("seen", "passes", "skipped"))
        self._source.load_state_dict(state["source"])


def _none_long_enough(name: str, minimum: int) -> ConfigError:
    return ConfigError(f"minimum_tokens of source {name!r}: {minimum} given, but no document of that length comes.")
