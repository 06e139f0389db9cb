"""`longfocus ask`: one question to texts or to a saved memory, with the passages that the answer drew on."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from longfocus.commands.asking import open_for_answers
from longfocus.commands.options import AsJson, Asking, Reading, in_groups
from longfocus.commands.output import emit, print_sources

EPILOG = """Examples:

  longfocus ask book.txt "Who is the narrator?"

  longfocus ask src/ README.md "How is the cache invalidated?" --sources 3

  longfocus ask project.memory "Where are retries configured?" --json

  longfocus ask project.memory "How is it installed?" --only 'docs/*.md' --only README.md

  git log -p | longfocus ask - "When was the parser rewritten?"
"""


@in_groups
def ask(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH… QUESTION",
            help="Files, folders, saved memories or - for standard input; the question comes last.",
        ),
    ],
    *,
    sources: Annotated[
        int, typer.Option("--sources", "-s", metavar="N", min=0, help="Passages to show under the answer.")
    ] = 5,
    as_json: AsJson = False,
    asking: Asking,
    reading: Reading,
) -> None:
    """Answer a question from texts of any length.

    A saved memory (see remember) is opened and asked without reading anything again.
    """
    if len(arguments) < 2:
        raise typer.BadParameter("give at least one path and, last, the question.", param_hint="PATH… QUESTION")
    *paths, question = arguments
    question = question.encode("utf-8", "replace").decode("utf-8")  # bytes of the shell that are no text
    if not question.strip():
        raise typer.BadParameter("the question is empty.", param_hint="QUESTION")
    model, tokenizer, memory = open_for_answers(paths, asking, reading.focus, quiet=as_json)
    from longfocus.answering import Conversation

    talk = Conversation(model, tokenizer, memory, asking.sampling)
    begun = time.monotonic()
    if as_json:
        answer = talk.ask(question, sources=sources)
        result = {
            "question": question,
            "answer": answer.text,
            "tokens": answer.tokens,
            "stopped": answer.stopped,
            "seconds": round(time.monotonic() - begun, 3),
            "model": memory.geometry.model_name,
            "memory": {"documents": len(memory.documents), "tokens": memory.tokens, "bytes": memory.nbytes},
            "retrieval": model.focus.config.retrieval,
            "memory_mass": round(answer.memory_mass, 6),
            "sources": [passage.to_dict() for passage in answer.sources],
        }
        print(json.dumps(result))
        return
    answer = talk.ask(question, sources=sources, emit=emit)
    print()
    print_sources(answer.sources)
    if answer.stopped == "interrupt":
        raise KeyboardInterrupt
