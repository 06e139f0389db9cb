"""Recipes: what is wrong is said before anything is loaded; every recipe of the repository is valid.

python -m pytest tests/training/test_recipes.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from longfocus.crossbatch.plan import NAMED_MIXES, documents
from longfocus.crossbatch.schedules import ByAccuracy, Drawn, Switched
from longfocus.errors import ConfigError
from longfocus.training.recipes import Recipe

ROOT = Path(__file__).parents[2]
LEAST: dict[str, Any] = {
    "crossbatch": {"mix": "longllama_3b"},
    "data": {"sources": [{"name": "a", "share": 1.0, "paths": ["a.txt"]}]},
    "optimizer": {"lr": 1e-5},
    "run": {"steps": 10},
}


def _changed(tmp_path: Path, *changes: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(LEAST), "utf-8")
    return Recipe.read(path, changes)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_repository_is_valid_and_dumps_to_itself(path: Path, tmp_path: Path) -> None:
    recipe = Recipe.read(path)
    (tmp_path / "again.yaml").write_text(recipe.dump(), "utf-8")
    assert Recipe.read(tmp_path / "again.yaml") == recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("modl=x", "modl is not a key here. Did you mean 'model'"),
        ("crossbatch.place=3", "Did you mean 'places'"),
        ("run.steps=0", "run.steps: 0 given.*greater than or equal to 1"),
        ("run.steps=many", "run.steps: 'many' given"),
        ("run.tokens=100", "steps, tokens: give one of them"),
        ("run.precision=float8", "float8.*'auto', 'float32' or 'bfloat16'"),
        ("optimizer.lr=0", "optimizer.lr: 0 given"),
        ("crossbatch.drawn=[{d: 2}, {d: 128}]", "expected exactly one of mix"),
        ("crossbatch.mix=longllama_13b", "longllama_3b"),
        ("crossbatch.mix={shares: [[0.5, 1, 1]]}", "add up to 1"),
        ("crossbatch.stride=9", "expected at most windows_per_step"),
        ("crossbatch.negative_copies=0.5", "negative_copies"),
        ("focus.window=0", "window: 0 given"),
        ("focus.memory_layer=[1]", "Did you mean 'memory_layers'"),
        ("method=long", "expected a section of that name"),
        ("data.sources=[]", "data.sources"),
        ("crossbatch.mix=3", "crossbatch.mix: 3 given"),
        ("data.sources.a.kind=pdf", "'pdf' given.*text, jsonl, .*, retrieval, dictionary"),
        ("data.sources.a.kind=[]", "kind: \\[\\] given"),
        ("run.seed=4294967296", "run.seed: 4294967296 given"),
        ("data.sources.a.share=-1", "share"),
        ("data.sources.b.share=1", "no item b in a list of 1"),
        ("train.what=everything", "everything.*'memory_attention'"),
        ("train.lora.rank=3", "lora.rank is not a key here"),
        ("run.steps", "expected key=value"),
        ("run.steps.x=3", "steps is not a section"),
        ("run=[", "not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _changed(tmp_path, change)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("crossbatch.mix=longllama", "crossbatch.mix: 'longllama' given; input should be 'local', 'longllama_3b' or 'longllama_7b'"),
        ("crossbatch.mix={d: 0}", "crossbatch.mix.d: 0 given; input should be greater than or equal to 1"),
        ("crossbatch.mix={d: 2, x: 1}", "crossbatch.mix.x is not a key here. Known: d, w"),
        ("crossbatch.mix={shares: [[0.5, 0]]}", "crossbatch.mix.shares.0.2 is missing"),
        ("data.sources.a.share=-1", "data.sources.0.share: -1 given; input should be greater than 0"),
        ("model={layers: 1, hidden: 8, heads: 1}", "model.intermediate is missing"),
    ],
)  # fmt: skip
def test_of_several_forms_only_the_one_that_was_meant_is_spoken_of(tmp_path: Path, change: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _changed(tmp_path, change)
    assert str(caught.value) == f"{tmp_path / 'recipe.yaml'}: {told}"


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Recipe.read(tmp_path / "none.yaml")
    for text, message in (("a: [", "is not YAML"), ("just words", "expected keys"), ("{}", "data is missing")):
        (tmp_path / "bad.yaml").write_text(text, "utf-8")
        with pytest.raises(ConfigError, match=message):
            Recipe.read(tmp_path / "bad.yaml")


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    assert _changed(tmp_path, "optimizer.lr=2e-5").optimizer.lr == 2e-5
    assert _changed(tmp_path, "run.steps=1_000").run.steps == 1000


def test_schedules_of_the_paper(tmp_path: Path) -> None:
    def schedule(change: str) -> Any:
        part = _changed(tmp_path, "crossbatch.mix=null", change).crossbatch
        assert part is not None
        return part.schedule(100)

    switched = schedule("crossbatch.stages=[{after: 0.0, mix: {d: 2}}, {after: 0.9, mix: {d: 64}}]")
    assert switched == Switched([(0, documents(2)), (90, documents(64))])
    assert schedule("crossbatch.drawn=[{d: 2}, {d: 128}]") == Drawn([documents(2), documents(128)])
    assert schedule("crossbatch.by_accuracy=[{d: 1}, 0.98, {d: 128}]") == ByAccuracy(documents(1), documents(128), 0.98)
    assert _changed(tmp_path).crossbatch.schedule(5).mixes == [NAMED_MIXES["longllama_3b"]]  # type: ignore[union-attr]


def test_length_in_tokens_is_rounded_up_to_steps(tmp_path: Path) -> None:
    recipe = _changed(
        tmp_path, "run.steps=null", "run.tokens=100_000", "crossbatch.places=2", "crossbatch.windows_per_step=4"
    )
    assert recipe.tokens_per_step(256) == 2048
    assert recipe.steps(256) == 49
    assert recipe.steps(256, processes=2) == 25


def test_checking_a_recipe_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from longfocus.training.recipes import Recipe; "
        f"Recipe.read({str(ROOT / 'recipes/smollm2-135m-quick.yaml')!r}); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
