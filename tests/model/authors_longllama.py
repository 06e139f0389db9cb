"""The released LongLLaMA code's behaviour, written anew in plain torch from a description of it.

A prompt of T tokens: all but its last `last_context_length` tokens are cut into windows of
`max_position_embeddings`. Each window starts at position 0 and sees no local cache; memory layers attend to
the window's causal keys and to all of memory in one softmax; afterwards all keys of the window, encoded at
position 0 (or not at all without positionals), and all values go to memory, in the memory's dtype. The rest
of the prompt is one window, however long, from position 0; it becomes the local cache. In decoding, when the
cache and the new tokens together are longer than `max_position_embeddings`, everything cached moves to memory
first and positions start at 0 again.

Nothing of `longfocus` or `transformers` is used; one text at a time.

    authors = AuthorsLongLlama(weights, config)        # a state dict, and config.json as a dict
    authors.prompt(ids)                                # (T, vocabulary)
    authors.step(token)                                # (vocabulary,)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class AuthorsLongLlama:
    """One text's state: the local cache of every layer, and memory of the memory layers."""

    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self.weights, self.config = weights, config
        self.heads = config["num_attention_heads"]
        self.key_heads = config.get("num_key_value_heads") or self.heads
        self.head_dim = config["hidden_size"] // self.heads
        self.layers = range(config["num_hidden_layers"])
        nothing = weights["lm_head.weight"].new_zeros(self.key_heads, 0, self.head_dim)
        self.cached = dict.fromkeys(self.layers, (nothing, nothing))  # keys not rotated
        self.memory = dict.fromkeys(config["mem_layers"], (nothing, nothing))

    def prompt(self, ids: Tensor) -> Tensor:
        """Logits of every token of a prompt (T,)."""
        window, last = self.config["max_position_embeddings"], self.config["last_context_length"]
        logits = []
        prefix = max(len(ids) - last, 0)
        for start in range(0, prefix, window):
            logits.append(self._pass(ids[start : min(start + window, prefix)]))
            self._remember()
        logits.append(self._pass(ids[prefix:]))
        return torch.cat(logits)

    def step(self, token: int) -> Tensor:
        """Logits after one more token."""
        if self.cached[0][0].shape[1] + 1 > self.config["max_position_embeddings"]:
            self._remember()
        return self._pass(torch.tensor([token]))[0]

    def _remember(self) -> None:
        """The whole local cache moves to memory."""
        dtype = getattr(torch, self.config["mem_dtype"])
        for layer, cached in self.cached.items():
            if layer in self.memory:
                # at position 0 a rotation turns by nothing, so with and without positionals the key is the same
                kept = [part.to(dtype).to(part.dtype) for part in cached]
                self.memory[layer] = tuple(torch.cat(pair, 1) for pair in zip(self.memory[layer], kept, strict=True))
            self.cached[layer] = tuple(part[:, :0] for part in cached)

    def _pass(self, ids: Tensor) -> Tensor:
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in self.layers:
            x = x + self._attention(layer, self._norm(x, f"model.layers.{layer}.input_layernorm"))
            h = self._norm(x, f"model.layers.{layer}.post_attention_layernorm")
            mlp = f"model.layers.{layer}.mlp"
            gated = torch.nn.functional.silu(self._linear(h, f"{mlp}.gate_proj")) * self._linear(h, f"{mlp}.up_proj")
            x = x + self._linear(gated, f"{mlp}.down_proj")
        return self._linear(self._norm(x, "model.norm"), "lm_head")

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        name = f"model.layers.{layer}.self_attn"
        query, key, value = (
            self._linear(x, f"{name}.{part}_proj").view(len(x), -1, self.head_dim).transpose(0, 1) for part in "qkv"
        )
        old_key, old_value = self.cached[layer]
        key, value = torch.cat((old_key, key), 1), torch.cat((old_value, value), 1)
        self.cached[layer] = key, value
        before = old_key.shape[1]
        if layer not in self.memory or self.config["mem_positionals"]:
            key = self._rotate(key, torch.arange(key.shape[1]))
            query = self._rotate(query, torch.arange(before, key.shape[1]))
        remembered = 0
        if layer in self.memory:
            remembered = self.memory[layer][0].shape[1]
            key = torch.cat((self.memory[layer][0], key), 1)
            value = torch.cat((self.memory[layer][1], value), 1)
        key, value = (part.repeat_interleave(self.heads // self.key_heads, 0) for part in (key, value))
        scores = query @ key.transpose(1, 2) / self.head_dim**0.5
        row = torch.arange(len(x)).unsqueeze(1) + before + remembered
        scores = scores.masked_fill(torch.arange(key.shape[1]) > row, -torch.inf)
        out = torch.softmax(scores, -1) @ value
        return self._linear(out.transpose(0, 1).reshape(len(x), -1), f"{name}.o_proj")

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        theta = self.config.get("rope_theta", 10000.0)
        frequency = 1.0 / theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angle = torch.cat([positions.float().unsqueeze(1) * frequency] * 2, 1)
        low, high = x.chunk(2, -1)
        return x * angle.cos().to(x) + torch.cat((-high, low), -1) * angle.sin().to(x)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self.weights[f"{name}.weight"] * normed.to(x)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T
