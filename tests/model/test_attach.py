"""Attaching is local and reversible, what is saved is an ordinary checkpoint, and what cannot work is refused with reasons.

python -m pytest tests/model/test_attach.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from longfocus.config import FocusConfig
from longfocus.errors import ConfigError, LongfocusError, UnsupportedModelError
from longfocus.model.attach import attach, detach
from longfocus.model.focused import FocusedModel
from tests.model.helpers import FLOAT32, WINDOWS, by_force, focused, planned
from tests.models import MEMORY_LAYERS, MODELS, assert_close, config_of, logits, tiny, tokens

EVERY = pytest.mark.parametrize("name", MODELS)


def _hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def _state(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that attaching could leave behind."""
    return {
        "class": type(model),
        "config": model.config.to_dict(),
        "implementation": model.config._attn_implementation,
        "generation_config": model.generation_config.to_dict() if model.can_generate() else None,
        "attributes": sorted(vars(model)),
        "hooks": _hooks(model),
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "weights": {name: (id(weight), weight._version) for name, weight in model.named_parameters()},
    }


# -- attach and detach -----------------------------------------------------------------------------------


@EVERY
def test_detach_restores_the_model_exactly(name: str) -> None:
    model = tiny(name)
    ids = tokens(2, 30)
    expected, before = logits(model, ids), _state(model)
    attached = attach(model, memory_layers=MEMORY_LAYERS, window=24)
    assert attached is model
    assert isinstance(model, FocusedModel)
    assert not torch.equal(logits(model, ids), expected), "30 tokens are two windows"
    model.generate(ids, max_new_tokens=3, pad_token_id=0, attention_mask=torch.ones_like(ids))
    assert detach(model) is model
    assert _state(model) == before
    assert torch.equal(logits(model, ids), expected)


def test_attached_is_still_an_object_of_its_class_with_its_own_weights() -> None:
    model = tiny("llama")
    weights = {name: id(weight) for name, weight in model.named_parameters()}
    attach(model, memory_layers=(1,), window=24)
    assert isinstance(model, hf.LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {name: id(weight) for name, weight in model.named_parameters()} == weights
    assert model.config.longfocus == model.focus.config.to_dict()


def test_detach_of_a_plain_model_does_nothing() -> None:
    model = tiny("llama")
    before = _state(model)
    assert detach(model) is model
    assert _state(model) == before


def test_attaching_changes_no_other_model() -> None:
    ids = tokens(2, 30)
    other = tiny("llama", seed=3)
    expected, before = logits(other, ids), _state(other)
    attach(tiny("llama"), memory_layers=(1,), window=24)
    assert _state(other) == before
    assert torch.equal(logits(other, ids), expected)


def test_attaching_again_replaces_the_options() -> None:
    ids = tokens(1, 60)
    model = focused("llama_9_heads")
    attach(model, memory_layers=(3,), window=16)
    assert _hooks(model) == 1
    expected = by_force("llama_9_heads", ids[0], planned(model, 60), memory_layers=(3,))
    assert_close(logits(model, ids)[0], expected, WINDOWS, "logits")
    detach(model)
    assert not isinstance(model, FocusedModel)
    assert _hooks(model) == 0


def test_attaching_again_without_options_keeps_those_of_the_config() -> None:
    """None and no keywords: those in the model's config.json."""
    model = focused("llama", overlap=3, memory_layers=(0, 2))
    before = model.focus.config
    attach(model)
    assert model.focus.config == before


def test_without_options_the_defaults_hold() -> None:
    model = attach(tiny("llama"))
    assert model.focus.config.layers == (1, 2, 3), "a quarter, half and three quarters of 4 layers"
    assert model.focus.config.window_tokens == 512
    short = attach(tiny("llama", max_position_embeddings=100))
    assert short.focus.config.window_tokens == 100


def test_two_models_of_one_class_keep_their_own_options() -> None:
    ids = tokens(1, 60)
    first, second = focused("llama"), focused("llama", memory_layers=(3,), window=16, overlap=2)
    third = tiny("llama", dtype=torch.float64)
    assert_close(logits(first, ids)[0], by_force("llama", ids[0], planned(first, 60)), WINDOWS, "first")
    expected = by_force("llama", ids[0], planned(second, 60), memory_layers=(3,))
    assert_close(logits(second, ids)[0], expected, 1e-4, "second")
    assert not isinstance(third, FocusedModel)


# -- saving ----------------------------------------------------------------------------------------------


@EVERY
def test_a_saved_focused_model_is_an_ordinary_checkpoint(name: str, tmp_path: Path) -> None:
    """It loads in plain transformers with the base model's weights and logits; attaching again restores the options."""
    ids = tokens(2, 60)
    base = tiny(name)
    expected, weights = logits(base, ids), {key: value.clone() for key, value in base.state_dict().items()}
    implementation = base.config._attn_implementation
    options = {"memory_layers": (0, 2), "window": 20, "overlap": 3, "retrieval": "exact", "k": 7, "read_span": 90}
    if name == "gemma3_mixed":
        options["memory_layers"] = (1, 2)
    model = attach(base, FocusConfig(**options))
    with_memory = logits(model, ids)
    model.save_pretrained(tmp_path)

    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == [type(model).__name__]
    assert saved["longfocus"]["window"] == 20

    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not isinstance(plain, FocusedModel)
    assert _hooks(plain) == 0
    assert plain.config._attn_implementation == implementation
    assert sorted(plain.state_dict()) == sorted(weights)
    for key, value in plain.state_dict().items():
        assert torch.equal(value, weights[key]), f"weight {key}"
    assert torch.equal(logits(plain, ids), expected)

    again = attach(plain)
    assert again.focus.config == model.focus.config
    assert again.focus.config == FocusConfig(**options)
    assert torch.equal(logits(again, ids), with_memory)


def test_a_detached_model_saves_no_options(tmp_path: Path) -> None:
    detach(focused("llama")).save_pretrained(tmp_path)
    assert "longfocus" not in json.loads((tmp_path / "config.json").read_text())


# -- what is refused -------------------------------------------------------------------------------------


def test_gpt2_is_refused_with_the_reason() -> None:
    config = hf.GPT2Config(vocab_size=30, n_embd=8, n_layer=2, n_head=2)
    with pytest.raises(
        UnsupportedModelError, match=r"'gpt2'.*positions are learned.*Families that can: llama, mistral"
    ):
        attach(hf.GPT2LMHeadModel(config))


def test_an_interleaved_rotary_layout_is_refused_with_the_reason() -> None:
    config = hf.GPTJConfig(vocab_size=30, n_embd=8, n_layer=2, n_head=2, rotary_dim=4)
    with pytest.raises(UnsupportedModelError, match=r"'gptj'.*interleaved"):
        attach(hf.GPTJForCausalLM(config))


def test_an_unknown_family_is_refused() -> None:
    config = hf.StableLmConfig(
        vocab_size=30,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with pytest.raises(UnsupportedModelError, match=r"'stablelm'.*never tried.*Families that can"):
        attach(hf.StableLmForCausalLM(config))


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_model_without_a_language_model_head_is_refused(kind: str) -> None:
    model = getattr(hf, kind)(config_of("llama"))
    before = _state(model)
    with pytest.raises(UnsupportedModelError, match=f"{kind} has no language-model head.*AutoModelForCausalLM"):
        attach(model)
    assert _state(model) == before


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="a Linear given, expected a transformers model"):
        attach(nn.Linear(2, 2))


def test_options_given_twice_are_refused() -> None:
    with pytest.raises(LongfocusError, match="a FocusConfig or keywords, not both"):
        attach(tiny("llama"), FocusConfig(), window=24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_layers": (1, 4)}, r"memory_layers: \[4\] given, expected indices from 0 to 3"),
        ({"memory_layers": (-1,)}, r"memory_layers: \[-1\] given, expected indices from 0 to 3"),
        ({"window": 4096}, "window: 4096 given, expected at most the 2048 tokens"),
        ({"overlap": 512}, "overlap: 512 given, expected less than the window of 512"),
        ({"last_window": 513}, "last_window: 513 given, expected at most the window of 512"),
        ({"windw": 24}, "'windw' is not an option.*Did you mean 'window'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_options_that_do_not_fit_the_model_are_refused_and_leave_it_as_it_was(
    options: dict[str, Any], message: str
) -> None:
    model = tiny("llama")
    before = _state(model)
    with pytest.raises(ConfigError, match=message):
        attach(model, **options)
    assert _state(model) == before


def test_a_refused_second_attach_leaves_the_first() -> None:
    model = focused("llama")
    before = model.focus.config
    with pytest.raises(ConfigError):
        attach(model, memory_layers=(99,))
    assert isinstance(model, FocusedModel)
    assert model.focus.config == before


def test_a_sliding_memory_layer_with_a_larger_window_is_refused() -> None:
    """Tokens between the two would be seen neither locally nor in memory. The message says what would do."""
    with pytest.raises(ConfigError, match=r"layer 1 sees only 40 tokens.*window of 48.*window of at most 40"):
        attach(tiny("mistral_sliding"), memory_layers=(1, 2), window=48)
    with pytest.raises(ConfigError, match=r"layer 0 sees only 12 tokens.*at most 12, or layers among \[1, 2\]"):
        attach(tiny("gemma3_mixed"), memory_layers=(0, 1), window=24)


@pytest.mark.parametrize("window", [24, 40])
def test_a_sliding_memory_layer_with_a_window_that_fits_works(window: int) -> None:
    ids = tokens(1, 100)
    model = attach(tiny("mistral_sliding", dtype=torch.float64), memory_layers=(1, 2), window=window)
    expected = by_force("mistral_sliding", ids[0], planned(model, 100))
    assert_close(logits(model, ids)[0], expected, WINDOWS, "logits")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_window_beyond_the_length_at_which_rotations_change_is_refused(kind: str) -> None:
    """Dynamic scalings turn keys by other angles once a text is longer than this; a window must stay within."""
    rope: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = tiny("llama", max_position_embeddings=256, rope_parameters=rope)
    with pytest.raises(ConfigError, match="expected at most the 64 tokens"):
        attach(model, window=65)
    ids = tokens(1, 60)
    expected = logits(model, ids)
    assert_close(logits(attach(model, window=64), ids), expected, FLOAT32, "logits")
