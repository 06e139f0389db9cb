"""The model that comes along: its fine-tune is small, fits its base, and makes the memory useful.

python -m pytest tests/model/test_default_model.py
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from safetensors import safe_open

import longfocus
from longfocus.config import FocusConfig
from longfocus.errors import ConfigError, ModelNotFoundError
from longfocus.model import default_model
from longfocus.model.default_model import FINE_TUNE, FINE_TUNE_FOCUS, FOCUS
from longfocus.model.weights import load_weights, save_weights
from tests.models import tiny


def test_the_shipped_weights_are_small_and_say_what_they_are() -> None:
    assert FINE_TUNE.stat().st_size <= 12 * 2**20
    with safe_open(FINE_TUNE, framework="pt") as file:
        about = file.metadata()
        names = list(file.keys())
    assert FocusConfig.from_dict(json.loads(about["longfocus"])).layers == FOCUS.layers
    assert json.loads(about["longfocus"])["window"] == FOCUS.window
    parts = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in FOCUS.layers for part in "qkvo"]
    assert sorted(names) == sorted(parts)
    for name in ("README.md", "log.jsonl", "result.json"):
        assert (FINE_TUNE.parent / name).is_file(), name


@pytest.fixture(scope="module")
def models(default_model: str, default_tokenizer: Any) -> tuple[Any, Any, Any]:
    return longfocus.load("default"), longfocus.load("default-base"), default_tokenizer


@pytest.mark.model
def test_only_the_memory_layers_attention_differs_from_the_base(models: tuple[Any, Any, Any]) -> None:
    tuned, base, _ = models
    moved = {
        name
        for (name, weight), other in zip(tuned.named_parameters(), base.parameters(), strict=True)
        if not torch.equal(weight, other)
    }
    assert moved == {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in FOCUS.layers for part in "qkvo"}
    assert base.focus.config == FOCUS.resolve(30, None) and tuned.focus.config == FINE_TUNE_FOCUS.resolve(30, None)
    assert tuned.focus.fingerprint != base.focus.fingerprint


@pytest.mark.model
def test_it_finds_numbers_that_lie_in_memory_and_its_base_does_not(models: tuple[Any, Any, Any]) -> None:
    """Other words than those of its training texts and of the pass-key benchmark; 1,500 tokens, six windows back at most."""
    *pair, tokenizer = models
    rng = random.Random(3)
    right = [0, 0]
    for _ in range(4):
        number = str(rng.randint(10000, 99999))
        hay = "The clerk wrote a letter to the mayor. Nobody replied. The week went by and the snow melted."
        lines = [hay] * 65
        lines.insert(rng.randrange(5, 45), f"The magic value is {number}. Keep {number} in mind.")
        ids = torch.tensor([tokenizer(" ".join(lines) + "\nThe magic value is")["input_ids"]])
        for which, model in enumerate(pair):
            out = model.generate(ids, max_new_tokens=7, do_sample=False, pad_token_id=2)
            right[which] += number in tokenizer.decode(out[0, ids.shape[1] :])
    assert right[0] >= 3 and right[1] <= 1, right


@pytest.mark.parametrize("place", ["file", "file/deeper", "/proc/longfocus"])
def test_a_cache_folder_that_cannot_be_written_is_said(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("LONGFOCUS_CACHE", str(tmp_path / place))
    monkeypatch.setattr(default_model, "_gguf_file", lambda: tmp_path / "model.gguf")
    with pytest.raises(ModelNotFoundError, match=f"into {tmp_path / place} .*LONGFOCUS_CACHE"):
        longfocus.load("default")


def test_weights_that_do_not_fit_are_refused(tmp_path: Any) -> None:
    model: Any = tiny("llama")
    weight = model.model.layers[1].self_attn.q_proj.weight
    save_weights({"model.layers.1.self_attn.q_proj.weight": weight + 1}, tmp_path / "good.safetensors")
    before = weight.clone()
    load_weights(model, tmp_path / "good.safetensors")
    assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, before + 1)
    save_weights({"model.layers.1.self_attn.q_proj.weight": weight[:3]}, tmp_path / "shape.safetensors")
    with pytest.raises(ConfigError, match="does not fit this model, where it is"):
        load_weights(model, tmp_path / "shape.safetensors")
    save_weights({"nothing": weight}, tmp_path / "name.safetensors")
    with pytest.raises(ConfigError, match="which has none of that name"):
        load_weights(model, tmp_path / "name.safetensors")
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:100])
    for name in ("torn.safetensors", "missing.safetensors"):
        with pytest.raises(ModelNotFoundError, match="no readable weights"):
            load_weights(model, tmp_path / name)
    from safetensors.torch import save_file

    save_file({"nothing": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ModelNotFoundError, match="does not hold weights that longfocus saved"):
        load_weights(model, tmp_path / "foreign.safetensors")
