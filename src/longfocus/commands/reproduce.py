"""`longfocus reproduce`: the paper's experiments, trained and measured anew, beside the paper's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from longfocus.commands import options
from longfocus.commands.models import settle
from longfocus.commands.output import note
from longfocus.errors import ConfigError

EPILOG = """Examples:

  longfocus reproduce --list

  longfocus reproduce dictionary --smoke

  longfocus reproduce dictionary --scale small

  longfocus reproduce dictionary --scale paper --check

  longfocus reproduce distraction --scale paper --recipes recipes/distraction

  longfocus reproduce extending --seeds 1

An experiment that was stopped (Ctrl-C, kill, power) goes on where it was when started again.
"""


def reproduce(
    experiment: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The experiment; --list says which there are.")
    ] = None,
    list_experiments: Annotated[bool, typer.Option("--list", help="List the experiments and exit.")] = False,
    scale: Annotated[
        str | None,
        typer.Option(
            "--scale",
            metavar="SCALE",
            help="small: hours on 2 CPU cores; paper: the paper's own recipe, for GPUs.  [default: small]",
        ),
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="A minute or two: that it runs, not that the paper is right.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Validate the recipes, build the models' shapes, print both, stop.")
    ] = False,
    recipes: Annotated[
        Path | None,
        typer.Option(
            "--recipes",
            metavar="FOLDER",
            help="Write the training recipes there and stop, to be trained by longfocus train (on several GPUs: torchrun), in "
            "the printed order; later calls find those models.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", metavar="N", min=1, help="Seeds of each model.  [default: the scale's]")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Where models and results of all experiments go.")
    ] = Path("out/reproduce"),
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="FOLDER", help="Folder of the text sets.  [default: $LONGFOCUS_DATA or ../shared/data]"
        ),
    ] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option(
            "--text", metavar="NAME=PATH", help="Texts of your own that are measured in place of a set; repeatable."
        ),
    ] = None,
    threads: options.Threads = None,
) -> None:
    """Rerun an experiment of the paper, or run one that it left open: train, evaluate, draw beside the paper's numbers, check claims."""
    from longfocus import reproduce as known

    if list_experiments:
        for name in known.EXPERIMENTS:
            found = known.find_experiment(name)
            print(f"{name}: {found.title} ({found.paper or 'not in the paper'})")
            for claim in found.claims:
                print(f"    {claim.text}")
        return
    if experiment is None:
        raise ConfigError(f"NAME: none given, expected one of {', '.join(known.EXPERIMENTS)}.")
    if smoke and scale is not None:
        raise ConfigError(f"--smoke and --scale {scale} given; --smoke is a scale of its own, give one of them.")
    chosen, wanted = known.find_experiment(experiment), "smoke" if smoke else scale or "small"
    settle(threads)
    from longfocus.commands.progress import Bar, tokenising
    from longfocus.reproduce import run

    if check:
        print(json.dumps(run.check(chosen, wanted, data), indent=1))
        return
    if recipes is not None:
        for path in run.write_recipes(chosen, wanted, out, recipes, data=data, seeds=seeds):
            print(path)
        return
    with tokenising() as progress:
        report = run.reproduce(
            chosen,
            wanted,
            out,
            data=data,
            own_texts=options.own_texts(texts or []),
            seeds=seeds,
            announce=note,
            progress=progress,
            bar=Bar,
        )
    if report.stopped:
        note("Stopped; start the same command again to go on.")
    print(json.dumps({"page": str(report.folder / "page.md"), "stopped": report.stopped}))
