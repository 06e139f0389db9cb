"""Focused tiny models, and the windows that brute force is told to use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longfocus.config import FocusConfig
from longfocus.errors import LongfocusError
from longfocus.model.attach import attach
from longfocus.model.windows import plan_steps
from tests.model.brute_force import Window, focused_logits, walk
from tests.models import MEMORY_LAYERS, tiny

WINDOW = 24

WINDOWS = 5e-6
"""Tolerance against brute force in float64: whatever the model's dtype, the families compute norms (and Gemma 2
its softmax) in float32, where an order of summation shows in the seventh digit. A token that is forgotten, seen
twice or encoded one position off moves these models' logits by more than 0.1."""

REENCODED = 1e-4
"""The same where keys of ordinary layers were turned to new positions: the rotary tables are float32 too, and each
turn multiplies two of their entries; a key is turned up to 50 times in these tests."""

FLOAT32 = 1e-4
"""Tolerance for whole models in float32 whose operations ran in another order: logits of size 2 to 8, and
sharp attention that multiplies a rounding of 1e-7 some hundred times over four layers."""


def focused(name: str, *, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A tiny model with memory layers 1 and 2 and a window of 24 tokens, unless told otherwise."""
    changes = options.pop("changes", {})
    return attach(
        tiny(name, dtype=dtype, **changes), FocusConfig(**{"memory_layers": MEMORY_LAYERS, "window": WINDOW, **options})
    )


def steps_of(model: Any, *feeds: int, last_window: int | None = None) -> list[tuple[int, int, bool]]:
    """Steps of a text that is fed in pieces of these numbers of tokens, as `walk` takes them."""
    steps: list[tuple[int, int, bool]] = []
    local = 0
    for count in feeds:
        for step in plan_steps(count, local, model.focus.config, last_window):
            steps.append(tuple(step))
            local += step.tokens - step.drop
    return steps


def planned(model: Any, *feeds: int, last_window: int | None = None) -> list[Window]:
    """Windows of a text that is fed in pieces of these numbers of tokens.

    The cutting itself is checked in test_windows.py; here it only tells brute force where the windows are.
    """
    return walk(steps_of(model, *feeds, last_window=last_window), anchor=model.focus.config.anchored)


def by_force(name: str, ids: Tensor, windows: list[Window], **options: Any) -> Tensor:
    """Brute-force logits (N, vocabulary) of one text under the plain model `name`, float64."""
    with torch.no_grad():
        return focused_logits(_plain(name), ids, windows, **{"memory_layers": MEMORY_LAYERS, **options})


@cache
def _plain(name: str) -> PreTrainedModel:
    return tiny(name, dtype=torch.float64)


def unless_refused(call: Callable[[], Any], about: str) -> Any:
    """The call's result, or None where it is refused with a message that speaks of `about`."""
    try:
        return call()
    except LongfocusError as error:
        if about not in str(error):
            raise
        return None


def feed(model: Any, ids: Tensor, *feeds: int, cache: Any = None) -> Tensor:
    """Logits (B, N, vocabulary) of a text fed in pieces through one cache."""
    cache = model.new_cache() if cache is None else cache
    assert sum(feeds) == ids.shape[1]
    parts, at = [], 0
    with torch.no_grad():
        for count in feeds:
            parts.append(model(ids[:, at : at + count], cache=cache).logits)
            at += count
    return torch.cat(parts, 1)
