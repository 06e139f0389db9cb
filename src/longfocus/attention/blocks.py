"""Attention in plain products, a block of queries at a time, and its derivative: where no fused kernel gives them.

Axes: B rows, Hq query heads in groups of G for each of Hkv key heads, T queries, N keys, t queries of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class ScoreBlock(NamedTuple):
    """Scores of some of the queries."""

    queries: slice
    scores: Tensor
    """(B, Hkv, G, t, N), float32 or wider; -inf where the mask is False."""
    slope: Tensor | None
    """What the softcap multiplies derivatives of the scores by; None without softcap."""


def score_blocks(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    at_once: int,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Iterator[ScoreBlock]:
    """The scores of all queries.

    Args:
        query: (B, Hq, T, D).
        key: (B, Hkv, N, D).
        at_once: how many numbers a block of them may have.
        mask: bool, broadcastable to (B, 1 or Hkv, T, N) and whole in T; True where the query may attend.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    heads = (key.shape[1], query.shape[1] // key.shape[1])
    step = max(1, at_once // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    across = key.to(wide).unsqueeze(2).transpose(-1, -2)
    for start in range(0, query.shape[2], step):
        block = slice(start, start + step)
        scores = query[:, :, block].to(wide).unflatten(1, heads) @ across * scale
        slope = None
        if softcap is not None:
            bent = torch.tanh(scores / softcap)
            scores, slope = softcap * bent, 1 - bent * bent
        if mask is not None:
            scores = scores.masked_fill(~mask[..., block, :].unsqueeze(-3), -torch.inf)
        yield ScoreBlock(block, scores, slope)


def gradients(
    blocks: Iterable[ScoreBlock],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives in query, key and value: with p = exp(s - lse), ds = p * (dout . v - dout . out + dlse), then the usual
    products. Where `out` and `lse` are those of a union of sets, they are those of this set's share.

    Args:
        blocks: as `score_blocks` gives them.
        out: (B, Hq, T, D), and its derivative `grad_out`.
        lse: (B, Hq, T), finite, and its derivative `grad_lse`; None: 0.

    Returns:
        Of the shapes of query, key and value, float32 or wider.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    heads = (key.shape[1], query.shape[1] // key.shape[1])
    k, v = key.to(wide).unsqueeze(2), value.to(wide).unsqueeze(2)
    dq = torch.empty_like(query, dtype=wide)
    dk, dv = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
    for block, scores, slope in blocks:
        q, o, normaliser, do = (
            tensor[:, :, block].to(wide).unflatten(1, heads) for tensor in (query, out, lse, grad_out)
        )
        p = torch.exp(scores - normaliser.unsqueeze(-1))
        delta = (do * o).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse[:, :, block].to(wide).unflatten(1, heads)
        ds = p * (do @ v.transpose(-1, -2) - delta.unsqueeze(-1))
        if slope is not None:
            ds = ds * slope
        dq[:, :, block] = (ds @ k * scale).flatten(1, 2)
        dk += (ds.transpose(-1, -2) @ q).sum(2) * scale
        dv += (p.transpose(-1, -2) @ do).sum(2)
    return dq, dk, dv
