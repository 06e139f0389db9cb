"""Experiments of the Focused Transformer paper (arXiv 2307.03170), and some that it left open, one a file: trained, evaluated,
drawn beside the paper's numbers. This table imports nothing heavy; an experiment's module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from longfocus.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from longfocus.reproduce.experiment import Experiment

EXPERIMENTS = {
    "dictionary": "longfocus.reproduce.dictionary:EXPERIMENT",
    "distraction": "longfocus.reproduce.distraction:EXPERIMENT",
    "multidoc": "longfocus.reproduce.multidoc:EXPERIMENT",
    "differentiable": "longfocus.reproduce.differentiable:EXPERIMENT",
    "extending": "longfocus.reproduce.extending:EXPERIMENT",
    "single-document": "longfocus.reproduce.single_document:EXPERIMENT",
    "memory-length": "longfocus.reproduce.memory_length:EXPERIMENT",
    "gate": "longfocus.reproduce.gate:EXPERIMENT",
    "then-memorizing": "longfocus.reproduce.then_memorizing:EXPERIMENT",
    "memory-positions": "longfocus.reproduce.memory_positions:EXPERIMENT",
    "negatives": "longfocus.reproduce.negatives:EXPERIMENT",
    "contrast": "longfocus.reproduce.contrast:EXPERIMENT",
    "mixed-shares": "longfocus.reproduce.mixed_shares:EXPERIMENT",
    "memory-layer": "longfocus.reproduce.memory_layer:EXPERIMENT",
    "keys": "longfocus.reproduce.keys:EXPERIMENT",
}
"""Name -> module:object, in the order of `longfocus reproduce --list`."""


def find_experiment(name: str) -> Experiment:
    """An experiment by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(
            f"{name} is not an experiment.{did_you_mean(name, list(EXPERIMENTS))} Known: {', '.join(EXPERIMENTS)}."
        )
    module, _, attribute = EXPERIMENTS[name].partition(":")
    found: Experiment = getattr(import_module(module), attribute)
    return found
