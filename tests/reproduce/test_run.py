"""Experiments from recipes to pages at the least size; recipes and shapes of all scales.

python -m pytest tests/reproduce/test_run.py
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from longfocus.errors import ConfigError, TrainingError
from longfocus.reproduce import EXPERIMENTS, find_experiment
from longfocus.reproduce.experiment import SCALES, Experiment, Scale
from longfocus.reproduce.run import check, recipes_of, reproduce, scale_of

ALL = [(name, scale) for name in EXPERIMENTS for scale in SCALES]


def _shrunk(experiment: Experiment, *, steps: int = 3, seeds: int = 1) -> Experiment:
    """The smoke scale with so few steps that only the way is tested."""

    def scale(name: str, texts: Path) -> Scale:
        smoke = experiment.scale("smoke", texts)
        lines = []
        for line in smoke.lines:
            recipe = {**line.recipe, "run": {**line.recipe["run"], "steps": steps, "save_every": 1, "log_every": 1}}
            lines.append(dataclasses.replace(line, recipe=recipe))
        return dataclasses.replace(
            smoke, lines=lines, seeds=seeds, options={**smoke.options, "lengths": [32, 64], "samples": 4}
        )

    return dataclasses.replace(experiment, scale=scale)


DICTIONARY = _shrunk(find_experiment("dictionary"))


def _results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "dictionary-smoke" / "results.json").read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert not reproduce(DICTIONARY, "smoke", folder).stopped
    return folder


def test_all_is_trained_measured_drawn_and_told(whole: Path) -> None:
    own = whole / "dictionary-smoke"
    found = _results(whole)
    assert {(n["line"], n["seed"], n["x"]) for n in found["numbers"]} == {
        (line, 0, x) for line in ("fot", "plain") for x in (32, 64)
    }
    for number in found["numbers"]:
        rows = json.loads((own / f"eval/{number['line']}-seed0/results.json").read_text("utf-8"))["rows"]
        (row,) = (row for row in rows if row["values"]["tokens"] == number["x"])
        assert row["estimates"]["right"]["value"] == number["value"] and number["samples"] == 4
    assert [claim["outcome"] for claim in found["claims"]] == ["undecided"] * 3
    assert [(t["line"], t["steps"]) for t in found["trained"]] == [("fot", 3), ("plain", 3)]
    page = (own / "page.md").read_text("utf-8")
    for part in (
        "Scale **smoke**",
        "figure 10",
        "above 92%",
        "about 94%",
        "| undecided |",
        "## Training",
        "What differs",
    ):
        assert part in page, part
    assert "Not finished" not in page
    assert (own / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_call_does_nothing_again(whole: Path) -> None:
    def stamps() -> dict[Path, int]:
        kept = [*whole.rglob("samples.jsonl"), *whole.rglob("model.safetensors"), *whole.rglob("log.jsonl")]
        return {path: path.stat().st_mtime_ns for path in kept}

    before, told = stamps(), []
    reproduce(DICTIONARY, "smoke", whole, announce=told.append)
    assert stamps() == before and len(before) == 6 + 4  # with the checkpoints' weights
    assert not [text for text in told if text.startswith("Training")]


def test_interrupted_in_training_and_in_measuring_it_goes_on_to_the_same_results(whole: Path, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop_at(begin: str) -> Any:
        def announce(text: str) -> None:
            if text.startswith(begin):
                raise StopError

        return announce

    class Bar:
        """Stops the measuring at its second sample."""

        def __init__(self, name: str) -> None:
            pass

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def step(self, point: Any, done: int, total: int) -> None:
            if done == 2:
                raise KeyboardInterrupt

    for begin in ("step 2/", "Training plain", "Evaluating plain"):
        with pytest.raises(StopError):
            reproduce(DICTIONARY, "smoke", tmp_path, announce=stop_at(begin))
    samples = tmp_path / "dictionary-smoke/eval/plain-seed0/samples.jsonl"
    report = reproduce(DICTIONARY, "smoke", tmp_path, bar=Bar)
    assert report.stopped and len(samples.read_text("utf-8").splitlines()) == 2
    assert "Not finished" in (tmp_path / "dictionary-smoke/page.md").read_text("utf-8")
    assert not reproduce(DICTIONARY, "smoke", tmp_path).stopped
    mine, other = _results(tmp_path), _results(whole)
    for name in ("numbers", "claims", "trained"):
        assert mine[name] == other[name], name


def test_models_of_another_recipe_are_not_taken_for_ones_own(whole: Path) -> None:
    with pytest.raises(TrainingError, match=r"other settings \(run.steps\)"):
        reproduce(_shrunk(find_experiment("dictionary"), steps=4), "smoke", whole)


@pytest.mark.parametrize(("name", "scale_name"), ALL)
def test_every_scale_has_valid_recipes_and_known_lines(name: str, scale_name: str) -> None:
    experiment = find_experiment(name)
    scale = scale_of(experiment, scale_name, Path("texts"))
    lines = {line.name for line in scale.lines}
    recipes = recipes_of(scale_name, scale, 2, Path("models"))
    assert len(recipes) == 2 * len(lines) == len({recipe.run.output for recipe in recipes.values()})
    assert {recipe.run.seed for recipe in recipes.values()} == {0, 1}
    assert set(experiment.published.lines) <= lines
    for claim in experiment.claims:
        named = {getattr(claim, field) for field in ("line", "than") if hasattr(claim, field)}
        assert named <= lines, claim.text


@pytest.mark.parametrize(("name", "scale_name"), ALL)
def test_every_scale_can_be_built(name: str, scale_name: str) -> None:
    """Shapes only: the full recipes of the paper are made without their weights."""
    for line in check(find_experiment(name), scale_name, Path("texts")):
        if scale_name == "paper":
            weights, tokens = (37e6, 65_536) if name == "dictionary" else (184e6, 32_768)
            assert abs(line["weights"] / weights - 1) < 0.02, line
            assert line["tokens_per_step"] == tokens and line["layers"] == 12, line
            assert line["steps"] == (5_000 if name == "dictionary" else 500_000)
        elif scale_name == "small":
            assert line["weights"] < 2_000_000, line


def test_what_is_not_known_is_named() -> None:
    with pytest.raises(ConfigError, match=r"dictionery is not an experiment\. Did you mean 'dictionary'"):
        find_experiment("dictionery")
    with pytest.raises(ConfigError, match="'big' given, expected one of smoke, small, paper"):
        scale_of(DICTIONARY, "big")
