"""Dense retrieval: every query attends to every key of the memory, chunk by chunk through the merge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from longfocus.attention import attend, merge
from longfocus.attention.fused import StepPieces
from longfocus.attention.select import choose
from longfocus.memory.contract import KVChunk
from longfocus.memory.storage import StorageDtype


class Scratch:
    """Buffers that widen stored chunks (float16, int8, …) to the query's dtype without fresh allocations."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def widen(self, chunk: KVChunk, like: Tensor) -> tuple[Tensor, Tensor]:
        """The chunk's keys and values in the dtype and on the device of `like`."""
        if chunk.keys.dtype == like.dtype and chunk.keys.device == like.device:
            return chunk.keys, chunk.values
        if chunk.records is not None:  # in the order in which they lie: one pass over consecutive numbers
            records = self._read(chunk.records, chunk.storage, like)
            return records[:, :, 0].transpose(1, 2), records[:, :, 1].transpose(1, 2)
        both = self._read(torch.stack((chunk.keys, chunk.values)), chunk.storage, like)
        return both[0], both[1]

    def _read(self, stored: Tensor, storage: StorageDtype | None, like: Tensor) -> Tensor:
        """Stored vectors (…, elements) as numbers (…, head_dim)."""
        shape = (*stored.shape[:-1], like.shape[-1])
        if torch.is_grad_enabled() and like.requires_grad:  # autograd keeps them: no sharing
            out = torch.empty(shape, dtype=like.dtype, device=like.device)
        else:
            out = self._buffer(math.prod(shape), like).view(shape)
        if storage is None:
            return out.copy_(stored)
        storage.decode_into(out, stored)
        return out

    def _buffer(self, numbers: int, like: Tensor) -> Tensor:
        key = (like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numbers or buffer.is_inference() != torch.is_inference_mode_enabled():
            buffer = self._buffers[key] = torch.empty(numbers, dtype=like.dtype, device=like.device)
        return buffer[:numbers]


def fold_rows(query: Tensor) -> Tensor:
    """(B, H, T, D) -> (1, H, B * T, D), so that all rows read a shared memory once."""
    rows, heads, queries, dim = query.shape
    return query if rows == 1 else query.transpose(0, 1).reshape(1, heads, rows * queries, dim)


def unfold_rows(folded: Tensor, rows: int) -> Tensor:
    """Inverse of `fold_rows`, for (1, H, B * T, ...) results."""
    if rows == 1:
        return folded
    heads, queries = folded.shape[1], folded.shape[2] // rows
    return folded.reshape(heads, rows, queries, *folded.shape[3:]).transpose(0, 1)


def attend_dense(
    query: Tensor, chunks: Iterable[KVChunk], *, scale: float, softcap: float | None, scratch: Scratch
) -> tuple[Tensor, Tensor] | None:
    """Partial attention over all chunks.

    Args:
        query: (B, Hq, T, D).
        chunks: of one layer; R = 1 (shared) or B rows.

    Returns:
        out (B, Hq, T, D), lse (B, Hq, T); None where there is no chunk.
    """
    rows = query.shape[0]
    folded = fold_rows(query)

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        step = StepPieces(folded, scale)
        for chunk in chunks:
            keys, values = scratch.widen(chunk, query)
            if (
                keys.shape[0] == 1
                and chunk.mask is None
                and StepPieces.fit(folded, keys.shape[1])
                and choose(folded, keys, values, softcap)[0] == "fused"
            ):
                step.add(keys, values)
            elif keys.shape[0] == rows:
                mask = None if chunk.mask is None else chunk.mask[:, None, None, :].to(query.device)
                yield attend(query, keys, values, mask=mask, scale=scale, softcap=softcap)
            else:
                assert keys.shape[0] == 1 and chunk.mask is None
                out, lse = attend(folded, keys, values, scale=scale, softcap=softcap)
                yield unfold_rows(out, rows), unfold_rows(lse, rows)
        joined = step.join()
        if joined is not None:
            yield unfold_rows(joined[0], rows), unfold_rows(joined[1], rows)

    found = parts()
    first = next(found, None)
    if first is None:
        return None

    def rest() -> Iterator[tuple[Tensor, Tensor]]:
        yield first
        yield from found

    return merge(rest())
