"""Which row sees which windows: from the documents' places in a batch to a table rows x contexts. Pure numbers.

A batch has one window a row. Row r may see whole other rows as additional context:
    positives   earlier windows of the same document, the nearest first
    negatives   windows of other documents
never a later window of its document, never itself, never a window twice. Documents are told apart by a
number that is unique to the document, not by their place: one that ended and the next one in the same place
are different documents.

With several memory layers, what a row sees carries what that row saw in the layer below. So that nothing comes back to
where it came from, and no future with it, rows stand in an order and see only rows before them: windows that stand
earlier in their places, and of windows in the same position those of places that a draw put before.

Letters of the paper (arXiv 2307.03170, section 3.2): d documents are seen, 1 positive and d - 1 negatives,
w windows of each. LongLLaMA's mixed shares (appendix A.2) give parts of the batch their own (positives, negatives).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from longfocus.errors import ConfigError

Choice = Literal["next", "random", "hard"]
"""How negatives are chosen. `next`: from the next documents in the batch (the paper). `random`: any others.
`hard`: those whose keys score highest against the row's queries; found during the pass (see `context`)."""
CHOICES = get_args(Choice)


@dataclass(frozen=True)
class Share:
    """A part of the batch and what its rows see."""

    share: float
    """Part of the batch, above 0; shares of a mix add up to 1."""
    positives: int
    """Earlier windows of the row's own document, at most."""
    negatives: int
    """Windows of other documents, at most."""


Mix = tuple[Share, ...]

NAMED_MIXES: dict[str, Mix] = {
    "local": (Share(1.0, 0, 0),),
    "longllama_3b": tuple(Share(0.25, p, n) for p, n in ((0, 0), (1, 1), (2, 1), (3, 0))),
    "longllama_7b": tuple(Share(0.25, p, n) for p, n in ((0, 0), (1, 2), (2, 5), (3, 4))),
}
"""The paper's mixed shares (appendix A.2), and no additional context at all."""


def documents(d: int, w: int = 1) -> Mix:
    """The mix of d documents of w windows each: w positives and (d - 1) * w negatives.

    Raises:
        ConfigError: d or w below 1.
    """
    for name, value in (("d", d), ("w", w)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}: {value!r} given, expected a whole number of 1 or more.")
    return (Share(1.0, w, (d - 1) * w),)


def check_mix(mix: Mix) -> Mix:
    """
    Raises:
        ConfigError: no share, shares that do not add up to 1, or negative numbers.
    """
    total = sum(part.share for part in mix)
    if not mix or abs(total - 1) > 1e-6 or any(part.share <= 0 for part in mix):
        given = [part.share for part in mix]
        raise ConfigError(f"shares: {given} given, expected one or more numbers above 0 that add up to 1.")
    for part in mix:
        if part.positives < 0 or part.negatives < 0:
            raise ConfigError(f"shares: ({part.positives}, {part.negatives}) given, expected counts of 0 or more.")
    return mix


@dataclass(frozen=True)
class Rows:
    """Where the batch's windows come from; arrays of one length R. Rows of one place follow each other."""

    places: np.ndarray
    """int: the place of the batch that holds the row's document."""
    documents: np.ndarray
    """int: unique number of the row's document."""
    windows: np.ndarray
    """int: index of the window inside its document."""
    lengths: np.ndarray
    """int: tokens of the window; 0 for an unused row, which sees and is seen by none."""

    def __len__(self) -> int:
        return len(self.documents)


@dataclass(frozen=True)
class Contexts:
    """The table: for each row the rows that it sees. Unused cells are -1 and stand last."""

    positives: np.ndarray
    """int (R, P): nearest earlier window first."""
    negatives: np.ndarray
    """int (R, N). All -1 where `hard` negatives are still to be found."""
    wanted_hard: np.ndarray
    """int (R,): hard negatives that the row still has to find among windows of other documents."""
    order: np.ndarray
    """int (R,): every row sees only rows of a smaller number."""

    def lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """(positives, negatives) of each row, without the unused cells."""
        positives, negatives = (
            [[int(cell) for cell in row if cell >= 0] for row in table] for table in (self.positives, self.negatives)
        )
        return positives, negatives


def plan_contexts(rows: Rows, mix: Mix, *, choice: Choice = "next", generator: np.random.Generator) -> Contexts:
    """Draw the table of one batch.

    Args:
        rows: the batch.
        mix: what parts of the batch see. Whole places belong to one part; which ones is drawn, so that also a
            batch of few places meets all parts over the steps, in their shares.
        choice: how negatives are chosen.
        generator: seeded by run and step, so that the draw does not depend on what came before.

    Raises:
        ConfigError: an unknown choice.
    """
    if choice not in CHOICES:
        raise ConfigError(f"negatives: {choice!r} given, expected one of {', '.join(CHOICES)}.")
    check_mix(mix)
    parts = _parts(rows.places, mix, generator)
    offsets = _offsets(rows.places)
    order = _order(rows.places, offsets, generator)
    positives: list[list[int]] = []
    negatives: list[list[int]] = []
    hard = np.zeros(len(rows), dtype=np.int64)
    for row in range(len(rows)):
        part = parts[row]
        positives.append(_positives(rows, row, part.positives))
        count = part.negatives if rows.lengths[row] > 0 else 0
        if choice == "hard":
            hard[row] = count
            negatives.append([])
        else:
            negatives.append(_negatives(rows, row, count, choice, offsets, order, generator))
    return Contexts(_padded(positives), _padded(negatives), hard, order)


def _parts(places: np.ndarray, mix: Mix, generator: np.random.Generator) -> list[Share]:
    """The part of each row: places in random order, cut at the shares, from a random start (systematic sampling)."""
    names = np.unique(places)
    edges = np.cumsum([part.share for part in mix])
    at = (generator.permutation(len(names)) + generator.random()) / len(names)
    of_place = dict(
        zip(names.tolist(), np.minimum(np.searchsorted(edges, at, side="right"), len(mix) - 1), strict=True)
    )
    return [mix[of_place[place]] for place in places.tolist()]


def _positives(rows: Rows, row: int, count: int) -> list[int]:
    if rows.lengths[row] == 0:
        return []
    same = rows.documents == rows.documents[row]
    earlier = np.flatnonzero(same & (rows.windows < rows.windows[row]) & (rows.lengths > 0))
    return earlier[np.argsort(-rows.windows[earlier], kind="stable")][:count].tolist()


def _order(places: np.ndarray, offsets: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """By position inside the place, and among equals by a drawn order of the places."""
    names, index = np.unique(places, return_inverse=True)
    return offsets * len(names) + generator.permutation(len(names))[index]


def _negatives(
    rows: Rows,
    row: int,
    count: int,
    choice: Choice,
    offsets: np.ndarray,
    order: np.ndarray,
    generator: np.random.Generator,
) -> list[int]:
    """One window of each other document in turn, then a second of each, and so on."""
    if not count:
        return []
    others = other_documents(rows, row, order)
    if choice == "random":
        others = generator.permutation(others)
    else:  # documents of the next places first; of each the window that stands where the row's own last one stands
        ahead = (rows.places[others] - rows.places[row]) % (rows.places.max() + 1)
        apart = np.abs(offsets[others] - (offsets[row] - 1))
        others = others[np.lexsort((others, apart, ahead))]
    return list(_in_turn(others.tolist(), rows.documents))[:count]


def _offsets(places: np.ndarray) -> np.ndarray:
    """How many rows of the same place stand before each row."""
    return np.array([int((places[:row] == place).sum()) for row, place in enumerate(places)])


def _in_turn(order: Sequence[int], documents: np.ndarray) -> Iterator[int]:
    queues: dict[int, list[int]] = {}
    for row in order:
        queues.setdefault(int(documents[row]), []).append(row)
    while queues:
        for document in list(queues):
            yield queues[document].pop(0)
            if not queues[document]:
                del queues[document]


def other_documents(rows: Rows, row: int, order: np.ndarray) -> np.ndarray:
    """int: rows with windows of other documents that stand before the row in the order."""
    return np.flatnonzero((rows.documents != rows.documents[row]) & (rows.lengths > 0) & (order < order[row]))


def _padded(lists: list[list[int]]) -> np.ndarray:
    width = max((len(row) for row in lists), default=0)
    table = np.full((len(lists), width), -1, dtype=np.int64)
    for row, cells in enumerate(lists):
        table[row, : len(cells)] = cells
    return table
