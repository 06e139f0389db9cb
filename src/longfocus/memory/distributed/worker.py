"""What runs in a shard's process: it maps one saved memory and attends to what it is asked about.

It knows nothing of Ray, of the other shards and of models. Everything it answers follows from the request and the files, so
that a process started anew answers the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longfocus.errors import MemoryStoreError
from longfocus.memory.context import MemoryContext, Part
from longfocus.memory.dense import Scratch, attend_dense
from longfocus.memory.exact import grouped_scores
from longfocus.memory.memory import Memory

_SCORES_AT_ONCE = 1 << 22  # numbers


@dataclass(frozen=True)
class Packed:
    """A tensor's bytes, for the way between processes; bfloat16, which numpy lacks, as its 16 bits."""

    array: np.ndarray
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> Packed:
        """Of a tensor on any device."""
        plain = tensor.detach().to("cpu").contiguous()
        name = str(plain.dtype).removeprefix("torch.")
        return cls((plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy(), name)

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """The tensor again, with memory of its own."""
        plain = torch.from_numpy(self.array.copy())  # what came from Ray's store may not be written
        return (plain.view(torch.bfloat16) if self.dtype == "bfloat16" else plain).to(device)


@dataclass(frozen=True)
class Question:
    """What a shard is asked about: queries of one layer, and which of its tokens they may see."""

    layer: int
    query: Packed
    """(B, Hq, T, D), in the model's dtype."""
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class Seen:
    """Tokens of a shard that may be seen."""

    generation: int
    """Of the files that the numbers count in."""
    ranges: tuple[tuple[int, int], ...]
    """(first, one past the last), in order."""


class ShardWorker:
    """The answers of one shard. Each method may be called again with the same arguments and gives the same."""

    def __init__(self, folder: str, threads: int) -> None:
        """Opens nothing yet, so that `open` can say what is wrong.

        Args:
            folder: a saved memory, as this machine sees it.
            threads: CPU threads to attend with.
        """
        torch.set_num_threads(max(1, threads))
        self._folder = folder
        self._memory: Memory | None = None
        self._scratch = Scratch()

    def open(self) -> int:
        """Map the files.

        Returns:
            The process id.

        Raises:
            MemoryStoreError: the folder is no memory, or a file is missing, truncated or corrupted.
        """
        if self._memory is not None:
            self._memory.close()
        self._memory = Memory.open(Path(self._folder))
        return os.getpid()

    def index(self) -> int:
        """Have the index of what the files hold, made in RAM as far as none is saved.

        Returns:
            How many tokens were encoded now.

        Raises:
            ConfigError: faiss is missing.
        """
        if self._memory is None:
            self.open()
        assert self._memory is not None
        before = self._memory.indexed_tokens
        self._memory.search()
        return self._memory.indexed_tokens - before

    def attend(self, seen: Seen, asked: Question) -> tuple[Packed, Packed]:
        """Dense partial attention: out (B, Hq, T, D) in the query's dtype, lse (B, Hq, T)."""
        chunks = self._part(seen).chunks(asked.layer)
        with torch.inference_mode():
            query = asked.query.tensor()
            found = attend_dense(query, chunks, scale=asked.scale, softcap=asked.softcap, scratch=self._scratch)
        assert found is not None, "only shards with visible tokens are asked"
        return Packed.of(found[0]), Packed.of(found[1])

    def best(
        self, seen: Seen, asked: Question, k: int, numbered: bool, rerank: int | None = None
    ) -> tuple[Packed, Packed, Packed | None]:
        """The k best keys: scores and values as `exact.Best` has them, and their numbers in this shard if they are wanted.

        Args:
            rerank: they are found through the shard's index, with so many candidates for each of the k; what the index does not
                cover yet is added to it in RAM. None: exactly.

        Raises:
            ConfigError: faiss is wanted and missing.
        """
        part, retrieval = self._part(seen), "exact"
        if rerank is not None:
            assert self._memory is not None, "there is a part"
            part.search, retrieval = self._memory.search(seen.ranges), "approximate"
        context = MemoryContext(part, None, retrieval=retrieval, k=k, rerank=rerank or 1, scratch=self._scratch)
        with torch.inference_mode():
            found = context.best(asked.layer, asked.query.tensor(), scale=asked.scale, softcap=asked.softcap)
        assert found is not None, "only shards with visible tokens are asked"
        return Packed.of(found.scores), Packed.of(found.values), Packed.of(found.tokens) if numbered else None

    def mass(self, seen: Seen, asked: Question, lse: Packed) -> np.ndarray:
        """Attention mass of each visible token, in order: float64 (n,), exp(score - lse) summed over rows and queries, meaned
        over heads; lse (B, Hq, T) covers everything that the queries saw, here and elsewhere."""
        masses = [np.zeros(0)]
        with torch.inference_mode():
            query, normaliser = asked.query.tensor(), lse.tensor()
            for chunk in self._part(seen).chunks(asked.layer):
                keys, _ = self._scratch.widen(chunk, query)
                block = max(1, _SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * keys.shape[2]))
                total = torch.zeros(keys.shape[2], dtype=torch.float64)
                for part, norm in zip(query.split(block, 2), normaliser.split(block, 2), strict=True):
                    scores = grouped_scores(part, keys, chunk.mask, asked.scale, asked.softcap)
                    weights = torch.exp(scores - norm.reshape(*scores.shape[:-1], 1))
                    total += weights.sum((0, 1, 2, 3)).double()
                masses.append((total / query.shape[1]).numpy())
        return np.concatenate(masses)

    def _part(self, seen: Seen) -> Part:
        """The visible records, in the files as they are or, where the question is of later ones, as they are now."""
        memory = self._memory
        if memory is None or not _covers(memory, seen):
            self.open()
            memory = self._memory
        assert memory is not None
        if not _covers(memory, seen):
            raise MemoryStoreError(f"{memory.label} was compacted or cleared meanwhile; open the sharded memory again.")
        return Part(memory.store, ranges=seen.ranges)


def _covers(memory: Memory, seen: Seen) -> bool:
    last = seen.ranges[-1][1] if seen.ranges else 0
    return memory.generation == seen.generation and last <= memory.extent
