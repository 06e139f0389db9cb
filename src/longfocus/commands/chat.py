"""`longfocus chat`: a conversation over texts or a saved memory."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from longfocus.commands.asking import open_for_answers
from longfocus.commands.options import Asking, in_groups
from longfocus.commands.output import emit, note, print_sources
from longfocus.errors import PromptTooLongError

EPILOG = """Examples:

  longfocus chat project.memory

  longfocus chat book.txt --sources 2 --temperature 0.7

  longfocus chat project.memory --only 'docs/*.md'

In the conversation: /sources shows the passages behind the last answer, /new starts over, /quit (or Ctrl-D) ends it.
"""


@in_groups
def chat(
    paths: Annotated[list[str], typer.Argument(metavar="PATH…", help="A saved memory, or files and folders.")],
    *,
    sources: Annotated[
        int, typer.Option("--sources", "-s", metavar="N", min=0, help="Passages to show under each answer.")
    ] = 0,
    asking: Asking,
) -> None:
    """Talk about texts of any length; every question sees the ones before.

    Nothing of the conversation is written to the memory.
    """
    model, tokenizer, memory = open_for_answers(paths, asking, {})
    from longfocus.answering import Answer, Conversation

    talk = Conversation(model, tokenizer, memory, asking.sampling)
    last: Answer | None = None
    note(f"{len(memory.documents)} documents, {memory.tokens:,} tokens. /sources, /new, /quit")
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        question = question.encode("utf-8", "replace").decode("utf-8")
        if not question:
            continue
        if question == "/quit":
            return
        if question == "/new":
            talk = Conversation(model, tokenizer, memory, asking.sampling)
            continue
        if question == "/sources":
            print_sources(last.sources if last is not None else [])
            continue
        if question.startswith("/"):
            note(f"{question} is not a command; there are /sources, /new and /quit.")
            continue
        try:
            last = talk.ask(question, sources=max(sources, 5), emit=emit)
        except PromptTooLongError as error:
            note(str(error))
            continue
        print()
        if last.stopped == "interrupt":
            note("Stopped; this question is forgotten.")
        elif sources:
            print_sources(last.sources[:sources])
