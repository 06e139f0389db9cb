"""Keys as 4-bit codes that are searched whole, by faiss: of one key head, in blocks of 32.

A key of D numbers is rotated and cut into D / 2 pairs, and each pair becomes the number (4 bits) of the nearest of 16
centroids: D / 4 bytes a key. A query's inner product with every code is read from a table that stays in registers (product
quantisation: Jégou et al. 2011; the scan of 32 codes at once: André et al., VLDB 2015, "PQ Fast Scan"). What it
finds is re-ranked by the true keys elsewhere (`approximate.py`).

The rotation is onto the keys' principal axes, each strong one paired with a weak one, so that the pairs carry about equally much.
It matters more than anything else. Recall of the true 64 by 512 candidates on the default model's keys of a novel (24,576
tokens, queries of the text that follows; mean of the 12 heads and the worst of them): no rotation 0.89 and 0.46, a random one 0.992
and 0.978, OPQ (Ge et al. 2013) of 25 steps 0.996 and 0.987, this one 0.998 and 0.993, in closed form. Weighting the keys by
what queries are like (the root of their second moments), which needs queries, found less: 0.989 and 0.908.

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
    """Rotation and centroids of one key head, and what they make of keys.

    An odd last number of a key is paired with 0; D below is the even number.
    """

    def __init__(self, rotation: np.ndarray, centroids: np.ndarray) -> None:
        """
        Args:
            rotation: float32 (D, D), orthogonal; a key or query x becomes x @ rotation.
            centroids: float32 (D / 2, 16, 2).
        """
        self.rotation, self.centroids = rotation, centroids
        self._width = len(rotation)

    @staticmethod
    def numbers(head_dim: int) -> int:
        """How many numbers make a quantiser for keys of `head_dim` numbers."""
        width = head_dim + head_dim % 2
        return width * width + _CENTROIDS * width

    def to_array(self) -> np.ndarray:
        """float32 (numbers,): the rotation's rows, then the centroids."""
        return np.concatenate((self.rotation.ravel(), self.centroids.ravel()))

    @classmethod
    def from_array(cls, numbers: np.ndarray, head_dim: int) -> Quantiser:
        """Inverse of `to_array`."""
        width = head_dim + head_dim % 2
        rotation, centroids = np.split(numbers.astype(np.float32), [width * width])
        return cls(rotation.reshape(width, width), centroids.reshape(width // 2, _CENTROIDS, 2))

    @staticmethod
    def block_bytes(head_dim: int) -> int:
        """Bytes of a block: 16 for each pair, the number of pairs rounded up to an even one."""
        pairs = (head_dim + 1) // 2
        return BLOCK_TOKENS // 2 * (pairs + pairs % 2)

    @classmethod
    def train(cls, keys: np.ndarray) -> Quantiser:
        """A quantiser for keys such as float (n, D); the centroids by k-means of each pair. The same for the same keys.

        Raises:
            ConfigError: faiss is missing.
        """
        faiss = require_faiss()
        keys = _even(keys)
        width = keys.shape[1]
        _, axes = np.linalg.eigh(np.cov(keys.T, dtype=np.float64))  # the weakest first
        rotation = np.ascontiguousarray(
            np.stack((axes[:, ::-1], axes), 2)[:, : width // 2].reshape(width, width), np.float32
        )
        quantiser = faiss.ProductQuantizer(width, width // 2, 4)
        quantiser.train(np.ascontiguousarray(keys @ rotation))
        return cls(rotation, faiss.vector_to_array(quantiser.centroids).reshape(width // 2, _CENTROIDS, 2))

    def encode(self, keys: np.ndarray) -> np.ndarray:
        """Blocks uint8 (n / 32, block_bytes) of keys float (n, D), n a multiple of 32; each depends on its own keys only."""
        assert len(keys) % BLOCK_TOKENS == 0
        if not len(keys):
            return np.zeros((0, self.block_bytes(self._width)), dtype=np.uint8)
        index = self.index()
        turned = (
            _even(keys).reshape(-1, BLOCK_TOKENS, self._width) @ self.rotation
        )  # block by block: always the same bits
        index.add(turned.reshape(-1, self._width))
        codes = require_faiss().rev_swig_ptr(index.codes.get(), index.codes.size())  # a view of what the index owns
        blocks: np.ndarray = codes.reshape(len(keys) // BLOCK_TOKENS, -1).copy()
        return blocks

    def index(self) -> Any:
        """A faiss index of rotated keys, without any."""
        faiss = require_faiss()
        index = faiss.IndexPQFastScan(self._width, self._width // 2, 4, faiss.METRIC_INNER_PRODUCT)
        faiss.copy_array_to_vector(self.centroids.ravel(), index.pq.centroids)
        index.is_trained = True
        return index

    def search_over(self, blocks: np.ndarray) -> BlockSearch:
        """A search over blocks uint8 (m, block_bytes), which are copied."""
        return BlockSearch(self, blocks)


class BlockSearch:
    """Finds probable best keys among those of some blocks; several threads may search at once."""

    def __init__(self, quantiser: Quantiser, blocks: np.ndarray) -> None:
        self._index, self._rotation = quantiser.index(), quantiser.rotation
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
            found[:, :asked] = self._index.search(_even(queries) @ self._rotation, asked)[1]
        return found


def _even(vectors: np.ndarray) -> np.ndarray:
    """float32, consecutive, with a column of zeros if the number of columns is odd."""
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    return np.pad(vectors, ((0, 0), (0, 1))) if vectors.shape[1] % 2 else vectors
