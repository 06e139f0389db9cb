"""Crossbatch attention, forward and backward: time and peak memory beside the naive form and local attention alone.

    python benchmarks/crossbatch.py --out out/crossbatch             # about 10 minutes on 2 cores
    python benchmarks/crossbatch.py --rows 8 --tokens 128 --contexts 1,7 --repeats 2        # seconds

For each number d of additional contexts (windows of other rows that each row sees):
    crossbatch   longfocus.crossbatch.attend.attend_rows
    naive        keys and values of a row's own window and its d others gathered and concatenated, one softmax by PyTorch's
                 scaled-dot-product attention, derivatives by autograd
    local        causal attention inside each row's window alone (no additional contexts; the same for each d)

Times are taken in turns, all variants and d within each repeat, so that the ratios hold when the machine's speed
drifts; medians. Peak memory is that of a fresh process for each, less what it had once the inputs were made; so the
results, the gradients and everything in between count. The naive form is left out where its estimated memory is above
--naive-limit-gb. Rows see one positive and d - 1 negatives, drawn from the other rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import DTYPES, figure, here, markdown, note, write_json  # before torch, so that waiting threads do not spin

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor

from longfocus.crossbatch.attend import Table, attend_rows

VARIANTS = ("crossbatch", "naive", "local")
MEMORY_TARGET, MEMORY_AT, LIMIT_BYTES, LIMIT_AT = 1.5, 7, 2e9, 31


class Case:
    """Inputs of one size, and the variants on them."""

    def __init__(self, arguments: argparse.Namespace, contexts: int) -> None:
        rows, tokens, dim = arguments.rows, arguments.tokens, arguments.head_dim
        self.scale, self.contexts = dim**-0.5, contexts
        generator = torch.Generator().manual_seed(0)
        dtype, device = getattr(torch, arguments.dtype), arguments.device

        def made(heads: int) -> Tensor:
            tensor = torch.empty(rows, heads, tokens, dim, dtype=dtype, device=device)
            return tensor.uniform_(-1.7, 1.7).requires_grad_()

        torch.manual_seed(0)
        self.query = made(arguments.heads)
        self.key, self.value, self.outer_key = (made(arguments.kv_heads) for _ in range(3))
        self.grad = torch.empty_like(self.query).uniform_(-1, 1)
        others = [torch.randperm(rows - 1, generator=generator)[:contexts] for _ in range(rows)]
        self.others = [[int(other) + (int(other) >= row) for other in found] for row, found in enumerate(others)]
        self.table = Table([row[:1] for row in self.others], [row[1:] for row in self.others], [tokens] * rows)

    def forward(self, variant: str) -> Tensor:
        """The variant's result (R, Hq, T, D)."""
        grouped = self.query.shape[1] != self.key.shape[1]
        if variant == "local":
            return F.scaled_dot_product_attention(
                self.query, self.key, self.value, is_causal=True, scale=self.scale, enable_gqa=grouped
            )
        if variant == "crossbatch":
            return attend_rows(
                self.query, self.key, self.value, None, self.outer_key, None, self.table, scale=self.scale
            )[0]
        at = torch.tensor(self.others, device=self.query.device)
        gathered = [tensor[at].transpose(1, 2).flatten(2, 3) for tensor in (self.outer_key, self.value)]
        keys, values = torch.cat([self.key, gathered[0]], 2), torch.cat([self.value, gathered[1]], 2)
        tokens = self.query.shape[2]
        mask = torch.ones(tokens, keys.shape[2], dtype=torch.bool, device=self.query.device)
        mask[:, :tokens].tril_()
        return F.scaled_dot_product_attention(
            self.query, keys, values, attn_mask=mask, scale=self.scale, enable_gqa=grouped
        )

    def run(self, variant: str) -> Tensor:
        """Forward and backward; the result."""
        for tensor in (self.query, self.key, self.value, self.outer_key):
            tensor.grad = None
        out = self.forward(variant)
        out.backward(self.grad)
        if self.query.is_cuda:
            torch.cuda.synchronize()
        return out.detach()


def naive_bytes(arguments: argparse.Namespace, contexts: int) -> float:
    """What the naive form holds, roughly: keys and values gathered, moved and joined, and as much again for gradients."""
    window = arguments.rows * arguments.tokens * arguments.head_dim * getattr(torch, arguments.dtype).itemsize
    return window * (2 * arguments.kv_heads * (5 * contexts + 2) + 4 * arguments.heads)


def taken(arguments: argparse.Namespace, variant: str, contexts: int) -> bool:
    """Whether the naive form is to be tried at this size."""
    return variant != "naive" or naive_bytes(arguments, contexts) <= arguments.naive_limit_gb * 1e9


def seconds(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


# -- memory ------------------------------------------------------------------------------------------------


def status(name: str) -> int:
    """Bytes; VmHWM and not ru_maxrss, which a process inherits from the one that started it."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(name + ":")[2].split()[0]) * 1024


def memory_child(arguments: argparse.Namespace, variant: str, contexts: int) -> None:
    """Runs in its own process: inputs, then once forward and backward."""
    small = argparse.Namespace(**{**vars(arguments), "rows": 3, "tokens": 8})
    Case(small, 2).run(variant)  # kernels and threads are there now
    case = Case(arguments, contexts)
    if arguments.device != "cpu":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        case.run(variant)
        print(json.dumps(torch.cuda.max_memory_allocated() - before))
        return
    before = status("VmRSS")
    case.run(variant)
    print(json.dumps(max(0, status("VmHWM") - before)))


def peak_bytes(variant: str, contexts: int) -> int:
    """Of a fresh process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", variant, "--contexts", str(contexts)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


# -- all of it ---------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each d and variant."""
    cases = {contexts: Case(arguments, contexts) for contexts in arguments.contexts}
    times: dict[tuple[int, str], list[float]] = {}
    for repeat in range(arguments.repeats + 1):  # the first is a warm-up
        for contexts, case in cases.items():
            for variant in VARIANTS:
                if taken(arguments, variant, contexts):
                    took = seconds(lambda case=case, variant=variant: case.run(variant))  # type: ignore[misc]
                    if repeat:
                        times.setdefault((contexts, variant), []).append(took)
        note(f"repeat {repeat} of {arguments.repeats}")
    if taken(arguments, "naive", min(arguments.contexts)):
        check(cases[min(arguments.contexts)])
    cases.clear()
    local_bytes = None
    results = []
    for contexts in arguments.contexts:
        for variant in VARIANTS:
            record: dict[str, Any] = {"contexts": contexts, "variant": variant}
            if (contexts, variant) in times:
                mine, local = times[contexts, variant], times[contexts, "local"]
                record["ms"] = 1000 * statistics.median(mine)
                record["times_local"] = statistics.median(a / b for a, b in zip(mine, local, strict=True))
                if (contexts, "naive") in times:
                    naive = times[contexts, "naive"]
                    record["times_naive"] = statistics.median(a / b for a, b in zip(mine, naive, strict=True))
                if not arguments.no_memory:
                    if variant != "local" or local_bytes is None:
                        record["peak_bytes"] = peak_bytes(variant, contexts)
                        note(f"{variant} at {contexts}: {record['peak_bytes'] / 1e6:.0f} MB")
                    if variant == "local":
                        local_bytes = record.setdefault("peak_bytes", local_bytes)
            else:
                record["skipped"] = f"estimated {naive_bytes(arguments, contexts) / 1e9:.2g} GB"
            results.append(record)
    for record in results:
        if local_bytes and "peak_bytes" in record:
            record["memory_times_local"] = record["peak_bytes"] / local_bytes
    return results


def check(case: Case) -> None:
    """Both forms give the same."""
    with torch.no_grad():
        apart = (case.forward("crossbatch") - case.forward("naive")).abs().max()
    if float(apart) > 0.02:
        raise SystemExit(f"crossbatch and naive differ by {float(apart)}")


def targets(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is to be reached, and whether it is; only what was measured."""
    found = {(record["contexts"], record["variant"]): record for record in results}
    at, most = found.get((MEMORY_AT, "crossbatch"), {}), found.get((LIMIT_AT, "crossbatch"), {})
    checks = [
        (f"peak memory at {MEMORY_AT} contexts over local", at.get("memory_times_local"), MEMORY_TARGET, "×"),
        (f"time at {MEMORY_AT} contexts over naive", at.get("times_naive"), 1.0, "×"),
        (f"peak memory at {LIMIT_AT} contexts", most.get("peak_bytes", 0) / 1e9 or None, LIMIT_BYTES / 1e9, "GB"),
    ]
    return [
        {"target": name, "limit": limit, "unit": unit, "measured": value, "reached": value <= limit}
        for name, value, limit, unit in checks
        if value is not None
    ]


def table(results: list[dict[str, Any]]) -> str:
    header = ("variant", "contexts", "ms", "× local", "× naive", "peak MB", "× local's")

    def cell(record: dict[str, Any], name: str, by: float = 1.0, digits: int = 2) -> str:
        return f"{record[name] / by:,.{digits}f}" if name in record else ""

    rows = [
        [
            record["variant"],
            str(record["contexts"]),
            f"skipped ({record['skipped']})" if "skipped" in record else cell(record, "ms", digits=0),
            cell(record, "times_local"),
            cell(record, "times_naive"),
            cell(record, "peak_bytes", 1e6, 0),
            cell(record, "memory_times_local"),
        ]
        for record in results
    ]
    return markdown(header, rows)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    made, axes, _ = figure(2)
    panels = (("ms", 1.0, "Forward and backward, ms"), ("peak_bytes", 1e6, "Peak memory beyond the inputs, MB"))
    for axis, (name, by, title) in zip(axes, panels, strict=True):
        for variant, colour in zip(VARIANTS, ("tab:blue", "tab:orange", "tab:gray"), strict=True):
            points = [
                (record["contexts"], record[name] / by)
                for record in results
                if record["variant"] == variant and name in record
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=variant, color=colour)
        axis.set(title=title, xlabel="additional contexts a row", ylim=(0, None))
        axis.set_xticks(sorted({record["contexts"] for record in results}))
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    made.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="windows in the batch")
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--heads", type=int, default=8, help="query heads")
    parser.add_argument("--kv-heads", type=int, help="key/value heads; as many as query heads unless given")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--contexts", default="1,3,7,15,31", help="additional contexts of a row, comma-separated")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each timing, after one warm-up")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--naive-limit-gb", type=float, default=8.0, help="skip the naive form above this estimate")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument(
        "--out", type=Path, default=Path("out/crossbatch"), help="folder for results.json, table.md, plot.png"
    )
    parser.add_argument("--memory-of", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.contexts = sorted({int(part) for part in arguments.contexts.split(",")})
    arguments.kv_heads = arguments.kv_heads or arguments.heads
    if arguments.contexts[-1] >= arguments.rows or arguments.contexts[0] < 1:
        parser.error(f"--contexts: {arguments.contexts} given, expected 1 to {arguments.rows - 1} (other rows)")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        memory_child(arguments, arguments.memory_of, arguments.contexts[0])
        return
    results = measure(arguments)
    reached = targets(results)
    about = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name != "memory_of"
        },
        **here(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "results.json", {"about": about, "results": results, "targets": reached})
    text = table(results)
    (arguments.out / "table.md").write_text(text + "\n", "utf-8")
    plot(results, arguments.out / "plot.png")
    print(text)
    for check in reached:
        state = "reached" if check["reached"] else "missed"
        print(f"{check['target']}: {check['measured']:.2f} {check['unit']}, at most {check['limit']:.1f}: {state}")
    print(json.dumps({"out": str(arguments.out), "targets": reached}))


if __name__ == "__main__":
    main()
