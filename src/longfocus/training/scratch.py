"""Models that begin from drawn weights: ordinary `transformers` Llamas, with the tokenizer that a recipe names.

    model = new_model(Scratch(layers=12, hidden=1024, heads=8, intermediate=2736, tokenizer="default-base"), seed=0)

The paper's models use no positions in memory layers; that is `memory_positions: none` in the recipe's `focus`, and the other
layers keep the Llama's rotations. Its learnable temperature of each head (s = softmax(<q, key> / tau)) is a factor on the
head's queries. While training, it is a parameter of its own; in the result it is multiplied into the rows of q_proj, so that
nothing is left which a plain checkpoint does not have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from longfocus.model.families import Anatomy
from longfocus.model.load import load_tokenizer
from longfocus.training.recipes import Recipe, Scratch

TEMPERATURE = "log_inverse_temperature"
"""Name of the parameter; it has no weight decay."""


def recipe_tokenizer(recipe: Recipe) -> Any:
    """The tokenizer of a recipe's model; errors as `load_tokenizer`."""
    if isinstance(recipe.model, str):
        return load_tokenizer(recipe.model)
    return scratch_tokenizer(recipe.model)


def scratch_tokenizer(scratch: Scratch) -> Any:
    """The tokenizer of a model from scratch; a fast one of `transformers`.

    Raises:
        ModelNotFoundError: it names a model that is not there.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if scratch.tokenizer == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
    elif scratch.tokenizer == "ids":
        assert scratch.vocabulary is not None
        numbers = {str(number): number for number in range(scratch.vocabulary)}
        made = Tokenizer(models.WordLevel(vocab=numbers, unk_token="0"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        return load_tokenizer(scratch.tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


def llama_config(scratch: Scratch) -> Any:
    """The `LlamaConfig` of a model from scratch.

    Raises:
        ModelNotFoundError: its tokenizer is not there and no vocabulary is given.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=scratch.vocabulary or len(scratch_tokenizer(scratch)),
        hidden_size=scratch.hidden,
        intermediate_size=scratch.intermediate,
        num_hidden_layers=scratch.layers,
        num_attention_heads=scratch.heads,
        num_key_value_heads=scratch.kv_heads or scratch.heads,
        max_position_embeddings=scratch.longest,
        rope_parameters={"rope_type": "default", "rope_theta": scratch.rope_base},
        initializer_range=scratch.deviation,
        tie_word_embeddings=scratch.tie,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def new_model(scratch: Scratch, seed: int) -> Any:
    """A Llama in float32 whose weights depend on shape and seed only; not attached, in evaluation mode.

    Raises:
        ModelNotFoundError: as `llama_config`.
    """
    from transformers import LlamaForCausalLM

    config = llama_config(scratch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def count_weights(scratch: Scratch) -> int:
    """Weights of the model, shared ones once; none of them is made."""
    from transformers import LlamaForCausalLM

    config = llama_config(scratch)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return sum(weight.numel() for weight in model.parameters())


class HeadTemperature(nn.Module):
    """A learnable factor on the queries of each head: the inverse temperature, 1 at first, by its logarithm."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_parameter(TEMPERATURE, nn.Parameter(torch.zeros(heads)))

    def forward(self, weight: Tensor) -> Tensor:
        """Weight of a projection to queries (heads * head_dim, hidden), scaled head by head."""
        factor: Tensor = getattr(self, TEMPERATURE).exp()
        return weight * factor.repeat_interleave(weight.shape[0] // factor.shape[0])[:, None]


def add_temperatures(model: Any, layers: Iterable[int]) -> None:
    """Give the heads of some layers a learnable temperature. Only for families without a norm on queries."""
    anatomy = Anatomy(model)
    for layer in layers:
        projection: Any = anatomy.attentions[layer].q_proj
        heads = projection.weight.shape[0] // anatomy.head_dim
        parametrize.register_parametrization(projection, "weight", HeadTemperature(heads))


def fold_temperatures(model: Any) -> None:
    """Multiply temperatures into the weights that they scale; the model computes what it did, without them."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            factors = module.parametrizations["weight"]
            if any(isinstance(factor, HeadTemperature) for factor in factors):
                parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
