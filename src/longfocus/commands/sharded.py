"""What commands do with a sharded memory: its options, opening it for answers, reading into it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longfocus.commands import common
from longfocus.errors import ConfigError, LongfocusError, MemoryMismatchError

if TYPE_CHECKING:
    from longfocus.data.documents import Source
    from longfocus.memory.asked import AskedMemory
    from longfocus.memory.distributed.memory import ShardedMemory
    from longfocus.memory.distributed.processes import ClusterOptions
    from longfocus.memory.memory import Memory

RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT",
        help="Sharded memories: run the shards on this Ray cluster (see docs/cluster.md). Default: on this machine.",
    ),
]
ShardTimeout = Annotated[
    float | None,
    typer.Option(
        "--shard-timeout",
        metavar="SECONDS",
        help="Sharded memories: longest that one shard may take for one answer.  [default: 120]",
    ),
]


def cluster_options(address: str | None, timeout: float | None, threads: int | None = None) -> ClusterOptions:
    """Options of the command line as the library has them.

    Raises:
        ConfigError: a value is impossible.
    """
    from longfocus.memory.distributed.processes import ClusterOptions

    given: dict[str, Any] = {"address": address, "answer_seconds": timeout, "threads": threads}
    return ClusterOptions(**{name: value for name, value in given.items() if value is not None})


def open_for_answers(
    paths: Sequence[str],
    model_name: str | None,
    options: dict[str, Any],
    threads: int | None,
    encoding: str | None,
    dtype: str | None = None,
    *,
    retrieval: str = "auto",
    address: str | None,
    timeout: float | None,
    only: Sequence[str] = (),
    quiet: bool = False,
) -> tuple[Any, Any, AskedMemory]:
    """As `common.open_for_answers`, also for a sharded memory; its processes are running when this returns."""
    from longfocus.memory.distributed.manifest import is_sharded

    sharded = [path for path in paths if is_sharded(path)]
    if not sharded:
        if address is not None or timeout is not None:
            raise typer.BadParameter("they go with a sharded memory.", param_hint="--ray-address, --shard-timeout")
        return common.open_for_answers(
            paths, model_name, options, threads, encoding, dtype, retrieval=retrieval, only=only, quiet=quiet
        )
    if retrieval not in ("dense", "exact", "auto"):
        raise ConfigError(f"--retrieval: {retrieval!r} given; a sharded memory answers dense, exact or auto (dense).")
    if retrieval != "auto":
        options = {**options, "retrieval": retrieval}
    if "k_rule" in options:
        raise ConfigError(
            f"--k-rule: {sharded[0]} is in shards, which are asked for all queries; leave the option out."
        )
    if len(paths) > 1:
        raise LongfocusError(
            f"{sharded[0]} is a sharded memory, which is asked by itself; remember the other texts into it first "
            f"(longfocus remember PATH… --into {sharded[0]})."
        )
    from longfocus.memory.distributed.memory import ShardedMemory

    memory = ShardedMemory.open(sharded[0], options=cluster_options(address, timeout))
    chosen = memory.select(*only) if only else memory
    name = model_name or memory.model_source or "default"
    given = {**memory.focus_options, **options}
    model, tokenizer = common.load_model(name, given, threads, dtype, memory.geometry.model_dtype)
    memory.check(model, tokenizer)
    if not quiet:
        common.warn_untrained(name)
        common.note(f"Starting {common.counted(len(memory.shards), 'shard')} …")
    memory.start()
    return model, tokenizer, chosen


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
        name = model or "default"
        focused, tokenizer = common.load_model(name, {**common.CLI_DEFAULTS, **options}, threads, dtype)
        source_name = common.lasting_source(name)
        memory = ShardedMemory.create(
            into, focused, tokenizer, shards=shards, model_source=source_name, options=cluster
        )
        del focused  # the processes that read have their own
    else:
        memory = ShardedMemory.open(into, options=cluster)
        if shards is not None and shards != len(memory.shards):
            raise LongfocusError(
                f"--shards: {shards} given, but {into} has {len(memory.shards)}; leave the option out to add to them."
            )
        if options or model is not None or dtype is not None:
            focused, tokenizer = common.load_model(
                model or memory.model_source or "default",
                {**memory.focus_options, **options},
                threads,
                dtype,
                memory.geometry.model_dtype,
            )
            try:
                memory.check(focused, tokenizer)
            except MemoryMismatchError as error:
                raise MemoryMismatchError(
                    f"{error} (Leave out the options to add with those of the memory.)"
                ) from error
            del focused
    with memory:
        new = not_remembered(memory, sources)
        if len(new) < len(sources):
            common.note(f"{len(sources) - len(new)} of {len(sources)} files are remembered already, unchanged.")
        try:
            _read(memory, new)
        except KeyboardInterrupt:
            common.note(f"Stopped. {into} keeps what was read; the same command goes on from here.")
            raise
        megabytes = memory.nbytes / 1e6
        common.note(
            f"{into}: {common.counted(len(memory.shards), 'shard')}, {len(memory.documents)} documents, "
            f"{memory.tokens:,} tokens, {megabytes:,.1f} MB."
        )


def _read(memory: ShardedMemory, sources: Sequence[Source]) -> None:
    from longfocus.model.parallel_reading import read_in_parallel

    begun = time.monotonic()

    def tell(read: Any) -> None:
        if read.error is not None:
            if len(sources) == 1:
                raise read.error
            common.note(f"Skipped {read.error}")
            return
        seconds = max(1e-9, time.monotonic() - begun)
        common.note(
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
        documents = common.counted(shard["documents"], "document")
        print(f"{shard['tokens']:>10,}  {shard['bytes'] / 1e6:>8,.1f} MB  {shard['folder']}: {documents}")
