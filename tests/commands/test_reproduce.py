"""`longfocus reproduce` as people call it.

python -m pytest tests/commands/test_reproduce.py
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from longfocus.cli import app
from longfocus.errors import ConfigError
from longfocus.reproduce import EXPERIMENTS


def _invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["reproduce", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_list_names_every_experiment_with_its_claims() -> None:
    said = _invoke("--list")
    assert [line.split(":")[0] for line in said.splitlines() if not line.startswith(" ")] == list(EXPERIMENTS)
    assert "dictionary: Dictionary lookup (appendix F, figure 10)\n    at least 92%" in said
    assert "keys: Keys that a query takes from memory (not in the paper)\n    k = 32 is like" in said


def test_help_has_the_scales_and_examples() -> None:
    said = _invoke("--help")
    for part in ("--scale", "--smoke", "--seeds", "longfocus reproduce dictionary --smoke"):
        assert part in said


def test_check_prints_the_shapes_of_the_paper() -> None:
    found = json.loads(_invoke("dictionary", "--scale", "paper", "--check"))
    assert [(model["model"], model["steps"], model["seeds"]) for model in found] == [
        ("fot", 5000, 10),
        ("plain", 5000, 10),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "NAME: none given, expected one of dictionary"),
        (["figure10"], "figure10 is not an experiment"),
        (["dictionary", "--smoke", "--scale", "small"], "give one of them"),
        (["dictionary", "--scale", "huge"], "'huge' given, expected one of smoke, small, paper"),
        (["dictionary", "--smoke", "--text", "books"], "expected NAME=PATH"),
    ],
)
def test_what_does_not_fit_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _invoke(*arguments)
