"""Which passages a question looked at: the attention mass that its tokens gave to them in the memory layers.

The mass of a memory token is exp(score - lse), lse taken over local and memory keys together, meaned over
heads, memory layers and the question's tokens (those of the chat template included). It is the part of all attention in
those layers that went to the token, so all of the memory and the local window add up to 1.

Some passages are looked at whatever is asked: a document's beginning, rare words, the first token of each window (an
attention sink). So a passage counts by the mass that the question gave it beyond what a neutral question, one that
asks for nothing, gives it; and first tokens of windows are left out. `longfocus eval retrieval` measures both orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from longfocus.memory.asked import AskedMemory
from longfocus.memory.context import MassRecorder
from longfocus.memory.documents import Document, Place

NEUTRAL_QUESTION = "…"
"""It asks for nothing."""
PASSAGE_TOKENS = 64
_LONGEST_LINE_CHARS = 400


@dataclass(frozen=True)
class Passage:
    """A piece of a remembered document that a question looked at."""

    place: Place
    text: str
    mass: float
    """Share of the question's attention in the memory layers, in [0, 1]."""
    beyond: float
    """The same without what a neutral question gives; the passages' order."""
    start: int
    """First token, in the memory."""
    stop: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "document": self.place.document,
            "line": self.place.line,
            "page": self.place.page,
            "mass": round(self.mass, 6),
            "beyond": round(self.beyond, 6),
            "text": self.text,
            "tokens": [self.start, self.stop],
        }


def token_mass(recorder: MassRecorder) -> np.ndarray:
    """float64 (tokens,): mass of each memory token, meaned over layers and recorded queries; 0 at removed ones."""
    recorder.settle()
    if not recorder.mass or not recorder.queries:
        return np.zeros(recorder.tokens)
    total: np.ndarray = np.mean([mass.numpy() for mass in recorder.mass.values()], axis=0)
    return total / recorder.queries


def passages(memory: AskedMemory, mass: np.ndarray, count: int, neutral: np.ndarray | None = None) -> list[Passage]:
    """The passages with the most mass beyond a neutral question's, most first.

    Args:
        mass: float (extent,), what the question gave to each token, see `token_mass`.
        count: how many at most.
        neutral: float (extent,), what a neutral question gives; None: nothing.
    """
    starts = window_starts(memory)[: len(mass)]
    mass = np.where(starts, 0.0, mass)
    beyond = mass if neutral is None else np.where(starts, 0.0, mass - neutral)
    blocks: list[tuple[float, Document, int, int]] = []
    for document in memory.documents:
        if document.kind == "ids":
            continue
        for start in range(document.start, document.stop, PASSAGE_TOKENS):
            stop = min(start + PASSAGE_TOKENS, document.stop)
            if stop <= len(mass):
                blocks.append((float(beyond[start:stop].sum()), document, start, stop))
    blocks.sort(key=lambda block: -block[0])
    texts: dict[int, str] = {}
    found = []
    for more, document, start, stop in blocks[:count]:
        text = texts.setdefault(document.id, memory.text_of(document))
        first, last = memory.span(document, start, stop)
        first, last = _whole_lines(text, first, last)
        while first < last and text[first] == "\n":  # the place is that of the first line shown
            first += 1
        place, received = memory.place(document, text, first), float(mass[start:stop].sum())
        found.append(Passage(place, text[first:last].strip("\n"), received, more, start, stop))
    return found


def window_starts(memory: AskedMemory) -> np.ndarray:
    """bool (extent,): the first token of each window that was read into the memory, of its documents as they are now."""
    starts = np.zeros(memory.extent, dtype=bool)
    window, overlap = memory.geometry.window, memory.geometry.overlap
    for document in memory.documents:
        starts[document.start : document.start + 1] = document.tokens > 0
        starts[document.start + window : document.stop : window - overlap] = True
    return starts


def _whole_lines(text: str, first: int, last: int) -> tuple[int, int]:
    """Widen to whole lines, unless lines are very long."""
    begin = text.rfind("\n", 0, first) + 1
    end = text.find("\n", max(first, last - 1))
    end = len(text) if end < 0 else end
    if first - begin > _LONGEST_LINE_CHARS:
        begin = first
    if end - last > _LONGEST_LINE_CHARS:
        end = last
    return begin, end
