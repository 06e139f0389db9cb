"""The baselines in plain PyTorch, query by query, any dtype: the definitions that `contexts.py` is tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def memorizing(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    outer_query: Tensor,
    carried_key: Tensor,
    carried_value: Tensor,
    held: Sequence[int],
    *,
    k: int | None,
    scale: float,
    gate: Tensor | None = None,
) -> Tensor:
    """Causal attention over the window and the k best of what is carried.

    Args:
        query: (P, Hq, T, D), encoded for the window; outer_query the same as carried keys meet it.
        key, value: (P, Hkv, T, D), of the window.
        carried_key, carried_value: (P, Hkv, N, D); the last `held[p]` columns are there. No gradient reaches them.
        k: keys per query and head; None: all.
        gate: b_h (Hq,): sigmoid(b_h) is the part of the carried keys' result. None: one softmax over both.

    Returns:
        (P, Hq, T, D).
    """
    places, heads, tokens, _ = query.shape
    group = heads // key.shape[1]
    rows = []
    for place in range(places):
        start = carried_key.shape[2] - held[place]
        for head in range(heads):
            far_keys, far_values = (t[place, head // group, start:].detach() for t in (carried_key, carried_value))
            for at in range(tokens):
                near = key[place, head // group, : at + 1] @ query[place, head, at] * scale
                far = far_keys @ outer_query[place, head, at] * scale
                best = far.topk(min(len(far), len(far) if k is None else k)).indices
                near_values = value[place, head // group, : at + 1]
                if gate is None or not len(far):
                    weights = torch.softmax(torch.cat((near, far[best])), 0)
                    rows.append(weights @ torch.cat((near_values, far_values[best])))
                else:
                    share = torch.sigmoid(gate[head])
                    remembered = torch.softmax(far[best], 0) @ far_values[best]
                    rows.append(share * remembered + (1 - share) * (torch.softmax(near, 0) @ near_values))
    return torch.stack(rows).view(places, heads, tokens, -1)


def transformer_xl(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before_key: Tensor,
    before_value: Tensor,
    held: Sequence[int],
    rotate: Callable[[Tensor, int], Tensor],
    *,
    scale: float,
) -> Tensor:
    """Causal attention over the window before and the window, at true distances.

    Args:
        query, key, value: (P, H or Hkv, T, D), not rotated.
        before_key, before_value: (P, Hkv, N, D), not rotated; the last `held[p]` columns are there. No gradient reaches them.
        rotate: a vector (D,) as it is at a position of the whole text.

    Returns:
        (P, Hq, T, D).
    """
    places, heads, tokens, _ = query.shape
    group = heads // key.shape[1]
    rows = []
    for place in range(places):
        start = before_key.shape[2] - held[place]
        for head in range(heads):
            keys = [*before_key[place, head // group, start:].detach(), *key[place, head // group]]
            values = torch.cat((before_value[place, head // group, start:].detach(), value[place, head // group]))
            turned = torch.stack([rotate(one, position) for position, one in enumerate(keys)])
            for at in range(tokens):
                position = held[place] + at
                scores = turned[: position + 1] @ rotate(query[place, head, at], position) * scale
                rows.append(torch.softmax(scores, 0) @ values[: position + 1])
    return torch.stack(rows).view(places, heads, tokens, -1)
