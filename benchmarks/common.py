"""What the benchmarks that judge a model share: options, loading, results on disk.

Imported before torch, so that waiting threads do not spin.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers

import longfocus
from longfocus.config import MEMORY_DTYPES
from longfocus.config import WEIGHT_DTYPES as DTYPES
from longfocus.evaluation.record import write_json as write_json
from longfocus.settings import size_of
from longfocus.settings import sizes_of as sizes_of

DATA = Path(__file__).resolve().parents[2] / "shared/data"


def note(text: str) -> None:
    """A line of progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


# -- options -----------------------------------------------------------------------------------------------


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model, and how it uses its memory; what is not given is as the checkpoint says."""
    parser.add_argument("--model", default="default", metavar="PATH", help="folder, hub id, or default")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; as stored unless given")
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--window", type=int, metavar="TOKENS", help="local window")
    parser.add_argument("--memory-layers", metavar="N,N,…", help="layers that see the memory")
    parser.add_argument("--memory-dtype", choices=MEMORY_DTYPES, help="how keys and values are stored")
    parser.add_argument("--retrieval", choices=("dense", "exact"))
    parser.add_argument("--k", type=int, help="keys per query and head for exact retrieval")
    parser.add_argument(
        "--read-span", metavar="TOKENS", help="while reading, look back at most this far; -1 for everything"
    )


def focus_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The given options, as FocusConfig fields."""
    names = ("window", "memory_dtype", "retrieval", "k")
    options = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.memory_layers is not None:
        options["memory_layers"] = [int(part) for part in arguments.memory_layers.split(",")]
    if arguments.read_span is not None:
        options["read_span"] = None if arguments.read_span == "-1" else size_of(arguments.read_span)
    return options


# -- models ------------------------------------------------------------------------------------------------


def quiet(arguments: argparse.Namespace) -> None:
    """No chatter of the libraries; the number of threads."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)


def load_focused(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """(model with memory layers, tokenizer)."""
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    options = focus_options(arguments)
    model = longfocus.load(arguments.model, dtype=dtype, device=arguments.device, announce=note, **options)
    return model, longfocus.load_tokenizer(arguments.model)


# -- results -----------------------------------------------------------------------------------------------


def here() -> dict[str, Any]:
    """The machine, versions and date of a result."""
    return {
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "longfocus": longfocus.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def about(arguments: argparse.Namespace, focused: Any) -> dict[str, Any]:
    """What a result depends on: all settings, and versions."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "settings": settings,
        "model_name": focused.focus.geometry.model_name,
        "model_fingerprint": focused.focus.fingerprint,
        "model_dtype": str(focused.dtype).removeprefix("torch."),
        "focus": focused.focus.config.to_dict(),
        "device": str(focused.focus.device),
        **here(),
    }


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def save_table(arguments: argparse.Namespace, focused: Any, text: str, results: Sequence[Any]) -> None:
    """Write results.json and table.md into `arguments.out`, and print the table and where they are."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "results.json", {**about(arguments, focused), "results": results})
    (arguments.out / "table.md").write_text(text + "\n", "utf-8")
    print(text)
    print(json.dumps({"out": str(arguments.out)}))


def figure(panels: int) -> tuple[Any, list[Any], Any]:
    """(figure, its axes in a row, pyplot), drawn without a screen."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("Plots need matplotlib: pip install 'longfocus[plots]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made, axes = plt.subplots(1, panels, figsize=(max(6.5, 4 * panels), 4.2), layout="constrained", squeeze=False)
    return made, list(axes[0]), plt
