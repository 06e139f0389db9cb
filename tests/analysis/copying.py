"""A Llama whose weights are set by hand so that one known head copies, and no other.

One head tells each place which token stands before it: its scores have their peak at distance 1, by rotation
alone. In a later layer one head compares the token at hand with that: it finds the place after the token's last
occurrence (Olsson et al. 2022, section on induction heads), and what it reads there becomes the next token. All
other heads look everywhere alike, and the MLPs add nothing.

    model = copying_model(VOCABULARY, previous=(0, 1), copying=(2, 3))    # (layer, head) each

A hidden state has four blocks: the token at hand, the token before it, the token to say next, and a constant.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers as hf

HEADS, KV_HEADS, LAYERS = 4, 2, 4
_THETA = 1e9


def blank_model(vocabulary: int, *, blocks: int) -> tuple[Any, int]:
    """(a Llama whose weights are 0, its norms 1; head_dim), for hidden states of so many blocks of tokens and a constant."""
    head_dim = max(96, vocabulary + vocabulary % 2)
    config = hf.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=-(-(blocks * vocabulary + 1) // HEADS) * HEADS,
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
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
    return model, head_dim


def copying_model(vocabulary: int, *, previous: tuple[int, int], copying: tuple[int, int]) -> Any:
    """The model, float32, eval mode; `previous` lies in an earlier layer than `copying`."""
    assert previous[0] < copying[0]
    model, head_dim = blank_model(vocabulary, blocks=3)
    hidden = model.config.hidden_size
    half, fast = head_dim // 2, head_dim // 6  # the fast third of the pairs tells distances, the others tokens
    at_hand, before, to_say, constant = 0, vocabulary, 2 * vocabulary, 3 * vocabulary
    with torch.no_grad():
        tokens = torch.arange(vocabulary)
        model.model.embed_tokens.weight[tokens, tokens + at_hand] = 1.0
        model.model.embed_tokens.weight[:, constant] = 1.0
        model.lm_head.weight[tokens, tokens + to_say] = 20.0

        # the head that looks one token back: a constant query, turned so that it meets a key at distance 1
        query, key, value, out = _head(model, head_dim, *previous)
        pairs = torch.arange(fast)
        angles = -(_THETA ** (-pairs / half))
        query[pairs, constant], query[pairs + half, constant] = torch.cos(angles), torch.sin(angles)
        key[pairs, constant] = 12.0 / math.sqrt(hidden)  # the norm multiplies by up to sqrt(hidden / 2)
        value[tokens, tokens + at_hand] = 1.0
        out[tokens + before, tokens] = 1.0

        # the head that copies: token at hand against token before, in pairs that hardly turn
        query, key, value, out = _head(model, head_dim, *copying)
        codes = torch.randn(head_dim, vocabulary, generator=torch.Generator().manual_seed(0))
        codes[torch.arange(head_dim) % half < fast] = 0.0
        codes /= codes.norm(dim=0)
        query[:, at_hand : at_hand + vocabulary] = codes
        key[:, before : before + vocabulary] = 8.0 * codes
        value[tokens, tokens + at_hand] = 1.0
        out[tokens + to_say, tokens] = 1.0
    return model.eval()


def _head(model: Any, head_dim: int, layer: int, head: int) -> tuple[torch.Tensor, ...]:
    """Views of one head's query, key, value (each head_dim, hidden) and output (hidden, head_dim) weights."""
    attention = model.model.layers[layer].self_attn
    rows = slice(head * head_dim, (head + 1) * head_dim)
    shared = head * KV_HEADS // HEADS
    kv_rows = slice(shared * head_dim, (shared + 1) * head_dim)
    return (
        attention.q_proj.weight[rows],
        attention.k_proj.weight[kv_rows],
        attention.v_proj.weight[kv_rows],
        attention.o_proj.weight[:, rows],
    )
