"""The language models that several experiments share (sections 3.3 and 5.3): one recipe a name, trained once.

Previous and current window of each place are fed together and the document moves on by one window a step; memory layers have no
positions and learn a temperature for each head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PLAIN = "lm-plain"
"""Sees its window only."""
MEMORIZING = "lm-memorizing"
SWITCHED = "lm-d2-64"
"""d = 2, then 64 for the last tenth."""


def seeing(d: int) -> str:
    """Name of the model that sees so many documents throughout."""
    return f"lm-d{d}"


TITLES = {
    PLAIN: "standard transformer",
    MEMORIZING: "Memorizing Transformer, one document",
    SWITCHED: "FoT, d = 2 then 64",
    **{seeing(d): f"FoT, d = {d}" for d in (1, 2, 4, 8)},
}

_SHAPES: dict[str, dict[str, Any]] = {
    "smoke": {"layers": 3, "hidden": 32, "heads": 4, "intermediate": 64},
    "small": {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 352, "deviation": 0.09},
    "paper": {
        "layers": 12,
        "hidden": 1024,
        "heads": 8,
        "intermediate": 2736,
        "tokenizer": "openlm-research/open_llama_3b",
        "vocabulary": 32_000,
    },
}
MEMORY_LAYER = {"smoke": 1, "small": 2, "paper": 8}
WINDOW = {"smoke": 32, "small": 128, "paper": 512}
_PLACES = {"smoke": 4, "small": 64, "paper": 64}
_STEPS = {"smoke": 20, "small": 500, "paper": 500_000}
_MEMORY = {"smoke": 128, "small": 2048, "paper": 16_384}
K = {"smoke": 8, "small": 32, "paper": 128}
SEEDS = {"smoke": 1, "small": 3, "paper": 3}

ABOUT = {
    "smoke": "3 layers of width 32 on bytes of Python code, windows of 32, 20 steps: shows that it runs",
    "small": "4 layers of width 128 (0.8M weights) on bytes, windows of 128, 8,192 bytes a step, 500 steps",
    "paper": "12 layers of width 1024 (184M weights), memory layer 8, windows of 512, 32,768 tokens a step, 500,000 steps",
}
DEPARTURES = {
    "small": (
        "0.8M weights on bytes instead of 184M on a 32k vocabulary; windows of 128 bytes, 4.1M bytes of training in all",
        "novels, code, papers and proofs instead of PG-19, in pieces of 16k bytes: of the 64 documents in a batch, several "
        "are pieces of one book",
        "k = 32 instead of 128; the Memorizing Transformer remembers 2,048 bytes",
    ),
    "paper": ("the gated MLP of a Llama, its width chosen for 184M weights",),
}
SILENT = (
    "chosen where our notes on the paper are silent: learning rate 1e-3 with 1,000 steps of warm-up (100 at small scale), "
    "weights drawn with deviation 0.02 (0.09 at small scale), windows of 512, the last tenth of the steps for d = 64, memory layer 8 counted from 0"
)

_PIECES = 16_385


def _sources(scale: str, texts: Path) -> list[dict[str, Any]]:
    if scale == "paper":
        return [{"name": "pg19", "kind": "hub", "dataset": "emozilla/pg19", "share": 1.0}]
    if scale == "smoke":
        paths = ["package:email", "package:json", "package:logging", "package:http"]
        return [{"name": "python", "share": 1.0, "paths": paths, "suffixes": [".py"]}]
    shares = {"books": 0.4, "code": 0.3, "arxiv": 0.15, "isabelle": 0.15}
    return [
        {
            "name": name,
            "kind": "jsonl",
            "share": share,
            "paths": [str(texts / name / "train.jsonl.gz")],
            "pieces_of": _PIECES,
            "minimum_tokens": 1024,
        }
        for name, share in shares.items()
    ]


def recipe(name: str, scale: str, texts: Path) -> dict[str, Any]:
    """The training recipe of a model, without seed and output."""
    switched = [{"after": 0, "mix": {"d": 2}}, {"after": 0.9, "mix": {"d": _PLACES[scale]}}]
    mixes: dict[str, dict[str, Any]] = {
        PLAIN: {"mix": "local"},
        SWITCHED: {"stages": switched},
        **{seeing(d): {"mix": {"d": d}} for d in (1, 2, 4, 8)},
    }
    made: dict[str, Any] = {
        "model": {**_SHAPES[scale], "temperature": True},
        "focus": {
            "memory_layers": [MEMORY_LAYER[scale]],
            "window": WINDOW[scale],
            "memory_positions": "none",
            "retrieval": "exact",
            "k": K[scale],
        },
        "train": {"what": "all"},
        "data": {"sources": _sources(scale, texts)},
        "optimizer": {"lr": 1e-3, "warmup_steps": {"smoke": 2, "small": 100, "paper": 1000}[scale]},
        "run": {
            "steps": _STEPS[scale],
            "precision": "float32" if scale == "smoke" else "auto",
            "device": "cpu" if scale == "smoke" else "auto",
            "save_every": {"smoke": 10, "small": 50, "paper": 1000}[scale],
            "log_every": {"smoke": 5, "small": 10, "paper": 100}[scale],
        },
    }
    if name == MEMORIZING:
        part = {"places": _PLACES[scale], "memory": _MEMORY[scale], "k": K[scale]}
        return {**made, "method": "memorizing", "memorizing": part}
    return {**made, "crossbatch": {"places": _PLACES[scale], "windows_per_step": 2, "stride": 1, **mixes[name]}}
