"""A memory in shards beside one memory: time of a decode step, and reading with several processes.

    python benchmarks/shards.py --tokens 256k,1m --shards 1,2,4 --texts ../shared/data/books --out out/shards

Decoding: memories of made-up records (float16, unless --memory-dtype says otherwise), one folder with all and folders with as many shards; the same
tokens are fed one by one to both, in turns, medians. What Ray costs shows at --shards 1. Reading: the texts read one after another in this
process, and by `read_in_parallel` with as many processes as shards, the time in which
those start and load the model included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import common
from large_memory import append
from longfocus import FocusCache, Memory, Reader, ShardedMemory, find_sources, read_in_parallel
from longfocus.settings import sizes_of

AT_ONCE = 1 << 14


def fill(memory: Memory, tokens: int, generator: torch.Generator) -> None:
    """One document of made-up records, keys and values of deviation 1."""
    made = memory.geometry
    of_a_token = (2, made.kv_heads, made.head_dim)
    sizes = (min(AT_ONCE, tokens - at) for at in range(0, tokens, AT_ONCE))
    append(
        memory,
        "made up",
        (
            {layer: torch.randn((1, count, *of_a_token), generator=generator) for layer in made.layers}
            for count in sizes
        ),
    )


def step_times(model: Any, caches: dict[str, FocusCache], steps: int) -> dict[str, float]:
    """Median seconds of a decode step with each cache, taken in turns after two that do not count."""
    times: dict[str, list[float]] = {name: [] for name in caches}
    with torch.no_grad():
        for step in range(steps + 2):
            for name, cache in caches.items():
                begun = time.perf_counter()
                model(torch.tensor([[100 + step]]), cache=cache, use_cache=True, logits_to_keep=1)
                times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(taken[2:]) for name, taken in times.items()}


def decoding(model: Any, folder: Path, tokens: int, shards: list[int], steps: int) -> list[dict[str, Any]]:
    """Rows of one size."""
    generator = torch.Generator().manual_seed(0)
    single = Memory.create(folder / "one", model)
    fill(single, tokens, generator)
    rows = []
    for count in shards:
        made = ShardedMemory.create(folder / f"{count}", model, shards=count)
        for name in made.manifest.shards:
            with Memory.open(folder / f"{count}" / name, writable=True) as shard:
                fill(shard, tokens // count, generator)
        made.refresh()
        with made as memory:
            begun = time.perf_counter()
            memory.start()
            started = time.perf_counter() - begun
            caches = {"one_seconds": FocusCache(model.focus, single), "shards_seconds": FocusCache(model.focus, memory)}
            taken = step_times(model, caches, steps)
        rows.append({"tokens": tokens, "shards": count, "start_seconds": started, **taken})
        common.note(f"{tokens:,} tokens, {count} shards: {rows[-1]}")
    single.close()
    return rows


def reading(
    model: Any, tokenizer: Any, name: str, folder: Path, texts: Path, shards: list[int]
) -> list[dict[str, Any]]:
    """Rows of reading the texts."""
    sources = find_sources(texts).sources
    begun = time.perf_counter()
    with Memory.create(folder / "read", model, tokenizer) as memory:
        reader = Reader(model, tokenizer, memory)
        for source in sources:
            reader.read(source)
        tokens = memory.tokens
    rows = [{"processes": 0, "tokens": tokens, "seconds": time.perf_counter() - begun}]
    for count in shards:
        made = ShardedMemory.create(folder / f"read-{count}", model, tokenizer, shards=count, model_source=name)
        with made as memory:
            begun = time.perf_counter()
            read_in_parallel(memory, sources, readers=count)
            rows.append({"processes": count, "tokens": memory.tokens, "seconds": time.perf_counter() - begun})
        common.note(f"reading with {count} processes: {rows[-1]}")
    return rows


def main() -> None:
    """Measure, print tables, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_model_options(parser)
    parser.add_argument("--tokens", default="64k,256k", help="memory sizes")
    parser.add_argument("--shards", default="1,2,4")
    parser.add_argument("--steps", type=int, default=20, help="decode steps of each")
    parser.add_argument("--texts", type=Path, help="file or folder to read in parallel; left out: no reading")
    parser.add_argument("--out", type=Path, help="folder for results.json")
    arguments = parser.parse_args()
    common.quiet(arguments)
    arguments.memory_dtype = arguments.memory_dtype or "float16"
    model, tokenizer = common.load_focused(arguments)
    shards = sizes_of(arguments.shards)
    with tempfile.TemporaryDirectory(prefix="longfocus-shards-") as scratch:
        rows = [
            row
            for tokens in sizes_of(arguments.tokens)
            for row in decoding(model, _fresh(Path(scratch) / str(tokens)), tokens, shards, arguments.steps)
        ]
        read = []
        if arguments.texts:
            read = reading(model, tokenizer, arguments.model, _fresh(Path(scratch) / "texts"), arguments.texts, shards)
    print(
        common.markdown(
            ("memory tokens", "shards", "one memory, ms a step", "shards, ms a step", "start, s"),
            [
                (
                    f"{row['tokens']:,}", str(row["shards"]), f"{1000 * row['one_seconds']:.1f}", f"{1000 * row['shards_seconds']:.1f}",
                    f"{row['start_seconds']:.1f}",
                )
                for row in rows
            ],
        )
    )  # fmt: skip
    if read:
        header = ("processes", "tokens", "seconds", "tokens/s")
        table = [
            (
                str(row["processes"] or "this one"),
                f"{row['tokens']:,}",
                f"{row['seconds']:.1f}",
                f"{row['tokens'] / row['seconds']:,.0f}",
            )
            for row in read
        ]
        print("\n" + common.markdown(header, table))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "results.json").write_text(
            json.dumps({**common.about(arguments, model), "decoding": rows, "reading": read}, indent=2) + "\n"
        )


def _fresh(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    main()
