"""What an experiment has come to, while it runs and at its end."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from longfocus.reproduce.claims import Number
from longfocus.reproduce.experiment import Experiment, Scale


@dataclass
class Trained:
    """A finished training run."""

    model: str
    seed: int
    steps: int
    tokens: int
    loss: float | None
    """Of the last log."""
    accuracy: float | None


@dataclass
class Report:
    """What an experiment came to so far."""

    experiment: Experiment
    scale_name: str
    scale: Scale
    seeds: int
    folder: Path
    numbers: list[Number] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """`evaluation: point` -> why it was not measured."""
    stopped: bool = False
    """Something is missing; the same command goes on."""
    command: list[str] = field(default_factory=lambda: ["longfocus", *sys.argv[1:]])
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
