"""From options to a subject."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longfocus.config import WEIGHT_DTYPES, FocusConfig
from longfocus.errors import ConfigError
from longfocus.model.attach import detach
from longfocus.model.load import load, load_tokenizer
from longfocus.subjects.endpoint import Endpoint
from longfocus.subjects.local import FocusedSubject, PlainModel


def open_local(
    source: str,
    *,
    plain: bool = False,
    name: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    announce: Callable[[str], None] | None = None,
    **focus: Any,
) -> PlainModel | FocusedSubject:
    """A model that runs here: a folder (an adapter's too), a hub id, `default`, `default-base`.

    Args:
        plain: full attention, as transformers alone runs it; else with its memory.
        name: as tables call it; made from source and `plain` unless given.
        dtype: of the weights.
        focus: fields of FocusConfig that differ from the checkpoint's.

    Raises:
        ConfigError: focus options for a plain model, or an unknown dtype.
        ModelNotFoundError, UnsupportedModelError: as `load`.
    """
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"--dtype: {dtype!r} given, expected one of {', '.join(WEIGHT_DTYPES)}.")
    import torch

    kind = getattr(torch, dtype) if dtype else None
    short = short_name(source)
    if plain:
        if focus:
            raise ConfigError(f"{', '.join(focus)}: a plain model has no memory; leave --plain or these options out.")
        alone = FocusConfig(memory_layers=())
        model = detach(load(source, alone, dtype=kind, device=device, announce=announce))
        return PlainModel(model, load_tokenizer(source), name or f"{short}, full attention")
    model = load(source, dtype=kind, device=device, announce=announce, **focus)
    return FocusedSubject(model, load_tokenizer(source), name or short)


def short_name(source: str) -> str:
    """What tables call a model: a folder's name, with the one above where it says nothing by itself."""
    if not Path(source).is_dir():
        return source
    path = Path(source).resolve()
    return f"{path.parent.name}/{path.name}" if re.fullmatch(r"model|checkpoint-\d+", path.name) else path.name


def open_endpoint(
    url: str, model: str, *, tokenizer: str = "default", name: str | None = None, **options: Any
) -> Endpoint:
    """A model behind an OpenAI-compatible endpoint.

    Args:
        tokenizer: model whose tokenizer cuts prompts to a length.
        options: as `Endpoint`.
    """
    Endpoint(url, model, None, name=name, **options)  # what is wrong shows before a tokenizer is loaded
    return Endpoint(url, model, load_tokenizer(tokenizer), name=name, **options)
