"""How the Memorizing Transformer joins memory and window: by a learned gate, or in one softmax (appendix B.2, figure 4)."""

from __future__ import annotations

from pathlib import Path

from longfocus.reproduce import language_models as lm
from longfocus.reproduce.claims import Alike
from longfocus.reproduce.experiment import Line, Published, Scale, of_perplexity

GATE = "lm-memorizing-gate"


def scale(name: str, texts: Path) -> Scale:
    """What is done at a scale; no texts are read."""
    gated = lm.memorizing(GATE, name, texts, {"combine": "gate"})
    return lm.measured(
        name,
        (Line(lm.MEMORIZING, "one softmax", lm.model(lm.MEMORIZING, name, texts)), Line(GATE, "gate", gated)),
        lm.one_document(name),
        "held-out perplexity at the end of training, where figure 4 follows it through training",
        lm.SILENT,
        "gates begin at 0.5",
    )


EXPERIMENT = of_perplexity(
    name="gate",
    title="Gate or one softmax",
    paper="appendix B.2, figure 4",
    scale=scale,
    published=Published(
        "figure 4", {}, "our notes have no numbers of figure 4, only that its two curves are nearly the same."
    ),
    claims=(Alike("gate and one softmax are equally good, within 1% (figure 4)", GATE, lm.MEMORIZING, 0.01, least=1),),
    where={"setting": "single"},
)
