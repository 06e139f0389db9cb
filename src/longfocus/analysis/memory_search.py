"""The memory as a retriever: how much attention the tokens of a question pay to each passage, head by head.

A question is read as any prompt is, with the memory at hand. The mass that one of its tokens gives to a memory token is
exp(score - lse), lse taken over local and memory keys together, as in `attribution`; here it is kept for each head of each
memory layer, meaned over the question's tokens and summed over the passage. First tokens of windows, which draw
attention whatever they say, are left out there and here.

    mass = head_mass(model, memory, question_ids)                 # (layers, heads, tokens)
    scores = by_passage(mass, bounds).mean((0, 1))                # (passages,)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from longfocus.analysis.attribution import window_starts
from longfocus.memory.context import MassRecorder
from longfocus.memory.memory import Memory
from longfocus.model.cache import FocusCache
from longfocus.model.focused import FocusedModel


@dataclass
class HeadRecorder(MassRecorder):
    """Sums the mass of each query head by itself; `heads[layer]` is float64 (Hq, tokens), over rows and recorded queries."""

    heads: dict[int, Tensor] = field(default_factory=dict)

    def take(self, layer: int, start: int, weights: Tensor) -> None:
        """See `MassRecorder.take`; query head h is head h % G of key head h // G."""
        found = weights.sum((0, 3)).flatten(0, 1)
        total = self.heads.setdefault(layer, torch.zeros(found.shape[0], self.tokens, dtype=torch.float64))
        total[:, start : start + found.shape[1]] += found.to(device="cpu", dtype=torch.float64)

    def take_some(self, layer: int, tokens: Tensor, weights: Tensor) -> None:
        """See `MassRecorder.take_some`."""
        heads = weights.shape[1] * weights.shape[2]
        numbers, found = (part.permute(1, 2, 0, 3, 4).reshape(heads, -1).cpu() for part in (tokens, weights))
        total = self.heads.setdefault(layer, torch.zeros(heads, self.tokens, dtype=torch.float64))
        total.scatter_add_(1, numbers, found.double())


def head_mass(model: FocusedModel, memory: Memory, ids: Sequence[int], *, leading: int = 0) -> np.ndarray:
    """Mass of each memory token, by layer and head.

    Args:
        model: attached; the memory is its own.
        ids: the question.
        leading: how many of its first tokens are special ones (BOS), whose attention says nothing.

    Returns:
        float64 (memory layers, query heads, the memory's extent), in [0, 1]: means over the question's tokens; 0 at first tokens of
        windows.
    """
    assert len(ids) > leading, "a question has tokens"
    cache = FocusCache(model.focus, memory)
    recorder = HeadRecorder(memory.extent)
    with torch.no_grad():
        for start, stop in ((0, leading), (leading, len(ids))):
            cache.recorder = recorder if start == leading else None
            if stop > start:
                part = torch.tensor([list(ids[start:stop])], device=model.focus.device)
                model.forward(part, cache=cache, use_cache=True, logits_to_keep=1)
    mass = np.stack([recorder.heads[layer].numpy() for layer in model.focus.config.layers]) / (len(ids) - leading)
    mass[:, :, window_starts(memory)] = 0.0
    return mass


def by_passage(mass: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Sums over passages.

    Args:
        mass: float (..., tokens).
        bounds: int (passages, 2), first token of each and one past its last.

    Returns:
        float (..., passages).
    """
    sums = np.concatenate((np.zeros((*mass.shape[:-1], 1)), np.cumsum(mass, -1)), -1)
    found: np.ndarray = sums[..., bounds[:, 1]] - sums[..., bounds[:, 0]]
    return found
