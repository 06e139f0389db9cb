"""Does a memory make held-out text easier to predict? Perplexity of the same tokens with more and more of it.

    python benchmarks/perplexity.py                                   # the default model, about 25 minutes on 2 cores
    python benchmarks/perplexity.py --parts books --documents 1 --windows-per-document 2 --full ""
    python benchmarks/perplexity.py --model out/run --base default    # what a fine-tune changed, also without memory

Documents are the test parts of ../shared/data. From each, some windows are drawn beyond the largest memory (16k
tokens), and the same tokens of them are predicted in every column:

    memory N    the model with its local window and, as memory, the N tokens before it; 0 is the window alone
    full N      plain attention over the N tokens before the window and the window, as far as positions go
    base        with --base: the other model, window alone; `full` columns are then the base model's too

A document is read once, window by window, as the product reads (a window looks back at what was read before it, or
at `--read-span`), and each drawn window meets its last N records when reading gets there. The records themselves
were encoded with all that reading saw, not with N tokens only. The first token of a window is predicted from
nothing in the window, so it is not counted. Perplexity is exp(sum of negative log-likelihoods / tokens) over all
counted tokens; the change against the window alone has as ± its standard error over windows.

`window alone` on both models also says what a fine-tune cost on short texts: the last line of the table.
Into `--out` go results.json (all settings, every window), table.md and plot.png, written after each document.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import common  # before torch, so that waiting threads do not spin

# isort: split
import torch

from longfocus.data.tokens import leading_ids
from longfocus.model.cache import FocusCache
from longfocus.model.focused import read_window

PARTS = ("books", "code", "arxiv", "isabelle")
ALONE = "memory 0"
BASE = "base"


class Bench:
    """The models, the columns, and the windows that were measured."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.focused, self.tokenizer = common.load_focused(arguments)
        config = self.focused.focus.config
        if config.overlap:
            raise SystemExit("Targets are windows that begin afresh: give a checkpoint whose overlap is 0.")
        self.window = config.window_tokens
        self.memories = sorted({0, *common.sizes_of(arguments.memory)})
        self.fulls = common.sizes_of(arguments.full) if arguments.full else []
        self.plain = None
        if self.fulls or arguments.base:
            self.plain = common.load_plain(arguments.base or arguments.model, arguments)
            longest = common.longest_plain(self.plain)
            for size in [size for size in self.fulls if size + self.window > longest]:
                common.note(f"full {common.size_name(size)} left out: the model's positions end at {longest:,}.")
            self.fulls = [size for size in self.fulls if size + self.window <= longest]
        self.before = max([*self.memories, *self.fulls])
        self.columns = [f"memory {common.size_name(size)}" for size in self.memories]
        self.columns += [f"full {common.size_name(size)}" for size in self.fulls]
        self.columns += [BASE] * bool(arguments.base)

    def documents(self, part: str) -> list[tuple[str, list[int], list[tuple[int, int]], str, list[int]]]:
        """(id, token ids, places of the tokens in the text, text, starts of target windows) of a part."""
        rng = random.Random(f"{self.arguments.seed} {part}")
        known = list(common.held_out(part))
        rng.shuffle(known)
        found = []
        up_to = common.size_of(self.arguments.up_to)
        for name, text in known:
            if len(found) == self.arguments.documents:
                break
            text = text[: 8 * up_to]  # far more than `up_to` tokens of it
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            leading = leading_ids(self.tokenizer)
            ids = [*leading, *encoded["input_ids"]]
            places = [(0, 0)] * len(leading) + list(encoded["offset_mapping"])
            end = min(len(ids), up_to)
            first = -(-self.before // self.window)
            starts = [number * self.window for number in range(first, end // self.window)]
            if not starts:
                common.note(f"{part}: {name} left out: {len(ids):,} tokens are too few.")
                continue
            targets = sorted(rng.sample(starts, min(self.arguments.windows_per_document, len(starts))))
            found.append((name, ids, places, text, targets))
        return found

    @torch.no_grad()
    def document(self, part: str, ids: list[int], targets: list[int]) -> dict[int, dict[str, float]]:
        """For each target start, the negative log-likelihood (nats, summed) of each column; the document is read once."""
        focus = self.focused.focus
        store = focus.new_store()
        reading = FocusCache(focus, own=store)
        found: dict[int, dict[str, float]] = {}
        for start in range(0, targets[-1] + self.window, self.window):
            window = torch.tensor([ids[start : start + self.window]])
            if start in targets:
                found[start] = self.columns_of(ids, start, window, store)
                common.note(
                    f"{part}, tokens {start:,} on: "
                    + ", ".join(f"{name} {math.exp(nll / (self.window - 1)):.2f}" for name, nll in found[start].items())
                )
            if start < targets[-1]:
                read_window(self.focused, window, reading)
        return found

    def columns_of(self, ids: list[int], start: int, window: torch.Tensor, store: Any) -> dict[str, float]:
        assert store.tokens == start, "everything before the window is in memory, and nothing else"
        found: dict[str, float] = {}
        for size in self.memories:
            # a window that stays local writes nothing into the store that it reads from
            cache = FocusCache(self.focused.focus, own=store, document_start=start - size)
            logits = self.focused(window.to(self.focused.device), cache=cache, use_cache=True).logits
            found[f"memory {common.size_name(size)}"] = nll_of(logits, window)
        assert store.tokens == start
        for size in self.fulls:
            assert self.plain is not None
            part = torch.tensor([ids[start - size : start + self.window]], device=self.plain.device)
            logits = self.plain(part, use_cache=False, logits_to_keep=self.window).logits
            found[f"full {common.size_name(size)}"] = nll_of(logits, window)
        if self.arguments.base:
            assert self.plain is not None
            found[BASE] = nll_of(self.plain(window.to(self.plain.device), use_cache=False).logits, window)
        return found


def nll_of(logits: torch.Tensor, window: torch.Tensor) -> float:
    """Negative log-likelihood of the window's tokens but the first, summed, from logits (1, W, vocabulary)."""
    assert logits.shape[1] == window.shape[1]
    targets = window[0, 1:].to(logits.device)
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].float(), targets, reduction="sum"))


# -- results -----------------------------------------------------------------------------------------------


def summary(records: list[dict[str, Any]], columns: list[str]) -> dict[str, Any]:
    """Perplexities over some windows, and how they differ from the window alone."""
    tokens = sum(record["tokens"] for record in records)
    found: dict[str, Any] = {"windows": len(records), "tokens": tokens, "bytes": sum(r["bytes"] for r in records)}
    found["columns"] = {}
    for column in columns:
        total = sum(record["nll"][column] for record in records)
        changes = [(record["nll"][column] - record["nll"][ALONE]) / record["tokens"] for record in records]
        error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else float("nan")
        ratio = math.exp(statistics.fmean(changes))
        found["columns"][column] = {
            "perplexity": math.exp(total / tokens),
            "bits_per_byte": total / math.log(2) / found["bytes"],
            "change_percent": 100 * (ratio - 1),
            "change_error_percent": None if math.isnan(error) else 100 * ratio * error,
        }
    return found


def summaries(records: list[dict[str, Any]], columns: list[str]) -> dict[str, Any]:
    """By part, and over all where there are several."""
    parts = list(dict.fromkeys(record["part"] for record in records))
    found = {part: summary([r for r in records if r["part"] == part], columns) for part in parts}
    return found | ({"all": summary(records, columns)} if len(parts) > 1 else {})


def table(found: dict[str, Any], columns: list[str]) -> str:
    """Perplexity of each part and column, and the change against the window alone."""
    names = {ALONE: "window alone", BASE: "base, window alone"}
    rows = []
    for part, values in found.items():
        cells = [part, f"{values['windows']}", f"{values['tokens']:,}", f"{values['bytes']:,}"]
        for column in columns:
            value = values["columns"][column]
            cell = f"{value['perplexity']:.2f}"
            if column != ALONE:
                error = value["change_error_percent"]
                cell += f" ({value['change_percent']:+.1f}" + (f" ± {error:.1f}" if error is not None else "") + "%)"
            cells.append(cell)
        rows.append(cells)
    text = common.markdown(["text", "windows", "tokens", "bytes", *(names.get(name, name) for name in columns)], rows)
    if BASE in columns:
        last = list(found.values())[-1]["columns"]
        change = 100 * (last[ALONE]["perplexity"] / last[BASE]["perplexity"] - 1)
        text += f"\n\nInside one window, without memory: {change:+.2f}% against the base model."
    return text


def plot(found: dict[str, Any], bench: Bench, path: Path, title: str) -> None:
    made, axes, plt = common.figure(len(found))
    for axis, (part, values) in zip(axes, found.items(), strict=True):
        for kind, sizes, colour in (("memory", bench.memories, "tab:blue"), ("full", bench.fulls, "tab:orange")):
            if not sizes:
                continue
            y = [values["columns"][f"{kind} {common.size_name(size)}"]["perplexity"] for size in sizes]
            label = (
                "window and memory" if kind == "memory" else "full attention" + " of the base" * (BASE in bench.columns)
            )
            axis.plot([size + bench.window for size in sizes], y, marker="o", label=label, color=colour)
        if BASE in bench.columns:
            y = values["columns"][BASE]["perplexity"]
            axis.plot([bench.window], [y], marker="s", linestyle="", label="base, window alone", color="tab:gray")
        ticks = [size + bench.window for size in bench.memories]
        names = [common.size_name(size) for size in bench.memories]
        axis.set(xscale="log", title=part, xlabel=f"tokens before the window of {bench.window}")
        axis.set_xticks(ticks, names)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("perplexity")
    handles, labels = axes[0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    made.suptitle(title)
    made.savefig(path, dpi=120)
    plt.close(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_model_options(parser)
    parser.add_argument("--base", metavar="PATH", help="another model to compare with: the one before the fine-tune")
    parser.add_argument("--parts", default=",".join(PARTS), help="sets of held-out text")
    parser.add_argument("--memory", default="1k,4k,16k", help="tokens of memory; 0 is always there")
    parser.add_argument(
        "--full", default="1k,4k,7.5k", help="tokens before the window, for full attention; empty for none"
    )
    parser.add_argument("--documents", type=int, default=2, help="documents of each set")
    parser.add_argument("--windows-per-document", type=int, default=4, help="windows to predict in each")
    parser.add_argument("--up-to", default="32k", help="tokens of a document from which windows are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/perplexity"), help="folder for the results")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if set(parts) - set(PARTS):
        parser.error(f"--parts: {arguments.parts} given, expected some of {','.join(PARTS)}.")
    if arguments.documents < 1 or arguments.windows_per_document < 1:
        parser.error("--documents and --windows-per-document: at least 1 of each.")
    common.quiet(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments)
    about = common.about(arguments, bench.focused)
    records: list[dict[str, Any]] = []
    stopped = False
    try:
        for part in parts:
            for name, ids, places, text, targets in bench.documents(part):
                for start, nll in bench.document(f"{part}, {name}", ids, targets).items():
                    begin, end = places[start + 1][0], places[start + bench.window - 1][1]
                    record = {"part": part, "document": name, "start": start, "tokens": bench.window - 1}
                    records.append({**record, "bytes": len(text[begin:end].encode("utf-8")), "nll": nll})
                found = summaries(records, bench.columns)
                common.write_json(
                    arguments.out / "results.json", {"about": about, "summaries": found, "windows": records}
                )
                (arguments.out / "table.md").write_text(table(found, bench.columns) + "\n", "utf-8")
                plot(found, bench, arguments.out / "plot.png", f"Held-out text, {about['model_name']}")
    except KeyboardInterrupt:
        stopped = True
        common.note("Stopped; the documents that were finished are written.")
    if not records:
        raise SystemExit("Nothing was measured.")
    found = summaries(records, bench.columns)
    print(table(found, bench.columns))
    print(json.dumps({"out": str(arguments.out), "stopped": stopped, "summaries": found, **about}))
    if stopped:
        raise SystemExit(130)


if __name__ == "__main__":
    main()
