"""`longfocus remember`: encode texts once, into a memory on disk that can be asked again and again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longfocus.commands import sharded
from longfocus.commands.models import hint_at_options, lasting_source, load_for
from longfocus.commands.options import (
    Dtype,
    Encoding,
    Model,
    RayAddress,
    Reading,
    ShardTimeout,
    Threads,
    in_groups,
)
from longfocus.commands.output import counted, note, report_skipped
from longfocus.commands.progress import read_all
from longfocus.commands.searching import index_memory
from longfocus.errors import InputError, LongfocusError

if TYPE_CHECKING:
    from longfocus.data.documents import Found, Source
    from longfocus.memory.documents import Document
    from longfocus.memory.memory import Memory
    from longfocus.model.reading import Reader

EPILOG = """Examples:

  longfocus remember book.txt --into book.memory

  longfocus remember src/ docs/ manual.pdf --into project.memory

  git log -p | longfocus remember - --into history.memory

  longfocus remember src/ docs/ --into project.memory --update --prune

  longfocus remember --into project.memory --update

  longfocus remember library/ --into big.memory --shards 4

Ctrl-C keeps what was read so far; the same command goes on from there. Files that are in the memory already, unchanged, are passed over. --update reads files that have changed and removes what was remembered of them before, once they are read to their end; the command compact gives the space back.
"""


@in_groups
def remember(
    into: Annotated[
        Path,
        typer.Option("--into", "-o", metavar="DIR", help="The memory: made when it is not there, added to when it is."),
    ],
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH…",
            help="Files, folders, PDF, or - for standard input. With --update they may be left out: all files that are remembered.",
        ),
    ] = None,
    *,
    update: Annotated[
        bool,
        typer.Option(
            "--update", help="Files that changed take the place of what was remembered of them; report missing ones."
        ),
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="With --update: remove documents whose files are gone.")
    ] = False,
    model: Model = None,
    reading: Reading,
    encoding: Encoding = None,
    dtype: Dtype = None,
    threads: Threads = None,
    shards: Annotated[
        int | None,
        typer.Option(
            "--shards",
            metavar="N",
            min=1,
            help="Make a memory of N shards, which are read and asked in processes of their own (needs the extra cluster).",
        ),
    ] = None,
    ray_address: RayAddress = None,
    shard_timeout: ShardTimeout = None,
) -> None:
    """Read texts into a memory on disk."""
    from longfocus.data.documents import find_sources
    from longfocus.memory.distributed.manifest import is_sharded
    from longfocus.memory.folder import foreign_entries, is_memory
    from longfocus.memory.memory import Memory
    from longfocus.model.reading import Reader, not_remembered

    if prune and not update:
        raise typer.BadParameter("it goes with --update.", param_hint="--prune")
    if not paths and not (update and (is_memory(into) or is_sharded(into))):
        raise typer.BadParameter("give at least one file or folder.", param_hint="PATH…")
    paths = paths or []
    if shards is not None or is_sharded(into):
        if update:
            raise LongfocusError(
                f"--update does not work on sharded memories: forget what changed (longfocus forget {into} NAME), then remember "
                "it again."
            )
        if not is_sharded(into) and os.path.exists(into) and (not into.is_dir() or is_memory(into)):
            raise LongfocusError(f"{into} exists and is not a sharded memory; choose a new folder.")
        found = find_sources(paths, encoding=encoding)
        report_skipped(found.skipped)
        cluster = sharded.cluster_options(ray_address, shard_timeout, threads)
        sharded.remember(into, found.sources, shards, model, reading.focus, threads, dtype, cluster)
        return
    if ray_address is not None or shard_timeout is not None:
        raise typer.BadParameter("they go with --shards.", param_hint="--ray-address, --shard-timeout")
    if update and is_memory(into):
        with Memory.open(into, writable=True) as memory:
            _update(into, memory, paths, prune, model, reading.focus, threads, encoding, dtype)
        return
    found = find_sources(paths, encoding=encoding)
    report_skipped(found.skipped)
    options = reading.focus
    new = found.sources
    passed_over: list[str] = []
    present: Memory | None = None
    if is_memory(into):
        with Memory.open(into) as present:
            new = not_remembered(present, found.sources)
            passed_over = _passed_over(present, found.sources, new)
            if not new and not options and model is None:
                for line in passed_over:
                    note(line)
                _say_what_it_holds(into, present)
                return
    elif os.path.exists(into) and (not into.is_dir() or foreign_entries(into)):
        raise LongfocusError(f"{into} exists and is not a memory; choose a new folder.")
    name, focused, tokenizer = load_for(present, model, options, threads, dtype)
    if present is not None:
        with hint_at_options():
            memory = Memory.open(into, model=focused, tokenizer=tokenizer, writable=True)
    else:
        memory = Memory.create(into, focused, tokenizer, model_source=lasting_source(name))
    with memory:
        reader = Reader(focused, tokenizer, memory)
        for line in passed_over:
            note(line)
        _read(into, reader, new)
        index_memory(memory)
        _say_what_it_holds(into, memory)


def _read(folder: Path, reader: Reader, sources: list[Source], *, replace: bool = False) -> None:
    memory = reader.memory
    try:
        read_all(reader, sources, replace=replace)
    except KeyboardInterrupt:
        again = "goes on from here" if not reader.model.focus.config.overlap else "reads the unfinished document again"
        note(
            f"Stopped. {folder} holds {memory.tokens:,} tokens of {len(memory.documents)} documents and can be asked; "
            f"the same command {again}."
        )
        raise


def _update(
    folder: Path,
    memory: Memory,
    paths: list[str],
    prune: bool,
    model: str | None,
    options: dict[str, Any],
    threads: int | None,
    encoding: str | None,
    dtype: str | None,
) -> None:
    """Make the memory hold the files as they are now."""
    from longfocus.model.reading import Reader
    from longfocus.model.updating import compare, settle, vanished

    gone = vanished(memory, paths or None)
    found = _still_there(memory, paths, gone, encoding)
    report_skipped(found.skipped)
    changes = compare(memory, found.sources)
    settle(memory, changes)
    counts: dict[str, list[Any]] = {
        "new": changes.new, "changed": changes.changed, "unfinished": changes.unfinished,
        "unchanged": changes.unchanged, "gone": gone,
    }  # fmt: skip
    note(", ".join(f"{len(some)} {what}" for what, some in counts.items() if some) + ".")
    for source in changes.changed:
        note(f"{source.name} has changed: it is read again.")
    if changes.outdated:
        note(f"Removed {counted(len(changes.outdated), 'earlier version')} of unchanged files.")
    if changes.to_read or options or model is not None:
        _, focused, tokenizer = load_for(memory, model, options, threads, dtype)
        with hint_at_options():
            reader = Reader(focused, tokenizer, memory)
        _read(folder, reader, changes.to_read, replace=True)
    for document in gone:
        note(f"{document.name} is gone{': removed.' if prune else '.'}")
    index_memory(memory)
    if prune:
        memory.remove(*gone)
    elif gone:
        note("What was remembered of files that are gone stays; --prune removes it.")
    _say_what_it_holds(folder, memory)
    if memory.removed:
        note(f"longfocus compact {folder} gives back {memory.removed_bytes / 1e6:,.1f} MB.")


def _still_there(memory: Memory, paths: list[str], gone: list[Document], encoding: str | None) -> Found:
    """Sources of the paths, without those that are only remembered; of all remembered files, if no paths are given."""
    from longfocus.data.documents import Found, Source, find_sources

    lost = {document.path for document in gone}
    if paths:
        left = [path for path in paths if not _is_lost(path, lost)]
        try:
            return find_sources(left, encoding=encoding) if left else Found([], [])
        except InputError:
            if gone and all(map(os.path.isdir, left)):  # folders whose files are all gone
                return Found([], [])
            raise
    found = Found([], [])
    files = {document.path: document for document in memory.documents if document.path not in {None, *lost}}
    for path, document in files.items():
        assert path is not None
        source = Source(document.name, document.kind, Path(path), encoding)
        try:
            source.check()
        except InputError as error:
            found.skipped.append((source.name, str(error).removeprefix(f"{source.name} ").rstrip(".")))
        else:
            found.sources.append(source)
    return found


def _is_lost(path: str, lost: set[str | None]) -> bool:
    """Whether a path is gone, and files of that name or in that folder are remembered."""
    whole = str(Path(path).absolute())
    remembered = any(name is not None and (name == whole or name.startswith(whole + os.sep)) for name in lost)
    return path != "-" and remembered and not os.path.lexists(path)


def _say_what_it_holds(folder: Path, memory: Memory) -> None:
    megabytes = memory.nbytes / 1e6
    note(f"{folder}: {len(memory.documents)} documents, {memory.tokens:,} tokens, {megabytes:,.1f} MB.")


def _passed_over(memory: Memory, sources: list[Source], new: list[Source]) -> list[str]:
    """Lines about what is in the memory already, and what will stand in it twice."""
    lines = []
    if len(new) < len(sources):
        lines.append(f"{len(sources) - len(new)} of {len(sources)} files are remembered already, unchanged.")
    read_before = {document.path for document in memory.documents if document.complete}
    return lines + [
        f"{source.name} has changed: it is read again, and what was remembered of it before stays (--update replaces it)."
        for source in new
        if source.path is not None and str(source.path.absolute()) in read_before
    ]
