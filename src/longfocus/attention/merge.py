"""Joining partial results one at a time, so that a chunked memory holds two partial results and never a stack.

`merge` folds the definition in `reference.merge` over any number of parts; the result is the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from longfocus.attention import reference


def merge(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(out, lse) over the union of the parts' key sets.

    Args:
        parts: (out, lse) pairs, out (B, H, T, Dv), lse (B, H, T); taken one after another.

    Raises:
        ValueError: there is no part.
    """
    joined: tuple[Tensor, Tensor] | None = None
    for part in parts:
        joined = part if joined is None else reference.merge((joined, part))
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
