"""Keys as 4-bit codes that are searched whole, by faiss: of one key head, in blocks of 32.

A key of D numbers is cut into D / 2 pairs, and each pair becomes the number (4 bits) of the nearest of 16 centroids: D / 4
bytes a key. A query's inner product with every code is read from a table that stays in registers (product quantisation:
Jégou et al. 2011; the scan of 32 codes at once: André et al., VLDB 2015, "PQ Fast Scan"). What it finds is
re-ranked by the true keys elsewhere (`approximate.py`).

Why every code is looked at, and no tree, graph or cluster is built: attention queries are distributed unlike the keys,
and structures made from keys lose what such queries look for; this one does not depend on where queries are, costs
nothing to extend, and any part of it can be searched alone, since a block is 32 consecutive keys.

The one module that knows faiss, which is an optional dependency.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from longfocus.errors import ConfigError

BLOCK_TOKENS = 32
"""Keys whose codes lie in one block."""
_CENTROIDS = 16
_SEED = 1234


def has_faiss() -> bool:
    """Whether faiss is there."""
    return importlib.util.find_spec("faiss") is not None


def require_faiss() -> Any:
    """faiss.

    Raises:
        ConfigError: it is not there; names the command that brings it.
    """
    try:
        import faiss
    except ImportError:
        raise ConfigError(
            "retrieval: 'approximate' needs faiss, which is not installed: pip install 'longfocus[approximate]'"
        ) from None
    return faiss


class Quantiser:
    """Centroids of one key head, and what they make of keys."""

    def __init__(self, centroids: np.ndarray) -> None:
        """
        Args:
            centroids: float32 (pairs, 16, 2); an odd last number of a key is paired with 0.
        """
        self.centroids = np.ascontiguousarray(centroids, dtype=np.float32)
        self._width = 2 * centroids.shape[0]

    @staticmethod
    def shape(head_dim: int) -> tuple[int, int, int]:
        """Of the centroids for keys of `head_dim` numbers."""
        return (head_dim + 1) // 2, _CENTROIDS, 2

    @staticmethod
    def block_bytes(head_dim: int) -> int:
        """Bytes of a block: 16 for each pair, the number of pairs rounded up to an even one."""
        pairs = (head_dim + 1) // 2
        return BLOCK_TOKENS // 2 * (pairs + pairs % 2)

    @classmethod
    def train(cls, keys: np.ndarray) -> Quantiser:
        """Centroids for keys float (n, D) by k-means of each pair; the same for the same keys.

        Raises:
            ConfigError: faiss is missing.
        """
        wide = _even(keys)
        index = _empty(wide.shape[1])
        index.pq.cp.seed = _SEED
        index.train(wide)
        return cls(require_faiss().vector_to_array(index.pq.centroids).reshape(cls.shape(wide.shape[1])))

    def encode(self, keys: np.ndarray) -> np.ndarray:
        """Blocks uint8 (n / 32, block_bytes) of keys float (n, D), n a multiple of 32; each depends on its own keys only."""
        assert len(keys) % BLOCK_TOKENS == 0
        if not len(keys):
            return np.zeros((0, self.block_bytes(self._width)), dtype=np.uint8)
        index = self.index()
        index.add(_even(keys))
        codes = require_faiss().rev_swig_ptr(index.codes.get(), index.codes.size())  # a view of what the index owns
        blocks: np.ndarray = codes.reshape(len(keys) // BLOCK_TOKENS, -1).copy()
        return blocks

    def index(self) -> Any:
        """A faiss index without keys."""
        index = _empty(self._width)
        require_faiss().copy_array_to_vector(self.centroids.ravel(), index.pq.centroids)
        index.is_trained = True
        return index

    def search_over(self, blocks: np.ndarray) -> BlockSearch:
        """A search over blocks uint8 (m, block_bytes), which are copied."""
        return BlockSearch(self, blocks)


class BlockSearch:
    """Finds probable best keys among those of some blocks; several threads may search at once."""

    def __init__(self, quantiser: Quantiser, blocks: np.ndarray) -> None:
        self._index = quantiser.index()
        self.keys = len(blocks) * BLOCK_TOKENS
        """Their number."""
        flat = np.ascontiguousarray(blocks).reshape(-1)
        if len(flat):
            require_faiss().copy_array_to_AlignedTable(flat, self._index.codes)
        self._index.ntotal = self._index.ntotal2 = self.keys

    def search(self, queries: np.ndarray, count: int) -> np.ndarray:
        """int64 (m, count): for queries float (m, D), the numbers of keys, 32 to a block in order, with probably the largest
        inner products; -1 where the search gave fewer."""
        found = np.full((len(queries), count), -1, dtype=np.int64)
        asked = min(count, self.keys)
        if asked and len(queries):
            found[:, :asked] = self._index.search(_even(queries), asked)[1]
        return found


def _empty(width: int) -> Any:
    faiss = require_faiss()
    return faiss.IndexPQFastScan(width, width // 2, 4, faiss.METRIC_INNER_PRODUCT)


def _even(vectors: np.ndarray) -> np.ndarray:
    """float32, consecutive, with a column of zeros if the number of columns is odd."""
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    return np.pad(vectors, ((0, 0), (0, 1))) if vectors.shape[1] % 2 else vectors
