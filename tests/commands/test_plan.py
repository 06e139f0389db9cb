"""`longfocus plan` in a process of its own.

python -m pytest tests/commands/test_plan.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.conftest import longfocus
from tests.training.tiny_run import prepare

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("tiny"))


def test_it_says_what_the_papers_recipe_takes_without_the_model() -> None:
    config = ROOT / "recipes/configs/open_llama_3b"
    done = longfocus("plan", ROOT / "recipes/longllama-3b.yaml", "--config", config, "--device", "h100", "--devices", 8)
    assert (done.code, done.err) == (0, "")
    lines = {line[:13].strip(): line[13:] for line in done.out.splitlines() if line[:13].strip()}
    assert lines["Model"] == "openlm-research/open_llama_3b, 3,426,473,600 weights"
    assert lines["Trained"] == "3,426,473,600 (100.0%)"
    assert lines["Step"].startswith("262,144 tokens")
    assert lines["Memory"] == "layers 6, 12, 18"
    assert lines["Device"].startswith("8 × h100, bfloat16")
    assert "of 80 GB" in lines["Peak memory"] and "too much" not in lines["Peak memory"]
    assert lines["Time"].endswith("hours") or "days" in lines["Time"]


def test_one_json_document_with_measured_steps(recipe: Path) -> None:
    done = longfocus("plan", recipe, "--json", "--measure", "--steps", 1)
    assert done.code == 0, done.err
    assert done.err == "Running 2 steps of 192 tokens …\n"
    assert done.out.count("\n") == 1
    result = json.loads(done.out)
    assert result["tokens_per_step"] == 192
    assert 0 < result["trained_share"] < 1
    assert result["measured"]["tokens_per_s"] > 0
    assert sorted(path.name for path in recipe.parent.iterdir()) == ["model", "recipe.yaml", "texts"], "nothing is kept"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "abacus"], "--device: 'abacus' given, expected one of cpu, a100"),
        (["--flops-per-s", "inf"], "--flops-per-s: inf given, expected a number such as 4e14"),
        (["--set", "model=nobody/nothing"], "give --config FOLDER"),
        (["--set", "run.stepps=3"], "run.stepps is not a key here"),
        (["--config", "nowhere/at/all"], "nowhere/at/all is not a folder with a model"),
    ],
)
def test_impossible_options_are_named(recipe: Path, options: list[str], words: str) -> None:
    done = longfocus("plan", recipe, *options)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert "Traceback" not in done.err
