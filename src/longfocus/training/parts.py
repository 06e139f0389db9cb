"""Which weights a run trains, and the file that holds only those.

names = select(model, recipe.train)            # the others are frozen
save_trained(model, path); load_trained(model, path)
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longfocus.errors import ConfigError, ModelNotFoundError
from longfocus.model.families import Anatomy
from longfocus.training.recipes import Train

FORMAT = "longfocus-weights-1"


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


def save_weights(
    weights: dict[str, torch.Tensor],
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    about: dict[str, str] | None = None,
) -> None:
    """Write weights to a safetensors file.

    Args:
        dtype: stored in it; None: as they are.
        about: strings for the file's metadata.
    """
    tensors = {name: weight.to("cpu", dtype or weight.dtype).contiguous() for name, weight in weights.items()}
    save_file(tensors, path, metadata={"format": FORMAT, **(about or {})})


def load_weights(model: Any, path: Path) -> dict[str, str]:
    """Put the file's weights in the place of the model's own of the same names.

    Returns:
        The file's metadata.

    Raises:
        ModelNotFoundError: no such file, or not one of ours.
        ConfigError: a weight is unknown to the model or of another shape.
    """
    own = dict(model.named_parameters())
    try:
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            if about.get("format") != FORMAT:
                raise ModelNotFoundError(f"{path} does not hold weights that longfocus saved.")
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_tensor(name)
                if name not in own or own[name].shape != tensor.shape:
                    shape = None if name not in own else tuple(own[name].shape)
                    raise ConfigError(
                        f"{path}: weight {name} {tuple(tensor.shape)} does not fit this model"
                        + (f", where it is {shape}." if shape else ", which has none of that name.")
                    )
                with torch.no_grad():
                    own[name].copy_(tensor)
    except (OSError, SafetensorError) as error:
        raise ModelNotFoundError(f"{path}: no readable weights: {error}") from error
    return about
