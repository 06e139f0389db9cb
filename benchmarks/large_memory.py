"""Large memories for benchmarks: real text, read by the model, and more of it by repeating what was read with noise.

Repeated records say how time and bytes grow. What they say of recall is worth less than a library of different texts would: each
key has others around it that differ from it by noise alone. Results say which sizes are so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import common
from longfocus import Memory, read_ids
from longfocus.memory.approximate import MemoryIndex
from longfocus.memory.context import Part
from longfocus.memory.documents import TOKEN_DTYPE
from longfocus.settings import size_of
from longfocus.tasks.texts import Texts

AT_ONCE = 4096


@dataclass
class Prefix:
    """Some records of a memory, standing in for a smaller memory: what a cache asks of one (`memory/asked.py`)."""

    memory: Memory
    tokens_before: int
    """It begins with so many."""
    more: tuple[tuple[int, int], ...] = ()
    """Ranges behind them that it has, too."""
    _index: MemoryIndex | None = field(default=None, repr=False)
    label = "a part of a memory"

    @property
    def store(self) -> Any:
        return self.memory.store

    @property
    def geometry(self) -> Any:
        return self.memory.geometry

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return ((0, self.tokens_before), *self.more)

    @property
    def tokens(self) -> int:
        return sum(high - low for low, high in self.ranges)

    @property
    def extent(self) -> int:
        return self.memory.extent

    def check(self, model: Any, tokenizer: Any = None) -> None:
        self.memory.check(model, tokenizer)

    def visible(self) -> Part:
        return Part(self.store, ranges=self.ranges)

    def is_current(self, visible: Part) -> bool:
        return True

    def index(self, stop: int | None = None) -> MemoryIndex:
        """An index made for this size, of the records up to `stop`."""
        if self._index is None:
            self._index = MemoryIndex(self.store, self.geometry)
        self._index.update(self.ranges, max(high for _, high in self.ranges) if stop is None else stop)
        return self._index

    def search(self, ranges: Any = None) -> Any:
        return self.index().view(self.ranges if ranges is None else ranges)

    def with_ranges(self, *more: tuple[int, int]) -> Prefix:
        """The same and other records, by the same index."""
        return Prefix(self.memory, self.tokens_before, more, self._index)


def add_memory_options(parser: argparse.ArgumentParser, sizes: str) -> None:
    """How large, of which text, and where; float16 unless another dtype is given."""
    parser.set_defaults(memory_dtype="float16")
    parser.add_argument("--sizes", default=sizes, help="tokens in memory")
    parser.add_argument("--read", default="64k", help="tokens that are really read at most")
    parser.add_argument("--tile", action="store_true", help="repeat what was read, with noise, up to the largest size")
    parser.add_argument("--noise", type=float, default=0.3, help="of what is repeated, in deviations of each number")
    parser.add_argument("--data", type=Path, default=common.DATA, help="folder of the texts")
    parser.add_argument("--text", default="books,code", help="folders in it")
    parser.add_argument(
        "--on-disk", type=Path, metavar="DIR", help="keep the memory here instead of in RAM; one that is there is used"
    )


def tokens_read(parser: argparse.ArgumentParser, arguments: argparse.Namespace, sizes: list[int]) -> int:
    """How many tokens are really read; ends the program where that is too few."""
    read = min(max(sizes), size_of(arguments.read))
    if max(sizes) > read and not arguments.tile:
        parser.error(f"--sizes up to {max(sizes):,} need --read {max(sizes)}, or --tile to repeat what was read")
    return read


def real_ids(tokenizer: Any, count: int, data: Path, names: list[str]) -> list[int]:
    """`count` tokens of the texts, in equal parts of each source, one document after another."""
    texts = Texts(data)
    sources = [[text for _, text in texts.documents(name)] for name in names]
    ids: list[int] = []
    for number in range(max(map(len, sources))):
        for source in sources:
            if number < len(source):
                ids += tokenizer(source[number])["input_ids"]
        if len(ids) >= count:
            return ids[:count]
    raise SystemExit(f"{', '.join(names)}: only {len(ids):,} tokens of text, {count:,} wanted; use --read and --tile")


def build(model: Any, ids: list[int], size: int, folder: Path | None, noise: float) -> Memory:
    """Read the ids, and repeat their records with noise up to `size` tokens; or open what an earlier run has made of them."""
    if folder is not None and folder.exists():
        memory = Memory.open(folder, model=model, writable=True)
        if memory.extent < size or not np.array_equal(memory.token_ids(0, len(ids)), ids):
            raise SystemExit(
                f"{folder} holds {memory.extent:,} tokens, or other texts: remove it, or give another folder"
            )
        common.note(f"{folder}: {memory.extent:,} tokens are there")
        return memory
    memory = Memory.create(folder, model) if folder is not None else Memory(model)
    begun = time.perf_counter()
    read_ids(model, ids, memory)
    common.note(f"read {memory.tokens:,} tokens in {time.perf_counter() - begun:.0f} s")
    repeat(memory, memory.tokens, size, noise)
    return memory


def repeat(memory: Memory, read: int, size: int, noise: float, *, source: Memory | None = None, seed: int = 0) -> None:
    """Append the first `read` records (of another memory of the same layers) again and again, with noise, until there are `size`."""
    source = source or memory
    storage, generator = memory.store.storage, torch.Generator().manual_seed(seed)
    deviation: dict[int, torch.Tensor] = {}

    def parts() -> Iterator[dict[int, torch.Tensor]]:
        at = 0
        while memory.extent < size:  # which grows with each part
            count = min(AT_ONCE, read - at, size - memory.extent)
            noisy = {}
            for layer, stored in records(source, at, count).items():
                plain = torch.empty(*stored.shape[:-1], memory.geometry.head_dim)
                source.store.storage.decode_into(plain, stored)
                wide = deviation.setdefault(layer, plain.std((0, 1)))
                noisy[layer] = storage.store(plain + noise * wide * torch.randn(plain.shape, generator=generator))
            yield noisy
            at = (at + count) % read

    if memory.extent < size:
        append(memory, "repeated with noise", parts())


def records(memory: Memory, at: int, count: int) -> dict[int, torch.Tensor]:
    """Stored records at … at + count, by layer (1, count, 2, Hkv, elements), copied."""
    return {
        layer: torch.cat([chunk.records for chunk in memory.store.chunks(layer, at, at + count)], 1)
        for layer in memory.geometry.layers
    }


def append(memory: Memory, name: str, parts: Iterable[Mapping[int, torch.Tensor]]) -> None:
    """Append a document of records by layer, plain or stored; each part is committed."""
    document = memory.begin_document(name, kind="ids")
    for part in parts:
        memory.store.append(part)
        count = next(iter(part.values())).shape[1]
        document = memory.commit_window(document, np.zeros(count, TOKEN_DTYPE), b"", 0)
    memory.commit_window(document, np.zeros(0, TOKEN_DTYPE), b"", 0, complete=True)
