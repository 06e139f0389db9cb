"""Crossbatch attention without copies: exact, differentiable through all keys and values, memory that grows with the batch.

A row's additional windows are gathered one row at a time, attended, and folded into the row's result; only
queries, keys, values, the result and its log-normaliser are kept for the backward pass, which gathers again. With
the merged normaliser the derivative of every part is that of ordinary attention, so no scores and no
partial results are stored (as in FlashAttention, arXiv 2205.14135, section 3.1, over a union of sets).

On CPUs the parts run on PyTorch's fused attention kernel; elsewhere, and with a softcap, in plain products,
block by block. Axes as in `reference`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longfocus.attention.blocks import ScoreBlock, gradients, score_blocks

BLOCK_SCORES = 1 << 23  # scores held at once by the plain form (numbers)
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class Table:
    """Which source rows each row sees, and how they count."""

    positives: Sequence[Sequence[int]]
    negatives: Sequence[Sequence[int]]
    lengths: Sequence[int]
    """Tokens of each source row; padding follows."""
    negative_copies: float = 1.0
    own_lengths: Sequence[int] | None = None
    """Tokens of the rows themselves, where they are not the first source rows."""

    def row_tokens(self, row: int) -> int:
        """Tokens of a row that are not padding."""
        return (self.lengths if self.own_lengths is None else self.own_lengths)[row]


@dataclass
class Mass:
    """Attention mass of one layer in one pass, from log-normalisers that are there anyway."""

    positive: float = 0.0
    """Mean over queries and heads of exp(lse_positive - lse_additional): the paper's r_d (section 3.3)."""
    additional: float = 0.0
    """Mean of exp(lse_additional - lse): how much of all attention leaves the window."""
    rows: int = 0
    """Rows that had both positives and negatives (for `positive`)."""
    rows_with_context: int = field(default=0)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    outer_query: Tensor | None,
    context_key: Tensor,
    context_value: Tensor | None,
    table: Table,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Mass]:
    """As `reference.attend_rows`, with the mass.

    Args:
        outer_query: None where it is `query` itself.
        context_value: None where it is `value` itself.
    """
    mass = Mass()
    out = _AttendRows.apply(query, key, value, outer_query, context_key, context_value, table, scale, softcap, mass)
    return out, mass


class _Parts:
    """Attention of one set and its derivative, given the result over the union of sets."""

    def __init__(self, query: Tensor, scale: float, softcap: float | None) -> None:
        self.fused = query.device.type == "cpu" and softcap is None
        self.scale, self.softcap = scale, softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """out (B, Hq, T, D) in the query's dtype, lse (B, Hq, T) in float32 or float64."""
        if self.fused:
            out, lse = _flash(*_fold(causal, key, query), key, value, 0.0, causal, scale=self.scale)
            return out.reshape(query.shape), lse.reshape(query.shape[:3])
        out = torch.empty_like(query)
        wide = torch.promote_types(query.dtype, torch.float32)
        lse = torch.empty(query.shape[:3], dtype=wide, device=query.device)
        for block, scores, _ in self._blocks(query, key, causal):
            top = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - top.unsqueeze(-1))
            part = weights @ value.to(wide).unsqueeze(2)
            out[:, :, block] = part.flatten(1, 2).to(out.dtype)
            lse[:, :, block] = top.flatten(1, 2)
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Derivatives in query, key, value of this set's share of `out`; `out` and `lse` are those over the union."""
        if self.fused:
            folded = _fold(causal, key, grad, query, out)
            normaliser = lse.reshape(folded[0].shape[:3])
            dq, dk, dv = _flash_backward(
                folded[0], folded[1], key, value, folded[2], normaliser, 0.0, causal, scale=self.scale
            )
            return dq.reshape(query.shape), dk, dv
        blocks = self._blocks(query, key, causal)
        return gradients(blocks, query, key, value, out, lse, grad, scale=self.scale)

    def _blocks(self, query: Tensor, key: Tensor, causal: bool) -> Iterator[ScoreBlock]:
        shape = (query.shape[2], key.shape[2])
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril() if causal else None
        return score_blocks(query, key, scale=self.scale, at_once=BLOCK_SCORES, mask=mask, softcap=self.softcap)


def _fold(causal: bool, key: Tensor, *tensors: Tensor) -> list[Tensor]:
    """(B, Hq, T, D) -> (B, Hkv, G * T, D), so that keys are read once for all heads of a group; causal ones stay."""
    if causal or tensors[0].shape[1] == key.shape[1]:
        return list(tensors)
    return [tensor.reshape(tensor.shape[0], key.shape[1], -1, tensor.shape[3]) for tensor in tensors]


def _gather(source: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Windows of the source (S, Hkv, T, D) laid end to end without their padding: (1, Hkv, N, D)."""
    if len(rows) == 1:
        return source[rows[0] : rows[0] + 1, :, : lengths[rows[0]]]
    return torch.cat([source[row, :, : lengths[row]] for row in rows], 1).unsqueeze(0)


class _AttendRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        outer_query: Tensor | None,
        context_key: Tensor,
        context_value: Tensor | None,
        table: Table,
        scale: float,
        softcap: float | None,
        mass: Mass,
    ) -> Tensor:
        parts = _Parts(query, scale, softcap)
        outer = query if outer_query is None else outer_query
        values = value if context_value is None else context_value
        out, lse = parts.forward(query, key, value, causal=True)
        shift = math.log(table.negative_copies)
        positive_mass = additional_mass = lse.new_zeros(())  # stay on the device: no wait for it per row
        for row in range(query.shape[0]):
            found, additional = [(out[row : row + 1], lse[row : row + 1])], []
            for sources, by in ((table.positives[row], 0.0), (table.negatives[row], shift)):
                if sources:
                    keys, vals = (_gather(tensor, sources, table.lengths) for tensor in (context_key, values))
                    part, part_lse = parts.forward(outer[row : row + 1], keys, vals, causal=False)
                    found.append((part, part_lse + by))
                    additional.append(part_lse + by)
            if not additional:
                continue
            n = table.row_tokens(row)
            total, merged = _merge(found)
            outside = additional[0] if len(additional) == 1 else torch.logaddexp(*additional)
            additional_mass = additional_mass + torch.exp(outside - merged)[..., :n].mean()
            mass.rows_with_context += 1
            if len(additional) == 2:
                positive_mass = positive_mass + torch.exp(additional[0] - outside)[..., :n].mean()
                mass.rows += 1
            out[row : row + 1], lse[row : row + 1] = total, merged
        mass.positive = float(positive_mass) / max(1, mass.rows)
        mass.additional = float(additional_mass) / max(1, mass.rows_with_context)
        ctx.save_for_backward(query, key, value, outer_query, context_key, context_value, out, lse)
        ctx.parts, ctx.table, ctx.shift = parts, table, shift
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, outer_query, context_key, context_value, out, lse = ctx.saved_tensors
        parts: _Parts = ctx.parts
        table: Table = ctx.table
        grad = grads[0].contiguous()
        wide = torch.promote_types(query.dtype, torch.float32)
        outer = query if outer_query is None else outer_query
        values = value if context_value is None else context_value
        dq, dk, dv = (tensor.to(wide) for tensor in parts.backward(grad, query, key, value, out, lse, causal=True))
        douter = dq if outer_query is None else torch.zeros_like(outer, dtype=wide)
        dck = torch.zeros_like(context_key, dtype=wide)
        dcv = dv if context_value is None else torch.zeros_like(values, dtype=wide)
        for row in range(query.shape[0]):
            one = slice(row, row + 1)
            for sources, by in ((table.positives[row], 0.0), (table.negatives[row], ctx.shift)):
                if not sources:
                    continue
                keys, vals = (_gather(tensor, sources, table.lengths) for tensor in (context_key, values))
                part_dq, part_dk, part_dv = parts.backward(
                    grad[one], outer[one], keys, vals, out[one], lse[one] - by, causal=False
                )
                douter[one] += part_dq
                at = 0
                for source in sources:
                    n = table.lengths[source]
                    dck[source, :, :n] += part_dk[0, :, at : at + n]
                    dcv[source, :, :n] += part_dv[0, :, at : at + n]
                    at += n
        return (
            dq.to(query.dtype),
            dk.to(key.dtype),
            dv.to(value.dtype),
            None if outer_query is None else douter.to(outer.dtype),
            dck.to(context_key.dtype),
            None if context_value is None else dcv.to(values.dtype),
            *(None,) * 4,
        )


def _merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """As `attention.merge` for parts that are never empty, without a stack of them."""
    lse = torch.logsumexp(torch.stack([part for _, part in parts]), 0)
    out = sum(torch.exp(part - lse).unsqueeze(-1) * value for value, part in parts)
    assert isinstance(out, Tensor)
    return out, lse
