"""Prompts that begin alike are read once so far, and the cache is copied where they part.

Windows are the same and are read in the same order as for each prompt alone, so the numbers are the same to the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from longfocus.model.cache import FocusCache
from longfocus.model.focused import read_window
from longfocus.model.windows import plan_steps


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
            if self.ids != list(ids[: len(self.ids)]) or (
                self.ids and len(self.ids) not in self._ends(ids, len(self.ids))
            ):
                self.ids, self.cache = [], FocusCache(self.model.focus)
            following = prompts[number + 1] if number + 1 < len(prompts) else None
            ends = self._windows_alike(ids, following) if following is not None else []
            if ends and ends[-1] > len(self.ids):
                self._read_up_to(ids, ends[-1])
            if following is None:
                yield self.cache
                self.ids, self.cache = [], FocusCache(self.model.focus)
            else:
                yield copy.deepcopy(self.cache)

    def _windows_alike(self, one: Sequence[int], other: Sequence[int]) -> list[int]:
        """Where windows end that both prompts begin with and that leave the rest to be cut as before."""
        alike = next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        ends = set(self._ends(other, alike))
        return [end for end in self._ends(one, alike) if end in ends]

    def _ends(self, ids: Sequence[int], alike: int) -> list[int]:
        """Ends of stored windows up to `alike` after which the steps for the rest are those of the whole prompt."""
        steps = plan_steps(len(ids), 0, self.config)
        found, end, local = [], 0, 0
        for number, step in enumerate(steps):
            end, local = end + step.tokens, local - step.drop + step.tokens
            if end > alike or not step.store or end == len(ids):
                break
            full = step.tokens == self.config.window_tokens - (self.config.overlap if number else 0)
            if full and plan_steps(len(ids) - end, local, self.config) == steps[number + 1 :]:
                found.append(end)
        return found

    def _read_up_to(self, ids: Sequence[int], end: int) -> None:
        """Read on, until the windows before `end` are read."""
        while len(self.ids) < end:
            room = self.config.window_tokens - (self.config.overlap if self.ids else 0)
            part = list(ids[len(self.ids) : len(self.ids) + room])
            read_window(self.model, torch.tensor([part]), self.cache)
            self.ids += part
