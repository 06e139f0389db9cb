"""What commands do with a sharded memory: reading into it, opening it beside others, saying what its shards hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longfocus.commands.models import hint_at_options, lasting_source, load_for
from longfocus.commands.output import counted, note
from longfocus.commands.searching import index_memory
from longfocus.errors import LongfocusError

if TYPE_CHECKING:
    from longfocus.data.documents import Source
    from longfocus.memory.distributed.memory import ShardedMemory
    from longfocus.memory.distributed.processes import ClusterOptions
    from longfocus.memory.memory import Memory


def cluster_options(address: str | None, timeout: float | None, threads: int | None = None) -> ClusterOptions:
    """Options of the command line as the library has them.

    Raises:
        ConfigError: a value is impossible.
    """
    from longfocus.memory.distributed.processes import ClusterOptions

    given: dict[str, Any] = {"address": address, "answer_seconds": timeout, "threads": threads}
    return ClusterOptions(**{name: value for name, value in given.items() if value is not None})


def remember(
    into: Path,
    sources: Sequence[Source],
    shards: int | None,
    model: str | None,
    options: dict[str, Any],
    threads: int | None,
    dtype: str | None,
    cluster: ClusterOptions,
) -> None:
    """Read sources into a sharded memory, which is made if it is not there."""
    from longfocus.memory.distributed.manifest import is_sharded
    from longfocus.memory.distributed.memory import ShardedMemory
    from longfocus.model.reading import not_remembered

    if not is_sharded(into):
        assert shards is not None
        name, focused, tokenizer = load_for(None, model, options, threads, dtype)
        source = lasting_source(name)
        memory = ShardedMemory.create(into, focused, tokenizer, shards=shards, model_source=source, options=cluster)
        del focused  # the processes that read have their own
    else:
        memory = ShardedMemory.open(into, options=cluster)
        if shards is not None and shards != len(memory.shards):
            raise LongfocusError(
                f"--shards: {shards} given, but {into} has {len(memory.shards)}; leave the option out to add to them."
            )
        if options or model is not None or dtype is not None:
            _, focused, tokenizer = load_for(memory, model, options, threads, dtype)
            with hint_at_options():
                memory.check(focused, tokenizer)
            del focused
    with memory:
        new = not_remembered(memory, sources)
        if len(new) < len(sources):
            note(f"{len(sources) - len(new)} of {len(sources)} files are remembered already, unchanged.")
        try:
            _read(memory, new)
        except KeyboardInterrupt:
            note(f"Stopped. {into} keeps what was read; the same command goes on from here.")
            raise
        index_memory(memory)
        megabytes = memory.nbytes / 1e6
        note(
            f"{into}: {counted(len(memory.shards), 'shard')}, {len(memory.documents)} documents, "
            f"{memory.tokens:,} tokens, {megabytes:,.1f} MB."
        )


def _read(memory: ShardedMemory, sources: Sequence[Source]) -> None:
    from longfocus.model.parallel_reading import read_in_parallel

    begun = time.monotonic()

    def tell(read: Any) -> None:
        if read.error is not None:
            if len(sources) == 1:
                raise read.error
            note(f"Skipped {read.error}")
            return
        seconds = max(1e-9, time.monotonic() - begun)
        note(
            f"[{read.done}/{len(sources)}] {read.source.name}: {read.document.tokens:,} tokens in shard {read.shard} "
            f"({read.tokens / seconds:,.0f} tokens/s)"
        )

    read_in_parallel(memory, sources, tell)


def open_memory(folder: Path, *, writable: bool = False) -> Memory | ShardedMemory:
    """A saved memory of either kind, for commands that ask nothing of it; starts no process."""
    from longfocus.memory.distributed.manifest import is_sharded
    from longfocus.memory.distributed.memory import ShardedMemory
    from longfocus.memory.memory import Memory

    return ShardedMemory.open(folder) if is_sharded(folder) else Memory.open(folder, writable=writable)


def shards_of(memory: Any) -> dict[str, Any]:
    """`{"shards": […]}` of a sharded memory, JSON-ready; nothing of another."""
    if not hasattr(memory, "manifest"):
        return {}
    return {
        "shards": [
            {"folder": name, "documents": len(shard.documents), "tokens": shard.tokens, "bytes": shard.nbytes}
            for name, shard in zip(memory.manifest.shards, memory.shards, strict=True)
        ]
    }


def print_shards(memory: Any) -> None:
    """A line for each shard, if there are any: tokens, megabytes, documents, folder."""
    shards = shards_of(memory).get("shards", [])
    if shards:
        print(f"Shards       {len(shards)}")
    for shard in shards:
        documents = counted(shard["documents"], "document")
        print(f"{shard['tokens']:>10,}  {shard['bytes'] / 1e6:>8,.1f} MB  {shard['folder']}: {documents}")
