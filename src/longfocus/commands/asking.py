"""Opening what is asked: a saved memory, texts that are read now, or a sharded memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

from longfocus.commands.models import load_for, warn_untrained
from longfocus.commands.options import Asking, focus_options
from longfocus.commands.output import counted, note, report_skipped
from longfocus.commands.progress import read_all
from longfocus.commands.searching import settle_retrieval
from longfocus.commands.sharded import cluster_options
from longfocus.errors import ConfigError, LongfocusError

if TYPE_CHECKING:
    from longfocus.data.documents import Source
    from longfocus.memory.asked import AskedMemory
    from longfocus.memory.memory import Memory


def open_for_answers(
    paths: Sequence[str], asking: Asking, options: dict[str, Any], *, quiet: bool = False
) -> tuple[Any, Any, AskedMemory]:
    """Model, tokenizer and memory for a saved memory, whole or in shards, or for texts (and memories) that are read into RAM.
    The processes of shards are running when this returns.

    Args:
        options: FocusConfig fields that were given, but for the retrieval, which `asking` has.
        quiet: say nothing about the model and how the memory is searched.
    """
    from longfocus.config import Retrieval
    from longfocus.memory.distributed.manifest import is_sharded

    options = {**options, **focus_options(k=asking.k, k_rule=asking.k_rule)}
    if asking.retrieval != "auto":
        options = {**options, "retrieval": asking.retrieval}
    ways = (*get_args(Retrieval), "auto")
    if asking.retrieval not in ways:
        raise ConfigError(f"--retrieval: {asking.retrieval!r} given, expected one of {', '.join(ways)}.")
    shards = [path for path in paths if is_sharded(path)]
    if shards:
        if asking.k_rule is not None:
            raise ConfigError(
                f"--k-rule: {shards[0]} is in shards, which are asked for all queries; leave the option out."
            )
        if len(paths) > 1:
            raise LongfocusError(
                f"{shards[0]} is a sharded memory, which is asked by itself; remember the other texts into it first "
                f"(longfocus remember PATH… --into {shards[0]})."
            )
        return _open_shards(shards[0], asking, options, quiet)
    if asking.ray_address is not None or asking.shard_timeout is not None:
        raise typer.BadParameter("they go with a sharded memory.", param_hint="--ray-address, --shard-timeout")
    return _open_here(paths, asking, options, quiet)


def _open_shards(folder: str, asking: Asking, options: dict[str, Any], quiet: bool) -> tuple[Any, Any, AskedMemory]:
    from longfocus.memory.distributed.memory import ShardedMemory

    memory = ShardedMemory.open(folder, options=cluster_options(asking.ray_address, asking.shard_timeout))
    chosen = memory.select(*asking.only) if asking.only else memory
    name, model, tokenizer = load_for(memory, asking.model, options, asking.threads, asking.dtype)
    memory.check(model, tokenizer)
    if not quiet:
        warn_untrained(name)
    settle_retrieval(model, chosen, asking.retrieval, quiet=quiet)
    if not quiet:
        note(f"Starting {counted(len(memory.shards), 'shard')} …")
    memory.start()
    return model, tokenizer, chosen


def _open_here(
    paths: Sequence[str], asking: Asking, options: dict[str, Any], quiet: bool
) -> tuple[Any, Any, AskedMemory]:
    from longfocus.data.documents import find_sources
    from longfocus.memory.folder import is_memory
    from longfocus.memory.memory import Memory
    from longfocus.model.reading import Reader

    saved = [Memory.open(path) for path in paths if is_memory(Path(path))]
    texts = [path for path in paths if not is_memory(Path(path))]
    found = find_sources(texts, encoding=asking.encoding) if texts else None
    sources = found.sources if found is not None else []
    if asking.only:
        saved, sources = _only(asking.only, saved, sources)
    maker = saved[0] if saved else None
    name, model, tokenizer = load_for(maker, asking.model, options, asking.threads, asking.dtype)
    for memory in saved:
        memory.check(model, tokenizer)
    if not quiet:
        warn_untrained(name)
    if len(saved) == 1 and found is None:
        memory = saved[0]
    else:
        memory = Memory.merge(saved, model, tokenizer)
        if found is not None:
            report_skipped(found.skipped)
            read_all(Reader(model, tokenizer, memory), sources)
    settle_retrieval(model, memory, asking.retrieval, quiet=quiet)
    return model, tokenizer, memory


def _only(
    patterns: Sequence[str], saved: Sequence[Memory], sources: Sequence[Source]
) -> tuple[list[Memory], list[Source]]:
    """What the patterns choose of saved memories and of texts."""
    from longfocus.memory.documents import choose

    held = [(memory, document) for memory in saved for document in memory.documents]
    named = [(document.name, document.path) for _, document in held]
    named += [(source.name, str(source.path.absolute()) if source.path else None) for source in sources]
    what = saved[0].label if len(saved) == 1 and not sources else "What was given"
    chosen = choose(patterns, named, what)
    parts = []
    for memory in saved:
        mine = [held[index][1] for index in chosen if index < len(held) and held[index][0] is memory]
        parts.append(memory.select(*mine))
    return parts, [sources[index - len(held)] for index in chosen if index >= len(held)]
