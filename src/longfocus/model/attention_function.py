"""The attention function that focused models are registered with: local + additional, one softmax.

Ordinary layers get PyTorch's scaled-dot-product attention with the window's mask. A memory layer gets
unrotated queries and keys (its module was handed identity embeddings, see `attach`), rotates them itself,
and has its additional context join what it holds to the local window.

Everything that belongs to one pass travels as the keyword `focus`, which the model's layers hand through.
Without it (the model was only switched with `set_attn_implementation`, or its inner model is called
directly) the function is plain attention with the mask that `transformers` made.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from longfocus.attention.context import AdditionalContext, LocalWindow
from longfocus.errors import UnsupportedCallError
from longfocus.model.gates import GATE, join_gated
from longfocus.positions import RotaryTable, rotate

NAME = "longfocus"


@dataclass
class WindowPass:
    """One pass of a window's new tokens through the model (T new tokens, L local columns including them)."""

    tables: dict[int, RotaryTable]
    """Rotary table of each memory layer."""
    memory_positions: str
    query_positions: Tensor
    """int (B, T): positions inside the window; 0 at padding."""
    key_positions: Tensor
    """int (B, L)."""
    valid: Tensor | None
    """bool (B, L): columns that hold a token. None: all."""
    unstored: Tensor | None
    """bool (B, L): columns that memory layers see locally (the others are in memory). None: all."""
    context: AdditionalContext | None
    query_base: Tensor | None = None
    """int (B,): index of the window's position 0 in the whole text; for `absolute` positions."""
    _masks: dict[Any, Tensor | None] = field(default_factory=dict)

    def mask(self, sliding_window: int | None, *, memory_layer: bool) -> Tensor | None:
        """Which local column each query sees: bool (B or 1, 1, T, L), None where one query sees all.

        In ordinary layers a padding query sees itself, so that no softmax is empty; in memory layers it may
        be empty, which `attend` allows.
        """
        key = (sliding_window, memory_layer)
        if key not in self._masks:
            self._masks[key] = self._mask(sliding_window, memory_layer)
        return self._masks[key]

    def _mask(self, sliding_window: int | None, memory_layer: bool) -> Tensor | None:
        allowed_columns = self.unstored if memory_layer and self.unstored is not None else self.valid
        queries, columns = self.query_positions.shape[1], self.key_positions.shape[1]
        span = columns if sliding_window is None else sliding_window
        slides = columns > span
        if queries == 1 and allowed_columns is None and not slides:
            return None
        device = self.query_positions.device
        column = torch.arange(columns, device=device)
        row = column[columns - queries :, None]
        mask = (column <= row)[None, None]
        if slides:
            distance = self.query_positions[:, :, None] - self.key_positions[:, None, :]
            mask = mask & (distance < span)[:, None]
        if allowed_columns is not None:
            mask = mask & allowed_columns[:, None, None, :]
            if not memory_layer:
                mask = mask | (column == row)[None, None]
        return mask


def _plain(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Ordinary attention; SDPA has no softcap, so models with one use their family's eager function."""
    if kwargs.get("softcap") is None:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    eager: Any = sys.modules[type(module).__module__].eager_attention_forward
    if mask is not None and mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        mask = bias.masked_fill(~mask, torch.finfo(query.dtype).min)
    return eager(module, query, key, value, mask, **kwargs)


def longfocus_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function registered as `longfocus`.

    Args:
        module: the attention module that calls.
        query: (B, Hq, T, D); key, value: (B, Hkv, L, D) as the cache returned them. Unrotated in memory layers.
        attention_mask: used only without `focus`.
        kwargs: what the module passes (scaling, dropout, sliding_window, softcap, …) and `focus`, a WindowPass.

    Returns:
        (B, T, Hq, D), and None for the attention weights.
    """
    focus: WindowPass | None = kwargs.pop("focus", None)
    if focus is None:
        return _plain(module, query, key, value, attention_mask, **kwargs)
    layer: Any = module.layer_idx
    sliding_window = kwargs.get("sliding_window")
    if layer not in focus.tables:
        return _plain(module, query, key, value, focus.mask(sliding_window, memory_layer=False), **kwargs)

    if kwargs.get("dropout"):
        raise UnsupportedCallError(
            f"attention_dropout: {kwargs['dropout']} given, expected 0: attention over local and memory keys has no dropout. "
            "Load the model with attention_dropout=0."
        )
    scale, softcap = kwargs["scaling"], kwargs.get("softcap")
    window = _local_window(focus, layer, query, key, value, focus.mask(sliding_window, memory_layer=True))
    if focus.context is None:
        out, _ = window.attend(scale=scale, softcap=softcap)
    elif (gate := getattr(module, GATE, None)) is not None:
        out = join_gated(gate, focus.context, layer, window, scale=scale, softcap=softcap)
    else:
        out = focus.context.join(layer, window, scale=scale, softcap=softcap)
    return out.transpose(1, 2).contiguous(), None


def _local_window(
    focus: WindowPass, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> LocalWindow:
    """Encode unrotated queries and keys for the window, and for what is additional to it."""
    outer_query, outer_key = query, key
    if focus.memory_positions != "none":
        table = focus.tables[layer]
        if focus.memory_positions == "absolute":
            assert focus.query_base is not None
            outer_query = rotate(query, *table.anywhere(focus.query_positions + focus.query_base[:, None]))
        else:
            outer_key = table.as_first(key)
        query = rotate(query, *table.at(focus.query_positions))
        key = rotate(key, *table.at(focus.key_positions))
        if focus.memory_positions == "first":
            outer_query = query
    if value.dtype != key.dtype:  # under autocast rotations are done in float32, products are not
        same = outer_query is query
        query, key, outer_key = query.to(value.dtype), key.to(value.dtype), outer_key.to(value.dtype)
        outer_query = query if same else outer_query.to(value.dtype)
    return LocalWindow(query, key, value, mask, outer_query, outer_key, focus.valid)


def register() -> None:
    """Make `longfocus` known to transformers: the attention and, lest padding be ignored, its mask."""
    AttentionInterface.register(NAME, longfocus_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
