"""The language models that several experiments share (sections 3.3 and 5.3, appendix C): one recipe a name, trained once.

Previous and current window of each place are fed together and the document moves on by one window a step; memory layers have no
positions and learn a temperature for each head. `model` has those of several experiments, `crossbatch` and `memorizing` make
others that differ in what they name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longfocus.reproduce.experiment import Line, Model, Scale

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

SHAPES: dict[str, dict[str, Any]] = {
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
PLACES = {"smoke": 4, "small": 64, "paper": 64}
STEPS = {"smoke": 20, "small": 500, "paper": 500_000}
_WARMUP = {"smoke": 2, "small": 100, "paper": 1000}
MEMORY = {"smoke": 128, "small": 2048, "paper": 16_384}
"""Tokens that the Memorizing Transformer remembers in training."""
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
CHOSEN = (
    "chosen where our notes on the paper are silent: learning rate 1e-3 with 1,000 steps of warm-up (100 at small scale), "
    "weights drawn with deviation 0.02 (0.09 at small scale), memory layer 8 counted from 0"
)
SILENT = f"{CHOSEN}, windows of 512 in all of these experiments"

TWO_WINDOWS = "for d = 2, w = 2 the two negatives are windows of two other documents, not two windows of one"

MANY: dict[str, dict[str, Any]] = {
    "smoke": {"lengths": [64, 128], "own": 64, "stride": 64, "block": 32, "tokens": 200, "up_to": 2000},
    "small": {
        "lengths": ["1k", "4k", "16k", "64k"],
        "own": 512,
        "stride": 512,
        "block": 128,
        "tokens": 32_768,
        "up_to": 131_072,
    },
    "paper": {
        "lengths": ["2k", "8k", "32k", "128k", "512k"],
        "own": 2048,
        "stride": 2048,
        "block": 512,
        "tokens": 1 << 20,
    },
}
"""Options of the task `perplexity` where memory fills with other documents; without texts and settings."""
ONE: dict[str, dict[str, Any]] = {
    "smoke": {"lengths": [32, 128], "stride": 64, "block": 32, "tokens": 200, "up_to": 2000},
    "small": {"lengths": [512, "2k", "8k", "32k"], "stride": 512, "block": 128, "tokens": 32_768, "up_to": 65_536},
    "paper": {"lengths": ["2k", "8k", "32k", "64k"], "stride": 2048, "block": 512, "tokens": 1 << 20},
}
"""The same where memory holds the own document only."""


def many_documents(scale: str) -> dict[str, Any]:
    """Options of `perplexity` on books, memory filling with other books."""
    return {**MANY[scale], "texts": [books(scale)], "settings": ["multi"]}


def one_document(scale: str) -> dict[str, Any]:
    """Options of `perplexity` on books, each by itself."""
    return {**ONE[scale], "texts": [books(scale)], "settings": ["single"]}


def books(scale: str) -> str:
    """The set of held-out books."""
    return "pg19" if scale == "paper" else "books"


def own_of_many(scale: str) -> str:
    """What `many_documents` does otherwise than the paper, for `Scale.departures`."""
    return (
        f"memory holds the last {MANY[scale]['own']} tokens of the own document and as many of each other one, instead of all that "
        "was read before"
    )


def measured(
    scale: str, lines: Sequence[Line], options: Mapping[str, Any], *departures: str, about: str | None = None
) -> Scale:
    """What an experiment on these models does at a scale.

    Args:
        departures: beside those of the models.
        about: instead of what the models are.
    """
    return Scale(
        lines=lines,
        seeds=SEEDS[scale],
        options=options,
        about=about or ABOUT[scale],
        departures=(*DEPARTURES.get(scale, ()), *departures),
    )


def measured_on_many(scale: str, lines: Sequence[Line], *departures: str, about: str | None = None) -> Scale:
    """`measured`, while memory fills with other documents."""
    return measured(scale, lines, many_documents(scale), own_of_many(scale), SILENT, *departures, about=about)


_PIECES = 16_385


def sources(scale: str, texts: Path) -> list[dict[str, Any]]:
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


def recipe(
    scale: str,
    texts: Path,
    *,
    focus: Mapping[str, Any] | None = None,
    data: Sequence[Mapping[str, Any]] | None = None,
    steps: int | None = None,
) -> dict[str, Any]:
    """What the recipes have in common: all but the method.

    Args:
        focus: fields that differ.
        data: other sources.
        steps: fewer or more.
    """
    steps = steps or STEPS[scale]
    return {
        "model": {**SHAPES[scale], "temperature": True},
        "focus": {
            "memory_layers": [MEMORY_LAYER[scale]],
            "window": WINDOW[scale],
            "memory_positions": "none",
            "retrieval": "exact",
            "k": K[scale],
            **(focus or {}),
        },
        "train": {"what": "all"},
        "data": {"sources": list(data or sources(scale, texts))},
        "optimizer": {"lr": 1e-3, "warmup_steps": min(_WARMUP[scale], steps // 5)},
        "run": {
            "steps": steps,
            "precision": "float32" if scale == "smoke" else "auto",
            "device": "cpu" if scale == "smoke" else "auto",
            "save_every": {"smoke": 10, "small": 50, "paper": 1000}[scale],
            "log_every": {"smoke": 5, "small": 10, "paper": 100}[scale],
        },
    }


def crossbatch(name: str, scale: str, texts: Path, part: Mapping[str, Any], **common: Any) -> Model:
    """A model by the Focused Transformer's training.

    Args:
        part: fields of the recipe's section `crossbatch` that differ; a mix or stages among them.
        common: as `recipe`.
    """
    shape = {"places": PLACES[scale], "windows_per_step": 2, "stride": 1}
    return Model(name, {**recipe(scale, texts, **common), "crossbatch": {**shape, **part}})


def memorizing(name: str, scale: str, texts: Path, part: Mapping[str, Any] | None = None, **common: Any) -> Model:
    """A Memorizing Transformer.

    Args:
        part: fields of the recipe's section `memorizing` that differ.
        common: as `recipe`.
    """
    shape = {"places": PLACES[scale], "memory": MEMORY[scale], "k": K[scale]}
    return Model(
        name, {**recipe(scale, texts, **common), "method": "memorizing", "memorizing": {**shape, **(part or {})}}
    )


def model(name: str, scale: str, texts: Path) -> Model:
    """A model that several experiments measure."""
    if name == MEMORIZING:
        return memorizing(name, scale, texts)
    switched = [{"after": 0, "mix": {"d": 2}}, {"after": 0.9, "mix": {"d": PLACES[scale]}}]
    mixes: dict[str, dict[str, Any]] = {
        PLAIN: {"mix": "local"},
        SWITCHED: {"stages": switched},
        **{seeing(d): {"mix": {"d": d}} for d in (1, 2, 4, 8)},
    }
    return crossbatch(name, scale, texts, mixes[name])
