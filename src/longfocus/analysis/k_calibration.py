"""Which queries need no memory, and which keys count: a `KRule` for a model, found and tried on held-out text.

A block is a stretch of text: `memory_tokens` that are read into a memory, and some windows that follow. Each of those windows is
read with all that stands before it in memory, without a rule, and every query of every head of the memory layers is noted: its
local normaliser, and the share of its attention that its k best keys receive.

Levels go from mild to strict. At level x, of each layer and head those queries are skipped whose local normaliser is largest, as many
as would together have given a share of x of their attention to memory, and keys below x / k are left out: so that neither
costs a query more than x on average. What that does to perplexity is measured on blocks that were not calibrated on.

The memory itself is read without a rule, as it is within `read_span`. Not covered: rules that differ by the memory's length; with more
memory its keys receive more, so calibrate at about the length that is asked.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longfocus.errors import ConfigError, InputError
from longfocus.k_rule import KRule
from longfocus.memory.adaptive_k import KCounts, within_share
from longfocus.memory.context import Part
from longfocus.memory.memory import Memory
from longfocus.model.cache import FocusCache
from longfocus.model.focused import FocusedModel
from longfocus.model.gates import has_gates
from longfocus.model.reading import read_ids

LEVELS = (0.003, 0.01, 0.02, 0.05, 0.1, 0.2)
"""From mild to strict."""

Told = Callable[[str, int, int], None]
"""Told of progress: what is being done, how many windows and memories are done, and of how many."""


@dataclass(frozen=True)
class Tried:
    """A rule and what it did on the blocks that it was measured on."""

    level: float
    rule: KRule
    losses: tuple[float, ...]
    """Nats a token, of each block."""
    skipped: dict[int, float]
    """Memory layer -> share of retrievals that were skipped."""
    skipped_share: float
    """The same over all layers."""
    mean_k: float
    """Keys a retrieval used, 0 for skipped ones."""
    lost: float
    """Share of all attention that the keys would have received which the rule leaves out; mean over queries, heads and layers."""
    time: float
    """Of a window's pass, as a factor of that without a rule; median over windows."""


@dataclass(frozen=True)
class Calibration:
    """Rules from mild to strict."""

    plain: tuple[float, ...]
    """Loss of each measured block without a rule, nats a token."""
    tried: tuple[Tried, ...]

    def changes(self, tried: Tried) -> list[float]:
        """By how many nats a token each block's loss is larger than without a rule."""
        return [mine - plain for mine, plain in zip(tried.losses, self.plain, strict=True)]

    def percent(self, tried: Tried) -> float:
        """By how many percent perplexity is larger than without a rule."""
        return 100 * math.expm1(statistics.mean(self.changes(tried)))

    def strictest(self, percent: float) -> Tried | None:
        """The strictest whose perplexity is at most so many percent larger; None where even the mildest costs more."""
        good = [tried for tried in self.tried if self.percent(tried) <= percent]
        return good[-1] if good else None


def stretches(documents: Sequence[Sequence[int]], tokens: int, count: int) -> list[list[int]]:
    """Up to `count` stretches of so many tokens, the first of each document, then the second of each, …"""
    places = [
        (document, start)
        for start in range(0, max(map(len, documents), default=0) - tokens + 1, tokens)
        for document in documents
        if start + tokens <= len(document)
    ]
    return [list(document[start : start + tokens]) for document, start in places[:count]]


@torch.no_grad()
def calibrate(
    model: FocusedModel,
    blocks: Sequence[Sequence[int]],
    memory_tokens: int,
    *,
    levels: Sequence[float] = LEVELS,
    told: Told = lambda what, done, total: None,
) -> Calibration:
    """Find rules on every second of the blocks, beginning with the first, and measure them on the others.

    Args:
        model: attached, with top-k retrieval; its own rule, if it has one, is left out.
        blocks: ids, of one length: `memory_tokens`, and one or more whole windows.
        levels: in ascending order.

    Raises:
        ConfigError: dense retrieval, too few blocks, lengths that are no whole windows, or levels out of order.
    """
    focus = model.focus
    if has_gates(focus.model) or not focus.config.layers:
        raise ConfigError(
            "A k rule is for memory layers that join window and memory in one softmax; this model has none."
        )
    _check(focus.config.retrieval, blocks, memory_tokens, focus.config.window_tokens, levels)
    before, counts = focus.config, focus.k_counts
    focus.config = dataclasses.replace(before, k_rule=None)
    windows = (len(blocks[0]) - memory_tokens) // focus.config.window_tokens
    finding, measuring = blocks[::2], blocks[1::2]
    total = len(blocks) + windows * (len(finding) + len(measuring) * (2 + len(levels)))
    done = 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        told(what, done, total)

    try:
        samples = _Samples()
        for block in finding:
            for ids, memory in _windows(model, block, memory_tokens, step):
                _loss(model, ids, memory, KRule(), samples)
                step("calibrating")
        rules = [_rule(samples, level, focus.config) for level in levels]
        lost, used = _Lost(rules), [KCounts() for _ in rules]
        losses: list[list[list[float]]] = [[] for _ in range(1 + len(rules))]  # [plain and rules][blocks][windows]
        seconds: list[list[float]] = [[] for _ in range(1 + len(rules))]
        for block in measuring:
            for row in losses:
                row.append([])
            for ids, memory in _windows(model, block, memory_tokens, step):
                _loss(model, ids, memory, KRule(), lost)
                step("measuring")
                for row, spent, rule, counted in zip(losses, seconds, [None, *rules], [None, *used], strict=True):
                    begun = time.perf_counter()
                    row[-1].append(_loss(model, ids, memory, rule, counted))
                    spent.append(time.perf_counter() - begun)
                    step("measuring")
    finally:
        focus.config, focus.k_counts = before, counts
    plain, *others = [tuple(map(statistics.mean, row)) for row in losses]
    tried = [
        Tried(
            level=level,
            rule=rule,
            losses=mine,
            skipped=counted.skipped_share,
            skipped_share=sum(counted.skipped.values()) / sum(counted.retrievals.values()),
            mean_k=counted.mean_k,
            lost=share,
            time=statistics.median(one / other for one, other in zip(spent, seconds[0], strict=True)),
        )
        for level, rule, mine, counted, share, spent in zip(
            levels, rules, others, used, lost.shares, seconds[1:], strict=True
        )
    ]
    return Calibration(plain, tuple(tried))


def _check(retrieval: str, blocks: Sequence[Any], memory_tokens: int, window: int, levels: Sequence[float]) -> None:
    if retrieval == "dense":
        raise ConfigError("retrieval: 'dense' given; k is chosen under 'exact' or 'approximate' retrieval.")
    if len(blocks) < 2:
        raise ConfigError(
            f"{len(blocks)} blocks of text given, expected 2 or more: one to calibrate on, one to measure."
        )
    if not levels or list(levels) != sorted(set(levels)) or not 0 < levels[0] <= levels[-1] < 1:
        raise ConfigError(f"levels: {list(levels)} given, expected numbers between 0 and 1, from mild to strict.")
    after = len(blocks[0]) - memory_tokens
    if memory_tokens < 1 or after < window or after % window or any(len(block) != len(blocks[0]) for block in blocks):
        raise ConfigError(
            f"blocks of {len(blocks[0])} tokens with {memory_tokens} of memory given, expected one or more whole windows of "
            f"{window} tokens after 1 or more of memory."
        )


@dataclass
class _First:
    """The first tokens of a memory: what a cache reads (`AskedMemory`), as if no more had been read."""

    whole: Memory
    tokens: int

    @property
    def label(self) -> str:
        return self.whole.label

    def visible(self) -> Part:
        return Part(self.whole.store, ranges=((0, self.tokens),))

    def is_current(self, visible: Part) -> bool:
        return self.whole.is_current(visible)

    def search(self, ranges: Any) -> Any:
        return self.whole.search(ranges)


def _windows(
    model: FocusedModel, block: Sequence[int], memory_tokens: int, step: Callable[[str], None]
) -> Iterable[tuple[Tensor, _First]]:
    """The windows (1, W) of a block behind its memory, each with what stands before it."""
    window = model.focus.config.window_tokens
    memory = Memory(model)
    read_ids(model, list(block[: len(block) - window]), memory)
    step("reading")
    for start in range(memory_tokens, len(block), window):
        yield torch.tensor([list(block[start : start + window])], device=model.focus.device), _First(memory, start)


def _loss(model: FocusedModel, ids: Tensor, memory: _First, rule: KRule | None, counts: KCounts | None) -> float:
    """Mean over all tokens of a window but the first, nats."""
    focus = model.focus
    without = focus.config
    focus.config, focus.k_counts = dataclasses.replace(without, k_rule=rule), counts or KCounts()
    try:
        cache = FocusCache(focus, memory, last_window=ids.shape[1])  # type: ignore[arg-type]
        logits = model(ids, cache=cache, use_cache=True).logits[0, :-1].float()  # type: ignore[operator]
    finally:
        focus.config = without  # the next memory is read without a rule
    loss = float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
    if not math.isfinite(loss):
        raise InputError(f"A window of {ids.shape[1]} tokens has a loss of {loss}; the model computes no numbers.")
    return loss


@dataclass
class _Samples(KCounts):
    """Every query's local normaliser and the share of its attention that its k best keys receive, by layer: (Hq, queries)."""

    local: dict[int, list[Tensor]] = field(default_factory=dict)
    share: dict[int, list[Tensor]] = field(default_factory=dict)

    def found(self, layer: int, local: Tensor, best: Tensor, used: Tensor) -> None:
        for noted, numbers in ((self.local, local), (self.share, _share(local, best))):
            noted.setdefault(layer, []).append(numbers.permute(1, 2, 0, 3).flatten(0, 1).flatten(1).cpu())


class _Lost(KCounts):
    """What each of some rules would leave out, of searches made without one."""

    def __init__(self, rules: Sequence[KRule]) -> None:
        super().__init__()
        self.rules, self.total, self.queries = list(rules), [0.0] * len(rules), 0

    def found(self, layer: int, local: Tensor, best: Tensor, used: Tensor) -> None:
        _, kv_heads, groups, _ = local.shape
        whole = _share(local, best)
        total = torch.logaddexp(local, torch.logsumexp(best, -1))
        self.queries += local.numel()
        for number, rule in enumerate(self.rules):
            limits = torch.tensor(rule.numbers(layer, kv_heads * groups), dtype=local.dtype, device=local.device)
            kept = torch.exp(torch.logsumexp(within_share(rule.least_share, best, local), -1) - total)
            self.total[number] += float(
                (whole - kept.masked_fill(local >= limits.view(kv_heads, groups, 1), 0.0)).sum()
            )

    @property
    def shares(self) -> list[float]:
        """Of each rule."""
        return [total / self.queries for total in self.total]


def _share(local: Tensor, best: Tensor) -> Tensor:
    """Share of the attention that keys with scores (…, k) receive beside local normalisers (…)."""
    return torch.sigmoid(torch.logsumexp(best, -1) - local)


def _rule(samples: _Samples, level: float, config: Any) -> KRule:
    rows = []
    for layer, parts in samples.local.items():
        local, order = torch.cat(parts, 1).double().sort(1, descending=True)
        share = torch.cat(samples.share[layer], 1).double().gather(1, order)
        so_far = share.cumsum(1) / torch.arange(1, share.shape[1] + 1)
        counts = [int(good.nonzero().max()) + 1 if good.any() else 0 for good in so_far <= level]
        numbers = tuple(float(row[n - 1]) if n else math.inf for row, n in zip(local, counts, strict=True))
        rows.append((layer, numbers))
    return KRule(
        skip_from=tuple(rows),
        least_share=level / config.k,
        window=config.window_tokens,
        balance_tokens=config.balance_tokens,
    )
