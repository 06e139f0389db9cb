"""The two baselines as an `AdditionalContext`. Made anew for each step; afterwards `new` holds what is to be carried on."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from longfocus.attention import attend, merge
from longfocus.attention.context import LocalWindow
from longfocus.memory.contract import KVChunk
from longfocus.memory.dense import Scratch
from longfocus.memory.exact import best_keys
from longfocus.positions import RotaryTable, rotate
from longfocus.training.baselines.carried import Pair, Seen


class _CarriedContext(ABC):
    """What is carried of earlier windows, beside the local window: of each query the k best keys, or all."""

    def __init__(self, seen: Seen, k: int | None) -> None:
        """
        Args:
            seen: one place a row.
            k: keys per query and head; None: all that are carried.
        """
        self.seen, self.k = seen, k
        self.new: dict[int, Pair] = {}

    @abstractmethod
    def meet(self, layer: int, window: LocalWindow, key: Tensor) -> tuple[Tensor, Tensor]:
        """The window's queries (P, Hq, T, D) and the carried keys (P, Hkv, N, D), encoded as they meet each other."""

    def join(self, layer: int, window: LocalWindow, *, scale: float, softcap: float | None) -> Tensor:
        """See `AdditionalContext.join`; no gradient reaches what is carried, but the queries get theirs."""
        self.new[layer] = window.outer_key.detach(), window.value.detach()
        local = window.attend(scale=scale, softcap=softcap)
        carried = self.seen.layer(layer)
        if carried is None:
            return local[0]
        key, value, mask = carried
        query, key = self.meet(layer, window, key)
        key, value = key.to(query.dtype), value.to(query.dtype)
        if self.k is None or self.k >= key.shape[2]:
            held = mask[:, None, None].expand(-1, 1, query.shape[2], -1)
            return merge((local, attend(query, key, value, mask=held, scale=scale, softcap=softcap)))[0]
        chunk = KVChunk(key, value, mask, 0)
        best = best_keys(query, [chunk], k=self.k, scale=scale, softcap=softcap, scratch=Scratch())
        assert best is not None
        return merge((local, best.attention(query)))[0]


class MemorizingContext(_CarriedContext):
    """Earlier windows of each row's document, encoded as if first."""

    def meet(self, layer: int, window: LocalWindow, key: Tensor) -> tuple[Tensor, Tensor]:
        return window.outer_query, key


class TransformerXLContext(_CarriedContext):
    """The window before, in every layer, its keys turned to their true distances (Dai et al. 2019, with rotations)."""

    def __init__(self, seen: Seen, tables: dict[int, RotaryTable]) -> None:
        """
        Args:
            seen: one place a row; what it holds ends where the row's window begins.
            tables: rotary table of each layer.
        """
        super().__init__(seen, None)
        self.tables = tables

    def meet(self, layer: int, window: LocalWindow, key: Tensor) -> tuple[Tensor, Tensor]:
        table = self.tables[layer]
        back = torch.arange(key.shape[2], 0, -1, device=key.device)[None]  # the newest is one token before the window
        cos, sin = table.at(back)
        return window.query, rotate(key, cos / table.amplitude, -sin / table.amplitude)
