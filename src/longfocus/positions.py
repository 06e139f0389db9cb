"""Rotary helpers for memory layers, which receive unrotated queries and keys and apply the real rotation here.

A family hands over one function `positions -> (cos, sin)`, the model's own; everything else (scaled, partial
or per-layer-type rotations) follows from what it returns. The half-split layout (first half against second
half of the rotated dimensions) is that of every family in `model/families.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RotaryFunction = Callable[[Tensor], tuple[Tensor, Tensor]]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dimensions of x and leave the rest.

    Args:
        x: (B, H, N, D).
        cos, sin: broadcastable to (B, 1, N, R), R <= D, in any float dtype; cast to x's.
    """
    width = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    turning = x[..., :width]
    low, high = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat((-high, low), dim=-1) * sin
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


class RotaryTable:
    """cos and sin of window positions 0, 1, 2, …, computed once by the model's own function."""

    def __init__(self, function: RotaryFunction, positions: int) -> None:
        """
        Args:
            function: (1, P) integer positions -> cos, sin of shape (1, P, R), float32 or wider.
            positions: how many positions to tabulate at first; more are added when asked for.
        """
        self._function = function
        self._cos, self._sin = self._compute(positions)

    def _compute(self, positions: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            cos, sin = self._function(torch.arange(max(1, positions)).unsqueeze(0))
        return cos[0], sin[0]

    @property
    def amplitude(self) -> float:
        """cos(0): 1 for plain RoPE, the attention scaling of YaRN and the like otherwise."""
        return float(self._cos[0, 0]) if self._cos.shape[-1] else 1.0

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin of shape (B, 1, N, R) for (B, N) non-negative integer window positions."""
        top = int(positions.max()) + 1 if positions.numel() else 1
        if top > self._cos.shape[0]:
            self._cos, self._sin = self._compute(max(top, 2 * self._cos.shape[0]))
        if self._cos.device != positions.device:
            self._cos, self._sin = self._cos.to(positions.device), self._sin.to(positions.device)
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def anywhere(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `at`, computed afresh, for positions far outside a window (the `absolute` ablation)."""
        rows = [self._function(row.unsqueeze(0)) for row in positions]
        cos, sin = (torch.cat(parts).to(positions.device) for parts in zip(*rows, strict=True))
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def as_first(self, key: Tensor) -> Tensor:
        """Keys encoded as if at position 0 of the window: unrotated, times the amplitude."""
        if self.amplitude == 1.0:
            return key
        return rotate(key, self._cos[:1].to(key.device), self._sin[:1].to(key.device))

    def shift_back(self, key: Tensor, by: Tensor) -> Tensor:
        """Re-encode rotated keys (B, H, N, D) for positions that became smaller by `by` (B, N) or (B, 1) tokens.

        Done in float32 at least, so that keys which are shifted several times stay accurate.
        """
        cos, sin = self.at(by)
        wide = torch.promote_types(key.dtype, torch.float32)
        amplitude = self.amplitude
        return rotate(key.to(wide), cos / amplitude, -sin / amplitude).to(key.dtype)
