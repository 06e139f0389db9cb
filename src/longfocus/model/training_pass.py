"""One training pass: rows that are windows, read side by side, whose memory layers see a context of their own.

This is how crossbatch reaches a model: no cache, no memory, positions from 0 in every row, and the loss taken
from hidden states in pieces. `FocusedModel.forward` comes here when it is given `context=`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from longfocus.attention.context import AdditionalContext
from longfocus.errors import UnsupportedCallError
from longfocus.model.attention_function import WindowPass
from longfocus.model.token_loss import token_losses

if TYPE_CHECKING:
    from longfocus.model.focus import Focus


@dataclass
class RowsOutput(ModelOutput):
    """Result of a training pass over R rows."""

    loss: Tensor | None = None
    """Sum of the token losses over `num_items_in_batch`, or their mean."""
    row_losses: Tensor | None = None
    """float32 (R,): summed token losses of each row, without gradient."""
    row_targets: Tensor | None = None
    """int (R,): tokens of each row that have a target."""
    row_right: Tensor | None = None
    """int (R,): of those, how many are the likeliest token."""


def read_rows(
    focus: Focus,
    input_ids: Tensor,
    lengths: Tensor | None,
    context: AdditionalContext,
    shift_labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
) -> RowsOutput:
    """Forward pass and loss.

    Args:
        focus: of the model.
        input_ids: int (R, T), each row one window, padded on the right.
        lengths: int (R,), tokens of each row that are not padding; None: all.
        context: what memory layers see besides the row itself.
        shift_labels: int (R, T): the target of each position itself (already the next token); -100 for none.
        num_items_in_batch: divisor of the loss; None: the targets of this call.

    Raises:
        UnsupportedCallError: a row is longer than the window, or keys stand at their true distances.
    """
    config = focus.config
    rows, tokens = input_ids.shape
    if tokens > config.window_tokens:
        raise UnsupportedCallError(
            f"forward: rows of {tokens} tokens given with context=, expected at most the window of {config.window_tokens}."
        )
    if config.memory_positions == "absolute":
        raise UnsupportedCallError(
            "forward: memory_positions 'absolute' is for reading only; train with 'first' or 'none'."
        )
    positions = torch.arange(tokens, device=input_ids.device).expand(rows, -1)
    valid = None
    if lengths is not None and int(lengths.min()) < tokens:
        valid = positions < lengths[:, None]
    window_pass = WindowPass(
        tables=focus.tables,
        memory_positions=config.memory_positions,
        query_positions=positions,
        key_positions=positions,
        valid=valid,
        unstored=None,
        context=context,
    )
    base: Any = focus.anatomy.base
    hidden = base(
        input_ids=input_ids,
        # a finished (4-D) mask makes the models skip their own
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device),
        position_ids=positions,
        use_cache=False,
        focus=window_pass,
    ).last_hidden_state
    head: Any = focus.model.get_output_embeddings()
    softcap = getattr(focus.model.config, "final_logit_softcapping", None)
    losses = token_losses(
        hidden.flatten(0, 1), head.weight, getattr(head, "bias", None), shift_labels.flatten(), softcap
    )
    targets = (shift_labels != -100).sum(1)
    divisor = num_items_in_batch if num_items_in_batch is not None else targets.sum().clamp(min=1)
    return RowsOutput(
        loss=losses.total / divisor,
        row_losses=losses.each.view(rows, tokens).sum(1).detach(),
        row_targets=targets,
        row_right=losses.right.view(rows, tokens).sum(1),
    )
