"""Turn a loaded `transformers` model into a focused one, and back.

What changes, all of it undone by `detach`: the object's class gets `FocusedModel` mixed in, its attention
implementation becomes `longfocus`, the memory layers' attention modules get a hook that hands them identity
position embeddings during focused passes, and the options stand in `config.json` under `longfocus`.
The weights and their names stay as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from longfocus.config import FocusConfig
from longfocus.errors import ConfigError, UnsupportedModelError
from longfocus.model.attention_function import NAME, register
from longfocus.model.focus import Focus
from longfocus.model.focused import FocusedModel

CONFIG_KEY = "longfocus"


def attach(model: Any, config: FocusConfig | None = None, **options: Any) -> Any:
    """Give a loaded causal language model memory layers.

    Args:
        model: as `AutoModelForCausalLM.from_pretrained` loaded it; changed in place.
        config: options; alternatively as keywords: `attach(model, memory_layers=(8, 16, 24))`.
            None and no keywords: those in the model's config.json, else the defaults.

    Returns:
        The same object, now also a `FocusedModel`: `forward` and `generate` take inputs of any length and a
        `memory=`; `new_cache` makes caches.

    Raises:
        UnsupportedModelError: the family cannot carry memory layers; the message says why.
        ConfigError: an option is impossible for this model.
    """
    if config is not None and options:
        raise ConfigError("attach: give a FocusConfig or keywords, not both.")
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"attach: a {type(model).__name__} given, expected a transformers model; attach before wrapping it "
            "(with peft, for instance)."
        )
    stored = getattr(model.config, CONFIG_KEY, None)
    if config is None:
        config = FocusConfig.from_dict(options if options or not stored else stored)
    focus = Focus(model, config)
    if isinstance(model, FocusedModel):
        stored = cast(Any, model)._longfocus_undo[2]
        detach(model)  # only now: a refused second attach leaves the first as it was
    register()
    previous = model.config._attn_implementation
    hooks = [
        focus.anatomy.attentions[layer].register_forward_pre_hook(_identity_positions, with_kwargs=True)
        for layer in focus.config.layers
    ]
    any_model = cast(Any, model)
    any_model.__class__ = _focused_class(cast(Any, type(model)))
    any_model.focus = focus
    any_model._longfocus_undo = (previous, hooks, stored)
    setattr(model.config, CONFIG_KEY, focus.config.to_dict())
    model.set_attn_implementation(NAME)
    return model


def detach(model: Any) -> Any:
    """Undo `attach`; the model is again exactly what it was. A model that is not attached is returned as it is."""
    if not isinstance(model, FocusedModel):
        return model
    any_model = cast(Any, model)
    previous, hooks, stored = any_model._longfocus_undo
    for hook in hooks:
        hook.remove()
    any_model.__class__ = type(model).__mro__[2]
    del any_model.focus, any_model._longfocus_undo
    if stored is None:
        delattr(any_model.config, CONFIG_KEY)
    else:
        setattr(any_model.config, CONFIG_KEY, stored)
    any_model.set_attn_implementation(previous)
    return model


def _identity_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Memory layers rotate their queries and keys themselves, so here they are turned by nothing."""
    if kwargs.get("focus") is None:
        return None
    cos, sin = kwargs["position_embeddings"]
    return args, {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


@cache
def _focused_class(base: type) -> type:
    """`base` with FocusedModel in front, under base's own name, so that saved configs name the base class."""
    return type(base.__name__, (FocusedModel, base), {"__module__": base.__module__, "__doc__": base.__doc__})
