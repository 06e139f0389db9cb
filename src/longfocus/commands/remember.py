"""`longfocus remember`: encode texts once, into a memory on disk that can be asked again and again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from longfocus.commands import common
from longfocus.errors import LongfocusError, MemoryMismatchError

EPILOG = """Examples:

  longfocus remember book.txt --into book.memory

  longfocus remember src/ docs/ manual.pdf --into project.memory

  git log -p | longfocus remember - --into history.memory

Ctrl-C keeps what was read so far; the same command goes on from there. Files that are in the memory already, unchanged, are passed over.
"""


def remember(
    paths: Annotated[list[str], typer.Argument(metavar="PATH…", help="Files, folders, PDF, or - for standard input.")],
    into: Annotated[
        Path,
        typer.Option("--into", "-o", metavar="DIR", help="The memory: made when it is not there, added to when it is."),
    ],
    model: common.Model = None,
    memory_layers: common.Layers = None,
    window: common.Window = None,
    overlap: common.Overlap = None,
    memory_dtype: common.MemoryDtype = None,
    read_span: common.ReadSpan = None,
    encoding: common.Encoding = None,
    threads: common.Threads = None,
) -> None:
    """Read texts into a memory on disk."""
    from longfocus.data.documents import find_sources
    from longfocus.memory.memory import Memory
    from longfocus.memory.ondisk import foreign_entries, is_memory

    found = find_sources(paths, encoding=encoding)
    options = common.focus_options(
        memory_layers=memory_layers, window=window, overlap=overlap, memory_dtype=memory_dtype, read_span=read_span
    )
    adding = is_memory(into)
    name = model or "default"
    defaults: dict[str, Any] = dict(common.CLI_DEFAULTS)
    if adding:
        with Memory.open(into) as present:
            defaults = present.focus_options
            name = model or present.model_source or "default"
    elif os.path.exists(into) and (not into.is_dir() or foreign_entries(into)):
        raise LongfocusError(f"{into} exists and is not a memory; choose a new folder.")
    focused, tokenizer = common.load_model(name, {**defaults, **options}, threads)
    source_name = name if name == "default" or not Path(name).exists() else str(Path(name).absolute())
    try:
        memory = (
            Memory.open(into, model=focused, tokenizer=tokenizer, writable=True)
            if adding
            else Memory.create(into, focused, tokenizer, model_source=source_name)
        )
    except MemoryMismatchError as error:
        raise MemoryMismatchError(f"{error} (Leave out the options to add with those of the memory.)") from error
    from longfocus.model.reading import Reader

    with memory:
        reader = Reader(focused, tokenizer, memory)
        common.report_skipped(found.skipped)
        known = [source for source in found.sources if reader.is_remembered(source)]
        if known:
            common.note(f"{len(known)} of {len(found.sources)} files are remembered already, unchanged.")
        try:
            common.read_all(reader, [source for source in found.sources if source not in known])
        except KeyboardInterrupt:
            again = "goes on from here" if not focused.focus.config.overlap else "reads the unfinished document again"
            common.note(
                f"Stopped. {into} holds {memory.tokens:,} tokens of {len(memory.documents)} documents and can be asked; "
                f"the same command {again}."
            )
            raise
        common.note(
            f"{into}: {len(memory.documents)} documents, {memory.tokens:,} tokens, {memory.nbytes / 1e6:,.1f} MB."
        )
