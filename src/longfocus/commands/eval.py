"""`longfocus eval`: does a model use its context? Tasks over a model, as tables, JSON and plots."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longfocus.commands import common
from longfocus.errors import ConfigError

if TYPE_CHECKING:
    from longfocus.evaluation.record import Results
    from longfocus.evaluation.run import Step
    from longfocus.subjects.contract import Completes
    from longfocus.tasks.contract import Task
    from longfocus.tasks.texts import Texts

EPILOG = """Examples:

  longfocus eval --list

  longfocus eval passkey --lengths 2k,8k --samples 20

  longfocus eval passkey perplexity --model path/to/model --plain --out eval/mine-plain

  longfocus eval passkey --set 'passkey.depths=[0, 0.25, 0.5, 0.75, 1]' --set 'passkey.haystacks=[books]'

  longfocus eval all --quick

  longfocus eval passkey --endpoint http://localhost:8000/v1 --model my-model --chat

  longfocus report eval/default eval/mine-plain
"""


def evaluate(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(metavar="TASK...", help="Tasks by name, Python files with tasks of your own, or all."),
    ] = None,
    list_tasks: Annotated[bool, typer.Option("--list", help="List the tasks and their options, and exit.")] = False,
    model: Annotated[
        str,
        typer.Option("--model", "-m", metavar="PATH|ID", help="Model folder, hub id, adapter, or name at an endpoint."),
    ] = "default",
    plain: Annotated[
        bool, typer.Option("--plain", help="Full attention, as transformers alone runs it, instead of a memory.")
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", metavar="N,N,…", help="Lengths in tokens, for tasks that have them: 2k,8k,32k."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", metavar="N", min=1, help="Samples a point, for tasks that have them.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of all tasks.  [default: 0]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: all tasks in minutes.")] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TASK.KEY=VALUE", help="Change an option of a task; repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Where results go, a folder a task.  [default: eval/MODEL]"),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew where an earlier run stopped or ended.")] = False,
    name: Annotated[str | None, typer.Option("--name", metavar="TEXT", help="What tables call the model.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            help="Folder of the evaluation sets.  [default: $LONGFOCUS_DATA or ../shared/data]",
        ),
    ] = None,
    own_texts: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="NAME=PATH",
            help="Texts of your own in place of a set, for instance books=novel.txt; repeatable.",
        ),
    ] = None,
    layers: common.Layers = None,
    window: common.Window = None,
    retrieval: common.RetrievalOption = None,
    k: common.K = None,
    memory_dtype: common.MemoryDtype = None,
    read_span: common.ReadSpan = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="Of the weights: float32, bfloat16 or float16.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="NAME", help="cpu or cuda.")] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            metavar="URL",
            help="OpenAI-compatible endpoint, up to /v1; the key is read from OPENAI_API_KEY.",
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask the endpoint through chat messages.")] = False,
    longest: Annotated[
        str | None, typer.Option("--longest", metavar="TOKENS", help="Tokens that the endpoint's model takes.")
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option("--tokenizer", metavar="PATH|ID", help="Model whose tokenizer measures prompts for an endpoint."),
    ] = "default",
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Seconds for one answer of an endpoint.")
    ] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    threads: common.Threads = None,
) -> None:
    """Measure whether a model uses its context: tasks, each with 95% intervals, a table, a JSON file and a plot.

    A run that was stopped goes on when the same command is given again.
    """
    from longfocus import tasks as known

    if list_tasks:
        _list(as_json)
        return
    wanted = _wanted(tasks or [], list(known.TASKS))
    classes = [known.find_task(task) for task in wanted]
    from longfocus.tasks.texts import Texts

    texts = Texts(data, _pairs(own_texts or []))
    made = _make(classes, texts, lengths, samples, seed, quick, changes or [])
    focus = common.focus_options(
        memory_layers=layers, window=window, retrieval=retrieval, k=k, memory_dtype=memory_dtype, read_span=read_span
    )
    subject = _open(
        model, plain, name, dtype, device, focus, threads,
        endpoint=endpoint, chat=chat, longest=longest, tokenizer=tokenizer, timeout=timeout,
    )  # fmt: skip
    folder = out or Path("eval") / re.sub(r"[^\w.=-]+", "-", subject.name).strip("-")
    found = _run(made, subject, folder, fresh, skip=bool(tasks) and "all" in (tasks or []))
    _show(found, folder, as_json)
    if any(result.stopped for result in found):
        raise typer.Exit(130)


def _wanted(given: Sequence[str], known: Sequence[str]) -> list[str]:
    if not given:
        raise ConfigError(
            f"No task given; expected some of {', '.join(known)}, or all. longfocus eval --list says more."
        )
    return list(dict.fromkeys(name for task in given for name in (known if task == "all" else [task])))


def _pairs(given: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--text {text!r} given, expected NAME=PATH, for instance books=novel.txt.")
        pairs[name] = path
    return pairs


def _make(
    classes: Sequence[type[Task]],
    texts: Texts,
    lengths: str | None,
    samples: int | None,
    seed: int | None,
    quick: bool,
    changes: Sequence[str],
) -> list[Task]:
    """Tasks with their options; everything wrong shows here, before a model is loaded."""
    from longfocus.settings import apply_change, validated

    by_name: dict[str, list[str]] = {}
    names = [task.name for task in classes]
    for change in changes:
        task_name, dot, _ = change.partition("=")[0].partition(".")
        if task_name not in names or not dot:
            raise ConfigError(f"--set {change!r} given, expected TASK.KEY=VALUE with one of {', '.join(names)}.")
        by_name.setdefault(task_name, []).append(change.removeprefix(f"{task_name}."))
    made = []
    for task in classes:
        raw: dict[str, Any] = dict(task.quick) if quick else {}
        fields = task.Options.model_fields
        for key, value in (("lengths", lengths), ("samples", samples), ("seed", seed)):
            if value is not None and key in fields:
                raw[key] = value
        for change in by_name.get(task.name, []):
            apply_change(raw, change)
        made.append(task(validated(task.Options, raw, f"options of {task.name}"), texts))
    return made


def _open(
    model: str,
    plain: bool,
    name: str | None,
    dtype: str | None,
    device: str | None,
    focus: dict[str, Any],
    threads: int | None,
    *,
    endpoint: str | None,
    chat: bool,
    longest: str | None,
    tokenizer: str,
    timeout: float,
) -> Completes:
    from longfocus.subjects.open import open_endpoint, open_local

    common.settle(threads)
    if endpoint is not None:
        from longfocus.settings import size_of

        if plain or focus or dtype or device:
            raise ConfigError(
                "--endpoint: the model runs elsewhere; leave --plain, memory options, --dtype and --device out."
            )
        limit = size_of(longest) if longest else None
        return open_endpoint(
            endpoint, model, tokenizer=tokenizer, name=name, chat=chat, longest=limit, timeout_s=timeout
        )
    if chat or longest:
        raise ConfigError("--chat and --longest go with --endpoint.")
    defaults = {} if plain else {**common.CLI_DEFAULTS, **focus}
    return open_local(
        model,
        plain=plain,
        name=name,
        dtype=dtype,
        device=device,
        announce=common.note,
        **(focus if plain else defaults),
    )


def _run(made: Sequence[Task], subject: Completes, folder: Path, fresh: bool, *, skip: bool) -> list[Results]:
    """Each task in turn. With `all`, one that this model or machine cannot do is said and left out."""
    from longfocus.errors import EndpointError, EvaluationError, InputError
    from longfocus.evaluation.run import evaluate as measure

    found: list[Results] = []
    for task in made:
        common.note(f"{task.title} on {subject.name} …")
        with _Bar(task.name) as bar:
            try:
                found.append(measure(task, subject, folder / task.name, fresh=fresh, step=bar.step))
            except (EvaluationError, InputError) as error:
                if not skip or isinstance(error, EndpointError):
                    raise
                common.note(f"Left out: {error}")
                continue
        for point, why in found[-1].refused.items():
            common.note(f"Not measured: {point}: {why}")
        if found[-1].stopped:
            common.note(f"Stopped; what was measured is in {folder / task.name}, and the same command goes on.")
            break
    return found


def _show(found: Sequence[Results], folder: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"out": str(folder), "results": [result.to_dict() for result in found]}))
        return
    from longfocus.evaluation.tables import table

    for result in found:
        print(f"\n{result.title}: {result.model}\n{result.paper}\n\n{table(result)}")
    common.note(f"\nResults, samples and plots: {folder}")


class _Bar:
    """Progress: a bar on a terminal, a line now and then elsewhere."""

    every_s = 15

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self.name, self.terminal = name, console.is_terminal
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not self.terminal,
        )
        self.task = self.bar.add_task(name, total=None)
        self.told = time.monotonic()

    def __enter__(self) -> _Bar:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    @property
    def step(self) -> Step:
        """To be told after each sample."""

        def step(point: Any, done: int, total: int) -> None:
            self.bar.update(self.task, completed=done, total=total, description=f"{self.name} {point.key}")
            if not self.terminal and time.monotonic() - self.told > self.every_s:
                self.told = time.monotonic()
                common.note(f"{self.name}: {done} of {total} samples, at {point.key} …")

        return step


def _list(as_json: bool) -> None:
    from longfocus.tasks import TASKS, find_task

    classes = [find_task(name) for name in TASKS]
    if as_json:
        entries = [
            {
                "name": task.name,
                "title": task.title,
                "paper": task.paper,
                "measures": [measure.name for measure in task.measures],
                "needs": task.needs,
                "options": task.Options.model_json_schema()["properties"],
                "quick": task.quick,
            }
            for task in classes
        ]
        print(json.dumps(entries))
        return
    for task in classes:
        needs = {"complete": "any model", "losses": "a model that runs here", "memory": "a model with a memory"}[
            task.needs
        ]
        print(
            f"{task.name}: {task.title} ({needs})\n    {(task.__doc__ or '').strip().splitlines()[0]}\n    {task.paper}"
        )
        for key, option in task.Options.model_fields.items():
            print(f"    --set {task.name}.{key}={json.dumps(option.default)}")
        print()
