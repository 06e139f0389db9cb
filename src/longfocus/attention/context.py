"""The contract between a memory layer and its additional context.

The attention function hands over the layer's local window and asks only this: "attend over it and what you
add to it, in one softmax". It never asks what kind of context it is. A memory (dense or top-k), the other
windows of a training batch, or a baseline's cached window all answer with the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from longfocus.attention.select import attend


@dataclass
class LocalWindow:
    """One memory layer's part of a pass: T new tokens, L local columns including them (the last T)."""

    query: Tensor
    """(B, Hq, T, D), encoded by its position inside the window."""
    key: Tensor
    """(B, Hkv, L, D), encoded by its position inside the window."""
    value: Tensor
    """(B, Hkv, L, D)."""
    mask: Tensor | None
    """bool (B or 1, 1, T, L): local columns that each query sees. None: all."""
    outer_query: Tensor
    """(B, Hq, T, D): the query as additional context is to meet it."""
    outer_key: Tensor
    """(B, Hkv, L, D): the window's own keys as other windows see them (as if first, for RoPE)."""
    valid: Tensor | None
    """bool (B, L): columns that hold a token. None: all."""

    def attend(self, *, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
        """Partial attention over the local columns: out (B, Hq, T, D), lse (B, Hq, T)."""
        return attend(self.query, self.key, self.value, mask=self.mask, scale=scale, softcap=softcap)


class AdditionalContext(Protocol):
    """What a memory layer sees besides its local window."""

    def join(self, layer: int, window: LocalWindow, *, scale: float, softcap: float | None) -> Tensor:
        """Attention over the local window and this context's keys, in one softmax.

        Args:
            layer: index of the memory layer.
            window: the layer's local part.
            scale: multiplies the inner products.
            softcap: as in `reference.attend`.

        Returns:
            out (B, Hq, T, D); what `window.attend` gives where this context holds nothing.
        """
        ...
