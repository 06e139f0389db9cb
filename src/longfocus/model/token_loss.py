"""Next-token loss from hidden states, in pieces: the logits of a whole batch are never held.

A batch of 8,192 tokens over a vocabulary of 49,152 would take 1.6 GB of float32 logits and as much for their
gradient. Here each piece's logits give its loss and, at once, the gradient in its hidden states (and in the
head's weight, where that is trained), so nothing is computed twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

PIECE_LOGITS = 1 << 24  # logits held at once (numbers)
IGNORED = -100


class TokenLosses(NamedTuple):
    """Losses of a batch of N tokens."""

    total: Tensor
    """Scalar: the sum over tokens with a target, in float32 (float64 for a float64 model); differentiable."""
    each: Tensor
    """(N,), as `total`: 0 where there is no target."""
    right: Tensor
    """bool (N,): the likeliest token is the target."""


def token_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, softcap: float | None = None
) -> TokenLosses:
    """Cross-entropy of softmax(hidden @ weight.T + bias) at the targets.

    Args:
        hidden: (N, hidden size).
        weight: (vocabulary, hidden size); bias (vocabulary,) or None: the model's head.
        targets: int (N,), -100 where no loss is taken.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
    """
    return TokenLosses(*_TokenLosses.apply(hidden, weight, bias, targets, softcap))


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, softcap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = weight.to(_product_dtype(hidden))
        rows = hidden.shape[0]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        each = torch.zeros(rows, dtype=wide, device=hidden.device)
        right = torch.zeros(rows, dtype=torch.bool, device=hidden.device)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias and bias is not None else None
        found = torch.nonzero(targets != IGNORED).squeeze(1)
        with torch.autocast(hidden.device.type, enabled=False):
            for at in found.split(max(1, PIECE_LOGITS // weight.shape[0])) if len(found) else ():
                states, target = hidden[at].to(head.dtype), targets[at]
                logits = (states @ head.T).to(wide)
                if bias is not None:
                    logits += bias
                slope = None
                if softcap is not None:
                    bent = torch.tanh(logits / softcap)
                    logits, slope = softcap * bent, 1 - bent * bent
                own = logits.gather(1, target[:, None]).squeeze(1)
                top = logits.amax(-1)
                right[at] = own == top
                grad = logits.sub_(top[:, None]).exp_()  # in place from here on: passes over the logits are what costs
                total = grad.sum(-1)
                each[at] = total.log() + top - own
                if not (needs_hidden or needs_weight or needs_bias):
                    continue
                grad.mul_(total.reciprocal()[:, None])
                grad[torch.arange(len(at), device=at.device), target] -= 1
                if slope is not None:
                    grad *= slope
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                narrow = grad.to(head.dtype)
                if grad_hidden is not None:
                    grad_hidden[at] = (narrow @ head).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight += (narrow.T @ states).to(wide)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(each, right)
        return each.sum(), each, right

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        by = grads[0]
        return (
            None if grad_hidden is None else grad_hidden * by.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * by).to(ctx.weight_dtype),
            None if grad_bias is None else (grad_bias * by).to(ctx.bias_dtype),
            None,
            None,
        )


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which a linear layer would compute here."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
