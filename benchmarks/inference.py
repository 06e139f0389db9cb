"""Speed and memory of reading and answering, beside plain transformers with full attention. One run, ratios.

    python benchmarks/inference.py --out out/inference            # about 15 minutes on 2 cores
    python benchmarks/inference.py --sizes 2k,8k --repeats 3      # a few minutes

For each size N of memory:
    prefill     tokens/s of reading one more window when N tokens are remembered
    decode      ms per generated token when N tokens are remembered
    bytes       of keys and values per remembered token
    peak RSS    of a fresh process that reads N tokens into a memory and then generates, less that of the
                loaded model alone

Rows are: longfocus as the command line reads (`--read-span 4096`), longfocus looking back at all of the memory
while reading, and the same model without longfocus, its key/value cache filled to N tokens with numbers of
the right shape (the cost of attention does not depend on what the numbers are). Times are taken in turns,
all sizes and rows within each repeat, so that the ratios hold when the machine's speed drifts; medians.
The text is real (books of ../shared/data, else the source of the standard library).
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
import transformers

import longfocus
from longfocus.commands.options import CLI_DEFAULTS
from longfocus.model.cache import FocusCache

ROWS = ("longfocus", "longfocus, reading looks back at all", "plain transformers")
BOOKS = Path(__file__).resolve().parents[2] / "shared/data/books/test.jsonl.gz"


@dataclass
class Prefix:
    """The first `tokens` records of a memory, standing in for a smaller memory."""

    store: Any
    tokens: int

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return ((0, self.tokens),)


def real_ids(tokenizer: Any, count: int) -> tuple[list[int], str]:
    """`count` token ids of real text, and where they come from."""
    if BOOKS.exists():
        with gzip.open(BOOKS, "rt", encoding="utf-8") as lines:
            texts, origin = [json.loads(line)["text"] for line in lines], "held-out books"
    else:
        folder = Path(os.__file__).parent
        texts, origin = [path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py"))], "stdlib source"
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text)["input_ids"]
        if len(ids) >= count:
            return ids[:count], origin
    raise SystemExit(f"{origin}: only {len(ids)} tokens of text, {count} wanted")


def filled_cache(model: Any, tokens: int) -> Any:
    """A plain cache that holds `tokens` random keys and values per layer."""
    config = model.config
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    cache = transformers.DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape), torch.randn(shape), layer)
    return cache


def seconds(function: Any) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


class Bench:
    def __init__(self, sizes: list[int], repeats: int, plain_up_to: int) -> None:
        self.sizes, self.repeats, self.plain_up_to = sizes, repeats, plain_up_to
        self.tokenizer = longfocus.load_tokenizer()
        self.model = longfocus.load("default", **CLI_DEFAULTS)
        self.plain = transformers.AutoModelForCausalLM.from_pretrained(self.model.config._name_or_path).eval()
        self.ids, self.origin = real_ids(self.tokenizer, max(sizes) + 4096)
        self.memory = longfocus.Memory(self.model)
        self.window = self.model.focus.config.window_tokens
        self._plain_caches: dict[int, Any] = {}

    def fill(self) -> None:
        """Really read the text up to the largest size."""
        took = seconds(lambda: longfocus.read_ids(self.model, self.ids[: max(self.sizes)], self.memory))
        print(f"read {self.memory.tokens} tokens in {took:.0f} s", file=sys.stderr)

    @torch.no_grad()
    def prefill_seconds(self, row: str, size: int) -> float:
        """Seconds to read one more window."""
        part = torch.tensor([self.ids[size : size + self.window]])
        if row == "plain transformers":
            cache = self.plain_cache(size)
            took = seconds(lambda: self.plain(part, cache=cache, logits_to_keep=1))
            cache.crop(-part.shape[1])
            return took
        span = CLI_DEFAULTS["read_span"] if row == "longfocus" else None
        focus = self.model.focus
        focus.config = dataclasses.replace(focus.config, read_span=span)
        cache = FocusCache(self.model.focus, Prefix(self.memory.store, size))
        return seconds(lambda: self.model.read_window(part, cache))

    @torch.no_grad()
    def decode_seconds(self, row: str, size: int, steps: int = 8) -> float:
        """Median seconds per token."""
        prompt = torch.tensor([self.ids[size : size + 64]])
        model = self.plain if row == "plain transformers" else self.model
        if row == "plain transformers":
            cache = self.plain_cache(size)
        else:
            cache = FocusCache(self.model.focus, Prefix(self.memory.store, size))
        model(prompt, cache=cache, use_cache=True, logits_to_keep=1)
        token = prompt[:, :1]
        taken = [seconds(lambda: model(token, cache=cache, use_cache=True)) for _ in range(steps)]
        if row == "plain transformers":
            cache.crop(-(prompt.shape[1] + steps))
        return statistics.median(taken)

    def plain_cache(self, size: int) -> Any:
        """Filled once for each size; what a timing adds is taken back."""
        if size not in self._plain_caches:
            self._plain_caches[size] = filled_cache(self.plain, size)
        return self._plain_caches[size]

    def run(self) -> list[dict[str, Any]]:
        cells: dict[tuple[str, int], dict[str, list[float]]] = {}
        for repeat in range(self.repeats + 1):  # the first is a warm-up
            for size in self.sizes:
                for row in ROWS:
                    if row == "plain transformers" and size > self.plain_up_to:
                        continue
                    prefill = self.prefill_seconds(row, size)
                    decode = self.decode_seconds(row, size) if row != ROWS[1] else float("nan")
                    if repeat:
                        cell = cells.setdefault((row, size), {"prefill": [], "decode": []})
                        cell["prefill"].append(prefill)
                        cell["decode"].append(decode)
            print(f"repeat {repeat} of {self.repeats}", file=sys.stderr)
        base = min(self.sizes)
        results = []
        for (row, size), cell in cells.items():
            first = cells[row, base]
            results.append(
                {
                    "row": row,
                    "memory_tokens": size,
                    "prefill_tokens_per_s": self.window / statistics.median(cell["prefill"]),
                    "prefill_ratio": statistics.median(
                        small / large for small, large in zip(first["prefill"], cell["prefill"], strict=True)
                    ),
                    "decode_ms": 1000 * statistics.median(cell["decode"]),
                    "decode_ratio": statistics.median(
                        large / small for small, large in zip(first["decode"], cell["decode"], strict=True)
                    ),
                    "bytes_per_token": self.bytes_per_token(row),
                }
            )
        return results

    def bytes_per_token(self, row: str) -> int:
        if row != "plain transformers":
            return self.memory.geometry.bytes_per_token
        config = self.plain.config
        return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4


def peak_rss(row: str, size: int, ids: list[int]) -> dict[str, Any]:
    """Peak of a fresh process, in MB."""
    command = [sys.executable, __file__, "--rss-of", row, "--sizes", str(size)]
    text = json.dumps(ids[: size + 512])  # tokenised here: tokenising whole books would be the child's peak
    done = subprocess.run(command, check=True, input=text, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def rss_child(row: str, size: int, ids: list[int]) -> None:
    """Runs in its own process: load, note the peak so far, read N tokens, generate a few."""

    def peak() -> float:
        # not ru_maxrss, which a process inherits from the one that started it
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    if row == "plain transformers":
        path = longfocus.load("default").config._name_or_path
        model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    else:
        model = longfocus.load("default", **CLI_DEFAULTS)
    with torch.no_grad():
        model(torch.tensor([ids[:512]]), logits_to_keep=1)  # the model's weights and one window's work are in RAM now
        before = peak()
        if row == "plain transformers":
            cache = filled_cache(model, size)
            model(torch.tensor([ids[size : size + 512]]), cache=cache, logits_to_keep=1)
        else:
            memory = longfocus.Memory(model)
            longfocus.read_ids(model, ids[:size], memory)
            model.generate(torch.tensor([ids[size : size + 64]]), memory=memory, max_new_tokens=8, pad_token_id=2)
    print(json.dumps({"model_mb": before, "added_mb": peak() - before}))


def table(results: list[dict[str, Any]], base: int) -> str:
    lines = [
        f"| row | memory tokens | prefill tokens/s | of its rate at {base} | decode ms/token | times that at {base} "
        "| bytes/token | peak RSS over the model, MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        decode, times = (
            ("", "")
            if result["decode_ms"] != result["decode_ms"]
            else (f"{result['decode_ms']:.0f}", f"{result['decode_ratio']:.2f}")
        )
        rss = result.get("rss", {}).get("added_mb")
        lines.append(
            f"| {result['row']} | {result['memory_tokens']:,} | {result['prefill_tokens_per_s']:.0f} "
            f"| {result['prefill_ratio']:.2f} | {decode} | {times} | {result['bytes_per_token']:,} "
            f"| {'' if rss is None else f'{rss:.0f}'} |"
        )
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    panels = (
        ("prefill_tokens_per_s", "Reading, tokens/s"),
        ("decode_ms", "Generating, ms/token"),
        ("rss", "Peak RSS over the model, MB"),
    )
    for axis, (field, title) in zip(axes, panels, strict=True):
        for row, colour in zip(ROWS, ("tab:blue", "tab:cyan", "tab:orange"), strict=True):
            points = [
                (result["memory_tokens"], result[field]["added_mb"] if field == "rss" else result[field])
                for result in results
                if result["row"] == row and field in result
            ]
            points = [(size, value) for size, value in points if value == value]
            if points:
                sizes, values = zip(*sorted(points), strict=True)
                axis.plot(sizes, values, marker="o", label=row, color=colour)
        axis.set(title=title, xlabel="tokens remembered", xscale="log", ylim=(0, None))
        ticks = sorted({result["memory_tokens"] for result in results})
        axis.set_xticks(ticks, [f"{tick // 1024}k" if tick % 1024 == 0 else f"{tick:,}" for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(path, dpi=120)


def size_of(text: str) -> int:
    return int(float(text[:-1]) * 1024) if text.lower().endswith("k") else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2k,8k,32k,64k", help="tokens of memory, comma-separated (k = 1,024)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each timing, after one warm-up")
    parser.add_argument("--plain-up-to", default="32k", help="largest size for plain transformers")
    parser.add_argument("--no-rss", action="store_true", help="leave out peak memory")
    parser.add_argument(
        "--out", type=Path, default=Path("out/inference"), help="folder for results.json, table.md, plot.png"
    )
    parser.add_argument("--rss-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = sorted(size_of(part) for part in arguments.sizes.split(","))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if arguments.rss_of:
        rss_child(arguments.rss_of, sizes[0], json.load(sys.stdin))
        return
    bench = Bench(sizes, arguments.repeats, size_of(arguments.plain_up_to))
    bench.fill()
    results = bench.run()
    if not arguments.no_rss:
        for result in results:
            if result["row"] != ROWS[1]:
                result["rss"] = peak_rss(result["row"], result["memory_tokens"], bench.ids)
                print(f"peak RSS of {result['row']} at {result['memory_tokens']}: {result['rss']}", file=sys.stderr)
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {
        "model": "SmolLM2-135M-Instruct",
        "memory_layers": list(bench.model.focus.config.layers),
        "window": bench.window,
        "text": bench.origin,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "longfocus": longfocus.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "repeats": arguments.repeats,
    }
    (arguments.out / "results.json").write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    text = table(results, sizes[0])
    (arguments.out / "table.md").write_text(text + "\n")
    plot(results, arguments.out / "plot.png")
    print(text)
    print(json.dumps({"out": str(arguments.out), **about}))


if __name__ == "__main__":
    main()
