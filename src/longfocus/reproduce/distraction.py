"""Distraction (section 3.3, figure 3): the share r_d of its attention on memory that a window keeps on its own document among d.

The standard transformer was trained with its window alone; the others with negatives beside the one positive window.
"""

from __future__ import annotations

from pathlib import Path

from longfocus.reproduce import language_models as lm
from longfocus.reproduce.claims import Better, Near
from longfocus.reproduce.experiment import Experiment, Line, Published, Scale, Told

D8 = lm.seeing(8)
_LINES = (lm.PLAIN, D8, lm.SWITCHED)


def scale(name: str, texts: Path) -> Scale:
    """What is done at a scale; no texts are read."""
    documents = [1, 2, 4] if name == "smoke" else [1, 2, 4, 8, 16, 32, 64]
    options = {
        "documents": documents,
        "texts": [lm.books(name)],
        "samples": 4 if name == "smoke" else 64,
        "by_layer": False,
    }
    lines = [Line(line, lm.TITLES[line], lm.model(line, name, texts)) for line in _LINES]
    return lm.measured(name, lines, options, lm.SILENT)


EXPERIMENT = Experiment(
    name="distraction",
    title="Attention that stays on the own document",
    paper="section 3.3, figure 3",
    scale=scale,
    task="distraction",
    axis="documents",
    axis_title="d: documents with a window in memory",
    measure="positive attention mass",
    share=True,
    published=Published(
        where="figure 3",
        lines={
            lm.PLAIN: {1.0: Told(1.0, "about"), 64.0: Told(0.016, "about")},
            D8: {64.0: Told(0.35, "about")},
            lm.SWITCHED: {1.0: Told(1.0, "about"), 64.0: Told(0.8, "about")},
        },
        note="read off the figure; with one document the share is 1 by definition.",
    ),
    claims=(
        Near("the standard transformer keeps 1 / d (figure 3)", lm.PLAIN, lambda d: 1 / d, factor=1.5, least=2),
        Better("training with d = 8 keeps more than the standard transformer (figure 3)", D8, lm.PLAIN, least=2),
        Better("d = 2 then 64 keeps more than d = 8 (figure 3)", lm.SWITCHED, D8, least=16),
    ),
)
