"""Which passages an answer drew on: the attention mass that its tokens gave to them in the memory layers.

The mass of a memory token is exp(score - lse), lse taken over local and memory keys together, meaned over
heads, memory layers and the answer's tokens; a passage's mass is the sum over its tokens. It is the part of
all attention in those layers that went to the passage, so all passages and the local window add up to 1.

The first token of a window draws much attention whatever it says (an attention sink; 40-48% of all mass in
the default model before its fine-tune), and a memory holds one for each window. Passages are ranked and their
mass is given without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from longfocus.memory.asked import AskedMemory
from longfocus.memory.context import MassRecorder
from longfocus.memory.documents import Document, Place

PASSAGE_TOKENS = 64
_LONGEST_LINE_CHARS = 400


@dataclass(frozen=True)
class Passage:
    """A piece of a remembered document that received attention."""

    place: Place
    text: str
    mass: float
    """Share of the answer's attention in the memory layers, in [0, 1]."""
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


def passages(memory: AskedMemory, mass: np.ndarray, count: int) -> list[Passage]:
    """The passages with the most mass, most first.

    Args:
        mass: float (extent,), see `token_mass`.
        count: how many at most.
    """
    mass = np.where(window_starts(memory)[: len(mass)], 0.0, mass)
    blocks: list[tuple[float, Document, int, int]] = []
    for document in memory.documents:
        if document.kind == "ids":
            continue
        for start in range(document.start, document.stop, PASSAGE_TOKENS):
            stop = min(start + PASSAGE_TOKENS, document.stop)
            if stop <= len(mass):
                blocks.append((float(mass[start:stop].sum()), document, start, stop))
    blocks.sort(key=lambda block: -block[0])
    texts: dict[int, str] = {}
    found = []
    for received, document, start, stop in blocks[:count]:
        text = texts.setdefault(document.id, memory.text_of(document))
        first, last = memory.span(document, start, stop)
        first, last = _whole_lines(text, first, last)
        while first < last and text[first] == "\n":  # the place is that of the first line shown
            first += 1
        found.append(Passage(memory.place(document, text, first), text[first:last].strip("\n"), received, start, stop))
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
