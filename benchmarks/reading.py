"""Reading into a large memory: how much of it must a window consult while it is read, and what does that cost?

    python benchmarks/reading.py --out out/reading
    python benchmarks/reading.py --documents 0 --sizes 8k,64k,256k,1M --read 256k --tile --on-disk out/m1 --out out/reading_time

A way of reading decides which memory keys the queries of a window see while the window becomes memory itself:

    nothing            no memory (`--read-span 0`)
    span N             the last N tokens of the document (`--read-span N`, dense)
    document           all of the document before (`--read-span -1`)
    document, top-k    of it, k keys for each query of each head (the paper's retrieval)
    document, blocks   of it, 1,024 keys for each block of 64 queries and key head: those with the largest products with the block's mean
                       query; all queries of the block attend to them. One retrieval for 64 queries; made here, no option of longfocus
    whole memory       all of another document, as long as this one, and then all of this one

Quality: documents of `--length` tokens of held-out text, a pass key in each, are read in every way. Afterwards all is the same: the
document's memory is consulted whole (dense). Loss: of the `--following` tokens that come after the document, in windows. Right: prompts after
which the answer holds the pass key. Time: of reading alone, relative to the default's, `span 4k`; ways take turns.

Time by size: seconds per 1,000 tokens of reading two windows when the memory holds `--sizes` tokens of other documents. `span`: those are not
consulted. `whole memory` in three ways: dense, k keys a query, blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import common
import large_memory
from large_memory import Prefix
from longfocus import Memory
from longfocus.attention import attend
from longfocus.memory import context, windows_context
from longfocus.memory.contract import KVChunk
from longfocus.memory.dense import Scratch
from longfocus.memory.documents import TOKEN_DTYPE
from longfocus.model.cache import FocusCache
from longfocus.model.reading_pass import read_windows
from longfocus.settings import size_name, size_of, sizes_of
from longfocus.subjects.local import FocusedSubject
from longfocus.tasks.haystack import Haystack, place_in
from longfocus.tasks.passkey import OPENING, QUESTION, Passkey
from longfocus.tasks.statistics import mean_of
from longfocus.tasks.texts import Texts

BLOCK_QUERIES = 64
BLOCK_KEYS = 1024
WAYS: dict[str, dict[str, Any]] = {
    "nothing": {"read_span": 0},
    "span 1k": {"read_span": 1024},
    "span 4k": {"read_span": 4096},
    "document": {"read_span": None},
    "document, top-k": {"read_span": None, "retrieval": "exact"},
    "document, blocks": {"read_span": None},
    "whole memory": {"read_span": None},
}
DEFAULT = "span 4k"
LOCAL = 100
"""Tokens after the document that stand before the question."""


# -- one retrieval for a block of queries --------------------------------------------------------------------


def attend_by_blocks(
    query: Tensor, chunks: Iterable[KVChunk], *, scale: float, softcap: float | None, scratch: Scratch
) -> tuple[Tensor, Tensor] | None:
    """As `attend_dense`, over the keys that each block of queries retrieves together.

    Args:
        query: (1, Hq, T, D), T a multiple of BLOCK_QUERIES.
    """
    held = list(chunks)
    if not held:
        return None
    heads, blocks = held[0].keys.shape[1], query.shape[2] // BLOCK_QUERIES
    parts = query[0].unflatten(1, (blocks, BLOCK_QUERIES))  # (Hq, blocks, queries, D)
    means = parts.mean(2).unflatten(0, (heads, -1)).mean(1)  # (Hkv, blocks, D)
    scores = torch.cat([means @ scratch.widen(chunk, query)[0][0].transpose(1, 2) for chunk in held], 2)
    chosen = scores.topk(min(BLOCK_KEYS, scores.shape[2])).indices  # (Hkv, blocks, K)
    keys, values = query.new_empty(2, *chosen.shape, query.shape[3])
    at = 0
    for chunk in held:
        count = chunk.keys.shape[2]
        head, block, place = torch.nonzero((chosen >= at) & (chosen < at + count), as_tuple=True)
        number = chosen[head, block, place] - at
        all_keys, all_values = scratch.widen(chunk, query)
        keys[head, block, place], values[head, block, place] = all_keys[0, head, number], all_values[0, head, number]
        at += count
    out, lse = attend(
        parts.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), scale=scale, softcap=softcap
    )  # rows are blocks
    return out.transpose(0, 1).flatten(1, 2).unsqueeze(0), lse.transpose(0, 1).flatten(1).unsqueeze(0)


@contextlib.contextmanager
def consulted(way: str) -> Iterator[None]:
    """Memories are consulted by blocks instead of dense, if that is the way."""
    if not way.endswith("blocks"):
        yield
        return

    def rows(
        self: Any, queries: Sequence[Tensor], chunks: Sequence[KVChunk], seen: Any, scale: float, softcap: float | None
    ) -> list[list[tuple[Tensor, Tensor]]]:
        between = (windows_context._between(chunks, *each) for each in seen)
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "scratch": self.scratch}
        found = [attend_by_blocks(query, some, **options) for query, some in zip(queries, between, strict=True)]
        return [[] if each is None else [each] for each in found]

    with (
        mock.patch.object(windows_context.WindowsContext, "_dense", rows),
        mock.patch.object(context, "attend_dense", attend_by_blocks),
    ):
        yield


# -- what reading makes of the memory ------------------------------------------------------------------------


def documents(
    subject: FocusedSubject, texts: Texts, parts: list[str], each: int, length: int, following: int
) -> Iterator[tuple[str, str, list[int], list[int], str]]:
    """(set, name, token ids of the document and what follows, ids of another document, key) with the key inside the first `length`."""
    for part in parts:
        stack = Haystack(subject.tokenizer, texts, part)
        for number in range(each):
            rng = random.Random(f"reading {part} {number}")
            key = str(rng.randint(10000, 99999))
            lines = stack.lines(length + following + 64, rng)
            depth = rng.random() * 0.9 * length / (length + following)
            before = place_in(lines, depth)
            fact = f"The pass key is {key}. Remember it. {key} is the pass key."
            text = f"{OPENING}{''.join(lines[:before])}{fact}\n{''.join(lines[before:])}"
            ids = subject.encode(text)
            other = subject.encode("".join(stack.lines(length + 64, rng)))
            assert len(ids) >= length + following and len(other) >= length
            assert key in subject.tokenizer.decode(ids[:length])
            yield part, f"{part} {number}", ids[: length + following], other[:length], key


def read(model: Any, ids: list[int], memory: Memory, way: str, whole: bool) -> tuple[tuple[int, int], float]:
    """Read a document in a way: its range in the memory, and the seconds.

    Args:
        whole: consult all of the memory that is there before.
    """
    document = memory.begin_document(way, kind="ids")
    cache = FocusCache(model.focus, own=memory.store, document_start=0 if whole else document.start)
    begun = time.perf_counter()
    with consulted(way):
        read_windows(model, torch.tensor([ids]), cache)
    seconds = time.perf_counter() - begun
    document = memory.commit_window(document, np.zeros(len(ids), TOKEN_DTYPE), b"", 0, complete=True)
    return (document.start, document.start + len(ids)), seconds


@torch.no_grad()
def losses(model: Any, memory: Memory, ids: list[int]) -> list[float]:
    """Mean loss of each window of the ids, nats a token, each with the memory and without the windows between."""
    window = model.focus.config.window_tokens
    found = []
    for start in range(0, len(ids) - window + 1, window):
        part = torch.tensor([ids[start : start + window]])
        cache = FocusCache(model.focus, memory)
        logits = model(part, cache=cache, use_cache=True).logits[0, :-1].float()
        found.append(float(torch.nn.functional.cross_entropy(logits, part[0, 1:])))
    return found


def measure(subject: FocusedSubject, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each document and way."""
    model, config = subject.model, subject.model.focus.config
    length, following = size_of(arguments.length), size_of(arguments.following)
    question = subject.tokenizer("\n" + QUESTION, add_special_tokens=False)["input_ids"]
    rows: list[dict[str, Any]] = []
    texts = Texts(arguments.data)
    for part, name, ids, other, key in documents(
        subject, texts, arguments.text.split(","), arguments.documents, length, following
    ):
        for way, changes in WAYS.items():
            if way not in arguments.ways:
                continue
            memory, whole = Memory(model), way == "whole memory"
            if whole:
                model.focus.config = dataclasses.replace(config, **WAYS[DEFAULT])
                read(model, other, memory, "other", False)
            model.focus.config = dataclasses.replace(config, **changes)
            _, seconds = read(model, ids[:length], memory, way, whole)
            model.focus.config = dataclasses.replace(config, read_span=None, retrieval="dense")
            one = memory.select(memory.documents[-1])
            found = losses(model, one, ids[length:])
            cache = FocusCache(model.focus, one)
            with torch.no_grad():
                asked = [*ids[length : length + LOCAL], *question]
                answer = subject._generate(asked, Passkey.max_new_tokens, Passkey.stop, cache=cache)
            rows.append(
                {
                    "text": part, "document": name, "way": way, "seconds": seconds, "losses": found, "right": key in answer,
                    "answer": answer,
                }
            )  # fmt: skip
        common.note(f"{name}: " + ", ".join(f"{r['way']} {r['seconds']:.1f} s" for r in rows if r["document"] == name))
    model.focus.config = config
    return rows


def quality_table(rows: list[dict[str, Any]]) -> str:
    """By way, over documents."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    base = {row["document"]: row for row in rows if row["way"] == DEFAULT}
    table = []
    for way in ways:
        mine = [row for row in rows if row["way"] == way]
        cells = [way]
        for part in dict.fromkeys(row["text"] for row in rows):
            some = [row for row in mine if row["text"] == part]
            mean = statistics.mean(statistics.mean(row["losses"]) for row in some)
            change = mean_of(
                [statistics.mean(row["losses"]) - statistics.mean(base[row["document"]]["losses"]) for row in some]
                if base
                else [math.nan]
            )
            cells.append(f"{math.exp(mean):.2f}")
            said = "" if way == DEFAULT else f"{change.value:+.4f} ({change.low:+.4f} to {change.high:+.4f})"
            cells.append(said)
        cells.append(f"{sum(row['right'] for row in mine)} of {len(mine)}")
        ratio = statistics.median(row["seconds"] / base[row["document"]]["seconds"] for row in mine) if base else 0
        cells.append(f"{ratio:.2f}")
        table.append(cells)
    header = ["way of reading"]
    for part in dict.fromkeys(row["text"] for row in rows):
        header += [f"{part}: perplexity", f"loss against {DEFAULT} (95%)"]
    return common.markdown([*header, "pass key right", "time"], table)


# -- time by the memory's size -------------------------------------------------------------------------------


@torch.no_grad()
def measure_sizes(model: Any, tokenizer: Any, arguments: argparse.Namespace, tokens: int) -> list[dict[str, Any]]:
    """Seconds of reading two windows beside a memory of each size."""
    sizes, config = sizes_of(arguments.sizes), model.focus.config
    window = config.window_tokens
    ids = large_memory.real_ids(tokenizer, tokens + 2 * window, arguments.data, arguments.text.split(","))
    memory = large_memory.build(model, ids[:tokens], max(sizes), arguments.on_disk, arguments.noise)
    fed = torch.tensor([ids[tokens:]])
    ways: dict[str, dict[str, Any]] = {
        DEFAULT: WAYS[DEFAULT],
        "whole memory": {"read_span": None},
        "whole memory, top-k": {"read_span": None, "retrieval": "exact"},
        "whole memory, blocks": {"read_span": None},
    }
    rows = []
    for size in sizes:
        for way, changes in ways.items():
            taken = []
            for repeat in range(1 + (1 if way != DEFAULT and size > 100_000 else 3)):
                model.focus.config = dataclasses.replace(config, **changes)
                shared = None if way == DEFAULT else Prefix(memory, size)
                cache = FocusCache(model.focus, shared)  # type: ignore[arg-type]
                begun = time.perf_counter()
                with consulted(way):
                    read_windows(model, fed, cache)
                if repeat:
                    taken.append((time.perf_counter() - begun) / fed.shape[1])
            rows.append({"tokens": size, "way": way, "seconds": statistics.median(taken)})
            common.note(f"{size_name(size)}, {way}: {1000 * rows[-1]['seconds']:.2f} s per 1,000 tokens")
    model.focus.config = config
    return rows


def size_table(rows: list[dict[str, Any]]) -> str:
    sizes = list(dict.fromkeys(row["tokens"] for row in rows))
    found = {(row["way"], row["tokens"]): row["seconds"] for row in rows}
    table = []
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = [f"{1000 * found[way, size]:.2f} ({found[way, size] / found[DEFAULT, size]:.1f}×)" for size in sizes]
        table.append([way, *cells])
    header = ["s per 1,000 tokens (against span 4k)", *(f"beside {size_name(size)}" for size in sizes)]
    return common.markdown(header, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_model_options(parser)
    large_memory.add_memory_options(parser, "")
    parser.add_argument("--documents", type=int, default=8, help="of each set; 0: time by size only")
    parser.add_argument("--length", default="8k", help="tokens of a document, a multiple of the window")
    parser.add_argument("--following", default="1k", help="tokens after it whose loss is measured")
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=list(WAYS), metavar="WAY;WAY")
    parser.add_argument("--out", type=Path, default=Path("out/reading"))
    arguments = parser.parse_args()
    common.quiet(arguments)
    unknown = [way for way in arguments.ways if way not in WAYS]
    if unknown:
        parser.error(f"--ways: {unknown[0]!r} given, expected some of {'; '.join(WAYS)}")
    sizes = sizes_of(arguments.sizes) if arguments.sizes else []
    tokens = large_memory.tokens_read(parser, arguments, sizes) if sizes else 0
    model, tokenizer = common.load_focused(arguments)
    parts, results = [], {}
    if arguments.documents:
        results["documents"] = measure(FocusedSubject(model, tokenizer, arguments.model), arguments)
        parts.append(quality_table(results["documents"]))
    if sizes:
        results["sizes"] = measure_sizes(model, tokenizer, arguments, tokens)
        parts.append(size_table(results["sizes"]))
    common.save_table(arguments, model, "\n\n".join(parts), [results])


if __name__ == "__main__":
    main()
