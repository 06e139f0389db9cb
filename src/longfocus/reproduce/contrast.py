"""The implicit contrast of crossbatch training against an explicit contrastive loss beside it (not in the paper, which has the
next-token loss alone and names other contrastive learning as future work in section 6).

The explicit loss is the negative logarithm of the share r_d that positives have of the additional attention (`crossbatch.contrast`).
"""

from __future__ import annotations

from pathlib import Path

from longfocus.reproduce import language_models as lm
from longfocus.reproduce.claims import Better
from longfocus.reproduce.experiment import Line, Scale, of_perplexity

IMPLICIT = lm.seeing(8)
_WEIGHTS = {"lm-d8-contrast-tenth": 0.1, "lm-d8-contrast-one": 1.0}
TENTH, ONE = _WEIGHTS
_MANY = 4096


def scale(name: str, texts: Path) -> Scale:
    """What is done at a scale; no texts are read."""
    lines = [Line(IMPLICIT, "next-token loss alone", lm.model(IMPLICIT, name, texts))]
    for line, weight in _WEIGHTS.items():
        model = lm.crossbatch(line, name, texts, {"mix": {"d": 8}, "contrast": weight})
        lines.append(Line(line, f"with {weight:g} of the contrastive loss", model))
    return lm.measured_on_many(name, lines, "d = 8")


EXPERIMENT = of_perplexity(
    name="contrast",
    title="Implicit and explicit contrast",
    scale=scale,
    claims=(
        Better(
            "our guess: a tenth of the explicit loss is better with many documents in memory",
            TENTH,
            IMPLICIT,
            True,
            _MANY,
        ),
        Better("our guess: a tenth of the explicit loss is better than all of it", TENTH, ONE, True, _MANY),
    ),
    where={"setting": "multi"},
)
