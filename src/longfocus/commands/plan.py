"""`longfocus plan`: what a recipe will take, before it is run. Loads no weights and reads no data."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longfocus.commands.models import settle
from longfocus.commands.options import AsJson, Changes, Threads
from longfocus.commands.output import note
from longfocus.errors import ConfigError

if TYPE_CHECKING:
    from longfocus.training.plan import Measured, Plan

EPILOG = """Examples:

  longfocus plan recipes/smollm2-135m-quick.yaml

  longfocus plan recipes/smollm2-135m-quick.yaml --measure

  longfocus plan recipes/longllama-3b.yaml --device h100 --devices 8

  longfocus plan recipes/longllama-7b.yaml --config recipes/configs/open_llama_7b --device a100 --devices 8 --json

Estimates, from FLOPs and a device's usual speed; --measure runs a few real steps of the recipe on this machine, on random tokens.
"""


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="As for train.")],
    changes: Changes = None,
    device: Annotated[
        str,
        typer.Option("--device", metavar="NAME", help="cpu (this machine), a100, h100, h200, l4, rtx4090, …"),
    ] = "cpu",
    devices: Annotated[int, typer.Option("--devices", metavar="N", min=1, help="Devices, one process each.")] = 1,
    flops_per_s: Annotated[
        float | None,
        typer.Option("--flops-per-s", metavar="X", min=1.0, help="What one device sustains, for instance 4e14."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="DIR", help="Folder with the model's config.json, where the model is not at hand."
        ),
    ] = None,
    measured: Annotated[
        bool, typer.Option("--measure", help="Also run a few steps here and show what they took.")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps for --measure, after one.")] = 2,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """Say what a training recipe will take: weights, FLOPs, memory, hours."""
    from longfocus.training.recipes import Recipe

    if flops_per_s is not None and not math.isfinite(flops_per_s):
        raise ConfigError(f"--flops-per-s: {flops_per_s} given, expected a number such as 4e14.")
    checked = Recipe.read(recipe, changes or [])
    settle(threads)
    from longfocus.training.plan import measure
    from longfocus.training.plan import plan as make

    made = make(checked, device=device, devices=devices, flops_per_s=flops_per_s, config=config)
    found = None
    if measured:
        note(f"Running {steps + 1} steps of {made.tokens_per_step // devices:,} tokens …")
        found = measure(checked, steps)
    if as_json:
        print(json.dumps({**made.to_dict(), "measured": None if found is None else vars(found)}))
        return
    for name, value in _lines(made):
        print(f"{name:<13}{value}")
    if found is not None:
        print()
        for name, value in _measured_lines(made, found):
            print(f"{name:<13}{value}")


def _lines(made: Plan) -> list[tuple[str, str]]:
    flops, memory = made.flops_per_token, made.memory
    lines = [
        ("Model", f"{made.model}, {made.weights:,} weights"),
        ("Trained", f"{made.trained:,} ({100 * made.trained / made.weights:.1f}%)"),
        ("Step", f"{made.tokens_per_step:,} tokens in all, rows of {made.window:,}"),
        ("Run", f"{made.steps:,} steps, {made.tokens:,} tokens"),
    ]
    if made.memory_layers:
        share = flops["additional"] / (flops["total"] - flops["additional"])
        most = flops["additional_most"] / (flops["total"] - flops["additional"])
        lines += [
            ("Memory", f"layers {', '.join(map(str, made.memory_layers))}"),
            (
                "Contexts",
                f"{made.mean_windows:.2f} additional windows a row on average"
                + (f", {made.most_windows:.2f} at most" if made.most_windows > made.mean_windows + 0.005 else ""),
            ),
            (
                "Extra",
                f"{_flops(flops['additional'])} a token for them, {100 * share:.1f}% of the rest"
                + (f" ({100 * most:.1f}% at most)" if most > share + 0.0005 else ""),
            ),
        ]
    again = f" + {_flops(flops['recomputed'])} recomputed" if flops["recomputed"] else ""
    lines.append(
        (
            "FLOPs",
            f"{_flops(flops['total'])} a token: {_flops(flops['forward'])} forward + {_flops(flops['backward'])} "
            f"backward{again}" + (f" + {_flops(flops['additional'])} contexts" if flops["additional"] else ""),
        )
    )
    parts = [f"{name} {_bytes(value)}" for name, value in memory.items() if name != "peak" and value]
    lines += [
        (
            "Peak memory",
            f"{_bytes(memory['peak'])} of {_bytes(made.device_memory)} on each device"
            + ("" if made.fits else ": too much"),
        ),
        ("", "its parts, not all at one time: " + ", ".join(parts)),
        ("Device", f"{made.devices} × {made.device}, {made.precision}, {_flops(made.flops_per_s)}/s each"),
        ("Speed", f"{made.tokens_per_s:,.0f} tokens/s"),
        ("Time", _hours(made.hours)),
    ]
    return lines + [("", text) for text in made.notes]


def _measured_lines(made: Plan, found: Measured) -> list[tuple[str, str]]:
    hours = made.tokens / (found.tokens_per_s * 3600)
    here = f"{found.tokens_per_s:,.0f} tokens/s, {found.seconds_per_step:.1f} s a step of one process"
    if made.devices == 1:
        here += f" (estimated {made.tokens_per_s:,.0f})"
    return [
        ("Measured", f"on this machine, {found.steps} steps after one"),
        ("Speed", here),
        (
            "Peak memory",
            f"{_bytes(found.peak_bytes)} (estimated {_bytes(made.memory['peak'])}), and {_bytes(found.program_bytes)} "
            "of the program itself",
        ),
        ("Time", f"{_hours(hours)} on one such machine"),
    ]


def _flops(value: float) -> str:
    return _scaled(value, "FLOP")


def _bytes(value: float) -> str:
    return _scaled(value, "B")


def _scaled(value: float, unit: str) -> str:
    prefixes = ["", "k", "M", "G", "T", "P"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        del prefixes[0]
    return f"{value:.3g} {prefixes[0]}{unit}"


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.0f} minutes"
    return f"{hours:,.1f} hours" if hours < 48 else f"{hours:,.0f} hours ({hours / 24:,.1f} days)"
