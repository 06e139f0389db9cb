"""What the first token of each window does in a memory, and whether leaving it out helps.

    python benchmarks/sinks.py                       # before and after the fine-tune, about 8 minutes on 2 cores

A window's first token draws much attention by itself (an attention sink), and a memory holds one such key per window.
Pass-key prompts (`longfocus eval passkey`, filler) are answered with all of the memory, and with each window's first
token left out of it, in reading as in answering. Beside the answers: the part of all attention to memory that first
tokens receive, by memory layer, mean over all queries that saw a memory and over heads.
"""

from __future__ import annotations

import argparse
import json
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
def first_tokens(window: int, leave_out: bool) -> Iterator[dict[int, list[float]]]:
    """Note the share of windows' first tokens by layer; leave them out of the memory or not."""
    shares: dict[int, list[float]] = defaultdict(list)
    attend, chunks = MemoryContext.attend, MemoryContext.chunks

    def only(context: MemoryContext, layer: int, first: bool) -> Iterator[KVChunk]:
        for chunk in chunks(context, layer):
            index = torch.arange(chunk.start, chunk.start + chunk.keys.shape[2])
            mask = ((index % window == 0) == first)[None]
            yield chunk._replace(mask=mask, records=None)

    def noting(context: MemoryContext, layer: int, query: torch.Tensor, **options: Any) -> Any:
        whole = attend(context, layer, query, **options)
        if whole is None:
            return None
        found = {}
        for first in (True, False):
            MemoryContext.chunks = lambda self, at, first=first: only(self, at, first)  # type: ignore[method-assign]
            found[first] = attend(context, layer, query, **options)
            MemoryContext.chunks = chunks  # type: ignore[method-assign]
        shares[layer].append(float(share(found[True][1], whole[1]).mean()))
        return found[False] if leave_out else whole

    MemoryContext.attend = noting  # type: ignore[method-assign]
    try:
        yield shares
    finally:
        MemoryContext.attend, MemoryContext.chunks = attend, chunks  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_model_options(parser)
    parser.add_argument("--models", default="default-base,default", help="models, comma-separated")
    parser.add_argument("--lengths", default="2k,8k")
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
        window = model.focus.config.window_tokens
        options = PasskeyOptions(
            lengths=sizes_of(arguments.lengths), samples=arguments.prompts, haystacks=["filler"], seed=arguments.seed
        )
        task = Passkey(options, Texts())
        for point in task.points(subject):
            length = int(point.values["tokens"])
            for leave_out in (False, True):
                with first_tokens(window, leave_out) as shares:
                    found = [sample.scores["right"] for sample in task.samples(subject, point, frozenset())]
                right, prompts = int(sum(found)), len(found)
                mass = {layer: round(statistics.mean(values), 3) for layer, values in shares.items()}
                what = "left out" if leave_out else "kept"
                common.note(f"{name}, {length:,} tokens, first tokens {what}: {right} of {prompts} right, share {mass}")
                rows.append(
                    [
                        name,
                        f"{length:,}",
                        what,
                        f"{right} of {prompts}",
                        ", ".join(f"{layer}: {value:.2f}" for layer, value in mass.items()),
                    ]
                )
                results.append(
                    {
                        "model": name,
                        "tokens": length,
                        "left_out": leave_out,
                        "right": right,
                        "prompts": prompts,
                        "share": mass,
                    }
                )
    text = common.markdown(
        ["model", "prompt tokens", "first tokens", "right", "their share of memory's attention, by layer"], rows
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    common.write_json(arguments.out / "results.json", {**common.about(arguments, model), "results": results})
    (arguments.out / "table.md").write_text(text + "\n", "utf-8")
    print(text)
    print(json.dumps({"out": str(arguments.out)}))


if __name__ == "__main__":
    main()
