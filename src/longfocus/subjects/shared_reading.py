"""Prompts that begin alike are read once so far, and the cache is copied where they part.

Passes are the same as for each prompt alone, so the numbers are the same to the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from longfocus.model.cache import FocusCache
from longfocus.model.reading_pass import pass_tokens, read_windows, windows_per_pass
from longfocus.model.windows import plan_steps

LAST_ENDS = 4
"""Ends of passes that are tried: the rest of a prompt is cut otherwise only near its end, or (the authors' rule) always."""


class SharedReading:
    """Caches that have read what prompts have in common."""

    def __init__(self, model: Any) -> None:
        """
        Args:
            model: attached.
        """
        self.model = model
        self.config = model.focus.config
        self.ids: list[int] = []
        """What `cache` has read: whole windows."""
        self.cache = FocusCache(model.focus)

    def caches(self, prompts: Sequence[Sequence[int]]) -> Iterator[FocusCache]:
        """For each prompt in turn, a cache that has read its beginning, as far as that is shared with the next ones."""
        for number, ids in enumerate(prompts):
            if self.ids and (self.ids != list(ids[: len(self.ids)]) or not self._is_end(len(ids), len(self.ids))):
                self.ids, self.cache = [], FocusCache(self.model.focus)
            if number + 1 == len(prompts):
                yield self.cache
                self.ids, self.cache = [], FocusCache(self.model.focus)
            else:
                self._read_up_to(ids, self._end_alike(ids, prompts[number + 1]))
                yield copy.deepcopy(self.cache)

    def _end_alike(self, one: Sequence[int], other: Sequence[int]) -> int:
        """Where the last window ends that both prompts begin with and that leaves the rest of both to be cut as before."""
        alike = next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        first = pass_tokens(self.config, 0)
        last = reversed(range(first, alike + 1, pass_tokens(self.config, first))[-LAST_ENDS:])
        return next((end for end in last if self._is_end(len(one), end) and self._is_end(len(other), end)), 0)

    def _is_end(self, length: int, end: int) -> bool:
        """Whether a prompt is read in whole, stored windows up to `end`, and its rest is cut as if it had been given alone."""
        if end >= length:
            return False
        at, local = 0, 0
        steps = plan_steps(length, 0, self.config)
        for number, step in enumerate(steps):
            full = step.tokens == self.config.window_tokens - (self.config.overlap if number else 0)
            at, local = at + step.tokens, local - step.drop + step.tokens
            if not step.store or not full or at > end:
                return False
            if at == end and windows_per_pass(self.config) > 1:  # nothing stays local
                rest = plan_steps(length - end, 0, self.config)
                return [rest[0]._replace(drop=steps[number + 1].drop), *rest[1:]] == steps[number + 1 :]
            if at == end:
                return plan_steps(length - end, local, self.config) == steps[number + 1 :]
        return False

    def _read_up_to(self, ids: Sequence[int], end: int) -> None:
        """Read on, until the windows before `end` are read."""
        while len(self.ids) < end:
            size = pass_tokens(self.config, len(self.ids))
            part = list(ids[len(self.ids) : len(self.ids) + size])
            read_windows(self.model, torch.tensor([part]), self.cache)
            self.ids += part
