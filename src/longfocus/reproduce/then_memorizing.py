"""Crossbatch first, then a little of the Memorizing Transformer's training (appendix C.3, figure 7), in as many steps altogether."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from longfocus.reproduce import language_models as lm
from longfocus.reproduce.claims import Better
from longfocus.reproduce.experiment import Line, Model, Published, Scale, of_perplexity

D2 = lm.seeing(2)
BEGUN, THEN = "lm-d2-begun", "lm-d2-then-memorizing"
_AFTERWARDS = {"smoke": 5, "small": 50, "paper": 1000}
"""Steps of the Memorizing Transformer's training."""


def then_memorizing(name: str, texts: Path) -> Model:
    """Begun with crossbatch, ended as a Memorizing Transformer."""
    after = _AFTERWARDS[name]
    begun = lm.crossbatch(BEGUN, name, texts, {"mix": {"d": 2}}, steps=lm.STEPS[name] - after)
    ended = lm.memorizing(THEN, name, texts, steps=after)
    recipe = {key: value for key, value in ended.recipe.items() if key != "model"}
    return dataclasses.replace(ended, recipe=recipe, base=begun)


def scale(name: str, texts: Path) -> Scale:
    """What is done at a scale; no texts are read."""
    lines = (
        Line(lm.MEMORIZING, "Memorizing Transformer", lm.model(lm.MEMORIZING, name, texts)),
        Line(D2, "FoT, d = 2", lm.model(D2, name, texts)),
        Line(THEN, "FoT, d = 2, then Memorizing Transformer", then_memorizing(name, texts)),
    )
    return lm.measured(
        name,
        lines,
        lm.one_document(name),
        *(("a tenth of the steps as Memorizing Transformer instead of a 500th",) if name == "small" else ()),
        "temperatures are learned in the first part; in the second one they are factors of the weights",
        lm.SILENT,
        "d = 2 in the first part; the second one begins with a new optimizer and a fifth of its steps as warm-up, and reads the texts in another order",
    )


EXPERIMENT = of_perplexity(
    name="then-memorizing",
    title="Crossbatch, then Memorizing Transformer",
    paper="appendix C.3, figure 7",
    scale=scale,
    published=Published(
        "figure 7",
        {},
        "our notes have one number of figure 7: about 0.4 less than the Memorizing Transformer with 65k tokens of context.",
    ),
    claims=(
        Better("crossbatch, then MT is better than MT throughout (figure 7)", THEN, lm.MEMORIZING, True, least=1),
        Better("our own guess: it is better than crossbatch throughout", THEN, D2, True, least=1),
    ),
    where={"setting": "single"},
)
