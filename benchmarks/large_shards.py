"""A very large memory in shards, each with its index in a process of its own: time, recall and RAM.

    python benchmarks/large_shards.py --tokens 64M --shards 4 --memory-layers 17 --memory-dtype int8 --on-disk out/m64 --out out/large_shards

`--read` tokens of real text are read by the model; each shard repeats them with a noise of its own (`large_memory.py`) until all shards
together hold `--tokens`. Then the shards are indexed, opened by a fresh set of Ray processes, and asked with the queries of the memory layers
on the text that follows: one token's queries of all heads at a time. What is there from an earlier run is used.

open: until all processes have mapped their files. first answer: of the first approximate search after that, which reads the indexes. search: of one
token's queries in all memory layers, median. recall: share of the k best keys of all shards (found exactly) that were retrieved. RSS: of
each process, of which files that are mapped are a part.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

import common
import large_memory
from large_memory import Prefix
from longfocus import Memory, ShardedMemory, read_ids
from longfocus.memory.distributed.context import answers
from longfocus.memory.distributed.worker import Packed, Question
from longfocus.memory.exact import Best
from longfocus.settings import size_of
from memory_search import hits, real_queries


def make(model: Any, source: Memory, arguments: argparse.Namespace) -> ShardedMemory:
    """The shards, filled and indexed."""
    folder, each = arguments.on_disk, size_of(arguments.tokens) // arguments.shards
    memory = (
        ShardedMemory.open(folder) if folder.exists() else ShardedMemory.create(folder, model, shards=arguments.shards)
    )
    for number, name in enumerate(memory.manifest.shards):
        begun = time.perf_counter()
        with Memory.open(folder / name, writable=True) as shard:
            if shard.extent < each:
                large_memory.repeat(shard, source.tokens, each, arguments.noise, source=source, seed=number)
                common.note(f"{name}: {shard.extent:,} tokens in {time.perf_counter() - begun:.0f} s")
            begun = time.perf_counter()
            encoded = shard.update_index()
            common.note(f"{name}: {encoded:,} tokens indexed in {time.perf_counter() - begun:.0f} s")
    memory.refresh()
    return memory


def best(memory: ShardedMemory, layer: int, query: Tensor, scale: float, k: int, rerank: int | None) -> Best:
    """The k best keys of all shards, with their numbers in the whole memory."""
    part = memory.visible()
    calls = part.ask("best", Question(layer, Packed.of(query), scale, None), k, True, rerank)
    return functools.reduce(lambda one, other: one.join(other, k), answers(part, calls))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_model_options(parser)
    parser.add_argument("--tokens", default="64M", help="of all shards together")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--read", default="64k", help="tokens of real text")
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--data", type=Path, default=common.DATA)
    parser.add_argument("--text", default="books,code")
    parser.add_argument("--rerank", type=int, default=8)
    parser.add_argument("--queries", type=int, default=16, help="tokens whose queries are asked")
    parser.add_argument("--judged", type=int, default=8, help="of them, compared with the exact search")
    parser.add_argument("--on-disk", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("out/large_shards"))
    parser.set_defaults(memory_dtype="float16", read_span="4k", k=32)
    arguments = parser.parse_args()
    common.quiet(arguments)
    model, tokenizer = common.load_focused(arguments)
    read = size_of(arguments.read)
    ids = large_memory.real_ids(tokenizer, read + arguments.queries, arguments.data, arguments.text.split(","))
    source = Memory(model)
    read_ids(model, ids[:read], source)
    queries = real_queries(model, ids[read:], Prefix(source, read))
    make(model, source, arguments).close()

    begun = time.perf_counter()
    with ShardedMemory.open(arguments.on_disk) as memory:
        processes = memory.start()
        opened = time.perf_counter() - begun
        pids = [shard.pid for shard in processes.shards]
        spent: list[float] = []
        for at in range(arguments.queries):
            begun = time.perf_counter()
            for layer, (query, scale) in queries.items():
                best(memory, layer, query[:, :, at : at + 1], scale, arguments.k, arguments.rerank)
            spent.append(time.perf_counter() - begun)
        resident = [psutil.Process(pid).memory_info().rss / 1e6 for pid in pids]
        own = [psutil.Process(pid).memory_info().shared / 1e6 for pid in pids]
        recalls, exactly = [], 0.0
        for layer, (query, scale) in queries.items():
            asked = query[:, :, : arguments.judged]
            begun = time.perf_counter()
            true = best(memory, layer, asked, scale, arguments.k, None)
            exactly += time.perf_counter() - begun
            found = best(memory, layer, asked, scale, arguments.k, arguments.rerank)
            recalls.append(float(hits(true, found).mean()))
        result = {
            "tokens": memory.tokens,
            "shards": len(memory.shards),
            "records_gb": memory.nbytes / 1e9,
            "disk_gb": sum(path.stat().st_size for path in arguments.on_disk.rglob("*") if path.is_file()) / 1e9,
            "open_seconds": opened,
            "first_answer_seconds": spent[0],
            "search_ms": 1000 * statistics.median(spent[1:]),
            "exact_ms_a_query": 1000 * exactly / arguments.judged,
            "recall": statistics.mean(recalls),
            "rss_mb": resident,
            "rss_mapped_mb": own,
        }
    header = [
        "tokens",
        "shards",
        "on disk",
        "open",
        "first answer",
        "search",
        "exact search",
        "recall",
        "RSS of a process",
    ]
    row = [
        f"{result['tokens']:,}",
        f"{result['shards']}",
        f"{result['disk_gb']:.1f} GB",
        f"{opened:.1f} s",
        f"{spent[0]:.1f} s",
        f"{result['search_ms']:.0f} ms",
        f"{result['exact_ms_a_query']:,.0f} ms",
        f"{result['recall']:.3f}",
        f"{max(resident):,.0f} MB",
    ]
    common.save_table(arguments, model, common.markdown(header, [row]), [result])


if __name__ == "__main__":
    main()
