"""A file with some of a model's weights: what a fine-tune has changed, beside its base.

save_weights(weights, path, dtype=torch.bfloat16)
load_weights(model, path)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longfocus.errors import ConfigError, ModelNotFoundError

FORMAT = "longfocus-weights-1"


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
