"""What every store of memory keys and values promises.

A store holds, for each memory layer, one record per remembered token: its key and its value, for every
key/value head, side by side:  (2, Hkv, head_dim)  with index 0 the key and 1 the value. Records are written in
a storage dtype (`storage.py`); attention is over what reading them back gives.

* Order: records lie in the order in which they were appended, the same in all layers; record i of every
  layer belongs to token i.
* Rows: a store serves one text (rows = 1, shared by every row of a batch) or one per row of a batch, then
  with a mask that says which records a row really has.
* Chunks end at multiples of CHUNK_TOKENS of the store, wherever it lives, so that results are the same bits.
* Ownership: `append` copies what it is given, as it is where it is stored records already; chunks that are handed out are views and must not be written.
* Empty: an empty store yields no chunk, and attention over it is the empty set (out = 0, lse = -inf).
* Fewer than k records: top-k takes them all. Ties in the k-th place: which of the equals is taken is unspecified.
* Kill: what a store on disk has committed survives a kill at any moment; the rest is as if never appended.

Worked example, one layer, Hkv = 1, head_dim = 2, two tokens appended and read back:
    append({8: tensor of shape (1, 2, 2, 1, 2)})     # rows, tokens, key|value, heads, head_dim
    next(chunks(8)).keys.shape == (1, 1, 2, 2)       # rows, heads, tokens, head_dim
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from longfocus.memory.storage import StorageDtype

CHUNK_TOKENS = 4096
"""Tokens that are attended to at once: bounds working memory, large enough for the fused kernel."""


class KVChunk(NamedTuple):
    """Consecutive records of one layer."""

    keys: Tensor
    """(R, Hkv, n, head_dim) as stored, R = 1 (shared) or the rows of the batch."""
    values: Tensor
    """(R, Hkv, n, head_dim)."""
    mask: Tensor | None
    """bool (R, n), True where the row has the record; None: all do."""
    start: int
    """Index of the first record in its store."""
    records: Tensor | None = None
    """(R, n, 2, Hkv, head_dim), what keys and values are views of; None where they are not of one tensor."""
    storage: StorageDtype | None = None
    """How they are written; None: as plain numbers. head_dim stands for the elements that a vector takes in it."""


class KVStore(Protocol):
    """Where additional keys and values live."""

    storage: StorageDtype
    """How records are written."""

    @property
    def rows(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def tokens(self) -> int:
        """Records per layer (of the fullest row)."""
        ...

    def append(self, records: Mapping[int, Tensor], mask: np.ndarray | None = None) -> None:
        """Add records (R, n, 2, Hkv, head_dim) for every memory layer; mask is bool (R, n)."""
        ...

    def rewind(self, tokens: int) -> None:
        """Forget records beyond `tokens`, which were never committed."""
        ...

    def chunks(self, layer: int, start: int = 0, stop: int | None = None) -> Iterator[KVChunk]:
        """The records start … stop of a layer, in order, in pieces of at most CHUNK_TOKENS."""
        ...

    def gather(self, layer: int, head: int, tokens: Tensor) -> Tensor:
        """Some records of one key head of a store of one text, copied, where they are stored.

        Args:
            tokens: int64 (n,), their numbers, in any order, also several times.

        Returns:
            (n, 2, elements), as stored; index 0 the key and 1 the value.
        """
        ...


def chunk_of(records: Tensor, mask: Tensor | None, start: int, storage: StorageDtype | None = None) -> KVChunk:
    """View records (R, n, 2, Hkv, head_dim) as a chunk, without copying."""
    return KVChunk(records[:, :, 0].transpose(1, 2), records[:, :, 1].transpose(1, 2), mask, start, records, storage)
