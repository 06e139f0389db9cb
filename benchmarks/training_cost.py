"""What crossbatch training costs beside plain fine-tuning of the same weights. One run, ratios.

    python benchmarks/training_cost.py --out out/training_cost          # about half an hour on 2 cores; 12 GB
    python benchmarks/training_cost.py --windows 32 --repeats 1        # half a minute

For each window size, a whole step (forward, backward, AdamW) over the same number of tokens:
    crossbatch, up to 7    3 memory layers, the shares of LongLLaMA 7B: quarters of the batch with 0, 3, 7 and 7
                           additional windows
    crossbatch, 7 each     every row 3 positives and 4 negatives, as far as the batch has them
    local                  the same model and rows, no additional windows
    plain                  the model without longfocus, rows of one window, transformers' own loss
    long                   ordinary long fine-tuning (`method: long`): rows of 8 windows, all layers see all of them

All train the same weights, the memory layers' q, k, v, o, at one precision. Compared is the time per token, taken in
turns (all rows and windows within each repeat), so that the ratios hold when the machine's speed drifts; medians of the
ratios to `plain`. Tokens are random: cost does not depend on which they are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common  # before torch, so that waiting threads do not spin

# isort: split
import numpy as np
import torch

import longfocus
from longfocus.crossbatch.context import CrossbatchContext
from longfocus.crossbatch.plan import NAMED_MIXES, Rows, Share, plan_contexts
from longfocus.training import parts
from longfocus.training.recipes import Train

MIXES = {
    "crossbatch, up to 7": NAMED_MIXES["longllama_7b"],
    "crossbatch, 7 each": (Share(1.0, 3, 4),),
    "local": NAMED_MIXES["local"],
}
ROWS = (*MIXES, "plain", "long")
LONG_WINDOWS = 8
TARGET, TARGET_ROW = 1.3, "crossbatch, up to 7"


class Bench:
    """One model, attached or plain by turns, its steps, and the times that they took."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.layers = tuple(int(part) for part in arguments.memory_layers.split(","))
        self.model = longfocus.load(
            arguments.model,
            dtype=torch.float32,
            device=arguments.device,
            memory_layers=self.layers,
            announce=common.note,
        ).train()
        self.vocabulary = int(self.model.config.vocab_size)
        parts.select(self.model, Train(), self.layers)
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.trained = sum(weight.numel() for weight in trained)
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5)
        self.draws = 0
        self.seen: dict[str, list[float]] = {}

    def prepare(self, row: str, window: int) -> None:
        """The model as the row needs it; takes milliseconds and is not timed."""
        if row in MIXES:
            longfocus.attach(self.model, memory_layers=self.layers, window=window)
        else:
            longfocus.detach(self.model)

    def step(self, row: str, window: int, precision: str) -> None:
        """Forward, backward and update over `places` documents of `rows_per_place` windows each."""
        places, each = self.arguments.places, self.arguments.rows_per_place
        shape = (places * each, window)
        if row == "long":
            shape = (places * each // LONG_WINDOWS, LONG_WINDOWS * window)
        ids = torch.randint(3, self.vocabulary, (shape[0], shape[1] + 1), device=self.arguments.device)
        given, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        kind = self.arguments.device.partition(":")[0]
        with torch.autocast(kind, torch.bfloat16, enabled=precision == "bfloat16"):
            if row in MIXES:
                loss = self.model(given, context=self.context(row, window), shift_labels=labels).loss
            else:
                loss = self.model(input_ids=given, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if kind == "cuda":
            torch.cuda.synchronize()

    def context(self, row: str, window: int) -> CrossbatchContext:
        """A fresh table, as each training step draws one."""
        places, each = self.arguments.places, self.arguments.rows_per_place
        place = np.repeat(np.arange(places), each)
        rows = Rows(place, place.copy(), np.tile(np.arange(each), places), np.full(len(place), window))
        self.draws += 1
        table = plan_contexts(rows, MIXES[row], choice="random", generator=np.random.default_rng(self.draws))
        context = CrossbatchContext(rows, table)
        self.seen.setdefault(row, []).append(context.additional_windows)
        return context

    def run(self) -> list[dict[str, Any]]:
        """One record for each precision, window and row."""
        rows = [row for row in ROWS if not (row == "long" and self.arguments.no_long)]
        times: dict[tuple[str, int, str], list[float]] = {}
        for repeat in range(self.arguments.repeats + 1):  # the first is a warm-up
            for precision in self.arguments.precision:
                for window in self.arguments.windows:
                    for row in rows:
                        self.prepare(row, window)
                        begun = time.perf_counter()
                        self.step(row, window, precision)
                        if repeat:
                            times.setdefault((precision, window, row), []).append(time.perf_counter() - begun)
            common.note(f"repeat {repeat} of {self.arguments.repeats}")
        results = []
        for (precision, window, row), mine in times.items():
            plain, local = times[precision, window, "plain"], times[precision, window, "local"]
            tokens = self.arguments.places * self.arguments.rows_per_place * window
            results.append(
                {
                    "precision": precision,
                    "window": window,
                    "row": row,
                    "additional_windows": statistics.mean(self.seen.get(row, [0.0])),
                    "tokens": tokens,
                    "tokens_per_s": tokens / statistics.median(mine),
                    "times_plain": statistics.median(a / b for a, b in zip(mine, plain, strict=True)),
                    "times_local": statistics.median(a / b for a, b in zip(mine, local, strict=True)),
                }
            )
        return results


def targets(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is to be reached, and whether it is: against the model without longfocus, and against the same code."""
    return [
        {
            "target": f"{TARGET_ROW}: time per token over {beside}, window {record['window']}, {record['precision']}",
            "limit": TARGET,
            "measured": record[f"times_{beside}"],
            "reached": record[f"times_{beside}"] <= TARGET,
        }
        for record in results
        if record["row"] == TARGET_ROW
        for beside in ("plain", "local")
    ]


def table(results: list[dict[str, Any]]) -> str:
    header = ("training", "precision", "window", "additional windows", "tokens/s", "time × plain", "time × local")
    rows = [
        [
            record["row"],
            record["precision"],
            str(record["window"]),
            f"{record['additional_windows']:.1f}",
            f"{record['tokens_per_s']:,.0f}",
            f"{record['times_plain']:.2f}",
            f"{record['times_local']:.2f}",
        ]
        for record in results
    ]
    return common.markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", metavar="PATH", help="folder, hub id, or default")
    parser.add_argument("--memory-layers", default="8,16,24", metavar="N,N,…", help="layers that are trained")
    parser.add_argument("--windows", default="256,512", help="window sizes in tokens, comma-separated")
    parser.add_argument(
        "--places", type=int, default=4, help="documents side by side; 4: each step has all four shares"
    )
    parser.add_argument("--rows-per-place", type=int, default=4, help="windows of each document in a step")
    parser.add_argument("--precision", default="float32", help="float32, bfloat16 (autocast), or both by comma")
    parser.add_argument("--repeats", type=int, default=3, help="steps of each, after one warm-up")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--no-long", action="store_true", help="leave the baseline of long rows out")
    parser.add_argument("--out", type=Path, default=Path("out/training_cost"), help="folder for results.json, table.md")
    arguments = parser.parse_args()
    arguments.windows = common.sizes_of(arguments.windows)
    arguments.precision = arguments.precision.split(",")
    wrong = sorted(set(arguments.precision) - {"float32", "bfloat16"})
    if wrong:
        parser.error(f"--precision: {wrong} given, expected float32, bfloat16 or both")
    if arguments.places * arguments.rows_per_place % LONG_WINDOWS and not arguments.no_long:
        parser.error(f"--places × --rows-per-place: a multiple of {LONG_WINDOWS} expected, or --no-long")
    common.quiet(arguments)
    torch.manual_seed(0)
    bench = Bench(arguments)
    results = bench.run()
    reached = targets(results)
    about = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()},
        "trained_weights": bench.trained,
        **common.here(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    common.write_json(arguments.out / "results.json", {"about": about, "results": results, "targets": reached})
    text = table(results)
    (arguments.out / "table.md").write_text(text + "\n", "utf-8")
    print(text)
    for check in reached:
        state = "reached" if check["reached"] else "missed"
        print(f"{check['target']}: {check['measured']:.2f}, at most {check['limit']}: {state}")
    print(json.dumps({"out": str(arguments.out), "targets": reached}))


if __name__ == "__main__":
    main()
