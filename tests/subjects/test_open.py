"""From options to a subject: the model that was meant, and names that tell models apart.

python -m pytest tests/subjects/test_open.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from longfocus.errors import ConfigError, ModelNotFoundError
from longfocus.subjects.contract import Prompt
from longfocus.subjects.endpoint import Endpoint
from longfocus.subjects.local import FocusedSubject, PlainModel
from longfocus.subjects.open import open_endpoint, open_local, short_name
from tests.commands.conftest import tiny_model

__all__ = ["tiny_model"]


def test_plain_is_what_transformers_alone_runs(tiny_model: Path) -> None:
    subject = open_local(str(tiny_model), plain=True)
    assert isinstance(subject, PlainModel) and not isinstance(subject, FocusedSubject)
    alone = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    assert type(subject.model) is type(alone)
    ids = torch.tensor([subject.encode("It was getting late, she said; " * 20)])
    with torch.no_grad():
        assert torch.equal(subject.model(ids).logits, alone(ids).logits)
    assert subject.name == "tiny, full attention" and subject.longest == 2048


def test_focused_is_the_checkpoint_with_the_changes_that_were_asked_for(tiny_model: Path) -> None:
    subject = open_local(str(tiny_model), dtype="bfloat16", read_span=None, memory_layers=[0, 3])
    assert isinstance(subject, FocusedSubject)
    config = subject.model.focus.config
    assert (config.window_tokens, config.layers, config.read_span) == (64, (0, 3), None)
    assert subject.model.dtype == torch.bfloat16 and subject.about()["dtype"] == "bfloat16"
    assert (subject.name, subject.longest) == ("tiny", None)
    assert list(subject.complete([Prompt("It was")], max_new_tokens=2))


def test_a_given_name_wins(tiny_model: Path) -> None:
    assert open_local(str(tiny_model), name="mine").about()["name"] == "mine"


def test_names_say_which_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("runs/first/model", "runs/second/checkpoint-200", "llama"):
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert short_name("runs/first/model/") == "first/model"
    assert short_name("runs/second/checkpoint-200") == "second/checkpoint-200"
    assert short_name(os.fspath(tmp_path / "llama")) == "llama"
    assert short_name("org/name") == "org/name" and short_name("default") == "default"
    monkeypatch.chdir(tmp_path / "llama")
    assert short_name(".") == "llama"


def test_wrong_options_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="--dtype: 'int8' given, expected one of float32, float16, bfloat16"):
        open_local("/nowhere", dtype="int8")
    with pytest.raises(ConfigError, match="window: a plain model has no memory"):
        open_local("/nowhere", plain=True, window=64)
    with pytest.raises(ModelNotFoundError, match="/nowhere is not a folder with a model"):
        open_local("/nowhere")


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_a_device_that_is_not_here_is_refused(tiny_model: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device: '{device}' given, but .*; expected cpu"):
        open_local(str(tiny_model), device=device)


def test_what_is_wrong_with_an_endpoint_is_said_before_a_tokenizer_is_loaded() -> None:
    with pytest.raises(ConfigError, match="--endpoint: 'nowhere' given, expected a URL"):
        open_endpoint("nowhere", "far", tokenizer="/nowhere/at/all")


def test_an_endpoint_gets_the_tokenizer_that_was_named(tiny_model: Path) -> None:
    subject = open_endpoint("http://localhost:9/v1", "far", tokenizer=str(tiny_model), longest=99)
    assert isinstance(subject, Endpoint)
    assert (subject.name, subject.longest, len(subject.tokenizer)) == ("far", 99, 400)
