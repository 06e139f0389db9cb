"""How many keys each query takes from memory, from 8 to all of them: one trained model, read in each way.

The paper has no numbers; it says that 32, 64 and 128 differed little (in answers to reviewers), and dense attention only
marginally from nearest neighbours (appendix A).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longfocus.reproduce import language_models as lm
from longfocus.reproduce.claims import Alike
from longfocus.reproduce.experiment import Line, Scale, of_perplexity

_K = (8, 32, 64, 128, 512)
DENSE = "dense"


def _line(k: int) -> str:
    return f"k-{k}"


def scale(name: str, texts: Path) -> Scale:
    """What is done at a scale; no texts are read."""
    model = lm.model(lm.SWITCHED, name, texts)
    ways: dict[str, dict[str, Any]] = {_line(k): {"retrieval": "exact", "k": k} for k in _K}
    ways[DENSE] = {"retrieval": "dense"}
    lines = [Line(way, way.replace("-", " = "), model, focus=focus) for way, focus in ways.items()]
    about = f"{lm.ABOUT[name]}; {lm.TITLES[lm.SWITCHED]}"
    return lm.measured_on_many(name, lines, "both while reading and while predicting", about=about)


EXPERIMENT = of_perplexity(
    name="keys",
    title="Keys that a query takes from memory",
    scale=scale,
    claims=(
        Alike(
            "k = 32 is like k = 128, within 1% (the authors to their reviewers)", _line(32), _line(128), 0.01, least=1
        ),
        Alike(
            "k = 64 is like k = 128, within 1% (the authors to their reviewers)", _line(64), _line(128), 0.01, least=1
        ),
        Alike("dense is like k = 128, within 1% (appendix A)", DENSE, _line(128), 0.01, least=1),
    ),
    where={"setting": "multi"},
)
