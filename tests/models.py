"""Tiny real `transformers` models, one per family and awkward variant, with attention far from uniform.

A freshly initialised model has scores near 0 and logits near 0, so that any two implementations agree on
it. Here matrices are drawn wide, and vectors (norm weights, biases) are shaken, so that attention scores
spread over several units, logits are larger than 1, and a token forgotten or seen twice shows.

    model = tiny("qwen3")            # float32, eval mode, the same weights at every call
    model = tiny("llama", dtype=torch.float64)
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

VOCABULARY = 97
LAYERS = 4
MEMORY_LAYERS = (1, 2)
PAD = 0

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_NO_KV = {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES),
    "mistral": ("Mistral", {**_SIZES, "sliding_window": None}),
    "qwen2": ("Qwen2", _SIZES),
    "qwen3": ("Qwen3", {**_SIZES, "head_dim": 8}),
    "gemma": ("Gemma", {**_SIZES, "head_dim": 8}),
    "gemma2": ("Gemma2", {**_SIZES, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", {**_SIZES, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", {**_SIZES, "original_max_position_embeddings": 2048}),
    "gpt_neox": ("GPTNeoX", {**_NO_KV, "rotary_pct": 0.5}),
    "olmo2": ("Olmo2", _SIZES),
}
"""Each family of `longfocus.model.families`, as class prefix and config."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_9_heads": ("Llama", {**_SIZES, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "llama_1_kv_head": ("Llama", {**_SIZES, "num_key_value_heads": 1}),
    "llama_yarn": ("Llama", {**_SIZES, "max_position_embeddings": 512, "rope_parameters": _YARN}),
    "phi3_partial": ("Phi3", {**_SIZES, "original_max_position_embeddings": 2048, "partial_rotary_factor": 0.5}),
    "mistral_sliding": ("Mistral", {**_SIZES, "sliding_window": 40}),
    "gemma3_mixed": (
        "Gemma3",
        {
            **_SIZES,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        },
    ),
}
"""Awkward members of the families: uneven heads, scaled and partial rotation, sliding windows."""

MODELS = {**FAMILIES, **VARIANTS}


def config_of(name: str, **changes: Any) -> Any:
    """The `transformers` config of a tiny model."""
    prefix, options = MODELS[name]
    suffix = "TextConfig" if prefix == "Gemma3" else "Config"
    return getattr(hf, prefix + suffix)(**{**options, **changes})


def tiny(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model with weights that depend on `seed` only, in eval mode.

    Args:
        name: a key of MODELS.
        dtype: of the weights; drawn in float64 and cast, so that all dtypes share the same numbers.
        changes: fields of the config to set otherwise.
    """
    model = getattr(hf, MODELS[name][0] + "ForCausalLM")(config_of(name, **changes))
    widen(model, seed)
    return model.to(dtype).eval()


def widen(model: PreTrainedModel, seed: int = 0) -> None:
    """Redraw matrices with deviation 1.8 / sqrt(width in), and shake vectors by 0.3.

    Normalised inputs then give queries and keys of deviation 1.8, scores of deviation 3 and logits of 1.8.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            if weight.ndim < 2:
                weight.add_(0.3 * noise)
            else:
                weight.copy_(noise if "embed" in name else 1.8 * noise / weight.shape[1] ** 0.5)


def tokens(rows: int, count: int, seed: int = 1) -> Tensor:
    """int (rows, count), without the padding token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, count), generator=generator)


def logits(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    """Logits without gradient."""
    with torch.no_grad():
        return model(ids, **kwargs).logits


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Elementwise, absolute below 1 and relative above; the message names `what` and the worst element."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.isfinite().all(), f"{what}: not finite"
    wrong = (actual.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)
    if wrong.numel() and wrong.max() > tolerance:
        where = tuple(int(i) for i in torch.unravel_index(wrong.argmax(), wrong.shape))
        raise AssertionError(
            f"{what}: differs by {wrong.max():.2e} at {where} (got {actual[where]:.6g}, expected "
            f"{expected[where]:.6g}); allowed {tolerance:.0e}. Elements off: {int((wrong > tolerance).sum())} of {wrong.numel()}."
        )
