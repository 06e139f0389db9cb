"""Memory records in RAM (or on an accelerator), in blocks, so that growing copies at most one block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from longfocus.memory.contract import CHUNK_TOKENS, KVChunk, chunk_of
from longfocus.memory.storage import StorageDtype, storage_dtype


class RamStore:
    """A `KVStore` of one text, or of one text per row of a batch."""

    def __init__(
        self,
        layers: Sequence[int],
        kv_heads: int,
        head_dim: int,
        dtype: StorageDtype | torch.dtype,
        *,
        rows: int = 1,
        device: torch.device | str = "cpu",
        block_tokens: int = CHUNK_TOKENS,
    ) -> None:
        self.layers = tuple(layers)
        self.storage = storage_dtype(dtype) if isinstance(dtype, torch.dtype) else dtype
        self.shape = (2, kv_heads, self.storage.elements(head_dim))
        self.device = torch.device(device)
        self.block_tokens = block_tokens
        self._rows = rows
        self._tokens = 0
        self._blocks: list[dict[int, Tensor]] = []
        self._masks: list[np.ndarray] = []
        self._used: list[int] = []
        self._dense = True  # no mask has a hole so far

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the records (allocated blocks may hold a little more)."""
        number = self._tokens * self._rows * len(self.layers)
        return number * self.shape[0] * self.shape[1] * self.shape[2] * self.storage.element.itemsize

    def append(self, records: Mapping[int, Tensor], mask: np.ndarray | None = None) -> None:
        """See `KVStore.append`; records are written in the store's dtype and moved to its device."""
        assert set(records) == set(self.layers), "records for every memory layer, and no other"
        count = next(iter(records.values())).shape[1] if records else 0
        if mask is not None and mask.all():
            mask = None
        if mask is not None:
            self._dense = False
        done = 0
        while done < count:
            if not self._blocks or self._used[-1] == self._blocks[-1][self.layers[0]].shape[1]:
                self._more_room(count - done)
            used = self._used[-1]
            block = self._blocks[-1]
            take = min(block[self.layers[0]].shape[1] - used, count - done)
            for layer, new in records.items():
                # through .data: autograd may hold views of earlier records, which stay as they are
                block[layer].data[:, used : used + take].copy_(self.storage.store(new[:, done : done + take].detach()))
            self._masks[-1][:, used : used + take] = True if mask is None else mask[:, done : done + take]
            self._used[-1] = used + take
            done += take
        self._tokens += count

    def _more_room(self, wanted: int) -> None:
        """Grow the last block up to `block_tokens`, then begin another; so chunks end at multiples of it."""
        old = self._used[-1] if self._blocks else self.block_tokens
        growing = old < self.block_tokens
        base = old if growing else 0
        size = min(self.block_tokens, max(base + wanted, 2 * base, 256))
        shape = (self._rows, size, *self.shape)
        with torch.inference_mode(False):  # a block may outlive the mode it was first written in
            block = {layer: torch.empty(shape, dtype=self.storage.element, device=self.device) for layer in self.layers}
        mask = np.zeros((self._rows, size), dtype=bool)
        if growing:
            for layer, records in self._blocks[-1].items():
                block[layer][:, :base] = records[:, :base]
            mask[:, :base] = self._masks[-1][:, :base]
            self._blocks[-1], self._masks[-1] = block, mask
        else:
            self._blocks.append(block)
            self._masks.append(mask)
            self._used.append(0)

    def rewind(self, tokens: int) -> None:
        """Forget records beyond `tokens`."""
        surplus = sum(self._used) - tokens  # an append that was interrupted halfway counts
        while surplus > 0:
            cut = min(surplus, self._used[-1])
            self._used[-1] -= cut
            surplus -= cut
            if self._used[-1] == 0:
                for part in (self._blocks, self._masks, self._used):
                    part.pop()  # type: ignore[attr-defined]
        self._tokens = tokens

    def chunks(self, layer: int, start: int = 0, stop: int | None = None) -> Iterator[KVChunk]:
        """See `KVStore.chunks`."""
        stop = self._tokens if stop is None else min(stop, self._tokens)
        first = start // self.block_tokens  # all blocks but the last are full
        at = first * self.block_tokens
        for block, mask, used in zip(self._blocks[first:], self._masks[first:], self._used[first:], strict=True):
            if at >= stop:
                return
            low, high = max(start - at, 0), min(stop - at, used)
            if low < high:
                allowed = None
                if not self._dense and not mask[:, low:high].all():
                    allowed = torch.from_numpy(mask[:, low:high]).to(self.device)
                yield chunk_of(block[layer][:, low:high], allowed, at + low, self.storage)
            at += used

    @property
    def kv_heads(self) -> int:
        return self.shape[1]

    def gather(self, layer: int, head: int, tokens: Tensor) -> Tensor:
        """See `KVStore.gather`."""
        assert self._rows == 1, "records of one text"
        tokens = tokens.to(self.device)
        if len(self._blocks) == 1:
            return self._blocks[0][layer][0, :, :, head][tokens]
        out = torch.empty(len(tokens), self.shape[0], self.shape[2], dtype=self.storage.element, device=self.device)
        ordered, order = tokens.sort()
        ends = torch.arange(1, len(self._blocks) + 1, device=self.device) * self.block_tokens
        bounds = [0, *torch.searchsorted(ordered, ends).tolist()]
        for number, (low, high) in enumerate(pairwise(bounds)):
            if low < high:
                inside = ordered[low:high] - number * self.block_tokens
                out[order[low:high]] = self._blocks[number][layer][0, :, :, head][inside]
        return out

    def row_mask(self) -> np.ndarray | None:
        """bool (R, tokens): which records each row really has; None: all."""
        if self._dense:
            return None
        return np.concatenate([mask[:, :used] for mask, used in zip(self._masks, self._used, strict=True)], 1)

    def row_counts(self) -> np.ndarray:
        """int (R,): records that each row really has."""
        counts = np.zeros(self._rows, dtype=np.int64)
        for mask, used in zip(self._masks, self._used, strict=True):
            counts += mask[:, :used].sum(1)
        return counts

    def select_rows(self, index: Tensor) -> None:
        """Keep (and repeat, reorder) rows by index (R',), as beam search asks."""
        with torch.inference_mode(False):  # blocks are written to later, in whatever mode
            index = index.clone()
            for number, block in enumerate(self._blocks):
                self._blocks[number] = {layer: kv.index_select(0, index.to(kv.device)) for layer, kv in block.items()}
                self._masks[number] = self._masks[number][index.cpu().numpy()]
        self._rows = int(index.numel())
