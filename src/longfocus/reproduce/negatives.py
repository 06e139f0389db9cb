"""Which windows serve as negatives: of the next places of the batch (the paper), of random ones, or those that are hardest to tell
from the own document (not in the paper, which names hard negatives as future work in section 6).

Hard ones are found in the pass: the windows of other documents in the batch whose keys score highest.
"""

from __future__ import annotations

from pathlib import Path

from longfocus.reproduce import language_models as lm
from longfocus.reproduce.claims import Alike, Better
from longfocus.reproduce.experiment import Line, Scale, of_perplexity

NEXT = lm.seeing(8)
RANDOM, HARD = "lm-d8-random", "lm-d8-hard"
_MANY = 4096


def scale(name: str, texts: Path) -> Scale:
    """What is done at a scale; no texts are read."""
    random, hard = (
        lm.crossbatch(line, name, texts, {"mix": {"d": 8}, "negatives": choice})
        for line, choice in ((RANDOM, "random"), (HARD, "hard"))
    )
    lines = (
        Line(NEXT, "next in the batch", lm.model(NEXT, name, texts)),
        Line(RANDOM, "random", random),
        Line(HARD, "hard", hard),
    )
    return lm.measured_on_many(name, lines, "d = 8")


EXPERIMENT = of_perplexity(
    name="negatives",
    title="Next, random and hard negatives",
    scale=scale,
    claims=(
        Better("our guess: hard negatives are better than the next ones", HARD, NEXT, True, _MANY),
        Alike("our guess: random negatives are like the next ones, within 1%", RANDOM, NEXT, 0.01, least=1),
    ),
    where={"setting": "multi"},
)
