"""Models that are trained from scratch and measured on papers of arXiv, each by itself (appendix K, tables 10 and 11).

At paper scale with windows of 2,048, on papers alone; at the others these are the language models of the other experiments, which
see papers among other texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longfocus.reproduce import language_models as lm
from longfocus.reproduce.experiment import Model

WINDOW = {**lm.WINDOW, "paper": 2048}
_PLACES = 16
"""At paper scale: 32,768 tokens a step."""

ABOUT = {
    **lm.ABOUT,
    "paper": "12 layers of width 1024 (184M weights), memory layer 8, windows of 2,048, 32,768 tokens a step, 500,000 steps",
}
DEPARTURES = {
    "small": (*lm.DEPARTURES["small"], "trained on novels, code and proofs too, instead of on papers alone"),
    "paper": (*lm.DEPARTURES["paper"], "trained on the papers that lie in the data folder as arxiv/train.jsonl.gz"),
}
COUNTED = "the paper counts the window of 2,048 too: its 128k of context stand at 129,024 before the window, 64k at 63,488, 32k at 30,720."

CONTEXTS = {
    "smoke": [32, 96],
    "small": [128, 896, 3968, 16_256, 32_640],
    "paper": [2048, 6144, 30_720, 63_488, 129_024],
}
"""Tokens before the window: with it 256, 1k, 4k, 16k, 32k (small) and 4k, 8k, 32k, 64k, 128k (paper)."""


def _common(scale: str, texts: Path) -> dict[str, Any]:
    """What differs from the other language models, and the places."""
    if scale != "paper":
        return {}
    papers = {"name": "arxiv", "kind": "jsonl", "share": 1.0, "paths": [str(texts / "arxiv/train.jsonl.gz")]}
    return {"focus": {"window": WINDOW[scale]}, "data": [papers]}


def _places(scale: str) -> int:
    return _PLACES if scale == "paper" else lm.PLACES[scale]


def crossbatch(scale: str, texts: Path, d: int, w: int) -> Model:
    """Sees d documents of w earlier windows each."""
    if scale != "paper" and w == 1:
        return lm.model(lm.seeing(d), scale, texts)
    part = {"places": _places(scale), "windows_per_step": w + 1, "mix": {"d": d, "w": w}}
    name = f"{'arxiv' if scale == 'paper' else 'lm'}-d{d}-w{w}"
    return lm.crossbatch(name, scale, texts, part, **_common(scale, texts))


def memorizing(scale: str, texts: Path, windows: int) -> Model:
    """A Memorizing Transformer that remembers so many windows in training."""
    memory = windows * WINDOW[scale]
    if scale != "paper" and memory == lm.MEMORY[scale]:
        return lm.model(lm.MEMORIZING, scale, texts)
    name = f"{'arxiv' if scale == 'paper' else 'lm'}-memorizing-{memory}"
    part = {"places": _places(scale), "memory": memory}
    return lm.memorizing(name, scale, texts, part, **_common(scale, texts))


def options(scale: str) -> dict[str, Any]:
    """Options of `perplexity` on papers, each by itself."""
    more: dict[str, dict[str, Any]] = {
        "smoke": {"stride": 64, "tokens": 200, "up_to": 2000},
        "small": {"stride": 512, "tokens": 32_768, "up_to": 65_536},
        "paper": {"stride": 2048, "tokens": 1 << 20},
    }
    return {
        "lengths": CONTEXTS[scale],
        "block": WINDOW[scale],
        "texts": ["arxiv"],
        "settings": ["single"],
        **more[scale],
    }
