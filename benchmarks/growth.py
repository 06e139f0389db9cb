"""Adding to a large memory beside adding to a small one: seconds a token, of reading a document and of storing it.

    python benchmarks/growth.py --sizes 8k,1M --read 256k --tile --on-disk out/m1 --out out/growth

The large memory is that of `large_memory.py` in `--on-disk`, of the largest size; for each other size a memory of its own is made beside it,
of its first tokens. Each gets, in turns:

    reading     a document of `--document` tokens, by the model, committed as `remember` does, pass by pass
    storing     the same without the model: as many tokens of records that are there already, appended and committed
    indexing    bringing the index up to date with what was added (approximate retrieval), saved

The ratio is against the smallest memory, the median over repeats, each against the one of the same turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import common
import large_memory
from large_memory import append, records
from longfocus import Memory, read_ids
from longfocus.settings import size_name, size_of, sizes_of

PASS = 2048
KINDS = ("reading", "storing", "indexing")


def copy_of(memory: Memory, model: Any, folder: Path, tokens: int) -> Memory:
    """A saved memory of the first tokens of another."""
    made = Memory.create(folder, model)
    starts = range(0, tokens, large_memory.AT_ONCE)
    parts = (records(memory, at, min(large_memory.AT_ONCE, tokens - at)) for at in starts)
    append(made, "copied", parts)
    return made


def added(memory: Memory, model: Any, ids: list[int], ready: dict[int, torch.Tensor]) -> dict[str, float]:
    """Seconds of each kind."""
    taken = {}
    begun = time.perf_counter()
    with torch.no_grad():
        read_ids(model, ids, memory)
    taken["reading"] = time.perf_counter() - begun
    begun = time.perf_counter()
    starts = range(0, len(ids), PASS)
    append(memory, "stored", ({layer: each[:, at : at + PASS] for layer, each in ready.items()} for at in starts))
    taken["storing"] = time.perf_counter() - begun
    begun = time.perf_counter()
    memory.update_index()
    taken["indexing"] = time.perf_counter() - begun
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_model_options(parser)
    large_memory.add_memory_options(parser, "16k,256k")
    parser.add_argument("--document", default="4k", help="tokens that are added each time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/growth"))
    parser.set_defaults(read_span="4k")
    arguments = parser.parse_args()
    common.quiet(arguments)
    sizes = sizes_of(arguments.sizes)
    read, more = large_memory.tokens_read(parser, arguments, sizes), size_of(arguments.document)
    model, tokenizer = common.load_focused(arguments)
    ids = large_memory.real_ids(tokenizer, read + more, arguments.data, arguments.text.split(","))
    with tempfile.TemporaryDirectory(prefix="longfocus-growth-") as scratch:
        folder = arguments.on_disk or Path(scratch) / "largest"
        largest = large_memory.build(model, ids[:read], max(sizes), folder, arguments.noise)
        ready = records(largest, 0, more)
        memories = {size: copy_of(largest, model, Path(scratch) / str(size), size) for size in sizes[:-1]}
        memories[sizes[-1]] = largest
        for size, memory in memories.items():
            begun = time.perf_counter()
            memory.update_index()
            common.note(f"{size_name(size)}: indexed in {time.perf_counter() - begun:.1f} s")
        taken: dict[tuple[int, str], list[float]] = {}
        for repeat in range(arguments.repeats + 1):  # the first is a warm-up
            for size, memory in memories.items():
                for kind, seconds in added(memory, model, ids[read:], ready).items():
                    if repeat:
                        taken.setdefault((size, kind), []).append(seconds)
        for memory in memories.values():
            memory.close()
    rows = []
    for size in sizes:
        cells = [size_name(size)]
        for kind in KINDS:
            mine, first = taken[size, kind], taken[sizes[0], kind]
            ratio = statistics.median(one / other for one, other in zip(mine, first, strict=True))
            cells.append(f"{1e6 * statistics.median(mine) / more:.1f} ({ratio:.2f}×)")
        rows.append(cells)
    header = ["tokens in memory", *(f"{kind}, µs a token" for kind in KINDS)]
    results = [{"tokens": size, "kind": kind, "seconds": each} for (size, kind), each in taken.items()]
    common.save_table(arguments, model, common.markdown(header, rows), results)


if __name__ == "__main__":
    main()
