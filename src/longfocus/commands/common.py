"""What the commands share: option declarations, loading a model quietly, reading with a progress bar."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from longfocus.config import WEIGHT_DTYPES
from longfocus.errors import ConfigError, InputError, ModelNotFoundError

if TYPE_CHECKING:
    from longfocus.data.documents import Source
    from longfocus.memory.documents import Document
    from longfocus.memory.memory import Memory
    from longfocus.model.reading import Reader

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="PATH|ID",
        help="Model folder or hub id. Default: the one that made the memory, else the model that comes along.",
    ),
]
Layers = Annotated[
    str | None,
    typer.Option("--memory-layers", metavar="N,N,…", help="Layers that see the memory, for instance 8,16,24."),
]
Window = Annotated[int | None, typer.Option("--window", metavar="TOKENS", help="Local window.")]
Overlap = Annotated[
    int | None,
    typer.Option(
        "--overlap", metavar="TOKENS", help="Tokens of the last window that ordinary layers keep while reading."
    ),
]
MemoryDtype = Annotated[
    str | None,
    typer.Option(
        "--memory-dtype",
        metavar="DTYPE",
        help="How keys and values are stored: float32, float16, bfloat16 or int8.  [default: float16]",
    ),
]
ReadSpan = Annotated[
    int | None,
    typer.Option(
        "--read-span",
        metavar="TOKENS",
        help="While reading, look back at most this far into the document's memory; 0 for none, -1 for all.  [default: 4096]",
    ),
]
RetrievalOption = Annotated[
    str | None,
    typer.Option(
        "--retrieval",
        metavar="HOW",
        help="dense: attend to all of the memory; exact: each query takes its k best keys; approximate: the same through an index (needs faiss).",
    ),
]
K = Annotated[
    int | None,
    typer.Option(
        "--k", metavar="N", help="Keys per query and head for --retrieval exact and approximate.  [default: 64]"
    ),
]
KRuleFile = Annotated[
    Path | None,
    typer.Option(
        "--k-rule",
        metavar="FILE",
        help="Choose k by query, by a rule of longfocus calibrate-k; for --retrieval exact and approximate.",
    ),
]
AnswerRetrieval = Annotated[
    str,
    typer.Option(
        "--retrieval",
        metavar="HOW",
        help="dense: attend to all of the memory; exact: each query takes its k best keys; approximate: the same through an index (needs faiss); auto: as the model's options say, else dense up to 131,072 tokens and approximate beyond.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Of the weights: float32, bfloat16 or float16. Default: that of a saved memory; else bfloat16 where this "
        "machine computes fast in it, or as stored.",
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="CPU threads. Default: all cores.")]
Encoding = Annotated[
    str | None,
    typer.Option("--encoding", metavar="NAME", help="Encoding of the texts. Default: by byte-order mark, else UTF-8."),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="PATTERN",
        help="Ask only these documents: names, globs such as 'docs/*.md' (* also matches /), or folders; may be repeated.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Longest answer.")]
Temperature = Annotated[
    float, typer.Option("--temperature", metavar="T", min=0.0, help="0: always the likeliest token.")
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", metavar="P", min=0.0, max=1.0, help="Sample from the likeliest tokens of this total probability."
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed for sampling.")]

CLI_DEFAULTS = {"memory_dtype": "float16", "read_span": 4096}
"""Half the space of float32, and reading whose cost per token does not grow with the text; see benchmarks/inference.py."""


def note(text: str) -> None:
    """A line for the person, on standard error."""
    print(text, file=sys.stderr, flush=True)


def counted(number: int, what: str) -> str:
    """`1 document`, `1,200 documents`."""
    return f"{number:,} {what}" + "s" * (number != 1)


def print_documents(documents: Sequence[Document], bytes_per_token: int) -> None:
    """A line for each: tokens, megabytes of keys and values, name."""
    for document in documents:
        state = "" if document.complete else "  (incomplete: reading was interrupted)"
        megabytes = document.tokens * bytes_per_token / 1e6
        print(f"{document.tokens:>10,}  {megabytes:>8,.1f} MB  {document.name}{state}")


def focus_options(**given: Any) -> dict[str, Any]:
    """Options that were given on the command line, as FocusConfig fields.

    Raises:
        ConfigError: the layer list is not a list of numbers.
        InputError: the k rule is not there, or damaged.
    """
    options = {name: value for name, value in given.items() if value is not None}
    layers = options.get("memory_layers")
    if layers is not None:
        try:
            options["memory_layers"] = [int(part) for part in layers.split(",")]
        except ValueError:
            raise ConfigError(f"--memory-layers: {layers!r} given, expected numbers such as 8,16,24.") from None
    if "k_rule" in options:
        from longfocus.k_rule import KRule

        options["k_rule"] = KRule.read(options["k_rule"])
    if options.get("read_span") == -1:
        options["read_span"] = None
    return options


def settle(threads: int | None) -> None:
    """Silence the libraries' chatter and set the number of CPU threads.

    Raises:
        ConfigError: no thread is left.
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"--threads: {threads} given, expected 1 or more.")
        torch.set_num_threads(threads)


def check_dtype(dtype: str | None) -> None:
    """
    Raises:
        ConfigError: weights cannot be loaded in it.
    """
    if dtype not in (None, *WEIGHT_DTYPES):
        raise ConfigError(f"--dtype: {dtype!r} given, expected one of {', '.join(WEIGHT_DTYPES)}.")


def load_model(
    source: str,
    options: dict[str, Any],
    threads: int | None,
    dtype: str | None = None,
    made_in: str | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer), without the chatter of the libraries.

    Args:
        dtype: of the weights. None: `made_in`, that of the model that made the memory; without a memory, what the
            machine is fast at, or as stored.
    """
    check_dtype(dtype)
    settle(threads)
    from longfocus.model.load import fast_dtype, load, load_tokenizer

    chosen = dtype or made_in or fast_dtype()
    return load(source, announce=note, dtype=chosen, **options), load_tokenizer(source)


def lasting_source(name: str) -> str:
    """A model's name as a memory keeps it: a folder by its whole path, so that it is found from anywhere."""
    return name if name.startswith("default") or not Path(name).exists() else str(Path(name).absolute())


def warn_untrained(source: str) -> None:
    """Say so when the model never learnt to use a memory, lest its answers be taken for more than they are."""
    if source == "default-base":
        note("This model has not been trained to use its memory: trust the sources, not the answer (see README).")


_TELL_EVERY_SECONDS = 15


def read_all(reader: Reader, sources: Sequence[Source], *, replace: bool = False) -> None:
    """Read sources with a progress bar: tokens, tokens per second, time left; see `Reader.read` for `replace`."""
    if not sources:
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    total = sum(source.size_bytes or 0 for source in sources)
    done_bytes = tokens = 0
    begun = told = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[tokens]:,} tokens  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=False) as bar:
        task = bar.add_task("Reading", total=total or None, tokens=0, rate=0.0)
        for source in sources:

            def step(progress: Any, base: int = done_bytes, name: str = source.name) -> None:
                nonlocal tokens
                tokens += progress.tokens
                nonlocal told
                if not console.is_terminal and time.monotonic() - told > _TELL_EVERY_SECONDS:
                    told = time.monotonic()
                    part = f"{100 * (base + progress.source_bytes) / total:.0f}%, " if total else ""
                    note(f"Reading: {part}{tokens:,} tokens, {tokens / (told - begun):,.0f} tokens/s …")
                bar.update(
                    task,
                    completed=base + progress.source_bytes,
                    description=_short(name),
                    tokens=tokens,
                    rate=tokens / max(1e-9, time.monotonic() - begun),
                )

            try:
                reader.read(source, step, replace=replace)
                done_bytes += source.size_bytes or 0
            except InputError as error:  # it was readable a moment ago: changed or removed meanwhile
                if len(sources) == 1:
                    raise
                note(f"Skipped {error}")
            bar.update(task, completed=done_bytes)
        bar.update(task, description=f"Read {len(sources)} document" + "s" * (len(sources) != 1))
    if not console.is_terminal:
        seconds = max(1e-9, time.monotonic() - begun)
        note(f"Read {len(sources)} documents: {tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.0f} tokens/s).")


def report_skipped(skipped: Sequence[tuple[str, str]], limit: int = 5) -> None:
    """Say which files of folders were left out."""
    for name, reason in skipped[:limit]:
        note(f"Skipped {name}: {reason}.")
    if len(skipped) > limit:
        note(f"Skipped {len(skipped) - limit} more files.")


def settle_retrieval(model: Any, memory: Memory, how: str, *, quiet: bool = False) -> None:
    """Choose how the memory is searched, if it is left to us, and say what was chosen where it is not plain dense.

    Args:
        how: what `--retrieval` was given; not auto: the model has it already.
        quiet: say nothing.
    """
    from longfocus.config import DENSE_UP_TO_TOKENS
    from longfocus.memory.approximate import TRAIN_TOKENS
    from longfocus.memory.quantiser import has_faiss

    def say(text: str) -> None:
        if not quiet:
            note(text)

    focus = model.focus
    if how == "auto" and focus.config.retrieval == "dense" and memory.tokens > DENSE_UP_TO_TOKENS:
        if not has_faiss():
            say(
                f"{memory.tokens:,} tokens are attended to whole; with faiss they are searched approximately, and faster: "
                "pip install 'longfocus[approximate]'"
            )
            return
        focus.config = dataclasses.replace(focus.config, retrieval="approximate")
        say(f"{memory.tokens:,} tokens: searched approximately (--retrieval dense attends to all of them).")
    if focus.config.k_rule is not None and focus.config.retrieval == "dense":
        say("The k rule has no effect: all of the memory is attended to. It is for --retrieval exact or approximate.")
    if focus.config.retrieval == "approximate":
        behind = memory.extent - memory.indexed_tokens
        problem = f" (the saved index is not used: {memory.index_problem})" if memory.index_problem else ""
        if memory.tokens >= TRAIN_TOKENS and behind >= TRAIN_TOKENS:
            where = "; remembering more into it, or longfocus index, saves the index" if memory.is_saved else ""
            say(f"Indexing {behind:,} tokens in RAM{problem}{where} …")
            memory.search()


def index_memory(memory: Memory) -> None:
    """Bring a memory's saved index up to date, or make one for a memory that is large enough to be searched through it."""
    from longfocus.config import DENSE_UP_TO_TOKENS
    from longfocus.errors import MemoryWriteError
    from longfocus.memory.quantiser import has_faiss

    if not has_faiss() or not (memory.has_index or memory.tokens > DENSE_UP_TO_TOKENS):
        return
    try:
        encoded = memory.update_index()
    except MemoryWriteError as error:
        note(f"The index could not be saved; the memory is whole, and asked without it. {error}")
        return
    if encoded:
        note(f"Indexed {encoded:,} tokens for approximate search.")


def open_for_answers(
    paths: Sequence[str],
    model_name: str | None,
    options: dict[str, Any],
    threads: int | None,
    encoding: str | None,
    dtype: str | None = None,
    *,
    retrieval: str = "auto",
    only: Sequence[str] = (),
    quiet: bool = False,
) -> tuple[Any, Any, Memory]:
    """Model, tokenizer and memory for one saved memory, or for texts (and memories) read into RAM.

    Args:
        retrieval: as `--retrieval` has it.
        only: patterns of the documents that are asked, over all paths together; none: all.
    """
    from longfocus.config import Retrieval
    from longfocus.data.documents import find_sources
    from longfocus.memory.memory import Memory
    from longfocus.memory.ondisk import is_memory
    from longfocus.model.reading import Reader

    if retrieval not in (*get_args(Retrieval), "auto"):
        raise ConfigError(f"--retrieval: {retrieval!r} given, expected one of {', '.join(get_args(Retrieval))}, auto.")
    if retrieval != "auto":
        options = {**options, "retrieval": retrieval}
    saved = [Memory.open(path) for path in paths if is_memory(Path(path))]
    texts = [path for path in paths if not is_memory(Path(path))]
    found = find_sources(texts, encoding=encoding) if texts else None
    sources = found.sources if found is not None else []
    if only:
        saved, sources = _only(only, saved, sources)
    defaults: dict[str, Any] = dict(CLI_DEFAULTS)
    made_in = None
    name = model_name or "default"
    if saved:
        defaults, made_in = saved[0].focus_options, saved[0].geometry.model_dtype
        name = model_name or saved[0].model_source or "default"
    try:
        model, tokenizer = load_model(name, {**defaults, **options}, threads, dtype, made_in)
    except ModelNotFoundError as error:
        if saved and model_name is None:
            raise ModelNotFoundError(
                f"{error} ({saved[0].label} was made with it; name its new place with --model.)"
            ) from error
        raise
    for memory in saved:
        memory.check(model, tokenizer)
    if not quiet:
        warn_untrained(name)
    if len(saved) == 1 and found is None:
        settle_retrieval(model, saved[0], retrieval, quiet=quiet)
        return model, tokenizer, saved[0]
    joined = Memory.merge(saved, model, tokenizer)
    if found is not None:
        report_skipped(found.skipped)
        read_all(Reader(model, tokenizer, joined), sources)
    settle_retrieval(model, joined, retrieval, quiet=quiet)
    return model, tokenizer, joined


def _only(
    patterns: Sequence[str], saved: Sequence[Memory], sources: Sequence[Source]
) -> tuple[list[Memory], list[Source]]:
    """What the patterns choose of saved memories and of texts."""
    from longfocus.memory.documents import choose

    held = [(memory, document) for memory in saved for document in memory.documents]
    named = [(document.name, document.path) for _, document in held]
    named += [(source.name, str(source.path.absolute()) if source.path else None) for source in sources]
    what = saved[0].label if len(saved) == 1 and not sources else "What was given"
    chosen = choose(patterns, named, what)
    parts = []
    for memory in saved:
        mine = [held[index][1] for index in chosen if index < len(held) and held[index][0] is memory]
        parts.append(memory.select(*mine))
    return parts, [sources[index - len(held)] for index in chosen if index >= len(held)]


def print_sources(sources: Sequence[Any], out: Any = None) -> None:
    """The passages under an answer."""
    out = out or sys.stdout
    if not sources:
        return
    print("\nSources, by attention mass:", file=out)
    for number, passage in enumerate(sources, 1):
        print(f"[{number}] {passage.place}  {100 * passage.mass:.2f}%", file=out)
        for line in passage.text.splitlines()[:8]:
            print(f"    {line}", file=out)


def _short(name: str, width: int = 32) -> str:
    return name if len(name) <= width else "…" + name[1 - width :]
