"""`longfocus calibrate-k`: finds out which queries need no memory and which keys count, and writes a rule for it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longfocus.commands import options
from longfocus.commands.models import load_model
from longfocus.commands.output import note
from longfocus.commands.progress import Bar
from longfocus.errors import ConfigError, InputError

if TYPE_CHECKING:
    from longfocus.analysis.k_calibration import Calibration, Tried

EPILOG = """Examples:

  longfocus calibrate-k --memory 8k

  longfocus calibrate-k novel.txt diary/ --memory 16k --retrieval approximate --k 32 --out novels.json

  longfocus calibrate-k --model path/to/model --sets books,code --loss 1 --json

  longfocus ask project.memory "Where are retries configured?" --retrieval exact --k-rule k_rule.json
"""


def calibrate_k(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT...", help="Files and folders of held-out text.  [default: the sets of --data]"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the rule goes.")] = Path("k_rule.json"),
    model: Annotated[str, typer.Option("--model", "-m", metavar="PATH|ID", help="Model folder or hub id.")] = "default",
    loss: Annotated[
        float, typer.Option("--loss", metavar="PERCENT", help="By how many percent perplexity may grow.")
    ] = 0.5,
    memory: Annotated[
        str, typer.Option("--memory", metavar="TOKENS", help="Memory that windows see; about as much as will be asked.")
    ] = "8k",
    windows: Annotated[int, typer.Option("--windows", metavar="N", min=1, help="Windows after each memory.")] = 4,
    blocks: Annotated[
        int,
        typer.Option(
            "--blocks", metavar="N", min=2, help="Memories with their windows; half to calibrate on, half to measure."
        ),
    ] = 12,
    levels: Annotated[
        str | None,
        typer.Option(
            "--levels",
            metavar="X,X,…",
            help="Shares of attention that may be lost, from mild to strict; a rule is tried for each.  [default: 0.003,0.01,0.02,0.05,0.1,0.2]",
        ),
    ] = None,
    sets: Annotated[
        str, typer.Option("--sets", metavar="NAME,…", help="Held-out sets, where no texts are given.")
    ] = "books",
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            help="Folder of the held-out sets.  [default: $LONGFOCUS_DATA or ../shared/data]",
        ),
    ] = None,
    retrieval: Annotated[
        str | None,
        typer.Option(
            "--retrieval", metavar="HOW", help="exact or approximate.  [default: as the model's options say, or exact]"
        ),
    ] = None,
    k: options.K = None,
    layers: options.Layers = None,
    window: options.Window = None,
    memory_dtype: options.MemoryDtype = None,
    read_span: options.ReadSpan = None,
    dtype: options.Dtype = None,
    as_json: options.AsJson = False,
    threads: options.Threads = None,
) -> None:
    """Find a rule that chooses k by query: which queries need no memory, and which keys count.

    Each head's queries whose own window weighs most are skipped, and keys that would receive next to no attention are left out.
    Rules from mild to strict are found on one half of the blocks and measured on the other; the strictest whose perplexity
    stays within --loss is written.
    """
    from longfocus.analysis import k_calibration
    from longfocus.settings import size_of

    steps = _numbers(levels) if levels is not None else k_calibration.LEVELS
    if not math.isfinite(loss):
        raise ConfigError(f"--loss: {loss} given, expected a number of percent, such as 0.5.")
    try:
        memory_tokens = size_of(memory)
    except ConfigError as error:
        raise ConfigError(f"--memory: {error}") from None
    if not out.parent.is_dir():
        raise InputError(f"--out: {out.parent} is not a folder.")
    given = options.focus_options(
        memory_layers=layers, window=window, retrieval=retrieval, k=k, memory_dtype=memory_dtype, read_span=read_span
    )
    focused, tokenizer = load_model(model, {**options.CLI_DEFAULTS, **given}, threads, dtype)
    focus = focused.focus
    if focus.config.retrieval == "dense" and retrieval is None:
        focus.config = dataclasses.replace(focus.config, retrieval="exact")
    size = memory_tokens + windows * focus.config.window_tokens
    texts = _texts(paths or [], sets, data, tokenizer, size, blocks)
    with Bar("calibrate-k") as bar:
        found = k_calibration.calibrate(focused, texts, memory_tokens, levels=steps, told=bar.show)
    chosen = found.strictest(loss)
    written = None if chosen is None else _about(found, chosen, focus, memory_tokens, len(texts))
    if written is not None:
        written.write(out)
    if as_json:
        print(json.dumps(_document(found, chosen, out, loss, memory_tokens, focus)))
    else:
        print(_table(found, chosen))
    if chosen is None:
        raise ConfigError(
            f"No rule was written: even the mildest makes perplexity more than {loss:g}% larger. Allow more with --loss, "
            "or try milder --levels."
        )
    note(f"The rule of level {chosen.level:g} is in {out}; use it with --k-rule {out}.")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--levels: {text!r} given, expected numbers such as 0.01,0.05.") from None


def _texts(paths: list[str], sets: str, data: Path | None, tokenizer: Any, size: int, blocks: int) -> list[list[int]]:
    """Blocks of `size` tokens, from as many documents as there are.

    Raises:
        InputError: a text is missing, or they are too short.
    """
    from longfocus.analysis.k_calibration import stretches
    from longfocus.tasks.texts import Texts
    from longfocus.tasks.token_documents import TokenDocuments

    texts = Texts(data, {path: path for path in paths})
    found: list[list[int]] = []
    for wanted in (1, blocks):  # blocks from each document; one will do, unless the documents are few or short
        documents = TokenDocuments(tokenizer, texts, wanted * size)
        ids = [document.ids for part in paths or sets.split(",") for document in documents.of(part)]
        found = stretches(ids, size, blocks)
        if len(found) == blocks:
            break
    if len(found) < 2:
        raise InputError(
            f"The texts hold {len(found)} blocks of {size:,} tokens, expected 2 or more; give longer texts, or less --memory."
        )
    if len(found) < blocks:
        note(f"The texts hold {len(found)} blocks of {size:,} tokens; {blocks} were asked for.")
    return found


def _about(found: Calibration, chosen: Tried, focus: Any, memory_tokens: int, blocks: int) -> Any:
    config = focus.config
    return dataclasses.replace(
        chosen.rule,
        about=f"{focus.geometry.model_name}, {config.retrieval} retrieval, k {config.k}, {memory_tokens:,} tokens of memory, {blocks} "
        f"blocks of text: level {chosen.level:g}, perplexity {found.percent(chosen):+.2f}%, {100 * chosen.skipped_share:.0f}% of "
        f"retrievals skipped, {chosen.mean_k:.1f} keys a retrieval.",
    )


def _document(
    found: Calibration, chosen: Tried | None, out: Path, loss: float, memory_tokens: int, focus: Any
) -> dict[str, Any]:
    rows = [
        {
            "level": tried.level,
            "skipped": tried.skipped_share,
            "skipped_by_layer": {str(layer): share for layer, share in tried.skipped.items()},
            "mean_k": tried.mean_k,
            "attention_lost": tried.lost,
            "perplexity": math.exp(sum(tried.losses) / len(tried.losses)),
            "change_percent": found.percent(tried),
            "change_percent_interval": list(_interval(found, tried)),
            "time": tried.time,
            "written": tried is chosen,
        }
        for tried in found.tried
    ]
    return {
        "out": None if chosen is None else str(out),
        "model": focus.geometry.model_name,
        "retrieval": focus.config.retrieval,
        "k": focus.config.k,
        "memory_tokens": memory_tokens,
        "loss_percent": loss,
        "measured_blocks": len(found.plain),
        "perplexity": math.exp(sum(found.plain) / len(found.plain)),
        "levels": rows,
    }


def _interval(found: Calibration, tried: Tried) -> tuple[float, float]:
    """95%, over blocks; nan for one block."""
    from longfocus.tasks.statistics import mean_of, percent_change_of

    estimate = percent_change_of(mean_of(found.changes(tried)))
    return estimate.low, estimate.high


def _table(found: Calibration, chosen: Tried | None) -> str:
    plain = math.exp(sum(found.plain) / len(found.plain))
    head = ["level", "skipped", "by layer", "mean k", "attention lost", "perplexity", "change", "95% interval", "time"]
    rows = [head, ["no rule", "0%", "", "", "0%", f"{plain:.3f}", "", "", "1.00"]]
    for tried in found.tried:
        low, high = _interval(found, tried)
        rows.append(
            [
                f"{tried.level:g}" + " *" * (tried is chosen),
                f"{100 * tried.skipped_share:.1f}%",
                ", ".join(f"{layer}: {100 * share:.0f}%" for layer, share in tried.skipped.items()),
                f"{tried.mean_k:.1f}",
                f"{100 * tried.lost:.2f}%",
                f"{math.exp(sum(tried.losses) / len(tried.losses)):.3f}",
                f"{found.percent(tried):+.2f}%",
                "" if math.isnan(low) else f"{low:+.2f}% … {high:+.2f}%",
                f"{tried.time:.2f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
