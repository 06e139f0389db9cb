"""Whole windows of one text, read into a memory: several side by side in one pass, where nothing else is wanted of them.

In ordinary layers windows do not see each other, and memory layers see the windows before by their keys, which are there
before any window attends (`memory/windows_context.py`). So windows need not wait for each other: a pass of a
few thousand tokens costs far less than as many passes of one window. The numbers are those of windows read one
by one, up to rounding.

Windows are grouped by their place in the text, so a text gives the same numbers, to the last bit, however it is fed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longfocus.config import FocusConfig
from longfocus.model.cache import FocusCache

if TYPE_CHECKING:
    from longfocus.model.focus import Focus
    from longfocus.model.focused import FocusedModel

PASS_TOKENS = 2048
"""Tokens of one pass (a window, if that is longer)."""


def windows_per_pass(config: FocusConfig) -> int:
    """Windows that are read side by side; 1 where a window must wait for the one before.

    That is where ordinary layers see some of the window before (`overlap`, the authors' rule), and with `absolute`
    positions.
    """
    if config.overlap or config.overflow == "all" or config.memory_positions == "absolute":
        return 1
    return max(1, PASS_TOKENS // config.window_tokens)


def pass_tokens(config: FocusConfig, seen: int) -> int:
    """New tokens that the next pass of reading takes, when `seen` tokens of the text were read in whole windows."""
    windows, size = windows_per_pass(config), config.window_tokens
    if windows == 1:
        return size if seen == 0 else size - config.overlap
    return windows * size - seen % (windows * size)


def read_windows(model: FocusedModel, ids: Tensor, cache: FocusCache) -> None:
    """Feed the next tokens (1, n) of a text in whole windows, the last of which may be shorter, and store them all.

    No logits are made. What was read so far must be whole windows, too.
    """
    at = 0
    while at < ids.shape[1]:
        part = ids[:, at : at + pass_tokens(model.focus.config, cache.own_tokens)]
        at += part.shape[1]
        _read_part(model, part, cache)


def _read_part(model: FocusedModel, part: Tensor, cache: FocusCache) -> None:
    size = model.focus.config.window_tokens
    whole = part.shape[1] // size
    if windows_per_pass(model.focus.config) > 1 and whole > 1 and cache.side_by_side:
        read_side_by_side(model.focus, {"input_ids": part[:, : whole * size].to(model.focus.device)}, cache)
        part = part[:, whole * size :]
    for window in part.split(size, 1) if part.shape[1] else ():
        model.read_window(window, cache)


def read_side_by_side(focus: Focus, inputs: dict[str, Tensor], cache: FocusCache) -> None:
    """One pass of several full windows, stored afterwards.

    Args:
        focus: of the model.
        inputs: `input_ids` (1, n) or `inputs_embeds` (1, n, hidden), n a multiple of the window.
        cache: of one row; what is local in it leaves the window first.
    """
    size = focus.config.window_tokens
    rows = {name: given.reshape(-1, size, *given.shape[2:]) for name, given in inputs.items()}
    count = next(iter(rows.values())).shape[0]
    base: Any = focus.anatomy.base
    restore = cache.snapshot()
    try:
        with torch.no_grad():
            window_pass, context = cache.open_windows(count)
            base(
                **rows,
                # a finished (4-D) mask makes the models skip their own
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=focus.device),
                position_ids=window_pass.query_positions,
                use_cache=False,
                focus=window_pass,
            )
            cache.take_windows(context, count)
    except BaseException:
        restore()
        raise
