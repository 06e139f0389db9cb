"""Whose keys attention goes to: a text's own earlier window, or those of other documents beside it (distraction).

For a window of a document, memory layers see d windows besides it: the one before it (the positive) and d - 1 of other
documents. r_d is the positive's share of the attention that these d windows receive together,

    r_d = exp(lse_positive - lse_additional),

meaned over queries; a model that cannot tell documents apart has 1 / d (Focused Transformer, arXiv 2307.03170, section
3.3). It comes from the log-normalisers of the parts whose union the layer attends to anyway, in the pass that also gives the
loss.

    read = ReadWindows(model)
    own, *others = [read.add(ids) for ids in windows]          # each read by itself
    found = positive_mass(model, ids, read, own, others)
    found.positive[18]                                          # r_d of each head of layer 18

The first token of each window draws attention whatever it says (an attention sink), which pulls r_d to 1 / d; so the share
among all but first tokens is given too. Keys and values are held once, however often and with whatever others they are seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longfocus.attention import merge, share
from longfocus.attention.context import LocalWindow
from longfocus.memory.contract import KVChunk
from longfocus.memory.dense import Scratch, attend_dense
from longfocus.memory.exact import grouped_scores, kth_score
from longfocus.memory.ram import RamStore
from longfocus.model.cache import FocusCache
from longfocus.model.reading_pass import read_windows

Partial = tuple[Tensor, Tensor]
"""out (B, Hq, T, D), lse (B, Hq, T) over a set of keys."""


class ReadWindows:
    """Memory records of pieces of text, each read by itself, as a document; their first tokens apart from the rest."""

    def __init__(self, model: Any) -> None:
        """
        Args:
            model: attached.
        """
        self.model = model
        self.first: RamStore = model.focus.new_store()
        self.rest: RamStore = model.focus.new_store()
        self._ends: list[tuple[int, int]] = [(0, 0)]

    def add(self, ids: Sequence[int]) -> int:
        """Read a piece, window by window; its number, counted from 0."""
        focus = self.model.focus
        window = focus.config.window_tokens
        store = focus.new_store()
        cache = FocusCache(focus, own=store)
        read_windows(self.model, torch.tensor([list(ids)]), cache)
        is_first = torch.arange(store.tokens, device=store.device) % window == 0
        for kind, chosen in ((self.first, is_first), (self.rest, ~is_first)):
            records = {}
            for layer in store.layers:
                whole = torch.cat([chunk.records for chunk in store.chunks(layer) if chunk.records is not None], 1)
                records[layer] = whole[:, chosen]
            kind.append(records)
        self._ends.append((self.first.tokens, self.rest.tokens))
        return len(self._ends) - 2

    def chunks(self, layer: int, numbers: Iterable[int], *, first: bool) -> Iterator[KVChunk]:
        """Views of the records of some pieces: their first tokens, or the rest; neighbours in one chunk."""
        at = 0 if first else 1
        runs: list[list[int]] = []
        for number in sorted(numbers):
            start, stop = self._ends[number][at], self._ends[number + 1][at]
            if runs and runs[-1][1] == start:
                runs[-1][1] = stop
            else:
                runs.append([start, stop])
        for start, stop in runs:
            yield from (self.first if first else self.rest).chunks(layer, start, stop)


class PositiveMass:
    """An `AdditionalContext` of a positive and some negative pieces, which keeps the positive's share of the attention.

    Afterwards, for each layer, float64 (Hq,), meaned over rows and queries:
    """

    def __init__(self, read: ReadWindows, positive: int, negatives: Sequence[int]) -> None:
        """
        Args:
            positive: number of the piece before the window.
            negatives: numbers of pieces of other documents; none for d = 1.
        """
        assert positive not in negatives and len(set(negatives)) == len(negatives)
        self.read, self._pieces = read, ((positive,), tuple(negatives))
        self.positive: dict[int, Tensor] = {}
        """Of the attention on the pieces."""
        self.positive_rest: dict[int, Tensor] = {}
        """Of the attention on the pieces without the first tokens of their windows."""
        self.additional: dict[int, Tensor] = {}
        """Share of all attention, the window's own included, that goes to the pieces."""
        self._scratch = Scratch()

    def join(self, layer: int, window: LocalWindow, *, scale: float, softcap: float | None) -> Tensor:
        """See `AdditionalContext.join`."""
        assert window.valid is None, "windows without padding"
        query, config = window.outer_query, self.read.model.focus.config
        least = None
        if config.retrieval != "dense":  # these pieces have no index: approximate retrieval searches them exactly
            # the chunks of `_attend` below, since products of other sizes round otherwise and the k-th would be missed
            groups = [(numbers, first) for numbers in self._pieces for first in (True, False)]
            every = [chunk for numbers, first in groups for chunk in self.read.chunks(layer, numbers, first=first)]
            least = kth_score(query, every, k=config.k, scale=scale, softcap=softcap, scratch=self._scratch)
        found: dict[tuple[int, bool], Partial] = {}
        for sign, numbers in enumerate(self._pieces):
            for first in (True, False):
                chunks = self.read.chunks(layer, numbers, first=first)
                part = self._attend(query, chunks, least, scale, softcap)
                if part is not None:
                    found[sign, first] = part
        additional = merge(found.values())
        rest = [part for (_, first), part in found.items() if not first]
        own = merge(part for (sign, _), part in found.items() if sign == 0)
        self.positive[layer] = _mean_share(own[1], additional[1])
        if (0, False) in found:
            self.positive_rest[layer] = _mean_share(found[0, False][1], merge(rest)[1])
        joined = merge((window.attend(scale=scale, softcap=softcap), additional))
        self.additional[layer] = _mean_share(additional[1], joined[1])
        return joined[0]

    def _attend(
        self, query: Tensor, chunks: Iterator[KVChunk], least: Tensor | None, scale: float, softcap: float | None
    ) -> Partial | None:
        """Attention over some chunks; of keys whose score is at least `least` (B, Hkv, G, T, 1), where that is given."""
        if least is None:
            return attend_dense(query, chunks, scale=scale, softcap=softcap, scratch=self._scratch)
        parts = []
        for chunk in chunks:
            keys, values = self._scratch.widen(chunk, query)
            scores = grouped_scores(query, keys, chunk.mask, scale, softcap)
            scores = scores.masked_fill(scores < least, -torch.inf)
            lse = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - torch.where(lse.isfinite(), lse, torch.zeros_like(lse)).unsqueeze(-1))
            out = weights @ values.to(weights.dtype).unsqueeze(2)
            parts.append((out.flatten(1, 2).to(query.dtype), lse.flatten(1, 2)))
        return merge(parts) if parts else None


def _mean_share(part: Tensor, whole: Tensor) -> Tensor:
    """float64 (Hq,): the mean of exp(part - whole) over rows and queries whose `whole` is not empty; nan where all are."""
    held = whole.isfinite()
    shares = share(part, whole).double().masked_fill(~held, 0.0)
    return (shares.sum((0, 2)) / held.sum((0, 2))).cpu()


@dataclass
class Found:
    """Of one window beside its pieces."""

    nll: float
    """Negative log-likelihood of all tokens of the window but the first, summed, in nats."""
    tokens: int
    """How many these are."""
    positive: dict[int, list[float]] = field(default_factory=dict)
    """Layer -> r_d of each head."""
    positive_rest: dict[int, list[float]] = field(default_factory=dict)
    """The same without the first tokens of windows."""
    additional: dict[int, list[float]] = field(default_factory=dict)
    """Layer -> for each head, the share of all attention that leaves the window."""


@torch.no_grad()
def positive_mass(model: Any, ids: Sequence[int], read: ReadWindows, positive: int, negatives: Sequence[int]) -> Found:
    """One pass of a window beside its own earlier piece and those of other documents.

    Args:
        model: attached.
        ids: the window's tokens, at least 2 and at most the model's window.
        read: holds the pieces.
        positive: the piece before the window, by its number.
        negatives: pieces of other documents, by their numbers.

    Raises:
        UnsupportedCallError: keys stand at their true distances (`memory_positions` absolute).
    """
    assert len(ids) >= 2
    device = model.focus.device
    given = torch.tensor([list(ids)], device=device)
    targets = torch.tensor([[*ids[1:], -100]], device=device)
    context = PositiveMass(read, positive, negatives)
    output = model(given, context=context, shift_labels=targets)
    masses = (context.positive, context.positive_rest, context.additional)
    lists = [{layer: mass.tolist() for layer, mass in by_layer.items()} for by_layer in masses]
    return Found(float(output.row_losses[0]), len(ids) - 1, *lists)
