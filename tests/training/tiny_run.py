"""A tiny run on real files: a Llama of 4 layers, a small tokenizer, a few made texts. Also for a process to be killed."""

from __future__ import annotations

import random
import resource
import sys
from pathlib import Path
from typing import Any

import yaml

from longfocus.errors import LongfocusError
from longfocus.training.recipes import Recipe
from tests.models import tiny
from tests.small_tokenizers import tokenizer

WORDS = "the cat sat on a mat and saw that the dog had gone to town with seven red boxes of tea".split()


def prepare(folder: Path) -> Path:
    """Write model, texts and recipe; the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    words = tokenizer("byte_level")
    model = tiny("llama", vocab_size=len(words), tie_word_embeddings=True)
    model.save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    rng = random.Random(0)
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(7):
        text = " ".join(rng.choice(WORDS) for _ in range(150 + 90 * number))
        (texts / f"{number}.txt").write_text(text, "utf-8")
    recipe: dict[str, Any] = {
        "model": str(folder / "model"),
        "focus": {"memory_layers": [1, 2], "window": 16},
        "crossbatch": {
            "places": 3,
            "windows_per_step": 4,
            "mix": {"shares": [[0.5, 0, 0], [0.5, 2, 2]]},
            "negatives": "random",
        },
        "data": {
            "cache": str(folder / "tokens"),
            "sources": [
                {"name": "texts", "share": 0.5, "paths": [str(texts)]},
                {"name": "facts", "kind": "retrieval", "share": 0.5, "hay": ["texts"], "tokens": [80, 200]},
            ],
        },
        "optimizer": {"lr": 0.003},
        "run": {
            "steps": 8,
            "precision": "float32",
            "device": "cpu",
            "save_every": 1,
            "log_every": 1,
            "output": str(folder / "run"),
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), "utf-8")
    return path


def train(path: str, *changes: str) -> None:
    """Run the recipe; prints the steps made and whether it was stopped."""
    from longfocus.training.run import run

    result = run(Recipe.read(path, changes), announce=lambda text: print(text, file=sys.stderr, flush=True))
    print(result.steps, result.stopped)


def train_where_files_are_small(most_bytes: str, path: str, *changes: str) -> None:
    """The same where no file may grow beyond so many bytes, as on a disk that is full; prints the error."""
    from longfocus.training.run import run

    resource.setrlimit(resource.RLIMIT_FSIZE, (int(most_bytes), int(most_bytes)))
    try:
        run(Recipe.read(path, changes))
    except LongfocusError as error:
        print(error)
