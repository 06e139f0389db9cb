"""A focused model by brute force, written from DESIGN.md section 3: the whole text at once, every key kept.

Nothing of `longfocus` is used. A plain `transformers` model runs over all tokens of one text in a single
pass; its attention is replaced by `_Attention`, which holds the unrotated queries, keys and values of every
token and decides, window by window, what each token sees and at which position:

* ordinary layers: the tokens of its window up to itself, at their positions inside the window;
* memory layers: the same, without those that are in memory already, and in the same softmax every token in
  memory, encoded as at position 0 (`first`), without rotation (`none`), or at its true distance (`absolute`).

Quadratic, slow, and with key heads repeated: the definition, not an implementation.

    windows = read([8, 8, 5])                       # three windows, the first two stored
    focused_logits(model, ids, windows, memory_layers=(1, 2))       # (21, vocabulary)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

NAME = "brute_force"


class Window(NamedTuple):
    """What is where while some new tokens are processed; all are indices into the text."""

    new: list[int]
    local: list[int]
    """Tokens in the window, oldest first, the new ones included: index in this list = position."""
    memory: list[int]
    """Tokens in memory, in the order of the text; with overlap, some of them are local too."""
    reading: bool
    """The window is stored afterwards."""
    first: dict[int, int]
    """Tokens in memory that had nothing in the window before them -> the next, if it was there when they went to memory."""


def walk(steps: Iterable[tuple[int, int, bool]], anchor: bool = False) -> list[Window]:
    """Follow (new tokens, oldest local tokens that leave first, store everything afterwards).

    With `anchor` a token that had nothing in the window before it stays when at least one other does.
    """
    windows: list[Window] = []
    local: list[int] = []
    memory: set[int] = set()
    begins: set[int] = set()
    first: dict[int, int] = {}
    fed = 0

    def move(tokens: list[int]) -> None:
        for token in set(tokens) - memory:
            if token in begins and token != local[-1]:
                first[token] = local[local.index(token) + 1]
        memory.update(tokens)

    for count, leaving, store in steps:
        stays = 1 if anchor and 0 < leaving < len(local) - 1 and local[0] in begins else 0
        move(local[stays : leaving + stays])
        new = list(range(fed, fed + count))
        local = local[:stays] + local[leaving + stays :] + new
        if local == new:
            begins.add(fed)
        windows.append(Window(new, list(local), sorted(memory), store, dict(first)))
        fed += count
        if store:
            move(local)
    return windows


def read(sizes: Sequence[int], overlap: int = 0) -> list[Window]:
    """Windows of these numbers of new tokens; all but the last are stored, `overlap` tokens stay local."""
    steps = []
    local = 0
    for number, size in enumerate(sizes):
        leaving = max(0, local - overlap)
        steps.append((size, leaving, number < len(sizes) - 1))
        local += size - leaving
    return walk(steps)


def decode(prompt: Sequence[int], new: int, window: int, keep: int, overlap: int = 0) -> list[Window]:
    """Read a prompt in windows of these sizes, then feed `new` tokens one by one.

    When the window is full its older part slides into memory and the recent `keep` tokens stay; without overlap, its first
    token is one of them.
    """
    steps = []
    local = 0
    for number, size in enumerate(prompt):
        leaving = max(0, local - overlap)
        steps.append((size, leaving, number < len(prompt) - 1))
        local += size - leaving
    for _ in range(new):
        leaving = local - keep if local == window else 0
        steps.append((1, leaving, False))
        local += 1 - leaving
    return walk(steps, anchor=overlap == 0)


def focused_logits(
    model: PreTrainedModel,
    ids: Tensor | Sequence[int],
    windows: Sequence[Window],
    *,
    memory_layers: Sequence[int],
    positions: str = "first",
    k: int | None = None,
    span: int | None = None,
    memory_dtype: torch.dtype | None = None,
    replaced: bool = False,
    balance: int | None = None,
) -> Tensor:
    """Logits (N, vocabulary) of every token of one text.

    Args:
        model: a plain one, not attached; left as it was.
        ids: (N,), as many as the windows have new tokens.
        positions: how memory layers encode keys and queries: `first`, `none` or `absolute`.
        k: each query of each head takes only its k largest scores in memory. None: all.
        span: windows that are stored see only the last `span` tokens of memory. None: all.
        memory_dtype: what keys and values are rounded to when they move to memory. None: not at all.
        replaced: `Window.first` have the keys and values of the next token in memory.
        balance: beside n tokens of memory, each local key counts 1 + n / balance times. None: once.

    Gradients flow to local keys and values; what is in memory is a constant.
    """
    ids = torch.as_tensor(ids)
    assert ids.ndim == 1 and sum(len(window.new) for window in windows) == len(ids)
    attention = _Attention(model, windows, tuple(memory_layers), positions, k, span, memory_dtype, replaced, balance)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    hook = attention.rotary.register_forward_hook(_turn_by_nothing)
    try:
        model.set_attn_implementation(NAME)
        return model(ids.unsqueeze(0), use_cache=False).logits[0]
    finally:
        hook.remove()
        model.set_attn_implementation(before)


def _turn_by_nothing(module: Any, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.ones_like(output[0]), torch.zeros_like(output[1])


class _Attention:
    """The attention function: (1, H, N, D) unrotated in, (1, N, Hq, D) out."""

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Sequence[Window],
        memory_layers: tuple[int, ...],
        positions: str,
        k: int | None,
        span: int | None,
        memory_dtype: torch.dtype | None,
        replaced: bool,
        balance: int | None,
    ) -> None:
        self.replaced, self.balance = replaced, balance
        self.windows, self.memory_layers = windows, memory_layers
        self.positions, self.k, self.span = positions, k, span
        base = getattr(model, model.base_model_prefix)
        self.rotary = base.rotary_emb
        self.kinds = model.config.layer_types if model.config.model_type == "gemma3_text" else None
        self.dtype = model.dtype
        self.memory_dtype = memory_dtype or model.dtype

    def rotate(self, x: Tensor, places: Sequence[int], layer: int) -> Tensor:
        """x (H, n, D), token i turned to position places[i] by the model's own cos and sin."""
        kind = [] if self.kinds is None else [self.kinds[layer]]
        where = torch.tensor([list(places)], dtype=torch.long)
        cos, sin = self.rotary.forward(torch.empty(1, 1, dtype=self.dtype), where, *kind)
        half = cos.shape[-1] // 2
        turned = torch.empty_like(x)
        turned[..., :half] = x[..., :half] * cos[..., :half] - x[..., half : 2 * half] * sin[..., :half]
        turned[..., half : 2 * half] = x[..., half : 2 * half] * cos[..., half:] + x[..., :half] * sin[..., half:]
        turned[..., 2 * half :] = x[..., 2 * half :]
        return turned

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        layer = module.layer_idx
        scale, softcap, sliding = kwargs["scaling"], kwargs.get("softcap"), kwargs.get("sliding_window")
        groups = query.shape[1] // key.shape[1]
        q = query[0]
        k, v = (x[0].repeat_interleave(groups, dim=0) for x in (key, value))

        def score(queries: Tensor, keys: Tensor) -> Tensor:
            scores = queries @ keys.transpose(-1, -2) * scale
            return scores if softcap is None else softcap * torch.tanh(scores / softcap)

        out = []
        for window in self.windows:
            memory = self.memory_of(window, layer)
            stored = set(window.memory) if layer in self.memory_layers else set()
            seen = [token for token in window.local if token not in stored]
            place = {token: position for position, token in enumerate(window.local)}
            near_query, near_key = q[:, window.new], k[:, seen]
            if layer not in self.memory_layers or self.positions != "none":
                near_query = self.rotate(near_query, [place[token] for token in window.new], layer)
                near_key = self.rotate(near_key, [place[token] for token in seen], layer)
            reach = len(window.local) if sliding is None else sliding
            hidden = torch.tensor([[not 0 <= place[i] - place[j] < reach for j in seen] for i in window.new])
            scores, values = score(near_query, near_key).masked_fill(hidden, -torch.inf), v[:, seen]
            if memory:
                held = [window.first.get(token, token) for token in memory] if self.replaced else memory
                far_query, far_key, far_value = near_query, k[:, held].detach(), v[:, held].detach()
                if self.positions == "first":
                    far_key = self.rotate(far_key, [0] * len(memory), layer)
                elif self.positions == "absolute":
                    far_query = self.rotate(q[:, window.new], window.new, layer)
                    far_key = self.rotate(far_key, held, layer)
                if self.balance is not None:
                    scores = scores + math.log(1 + len(memory) / self.balance)
                far_key, far_value = (x.to(self.memory_dtype).to(self.dtype) for x in (far_key, far_value))
                far_scores = score(far_query, far_key)
                if self.k is not None and self.k < len(memory):
                    taken = far_scores.argsort(-1, descending=True)[..., : self.k]
                    far_scores = torch.full_like(far_scores, -torch.inf).scatter(
                        -1, taken, far_scores.gather(-1, taken)
                    )
                scores, values = torch.cat((scores, far_scores), -1), torch.cat((values, far_value), 1)
            out.append(torch.softmax(scores, -1) @ values)
        return torch.cat(out, 1).transpose(0, 1).unsqueeze(0).contiguous(), None

    def memory_of(self, window: Window, layer: int) -> list[int]:
        """Tokens in memory that the layer sees from this window."""
        if layer not in self.memory_layers:
            return []
        hidden = 0
        if window.reading and self.span is not None:
            hidden = max(0, len(window.memory) - self.span)
        return window.memory[hidden:]
