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

from longfocus.data.dictionary import DictionaryFormat
from tests.analysis.copying import _THETA, _head, blank_model

LOOKING = 2
"""The layer that must see the memory."""


def lookup_model(form: DictionaryFormat) -> Any:
    """The model, float32, eval mode."""
    assert form.key_tokens == form.value_tokens == 1
    vocabulary = form.vocabulary
    model, head_dim = blank_model(vocabulary, blocks=4)
    hidden = model.config.hidden_size
    half, fast = head_dim // 2, head_dim // 6
    at_hand, before, two_before, to_say, constant = (part * vocabulary for part in range(5))
    generator = torch.Generator().manual_seed(0)

    def codes() -> torch.Tensor:
        drawn = torch.randn(head_dim, vocabulary, generator=generator)
        drawn[torch.arange(head_dim) % half < fast] = 0.0
        return drawn / drawn.norm(dim=0)

    with torch.no_grad():
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
