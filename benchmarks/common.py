"""What the benchmarks that judge a model share: options, loading, held-out texts, results on disk.

Imported before torch, so that waiting threads do not spin.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers

import longfocus
from longfocus.config import MEMORY_DTYPES

DATA = Path(__file__).resolve().parents[2] / "shared/data"
DTYPES = ("float32", "bfloat16", "float16")


def note(text: str) -> None:
    """A line of progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


# -- options -----------------------------------------------------------------------------------------------


def size_of(text: str) -> int:
    """Tokens: `8k` is 8,192."""
    return int(float(text[:-1]) * 1024) if text.lower().endswith("k") else int(text)


def sizes_of(text: str) -> list[int]:
    """Comma-separated sizes, without repeats, in order."""
    return sorted({size_of(part) for part in text.split(",")})


def size_name(tokens: int) -> str:
    """The inverse of `size_of`, for tables and axes."""
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else f"{tokens:,}"


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
        span = size_of(arguments.read_span)
        options["read_span"] = None if span < 0 else span
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


def load_plain(source: str, arguments: argparse.Namespace) -> Any:
    """The same checkpoint, or another, as `transformers` alone would run it."""
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    alone = longfocus.FocusConfig(memory_layers=())
    return longfocus.detach(longfocus.load(source, alone, dtype=dtype, device=arguments.device, announce=note))


def longest_plain(model: Any) -> int:
    """Tokens that a plain model's positions cover."""
    return int(getattr(model.config, "max_position_embeddings", None) or 1 << 30)


# -- texts -------------------------------------------------------------------------------------------------


@cache
def held_out(part: str) -> list[tuple[str, str]]:
    """(id, text) of the test documents of a set: books, code, arxiv, isabelle."""
    path = DATA / part / "test.jsonl.gz"
    if not path.exists():
        raise SystemExit(f"{path} is not there; the texts are described in {DATA}/README.md.")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [(record["id"], record["text"]) for record in map(json.loads, lines)]


# -- results -----------------------------------------------------------------------------------------------


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927), which holds for small counts and at 0 and 1 too."""
    if not total:
        return 0.0, 1.0
    z = 1.959964
    share = right / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)


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


def write_json(path: Path, data: Any) -> None:
    """Whole or not at all: a kill leaves the file as it was."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")
    os.replace(new, path)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


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
