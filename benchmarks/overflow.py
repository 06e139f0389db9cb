"""What a full window costs: the next tokens' loss after its older part went to memory, with and without its first token.

    python benchmarks/overflow.py                    # a minute or two on 2 cores

Stretches of held-out text are fed as a prompt that nearly fills the window, and then some more tokens, which do not fit, so
that half of the window goes to memory. The same tokens are predicted with `overflow: slide` (the recent half stays),
`anchor` (the recent half and the window's first token) and, beside them, in a window that is twice as long and never full.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from pathlib import Path
from typing import Any

import torch

import common
from longfocus.tasks.statistics import mean_of
from longfocus.tasks.texts import Texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_model_options(parser)
    parser.add_argument("--texts", default="books,code", help="held-out sets, comma-separated")
    parser.add_argument("--documents", type=int, default=6, help="of each set")
    parser.add_argument("--stretches", type=int, default=4, help="of each document")
    parser.add_argument("--more", type=int, default=64, help="tokens that do not fit, and are predicted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/overflow"))
    arguments = parser.parse_args()
    common.quiet(arguments)
    losses: dict[tuple[str, str], list[float]] = {}
    for how in ("slide", "anchor", "never full"):
        model, tokenizer = common.load_focused(arguments)
        window = model.focus.config.window_tokens
        changes: dict[str, Any] = {"window": 2 * window} if how == "never full" else {"overflow": how}
        model.focus.config = dataclasses.replace(model.focus.config, **changes)
        for part in arguments.texts.split(","):
            rng = random.Random(arguments.seed)
            for _, text in Texts().documents(part)[: arguments.documents]:
                ids = tokenizer(text[:60_000], add_special_tokens=False)["input_ids"]
                for _ in range(arguments.stretches):
                    at = rng.randrange(len(ids) - window - arguments.more)
                    prompt = torch.tensor([ids[at : at + window - 6]])
                    more = torch.tensor([ids[at + window - 6 : at + window - 6 + arguments.more]])
                    cache = model.new_cache()
                    with torch.inference_mode():
                        model(prompt, cache=cache, use_cache=True, logits_to_keep=1)
                        logits = model(more, cache=cache, use_cache=True).logits[0].float()
                    loss = torch.nn.functional.cross_entropy(logits[:-1], more[0, 1:])
                    losses.setdefault((part, how), []).append(float(loss))
    rows = []
    for (part, how), found in losses.items():
        estimate = mean_of(found)
        against = [one - other for one, other in zip(found, losses[part, "never full"], strict=True)]
        rows.append(
            [
                part,
                how,
                f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})",
                f"{statistics.mean(against):+.3f}",
            ]
        )
    text = common.markdown(["text", "overflow", "loss, nats a token (95%)", "against never full"], sorted(rows))
    results = [{"text": part, "overflow": how, "losses": found} for (part, how), found in losses.items()]
    common.save_table(arguments, model, text, results)


if __name__ == "__main__":
    main()
