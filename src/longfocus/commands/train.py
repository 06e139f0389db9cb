"""`longfocus train`: run a recipe, or go on with a run that was stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from longfocus.commands.models import settle
from longfocus.commands.options import Changes, Threads
from longfocus.commands.output import note

EPILOG = """Examples:

  longfocus train recipes/smollm2-135m-quick.yaml

  longfocus train recipes/smollm2-135m.yaml --set run.output=runs/mine --set optimizer.lr=5e-4

  longfocus train recipes/smollm2-135m.yaml --check

  torchrun --nproc-per-node 2 -m longfocus.cli train recipes/smollm2-135m.yaml --set crossbatch.across_processes=true

A run that was stopped (Ctrl-C, kill, power) goes on from its newest checkpoint when started again.
"""


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="What to train, on what, how.")],
    changes: Changes = None,
    check: Annotated[
        bool, typer.Option("--check", help="Validate the recipe, print it with every default, stop.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew; remove the run's checkpoints.")] = False,
    threads: Threads = None,
) -> None:
    """Extend a checkpoint's context: crossbatch training, or one of its baselines, from a recipe."""
    from longfocus.training.recipes import Recipe

    checked = Recipe.read(recipe, changes or [])
    if check:
        print(checked.dump(), end="")
        return
    settle(threads)
    from longfocus.commands.progress import tokenising
    from longfocus.training.run import run

    main = int(os.environ.get("RANK", 0)) == 0
    with tokenising() as progress:
        result = run(
            checked,
            announce=note if main else lambda text: None,
            progress=progress if main else None,
            fresh=fresh,
        )
    if main:
        if result.stopped:
            note(f"Stopped after step {result.steps}; start the same command again to go on.")
        print(
            json.dumps(
                {
                    "output": str(result.output),
                    "model": None if result.stopped else str(result.output / "model"),
                    "steps": result.steps,
                    "tokens": result.tokens,
                    "stopped": result.stopped,
                }
            )
        )
