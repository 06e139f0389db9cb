"""Searching a large memory: dense, exact, approximate, and other kinds of faiss index, on real keys and real queries.

    python benchmarks/memory_search.py --sizes 64k,256k,1M --read 64k --tile --out out/memory_search
    python benchmarks/memory_search.py --sizes 16M --read 64k --tile --memory-layers 17 --on-disk out/m16 --kinds none --no-decode

The memory is read by the model from real text (books and code of ../shared/data); the queries are those of its memory
layers on the text that follows, with that memory at hand. With `--tile` only `--read` tokens are really read, and larger
sizes repeat them with noise of `--noise` times each number's deviation: that says how time and bytes grow, and makes
recall look better or worse than a library of different texts would. The output says which sizes are so.

Search: for every memory layer, one token's queries of all heads (decode), by
    dense                 all keys, as `--retrieval dense`
    exact                 the k best keys, as `--retrieval exact`
    approximate, rerank N as `--retrieval approximate`, N × k candidates scored again with the true keys
    flat, IVF, …          other faiss indexes per layer and key head, their candidates scored again in the same way
ms are of all measured layers together, medians in turns over the rows. recall is the share of the true k best keys that
were retrieved; mass, of all attention that the memory would get with dense retrieval, what the retrieved keys get.
bytes/key are those of the index, per key head. append: microseconds a token, of adding 4,096 tokens to the index, all
measured layers and heads. Decode: ms per token of the whole model, and loss of the following text, nats a token.

On disk, also: seconds to open the memory in a fresh process, until the first search is answered, and what it takes of RAM.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import common
import large_memory
from large_memory import Prefix, build, real_ids
from longfocus import Memory
from longfocus.config import FocusConfig
from longfocus.memory.approximate import best_approximate
from longfocus.memory.context import MemoryContext, Part
from longfocus.memory.dense import Scratch
from longfocus.memory.exact import Best
from longfocus.memory.quantiser import Quantiser, require_faiss
from longfocus.model.cache import FocusCache
from longfocus.plots import Series, lines, save
from longfocus.process_memory import peak_bytes, resident_bytes
from longfocus.settings import size_name, size_of, sizes_of

APPENDED = 4096
KINDS: dict[str, tuple[str, int]] = {
    "faiss flat": ("Flat", 0),
    "IVF flat": ("IVF{lists},Flat", 16),
    "IVF-PQ": ("IVF{lists},PQ{half}x4fs", 16),
    "IVF scalar 8 bit": ("IVF{lists},SQ8", 16),
    "HNSW": ("HNSW32,Flat", 64),
}
"""Name -> faiss' description, and how many lists or nodes a search visits."""


class Kind:
    """A faiss index for each layer and head, through the interface of approximate retrieval."""

    def __init__(self, description: str, visited: int, prefix: Prefix, layers: list[int], rerank: int) -> None:
        faiss = require_faiss()
        geometry = prefix.geometry
        self.covered = self.visible = prefix.tokens
        self.rerank, self._indexes = rerank, {}
        lists = 2 ** round(math.log2(4 * math.sqrt(prefix.tokens)))
        description = description.format(lists=lists, half=geometry.head_dim // 2)
        self.append_seconds = 0.0
        for layer in layers:
            for head in range(geometry.kv_heads):
                keys = keys_of(prefix, layer, head)
                index = faiss.index_factory(geometry.head_dim, description, faiss.METRIC_INNER_PRODUCT)
                sample = keys[:: max(1, len(keys) // (64 * lists))] if "IVF" in description else keys[:65536]
                index.train(np.ascontiguousarray(sample))
                if visited and "IVF" in description:
                    index.nprobe = visited
                elif visited:
                    index.hnsw.efSearch = max(visited, rerank)
                index.add(keys[:-APPENDED])
                begun = time.perf_counter()
                index.add(keys[-APPENDED:])
                self.append_seconds += time.perf_counter() - begun
                self._indexes[layer, head] = index
        some = next(iter(self._indexes.values()))
        self.key_bytes = faiss.serialize_index(some).nbytes / prefix.tokens

    def candidates(self, layer: int, head: int, queries: np.ndarray, count: int, least: int) -> np.ndarray:
        found: np.ndarray = self._indexes[layer, head].search(np.ascontiguousarray(queries), count)[1]
        return found  # -1 where it found fewer: they count as missed


def keys_of(prefix: Prefix, layer: int, head: int) -> np.ndarray:
    """float32 (n, D)."""
    store, out = prefix.store, torch.empty(prefix.tokens, prefix.geometry.head_dim)
    for chunk in store.chunks(layer, 0, prefix.tokens):
        store.storage.decode_into(out[chunk.start : chunk.start + chunk.keys.shape[2]], chunk.keys[0, head])
    return out.numpy()


def seconds(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


# -- the memory --------------------------------------------------------------------------------------------


def real_queries(model: Any, ids: list[int], memory: Memory) -> dict[int, tuple[torch.Tensor, float]]:
    """Layer -> queries (1, Hq, T, D) of the memory layers on a text that is asked of the memory, and their scale."""
    found: dict[int, tuple[torch.Tensor, float]] = {}
    join = MemoryContext.join

    def noting(self: MemoryContext, layer: int, window: Any, *, scale: float, softcap: float | None) -> Any:
        found[layer] = window.outer_query.clone(), scale
        return join(self, layer, window, scale=scale, softcap=softcap)

    MemoryContext.join = noting  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            model(torch.tensor([ids]), cache=FocusCache(model.focus, memory), use_cache=True, logits_to_keep=1)
    finally:
        MemoryContext.join = join  # type: ignore[method-assign]
    return found


# -- search ------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_search(
    prefix: Prefix, queries: dict[int, tuple[torch.Tensor, float]], arguments: argparse.Namespace, reranks: list[int]
) -> Iterator[dict[str, Any]]:
    """A row for each backend at one size."""
    k, layers = arguments.k or 32, list(queries)
    scratch = Scratch()
    prefix.index(prefix.tokens - APPENDED)
    appending = seconds(lambda: prefix.index()) / APPENDED
    view = prefix.search()

    def context(how: str, rerank: int = 1) -> MemoryContext:
        part = Part(prefix.store, ranges=prefix.ranges, search=view if how == "approximate" else None)
        return MemoryContext(part, None, retrieval=how, k=k, rerank=rerank, scratch=scratch)

    def by_context(how: str, rerank: int = 1) -> Callable[[int, torch.Tensor, float], Any]:
        made = context(how, rerank)
        return lambda layer, query, scale: made.attend(layer, query, scale=scale, softcap=None)

    rows: dict[str, dict[str, Any]] = {
        "dense": {"search": by_context("dense"), "key_bytes": 0.0, "append_us": 0.0},
        "exact": {"search": by_context("exact"), "key_bytes": 0.0, "append_us": 0.0},
    }
    own = Quantiser.block_bytes(prefix.geometry.head_dim) / 32
    for rerank in reranks:
        made = context("approximate", rerank)
        rows[f"approximate, rerank {rerank}"] = {
            "search": by_context("approximate", rerank),
            "best": lambda layer, query, scale, made=made: made.best(layer, query, scale=scale, softcap=None),
            "key_bytes": own,
            "append_us": 1e6 * appending,
        }
    for name in arguments.kinds:
        limit = {"HNSW": arguments.hnsw_up_to, "faiss flat": arguments.flat_up_to}.get(name, arguments.kinds_up_to)
        if prefix.tokens > size_of(limit):
            continue
        factor = 1 if name == "faiss flat" else max(reranks)
        kind = Kind(*KINDS[name], prefix, layers, factor * k)
        common.note(f"{prefix.tokens:,} tokens: {name} is built")

        def best(layer: int, query: torch.Tensor, scale: float, made: Kind = kind, factor: int = factor) -> Any:
            options: dict[str, Any] = {"k": k, "rerank": factor, "scale": scale, "softcap": None, "scratch": scratch}
            return best_approximate(query, made, prefix.store, layer, prefix.ranges, **options)

        rows[name] = {
            "search": lambda layer, query, scale, best=best: best(layer, query, scale).attention(query),
            "best": best,
            "key_bytes": kind.key_bytes,
            "append_us": 1e6 * kind.append_seconds / APPENDED,
        }
    taken: dict[str, list[float]] = {name: [] for name in rows}
    for repeat in range(arguments.repeats + 1):  # the first is a warm-up
        for name, row in rows.items():
            at = repeat % next(iter(queries.values()))[0].shape[2]
            spent = sum(
                seconds(lambda s=s, q=q, at=at, layer=layer, row=row: row["search"](layer, q[:, :, at : at + 1], s))
                for layer, (q, s) in queries.items()
            )
            if repeat:
                taken[name].append(1000 * spent)
    truth = judge(prefix, queries, {name: row["best"] for name, row in rows.items() if "best" in row}, k)
    for name, row in rows.items():
        yield {
            "row": name,
            "tokens": prefix.tokens,
            "search_ms": statistics.median(taken[name]),
            "recall": truth[name][0] if name in truth else 1.0,
            "least_recall": truth[name][1] if name in truth else 1.0,
            "mass": truth[name][2] if name in truth else (1.0 if name == "dense" else truth["exact"][2]),
            "key_bytes": row["key_bytes"],
            "append_us": row["append_us"],
        }


def judge(
    prefix: Prefix, queries: dict[int, tuple[torch.Tensor, float]], searches: dict[str, Any], k: int
) -> dict[str, tuple[float, float, float]]:
    """Name -> mean recall, recall of the worst layer and key head, mean share of dense attention mass."""
    whole = Part(prefix.store, ranges=prefix.ranges)
    exactly = MemoryContext(whole, None, retrieval="approximate", k=k, scratch=Scratch())  # no search: exact
    dense = MemoryContext(whole, None, retrieval="dense", k=k, scratch=Scratch())
    recalls: dict[str, list[torch.Tensor]] = {name: [] for name in searches}
    masses: dict[str, list[float]] = {name: [] for name in (*searches, "exact")}
    for layer, (query, scale) in queries.items():
        for some in query.split(8, 2):
            true = exactly.best(layer, some, scale=scale, softcap=None)
            all_of_it = dense.attend(layer, some, scale=scale, softcap=None)
            assert true is not None and all_of_it is not None
            for name in masses:
                found = true if name == "exact" else searches[name](layer, some, scale)
                masses[name].append(float(torch.exp(found.attention(some)[1] - all_of_it[1]).mean()))
                if name != "exact":
                    recalls[name].append(hits(true, found).mean((0, 2, 3, 4)))
    per_layer = len(next(iter(queries.values()))[0].split(8, 2))
    judged = {"exact": (1.0, 1.0, statistics.mean(masses["exact"]))}
    for name, found in recalls.items():
        by_head = torch.stack(found).unflatten(0, (-1, per_layer)).mean(1)
        judged[name] = float(by_head.mean()), float(by_head.min()), statistics.mean(masses[name])
    return judged


def hits(true: Best, found: Best) -> torch.Tensor:
    """float32, of the shape of `true.tokens`: 1 for each of those keys that was found."""
    return (true.tokens.unsqueeze(-1) == found.tokens.unsqueeze(-2)).any(-1).float()


# -- the whole model ---------------------------------------------------------------------------------------


@torch.no_grad()
def measure_decode(
    model: Any, prefixes: list[Prefix], ids: list[int], arguments: argparse.Namespace, reranks: list[int]
) -> list[dict[str, Any]]:
    """ms per generated token and loss of the following text, for each size and retrieval, in turns."""
    ways = {"dense": ("dense", 1), "exact": ("exact", 1)}
    ways |= {f"approximate, rerank {rerank}": ("approximate", rerank) for rerank in reranks}
    config, window = model.focus.config, model.focus.config.window_tokens
    taken: dict[tuple[str, int], list[float]] = {}
    losses: dict[tuple[str, int], float] = {}

    def cache_of(way: tuple[str, int], prefix: Prefix) -> FocusCache:
        changes = {"retrieval": way[0], "rerank": way[1], "k": arguments.k or 32}
        model.focus.config = FocusConfig.from_dict({**config.to_dict(), **changes})
        return FocusCache(model.focus, prefix)  # type: ignore[arg-type]

    try:
        for repeat in range(arguments.repeats + 1):
            for prefix in prefixes:
                for name, way in ways.items():
                    cache = cache_of(way, prefix)
                    prompt = torch.tensor([ids[:32]])
                    model(prompt, cache=cache, use_cache=True, logits_to_keep=1)
                    token = prompt[:, :1]
                    spent = [seconds(lambda: model(token, cache=cache, use_cache=True)) for _ in range(4)]  # noqa: B023
                    if repeat:
                        taken.setdefault((name, prefix.tokens), []).append(1000 * statistics.median(spent))
        for prefix in prefixes:
            for name, way in ways.items():
                total, count = 0.0, 0
                for start in range(0, arguments.loss_tokens - window + 1, window):
                    part = torch.tensor([ids[start : start + window]])
                    logits = model(part, cache=cache_of(way, prefix), use_cache=True).logits[0, :-1].float()
                    total += float(torch.nn.functional.cross_entropy(logits, part[0, 1:], reduction="sum"))
                    count += window - 1
                losses[name, prefix.tokens] = total / count if count else float("nan")
    finally:
        model.focus.config = config
    return [
        {"row": name, "tokens": tokens, "decode_ms": statistics.median(spent), "loss": losses[name, tokens]}
        for (name, tokens), spent in taken.items()
    ]


# -- from disk ---------------------------------------------------------------------------------------------


def open_fresh(folder: Path, queries: dict[int, tuple[torch.Tensor, float]], k: int, rerank: int) -> dict[str, Any]:
    """In a process of its own: open, search, and say how long it took and how much RAM."""
    path = folder.with_name(folder.name + ".queries.pt")
    torch.save({layer: (query[:, :, :8].clone(), scale) for layer, (query, scale) in queries.items()}, path)
    command = [sys.executable, __file__, "--open", str(folder), "--k", str(k), "--rerank", str(rerank)]
    done = subprocess.run([*command, "--queries-from", str(path)], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@torch.no_grad()
def opened(folder: Path, path: Path, k: int, rerank: int) -> None:
    queries = torch.load(path)
    require_faiss()
    before = resident_bytes()
    begun = time.perf_counter()
    memory = Memory.open(folder)
    found: dict[str, Any] = {"tokens": memory.extent, "open_seconds": time.perf_counter() - begun}
    view = memory.search()
    part = Part(memory.store, ranges=memory.ranges, search=view)
    context = MemoryContext(part, None, retrieval="approximate", k=k, rerank=rerank, scratch=Scratch())
    spent = []
    for at in range(8):
        begun_search = time.perf_counter()
        for layer, (query, scale) in queries.items():
            context.attend(layer, query[:, :, at : at + 1], scale=scale, softcap=None)
        spent.append(1000 * (time.perf_counter() - begun_search))
        found.setdefault("first_answer_seconds", time.perf_counter() - begun)
    found |= {
        "search_ms": statistics.median(spent[1:]),
        "rss_mb": (resident_bytes() - before) / 1e6,
        "peak_mb": (peak_bytes() - before) / 1e6,
        "records_mb": memory.nbytes / 1e6,
        "index_problem": memory.index_problem,
    }
    print(json.dumps(found))


# -- results -----------------------------------------------------------------------------------------------


def tables(search: list[dict[str, Any]], decode: list[dict[str, Any]], read: int) -> str:
    def size(tokens: int) -> str:
        return size_name(tokens) + (" (repeated)" if tokens > read else "")

    header = [
        "search",
        "memory tokens",
        "ms/token",
        "recall",
        "worst head",
        "mass",
        "index bytes/key",
        "append µs/token",
    ]
    rows = [
        [
            row["row"],
            size(row["tokens"]),
            f"{row['search_ms']:.2f}",
            f"{row['recall']:.3f}",
            f"{row['least_recall']:.3f}",
            f"{row['mass']:.3f}",
            f"{row['key_bytes']:.1f}",
            f"{row['append_us']:.1f}",
        ]
        for row in search
    ]
    least = {row["row"]: row["decode_ms"] for row in reversed(decode)}
    whole = [
        [
            row["row"],
            size(row["tokens"]),
            f"{row['decode_ms']:.1f}",
            f"{row['decode_ms'] / least[row['row']]:.2f}",
            f"{row['loss']:.4f}",
            f"{math.exp(row['loss']):.3f}",
        ]
        for row in decode
    ]
    heads = ["the whole model", "memory tokens", "decode ms/token", "times that at the smallest", "loss", "perplexity"]
    return common.markdown(header, rows) + ("\n\n" + common.markdown(heads, whole) if whole else "")


def plot(search: list[dict[str, Any]], decode: list[dict[str, Any]], title: str, path: Path) -> None:
    def series(rows: list[dict[str, Any]], key: str) -> list[Series]:
        made = []
        for name in dict.fromkeys(row["row"] for row in rows):
            mine = sorted((row["tokens"], row[key]) for row in rows if row["row"] == name)
            none = [float("nan")] * len(mine)
            made.append(Series(name, [x for x, _ in mine], [y for _, y in mine], none, none))
        return made

    approximate = [row for row in search if row["row"] not in ("dense", "exact")]
    panels = {
        "search, log10 ms per token": series([{**r, "log": math.log10(r["search_ms"])} for r in search], "log"),
        "recall": series(approximate, "recall"),
        "share of dense attention mass": series([r for r in search if r["row"] != "dense"], "mass"),
    }
    if decode:
        panels["whole model, ms per token"] = series(decode, "decode_ms")
    figure = lines(panels, title=title, x_label="tokens in memory", y_label="")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_model_options(parser)
    large_memory.add_memory_options(parser, "64k,256k,1M")
    parser.add_argument("--rerank", default="4,8,16", help="candidates for each of the k")
    parser.add_argument("--queries", type=int, default=64, help="tokens whose queries are judged for recall and mass")
    parser.add_argument("--loss-tokens", type=int, default=2048, help="tokens of following text for the loss")
    parser.add_argument("--kinds", default=",".join(KINDS), help="other indexes, comma-separated, or none")
    parser.add_argument("--flat-up-to", default="1M", metavar="SIZE", help="it holds all keys in RAM, in float32")
    parser.add_argument("--kinds-up-to", default="256k", metavar="SIZE", help="their centroids take long to find")
    parser.add_argument("--hnsw-up-to", default="128k", metavar="SIZE", help="it takes long to build")
    parser.add_argument(
        "--no-decode", dest="decode", action="store_false", help="leave out the whole model's time and loss"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/memory_search"))
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--queries-from", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(read_span="8k")
    arguments = parser.parse_args()
    common.quiet(arguments)
    if arguments.open:
        opened(arguments.open, arguments.queries_from, arguments.k, int(arguments.rerank))
        return
    sizes, reranks = sizes_of(arguments.sizes), [int(part) for part in arguments.rerank.split(",")]
    arguments.kinds = [] if arguments.kinds == "none" else arguments.kinds.split(",")
    unknown = [name for name in arguments.kinds if name not in KINDS]
    if unknown:
        parser.error(f"--kinds: {unknown[0]!r} given, expected some of {', '.join(KINDS)}, or none")
    read = large_memory.tokens_read(parser, arguments, sizes)
    retrieval, arguments.retrieval = arguments.retrieval, None  # all of them are measured
    assert retrieval is None, "--retrieval is what is compared here"
    model, tokenizer = common.load_focused(arguments)
    after = max(arguments.queries, arguments.loss_tokens, 64)
    ids = real_ids(tokenizer, read + after, arguments.data, arguments.text.split(","))
    memory = build(model, ids[:read], max(sizes), arguments.on_disk, arguments.noise)
    real = Prefix(memory, read)
    queries = real_queries(model, ids[read : read + arguments.queries], real)  # type: ignore[arg-type]
    search: list[dict[str, Any]] = []
    prefixes = [Prefix(memory, size) for size in sizes]
    for prefix in prefixes:
        search += measure_search(prefix, queries, arguments, reranks)
        common.note(f"searched {prefix.tokens:,} tokens")
    decode = measure_decode(model, prefixes, ids[read:], arguments, reranks) if arguments.decode else []
    disk = None
    if arguments.on_disk:
        if prefixes[-1].tokens == memory.extent:  # indexed whole already
            memory._backend.index = prefixes[-1].index()
        took = seconds(memory.update_index)
        common.note(f"indexed and saved in {took:.1f} s")
        memory.close()
        disk = {"index_seconds": took, **open_fresh(arguments.on_disk, queries, arguments.k or 32, reranks[-1])}
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {
        **common.about(arguments, model),
        "really_read_tokens": read,
        "repeated_with_noise": [size for size in sizes if size > read],
    }
    text = tables(search, decode, read)
    if disk is not None:
        text += "\n\nFrom disk, in a fresh process: " + json.dumps(disk)
    said = f"{size_name(read)} tokens read; larger sizes repeat them with noise" if max(sizes) > read else "all read"
    common.write_json(
        arguments.out / "results.json", {"about": about, "search": search, "decode": decode, "from_disk": disk}
    )
    (arguments.out / "table.md").write_text(f"{text}\n\n{said}.\n", "utf-8")
    plot(search, decode, f"Memory search, {model.focus.geometry.model_name} ({said})", arguments.out / "plot.png")
    print(text)
    print(json.dumps({"out": str(arguments.out), "read": said}))


if __name__ == "__main__":
    main()
