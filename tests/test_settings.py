"""Sizes and what people set: read in every form, and refused in words that name the key.

python -m pytest tests/test_settings.py
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, model_validator

from longfocus.errors import ConfigError
from longfocus.settings import Size, Sizes, apply_change, size_name, size_of, sizes_of, validated


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lengths: Sizes = [2048]
    window: Size = 256

    @model_validator(mode="after")
    def _fits(self) -> Options:
        if self.window > max(self.lengths):
            raise ValueError(f"window: {self.window} given, expected at most the longest of lengths.")
        return self


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("8k", 8192), ("8K", 8192), ("1M", 1 << 20), (" 1.5k ", 1536), ("1_000", 1000), (7, 7), ("0", 0)],
)
def test_a_size(text: Any, tokens: int) -> None:
    assert size_of(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "8kk", "-5", "1e3", "eight", "٣", "2,5", 2.5, None, True, [1], float("nan")])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ConfigError, match="expected a size in tokens such as 4096, 8k or 1M"):
        size_of(text)


def test_sizes_come_in_order_and_once() -> None:
    assert sizes_of("8k,2k, 8192,500") == [500, 2048, 8192]


@given(st.integers(1, 1 << 40))
def test_names_of_sizes_say_what_they_are(tokens: int) -> None:
    assert size_of(size_name(tokens).replace(",", "")) == tokens


@pytest.mark.parametrize(
    ("given", "lengths"), [("2k,8k", [2048, 8192]), (8192, [8192]), (["8k", 512], [512, 8192]), ([3000, 3000], [3000])]
)
def test_lengths_in_every_form(given: Any, lengths: list[int]) -> None:
    assert validated(Options, {"lengths": given}, "options of x").lengths == lengths


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lengths": []}, "lengths"),
        ({"lengths": "0"}, "lengths.0: 0 given"),
        ({"lengths": {}}, "lengths: {} given"),
        ({"lengths": [2.5]}, "lengths: 2.5 given"),
        ({"lengths": [None]}, "lengths: None given"),
        ({"lengths": True}, "lengths: True given"),
        ({"window": 2.5}, "window: 2.5 given"),
        ({"window": "many"}, "window: 'many' given"),
        ({"window": 0}, "window: 0 given"),
        ({"windw": 8}, "windw is not a key here. Did you mean 'window'? Known: lengths, window"),
        ({"window": "8k"}, "options of x: window: 8192 given, expected at most the longest of lengths."),
    ],
)
def test_mistakes_name_the_key_and_the_value(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validated(Options, given, "options of x")
    assert words in str(caught.value)
    assert str(caught.value).startswith("options of x: ")
    assert "\n" not in str(caught.value)


def test_a_change_sets_one_value() -> None:
    raw: dict[str, Any] = {"lengths": [1, 2]}
    apply_change(raw, "window=512")
    apply_change(raw, "lengths.1=5")
    assert raw == {"lengths": [1, 5], "window": 512}
    for wrong in ("window", "=3", "lengths.7=1", "window=[", "window.deep=1"):
        with pytest.raises(ConfigError, match="--set"):
            apply_change(raw, wrong)
