"""`longfocus chat`: a conversation over texts or a saved memory."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from longfocus.commands import common, sharded
from longfocus.errors import PromptTooLongError

EPILOG = """Examples:

  longfocus chat project.memory

  longfocus chat book.txt --sources 2 --temperature 0.7

  longfocus chat project.memory --only 'docs/*.md'

In the conversation: /sources shows the passages behind the last answer, /new starts over, /quit (or Ctrl-D) ends it.
"""


def chat(
    paths: Annotated[list[str], typer.Argument(metavar="PATH…", help="A saved memory, or files and folders.")],
    model: common.Model = None,
    only: common.Only = None,
    sources: Annotated[
        int, typer.Option("--sources", "-s", metavar="N", min=0, help="Passages to show under each answer.")
    ] = 0,
    max_new_tokens: common.MaxNewTokens = 200,
    temperature: common.Temperature = 0.0,
    top_p: common.TopP = 1.0,
    seed: common.Seed = 0,
    retrieval: common.AnswerRetrieval = "auto",
    k: common.K = None,
    k_rule: common.KRuleFile = None,
    encoding: common.Encoding = None,
    dtype: common.Dtype = None,
    threads: common.Threads = None,
    ray_address: sharded.RayAddress = None,
    shard_timeout: sharded.ShardTimeout = None,
) -> None:
    """Talk about texts of any length; every question sees the ones before.

    Nothing of the conversation is written to the memory.
    """
    options = common.focus_options(k=k, k_rule=k_rule)
    focused, tokenizer, memory = sharded.open_for_answers(
        paths,
        model,
        options,
        threads,
        encoding,
        dtype,
        retrieval=retrieval,
        address=ray_address,
        timeout=shard_timeout,
        only=only or (),
    )
    from longfocus.answering import Answer, Conversation, Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    talk = Conversation(focused, tokenizer, memory, sampling)
    last: Answer | None = None
    common.note(f"{len(memory.documents)} documents, {memory.tokens:,} tokens. /sources, /new, /quit")
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
            talk = Conversation(focused, tokenizer, memory, sampling)
            continue
        if question == "/sources":
            common.print_sources(last.sources if last is not None else [])
            continue
        if question.startswith("/"):
            common.note(f"{question} is not a command; there are /sources, /new and /quit.")
            continue

        def emit(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        try:
            last = talk.ask(question, sources=max(sources, 5), emit=emit)
        except PromptTooLongError as error:
            common.note(str(error))
            continue
        print()
        if last.stopped == "interrupt":
            common.note("Stopped; this question is forgotten.")
        elif sources:
            common.print_sources(last.sources[:sources])
