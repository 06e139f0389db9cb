"""From documents to windows that keep their place, step by step: what a crossbatch training step is fed with.

A place holds one document until it ends. Each step takes, for every place, `windows_per_step` consecutive windows of
its document, one a row; when the document ends, the place's remaining rows begin the next document, so no row is
wasted. Rows of one place are beside each other: row = place * windows_per_step + number.

How far a place moves from step to step is `stride`:

    windows_per_step 4, stride 4:   0 1 2 3 | 4 5 6 7 | …      every window once (the authors' later code)
    windows_per_step 2, stride 1:   0 1 | (1) 2 | (2) 3 | …    previous and current window (the paper, appendix A.2)

Windows in brackets were fed in the step before and are there as context only: no loss is taken on them again. Without
them, every token of a document is in exactly one row, and every token but the first is the target of exactly one
token: of the one before it in the window, or (`next_token`) of the last one of the window before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from longfocus.data.mixture import Drawn, Mixture
from longfocus.errors import ConfigError

LONGEST_SEARCH_DOCUMENTS = 10_000
"""So many documents in a row without a single target mean that the mixture has no other."""


@dataclass(frozen=True)
class StepWindows:
    """One step. R rows = places * windows_per_step; all arrays int64 but `context_only`."""

    tokens: np.ndarray
    """(R, window), padded on the right with 0."""
    lengths: np.ndarray
    """(R,) tokens of each row that are not padding: `window`, or fewer at a document's end."""
    documents: np.ndarray
    """(R,) number of the document instance: unique in the run (over all ranks), never used again."""
    window_index: np.ndarray
    """(R,) which window of its document the row is."""
    context_only: np.ndarray
    """bool (R,): fed before; no loss is taken on it."""
    next_token: np.ndarray
    """(R,) target of the row's last token: the first of the document's next window; -1 where the document ends."""
    source: np.ndarray
    """(R,) number of the source in the mixture."""


class WindowStream:
    """Windows of a mixture's documents. The stream owns the mixture: nobody else may draw from it.

    Args:
        mixture: where documents come from.
        places: documents held at a time (batch rows of the authors' code).
        window: tokens of a window; at least 2.
        windows_per_step: rows that each place has in a step.
        stride: windows by which a document moves on from step to step; 1 to windows_per_step.
        whole_documents: refuse documents longer than what a place takes in a step.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        places: int,
        window: int,
        windows_per_step: int,
        stride: int,
        whole_documents: bool = False,
    ) -> None:
        for name, value, least in (
            ("places", places, 1),
            ("window", window, 2),
            ("windows_per_step", windows_per_step, 1),
            ("stride", stride, 1),
        ):
            if value < least:
                raise ConfigError(f"{name}: {value} given, expected {least} or more.")
        if stride > windows_per_step:
            raise ConfigError(
                f"stride: {stride} given, expected at most windows_per_step ({windows_per_step}); more would leave windows out."
            )
        self.mixture = mixture
        self.whole_documents = whole_documents
        self._shape = {"places": places, "window": window, "windows_per_step": windows_per_step, "stride": stride}
        self.places, self.window, self.windows_per_step, self.stride = places, window, windows_per_step, stride
        self._held: list[_Held | None] = [None] * places
        self._begun = 0
        self.dropped_tokens = 0
        """Tokens in no row: a single token after a document's last full window (which is still the target of the one
        before it), and documents of one token."""

    def next_step(self) -> StepWindows:
        """The next step's rows.

        Raises:
            InputError: a streamed source cannot be read.
            ConfigError: no document of two tokens or more comes.
        """
        rows = self.places * self.windows_per_step
        numbers = {
            name: np.zeros(rows, dtype=np.int64)
            for name in ("lengths", "documents", "window_index", "next_token", "source")
        }
        tokens = np.zeros((rows, self.window), dtype=np.int64)
        context_only = np.zeros(rows, dtype=bool)
        for place in range(self.places):
            row, end = place * self.windows_per_step, (place + 1) * self.windows_per_step
            while row < end:
                held = self._held[place] = self._held[place] or self._begin()
                first = held.fed - min(held.fed, self.windows_per_step - self.stride)
                stop = min(first + end - row, held.windows)
                for index in range(first, stop):
                    piece = held.drawn.tokens[index * self.window : (index + 1) * self.window]
                    after = held.drawn.tokens[(index + 1) * self.window : (index + 1) * self.window + 1]
                    tokens[row, : len(piece)] = piece
                    context_only[row] = index < held.fed
                    numbers["lengths"][row] = len(piece)
                    numbers["documents"][row] = held.number
                    numbers["window_index"][row] = index
                    numbers["next_token"][row] = after[0] if len(after) else -1
                    numbers["source"][row] = held.drawn.source
                    row += 1
                held.fed = stop
                if held.fed == held.windows:
                    self._held[place] = None
        return StepWindows(tokens=tokens, context_only=context_only, **numbers)

    def _begin(self) -> _Held:
        for _ in range(LONGEST_SEARCH_DOCUMENTS):
            drawn = self.mixture.next_document()
            windows = self._windows(drawn)
            self.dropped_tokens += max(0, len(drawn.tokens) - windows * self.window)
            if windows > self.windows_per_step and self.whole_documents:
                name = self.mixture.sources[drawn.source].name
                raise ConfigError(
                    f"A document of {name} ({', '.join(drawn.ids)}) has {len(drawn.tokens):,} tokens, more than the "
                    f"{self.windows_per_step * self.window:,} that a place reads in a step; data.strict refuses it."
                )
            if windows:
                self._begun += 1
                number = (self._begun - 1) * self.mixture.world + self.mixture.rank
                return _Held(drawn, number, windows)
        raise ConfigError(
            f"The last {LONGEST_SEARCH_DOCUMENTS} documents had one token each; set minimum_tokens to 2 or more."
        )

    def _windows(self, drawn: Drawn) -> int:
        """Windows of a document; a single token at the end makes none."""
        return -(-(len(drawn.tokens) - 1) // self.window)

    def state_dict(self) -> dict[str, Any]:
        """The mixture's state, and each place's document and how far it was fed; JSON-able."""
        return {
            "shape": dict(self._shape),
            "mixture": self.mixture.state_dict(),
            "begun": self._begun,
            "dropped_tokens": self.dropped_tokens,
            "held": [
                None
                if held is None
                else {"document": held.record(self.mixture), "number": held.number, "fed": held.fed}
                for held in self._held
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the state was taken, without reading again what came before.

        Raises:
            ConfigError: it is of another mixture, or of other numbers of places or windows; names what differs.
        """
        for name, mine in self._shape.items():
            if state["shape"].get(name) != mine:
                raise ConfigError(
                    f"The saved data position was made with {name} {state['shape'].get(name)!r}, but {mine} is given "
                    "now. Go on with the same settings, or start a new run."
                )
        self.mixture.load_state_dict(state["mixture"])
        self._begun = int(state["begun"])
        self.dropped_tokens = int(state["dropped_tokens"])
        self._held = [None if saved is None else self._recall(saved) for saved in state["held"]]

    def _recall(self, saved: Mapping[str, Any]) -> _Held:
        drawn = self.mixture.recall(saved["document"])
        return _Held(drawn, int(saved["number"]), self._windows(drawn), int(saved["fed"]))


@dataclass
class _Held:
    """A document in its place."""

    drawn: Drawn
    number: int
    windows: int
    fed: int = 0
    """Windows that were given out."""
    _record: dict[str, Any] | None = None

    def record(self, mixture: Mixture) -> dict[str, Any]:
        """What finds the document again; made once, since a streamed one is packed for it."""
        if self._record is None:
            self._record = mixture.remember(self.drawn)
        return self._record
