"""Log-likelihoods of given tokens after given tokens: the probabilities with which `generate` would choose them.

A context is read once, and each of its continuations goes on from there. A focused model reads it window by window into
a memory, and while a continuation grows its window slides, as it does when an answer is generated; so a score depends on
nothing but context and continuation, and probabilities of continuations of unlike lengths add up. Inside one window, and
for a plain model, the numbers are those of one pass over all tokens. Logits are made only for tokens that are scored, a
window (or `PIECE_LOGITS`) at a time.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from longfocus.model.cache import FocusCache
from longfocus.model.windows import Step, plan_steps

if TYPE_CHECKING:
    from longfocus.memory.memory import Memory
    from longfocus.subjects.local import LocalModel

PIECE_LOGITS = 1 << 24
"""Logits held at once while a plain model predicts a long text."""


class Score(NamedTuple):
    """Of a continuation."""

    log_likelihood: float
    """Natural logarithm, summed over its tokens."""
    greedy: bool
    """Each token is the likeliest."""


class Scorer:
    """Scores continuations with one model. Call it without gradients."""

    def __init__(self, subject: LocalModel) -> None:
        self.model: Any = subject.model
        self.window: int | None = None
        """Tokens of a focused model's window."""
        if subject.kind == "focused":
            self.window = subject.model.focus.config.window_tokens

    def after(
        self, context: Sequence[int], rests: Sequence[Sequence[int]], memory: Memory | None = None
    ) -> list[Score]:
        """Scores of continuations of one context.

        Args:
            context: at least one token.
            rests: each of at least one token.
            memory: read before the context, by a focused model.
        """
        shared = by_input((), rests)
        longest = max(map(len, rests))
        cache = self._new_cache(memory)
        first: Tensor | None = None
        if len(shared) > 1 or (self.window is not None and len(context) + longest - 1 > self.window):
            first = self._feed(context, cache, keep=1)
        scores: list[Score | None] = [None] * len(rests)
        for number, (fed, members) in enumerate(shared.items()):
            if first is None:  # nothing to come back to, and one window: all of it in one pass
                pieces = self._pieces(context, fed, cache)
            else:
                branch, back = self._branch(cache, last=number == len(shared) - 1)
                pieces = itertools.chain([first], self._pieces((), fed, branch))
            for member, score in zip(members, _score(pieces, [rests[member] for member in members]), strict=True):
                scores[member] = score
            if first is not None:
                back()
        return [score for score in scores if score is not None]

    def batch(self, texts: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> list[list[Score]]:
        """Scores of several (context, continuations that differ only in their last token), in one pass.

        Args:
            texts: those of a focused model must fit its window.
        """
        fed = [[*context, *rests[0][:-1]] for context, rests in texts]
        ids, mask = left_padded(fed, 0, self.model.device)
        more = {} if self.window is not None else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        keep = max(len(rests[0]) for _, rests in texts)
        logits = self.model(ids, attention_mask=mask, use_cache=False, logits_to_keep=keep, **more).logits
        return [_score([row[keep - len(rests[0]) :]], rests) for row, (_, rests) in zip(logits, texts, strict=True)]

    def _pieces(self, context: Sequence[int], fed: Sequence[int], cache: Any) -> Iterator[Tensor]:
        """Logits (n, vocabulary) after the context's last token, where one is given, and after each token of `fed`."""
        at = 0
        while context or at < len(fed):
            part = fed[at : at + self._room(cache, len(context))]
            yield self._feed([*context, *part], cache, keep=len(part) + bool(context))
            context, at = (), at + len(part)

    def _room(self, cache: Any, context_tokens: int) -> int:
        """Tokens to feed at once after a context: of a focused model as many as see the window that each would see if it were
        fed alone."""
        if self.window is None:
            return max(1, PIECE_LOGITS // self.model.config.get_text_config().vocab_size)
        config, local = self.model.focus.config, int(cache.local_tokens[0]) if cache.rows else 0
        drop = plan_steps(1, local, config)[0].drop
        room = max(1, self.window - local + drop)
        while plan_steps(room, local, config) != [Step(room, drop, False)]:
            room -= 1
        return room - context_tokens

    def _feed(self, ids: Sequence[int], cache: Any, keep: int) -> Tensor:
        """Logits (keep, vocabulary) after the last of (n,) tokens."""
        fed = torch.tensor([list(ids)], device=self.model.device)
        logits: Tensor = self.model(fed, cache=cache, use_cache=True, logits_to_keep=keep).logits[0]
        return logits

    def _new_cache(self, memory: Memory | None) -> Any:
        if self.window is not None:
            return FocusCache(self.model.focus, memory)
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _branch(self, cache: Any, *, last: bool) -> tuple[Any, Callable[[], None]]:
        """A cache that goes on from this one, and what must be called before the next."""
        if last:
            return cache, lambda: None
        if isinstance(cache, FocusCache):
            return cache, cache.snapshot()
        return copy.deepcopy(cache), lambda: None


def by_input(context: Sequence[int], rests: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """Tokens that are fed (a context and a continuation without its last token) -> the continuations, by number, that they
    predict."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, rest in enumerate(rests):
        found.setdefault((*context, *rest[:-1]), []).append(number)
    return found


def left_padded(rows: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Tensor, Tensor]:
    """int (B, longest) ids, and their mask with 0 at padding."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def _score(pieces: Iterable[Tensor], rests: Sequence[Sequence[int]]) -> list[Score]:
    """Scores of continuations that differ only in their last token.

    Args:
        pieces: logits (n, vocabulary) that predict them, from the first token on.
    """
    totals, greedy, at = [0.0] * len(rests), [True] * len(rests), 0
    for logits in pieces:
        wide = logits.float()
        normaliser, likeliest = wide.logsumexp(-1), wide.argmax(-1)
        for number, rest in enumerate(rests):
            wanted = torch.tensor(list(rest[at : at + len(wide)]), device=wide.device)
            found = wide.gather(1, wanted[:, None]).squeeze(1) - normaliser
            totals[number] += float(found.double().sum())
            greedy[number] &= bool((likeliest == wanted).all())
        at += len(wide)
    assert all(len(rest) == at for rest in rests)
    return [Score(total, likely) for total, likely in zip(totals, greedy, strict=True)]
