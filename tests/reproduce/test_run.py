"""Experiments from recipes to pages at the least size; recipes and shapes of all scales.

python -m pytest tests/reproduce/test_run.py
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from longfocus.errors import ConfigError, InputError, TrainingError
from longfocus.reproduce import EXPERIMENTS, find_experiment
from longfocus.reproduce.experiment import SCALES, Experiment, Model, Scale
from longfocus.reproduce.run import check, recipes_of, reproduce, scale_of, write_recipes
from longfocus.tasks import find_task
from longfocus.tasks.texts import Texts
from longfocus.training.output import is_finished
from longfocus.training.recipes import Recipe

FROM_SCRATCH = (32_768, 500_000)
LENGTHS = {
    **{name: {FROM_SCRATCH} for name in EXPERIMENTS},
    "dictionary": {(65_536, 5_000)},
    "extending": {(131_072, 110_000)},
    "single-document": {FROM_SCRATCH, (131_072, 110_000)},
}
"""Experiment -> (tokens a step, steps) of the paper."""
ALL = [(name, scale) for name in EXPERIMENTS for scale in SCALES]


def _shorter(model: Model, steps: int) -> Model:
    """The same with so few steps, and its bases too."""
    recipe = {**model.recipe, "run": {**model.recipe["run"], "steps": steps, "save_every": 1, "log_every": 1}}
    return dataclasses.replace(model, recipe=recipe, base=model.base and _shorter(model.base, steps))


def _shrunk(experiment: Experiment, *, steps: int = 3, lines: int | None = None, **options: Any) -> Experiment:
    """The smoke scale with so few steps, and maybe so few lines, that only the way is tested."""

    def scale(name: str, texts: Path) -> Scale:
        smoke = experiment.scale("smoke", texts)
        kept = [dataclasses.replace(line, model=_shorter(line.model, steps)) for line in smoke.lines[:lines]]
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
    assert [(t["model"], t["steps"]) for t in found["trained"]] == [("fot", 3), ("plain", 3)]
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


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few short texts of one's own."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(4):
        (folder / f"{number}").mkdir()
        (folder / f"{number}/a.txt").write_text(f"Text {number} says this and that. " * 60, "utf-8")
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all experiments; which of them runs first trains what they share."""
    return tmp_path_factory.mktemp("shared")


IN_CI = ("differentiable", "extending", "gate", "keys", "memory-positions")
"""One of each kind: two lines, going on from a base, a gate, k by evaluation, options of the model. The others run in `make nightly`."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow)
        for name in EXPERIMENTS
        if name not in ("dictionary", "distraction", "multidoc")
    ],
)
def test_every_experiment_runs_to_its_page(
    name: str, texts: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All lines get numbers at the x that they are to be compared at, and every claim names what was measured."""
    monkeypatch.setenv("LONGFOCUS_CACHE", str(shared / "cache"))
    own = {part: str(texts) for part in ("books", "code", "arxiv", "isabelle")}
    experiment = _shrunk(find_experiment(name), steps=2, tokens=60)
    report = reproduce(experiment, "smoke", shared, own_texts=own)
    lines = {line.name: line for line in report.scale.lines}
    found = {line: {n.x: n.value for n in report.numbers if n.line == line} for line in lines}
    assert not report.stopped and all(found.values()), found
    for line, points in found.items():
        assert all(1 < value < 1000 for value in points.values()), line
    results = json.loads((shared / f"{name}-smoke/results.json").read_text("utf-8"))
    longest = max(n.x for n in report.numbers)
    for claim, told in zip(experiment.claims, results["claims"], strict=True):
        assert told["detail"].startswith("not measured") == (getattr(claim, "least", 0) > longest), told
    page = (shared / f"{name}-smoke/page.md").read_text("utf-8")
    assert all(f"### {line.group}\n" in page for line in lines.values() if line.group)
    assert (shared / f"{name}-smoke/figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_base_is_trained_once_and_gone_on_from(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the base, after it, and in what goes on from it; then moved, and called by another path."""
    monkeypatch.setenv("LONGFOCUS_CACHE", str(tmp_path / "cache"))
    found = _shrunk(find_experiment("then-memorizing"), steps=2, tokens=60)

    class StopError(Exception):
        pass

    def run_until(begin: str, folder: Path) -> list[str]:
        told: list[str] = []

        def announce(text: str) -> None:
            told.append(text)
            if begin and text.startswith(begin):
                raise StopError

        if begin:
            with pytest.raises(StopError):
                reproduce(experiment, "smoke", folder, own_texts={"books": str(texts)}, announce=announce)
        else:
            reproduce(experiment, "smoke", folder, own_texts={"books": str(texts)}, announce=announce)
        return [text for text in told if text.startswith("Training lm")]

    def only_then(name: str, texts: Path) -> Scale:
        whole = found.scale(name, texts)
        return dataclasses.replace(whole, lines=[line for line in whole.lines if line.name == "lm-d2-then-memorizing"])

    experiment = dataclasses.replace(found, scale=only_then)
    base, after = "Training lm-d2-begun, seed 0 …", "Training lm-d2-then-memorizing, seed 0 …"
    assert run_until("step 1/", tmp_path / "out") == [base]
    assert run_until("Training lm-d2-then", tmp_path / "out") == [base, after]
    assert run_until("step 1/", tmp_path / "out") == [after]
    assert run_until("", tmp_path / "out") == [after]
    models = tmp_path / "out/models"
    result = json.loads((tmp_path / "out/then-memorizing-smoke/results.json").read_text("utf-8"))
    assert [(t["model"], t["steps"]) for t in result["trained"]] == [("lm-d2-begun", 2), ("lm-d2-then-memorizing", 2)]
    recipe = Recipe.read(models / "lm-d2-then-memorizing-smoke-seed0/recipe.yaml")
    assert recipe.model == str(models / "lm-d2-begun-smoke-seed0/model") and recipe.run.seed == 1000
    weights = [load_file(path / "model/model.safetensors") for path in sorted(models.iterdir())]
    changes = [float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]]
    assert 0 < max(changes) < 0.02, "two steps from the base"
    (tmp_path / "out").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert run_until("", Path("moved")) == []


def test_recipes_of_bases_come_first_and_no_two_models_share_a_name(tmp_path: Path) -> None:
    experiment = _shrunk(find_experiment("then-memorizing"), steps=2)
    scale = scale_of(experiment, "smoke", Path("texts"))
    (model,) = (line.model for line in scale.lines if line.name == "lm-d2-then-memorizing")
    assert [one.name for one in model.lineage] == ["lm-d2-begun", "lm-d2-then-memorizing"]
    paths = write_recipes(experiment, "smoke", tmp_path / "out", tmp_path / "recipes")
    assert [path.name for path in paths][-2:] == [
        "lm-d2-begun-smoke-seed0.yaml",
        "lm-d2-then-memorizing-smoke-seed0.yaml",
    ]
    assert Recipe.read(paths[-1]).model == str(tmp_path / "out/models/lm-d2-begun-smoke-seed0/model")
    assert model.base is not None
    other = dataclasses.replace(model.base, recipe={**model.base.recipe, "method": "long"})
    line = dataclasses.replace(scale.lines[-1], name="other", model=dataclasses.replace(model, base=other))
    with pytest.raises(AssertionError, match="two models are called lm-d2-begun"):
        _ = dataclasses.replace(scale, lines=[*scale.lines, line]).models


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
    assert len(lines) == len(scale.lines)
    recipes = recipes_of(scale_name, scale, 2, Path("models"))
    assert len(recipes) == 2 * len(scale.models) == len({recipe.run.output for recipe in recipes.values()})
    assert {recipe.run.seed for recipe in recipes.values()} - {1000, 1001} == {0, 1}
    assert set(experiment.published.lines) <= lines
    for claim in experiment.claims:
        named = {getattr(claim, field) for field in ("line", "than") if hasattr(claim, field)}
        assert named <= lines, claim.text


@pytest.mark.parametrize("scale_name", SCALES)
def test_a_name_means_one_model_in_all_experiments(scale_name: str) -> None:
    found: dict[str, Model] = {}
    uses: dict[str, int] = {}
    for name in EXPERIMENTS:
        for model in scale_of(find_experiment(name), scale_name, Path("texts")).models:
            assert found.setdefault(model.name, model) == model, f"{model.name} of {name}"
            uses[model.name] = uses.get(model.name, 0) + 1
    assert uses["lm-d2"] > 2 and uses["base"] == 2, "they are shared"


@pytest.mark.parametrize(("name", "scale_name"), ALL)
def test_every_scale_can_be_built(name: str, scale_name: str) -> None:
    """Shapes only: the full recipes of the paper are made without their weights."""
    for model in check(find_experiment(name), scale_name, Path("texts")):
        if scale_name == "paper":
            weights = 37e6 if name == "dictionary" else 184e6
            assert abs(model["weights"] / weights - 1) < 0.02 and model["layers"] == 12, model
        elif scale_name == "small":
            assert model["weights"] < 2_000_000, model


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_papers_length_of_training(name: str) -> None:
    """Steps, those of the bases among them, and tokens of a step."""
    found = {model["model"]: model for model in check(find_experiment(name), "paper", Path("texts"))}
    for model in found.values():
        steps, base = model["steps"], model["base"]
        while base is not None:
            steps, base = steps + found[base]["steps"], found[base]["base"]
        if model["model"] in {found[other]["base"] for other in found}:
            continue
        assert (model["tokens_per_step"], steps) in LENGTHS[name], model


def test_what_is_not_known_is_named() -> None:
    with pytest.raises(ConfigError, match=r"dictionery is not an experiment\. Did you mean 'dictionary'"):
        find_experiment("dictionery")
    with pytest.raises(ConfigError, match="'big' given, expected one of smoke, small, paper"):
        scale_of(DICTIONARY, "big")
