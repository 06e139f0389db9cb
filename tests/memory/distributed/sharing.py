"""Texts, a tiny checkpoint, and the same documents in one memory and in shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longfocus import FocusConfig, Memory, Reader, ShardedMemory, attach, find_sources
from longfocus.memory.distributed.processes import ClusterOptions
from longfocus.memory.documents import TOKEN_DTYPE
from tests.memory.saved import held
from tests.models import MEMORY_LAYERS, assert_close, tiny
from tests.small_tokenizers import SAMPLES, VOCABULARY, talking

WINDOW = 64
OPTIONS = ClusterOptions(cpus=2, threads=1, start_seconds=240)
DOCUMENTS = ("cyrillic", "latin emoji", "code hebrew thai", "arabic", "spaces chinese", "greek japanese korean")
"""Samples of each. No text stands twice: which of two equal keys is among the k best is not said."""


def model_of(**options: Any) -> Any:
    """A tiny Llama with memory layers 1 and 2, the same weights at every call."""
    model = tiny("llama", vocab_size=VOCABULARY, eos_token_id=talking().eos_token_id)
    return attach(model, FocusConfig(**{"memory_layers": MEMORY_LAYERS, "window": WINDOW, **options}))


def checkpoint(folder: Path) -> str:
    """The same model and its tokenizer as files."""
    model_of().save_pretrained(folder)
    talking().save_pretrained(folder)
    return str(folder)


def write_texts(folder: Path) -> list[Path]:
    """Six files of up to some 300 tokens in several scripts."""
    folder.mkdir()
    paths = []
    for number, names in enumerate(map(str.split, DOCUMENTS)):
        path = folder / f"{number}-{names[0]}.txt"
        path.write_bytes("".join(SAMPLES[name] for name in names).encode())
        paths.append(path)
    return paths


def one_memory(model: Any, paths: Sequence[Path]) -> Memory:
    """All documents in one memory, in RAM."""
    memory = Memory(model, talking())
    reader = Reader(model, talking(), memory)
    for source in find_sources(paths).sources:
        reader.read(source)
    return memory


def sharded(
    folder: Path, model: Any, paths: Sequence[Path], *, shards: int, source: str | None = None
) -> ShardedMemory:
    """The same documents in shards, one after another in turn, read here; no process is started."""
    memory = ShardedMemory.create(folder, model, talking(), shards=shards, model_source=source, options=OPTIONS)
    order = []
    with memory.writing():
        for number, found in enumerate(find_sources(paths).sources):
            shard = folder / memory.manifest.shards[number % shards]
            with Memory.open(shard, model=model, tokenizer=talking(), writable=True) as writer:
                order.append((number % shards, writer.generation, Reader(model, talking(), writer).read(found).id))
        memory.order_as(order)
    return memory


def large_shards(folder: Path, model: Any, *, shards: int, tokens: int) -> tuple[ShardedMemory, Memory]:
    """Made-up records, so many in each shard, and one memory in RAM with all of them."""
    memory, single = ShardedMemory.create(folder, model, talking(), shards=shards, options=OPTIONS), Memory(model)
    generator = torch.Generator().manual_seed(0)
    made = memory.geometry
    for name in memory.manifest.shards:
        shape = (1, tokens, 2, made.kv_heads, made.head_dim)
        records = {layer: torch.randn(shape, generator=generator) for layer in made.layers}
        with Memory.open(folder / name, writable=True) as shard:
            for each in (shard, single):
                document = each.begin_document(name, kind="ids")
                each.store.append(records)
                each.commit_window(document, np.zeros(tokens, TOKEN_DTYPE), b"", 0, complete=True)
    memory.refresh()
    return memory, single


def assert_as_read_here(shard: Memory, expected: Memory) -> None:
    """The same documents and tokens, whole; the same records but for the rounding of sums."""
    mine, theirs = held(shard), held(expected)
    assert (mine.rows, mine.texts, mine.documents) == (theirs.rows, theirs.texts, theirs.documents)
    for layer, records in theirs.records.items():
        assert_close(mine.records[layer], records, 1e-4, f"records of layer {layer}")
