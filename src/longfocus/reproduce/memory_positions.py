"""Memory keys with and without positions, all else equal (not in the paper, which left them out when training from scratch).

Three ways: no positions in the memory layer at all; positions inside the window, memory keys as if first; and the latter model read
with memory keys at their true distances, which it never saw in training.
"""

from __future__ import annotations

from pathlib import Path

from longfocus.reproduce import language_models as lm
from longfocus.reproduce.claims import Better
from longfocus.reproduce.experiment import Line, Scale, of_perplexity

NONE = lm.seeing(2)
FIRST, ABSOLUTE = "lm-d2-first", "lm-d2-absolute"
_MANY = 4096


def scale(name: str, texts: Path) -> Scale:
    """What is done at a scale; no texts are read."""
    first = lm.crossbatch(FIRST, name, texts, {"mix": {"d": 2}}, focus={"memory_positions": "first"})
    lines = (
        Line(NONE, "no positions", lm.model(NONE, name, texts)),
        Line(FIRST, "memory as if first", first),
        Line(ABSOLUTE, "as if first, read at true distances", first, focus={"memory_positions": "absolute"}),
    )
    return lm.measured_on_many(name, lines, "d = 2")


EXPERIMENT = of_perplexity(
    name="memory-positions",
    title="Memory keys with and without positions",
    scale=scale,
    claims=(
        Better("our guess: no positions are better than memory as if first", NONE, FIRST, True, least=1),
        Better(
            "our guess: far beyond training, as if first is better than true distances", FIRST, ABSOLUTE, True, _MANY
        ),
    ),
    where={"setting": "multi"},
)
