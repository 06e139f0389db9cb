"""`longfocus suggest-layers` in a process of its own, on a model that was built to copy with one head.

python -m pytest tests/commands/test_suggest_layers.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.analysis.copying import copying_model
from tests.commands.conftest import longfocus
from tests.small_tokenizers import talking


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 2, head 3 copies."""
    folder = tmp_path_factory.mktemp("models") / "copies"
    words = talking()
    copying_model(len(words), previous=(0, 1), copying=(2, 3)).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def test_it_names_the_layer_and_head_that_copy(copies: Path) -> None:
    done = longfocus("suggest-layers", copies, "--probe", "tokens", "--tokens", 80, "--prompts", 3)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split() == ["Layer", "Best", "head", "Score", "Second", "head", "Score"]
    assert lines[1].split()[:2] == ["2", "3"]
    assert lines[1].endswith("*")
    assert sum(line.endswith("*") for line in lines) == 1
    assert lines[-1] == "memory_layers: [2]"
    assert "Only 1 of 4 layers score 0.1 or more." in done.err


def test_one_json_document(copies: Path) -> None:
    done = longfocus(
        "suggest-layers", copies, "--probe", "tokens", "--tokens", 80, "--prompts", 3, "--layers", 1, "--json"
    )
    assert (done.code, done.err) == (0, "")
    assert done.out.count("\n") == 1
    result = json.loads(done.out)
    assert result["memory_layers"] == [2]
    assert result["layers"][0]["head"] == 3
    assert result["layers"][0]["score"] == result["scores"][2][3] > 0.95
    assert (result["prompts"], result["answer_tokens"]) == (3, 3 * 39)
    assert result["accuracy"] > 0.97
    assert [entry["proposed"] for entry in result["layers"]] == [True, False, False, False]


def test_an_attached_checkpoint_is_measured_as_the_plain_model(tiny_model: Path) -> None:
    done = longfocus("suggest-layers", tiny_model, "--tokens", 1000, "--prompts", 1, "--threshold", 1)
    assert done.code == 0, done.err
    assert "memory_layers" not in done.out
    assert "Try --probe tokens, or choose evenly spaced layers." in done.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--probe", "music"], "--probe: 'music' given, expected one of text, tokens"),
        (["--probe", "tokens", "--tokens", 2000], "prompts of 2000 tokens given, expected at most the 1024"),
        (["--window", 4096], "window: 4096 given"),
    ],
)
def test_impossible_options_are_named(copies: Path, options: list[str], words: str) -> None:
    done = longfocus("suggest-layers", copies, *options)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert done.err.startswith("longfocus: ")
    assert "Traceback" not in done.err
