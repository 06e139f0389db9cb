"""`longfocus remember`: encode texts once, into a memory on disk that can be asked again and again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longfocus.commands import common
from longfocus.errors import LongfocusError, MemoryMismatchError

if TYPE_CHECKING:
    from longfocus.data.documents import Source
    from longfocus.memory.memory import Memory

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
    new = found.sources
    name = model or "default"
    defaults: dict[str, Any] = dict(common.CLI_DEFAULTS)
    if adding:
        with Memory.open(into) as present:
            defaults = present.focus_options
            name = model or present.model_source or "default"
            new = _not_yet_remembered(present, found.sources)
        if not new and not options and model is None:
            return
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
        try:
            common.read_all(reader, new)
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


def _not_yet_remembered(memory: Memory, sources: list[Source]) -> list[Source]:
    """Sources that are not in the memory, unchanged; says what is passed over, and what stands in it twice now."""
    from longfocus.model.reading import is_remembered

    new = [source for source in sources if not is_remembered(memory, source)]
    if len(new) < len(sources):
        common.note(f"{len(sources) - len(new)} of {len(sources)} files are remembered already, unchanged.")
    read_before = {document.path for document in memory.documents if document.complete}
    for source in new:
        if source.path is not None and str(source.path.absolute()) in read_before:
            common.note(f"{source.name} has changed: it is read again, and what was remembered of it before stays.")
    return new
