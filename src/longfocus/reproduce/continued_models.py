"""Models that go on from one plain model (sections 5.2 and 5.4): the base, what is fine-tuned from it, how it is measured.

The base sees its window alone, with positions in all layers. Fine-tuned models keep them inside the window, and memory keys are
encoded as if first. Contexts are chosen so that they make round numbers with the window, as the paper counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longfocus.reproduce import language_models as lm
from longfocus.reproduce.experiment import Model

WINDOW = {"smoke": 32, "small": 128, "paper": 1024}
PLACES = {"smoke": 4, "small": 64, "paper": 128}
STEPS = {"smoke": 20, "small": 500, "paper": 100_000}
TUNING_STEPS = {"smoke": 10, "small": 150, "paper": 10_000}

ABOUT = {
    "smoke": "3 layers of width 32 on bytes of Python code, windows of 32, 20 steps and 10 of fine-tuning: shows that it runs",
    "small": "4 layers of width 128 (0.8M weights) on bytes, windows of 128, 8,192 bytes a step, 500 steps and 150 of fine-tuning",
    "paper": "12 layers of width 1024 (184M weights) on C4, windows of 1,024, 131,072 tokens a step, 100,000 steps and 10,000 of fine-tuning",
}
DEPARTURES = {
    "small": (
        "0.8M weights on bytes instead of 184M on a 32k vocabulary; windows of 128 bytes, 4.1M bytes of training and 1.2M of fine-tuning",
        "trained on novels, code, papers and proofs, of which other documents are measured, instead of on C4",
        "k = 32 instead of 128; the Memorizing Transformer remembers 2,048 bytes",
    ),
    "paper": ("the gated MLP of a Llama, its width chosen for 184M weights",),
}
SILENT = (
    "chosen where our notes on the paper are silent: learning rate 1e-3 with 1,000 steps of warm-up (100 at small scale), for fine-tuning "
    "2e-4 (1e-3 at small scale), weights drawn with deviation 0.02 (0.09 at small scale), memory layer 8 counted from 0, memory keys as if "
    "first, short documents of C4 joined up to 2,048 tokens"
)

CONTEXTS = {
    "smoke": [32, 96],
    "small": [128, 896, 3968, 16_256, 32_640],
    "paper": [1024, 7168, 15_360, 64_512],
}
"""Tokens before the window: with it 256, 1k, 4k, 16k, 32k (small) and 2k, 8k, 16k, 64k (paper)."""


def _recipe(scale: str, texts: Path, steps: int) -> dict[str, Any]:
    focus = {"window": WINDOW[scale], "memory_positions": "first"}
    c4 = {"name": "c4", "kind": "hub", "dataset": "allenai/c4", "subset": "en", "stream": True, "share": 1.0}
    made = lm.recipe(scale, texts, focus=focus, data=[c4] if scale == "paper" else None, steps=steps)
    made["model"] = dict(lm.SHAPES[scale])
    if scale == "paper":
        made["data"]["join_below"] = 2048
    return made


def base(scale: str, texts: Path) -> Model:
    """The plain model."""
    long = {"rows": PLACES[scale], "tokens": WINDOW[scale]}
    return Model("base", {**_recipe(scale, texts, STEPS[scale]), "method": "long", "long": long})


def tuned(name: str, scale: str, texts: Path, method: str, part: Mapping[str, Any]) -> Model:
    """A model that goes on from the base.

    Args:
        method: of the recipe.
        part: fields of the method's section; places are those of all.
    """
    made = _recipe(scale, texts, TUNING_STEPS[scale])
    del made["model"]
    if scale == "paper":
        made["optimizer"]["lr"] = 2e-4
    return Model(name, {**made, "method": method, method: {"places": PLACES[scale], **part}}, base(scale, texts))


def crossbatch(name: str, scale: str, texts: Path, w: int, mixes: Mapping[str, Any]) -> Model:
    """Fine-tuned by the Focused Transformer's training, w earlier windows beside the current one.

    Args:
        mixes: the field of the recipe's `crossbatch` that says which documents are seen.
    """
    return tuned(name, scale, texts, "crossbatch", {"windows_per_step": w + 1, "stride": 1, **mixes})


def options(scale: str) -> dict[str, Any]:
    """Options of `perplexity`, each document by itself; without texts."""
    window = WINDOW[scale]
    more: dict[str, dict[str, Any]] = {
        "smoke": {"stride": 64, "tokens": 200, "up_to": 2000},
        "small": {"stride": 512, "tokens": 16_384, "documents": 4, "up_to": 49_152},
        "paper": {"stride": 2048, "tokens": 1 << 20},
    }
    return {"lengths": CONTEXTS[scale], "block": window, "settings": ["single"], **more[scale]}
