"""A training batch as additional context: what a model's forward takes, and what a step reports afterwards.

    context = CrossbatchContext(rows, contexts)
    model(input_ids, context=context, shift_labels=labels, lengths=lengths).loss.backward()
    context.mass[layer].positive          # r_d of the paper, at no extra pass

With several processes, `group` makes the windows of all of them available as negatives: keys and values are
gathered through a differentiable exchange, and the table counts the rows of all ranks, rank after rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from longfocus.attention.context import LocalWindow
from longfocus.crossbatch.attend import Mass, Table, attend_rows
from longfocus.crossbatch.contrast import contrast_rows
from longfocus.crossbatch.plan import Contexts, Rows, other_documents


class CrossbatchContext:
    """An `AdditionalContext` of the other rows of the batch. Made anew for each step."""

    def __init__(
        self,
        rows: Rows,
        contexts: Contexts,
        *,
        negative_copies: float = 1.0,
        contrast: bool = False,
        replace_first: bool = False,
        group: Any = None,
        first_row: int = 0,
    ) -> None:
        """
        Args:
            rows: the batch; with `group` that of all ranks.
            contexts: the table from `plan_contexts` over `rows`.
            negative_copies: each negative counts as often as this (see `reference.attend_rows`).
            contrast: fill `self.contrast` with the explicit loss of each layer (see `contrast`); not where layers are run
                again for the backward pass (gradient checkpointing).
            replace_first: other rows see a window's second token in place of its first (`window_first` of FocusConfig).
            group: process group whose ranks hold `rows` in order, equally many each. None: all rows are here.
            first_row: with `group`, this rank's first row.
        """
        self.rows, self.contexts = rows, contexts
        self.negative_copies, self.replace_first = negative_copies, replace_first
        self.group, self.first_row = group, first_row
        self.mass: dict[int, Mass] = {}
        self.contrast: dict[int, Tensor] = {}
        self._contrasts = contrast
        self._found_hard = 0
        self._lists = contexts.lists()

    def join(self, layer: int, window: LocalWindow, *, scale: float, softcap: float | None) -> Tensor:
        """See `AdditionalContext.join`. The mass of the layer is in `self.mass` afterwards."""
        count = window.query.shape[0]
        assert window.key.shape[2] == window.query.shape[2], "training rows bring no cache"
        assert self.first_row + count <= len(self.rows), "more rows in the batch than in the table"
        outer_query = None if window.outer_query is window.query else window.outer_query
        context_key, context_value = window.outer_key, None
        if self.group is not None:
            context_key, context_value = (_gather(tensor, self.group) for tensor in (window.outer_key, window.value))
        if self.replace_first and window.value.shape[2] > 1:
            values = window.value if context_value is None else context_value
            context_key, context_value = (self._first_replaced(tensor) for tensor in (context_key, values))
        mine = slice(self.first_row, self.first_row + count)
        positives, negatives = (lists[mine] for lists in self._lists)
        if self.contexts.wanted_hard[mine].any():
            negatives = self._hard(window.outer_query, context_key, scale)
            self._found_hard = sum(map(len, negatives))
        lengths = self.rows.lengths.tolist()
        table = Table(positives, negatives, lengths, self.negative_copies, lengths[mine])
        if self._contrasts:
            self.contrast[layer] = contrast_rows(window.outer_query, context_key, table, scale=scale, softcap=softcap)
        out, self.mass[layer] = attend_rows(
            window.query,
            window.key,
            window.value,
            outer_query,
            context_key,
            context_value,
            table,
            scale=scale,
            softcap=softcap,
        )
        return out

    def _first_replaced(self, windows: Tensor) -> Tensor:
        """Keys or values (S, Hkv, T, D) with the second token's in place of the first, where there is a second."""
        longer = torch.from_numpy(self.rows.lengths > 1).to(windows.device)[:, None, None, None]
        first = torch.where(longer, windows[:, :, 1:2], windows[:, :, :1])
        return torch.cat((first, windows[:, :, 1:]), 2)

    @torch.no_grad()
    def _hard(self, query: Tensor, keys: Tensor, scale: float) -> list[list[int]]:
        """For each row the windows of other documents whose keys score highest against its mean query per head.

        The score of a window is the log-normaliser of its keys, meaned over the heads: a soft count of keys that match.
        The choice (not the attention) depends on all of the row's queries, also on those of its later tokens.
        """
        lengths = torch.from_numpy(self.rows.lengths).to(keys.device)
        heads, key_heads = query.shape[1], keys.shape[1]
        held = torch.arange(keys.shape[2], device=keys.device)[None] < lengths[:, None]
        found: list[list[int]] = []
        for row in range(query.shape[0]):
            wanted = int(self.contexts.wanted_hard[self.first_row + row])
            others = other_documents(self.rows, self.first_row + row, self.contexts.order)
            if not wanted or not len(others):
                found.append([])
                continue
            n = int(self.rows.lengths[self.first_row + row])
            mean = query[row, :, :n].float().mean(1).reshape(key_heads, heads // key_heads, -1)
            at = torch.from_numpy(others).to(keys.device)
            scores = torch.einsum("hgd,shtd->shgt", mean, keys[at].float()) * scale
            scores = scores.masked_fill(~held[at][:, None, None], -torch.inf)
            best = torch.logsumexp(scores, -1).mean((1, 2)).argsort(descending=True, stable=True)
            found.append(others[best[:wanted].cpu().numpy()].tolist())
        return found

    @property
    def additional_windows(self) -> float:
        """Mean number of additional windows a row (of those in use) saw; hard ones as the last memory layer found them."""
        seen = (self.contexts.positives >= 0).sum() + (self.contexts.negatives >= 0).sum() + self._found_hard
        return float(seen / max(1, (self.rows.lengths > 0).sum()))


class _Gather(torch.autograd.Function):
    """Rows of all ranks, one after another; the derivative of each row comes home from all ranks that used it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        ctx.rows = tensor.shape[0]
        parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].contiguous()
        torch.distributed.all_reduce(total, group=ctx.group)
        first = torch.distributed.get_rank(ctx.group) * ctx.rows
        return total[first : first + ctx.rows], None


def _gather(tensor: Tensor, group: Any) -> Tensor:
    return _Gather.apply(tensor, group)


def gather_rows(rows: Rows, group: Any) -> Rows:
    """The rows of all ranks, rank after rank; document numbers and places made distinct by rank.

    All ranks must call it, with equally many rows.
    """
    world = torch.distributed.get_world_size(group)
    mine = np.stack([rows.places, rows.documents, rows.windows, rows.lengths]).astype(np.int64)
    device = f"cuda:{torch.cuda.current_device()}" if torch.distributed.get_backend(group) == "nccl" else "cpu"
    parts = [torch.empty(mine.shape, dtype=torch.int64, device=device) for _ in range(world)]
    torch.distributed.all_gather(parts, torch.from_numpy(mine).to(device), group=group)
    places, documents, windows, lengths = np.concatenate([part.cpu().numpy() for part in parts], 1)
    rank = np.repeat(np.arange(world), len(rows))
    places = places + rank * (int(places.max()) + 1)
    return Rows(places, documents * world + rank, windows, lengths)
