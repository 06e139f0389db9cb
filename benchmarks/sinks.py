"""What the first token of each window does in a memory, and whether replacing it and balancing window and memory help.

    python benchmarks/sinks.py                       # before and after the fine-tune, about 10 minutes on 2 cores

A window's first token draws much attention by itself (an attention sink), and a memory holds one such key per window.
Pass-key prompts (`longfocus eval passkey`) are read and answered with window firsts kept and replaced, and with both kinds
of attention balanced or not (`window_first`, `balance_tokens` of FocusConfig). Beside the answers: the part of all attention
to memory that first tokens receive while answering, by memory layer, mean over queries and heads.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import common
from longfocus.attention import share
from longfocus.memory.context import MemoryContext
from longfocus.memory.contract import KVChunk
from longfocus.settings import sizes_of
from longfocus.subjects.local import FocusedSubject
from longfocus.tasks.passkey import Passkey, PasskeyOptions
from longfocus.tasks.texts import Texts


@contextmanager
def first_tokens(window: int) -> Iterator[dict[int, list[float]]]:
    """Note the share of windows' first tokens by layer, of all passes that answer."""
    shares: dict[int, list[float]] = defaultdict(list)
    attend, chunks = MemoryContext.attend, MemoryContext.chunks

    def only_first(context: MemoryContext, layer: int) -> Iterator[KVChunk]:
        for chunk in chunks(context, layer):
            index = torch.arange(chunk.start, chunk.start + chunk.keys.shape[2])
            yield chunk._replace(mask=(index % window == 0)[None], records=None)

    def noting(context: MemoryContext, layer: int, query: torch.Tensor, **options: Any) -> Any:
        whole = attend(context, layer, query, **options)
        if whole is not None:
            MemoryContext.chunks = only_first  # type: ignore[method-assign]
            try:
                first = attend(context, layer, query, **options)
            finally:
                MemoryContext.chunks = chunks  # type: ignore[method-assign]
            assert first is not None
            shares[layer].append(float(share(first[1], whole[1]).mean()))
        return whole

    MemoryContext.attend = noting  # type: ignore[method-assign]
    try:
        yield shares
    finally:
        MemoryContext.attend = attend  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_model_options(parser)
    parser.add_argument("--models", default="default-base,default", help="models, comma-separated")
    parser.add_argument("--lengths", default="2k,8k")
    parser.add_argument("--haystack", default="filler", help="filler, books, code, arxiv or isabelle")
    parser.add_argument("--balance-tokens", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/sinks"))
    arguments = parser.parse_args()
    common.quiet(arguments)
    rows: list[list[str]] = []
    results = []
    for name in arguments.models.split(","):
        arguments.model = name
        model, tokenizer = common.load_focused(arguments)
        subject = FocusedSubject(model, tokenizer, name)
        options = PasskeyOptions(
            lengths=sizes_of(arguments.lengths),
            samples=arguments.prompts,
            haystacks=[arguments.haystack],
            seed=arguments.seed,
        )
        task = Passkey(options, Texts())
        for point in task.points(subject):
            length = int(point.values["tokens"])
            for first in ("kept", "replaced"):
                for balance in (None, arguments.balance_tokens):
                    model.focus.config = dataclasses.replace(
                        model.focus.config, window_first=first, balance_tokens=balance
                    )
                    with first_tokens(model.focus.config.window_tokens) as shares:
                        found = [sample.scores["right"] for sample in task.samples(subject, point, frozenset())]
                    right, prompts = int(sum(found)), len(found)
                    mass = {layer: round(statistics.mean(values), 3) for layer, values in shares.items()}
                    shown = ", ".join(f"{layer}: {value:.2f}" for layer, value in mass.items())
                    rows.append([name, f"{length:,}", first, str(balance or "none"), f"{right} of {prompts}", shown])
                    common.note(" | ".join(rows[-1]))
                    results.append(
                        {
                            "model": name,
                            "tokens": length,
                            "window_first": first,
                            "balance_tokens": balance,
                            "right": right,
                            "prompts": prompts,
                            "share": mass,
                        }
                    )
    head = [
        "model",
        "prompt tokens",
        "window firsts",
        "balance tokens",
        "right",
        "their share of memory's attention, by layer",
    ]
    text = common.markdown(head, rows)
    common.save_table(arguments, model, text, results)


if __name__ == "__main__":
    main()
