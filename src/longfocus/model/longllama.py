"""Checkpoints released by the authors of the Focused Transformer: their config read as ours.

A LongLLaMA checkpoint is a Llama whose config carries a few more fields. Their released code reads a long
input in windows of `max_position_embeddings`, keeps the last `last_context_length` tokens local whatever the
length, encodes memory keys as the first position of the window, and when the local cache is full moves all of
it into memory at once. That is `FocusConfig(overlap=0, overflow="all", ...)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig

from longfocus.config import FocusConfig
from longfocus.errors import ConfigError

_LLAMA_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "attention_dropout",
    "mlp_bias",
    "dtype",
)
_AUTHORS_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "pad_token_id": 0}
_NO_MEANING_HERE = {
    "mem_attention_grouping": "attention over memory is chunked by itself",
    "gradient_checkpoint_every_ith": "use the model's gradient_checkpointing_enable()",
    "torch_attention": "the fused kernel is always used",
    "context_window": "windows are max_position_embeddings long",
}
LAST_CONTEXT_LENGTH = 1024
"""The authors' default."""


def is_longllama(config: Mapping[str, Any]) -> bool:
    """Whether a raw config.json has the authors' fields."""
    return config.get("model_type") == "longllama" or "mem_layers" in config


def read_config(config: Mapping[str, Any]) -> tuple[LlamaConfig, FocusConfig]:
    """Split a raw LongLLaMA config into an ordinary Llama config and our options.

    Fields of the authors that have no meaning here are named in a warning when they are set.

    Raises:
        ConfigError: a field has an impossible value.
    """
    values = {**_AUTHORS_DEFAULTS, **{name: config[name] for name in _LLAMA_FIELDS if name in config}}
    if "dtype" not in values and config.get("torch_dtype") is not None:
        values["dtype"] = config["torch_dtype"]
    llama = LlamaConfig(architectures=["LlamaForCausalLM"], **values)
    window = int(llama.max_position_embeddings)
    notes = [
        f"{name} ({reason})"
        for name, reason in _NO_MEANING_HERE.items()
        if config.get(name) is not None and not (name == "context_window" and config[name] == window)
    ]
    if notes:
        warnings.warn(f"Fields of this LongLLaMA config that are not used: {'; '.join(notes)}.", stacklevel=3)
    dtype = config.get("mem_dtype", "bfloat16")
    if not isinstance(dtype, str):
        raise ConfigError(f"mem_dtype: {dtype!r} given, expected a name such as bfloat16.")
    focus = FocusConfig(
        memory_layers=tuple(config.get("mem_layers") or ()),
        window=window,
        overlap=0,
        last_window=int(config.get("last_context_length") or LAST_CONTEXT_LENGTH),
        memory_positions="first" if config.get("mem_positionals", True) else "none",
        memory_dtype=dtype.removeprefix("torch."),
        overflow="all",
    )
    return llama, focus
