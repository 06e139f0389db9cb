"""Joining partial results as they come, so that a chunked memory never holds a large stack of them.

`merge` folds the definition in `reference.merge` over any number of parts; the result is the same. Small parts (those
of a generated token) are gathered and joined together, since each join is a dozen small operations.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from longfocus.attention import reference

_GATHERED_NUMBERS = 1 << 18  # numbers of `out` that wait to be joined at once


def merge(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(out, lse) over the union of the parts' key sets.

    Args:
        parts: (out, lse) pairs, out (B, H, T, Dv), lse (B, H, T); taken one after another.

    Raises:
        ValueError: there is no part.
    """
    waiting: list[tuple[Tensor, Tensor]] = []
    for part in parts:
        waiting.append(part)
        if len(waiting) > 1 and len(waiting) * part[0].numel() > _GATHERED_NUMBERS:
            waiting = [reference.merge(waiting)]
    joined = None if not waiting else waiting[0] if len(waiting) == 1 else reference.merge(waiting)
    if joined is None:
        raise ValueError(
            "merge: no part given; an empty memory contributes a part with lse = -inf, or none beside others."
        )
    return joined


def share(lse_part: Tensor, lse_all: Tensor) -> Tensor:
    """Attention mass that a part received: exp(lse_part - lse_all), in [0, 1]; 0 where both are empty.

    This is the paper's positive attention mass r_d when the part is the positive context and `lse_all`
    covers all additional contexts (section 3.3).
    """
    safe = torch.where(lse_all.isfinite(), lse_all, torch.zeros_like(lse_all))
    return torch.exp(lse_part - safe)
