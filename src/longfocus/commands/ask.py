"""`longfocus ask`: one question to texts or to a saved memory, with the passages that the answer drew on."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from longfocus.commands import common, sharded

EPILOG = """Examples:

  longfocus ask book.txt "Who is the narrator?"

  longfocus ask src/ README.md "How is the cache invalidated?" --sources 3

  longfocus ask project.memory "Where are retries configured?" --json

  longfocus ask project.memory "How is it installed?" --only 'docs/*.md' --only README.md

  git log -p | longfocus ask - "When was the parser rewritten?"
"""


def ask(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH… QUESTION",
            help="Files, folders, saved memories or - for standard input; the question comes last.",
        ),
    ],
    model: common.Model = None,
    only: common.Only = None,
    sources: Annotated[
        int, typer.Option("--sources", "-s", metavar="N", min=0, help="Passages to show under the answer.")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    max_new_tokens: common.MaxNewTokens = 200,
    temperature: common.Temperature = 0.0,
    top_p: common.TopP = 1.0,
    seed: common.Seed = 0,
    retrieval: common.AnswerRetrieval = "auto",
    k: common.K = None,
    k_rule: common.KRuleFile = None,
    memory_layers: common.Layers = None,
    window: common.Window = None,
    overlap: common.Overlap = None,
    memory_dtype: common.MemoryDtype = None,
    read_span: common.ReadSpan = None,
    encoding: common.Encoding = None,
    dtype: common.Dtype = None,
    threads: common.Threads = None,
    ray_address: sharded.RayAddress = None,
    shard_timeout: sharded.ShardTimeout = None,
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
    options = common.focus_options(
        k=k,
        k_rule=k_rule,
        memory_layers=memory_layers,
        window=window,
        overlap=overlap,
        memory_dtype=memory_dtype,
        read_span=read_span,
    )
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
        quiet=as_json,
    )
    from longfocus.answering import Conversation, Sampling

    talk = Conversation(focused, tokenizer, memory, Sampling(max_new_tokens, temperature, top_p, seed))
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
            "retrieval": focused.focus.config.retrieval,
            "memory_mass": round(answer.memory_mass, 6),
            "sources": [passage.to_dict() for passage in answer.sources],
        }
        print(json.dumps(result))
        return

    def emit(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    answer = talk.ask(question, sources=sources, emit=emit)
    print()
    common.print_sources(answer.sources)
    if answer.stopped == "interrupt":
        raise KeyboardInterrupt
