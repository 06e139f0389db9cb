"""The Memorizing Transformer's gate: how a memory layer joins its window and its memory where it was trained with one.

    v = g v_memory + (1 - g) v_window,   g = sigmoid(b_h), b_h one number a head (arXiv 2307.03170, section 3.1)

instead of one softmax over both. A query whose memory is empty takes the window's result alone. The numbers b_h are a
parameter of the attention module while they are trained; a checkpoint keeps them in its config.json (`longfocus_gates`), so its
weights are those of an ordinary model, which needs no gate because it has no memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longfocus.attention.context import AdditionalContext, LocalWindow
from longfocus.errors import ConfigError
from longfocus.model.families import Anatomy

GATE = "memory_gate"
CONFIG_KEY = "longfocus_gates"


@dataclass
class _Aside(LocalWindow):
    """A window that counts as good as nothing: what it is joined with decides alone, unless that is empty."""

    result: tuple[Tensor, Tensor] | None = None

    def attend(self, *, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
        """The window's own result, with the least finite normaliser."""
        assert self.result is not None
        out, lse = self.result
        return out, torch.full_like(lse, torch.finfo(lse.dtype).min)


def join_gated(
    gate: Tensor, context: AdditionalContext, layer: int, window: LocalWindow, *, scale: float, softcap: float | None
) -> Tensor:
    """out (B, Hq, T, D): window and additional context, by the gate.

    Args:
        gate: b_h (Hq,).
        context: one that takes the window's part from `window.attend`.
        layer, window, scale, softcap: as for `AdditionalContext.join`.
    """
    local = window.attend(scale=scale, softcap=softcap)
    joined = context.join(layer, _Aside(**vars(window), result=local), scale=scale, softcap=softcap)
    share = torch.sigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))[None, :, None, None]
    return (share * joined + (1 - share) * local[0]).to(local[0].dtype)


def add_gates(model: Any, layers: Iterable[int], bias: float) -> None:
    """Give memory layers gates that are to be trained, all of the same b at first."""
    anatomy = Anatomy(model)
    heads = int(model.config.get_text_config().num_attention_heads)
    for layer in layers:
        anatomy.attentions[layer].register_parameter(GATE, nn.Parameter(torch.full((heads,), float(bias))))


def loosen_gates(model: Any) -> None:
    """Make a loaded model's gates parameters again, to train them further."""
    for attention in Anatomy(model).attentions:
        gate = getattr(attention, GATE, None)
        if gate is not None and not isinstance(gate, nn.Parameter):
            delattr(attention, GATE)
            attention.register_parameter(GATE, nn.Parameter(gate.clone()))


def settle_gates(model: Any) -> None:
    """Move trained gates from the parameters into the config; the model, maybe wrapped by peft, computes what it did."""
    found = {
        int(module.layer_idx): (module, module._parameters[GATE].detach().float())
        for module in model.modules()
        if module._parameters.get(GATE) is not None
    }
    for module, gate in found.values():
        delattr(module, GATE)
        module.register_buffer(GATE, gate, persistent=False)
    if found:
        setattr(model.config, CONFIG_KEY, {str(layer): gate.tolist() for layer, (_, gate) in sorted(found.items())})


def restore_gates(model: Any) -> None:
    """Put the gates of a model's config in place; nothing where it has none.

    Raises:
        ConfigError: they do not fit the model.
    """
    stored = getattr(model.config, CONFIG_KEY, None) or {}
    anatomy, heads = Anatomy(model) if stored else None, int(model.config.get_text_config().num_attention_heads)
    for layer, values in stored.items():
        assert anatomy is not None
        if not str(layer).isdigit() or int(layer) >= anatomy.num_layers or len(values) != heads:
            raise ConfigError(
                f"{CONFIG_KEY} in the model's config.json: {len(values)} numbers for layer {layer} given, expected {heads} "
                f"(one a head) for layers 0 to {anatomy.num_layers - 1}."
            )
        attention = anatomy.attentions[int(layer)]
        weight = next(attention.parameters())
        attention.register_buffer(GATE, torch.tensor(values, device=weight.device), persistent=False)


def has_gates(model: Any) -> bool:
    """Whether some layer joins its memory by a gate."""
    return any(getattr(attention, GATE, None) is not None for attention in Anatomy(model).attentions)
