"""Bars: while training sources are tokenised, and while samples are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from longfocus.commands.common import note

if TYPE_CHECKING:
    from longfocus.evaluation.run import Step


@contextmanager
def tokenising() -> Iterator[Callable[[Any], None]]:
    """A function to be told `data.token_cache.Progress`; shows a bar on a terminal and nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("Tokenising"),
        BarColumn(),
        TextColumn("{task.fields[tokens]:,} tokens of {task.fields[documents]:,} documents"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
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
    """Samples of a task, or steps of other work: a bar on a terminal, a line now and then elsewhere."""

    every_s = 15

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self.name, self.terminal = name, console.is_terminal
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not self.terminal,
        )
        self.task = self.bar.add_task(name, total=None)
        self.told = time.monotonic()

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    @property
    def step(self) -> Step:
        """To be told after each sample."""

        def step(point: Any, done: int, total: int) -> None:
            self.show(point.key, done, total, "samples")

        return step

    def show(self, where: str, done: int, total: int, what: str = "steps") -> None:
        """So many are done, and work is now at `where`."""
        self.bar.update(self.task, completed=done, total=total, description=f"{self.name} {where}")
        if not self.terminal and time.monotonic() - self.told > self.every_s:
            self.told = time.monotonic()
            note(f"{self.name}: {done} of {total} {what}, at {where} …")
