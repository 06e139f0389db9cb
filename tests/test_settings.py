"""Sizes and what people set: read in every form, and refused in words that name the key.

python -m pytest tests/test_settings.py
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, model_validator

from longfocus.errors import ConfigError
from longfocus.settings import Size, Sizes, apply_change, load_yaml, size_name, size_of, sizes_of, validated


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
    for wrong in ("window", "=3", ".=3", "a..b=3", ".a=3", "a.=3", "lengths.7=1", "window=[", "window.deep=1"):
        with pytest.raises(ConfigError, match="--set"):
            apply_change(raw, wrong)
    assert raw == {"lengths": [1, 5], "window": 512}


def test_a_change_reaches_into_a_section_that_is_off() -> None:
    raw: dict[str, Any] = {"lora": None, "list": [None]}
    apply_change(raw, "lora.deep.r=8")
    assert raw["lora"] == {"deep": {"r": 8}}


@pytest.mark.parametrize(
    "text", ["a: 1\na: 2\n", "a: 1\nb: 2\n'a': 1\n", "x: {a: 1, a: 1}\n", "- {a: 1, b: 2, a: 3}\n"]
)
def test_a_key_that_stands_twice_is_an_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="the key 'a' stands twice"):
        load_yaml(text)


def test_a_key_may_stand_again_elsewhere_and_over_what_is_merged() -> None:
    assert load_yaml("x: &x {a: 1}\ny: {<<: *x, a: 2}\nz: {a: 3}\n") == {"x": {"a": 1}, "y": {"a": 2}, "z": {"a": 3}}


@pytest.mark.parametrize("text", ["a: " + "[" * 3000 + "]" * 3000, "a: " + "{b: " * 3000 + "}" * 3000])
def test_yaml_that_is_nested_too_deeply_is_an_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="nested too deeply"):
        load_yaml(text)


def test_a_value_that_holds_itself_is_an_error() -> None:
    with pytest.raises(ConfigError, match="options of x: a value holds itself"):
        validated(Options, load_yaml("lengths: &x [*x]"), "options of x")


def test_of_many_mistakes_some_are_told_and_the_rest_counted() -> None:
    with pytest.raises(ConfigError, match=r"x5 is not a key here.*; and 3 more$"):
        validated(Options, {f"x{number}": 1 for number in range(9)}, "options of x")
