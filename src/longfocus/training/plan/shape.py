"""A model as far as cost goes: its layers' sizes, and what of their derivatives is taken.

The model is built on the meta device (shapes without numbers), so that takes seconds for any size, and its weights
need not be here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longfocus.errors import ModelNotFoundError
from longfocus.model.families import Anatomy
from longfocus.training.recipes import Recipe, Scratch


@dataclass(frozen=True)
class Linear:
    """A linear layer and what of its derivative is taken."""

    inputs: int
    outputs: int
    trained: bool
    input_grad: bool
    """Something before it is trained."""

    @property
    def forward(self) -> int:
        """FLOPs a token."""
        return 2 * self.inputs * self.outputs

    @property
    def backward(self) -> int:
        """FLOPs a token."""
        return self.forward * (self.trained + self.input_grad)


@dataclass(frozen=True)
class Layer:
    """One decoder layer, as far as cost goes."""

    memory: bool
    incoming: list[Linear]
    """To queries, keys and values."""
    outgoing: list[Linear]
    """From the heads' outputs."""
    attention_grad: bool
    """Queries, keys or values have a gradient."""
    mlp: list[Linear]
    mlp_between: int
    """Numbers a token that the element-wise part between the linear layers keeps for its derivative."""
    norm_numbers: int
    """Numbers a token (in float32) that norms keep."""
    backward: bool
    """There is a derivative to take in it at all."""

    @property
    def linears(self) -> list[Linear]:
        """All of them."""
        return [*self.incoming, *self.outgoing, *self.mlp]


@dataclass(frozen=True)
class Shape:
    """A model, as far as cost goes."""

    layers: list[Layer]
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    head_trained: bool
    weights: int
    trained: int
    trained_linear: int
    """Of those, in linear layers: the ones that bfloat16 products keep a copy of."""
    window: int
    memory_layers: tuple[int, ...]
    softcap: bool
    """Scores are bent, which no fused kernel does: attention is written out in plain products."""


def build_shape(recipe: Recipe, config: Path | str | None = None) -> Shape:
    """The shape of a recipe's model, without its weights.

    Args:
        config: folder with a config.json to take in place of the recipe's model (offline).

    Raises:
        ModelNotFoundError: no config there; says how to name one.
        ConfigError, UnsupportedModelError: as for training.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from longfocus.config import FocusConfig
    from longfocus.model import longllama
    from longfocus.model.attach import attach
    from longfocus.model.load import raw_config, resolve
    from longfocus.training import parts
    from longfocus.training.build import with_lora
    from longfocus.training.scratch import llama_config

    scratch = recipe.model if isinstance(recipe.model, Scratch) and config is None else None
    path, raw = "", {}
    try:
        if scratch is None:
            path = resolve(str(config) if config is not None else str(recipe.model))
            raw = raw_config(path)
    except ModelNotFoundError as error:
        if config is not None:
            raise
        raise ModelNotFoundError(
            f"{error} A plan needs only the model's config.json: give --config FOLDER (for the OpenLLaMA models "
            "recipes/configs/open_llama_3b and open_llama_7b)."
        ) from error
    options: dict[str, Any]
    if scratch is not None:
        loaded, options = llama_config(scratch), {}
    elif longllama.is_longllama(raw):
        loaded, focus = longllama.read_config(raw)
        options = focus.to_dict()
    else:
        loaded = AutoConfig.from_pretrained(path)
        options = dict(getattr(loaded, "longfocus", None) or {})
    if hasattr(loaded, "longfocus"):
        del loaded.longfocus
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(loaded, dtype=torch.float32)
    if recipe.method == "crossbatch":
        model = attach(model, FocusConfig.from_dict({**options, **recipe.focus}))
        anatomy, resolved = model.focus.anatomy, model.focus.config
    else:
        anatomy = Anatomy(model)
        resolved = recipe.focus_config.resolve(anatomy.num_layers, None)
    names = parts.select(model, recipe.train, resolved.layers)
    wrapped = model if recipe.train.lora is None else with_lora(model, recipe.train.lora, names)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    # activation checkpointing in transformers lets the embeddings' output have a gradient, trained or not
    grad = _trained(embeddings) or recipe.run.gradient_checkpointing
    layers = []
    for index in range(anatomy.num_layers):
        crossbatch = recipe.method == "crossbatch" and index in resolved.layers
        layer, grad = _layer(anatomy, index, grad, crossbatch)
        layers.append(layer)
    weights = list(wrapped.parameters())
    linear = {
        id(module.weight): module.weight.numel()
        for module in wrapped.modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    }
    return Shape(
        layers=layers,
        hidden=int(model.config.hidden_size),
        vocabulary=int(head.weight.shape[0]),
        heads=int(model.config.num_attention_heads),
        kv_heads=anatomy.kv_heads,
        head_dim=anatomy.head_dim,
        head_trained=bool(head.weight.requires_grad),
        weights=sum(weight.numel() for weight in weights),
        trained=sum(weight.numel() for weight in weights if weight.requires_grad),
        trained_linear=sum(linear.values()),
        window=resolved.window_tokens,
        memory_layers=resolved.layers if recipe.method == "crossbatch" else (),
        softcap=getattr(model.config, "attn_logit_softcapping", None) is not None,
    )


def _layer(anatomy: Anatomy, index: int, grad: bool, memory: bool) -> tuple[Layer, bool]:
    """A layer, and whether what leaves it has a gradient. `grad`: whether what enters it has."""
    layer, attention = anatomy.layer(index), anatomy.attentions[index]
    entered = grad
    norms = [
        module
        for module in layer.modules()
        if not isinstance(module, nn.Linear) and _own_weight(module) is not None and "Norm" in type(module).__name__
    ]
    inside = {id(module) for module in attention.modules()}
    outer = [norm for norm in norms if id(norm) not in inside]
    grad = grad or any(_trained(norm) for norm in outer[:1])
    *before, after = _projections(attention)
    incoming: list[Linear] = []
    attention_grad = grad or any(_trained(norm) for norm in norms if id(norm) in inside)
    for projection in before:
        incoming += _linears(projection, grad)
        attention_grad = attention_grad or _trained(projection)
    outgoing = _linears(after, attention_grad)
    grad = attention_grad or _trained(after)
    mlp: list[Linear] = []
    between = 0
    others = [child for child in layer.children() if child is not attention and _has_linear(child)]
    for other in others:
        *first, last = _projections(other)
        grad = grad or any(_trained(norm) for norm in outer[1:])
        made = [_linears(projection, grad) for projection in first]
        mlp += [linear for found in made for linear in found]
        width = sum(found[0].outputs for found in made)
        grad = grad or any(_trained(projection) for projection in first)
        final = _linears(last, grad)
        mlp += final
        if grad:  # a gate keeps its argument, its value and the other factor; without a gate only the argument is kept
            between = width + (final[0].inputs if width > final[0].inputs else 0)
        grad = grad or _trained(last)
    width = int(anatomy.model.config.hidden_size)
    norm_numbers = 0
    for number, norm in enumerate(outer):
        has_input_grad = entered if number == 0 else grad
        norm_numbers += width * (has_input_grad + _trained(norm))
    if attention_grad:  # norms of queries and of keys, in this order
        inner = [norm for norm in norms if id(norm) in inside]
        for norm, heads in zip(inner, (int(anatomy.model.config.num_attention_heads), anatomy.kv_heads), strict=False):
            norm_numbers += anatomy.head_dim * heads * (1 + _trained(norm))
    return Layer(memory, incoming, outgoing, attention_grad, mlp, between, norm_numbers, grad), grad


def _own_weight(module: nn.Module) -> Any:
    return module._parameters.get("weight")


def _trained(module: nn.Module) -> bool:
    return any(weight.requires_grad for weight in module.parameters())


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(inner, nn.Linear) for inner in module.modules())


def _projections(module: nn.Module) -> list[nn.Module]:
    """A module's linear layers (or adapters around them) in order; the last one leads out of it."""
    return [child for child in module.children() if _has_linear(child)]


def _linears(projection: nn.Module, input_grad: bool) -> list[Linear]:
    return [
        # the second factor of an adapter comes after the first, which is trained
        Linear(
            inner.in_features, inner.out_features, inner.weight.requires_grad, input_grad or ".lora_B." in f".{name}."
        )
        for name, inner in projection.named_modules()
        if isinstance(inner, nn.Linear)
    ]
