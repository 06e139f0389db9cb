"""The two baselines as an `AdditionalContext`. Made anew for each step; afterwards `new` holds what is to be carried on."""

from __future__ import annotations

import torch
from torch import Tensor

from longfocus.attention import attend, merge
from longfocus.attention.context import LocalWindow
from longfocus.memory.contract import KVChunk
from longfocus.memory.dense import Scratch
from longfocus.memory.exact import best_keys
from longfocus.positions import RotaryTable, rotate
from longfocus.training.baselines.carried import Pair, Seen


class MemorizingContext:
    """Earlier windows of each row's document, encoded as if first: of each query the k best, or all."""

    def __init__(self, seen: Seen, k: int | None) -> None:
        """
        Args:
            seen: one place a row.
            k: keys per query and head; None: all that are carried.
        """
        self.seen, self.k = seen, k
        self.new: dict[int, Pair] = {}

    def join(self, layer: int, window: LocalWindow, *, scale: float, softcap: float | None) -> Tensor:
        """See `AdditionalContext.join`; no gradient reaches what is carried, but the queries get theirs."""
        self.new[layer] = window.outer_key.detach(), window.value.detach()
        local = window.attend(scale=scale, softcap=softcap)
        carried = self.seen.layer(layer)
        if carried is None:
            return local[0]
        key, value, mask = carried
        key, value = key.to(window.query.dtype), value.to(window.query.dtype)
        if self.k is None or self.k >= key.shape[2]:
            held = mask[:, None, None].expand(-1, 1, window.query.shape[2], -1)
            return merge((local, attend(window.outer_query, key, value, mask=held, scale=scale, softcap=softcap)))[0]
        chunk = KVChunk(key, value, mask, 0)
        best = best_keys(window.outer_query, [chunk], k=self.k, scale=scale, softcap=softcap, scratch=Scratch())
        assert best is not None
        return merge((local, best.attention(window.outer_query)))[0]


class TransformerXLContext:
    """The window before, in every layer, its keys turned to their true distances (Dai et al. 2019, with rotations)."""

    def __init__(self, seen: Seen, tables: dict[int, RotaryTable]) -> None:
        """
        Args:
            seen: one place a row; what it holds ends where the row's window begins.
            tables: rotary table of each layer.
        """
        self.seen, self.tables = seen, tables
        self.new: dict[int, Pair] = {}

    def join(self, layer: int, window: LocalWindow, *, scale: float, softcap: float | None) -> Tensor:
        """See `AdditionalContext.join`; no gradient reaches the window before."""
        self.new[layer] = window.outer_key.detach(), window.value.detach()
        local = window.attend(scale=scale, softcap=softcap)
        carried = self.seen.layer(layer)
        if carried is None:
            return local[0]
        key, value, mask = carried
        table = self.tables[layer]
        back = torch.arange(key.shape[2], 0, -1, device=key.device)[None]  # the newest is one token before the window
        cos, sin = table.at(back)
        key = rotate(key, cos / table.amplitude, -sin / table.amplitude).to(window.query.dtype)
        held = mask[:, None, None].expand(-1, 1, window.query.shape[2], -1)
        value = value.to(window.query.dtype)
        return merge((local, attend(window.query, key, value, mask=held, scale=scale, softcap=softcap)))[0]
