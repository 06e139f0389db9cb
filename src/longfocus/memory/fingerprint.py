"""Which model made a memory: a short digest of its weights and shape, and one of its tokenizer.

A memory's keys mean something only to the weights that made them. Hashing every byte of a 7B checkpoint
takes a minute, so each tensor contributes its name, shape, dtype and an evenly spaced sample of its numbers;
any training step changes such a sample.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLE_PER_TENSOR = 256
_SHAPE_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_parameters",
)


def model_fingerprint(model: PreTrainedModel) -> str:
    """Hex digest (32 characters) of shape, compute dtype and sampled weights; the same for the same model anywhere."""
    digest = hashlib.sha256()
    config = model.config.to_dict()
    shape = {name: config.get(name) for name in _SHAPE_FIELDS}
    digest.update(json.dumps(shape, sort_keys=True, default=str).encode())
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            flat = tensor.reshape(-1)
            step = max(1, flat.numel() // SAMPLE_PER_TENSOR)
            sample = flat[::step][: SAMPLE_PER_TENSOR + 1].to(device="cpu", dtype=torch.float32)
            digest.update(np.ascontiguousarray(sample.numpy()).tobytes())
    return digest.hexdigest()[:32]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hex digest (32 characters) of how the tokenizer cuts text: its whole serialised form where it has one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        form = json.loads(backend.to_str())
        for setting in ("truncation", "padding"):  # left over from how it was called before
            form.pop(setting, None)
        text = json.dumps(form, sort_keys=True)
    else:
        text = repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
