"""An experiment from its recipes to its page: train all, evaluate all, draw. Stopped anywhere, the same call goes on there.

    reproduce(find_experiment("dictionary"), "small", Path("out/reproduce"))

In the folder: `models/MODEL-SCALE-seedN/` (runs of `longfocus train`), and `NAME-SCALE/` with `eval/LINE-seedN/` (runs of
`longfocus eval`, each named after the first line that it serves), `results.json`, `figure.png`, `page.md` (docs/formats.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from longfocus.errors import ConfigError
from longfocus.evaluation.record import Results
from longfocus.evaluation.run import evaluate
from longfocus.files import write_whole
from longfocus.reproduce.claims import Number
from longfocus.reproduce.experiment import RESULT_FOLDER, SCALES, Evaluation, Experiment, Scale
from longfocus.reproduce.page import write
from longfocus.reproduce.report import Report, Trained
from longfocus.settings import validated
from longfocus.subjects.open import open_local
from longfocus.tasks import find_task
from longfocus.tasks.texts import Texts, default_folder
from longfocus.training.output import LOG, RESULT, is_finished
from longfocus.training.recipes import Recipe, Scratch
from longfocus.training.run import run
from longfocus.training.scratch import count_weights

Announce = Callable[[str], None]
MODELS = "models"


def scale_of(experiment: Experiment, name: str, data: Path | None = None) -> Scale:
    """What an experiment does at a scale.

    Raises:
        ConfigError: there is no such scale.
    """
    if name not in SCALES:
        raise ConfigError(f"--scale: {name!r} given, expected one of {', '.join(SCALES)}.")
    return experiment.scale(name, data if data is not None else default_folder())


def recipes_of(scale_name: str, scale: Scale, seeds: int, folder: Path) -> dict[tuple[str, int], Recipe]:
    """(model, seed) -> validated recipe, in an order in which they can be trained.

    Raises:
        ConfigError: a recipe is not valid.
    """
    return {
        (model.name, seed): model.trained_as(scale_name, seed, folder)
        for model in scale.models
        for seed in range(seeds)
    }


def check(experiment: Experiment, scale_name: str, data: Path | None = None) -> list[dict[str, Any]]:
    """Validate all recipes of a scale and build their shapes, without weights; a dict a model.

    Raises:
        ConfigError: a recipe or an option is not valid.
    """
    scale = scale_of(experiment, scale_name, data)
    for evaluation in scale.evaluations:
        _task(experiment, evaluation, Texts(data))
    recipes = recipes_of(scale_name, scale, 1, Path(MODELS))
    found = []
    for model in scale.models:
        recipe, first = recipes[model.name, 0], recipes[model.lineage[0].name, 0]
        assert isinstance(first.model, Scratch)
        focus = recipe.focus_config.resolve(first.model.layers, first.model.longest)
        window = focus.window_tokens
        found.append(
            {
                "model": model.name,
                "base": model.base.name if model.base is not None else None,
                "weights": count_weights(first.model),
                "layers": first.model.layers,
                "memory_layers": list(focus.layers),
                "window": window,
                "tokens_per_step": recipe.tokens_per_step(window),
                "steps": recipe.steps(window),
                "seeds": scale.seeds,
            }
        )
    return found


def write_recipes(
    experiment: Experiment,
    scale_name: str,
    folder: Path,
    to: Path,
    *,
    data: Path | None = None,
    seeds: int | None = None,
) -> list[Path]:
    """The training recipes as files for `longfocus train`; `reproduce` with the same folder measures what they gave.

    Args:
        folder: of all experiments, as for `reproduce`.
        to: where the files go.

    Raises:
        ConfigError: a recipe is not valid, or the folder cannot be written.
    """
    scale = scale_of(experiment, scale_name, data)
    made = recipes_of(scale_name, scale, scale.seeds if seeds is None else seeds, folder / MODELS)
    paths = []
    try:
        to.mkdir(parents=True, exist_ok=True)
        for recipe in made.values():
            paths.append(to / f"{Path(recipe.run.output).name}.yaml")
            write_whole(paths[-1], recipe.dump())
    except OSError as error:
        raise ConfigError(f"--recipes: {to} cannot be written: {error.strerror or error}.") from error
    return paths


def reproduce(
    experiment: Experiment,
    scale_name: str,
    folder: Path,
    *,
    data: Path | None = None,
    own_texts: Mapping[str, str] | None = None,
    seeds: int | None = None,
    announce: Announce = lambda text: None,
    progress: Any = None,
    bar: Callable[[str], AbstractContextManager[Any]] | None = None,
) -> Report:
    """Run an experiment to its end, from where an earlier call stopped.

    Args:
        folder: of all experiments; models that two of them share are trained once.
        data: folder of the text sets; None: as `longfocus eval`.
        own_texts: name of a set -> texts of one's own in its place.
        seeds: fewer or more than the scale's.
        announce: told what is being done, a line at a time.
        progress: told while sources are tokenised.
        bar: given the name of an evaluation, a context manager whose `step` is told after each sample.

    Returns:
        The report; `stopped` after Ctrl-C. Its files are written in both cases.

    Raises:
        ConfigError: several processes run it.
        LongfocusError: as training and evaluating.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(
            "reproduce runs in one process; write its recipes with --recipes, train them with torchrun … longfocus train, and then "
            "call it once more without torchrun."
        )
    scale = scale_of(experiment, scale_name, data)
    seeds = scale.seeds if seeds is None else seeds
    recipes = recipes_of(scale_name, scale, seeds, folder / MODELS)
    texts = Texts(data, own_texts)
    evaluations = scale.evaluations
    for evaluation in evaluations:  # what is wrong in its options, or missing, shows before anything is trained
        _task(experiment, evaluation, texts)
        for part in evaluation.options.get("texts", ()):
            texts.documents(part)
    own = folder / f"{experiment.name}-{scale_name}"
    report = Report(experiment, scale_name, scale, seeds, own)
    for (name, seed), recipe in recipes.items():
        output = Path(recipe.run.output)
        if not is_finished(output, recipe):
            announce(f"Training {name}, seed {seed} …")
            if run(recipe, announce=announce, progress=progress).stopped:
                report.stopped = True
                break
        report.trained.append(_trained(name, seed, output))
    for evaluation, seed in ((one, seed) for one in evaluations for seed in range(seeds)):
        line = evaluation.lines[0]
        name = f"{evaluation.name}-seed{seed}"
        target = own / "eval" / name
        if report.stopped:  # what was measured before is still told
            _collect_earlier(report, evaluation, seed, target)
            continue
        announce(f"Evaluating {line.title}, seed {seed} …")
        model = line.model.folder(scale_name, seed, folder / MODELS) / RESULT_FOLDER
        subject = open_local(str(model), plain=line.plain, name=name, **line.focus)
        with bar(name) if bar is not None else nullcontext() as told:
            task = _task(experiment, evaluation, texts)
            results = evaluate(task, subject, target, step=told.step if told is not None else None)
        _collect(report, evaluation, seed, results)
        report.stopped = results.stopped
    own.mkdir(parents=True, exist_ok=True)
    write(report)
    return report


def _task(experiment: Experiment, evaluation: Evaluation, texts: Texts) -> Any:
    kind = find_task(experiment.task)
    return kind(validated(kind.Options, evaluation.options, f"options of {experiment.task}"), texts)


def _collect_earlier(report: Report, evaluation: Evaluation, seed: int, folder: Path) -> None:
    if (folder / "results.json").is_file():
        _collect(report, evaluation, seed, Results.read(folder))


def _collect(report: Report, evaluation: Evaluation, seed: int, results: Results) -> None:
    """The numbers of the figure, of one model."""
    experiment = report.experiment
    for line in evaluation.lines:
        where = {**experiment.where, **line.where}
        for row in results.rows:
            if any(row.values.get(name) != value for name, value in where.items()):
                continue
            estimate = row.estimates.get(experiment.measure)
            if estimate is not None and experiment.axis in row.values:
                x = float(row.values[experiment.axis])
                report.numbers.append(
                    Number(line.name, seed, x, estimate.value, estimate.low, estimate.high, row.samples)
                )
    for point, why in results.refused.items():
        report.refused[f"{evaluation.name}: {point}"] = why


def _trained(name: str, seed: int, output: Path) -> Trained:
    about = json.loads((output / RESULT).read_text("utf-8"))
    logs = [json.loads(text) for text in (output / LOG).read_text("utf-8").splitlines()]
    last: dict[str, Any] = next((log for log in reversed(logs) if "loss" in log), {})
    return Trained(name, seed, about["steps"], about["tokens"], last.get("loss"), last.get("accuracy"))
