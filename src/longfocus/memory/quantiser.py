"""Keys as 4-bit codes in lists, and the search among them, by faiss: of one key head, in blocks of 32.

A key belongs to the list of the nearest of some centroids (`lists_for` says how many; k-means). What it differs from that centroid is
rotated and cut into D / 2 pairs, and each pair becomes the number (4 bits) of the nearest of 16 more: D / 4 bytes a key, and two for the list.
A query's inner product with a key is that with the list's centroid, and that with the code, which is read from a table that stays in registers
(product quantisation of residuals: Jégou et al. 2011; the scan of 32 codes at once: André et al., VLDB 2015, "PQ Fast Scan"). Only
the lists with the largest products are scanned. What is found is re-ranked by the true keys elsewhere (`approximate.py`).

Lists serve precision before speed. Keys of one head lie in a few far-apart crowds, and codes of whole keys spend their bits on saying which
crowd: among 262,144 tokens of novels and source code, 256 candidates held 0.79 of the default model's true 32 (worst of the 12 heads 0.65); with
residuals, found in a sixteenth of 1,024 lists, 0.97 (0.92) (`benchmarks/memory_search.py`; docs/retrieval.md). Attention queries are
distributed unlike the keys, but for the crowd that a query looks for, its centroid is enough.

The rotation is onto the residuals' principal axes, each strong one paired with a weak one, so that the pairs carry about equally much.
For codes of whole keys it gave more than no rotation, a random one, OPQ (Ge et al. 2013), or axes weighted by what queries are like.

Lists are made when a search over chosen blocks begins; files and appending know blocks of 32 consecutive keys only, each of which depends
on nothing but its keys. So an index grows at its end, and any part of it can be searched alone.

The one module that knows faiss, which is an optional dependency.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np

from longfocus.errors import ConfigError

BLOCK_TOKENS = 32
"""Keys whose codes lie in one block."""
_CENTROIDS = 16
_MOST_LISTS = 1024
_KEYS_A_LIST = 64
"""Least keys that a list is trained on."""
_LIST_BYTES = 2
"""Of a list's number."""
_SCANNED = 1 / 16
"""Share of the lists that a query scans, at least."""
_SCANNED_A_CANDIDATE = 16
_SCANNED_KEYS = 8192
"""Keys that are scanned for each candidate that is wanted, and for all, at least: small memories are scanned whole."""
_BLOCKS_AT_ONCE = 1024
_PACKED = np.array([0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15])
"""The order in which faiss lays the first 16 keys of a block; the other 16 take the upper half of each byte."""


def lists_for(keys: int) -> int:
    """Lists that so many keys to train on make: a power of two, 1 … 1024."""
    return min(_MOST_LISTS, 1 << max(0, (keys // _KEYS_A_LIST).bit_length() - 1))


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
    """Lists, rotation and centroids of one key head, and what they make of keys.

    An odd last number of a key is paired with 0; D below is the even number.
    """

    def __init__(self, rotation: np.ndarray, centroids: np.ndarray, lists: np.ndarray) -> None:
        """
        Args:
            rotation: float32 (D, D), orthogonal; a key or query x becomes x @ rotation.
            centroids: float32 (D / 2, 16, 2), of rotated residuals.
            lists: float32 (L, D), the lists' centroids, rotated.
        """
        self.rotation, self.centroids, self.lists = rotation, centroids, lists
        self._width = len(rotation)

    @staticmethod
    def numbers(head_dim: int, lists: int) -> int:
        """How many numbers make a quantiser of so many lists for keys of `head_dim` numbers."""
        width = head_dim + head_dim % 2
        return width * width + _CENTROIDS * width + lists * width

    def to_array(self) -> np.ndarray:
        """float32 (numbers,): the rotation's rows, then the centroids, then the lists."""
        return np.concatenate((self.rotation.ravel(), self.centroids.ravel(), self.lists.ravel()))

    @classmethod
    def from_array(cls, numbers: np.ndarray, head_dim: int) -> Quantiser:
        """Inverse of `to_array`."""
        width = head_dim + head_dim % 2
        parts = np.split(numbers.astype(np.float32), [width * width, (width + _CENTROIDS) * width])
        rotation, centroids, lists = parts
        return cls(
            rotation.reshape(width, width), centroids.reshape(width // 2, _CENTROIDS, 2), lists.reshape(-1, width)
        )

    @staticmethod
    def code_bytes(head_dim: int) -> int:
        """Bytes of a key's code, without its list: half of one for each pair, the number of pairs rounded up to an even one."""
        return (head_dim + 3) // 4

    @classmethod
    def block_bytes(cls, head_dim: int) -> int:
        """Bytes of a block: the codes of its keys, and then their lists."""
        return BLOCK_TOKENS * (cls.code_bytes(head_dim) + _LIST_BYTES)

    @classmethod
    def last_list(cls, blocks: np.ndarray, head_dim: int) -> int:
        """The largest number of a list in blocks uint8 (…, block_bytes), of which there is one."""
        return int(np.ascontiguousarray(blocks[..., BLOCK_TOKENS * cls.code_bytes(head_dim) :]).view("<u2").max())

    @classmethod
    def train(cls, keys: np.ndarray) -> Quantiser:
        """A quantiser for keys such as float (n, D), by k-means. The same for the same keys.

        Raises:
            ConfigError: faiss is missing.
        """
        faiss = require_faiss()
        keys = _even(keys)
        width = keys.shape[1]
        clusters = faiss.Kmeans(
            width, lists_for(len(keys)), niter=8, seed=1, min_points_per_centroid=1, max_points_per_centroid=len(keys)
        )
        clusters.train(keys)
        nearest = clusters.index.search(keys, 1)[1][:, 0]
        residuals = keys - clusters.centroids[nearest]
        _, axes = np.linalg.eigh(np.cov(residuals.T, dtype=np.float64))  # the weakest first
        rotation = np.ascontiguousarray(
            np.stack((axes[:, ::-1], axes), 2)[:, : width // 2].reshape(width, width), np.float32
        )
        quantiser = faiss.ProductQuantizer(width, width // 2, 4)
        quantiser.train(np.ascontiguousarray(residuals @ rotation))
        centroids = faiss.vector_to_array(quantiser.centroids).reshape(width // 2, _CENTROIDS, 2)
        return cls(rotation, centroids, np.ascontiguousarray(clusters.centroids @ rotation, np.float32))

    def encode(self, keys: np.ndarray) -> np.ndarray:
        """Blocks uint8 (n / 32, block_bytes) of keys float (n, D), n a multiple of 32; each depends on its own keys only."""
        assert len(keys) % BLOCK_TOKENS == 0
        blocks, code_bytes = len(keys) // BLOCK_TOKENS, self.code_bytes(self._width)
        made = np.empty((blocks, self.block_bytes(self._width)), np.uint8)
        faiss = require_faiss()
        coder = faiss.ProductQuantizer(self._width, self._width // 2, 4)
        faiss.copy_array_to_vector(self.centroids.ravel(), coder.centroids)
        nearest = faiss.IndexFlatL2(self._width)
        nearest.add(self.lists)
        for start in range(0, blocks, _BLOCKS_AT_ONCE):  # the turned keys and residuals of some at a time
            some = _even(keys[start * BLOCK_TOKENS : (start + _BLOCKS_AT_ONCE) * BLOCK_TOKENS])
            # block by block, so that the bits are always the same
            turned = (some.reshape(-1, BLOCK_TOKENS, self._width) @ self.rotation).reshape(-1, self._width)
            numbers = nearest.search(turned, 1)[1].ravel()
            part = made[start : start + len(some) // BLOCK_TOKENS]
            part[:, : BLOCK_TOKENS * code_bytes] = coder.compute_codes(turned - self.lists[numbers]).reshape(
                len(part), -1
            )
            part[:, BLOCK_TOKENS * code_bytes :] = numbers.astype("<u2").view(np.uint8).reshape(len(part), -1)
        return made

    def search_over(self, blocks: np.ndarray) -> BlockSearch:
        """A search over blocks uint8 (m, block_bytes), which are copied."""
        return BlockSearch(self, blocks)


class BlockSearch:
    """Finds probable best keys among those of some blocks; several threads may search at once."""

    def __init__(self, quantiser: Quantiser, blocks: np.ndarray) -> None:
        faiss = require_faiss()
        width, self._lists = quantiser.lists.shape[1], len(quantiser.lists)
        self.keys = len(blocks) * BLOCK_TOKENS
        """Their number."""
        self._rotation = quantiser.rotation
        self._coarse = faiss.IndexFlatIP(width)
        self._coarse.add(quantiser.lists)
        self._index = faiss.IndexIVFPQFastScan(
            self._coarse, width, self._lists, width // 2, 4, faiss.METRIC_INNER_PRODUCT, BLOCK_TOKENS
        )
        self._index.by_residual = True
        faiss.copy_array_to_vector(quantiser.centroids.ravel(), self._index.pq.centroids)
        self._index.is_trained = True
        self._fill(faiss, blocks, quantiser.code_bytes(width))

    def _fill(self, faiss: Any, blocks: np.ndarray, code_bytes: int) -> None:
        """Sort the keys by list, and hand each list to faiss in its layout."""
        if not self.keys:
            return
        at = BLOCK_TOKENS * code_bytes
        codes = np.ascontiguousarray(blocks[:, :at]).reshape(self.keys, code_bytes)
        numbers = np.ascontiguousarray(blocks[:, at:]).view("<u2").ravel()
        order = np.argsort(numbers, kind="stable")
        sizes = np.bincount(numbers, minlength=self._lists)
        spaces = -(-sizes // BLOCK_TOKENS) * BLOCK_TOKENS  # whole blocks
        ends, filled = np.cumsum(spaces), np.cumsum(sizes)
        spread = np.zeros((int(ends[-1]), code_bytes), np.uint8)
        spread[np.arange(self.keys) + np.repeat(ends - spaces - (filled - sizes), sizes)] = codes[order]
        packed = pack(spread)
        lists = faiss.downcast_InvertedLists(self._index.invlists)
        for number in np.flatnonzero(sizes).tolist():
            ids = order[filled[number] - sizes[number] : filled[number]]
            block = packed[(ends[number] - spaces[number]) // BLOCK_TOKENS : ends[number] // BLOCK_TOKENS]
            lists.add_entries(number, len(ids), faiss.swig_ptr(ids), faiss.swig_ptr(block))
        self._index.ntotal = self.keys

    def search(self, queries: np.ndarray, count: int) -> np.ndarray:
        """int64 (m, count): for queries float (m, D), the numbers of keys, 32 to a block in order, with probably the largest
        inner products; -1 where the search gave fewer."""
        if count >= self.keys:
            everything = np.full((len(queries), count), -1, dtype=np.int64)
            everything[:, : self.keys] = np.arange(self.keys)
            return everything
        share = max(_SCANNED, max(_SCANNED_A_CANDIDATE * count, _SCANNED_KEYS) / self.keys)
        options = require_faiss().SearchParametersIVF(nprobe=math.ceil(self._lists * min(1.0, share)))
        found: np.ndarray = self._index.search(_even(queries) @ self._rotation, count, params=options)[1]
        return found


def pack(codes: np.ndarray) -> np.ndarray:
    """Codes uint8 (n, bytes), n a multiple of 32, as faiss lays them for its scan: uint8 (n / 32, 32 * bytes)."""
    blocks = codes.reshape(-1, BLOCK_TOKENS, codes.shape[1])
    first, second = blocks[:, _PACKED], blocks[:, _PACKED + 16]
    low, high = (first & 15) | (second << 4), (first >> 4) | (second & 240)
    return np.ascontiguousarray(np.stack((low, high), 1).transpose(0, 3, 1, 2)).reshape(len(blocks), -1)


def _even(vectors: np.ndarray) -> np.ndarray:
    """float32, consecutive, with a column of zeros if the number of columns is odd."""
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    return np.pad(vectors, ((0, 0), (0, 1))) if vectors.shape[1] % 2 else vectors
