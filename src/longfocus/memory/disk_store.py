"""A saved memory's records, memory-mapped."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from longfocus.memory.contract import CHUNK_TOKENS, KVChunk, chunk_of
from longfocus.memory.storage import storage_dtype

if TYPE_CHECKING:
    from longfocus.memory.ondisk import DiskBackend


class DiskStore:
    """The `KVStore` over a memory's record files."""

    rows = 1

    def __init__(self, backend: DiskBackend) -> None:
        geometry = backend.geometry
        self._backend = backend
        self.storage = storage_dtype(geometry.dtype)
        self._shape = (2, geometry.kv_heads, self.storage.elements(geometry.head_dim))
        self.record_bytes = 2 * geometry.kv_heads * self.storage.bytes(geometry.head_dim)
        self._tokens = backend.tokens
        self._maps: dict[int, Tensor] = {}

    @property
    def tokens(self) -> int:
        """Committed and just appended."""
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' records."""
        return self._tokens * self.record_bytes * len(self._backend.geometry.layers)

    def append(self, records: Mapping[int, Tensor], mask: np.ndarray | None = None) -> None:
        """See `KVStore.append`; written to the files, durable with the next commit."""
        assert mask is None or mask.all(), "one text has no holes"
        count = 0
        for layer, new in records.items():
            assert new.shape[0] == 1
            data = self.storage.store(new[0].detach()).to("cpu").contiguous()
            count = data.shape[0]
            raw = data.view(torch.uint8).numpy().tobytes()
            self._backend.write(self._backend.layer_file(layer), self._tokens * self.record_bytes, raw)
        self._tokens += count

    def rewind(self, tokens: int) -> None:
        """Forget records beyond `tokens`."""
        self._tokens = tokens
        self._maps.clear()

    def chunks(self, layer: int, start: int = 0, stop: int | None = None) -> Iterator[KVChunk]:
        """See `KVStore.chunks`; views of the memory-mapped file."""
        stop = self._tokens if stop is None else min(stop, self._tokens)
        if start >= stop:
            return
        mapped = self.mapped(layer)
        low = start
        while low < stop:
            high = min((low // CHUNK_TOKENS + 1) * CHUNK_TOKENS, stop)
            yield chunk_of(mapped[low:high].unsqueeze(0), None, low, self.storage)
            low = high

    @property
    def kv_heads(self) -> int:
        return self._shape[1]

    def gather(self, layer: int, head: int, tokens: Tensor) -> Tensor:
        """See `KVStore.gather`; only the pages that hold the records are read."""
        return self.mapped(layer)[:, :, head][tokens.to("cpu")]

    def mapped(self, layer: int) -> Tensor:
        """All records of a layer as they lie in the file, (tokens, 2, Hkv, elements)."""
        found = self._maps.get(layer)
        if found is None or found.shape[0] < self._tokens:
            shape = (self._tokens, *self._shape)
            # copy-on-write: torch wants a writable array, the file must never change
            file = self._backend.file(self._backend.layer_file(layer))
            mapped = mmap.mmap(file, self._tokens * self.record_bytes, access=mmap.ACCESS_COPY)
            found = self._maps[layer] = torch.frombuffer(mapped, dtype=self.storage.element).view(shape)
        return found
