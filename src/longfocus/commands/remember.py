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
    from longfocus.model.reading import Reader, not_remembered

    found = find_sources(paths, encoding=encoding)
    common.report_skipped(found.skipped)
    options = common.focus_options(
        memory_layers=memory_layers, window=window, overlap=overlap, memory_dtype=memory_dtype, read_span=read_span
    )
    adding = is_memory(into)
    new = found.sources
    passed_over: list[str] = []
    name = model or "default"
    defaults: dict[str, Any] = dict(common.CLI_DEFAULTS)
    if adding:
        with Memory.open(into) as present:
            defaults = present.focus_options
            name = model or present.model_source or "default"
            new = not_remembered(present, found.sources)
            passed_over = _passed_over(present, found.sources, new)
            if not new and not options and model is None:
                for line in passed_over:
                    common.note(line)
                _say_what_it_holds(into, present)
                return
    elif os.path.exists(into) and (not into.is_dir() or foreign_entries(into)):
        raise LongfocusError(f"{into} exists and is not a memory; choose a new folder.")
    focused, tokenizer = common.load_model(name, {**defaults, **options}, threads)
    source_name = name if name.startswith("default") or not Path(name).exists() else str(Path(name).absolute())
    try:
        memory = (
            Memory.open(into, model=focused, tokenizer=tokenizer, writable=True)
            if adding
            else Memory.create(into, focused, tokenizer, model_source=source_name)
        )
    except MemoryMismatchError as error:
        raise MemoryMismatchError(f"{error} (Leave out the options to add with those of the memory.)") from error
    with memory:
        reader = Reader(focused, tokenizer, memory)
        for line in passed_over:
            common.note(line)
        try:
            common.read_all(reader, new)
        except KeyboardInterrupt:
            again = "goes on from here" if not focused.focus.config.overlap else "reads the unfinished document again"
            common.note(
                f"Stopped. {into} holds {memory.tokens:,} tokens of {len(memory.documents)} documents and can be asked; "
                f"the same command {again}."
            )
            raise
        _say_what_it_holds(into, memory)


def _say_what_it_holds(folder: Path, memory: Memory) -> None:
    megabytes = memory.nbytes / 1e6
    common.note(f"{folder}: {len(memory.documents)} documents, {memory.tokens:,} tokens, {megabytes:,.1f} MB.")


def _passed_over(memory: Memory, sources: list[Source], new: list[Source]) -> list[str]:
    """Lines about what is in the memory already, and what will stand in it twice."""
    lines = []
    if len(new) < len(sources):
        lines.append(f"{len(sources) - len(new)} of {len(sources)} files are remembered already, unchanged.")
    read_before = {document.path for document in memory.documents if document.complete}
    return lines + [
        f"{source.name} has changed: it is read again, and what was remembered of it before stays."
        for source in new
        if source.path is not None and str(source.path.absolute()) in read_before
    ]
