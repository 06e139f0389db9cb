"""`longfocus lm-eval`: lm-evaluation-harness, with our models in it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from longfocus.commands.models import settle
from longfocus.errors import ConfigError

EPILOG = """Examples:

  longfocus lm-eval --tasks hellaswag --limit 100

  longfocus lm-eval --model_args pretrained=default,plain=true --tasks hellaswag --limit 100

  longfocus lm-eval --model_args pretrained=path/to/model,memory_layers=6+17,max_length=32k --tasks my_task --include_path tasks/

  longfocus lm-eval run --help

  longfocus lm-eval ls tasks
"""

CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Everything is for lm_eval; only a --help at the very beginning is ours."""
_NOT_RUNS = ("ls", "validate")


def lm_eval(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGUMENT...", help="As lm_eval takes them; the model is longfocus unless --model says otherwise."
        ),
    ] = None,
) -> None:
    """Run lm-evaluation-harness with a model of ours: any of its tasks, with a memory or without.

    Needs pip install 'longfocus[harness]'. In --model_args: pretrained=PATH|ID, plain=true for full attention, max_length=N,
    truncation=true, dtype=, and the options of the memory (memory_layers=6+17, window=, retrieval=, k=, read_span=, …).
    Tasks whose data is on the hub need a network.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("lm-evaluation-harness is not installed: pip install 'longfocus[harness]'")
    given = arguments or []
    if given and given[0] not in _NOT_RUNS:
        settle(None)
        import longfocus.evaluation.lm_eval_model  # noqa: F401  it registers the model
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm-eval", *with_our_model(given)]
    cli_evaluate()


def with_our_model(arguments: Sequence[str]) -> list[str]:
    """The arguments, and `--model longfocus` where a run names no model itself."""
    given = list(arguments)
    if given in ([], ["run"]) or given[0] in _NOT_RUNS:
        return given
    named = any(
        word.split("=")[0] in ("--model", "--config", "-h", "--help") or word[:2] in ("-M", "-C") for word in given
    )
    return given if named else [*given, "--model", "longfocus"]
