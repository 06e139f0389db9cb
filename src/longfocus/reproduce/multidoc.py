"""Perplexity while memory fills with other documents (section 5.3, figures 6 and 8), for models that saw d documents in training.

The Memorizing Transformer, measured with its own document alone in memory, is the paper's soft bound.
"""

from __future__ import annotations

from pathlib import Path

from longfocus.reproduce import language_models as lm
from longfocus.reproduce.claims import Better
from longfocus.reproduce.experiment import Line, Published, Scale, Told, of_perplexity

D1, D2, D4, D8 = (lm.seeing(d) for d in (1, 2, 4, 8))
_LINES = (D1, D2, D4, D8, lm.SWITCHED, lm.MEMORIZING)
_MANY = 4096
"""Tokens of memory from which most of it is foreign, at every scale but smoke."""


def scale(name: str, texts: Path) -> Scale:
    """What is done at a scale; no texts are read."""
    options = {**lm.many_documents(name), "settings": ["single", "multi"]}
    single = {"setting": "single"}
    lines = [
        Line(line, lm.TITLES[line], lm.model(line, name, texts), where=single if line == lm.MEMORIZING else {})
        for line in _LINES
    ]
    return lm.measured(name, lines, options, lm.own_of_many(name), lm.SILENT)


_500K = float(1 << 19)

EXPERIMENT = of_perplexity(
    name="multidoc",
    title="Perplexity with many documents in memory",
    paper="section 5.3 and appendix C.2, figures 6 and 8",
    scale=scale,
    published=Published(
        where="figure 8",
        lines={
            D1: {0.0: Told(14.0, "about"), _500K: Told(16.0, "about")},
            D2: {_500K: Told(15.2, "about")},
            D8: {_500K: Told(14.8, "about")},
            lm.SWITCHED: {0.0: Told(14.1, "about"), _500K: Told(14.28, "about")},
        },
        note="read off the figure; 0.18 of rise for d = 2 then 64 is in the text. Figure 6 has about 14.0 to 14.5 for it, and 14.0 to "
        "16.0 for d = 1.",
    ),
    claims=(
        Better("d = 2 then 64 is better than d = 1 (figures 6 and 8)", lm.SWITCHED, D1, True, _MANY),
        Better("d = 2 is better than d = 1 (figure 8)", D2, D1, True, _MANY),
        Better("d = 4 is better than d = 2 (figure 8)", D4, D2, True, _MANY),
        Better("d = 8 is better than d = 4 (figure 8)", D8, D4, True, _MANY),
        Better("d = 2 then 64 is better than d = 8 (figure 8)", lm.SWITCHED, D8, True, _MANY),
    ),
    where={"setting": "multi"},
)
