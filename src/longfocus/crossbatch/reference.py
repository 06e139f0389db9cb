"""Crossbatch attention written out: gather, concatenate, one softmax. The definition that `attend` is tested against.

Axes: R rows of the batch (one window each), T tokens, Hq query heads, Hkv key/value heads, D head_dim,
S source rows that contexts may name (R, or the rows of all processes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from longfocus.attention import reference


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    outer_query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    positives: Sequence[Sequence[int]],
    negatives: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    scale: float,
    softcap: float | None = None,
    negative_copies: float = 1.0,
) -> Tensor:
    """Each row's queries over its local causal window and whole other windows.

    Args:
        query: (R, Hq, T, D); key, value: (R, Hkv, T, D), encoded by position inside the window.
        outer_query: (R, Hq, T, D), the query as additional keys meet it.
        context_key, context_value: (S, Hkv, T, D), encoded as additional context.
        positives, negatives: for each row the source rows that it sees.
        lengths: tokens of each source row; what follows is padding and seen by none (S numbers, own rows first).
        negative_copies: each negative counts as often as this, as if so many equal windows were there.

    Returns:
        (R, Hq, T, D).
    """
    causal = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    outs = []
    for row in range(query.shape[0]):
        one = slice(row, row + 1)
        parts = [reference.attend(query[one], key[one], value[one], mask=causal, scale=scale, softcap=softcap)]
        for sources, copies in ((positives[row], 1.0), (negatives[row], negative_copies)):
            if not sources:
                continue
            keys = torch.cat([context_key[source, :, : lengths[source]] for source in sources], 1)[None]
            values = torch.cat([context_value[source, :, : lengths[source]] for source in sources], 1)[None]
            out, lse = reference.attend(outer_query[one], keys, values, scale=scale, softcap=softcap)
            parts.append((out, lse + math.log(copies)))
        outs.append(reference.merge(parts)[0])
    return torch.cat(outs)


def contrast_rows(
    outer_query: Tensor,
    context_key: Tensor,
    positives: Sequence[Sequence[int]],
    negatives: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    scale: float,
    negative_copies: float = 1.0,
) -> Tensor:
    """-log of the positives' share of additional attention, query by query; arguments as for `attend_rows`.

    Returns:
        (): the mean over heads and tokens of each row that sees both, and over those rows; 0 where there is none.
    """
    group = outer_query.shape[1] // context_key.shape[1]
    rows = []
    for row in range(outer_query.shape[0]):
        losses = []
        for head in range(outer_query.shape[1]):
            for at in range(lengths[row]):

                def total(sources: Sequence[int], row: int = row, head: int = head, at: int = at) -> Tensor:
                    keys = torch.cat([context_key[source, head // group, : lengths[source]] for source in sources])
                    return (keys @ outer_query[row, head, at] * scale).exp().sum()

                if positives[row] and negatives[row]:
                    right = total(positives[row])
                    losses.append(-torch.log(right / (right + negative_copies * total(negatives[row]))))
        if losses:
            rows.append(torch.stack(losses).mean())
    return torch.stack(rows).mean() if rows else outer_query.new_zeros(())
