"""The model of a recipe: loaded, its trained weights chosen, maybe wrapped with adapters."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch

from longfocus.errors import ConfigError
from longfocus.model.attach import CONFIG_KEY, attach, detach
from longfocus.model.gates import add_gates, has_gates, loosen_gates
from longfocus.model.load import load
from longfocus.training import parts
from longfocus.training.recipes import Long, Lora, Recipe, Scratch
from longfocus.training.scratch import add_temperatures, new_model

Announce = Callable[[str], None]


def build_model(recipe: Recipe, announce: Announce = lambda text: None, *, frozen: torch.dtype = torch.float32) -> Any:
    """The model of a recipe; plain for long fine-tuning, else attached: for Transformer-XL in all layers.

    Args:
        frozen: dtype in which weights that are not trained are held.

    Raises:
        ModelNotFoundError, UnsupportedModelError, ConfigError: as `load`, or nothing is left to train.
    """
    if isinstance(recipe.model, Scratch):
        model = attach(new_model(recipe.model, recipe.run.seed), recipe.focus_config)
    else:
        model = load(recipe.model, dtype=torch.float32, announce=announce, **recipe.focus)
    layers = model.focus.config.layers
    if has_gates(model) and recipe.method != "memorizing":
        raise ConfigError(
            f"method: {recipe.method!r} given, but {recipe.model_name} joins its memory by gates; only memorizing trains those."
        )
    if recipe.method == "long":
        assert recipe.long is not None
        model = _plain_model(model, recipe.long)
    elif recipe.method == "transformer_xl":
        every = dataclasses.replace(
            model.focus.config, memory_layers=tuple(range(model.focus.num_layers)), memory_positions="first"
        )
        model = attach(detach(model), every)
    elif recipe.method == "memorizing":
        assert recipe.memorizing is not None
        loosen_gates(model)
        if recipe.memorizing.combine == "gate" and not has_gates(model):
            add_gates(model, layers, recipe.memorizing.gate_bias)
    if isinstance(recipe.model, Scratch) and recipe.model.temperature:
        add_temperatures(model, layers)
    names = parts.select(model, recipe.train, layers)
    if recipe.train.lora is not None:
        model = with_lora(model, recipe.train.lora, names)
    if recipe.train.what != "all":
        for weight in model.parameters():
            if not weight.requires_grad:
                weight.data = weight.data.to(frozen)
    return model


def with_lora(model: Any, lora: Lora, names: list[str]) -> Any:
    """Wrap with peft adapters on the linear layers among the chosen weights.

    The head is never among them: the loss reads its weight directly. `modules_to_save` trains it whole.

    Raises:
        ConfigError: peft is missing, or a target is no projection of the chosen layers.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("train.lora needs the package peft: pip install peft") from error
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    linear = sorted(
        {
            name.rpartition(".")[0]
            for name in names
            if isinstance(module := modules[name.rpartition(".")[0]], torch.nn.Linear) and module is not head
        }
    )
    kinds = {name.rpartition(".")[2] for name in linear}
    unknown = [name for name in lora.targets or [] if name not in kinds]
    if unknown or not linear:
        raise ConfigError(
            f"train.lora.targets: {unknown or lora.targets} given, expected projections of the chosen layers: "
            f"{', '.join(sorted(kinds)) or 'none'}."
        )
    nowhere = [
        name for name in lora.modules_to_save or [] if not any(f".{module}".endswith(f".{name}") for module in modules)
    ]
    if nowhere:
        there = sorted({module.rpartition(".")[2] for module in modules if module and not module[-1].isdigit()})
        raise ConfigError(
            f"train.lora.modules_to_save: {nowhere} given, expected names of modules: {', '.join(there)}."
        )
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=[name for name in linear if not lora.targets or name.rpartition(".")[2] in lora.targets],
        modules_to_save=lora.modules_to_save,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks for an attribute's old name
        wrapped = get_peft_model(model, config)
    wrapped.focus = getattr(model, "focus", None)
    return wrapped


def without_memory(model: Any) -> Any:
    """Plain, as if it had never had memory layers."""
    model = detach(model)
    if hasattr(model.config, CONFIG_KEY):
        delattr(model.config, CONFIG_KEY)
    return model


def _plain_model(model: Any, long: Long) -> Any:
    """Without memory, and with scaled positions where they are asked for."""
    model = without_memory(model)
    config = model.config
    if long.rope is not None:
        config = copy.deepcopy(config)
        original = config.max_position_embeddings
        config.rope_parameters = {
            **(getattr(config, "rope_parameters", None) or {}),
            "rope_type": long.rope.type,
            "factor": long.rope.factor,
            "original_max_position_embeddings": original,
        }
        config.max_position_embeddings = int(original * long.rope.factor)
        scaled = type(model)(config)  # its rotations are made from the config
        scaled.load_state_dict(model.state_dict())
        model = scaled.eval()
    if long.tokens > config.max_position_embeddings:
        raise ConfigError(
            f"long.tokens: {long.tokens} given, expected at most the model's {config.max_position_embeddings} positions; "
            "give long.rope with a factor that covers it."
        )
    return model
