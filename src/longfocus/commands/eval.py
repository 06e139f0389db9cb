"""`longfocus eval`: does a model use its context? Tasks over a model, as tables, JSON and plots."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longfocus.commands import options
from longfocus.commands.models import check_dtype, settle
from longfocus.commands.options import CLI_DEFAULTS, focus_options
from longfocus.commands.output import note
from longfocus.commands.progress import Bar
from longfocus.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from longfocus.evaluation.record import Results
    from longfocus.subjects.contract import Completes
    from longfocus.tasks.contract import Task
    from longfocus.tasks.texts import Texts

EPILOG = """Examples:

  longfocus eval --list

  longfocus eval passkey --lengths 2k,8k --samples 20

  longfocus eval passkey perplexity --model path/to/model --plain --out eval/mine-plain

  longfocus eval perplexity --focus balance_tokens=500 --focus window_first=kept --out eval/less-balanced

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
    list_tasks: Annotated[
        bool, typer.Option("--list", help="List the tasks (all, or those named) and their options, and exit.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="PATH|ID",
            help="Model folder, hub id, adapter, or name at an endpoint.  [default: default]",
        ),
    ] = None,
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
    layers: options.Layers = None,
    window: options.Window = None,
    retrieval: options.RetrievalOption = None,
    k: options.K = None,
    memory_dtype: options.MemoryDtype = None,
    read_span: options.ReadSpan = None,
    focus_changes: options.FocusChanges = None,
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
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH|ID",
            help="Model whose tokenizer measures prompts for an endpoint.  [default: default]",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="S", min=0.1, help="Seconds for one answer of an endpoint.  [default: 600]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    threads: options.Threads = None,
) -> None:
    """Measure whether a model uses its context: tasks, each with 95% intervals, a table, a JSON file and a plot.

    A run that was stopped goes on when the same command is given again.
    """
    from longfocus import tasks as known

    if list_tasks:
        named = [] if not tasks or "all" in tasks else tasks
        _list([known.find_task(task) for task in named or known.TASKS], as_json)
        return
    every = "all" in (tasks or [])
    classes = [known.find_task(task) for task in _wanted(tasks or [], list(known.TASKS))]
    focus = focus_options(
        focus_changes,
        memory_layers=layers,
        window=window,
        retrieval=retrieval,
        k=k,
        memory_dtype=memory_dtype,
        read_span=read_span,
    )
    local = {name: value for name, value in {"dtype": dtype, "device": device}.items() if value is not None}
    remote = {"chat": chat or None, "longest": longest, "tokenizer": tokenizer, "timeout": timeout}
    _check_model(model, endpoint, plain, {**local, **focus}, remote)
    kind = "an endpoint" if endpoint else "a plain model" if plain else "a model with a memory"
    classes = _able(classes, kind, skip=every)
    texts = _texts(data, own_texts or [])
    made = _make(classes, texts, lengths, samples, seed, quick, changes or [], every)
    settle(threads)
    if endpoint is not None:
        subject = _open_endpoint(endpoint, str(model), name, remote)
    else:
        from longfocus.subjects.open import open_local

        chosen = {**local, **({} if plain else {**CLI_DEFAULTS, **focus})}
        subject = open_local(model or "default", plain=plain, name=name, announce=note, **chosen)
    folder = out or Path("eval") / (re.sub(r"[^\w.=-]+", "-", subject.name).strip("-.") or "model")
    found = _run(made, subject, folder, fresh, skip=every)
    _show(found, folder, as_json)
    for part in texts.unused:
        note(f"No task asked for the text {part!r}: --text had no effect there.")
    if any(result.stopped for result in found):
        raise typer.Exit(130)


def _wanted(given: Sequence[str], known: Sequence[str]) -> list[str]:
    if not given:
        raise ConfigError(
            f"No task given; expected some of {', '.join(known)}, or all. longfocus eval --list says more."
        )
    return list(dict.fromkeys(name for task in given for name in (known if task == "all" else [task])))


def _check_model(
    model: str | None, endpoint: str | None, plain: bool, local: dict[str, Any], remote: dict[str, Any]
) -> None:
    """Options that do not go together, before anything is loaded."""
    from longfocus.config import FocusConfig

    given_remote = [f"--{name}" for name, value in remote.items() if value is not None]
    given_local = [f"--{name.replace('_', '-')}" for name in local]
    if endpoint is None:
        if given_remote:
            raise ConfigError(f"{', '.join(given_remote)}: for a model behind an endpoint; give --endpoint too.")
        if plain and (focus := [name for name in given_local if name not in ("--dtype", "--device")]):
            raise ConfigError(f"{', '.join(focus)}: a plain model has no memory; leave --plain or these options out.")
        check_dtype(local.get("dtype"))
        FocusConfig.from_dict({name: value for name, value in local.items() if name not in ("dtype", "device")})
        return
    if plain or given_local:
        wrong = ["--plain"] * plain + given_local
        raise ConfigError(f"--endpoint: the model runs elsewhere; leave {', '.join(wrong)} out.")
    if model is None:
        raise ConfigError("--endpoint: say with --model what the model is called there.")
    if remote["longest"] is not None:
        from longfocus.settings import size_of

        try:
            remote["longest"] = size_of(remote["longest"])
        except ConfigError as error:
            raise ConfigError(f"--longest: {error}") from None


def _able(classes: Sequence[type[Task]], kind: str, *, skip: bool) -> list[type[Task]]:
    """The tasks that such a model can be measured on. With `all`, the others are said and left out."""
    from longfocus.errors import UnsuitableError
    from longfocus.subjects.contract import WHY_NOT

    able = {"an endpoint": ("complete",), "a plain model": ("complete", "losses")}.get(kind)
    found = []
    for task in classes:
        if able is None or task.needs in able:
            found.append(task)
            continue
        why = f"{task.name} cannot be measured on {kind}: {WHY_NOT[task.needs]}."
        if not skip:
            raise UnsuitableError(why)
        note(f"Left out: {why}")
    return found


def _texts(data: Path | None, own: Sequence[str]) -> Texts:
    from longfocus.errors import InputError
    from longfocus.tasks.texts import Texts

    if data is not None and not data.is_dir():
        raise InputError(f"--data: {data} is not a folder; give the one that holds the sets, see docs/evaluate.md.")
    found = options.own_texts(own)
    for name, path in found.items():
        if not Path(path).exists():
            raise InputError(f"--text {name}={path}: {path} does not exist.")
    return Texts(data, found)


def _make(
    classes: Sequence[type[Task]],
    texts: Texts,
    lengths: str | None,
    samples: int | None,
    seed: int | None,
    quick: bool,
    changes: Sequence[str],
    every: bool,
) -> list[Task]:
    """Tasks with their options; everything wrong shows here, before a model is loaded."""
    from longfocus.settings import apply_change, sizes_of, validated

    names = [task.name for task in classes]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ConfigError(f"Two tasks are named {twice[0]!r}; give each its own name, or its own command.")
    by_name: dict[str, list[str]] = {}
    for change in changes:
        key, equals, _ = change.partition("=")
        task_name, dot, rest = key.partition(".")
        if task_name not in names or not dot or not rest or not equals:
            hint = did_you_mean(task_name, names) if equals and rest else ""
            raise ConfigError(f"--set {change!r} given, expected TASK.KEY=VALUE with one of {', '.join(names)}.{hint}")
        by_name.setdefault(task_name, []).append(change.removeprefix(f"{task_name}."))
    given: dict[str, Any] = {"samples": samples, "seed": seed}
    if lengths is not None:
        try:
            given["lengths"] = sizes_of(lengths)
        except ConfigError as error:
            raise ConfigError(f"--lengths: {error}") from None
    made = []
    for task in classes:
        raw: dict[str, Any] = copy.deepcopy(dict(task.quick)) if quick else {}
        for key, value in given.items():
            if value is None:
                continue
            if key in task.Options.model_fields:
                raw[key] = value
            elif not every:
                note(f"{task.name} has no {key}: --{key} does not change it.")
        for change in by_name.get(task.name, []):
            apply_change(raw, change)
        made.append(task(validated(task.Options, raw, f"options of {task.name}"), texts))
    return made


def _open_endpoint(url: str, model: str, name: str | None, options: dict[str, Any]) -> Completes:
    from longfocus.subjects.open import open_endpoint

    return open_endpoint(
        url,
        model,
        tokenizer=options["tokenizer"] or "default",
        name=name,
        chat=bool(options["chat"]),
        longest=options["longest"],
        timeout_s=options["timeout"] or 600.0,
    )


def _run(made: Sequence[Task], subject: Completes, folder: Path, fresh: bool, *, skip: bool) -> list[Results]:
    """Each task in turn. With `all`, one that does not fit this model, or whose texts are missing, is said and left out."""
    from longfocus.errors import InputError, UnsuitableError, UnsupportedCallError
    from longfocus.evaluation.run import evaluate as measure

    found: list[Results] = []
    for task in made:
        note(f"{task.title} on {subject.name} …")
        with Bar(task.name) as bar:
            try:
                found.append(measure(task, subject, folder / task.name, fresh=fresh, step=bar.step))
            except (UnsuitableError, UnsupportedCallError, InputError) as error:
                if not skip:
                    raise
                note(f"Left out: {error}")
                continue
        for point, why in found[-1].refused.items():
            note(f"Not measured: {point}: {why}")
        if found[-1].stopped:
            note(f"Stopped; what was measured is in {folder / task.name}, and the same command goes on.")
            break
    if not found:
        raise UnsuitableError("Nothing was measured: no task fits this model, these options and these texts.")
    return found


def _show(found: Sequence[Results], folder: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"out": str(folder), "results": [result.to_dict() for result in found]}))
        return
    from longfocus.evaluation.tables import table

    for result in found:
        print(f"\n{result.title}: {result.model}\n{result.paper}\n\n{table(result)}")
    note(f"\nResults, samples and plots: {folder}")


def _list(classes: Sequence[type[Task]], as_json: bool) -> None:
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
            f"{task.name}: {task.title} ({needs})\n    {(task.__doc__ or task.title).strip().splitlines()[0]}\n    {task.paper}"
        )
        for key, value in task.Options().model_dump(mode="json").items():
            meaning = " ".join((task.Options.model_fields[key].description or "").split())
            print(f"    --set {task.name}.{key}={json.dumps(value)}" + (f"\n        {meaning}" if meaning else ""))
        print()
