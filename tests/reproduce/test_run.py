"""Experiments from recipes to pages at the least size; recipes and shapes of all scales.

python -m pytest tests/reproduce/test_run.py
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from longfocus.errors import ConfigError, InputError, TrainingError
from longfocus.reproduce import EXPERIMENTS, find_experiment
from longfocus.reproduce.experiment import SCALES, Experiment, Scale
from longfocus.reproduce.run import check, recipes_of, reproduce, scale_of, write_recipes
from longfocus.tasks import find_task
from longfocus.tasks.texts import Texts
from longfocus.training.output import is_finished
from longfocus.training.recipes import Recipe

ALL = [(name, scale) for name in EXPERIMENTS for scale in SCALES]


def _shrunk(experiment: Experiment, *, steps: int = 3, lines: int | None = None, **options: Any) -> Experiment:
    """The smoke scale with so few steps, and maybe so few lines, that only the way is tested."""

    def scale(name: str, texts: Path) -> Scale:
        smoke = experiment.scale("smoke", texts)
        kept = []
        for line in smoke.lines[:lines]:
            recipe = {**line.recipe, "run": {**line.recipe["run"], "steps": steps, "save_every": 1, "log_every": 1}}
            kept.append(dataclasses.replace(line, recipe=recipe))
        return dataclasses.replace(smoke, lines=kept, seeds=1, options={**smoke.options, **options})

    return dataclasses.replace(experiment, scale=scale)


DICTIONARY = _shrunk(find_experiment("dictionary"), lengths=[32, 64], samples=4)


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


def test_experiments_on_texts_share_the_models_that_they_have_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experiments with the line d = 8, on texts of one's own; the second one only measures it."""
    monkeypatch.setenv("LONGFOCUS_CACHE", str(tmp_path / "cache"))
    for number in range(4):
        (tmp_path / f"texts/{number}").mkdir(parents=True)
        (tmp_path / f"texts/{number}/a.txt").write_text(f"Text {number} says this and that. " * 40, "utf-8")

    def only_d8(name: str, **options: Any) -> Experiment:
        found = _shrunk(find_experiment(name), steps=2, **options)

        def scale(name: str, texts: Path) -> Scale:
            whole = found.scale(name, texts)
            return dataclasses.replace(whole, lines=[line for line in whole.lines if line.name == "lm-d8"])

        return dataclasses.replace(found, scale=scale)

    told: list[str] = []
    given: dict[str, Any] = {"own_texts": {"books": str(tmp_path / "texts")}, "announce": told.append}
    one = reproduce(only_d8("distraction"), "smoke", tmp_path / "out", **given)
    two = reproduce(only_d8("multidoc", tokens=60, settings=["multi"]), "smoke", tmp_path / "out", **given)
    assert [text for text in told if text.startswith("Training lm")] == ["Training lm-d8, seed 0 …"]
    assert [number.x for number in one.numbers] == [1, 2, 4]
    assert one.numbers[0].value == pytest.approx(1.0, abs=1e-6), "one document has all of the mass"
    assert 0 < one.numbers[2].value < one.numbers[1].value < 1
    assert [number.x for number in two.numbers] == [0, 64, 128] and all(n.value > 1 for n in two.numbers)


def test_texts_that_are_missing_are_said_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"books/test\.jsonl\.gz is not there"):
        reproduce(find_experiment("distraction"), "smoke", tmp_path / "out", data=tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_figures_axis_and_measure_are_the_tasks(name: str) -> None:
    experiment = find_experiment(name)
    kind = find_task(experiment.task)
    task = kind(kind.Options(**scale_of(experiment, "smoke", Path("texts")).options), Texts())
    assert experiment.axis in task.axes and {*experiment.where} <= {*task.axes}
    (measure,) = (measure for measure in task.measures if measure.name == experiment.measure)
    assert (measure.kind == "share") == experiment.share


def test_models_of_another_recipe_are_not_taken_for_ones_own(whole: Path) -> None:
    with pytest.raises(TrainingError, match=r"other settings \(run.steps\)"):
        reproduce(_shrunk(find_experiment("dictionary"), steps=4), "smoke", whole)


def test_recipes_are_written_for_longfocus_train_and_what_they_gave_is_found(whole: Path, tmp_path: Path) -> None:
    paths = write_recipes(DICTIONARY, "smoke", whole, tmp_path / "recipes")
    assert [path.name for path in paths] == ["fot-smoke-seed0.yaml", "plain-smoke-seed0.yaml"]
    for path in paths:
        recipe = Recipe.read(path)
        assert is_finished(Path(recipe.run.output), recipe)
        assert not is_finished(Path(recipe.run.output), Recipe.read(path, ["run.seed=1"]))
    with pytest.raises(ConfigError, match="cannot be written"):
        write_recipes(DICTIONARY, "smoke", whole, paths[0])


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="write its recipes with --recipes"):
        reproduce(DICTIONARY, "smoke", tmp_path / "out")


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
