"""A bar while training sources are tokenised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
