"""k chosen by query: a query that has what it needs in its window takes nothing from memory, others only keys that count.

Two rules (`KRule`) on statistics of the scores, for each query of each head, under top-k retrieval:

    skip      a query whose local normaliser (log sum exp of its local scores, balanced) is at or above a number of its layer and
              head is not searched for: additional keys would hardly stand out beside such a window
    margin    of the k best keys, those are used that receive at least `least_share` of the attention, over local keys and the k
              best together: score - log(normaliser) >= log(least_share)

Query heads that share a key head are searched together, so a search shrinks with the queries that are left, and a key head
that no query asks for is not looked at. What is skipped has exactly the result of the local window alone. Without numbers
and with share 0 every result is the same, to the last bit, as without a rule.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longfocus.k_rule import KRule
from longfocus.memory.exact import Best


@dataclass
class KCounts:
    """What a rule has done so far, by layer. Several threads may count.

    A retrieval is one query of one head that sees a memory.
    """

    retrievals: dict[int, int] = field(default_factory=dict)
    skipped: dict[int, int] = field(default_factory=dict)
    keys: dict[int, int] = field(default_factory=dict)
    """Keys that were used."""
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, layer: int, retrievals: int, skipped: int, keys: int) -> None:
        """Count."""
        with self._lock:
            for total, more in ((self.retrievals, retrievals), (self.skipped, skipped), (self.keys, keys)):
                total[layer] = total.get(layer, 0) + more

    def found(self, layer: int, local: Tensor, best: Tensor, used: Tensor) -> None:
        """Told of each search, for statistics of one's own: local normalisers (B, Hkv, G, T), scores (B, Hkv, G, T, k) of the k best
        keys, and the same with -inf for keys that are not used."""

    @property
    def skipped_share(self) -> dict[int, float]:
        """Layer -> share of retrievals that were skipped."""
        return {layer: self.skipped[layer] / total for layer, total in sorted(self.retrievals.items()) if total}

    @property
    def mean_k(self) -> float:
        """Keys a retrieval used, over all layers; 0 for skipped ones. nan where there was none."""
        total = sum(self.retrievals.values())
        return sum(self.keys.values()) / total if total else math.nan

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        total = sum(self.retrievals.values())
        return {
            "retrievals": total,
            "skipped": round(sum(self.skipped.values()) / total, 6) if total else None,
            "skipped_by_layer": {str(layer): round(share, 6) for layer, share in self.skipped_share.items()},
            "mean_k": round(self.mean_k, 4) if total else None,
        }


class Chosen(NamedTuple):
    """Partial attention over what the rule leaves."""

    out: Tensor
    """(B, Hq, T, D); 0 for a query that takes nothing."""
    lse: Tensor
    """(B, Hq, T); -inf for a query that takes nothing."""
    scores: Tensor
    """(B, Hkv, G, T, k) of the k best keys, -inf where they are not used; k = 0 unless they were asked for."""
    tokens: Tensor
    """int64, as `scores`: the keys' numbers, as the search gives them."""


Search = Callable[[Tensor, int | None], Best | None]
"""The best keys of queries (B, Hq, T, D); with a key head given, of queries (B, n, T, D) of heads that share it."""


def attend_by_rule(
    rule: KRule,
    layer: int,
    query: Tensor,
    local: Tensor,
    search: Search,
    at_once: Callable[[Tensor], int],
    *,
    kv_heads: int,
    valid: Tensor | None = None,
    counts: KCounts | None = None,
    keep: bool = False,
) -> Chosen:
    """Partial attention over the keys that the rule leaves of each query's k best.

    Args:
        query: (B, Hq, T, D).
        local: (B, Hq, T), normalisers of the local window, balanced.
        search: finds keys; something is visible, so it finds some.
        at_once: how many of some queries it should be given together.
        valid: bool (B, T), False at padding, which is not counted. None: all are tokens.
        counts: told what was done.
        keep: give the scores and numbers of the keys, too.
    """
    rows, heads, queries, dim = query.shape
    limits = torch.tensor(rule.numbers(layer, heads), dtype=local.dtype, device=local.device)
    asked = ~(local >= limits[:, None])
    real = torch.ones_like(asked) if valid is None else valid[:, None].expand_as(asked)

    def look(some: Tensor, near: Tensor, wanted: Tensor | None, head: int | None) -> Chosen:
        """The same for queries that all ask; `wanted` is false for those whose result is not used."""
        parts = []
        size = at_once(some)
        for low in range(0, some.shape[2], size):
            part, lse = some[:, :, low : low + size], near[:, :, low : low + size]
            best = search(part, head)
            assert best is not None, "something is visible"
            used = within_share(rule.least_share, best.scores, lse)
            if wanted is not None:
                used = used.masked_fill(~wanted[:, :, low : low + size].reshape(*used.shape[:-1], 1), -torch.inf)
            if counts is not None:
                counts.found(layer, lse.reshape(used.shape[:-1]), best.scores, used)
                counts.add(layer, 0, 0, _count(used, real, low, wanted))
            kept = (used, best.tokens) if keep else (used[..., :0], best.tokens[..., :0])
            parts.append((*best._replace(scores=used).attention(part), *kept))
        return Chosen(
            *(torch.cat(each, axis) for each, axis in zip(zip(*parts, strict=True), (2, 2, 3, 3), strict=True))
        )

    if counts is not None:
        counts.add(layer, int(real.sum()), int((real & ~asked).sum()), 0)
    if bool(asked.all()):
        return look(query, local, None, None)

    groups = heads // kv_heads
    by_head = (part.unflatten(1, (kv_heads, groups)).flatten(2, 3) for part in (query, local, asked & real))
    queries_of, local_of, asked_of = by_head  # (B, Hkv, G T, …)
    found: list[tuple[Tensor, Chosen] | None] = []
    for head in range(kv_heads):
        wanted = asked_of[:, head]
        most = int(wanted.sum(1).max())
        if not most:
            found.append(None)
            continue
        order = wanted.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[
            :, :most
        ]  # those that ask come first
        some = queries_of[:, head].gather(1, order.unsqueeze(2).expand(-1, -1, dim)).unsqueeze(1)
        near, flags = local_of[:, head].gather(1, order).unsqueeze(1), wanted.gather(1, order).unsqueeze(1)
        found.append((order, look(some, near, flags, head)))
    k = max((chosen.scores.shape[-1] for _, chosen in filter(None, found)), default=0)
    empty = Chosen(
        query.new_zeros(rows, groups * queries, dim),
        local.new_full((rows, groups * queries), -torch.inf),
        local.new_full((rows, groups * queries, k), -torch.inf),
        torch.full((rows, groups * queries, k), -1, device=query.device),
    )
    spread = [empty if one is None else _spread(empty, *one) for one in found]
    shape = (kv_heads, groups, queries)
    out, lse, scores, tokens = (
        torch.stack(parts, 1).view(rows, *shape, *parts[0].shape[2:]) for parts in zip(*spread, strict=True)
    )
    return Chosen(out.flatten(1, 2), lse.flatten(1, 2), scores, tokens)


def within_share(least_share: float, scores: Tensor, local: Tensor) -> Tensor:
    """Scores (B, Hkv, G, T, k), -inf where they are less than a share of everything; local normalisers (B, H, T)."""
    if not least_share:
        return scores
    total = torch.logaddexp(local.reshape(scores.shape[:-1]), torch.logsumexp(scores, -1))
    return scores.masked_fill(scores < total.unsqueeze(-1) + math.log(least_share), -torch.inf)


def _count(used: Tensor, real: Tensor, low: int, wanted: Tensor | None) -> int:
    """Keys that are used by queries which are no padding; `wanted` leaves padding out already."""
    taken = used > -torch.inf
    if wanted is None:
        taken &= real[:, :, low : low + used.shape[3]].reshape(*used.shape[:-1], 1)
    return int(taken.sum())


def _spread(empty: Chosen, order: Tensor, chosen: Chosen) -> Chosen:
    """What was found for some queries of a key head, each at its place (B, n) among all of them."""

    def at(place: Tensor, found: Tensor) -> Tensor:
        index = order.view(*order.shape, *(1,) * (found.dim() - 2)).expand(found.shape)
        return place.scatter(1, index, found.to(place.dtype))

    flat = (chosen.out.squeeze(1), chosen.lse.squeeze(1), chosen.scores[:, 0, 0], chosen.tokens[:, 0, 0])
    return Chosen(*(at(place, found) for place, found in zip(empty, flat, strict=True)))
