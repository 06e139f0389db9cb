"""What is known about each model family. The core asks this table and nothing else asks for a family.

A family fits when its attention modules take `position_embeddings=(cos, sin)` in the half-split layout,
call the attention function registered for their config and pass unknown keywords on to it. A new family
that does so is one line in FAMILIES and one in the conformance test (tests/model/families.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longfocus.errors import UnsupportedModelError
from longfocus.positions import RotaryTable


@dataclass(frozen=True)
class Family:
    """Where a family keeps its parts."""

    attention: str = "self_attn"
    """Attribute of a decoder layer that holds its attention module."""
    rotary_by_layer_type: bool = False
    """The rotary module wants the layer's type as a third argument (Gemma 3)."""


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma": Family(),
    "gemma2": Family(),
    "gemma3_text": Family(rotary_by_layer_type=True),
    "phi3": Family(),
    "gpt_neox": Family(attention="attention"),
    "olmo2": Family(),
}

_REASONS = {
    "gpt2": "its positions are learned and added to the embeddings, so keys cannot be encoded as if first",
    "opt": "its positions are learned and added to the embeddings, so keys cannot be encoded as if first",
    "gptj": "its rotary layout is interleaved",
    "bloom": "it has ALiBi positions, which memory keys have no counterpart for",
    "mpt": "it has ALiBi positions, which memory keys have no counterpart for",
    "mamba": "it has no attention",
    "cohere": "its rotary layout is interleaved",
    "glm": "its rotary layout is interleaved",
    "gemma3": "this is the text-and-image model; load the text part (Gemma3ForCausalLM, model_type gemma3_text)",
}


class Anatomy:
    """One model's layers, attention modules and rotary tables."""

    def __init__(self, model: PreTrainedModel) -> None:
        """
        Raises:
            UnsupportedModelError: the family is unknown, or the model is not a causal language model.
        """
        config = model.config
        kind = getattr(config, "model_type", type(model).__name__)
        family = FAMILIES.get(kind)
        if family is None:
            reason = _REASONS.get(kind, "it was never tried with memory layers")
            raise UnsupportedModelError(
                f"Models of type {kind!r} cannot carry memory layers: {reason}. Families that can: {', '.join(FAMILIES)}."
            )
        if model.get_output_embeddings() is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no language-model head; give the model as loaded by AutoModelForCausalLM."
            )
        self.model = model
        self.family = family
        self.base: nn.Module = getattr(model, model.base_model_prefix)
        layers: Any = self.base.layers
        self.attentions: list[nn.Module] = [getattr(layer, family.attention) for layer in layers]
        self.num_layers = len(self.attentions)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._tables: dict[str | None, RotaryTable] = {}

    def layer(self, index: int) -> nn.Module:
        """A decoder layer."""
        layers: Any = self.base.layers
        return layers[index]

    @property
    def longest_window(self) -> int | None:
        """Tokens that the positions were made for; beyond it scaled rotations would change under us."""
        config = self.model.config
        limit = getattr(config, "max_position_embeddings", None)
        original = getattr(config, "original_max_position_embeddings", None)
        parameters = getattr(config, "rope_parameters", None) or {}
        for rope in [parameters, *[value for value in parameters.values() if isinstance(value, dict)]]:
            if rope.get("rope_type") in ("dynamic", "longrope"):
                original = rope.get("original_max_position_embeddings") or original
        return min(value for value in (limit, original) if value) if limit or original else None

    def sliding_window(self, layer: int) -> int | None:
        """Tokens that a sliding-window layer sees; None for a full-attention layer."""
        config = self.model.config
        kinds = getattr(config, "layer_types", None)
        if kinds is not None and kinds[layer] != "sliding_attention":
            return None
        if kinds is None and not hasattr(self.attentions[layer], "sliding_window"):
            return getattr(config, "sliding_window", None)
        return getattr(self.attentions[layer], "sliding_window", None) or getattr(config, "sliding_window", None)

    def rotary(self, layer: int) -> RotaryTable:
        """The layer's table of cos and sin, shared by the layers of one rotary type."""
        kind = self.model.config.layer_types[layer] if self.family.rotary_by_layer_type else None
        if kind not in self._tables:
            module: Any = self.base.rotary_emb

            def function(positions: Tensor) -> tuple[Tensor, Tensor]:
                device = next(self.base.parameters()).device
                dtype = torch.promote_types(next(self.base.parameters()).dtype, torch.float32)
                like = torch.empty(1, 1, dtype=dtype, device=device)
                positions = positions.to(device)
                return module(like, positions, kind) if kind is not None else module(like, positions)

            self._tables[kind] = RotaryTable(function, 2)
        return self._tables[kind]
