"""How a text is cut into windows: one pure function from sizes to steps.

A step feeds some new tokens through the model. Before it the oldest local tokens may leave the window (those
not yet in memory move there); after it the whole window may be stored in memory, and then ordinary layers
may go on seeing its last `overlap` tokens, which memory layers no longer see locally.

Example, window 8, overlap 0, last_window None (so at least 4 tokens stay local), 21 new tokens:
    8 stored, 8 stored, 5 kept local
and with 18 tokens, where only 2 would be left over, the last cut moves back so that no window is tiny:
    8 stored, 6 stored, 4 kept local
"""

from __future__ import annotations

from typing import NamedTuple

from longfocus.config import FocusConfig


class Step(NamedTuple):
    """One pass of new tokens through the model."""

    tokens: int
    """New tokens of this step, at least 1."""
    drop: int
    """Oldest local tokens that leave the window before it."""
    store: bool
    """Whether everything local is in memory after it."""


def plan_steps(new: int, local: int, config: FocusConfig, last_window: int | None = None) -> list[Step]:
    """Cut `new` tokens into steps.

    Args:
        new: tokens to feed, at least 1.
        local: tokens that ordinary layers hold already.
        config: resolved (its window is known).
        last_window: overrides the config's.

    Returns:
        Steps whose tokens add up to `new`. After each, at most `window` tokens are local (with
        overflow='all' the last step may exceed it, as in the authors' code).
    """
    assert new >= 1 and local >= 0
    last = config.last_window if last_window is None else last_window
    if config.overflow == "all":
        return _authors_steps(new, local, config.window_tokens, last or config.window_tokens)
    window, overlap = config.window_tokens, config.overlap
    keep = last if last is not None else max(1, window // 2)
    if local + new <= window:
        return [Step(new, 0, False)]
    if new <= window:  # it fits if the older part leaves
        return [Step(new, max(0, local - min(keep, window - new)), False)]

    steps: list[Step] = []
    unit = window - overlap
    prefix = new - keep if last is not None else _flexible_prefix(new, local, window, unit, keep)
    while prefix > 0:
        room = window - local
        drop = 0
        if room <= 0 or steps:  # a window was completed: start the next one
            drop = max(0, local - overlap)
            room = window - (local - drop)
        tokens = min(prefix, room)
        steps.append(Step(tokens, drop, True))
        local = local - drop + tokens
        prefix -= tokens
        new -= tokens
    drop = max(0, local - min(overlap, window - new))
    steps.append(Step(new, drop, False))
    return steps


def _flexible_prefix(new: int, local: int, window: int, unit: int, keep: int) -> int:
    """Tokens to store when the last window may be of any size from `keep` up: full windows where possible.

    A remainder shorter than `keep` would leave a tiny last window, so then the last window takes exactly
    `keep` tokens, some of them from the window before.
    """
    first = window - local if local < window else unit
    remainder = (new - first) % unit or unit
    return new - max(remainder, min(keep, unit))


def _authors_steps(new: int, local: int, window: int, last: int) -> list[Step]:
    """The rule of the authors' released code: cut off the last `last` tokens; whatever is local leaves at once."""
    steps: list[Step] = []
    prefix = max(0, new - last)
    cached = local > 0
    while prefix > 0:
        tokens = min(prefix, window)
        drop = local if local + tokens > window or not cached else 0
        steps.append(Step(tokens, drop, not cached))
        local = local - drop + tokens
        prefix -= tokens
        new -= tokens
    drop = local if not cached or (local and local + new > window) else 0
    steps.append(Step(new, drop, False))
    return steps
