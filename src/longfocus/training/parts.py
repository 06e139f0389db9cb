"""Which weights a run trains.

names = select(model, recipe.train, layers)    # the others are frozen
trained_weights(model)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from longfocus.errors import ConfigError
from longfocus.model.families import Anatomy
from longfocus.training.recipes import Train


def select(model: Any, train: Train, memory_layers: Iterable[int]) -> list[str]:
    """Freeze everything but what the recipe trains.

    Args:
        model: a `transformers` model, not yet wrapped.
        memory_layers: the focused model's; used by `memory_attention`.

    Returns:
        Names of the trained parameters.

    Raises:
        ConfigError: a layer is out of range, or nothing is left to train.
    """
    anatomy = Anatomy(model)
    layers = list(train.layers) if train.layers is not None else list(range(anatomy.num_layers))
    wrong = [layer for layer in layers if layer >= anatomy.num_layers]
    if wrong:
        raise ConfigError(f"train.layers: {wrong} given, expected indices from 0 to {anatomy.num_layers - 1}.")
    if train.what == "all":
        modules = [model]
    elif train.what == "layers":
        modules = [anatomy.layer(layer) for layer in layers]
    else:
        chosen = sorted(memory_layers) if train.what == "memory_attention" else layers
        modules = [anatomy.attentions[layer] for layer in chosen]
    wanted = {id(parameter) for module in modules for parameter in module.parameters()}
    names = []
    for name, parameter in model.named_parameters():
        trained = id(parameter) in wanted and (train.names is None or any(part in name for part in train.names))
        parameter.requires_grad_(trained)
        if trained:
            names.append(name)
    if not names:
        raise ConfigError(f"train: {train.model_dump(exclude_none=True)} leaves no weight to train.")
    return names


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights that are being trained, by name."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
