"""What commands say: lines on standard error for the person, lists and passages on standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longfocus.analysis.attribution import Passage
    from longfocus.memory.documents import Document


def note(text: str) -> None:
    """A line for the person, on standard error."""
    print(text, file=sys.stderr, flush=True)


def counted(number: int, what: str) -> str:
    """`1 document`, `1,200 documents`."""
    return f"{number:,} {what}" + "s" * (number != 1)


def report_skipped(skipped: Sequence[tuple[str, str]], limit: int = 5) -> None:
    """Say which files of folders were left out."""
    for name, reason in skipped[:limit]:
        note(f"Skipped {name}: {reason}.")
    if len(skipped) > limit:
        note(f"Skipped {len(skipped) - limit} more files.")


def print_documents(documents: Sequence[Document], bytes_per_token: int) -> None:
    """A line for each: tokens, megabytes of keys and values, name."""
    for document in documents:
        state = "" if document.complete else "  (incomplete: reading was interrupted)"
        megabytes = document.tokens * bytes_per_token / 1e6
        print(f"{document.tokens:>10,}  {megabytes:>8,.1f} MB  {document.name}{state}")


def emit(text: str) -> None:
    """A piece of an answer, seen at once."""
    print(text, end="", flush=True)


def print_sources(sources: Sequence[Passage]) -> None:
    """The passages under an answer."""
    if not sources:
        return
    print("\nSources, by the question's attention:")
    for number, passage in enumerate(sources, 1):
        print(f"[{number}] {passage.place}  {100 * passage.mass:.2f}%")
        for line in passage.text.splitlines()[:8]:
            print(f"    {line}")
