"""The contract between a memory layer and its additional context.

The attention function asks only this: "for these queries, what do you add?" It never asks what kind of
context it is. A memory (dense or top-k), and later a crossbatch plan or a baseline's cached window, all
answer with one partial result (out, lse), which the attention function merges with the local part.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AdditionalContext(Protocol):
    """What a memory layer sees besides its local window."""

    def attend(self, layer: int, query: Tensor, *, scale: float, softcap: float | None) -> tuple[Tensor, Tensor] | None:
        """Partial attention of the queries over this context in one layer.

        Args:
            layer: index of the memory layer.
            query: (B, Hq, T, D), already encoded by position as this context expects.
            scale: multiplies the inner products.
            softcap: as in `reference.attend`.

        Returns:
            out (B, Hq, T, D) and lse (B, Hq, T) over this context's keys; None where it holds none.
        """
        ...

    def record_mass(self, layer: int, query: Tensor, lse: Tensor, *, scale: float, softcap: float | None) -> None:
        """Told the merged lse (B, Hq, T) over local and additional keys, so that a context which keeps
        account of attention mass can do so; most do nothing."""
        ...
