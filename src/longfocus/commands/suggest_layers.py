"""`longfocus suggest-layers`: measures which heads of a model copy, and proposes the memory layers for a fine-tune."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from longfocus.commands import options
from longfocus.commands.models import load_model
from longfocus.commands.output import note
from longfocus.commands.progress import NowAndThen
from longfocus.errors import ConfigError

EPILOG = """Examples:

  longfocus suggest-layers default

  longfocus suggest-layers path/to/model --layers 3 --prompts 30

  longfocus suggest-layers path/to/model --probe tokens --json
"""

PROBES = ("text", "tokens")


def suggest_layers(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, hub id, or default.")],
    layers: Annotated[int, typer.Option("--layers", metavar="N", min=1, help="Layers to propose, at most.")] = 4,
    probe: Annotated[
        str,
        typer.Option(
            "--probe",
            metavar="KIND",
            help="text: invented facts in plain sentences, asked for; tokens: random tokens repeated, for models that know no language.",
        ),
    ] = "text",
    prompts: Annotated[int, typer.Option("--prompts", metavar="N", min=1, help="Prompts to measure on.")] = 10,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=4, help="Length of a prompt, about, in tokens.")
    ] = 400,
    threshold: Annotated[
        float, typer.Option("--threshold", metavar="X", min=0.0, max=1.0, help="Propose no layer that scores less.")
    ] = 0.1,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the prompts.")] = 0,
    window: options.Window = None,
    as_json: options.AsJson = False,
    threads: options.Threads = None,
) -> None:
    """Propose memory layers: those whose heads find an earlier token again.

    A layer's score is the attention that its best head pays, where an answer is to be copied from the text, to the
    very token to be copied (0 to 1). Memory layers among them learn to find things in a memory with little training.
    """
    if probe not in PROBES:
        raise ConfigError(f"--probe: {probe!r} given, expected one of {', '.join(PROBES)}.")
    from longfocus.analysis import retrieval_heads
    from longfocus.config import FocusConfig
    from longfocus.model.attach import detach

    # attached without memory layers and detached again: the plain model, if its family can carry a memory at all
    unfocused = {"memory_layers": [], "overlap": 0, "last_window": None, "window": window}
    model, tokenizer = load_model(source, unfocused, threads)
    fitting = FocusConfig(window=window).resolve(model.focus.num_layers, model.focus.anatomy.longest_window)
    model = detach(model)
    if probe == "text":
        probes = retrieval_heads.text_probes(tokenizer, prompts, tokens=tokens, seed=seed)
    else:
        vocabulary = min(len(tokenizer), int(model.config.get_text_config().vocab_size))
        special = set(tokenizer.all_special_ids)
        probes = retrieval_heads.token_probes(vocabulary, prompts, tokens=tokens, seed=seed, without=special)
    measured = retrieval_heads.measure(model, probes, _progress(len(probes)))
    narrow = retrieval_heads.narrow_layers(model, fitting.window_tokens)
    ranked = retrieval_heads.rank(measured.scores)
    chosen = retrieval_heads.propose(measured.scores, layers, threshold=threshold, without=narrow)
    if as_json:
        result: dict[str, Any] = {
            "model": source,
            "memory_layers": list(chosen),
            "probe": probe,
            "prompts": measured.prompts,
            "answer_tokens": measured.answer_tokens,
            "accuracy": round(measured.accuracy, 4),
            "threshold": threshold,
            "seed": seed,
            "layers": [
                {
                    "layer": entry.layer,
                    "head": entry.head,
                    "score": round(entry.score, 4),
                    "second_head": entry.second_head,
                    "second_score": round(entry.second_score, 4),
                    "proposed": entry.layer in chosen,
                    "narrow": entry.layer in narrow,
                }
                for entry in ranked
            ],
            "scores": [[round(score, 4) for score in row] for row in measured.scores.tolist()],
        }
        print(json.dumps(result))
        return
    print("Layer  Best head  Score  Second head  Score")
    for entry in ranked:
        second = f"{entry.second_head:11}  {entry.second_score:5.2f}" if entry.second_head is not None else " " * 18
        mark = "  *" if entry.layer in chosen else "  sees fewer tokens than a window" * (entry.layer in narrow)
        print(f"{entry.layer:5}  {entry.head:9}  {entry.score:5.2f}  {second}{mark}".rstrip())
    print(
        f"\n{measured.answer_tokens} answer tokens in {measured.prompts} prompts; "
        f"the model itself would have said {100 * measured.accuracy:.0f}% of them."
    )
    if len(chosen) < layers:
        note(
            f"Only {len(chosen)} of {layers} layers score {threshold} or more"
            + (" and see a whole window." if narrow else ".")
            + ("" if chosen else " Try --probe tokens, or choose evenly spaced layers.")
        )
    if chosen:
        print(f"memory_layers: [{', '.join(map(str, chosen))}]")


def _progress(total: int) -> Any:
    """A line now and then while prompts are measured."""
    line = NowAndThen(5)

    def step(done: int) -> None:
        if done < total and line.due():
            note(f"Measuring: {done} of {total} prompts …")

    return step
