"""Bars on a terminal, and a line now and then elsewhere: while sources are read into a memory, while training sources are
tokenised, and while samples are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from longfocus.commands.output import counted, note
from longfocus.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

    from longfocus.data.documents import Source
    from longfocus.evaluation.run import Step
    from longfocus.model.reading import Reader


class NowAndThen:
    """Says when it is time for another line."""

    def __init__(self, seconds: float = 15) -> None:
        self.seconds, self.told = seconds, time.monotonic()

    def due(self) -> bool:
        """Whether the last line is long ago; if so, the next is due as much later."""
        now = time.monotonic()
        if now - self.told <= self.seconds:
            return False
        self.told = now
        return True


def _bar(before: str, after: Any, *, transient: bool = False) -> Progress:
    """A bar between two columns (a text, a text or column) with the time left; `disable` where there is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(before, markup=False), BarColumn(), after, TimeRemainingColumn(compact=True))
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=transient)


def read_all(reader: Reader, sources: Sequence[Source], *, replace: bool = False) -> None:
    """Read sources with a bar: tokens, tokens per second, time left; see `Reader.read` for `replace`."""
    if not sources:
        return
    from rich.progress import TextColumn

    total = sum(source.size_bytes or 0 for source in sources)
    done_bytes = tokens = 0
    begun, line = time.monotonic(), NowAndThen()

    def rate() -> float:
        return tokens / max(1e-9, time.monotonic() - begun)

    with _bar(
        "{task.description}", TextColumn("{task.fields[tokens]:,} tokens  {task.fields[rate]:,.0f} tokens/s")
    ) as bar:
        task = bar.add_task("Reading", total=total or None, tokens=0, rate=0.0)
        for source in sources:

            def step(progress: Any, base: int = done_bytes, name: str = source.name) -> None:
                nonlocal tokens
                tokens += progress.tokens
                read = base + progress.source_bytes
                bar.update(task, completed=read, description=_short(name), tokens=tokens, rate=rate())
                if bar.disable and line.due():
                    part = f"{100 * read / total:.0f}%, " if total else ""
                    note(f"Reading: {part}{tokens:,} tokens, {rate():,.0f} tokens/s …")

            try:
                reader.read(source, step, replace=replace)
                done_bytes += source.size_bytes or 0
            except InputError as error:  # it was readable a moment ago: changed or removed meanwhile
                if len(sources) == 1:
                    raise
                note(f"Skipped {error}")
            bar.update(task, completed=done_bytes)
        bar.update(task, description=f"Read {counted(len(sources), 'document')}")
    if bar.disable:
        seconds = time.monotonic() - begun
        note(f"Read {len(sources)} documents: {tokens:,} tokens in {seconds:.1f} s ({rate():,.0f} tokens/s).")


def _short(name: str, width: int = 32) -> str:
    return name if len(name) <= width else "…" + name[1 - width :]


@contextmanager
def tokenising() -> Iterator[Callable[[Any], None]]:
    """A function to be told `data.token_cache.Progress`; shows a bar on a terminal and nothing elsewhere."""
    from rich.progress import TextColumn

    with _bar(
        "Tokenising",
        TextColumn("{task.fields[tokens]:,} tokens of {task.fields[documents]:,} documents"),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None, tokens=0, documents=0, visible=False)

        def step(progress: Any) -> None:
            bar.update(
                task,
                total=progress.bytes_total,
                completed=progress.bytes_read,
                tokens=progress.tokens,
                documents=progress.documents,
                visible=True,
            )

        yield step
        bar.update(task, visible=False)


class Bar:
    """Samples of a task."""

    def __init__(self, name: str) -> None:
        from rich.progress import MofNCompleteColumn

        self.name, self.line = name, NowAndThen()
        self.bar = _bar("{task.description}", MofNCompleteColumn())
        self.task = self.bar.add_task(name, total=None)

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    @property
    def step(self) -> Step:
        """To be told after each sample."""

        def step(point: Any, done: int, total: int) -> None:
            self.bar.update(self.task, completed=done, total=total, description=f"{self.name} {point.key}")
            if self.bar.disable and self.line.due():
                note(f"{self.name}: {done} of {total} samples, at {point.key} …")

        return step
