"""The folder of a run: begun, gone on with, finished. What is in it: docs/formats.md."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import torch

from longfocus.errors import ConfigError, TrainingError
from longfocus.files import write_whole
from longfocus.model.gates import settle_gates
from longfocus.model.load import ADAPTER_NOTE
from longfocus.model.weights import save_weights
from longfocus.training import parts
from longfocus.training.build import build_model, without_memory
from longfocus.training.recipes import Recipe
from longfocus.training.scratch import fold_temperatures
from longfocus.training.trainer import WEIGHTS, CrossbatchTrainer, checkpoints, writing

RECIPE, LOG, RESULT, LOCK = "recipe.yaml", "log.jsonl", "result.json", "lock"
_MAY_CHANGE = (
    "run.save_every",
    "run.keep",
    "run.log_every",
    "run.report_to",
    "run.push_to_hub",
    "run.output",
    "data.cache",
)


@contextlib.contextmanager
def prepared(output: Path, recipe: Recipe, fresh: bool, *, main: bool) -> Iterator[Path | None]:
    """Make the folder, or find the checkpoint to go on from; the folder is this run's for as long as the context lasts.

    Args:
        fresh: begin anew; what a run left there is removed.
        main: this process writes; the others only look.

    Raises:
        ConfigError: the result would overwrite the model that is trained.
        TrainingError: the folder belongs to another recipe, to another process, or to no run at all, or cannot be written.
    """
    result = (output / "model").absolute()
    source = Path(recipe.model).absolute() if isinstance(recipe.model, str) else None
    if source is not None and (source == result or result in source.parents):
        raise ConfigError(
            f"run.output: {output} given, but the result would take the place of {source}, which is the model that is "
            "trained. Name another folder."
        )
    with contextlib.ExitStack() as held:
        try:
            if main:
                output.mkdir(parents=True, exist_ok=True)
                held.enter_context(filelock.FileLock(output / LOCK).acquire(blocking=False))
            found = [] if fresh else checkpoints(output)
            if main:
                _check_owner(output, recipe, fresh)
                if fresh:
                    for old in [*checkpoints(output), output / "model", output / "unfinished"]:
                        shutil.rmtree(old, ignore_errors=True)
                    for name in (LOG, RESULT):
                        (output / name).unlink(missing_ok=True)
                if _recipe_in(output) != recipe:
                    write_whole(output / RECIPE, recipe.dump())
        except filelock.Timeout:
            raise TrainingError(
                f"{output}: another process is training into it; wait for it, or name another run.output."
            ) from None
        except OSError as error:
            raise TrainingError(f"{output} cannot be written: {error.strerror or error}.") from error
        yield found[-1] if found else None


def _check_owner(output: Path, recipe: Recipe, fresh: bool) -> None:
    """Nothing that another run, or no run, has made may be overwritten.

    Raises:
        TrainingError: the folder holds such things.
    """
    file, results = output / RECIPE, [*checkpoints(output), *filter(Path.exists, [output / "model"])]
    known = _recipe_in(output)
    written_here = known is not None and file.read_text("utf-8") == known.dump()
    ours = written_here or any((output / name).is_file() for name in (LOG, RESULT))
    if results and not ours:
        raise TrainingError(
            f"{output} holds {', '.join(path.name for path in results[:3])}, but no run of longfocus train. Name another run.output."
        )
    changed = _changed(known, recipe) if known is not None else []
    if results and changed and not fresh:
        raise TrainingError(
            f"{output} holds a run with other settings ({', '.join(changed[:5])}). Name another run.output, or start anew "
            "with --fresh."
        )
    if file.is_file() and known != recipe and not written_here:
        raise TrainingError(
            f"{file} was not written by longfocus train, and the recipe of this run would take its place. Name another "
            "run.output, or move the file away."
        )


def _recipe_in(output: Path) -> Recipe | None:
    """The recipe that lies in a folder; None: none, or something else under its name."""
    with contextlib.suppress(ConfigError):
        return Recipe.read(output / RECIPE)
    return None


def is_finished(output: Path, recipe: Recipe) -> bool:
    """Whether a run of this recipe has come to its end there."""
    whole = (output / RESULT).is_file() and (output / "model").is_dir()
    known = _recipe_in(output)
    return whole and known is not None and not _changed(known, recipe)


def _changed(known: Recipe, recipe: Recipe) -> list[str]:
    """What decides the result and is not as in a written recipe."""
    changed = differences(known.model_dump(), recipe.model_dump())
    if "model" in changed and _from_output(known) == _from_output(recipe) is not None:
        # the run and the one that it goes on from were moved together, or are called from elsewhere
        changed.remove("model")
    return [name for name in changed if not name.startswith(_MAY_CHANGE)]


def _from_output(recipe: Recipe) -> str | None:
    """The way from a run's folder to the model of a run that lies beside it; None: its model is another one."""
    output = Path(recipe.run.output)
    if not isinstance(recipe.model, str) or Path(recipe.model).parent.parent != output.parent:
        return None
    return os.path.relpath(recipe.model, output)


def differences(one: Any, two: Any, name: str = "") -> list[str]:
    """Dotted names of what differs between two recipes as plain data."""
    if isinstance(one, dict) and isinstance(two, dict):
        return [
            found
            for key in sorted({*one, *two})
            for found in differences(one.get(key), two.get(key), f"{name}.{key}" if name else str(key))
        ]
    return [] if json.dumps(one, default=str) == json.dumps(two, default=str) else [name]


def save_result(trainer: CrossbatchTrainer, tokenizer: Any, recipe: Recipe, output: Path) -> Path:
    """Write `model/`: an ordinary checkpoint, or the adapter where it is not to be merged. All processes call it.

    Returns:
        The folder.

    Raises:
        TrainingError: the disk refused it; the same command saves it again.
    """
    with writing(output / "model", "The last checkpoint is whole"):
        return _save_result(trainer, tokenizer, recipe, output)


def _save_result(trainer: CrossbatchTrainer, tokenizer: Any, recipe: Recipe, output: Path) -> Path:
    folder, unfinished = output / "model", output / "model.unfinished"
    model: Any = trainer.model
    if trainer.is_fsdp_enabled:  # every process holds a part of the weights
        trainer.save_model(str(unfinished))
    if not trainer.args.should_save:
        return folder
    if not trainer.is_fsdp_enabled:
        shutil.rmtree(unfinished, ignore_errors=True)
        _save_model(model, recipe, unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)
    return folder


def _save_model(model: Any, recipe: Recipe, folder: Path) -> None:
    lora = recipe.train.lora
    if any(weight.dtype != torch.float32 for weight in model.parameters()):
        trained = parts.trained_weights(model)
        model = build_model(recipe)  # what was not trained, as it was
        with torch.no_grad():
            for name, weight in parts.trained_weights(model).items():
                weight.copy_(trained[name])
    fold_temperatures(model)
    settle_gates(model)
    if recipe.method == "transformer_xl":
        model = without_memory(model)
    focus = getattr(model, "focus", None)
    about = {"base": recipe.model_name}
    if focus is not None:
        about["longfocus"] = json.dumps(focus.config.to_dict())
    if lora is not None and lora.merge:
        model = model.merge_and_unload()
    weights = parts.trained_weights(model)
    model.save_pretrained(folder)
    if lora is not None and not lora.merge:
        write_whole(folder / ADAPTER_NOTE, json.dumps(about) + "\n")
    elif lora is None and recipe.train.what != "all":
        save_weights(weights, folder / WEIGHTS, dtype=torch.bfloat16, about=about)


def upload(folder: Path, repository: str) -> None:
    """Put the result on the hub.

    Raises:
        TrainingError: the hub refuses or cannot be reached; the result stays where it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(folder_path=str(folder), repo_id=repository)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise TrainingError(
            f"run.push_to_hub: {repository} could not be uploaded ({' '.join(str(error).split())[:200]}). The result is in {folder}."
        ) from error
