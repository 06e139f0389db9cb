"""Which layer has the memory (not in the paper, which took the Memorizing Transformer's choice, and saw gains by several layers in
LongLLaMA)."""

from __future__ import annotations

from pathlib import Path

from longfocus.reproduce import language_models as lm
from longfocus.reproduce.claims import Better
from longfocus.reproduce.experiment import Line, Scale, of_perplexity

EARLY, CHOSEN, LAST, TWO = "early", "chosen", "last", "two"
_LAYERS = {
    EARLY: {"smoke": [0], "small": [0], "paper": [4]},
    LAST: {"smoke": [2], "small": [3], "paper": [11]},
    TWO: {"smoke": [0, 1], "small": [1, 2], "paper": [4, 8]},
}
_MANY = 4096


def scale(name: str, texts: Path) -> Scale:
    """What is done at a scale; no texts are read."""
    lines = [Line(CHOSEN, f"layer {lm.MEMORY_LAYER[name]}, as elsewhere", lm.model(lm.seeing(2), name, texts))]
    for line, layers in _LAYERS.items():
        focus = {"memory_layers": layers[name]}
        model = lm.crossbatch(f"lm-d2-{line}-layer", name, texts, {"mix": {"d": 2}}, focus=focus)
        numbers = " and ".join(map(str, layers[name]))
        lines.append(Line(line, f"layer{'s' * (len(layers[name]) > 1)} {numbers}", model))
    return lm.measured_on_many(name, lines, "d = 2")


EXPERIMENT = of_perplexity(
    name="memory-layer",
    title="The layer that has the memory",
    scale=scale,
    claims=(
        Better("our guess: the layer at two thirds is better than an early one", CHOSEN, EARLY, True, least=1),
        Better("our guess: the layer at two thirds is better than the last one", CHOSEN, LAST, True, least=1),
        Better("our guess: two layers are better than one", TWO, CHOSEN, True, least=1),
    ),
    where={"setting": "multi"},
)
