"""How much the Memorizing Transformer has to remember in training (appendix K, table 10), beside FoT with two windows before."""

from __future__ import annotations

from pathlib import Path

from longfocus.reproduce import arxiv_models as arxiv
from longfocus.reproduce import language_models as lm
from longfocus.reproduce.claims import Alike, Better
from longfocus.reproduce.experiment import Line, Published, Scale, Told, of_perplexity

_WINDOWS = (1, 4, 8, 16)
"""Remembered in training: 2k, 8k, 16k, 32k tokens in the paper."""
FOT = "fot-d2-w2"


def _line(windows: int) -> str:
    return f"memorizing-{windows}"


def scale(name: str, texts: Path) -> Scale:
    """What is done at a scale; no texts are read."""
    lines = [
        Line(_line(n), f"MT, {n} window{'s' * (n > 1)} remembered", arxiv.memorizing(name, texts, n)) for n in _WINDOWS
    ]
    return Scale(
        lines=[*lines, Line(FOT, "FoT, d = 2, w = 2", arxiv.crossbatch(name, texts, 2, 2))],
        seeds=lm.SEEDS[name],
        options=arxiv.options(name),
        about=arxiv.ABOUT[name],
        departures=(*arxiv.DEPARTURES.get(name, ()), lm.CHOSEN, lm.TWO_WINDOWS),
    )


_32K, _64K, _128K = 30_720.0, 63_488.0, 129_024.0

EXPERIMENT = of_perplexity(
    name="memory-length",
    title="Memory of the Memorizing Transformer in training",
    paper="appendix K, tables 10 and 11",
    scale=scale,
    axis_title="tokens before the window",
    published=Published(
        where="tables 10, 11",
        lines={
            _line(1): {_32K: Told(2.199), _64K: Told(2.195), _128K: Told(2.195)},
            _line(4): {_32K: Told(2.178), _64K: Told(2.169)},
            _line(8): {_32K: Told(2.177), _64K: Told(2.166), _128K: Told(2.164)},
            _line(16): {_32K: Told(2.181), _64K: Told(2.168)},
            FOT: {_128K: Told(2.148)},
        },
        note=arxiv.COUNTED,
    ),
    claims=(
        Better(
            "MT: 4 windows in training are better than 1 in long contexts (table 10)", _line(4), _line(1), True, 4096
        ),
        Alike("MT: 16 windows in training are like 8, within 1% (table 10)", _line(16), _line(8), 0.01, 4096),
        Better(
            "FoT with 2 windows is better than MT with 8 in long contexts (tables 10, 11)", FOT, _line(8), True, 4096
        ),
    ),
    where={"setting": "single"},
)
