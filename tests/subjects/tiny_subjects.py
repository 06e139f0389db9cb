"""Subjects over tiny models with small tokenizers, and texts for them."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch

from longfocus import FocusConfig, attach
from longfocus.subjects.local import FocusedSubject, PlainModel
from tests.models import MEMORY_LAYERS, tiny
from tests.small_tokenizers import VOCABULARY, tokenizer

WINDOW = 32

_WORDS = "it was late she said that neither the captain nor the mate très tard déjà narrator getting".split()


def text(words: int, seed: int = 0) -> str:
    """Words in lines of seven."""
    rng = random.Random(seed)
    chosen = [rng.choice(_WORDS) for _ in range(words)]
    return "\n".join(" ".join(chosen[at : at + 7]) for at in range(0, words, 7)) + "\n"


@cache
def plain(kind: str = "byte_level", dtype: torch.dtype = torch.float32) -> PlainModel:
    """Full attention, up to 2,048 tokens."""
    return PlainModel(_model(dtype), tokenizer(kind), "plain")


@cache
def focused(kind: str = "byte_level", dtype: torch.dtype = torch.float32, **options: Any) -> FocusedSubject:
    """Memory layers 1 and 2, a window of 32 tokens unless told otherwise; the same weights."""
    config = FocusConfig(**{"memory_layers": MEMORY_LAYERS, "window": WINDOW, **options})
    return FocusedSubject(attach(_model(dtype), config), tokenizer(kind), "focused")


def _model(dtype: torch.dtype) -> Any:
    return tiny("llama", dtype=dtype, vocab_size=VOCABULARY)
