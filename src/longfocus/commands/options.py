"""Options that several commands have: each by itself, and in groups that commands take whole."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longfocus.errors import ConfigError

if TYPE_CHECKING:
    from longfocus.answering import Sampling

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A saved memory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the recipe; repeatable.")
]
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
FocusChanges = Annotated[
    list[str] | None,
    typer.Option(
        "--focus",
        metavar="NAME=VALUE",
        help="Any other option of the focused model (a field of FocusConfig), for instance balance_tokens=500; repeatable.",
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
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT",
        help="Sharded memories: run the shards on this Ray cluster (see docs/cluster.md). Default: on this machine.",
    ),
]
ShardTimeout = Annotated[
    float | None,
    typer.Option(
        "--shard-timeout",
        metavar="SECONDS",
        help="Sharded memories: longest that one shard may take for one answer.  [default: 120]",
    ),
]

CLI_DEFAULTS = {"memory_dtype": "float16", "read_span": 4096}
"""Half the space of float32, and reading whose cost per token does not grow with the text; see benchmarks/inference.py."""


def focus_options(changes: Sequence[str] | None = None, **given: Any) -> dict[str, Any]:
    """Options that were given on the command line, as FocusConfig fields.

    Args:
        changes: more of them, NAME=VALUE with a value in YAML.

    Raises:
        ConfigError: the layer list is not a list of numbers, or a change is not of that form or names what has its own option.
    """
    options: dict[str, Any] = {}
    if changes:
        from longfocus.settings import apply_change

        for change in changes:
            apply_change(options, change, "--focus")
    twice = [name for name in options if given.get(name) is not None]
    if twice:
        raise ConfigError(f"--focus {twice[0]}=…: --{twice[0].replace('_', '-')} was given too; give one of them.")
    options.update({name: value for name, value in given.items() if value is not None})
    layers = options.get("memory_layers")
    if isinstance(layers, str):
        try:
            options["memory_layers"] = [int(part) for part in layers.split(",")]
        except ValueError:
            raise ConfigError(f"--memory-layers: {layers!r} given, expected numbers such as 8,16,24.") from None
    if options.get("read_span") == -1:
        options["read_span"] = None
    return options


def own_texts(given: Sequence[str]) -> dict[str, str]:
    """Texts of one's own, name to path, as `--text NAME=PATH` was given.

    Raises:
        ConfigError: a name or a path is missing.
    """
    found = {}
    for text in given:
        name, _, path = text.partition("=")
        if not (name and path):
            raise ConfigError(f"--text {text!r} given, expected NAME=PATH, for instance books=novel.txt.")
        found[name] = path
    return found


@dataclasses.dataclass(frozen=True)
class Reading:
    """How texts are read into a memory."""

    memory_layers: Layers = None
    window: Window = None
    overlap: Annotated[
        int | None,
        typer.Option(
            "--overlap", metavar="TOKENS", help="Tokens of the last window that ordinary layers keep while reading."
        ),
    ] = None
    memory_dtype: MemoryDtype = None
    read_span: ReadSpan = None

    @property
    def focus(self) -> dict[str, Any]:
        """What was given, as `focus_options` has it."""
        return focus_options(**vars(self))


@dataclasses.dataclass(frozen=True)
class Asking:
    """Whom to ask, what of, and how answers are made."""

    model: Model = None
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PATTERN",
            help="Ask only these documents: names, globs such as 'docs/*.md' (* also matches /), or folders; may be repeated.",
        ),
    ] = None
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Longest answer.")] = 200
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0.0, help="0: always the likeliest token.")
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p", metavar="P", min=0.0, max=1.0, help="Sample from the likeliest tokens of this total probability."
        ),
    ] = 1.0
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed for sampling.")] = 0
    retrieval: Annotated[
        str,
        typer.Option(
            "--retrieval",
            metavar="HOW",
            help="dense: attend to all of the memory; exact: each query takes its k best keys; approximate: the same through an index (needs faiss); auto: as the model's options say, else dense up to 131,072 tokens and approximate beyond.",
        ),
    ] = "auto"
    k: K = None
    encoding: Encoding = None
    dtype: Dtype = None
    threads: Threads = None
    ray_address: RayAddress = None
    shard_timeout: ShardTimeout = None

    @property
    def sampling(self) -> Sampling:
        """How the tokens of an answer are chosen."""
        from longfocus.answering import Sampling

        return Sampling(self.max_new_tokens, self.temperature, self.top_p, self.seed)


def in_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer takes it: in place of each parameter that is a group of options stand the group's fields."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        if isinstance(group, type) and dataclasses.is_dataclass(group):
            groups[parameter.name] = group
            parameters += inspect.signature(group, eval_str=True).parameters.values()
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        command(**given)

    by_name = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    return run
