"""A Llama whose weights are set by hand so that it looks values up, and does nothing else.

For dictionaries of one key token and one value token (`longfocus.data.dictionary`). Two heads in a row tell each place
which token stands one and two before it. In layer LOOKING one head compares "this key is asked for, and a value comes next"
with "this key stood two before, and the value mark one before", and what it finds becomes the next token.

    model = lookup_model(DictionaryFormat(symbols=200, key_tokens=1, value_tokens=1, window=32))

As in `tests.analysis.copying`: what tells distances turns fast, what tells tokens hardly turns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers as hf

from longfocus.data.dictionary import DictionaryFormat
from tests.analysis.copying import _THETA, HEADS, KV_HEADS, LAYERS, _head

LOOKING = 2
"""The layer that must see the memory."""


def lookup_model(form: DictionaryFormat) -> Any:
    """The model, float32, eval mode."""
    assert form.key_tokens == form.value_tokens == 1
    vocabulary = form.vocabulary
    hidden = -(-(4 * vocabulary + 1) // HEADS) * HEADS
    head_dim = max(96, vocabulary + vocabulary % 2)
    half, fast = head_dim // 2, head_dim // 6
    config = hf.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=head_dim,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = hf.LlamaForCausalLM(config)
    at_hand, before, two_before, to_say, constant = (part * vocabulary for part in range(5))
    generator = torch.Generator().manual_seed(0)

    def codes() -> torch.Tensor:
        drawn = torch.randn(head_dim, vocabulary, generator=generator)
        drawn[torch.arange(head_dim) % half < fast] = 0.0
        return drawn / drawn.norm(dim=0)

    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        tokens = torch.arange(vocabulary)
        model.model.embed_tokens.weight[tokens, tokens + at_hand] = 1.0
        model.model.embed_tokens.weight[:, constant] = 1.0
        model.lm_head.weight[tokens, tokens + to_say] = 20.0
        for layer, seen, told in ((0, at_hand, before), (1, before, two_before)):  # one token back, each
            norm = math.sqrt(hidden / (layer + 2))  # what a block of ones is multiplied by: so many blocks hold a one
            query, key, value, out = _head(model, head_dim, layer, 1)
            pairs = torch.arange(fast)
            angles = -(_THETA ** (-pairs / half))
            query[pairs, constant], query[pairs + half, constant] = torch.cos(angles), torch.sin(angles)
            key[pairs, constant] = 20.0 / norm
            value[tokens, tokens + seen] = 1.0
            out[tokens + told, tokens] = 1.0 / norm
        query, key, value, out = _head(model, head_dim, LOOKING, 3)
        keys, marks = codes(), codes()
        query[:, before : before + vocabulary], query[:, at_hand : at_hand + vocabulary] = keys, marks
        key[:, two_before : two_before + vocabulary], key[:, before : before + vocabulary] = 0.5 * keys, 0.5 * marks
        value[tokens, tokens + at_hand] = 1.0
        out[tokens + to_say, tokens] = 1.0
    return model.eval()
