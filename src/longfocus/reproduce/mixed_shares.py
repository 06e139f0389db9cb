"""LongLLaMA's mixed shares of the batch against one d for all of it (appendix A.2, which has no such comparison).

All three feed four windows of each place and go on by four, as LongLLaMA's fine-tuning does; from scratch and small here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longfocus.reproduce import language_models as lm
from longfocus.reproduce.claims import Better, Claim
from longfocus.reproduce.experiment import Line, Scale, of_perplexity

MIX_3B, MIX_7B, ONE_D = "mix-3b", "mix-7b", "d2"
MANY, ONE = "many", "one"
_TITLES = {
    MIX_3B: "¼(0,0) ¼(1,1) ¼(2,1) ¼(3,0)",
    MIX_7B: "¼(0,0) ¼(1,2) ¼(2,5) ¼(3,4)",
    ONE_D: "(1,1) throughout",
}
_MIXES: dict[str, Any] = {MIX_3B: "longllama_3b", MIX_7B: "longllama_7b", ONE_D: {"d": 2}}
_WINDOWS = 4
_LONG = 4096


def scale(name: str, texts: Path) -> Scale:
    """What is done at a scale; no texts are read."""
    shape = {"places": max(2, lm.PLACES[name] // _WINDOWS), "windows_per_step": _WINDOWS, "stride": _WINDOWS}
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        MANY: ("many documents in memory", lm.many_documents(name)),
        ONE: ("one document in memory", lm.one_document(name)),
    }
    lines = []
    for setting, (group, options) in settings.items():
        for mix, title in _TITLES.items():
            model = lm.crossbatch(f"lm-four-windows-{mix}", name, texts, {**shape, "mix": _MIXES[mix]})
            lines.append(Line(f"{mix}-{setting}", title, model, options=options, group=group))
    return lm.measured(name, lines, {}, lm.own_of_many(name), lm.SILENT)


def _claims() -> list[Claim]:
    return [
        Better(
            f"our guess: {_TITLES[better]} is better than {_TITLES[than]}, {told}",
            f"{better}-{part}",
            f"{than}-{part}",
            True,
            _LONG,
        )
        for part, told, better, than in (
            (MANY, "with many documents", MIX_7B, MIX_3B),
            (MANY, "with many documents", MIX_7B, ONE_D),
            (ONE, "with one document", MIX_3B, ONE_D),
        )
    ]


EXPERIMENT = of_perplexity(
    name="mixed-shares",
    title="Mixed shares of the batch against one d",
    scale=scale,
    claims=_claims(),
)
