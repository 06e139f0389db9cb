"""One evaluation a file. This table imports nothing heavy; a task's module is imported when it is asked for."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from longfocus.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from longfocus.tasks.contract import Task

TASKS = {
    "passkey": "longfocus.tasks.passkey:Passkey",
    "perplexity": "longfocus.tasks.perplexity:Perplexity",
    "distraction": "longfocus.tasks.distraction:Distraction",
    "fewshot": "longfocus.tasks.fewshot:Fewshot",
    "qasper": "longfocus.tasks.qasper:Qasper",
    "valprobe": "longfocus.tasks.valprobe:ValProbe",
    "retrieval": "longfocus.tasks.retrieval:Retrieval",
    "dictionary": "longfocus.tasks.dictionary:DictionaryLookup",
    "copying": "longfocus.tasks.copying:Copying",
    "multidoc": "longfocus.tasks.multidoc:MultiDoc",
    "cost": "longfocus.tasks.cost:Cost",
}
"""Name -> module:class, in the order of `longfocus eval --list`."""


def find_task(name: str) -> type[Task]:
    """The class of a task, by its name or by a Python file of one's own that holds `TASK = TheClass`.

    Raises:
        ConfigError: no such task, or the file holds none.
    """
    if name in TASKS:
        module, _, attribute = TASKS[name].partition(":")
        found: type[Task] = getattr(import_module(module), attribute)
        return found
    if name.endswith(".py"):
        return _from_file(Path(name))
    raise ConfigError(
        f"{name} is not a task.{did_you_mean(name, list(TASKS))} Known: {', '.join(TASKS)}; or give a Python file."
    )


def _from_file(path: Path) -> type[Task]:
    from longfocus.tasks.contract import Task

    if not path.is_file():
        raise ConfigError(f"{path} is not there; give a known task or a Python file with TASK = TheClass.")
    specification = importlib.util.spec_from_file_location(f"longfocus_task_{path.stem}", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{path} cannot be loaded: {told}") from error
    found = getattr(module, "TASK", None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(
            f"{path} holds no task; at its end write TASK = TheClass, a subclass of longfocus.tasks.contract.Task."
        )
    if wrong := _unfinished(found):
        raise ConfigError(f"{path}: {found.__name__} {wrong}; see longfocus.tasks.contract.")
    return found


def _unfinished(task: type[Task]) -> str | None:
    """What a class lacks of a task."""
    from longfocus.subjects.contract import CAPABILITIES
    from longfocus.tasks.contract import Measure, TaskOptions

    if inspect.isabstract(task):
        return f"lacks {', '.join(sorted(task.__abstractmethods__))}"
    lacking = [name for name in ("name", "title", "paper", "measures") if not getattr(task, name, None)]
    if lacking:
        return f"lacks {', '.join(lacking)}"
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", task.name):
        return f"is named {task.name!r}, expected letters, digits, - and _: it names a folder"
    if task.name in TASKS:
        return f"is named {task.name!r}, like one of longfocus' own tasks; choose another name"
    if task.needs not in CAPABILITIES:
        return f"has needs = {task.needs!r}, expected one of {', '.join(CAPABILITIES)}"
    if not (isinstance(task.Options, type) and issubclass(task.Options, TaskOptions)):
        return "has Options that are no subclass of TaskOptions"
    measures = task.measures  # a property where they depend on the options
    if isinstance(measures, (tuple, list)) and not all(isinstance(measure, Measure) for measure in measures):
        return 'has measures that are no Measure, such as Measure("right", "share", "higher")'
    try:
        re.compile(getattr(task, "stop", None) or "")
    except (re.error, TypeError) as error:
        return f"has stop = {getattr(task, 'stop', None)!r}, expected a regular expression ({error})"
    return None
