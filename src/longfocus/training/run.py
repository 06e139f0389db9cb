"""A whole run: recipe -> model, data, trainer -> checkpoints -> an ordinary checkpoint at the end.

    result = run(Recipe.read("recipes/smollm2-135m-quick.yaml"))

The output folder of a run:
    recipe.yaml              the recipe with every default, as run
    log.jsonl                one line a log: losses by window, attention mass, tokens/s
    checkpoint-N/            the newest few; a killed run goes on from the last
    model/                   the result: an ordinary checkpoint (or an adapter), with tokenizer and options
    model/trained.safetensors   only what was trained, in bfloat16, where that is a part of the model
    result.json              what was run, versions, tokens by source
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback, TrainingArguments

import longfocus
from longfocus.data.token_cache import TokenizedSource
from longfocus.errors import ConfigError, TrainingError
from longfocus.model.load import load, load_tokenizer, resolve
from longfocus.model.weights import save_weights
from longfocus.training import parts
from longfocus.training.recipes import Recipe, Rope
from longfocus.training.stream import Batches, open_mixture
from longfocus.training.trainer import WEIGHTS, CrossbatchTrainer, checkpoints

Announce = Callable[[str], None]


@dataclass
class Result:
    """What a run left."""

    output: Path
    steps: int
    tokens: int
    stopped: bool
    """Interrupted before its end; start it again to go on."""
    log: list[dict[str, Any]]


def run(recipe: Recipe, *, announce: Announce = lambda text: None, progress: Any = None, fresh: bool = False) -> Result:
    """Run a recipe to its end, from its newest checkpoint where it has one.

    Args:
        announce: told what is being done, a line at a time.
        progress: told while sources are tokenised (`data.token_cache.Progress`).
        fresh: begin anew although the output folder holds checkpoints; they are removed.

    Raises:
        ConfigError, InputError, ModelNotFoundError: before anything is trained.
        TrainingError: the output folder is of another recipe, or the loss is not a number.
    """
    output = Path(recipe.run.output)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    start = _prepare_output(output, recipe, fresh, main=rank == 0)
    torch.manual_seed(recipe.run.seed)
    announce(f"Loading {recipe.model} …")
    products = precision(recipe.run.precision, recipe.run.device)
    model = build_model(recipe, announce, frozen=products)
    tokenizer = load_tokenizer(recipe.model)
    window = model.focus.config.window_tokens if recipe.method == "crossbatch" else 0
    mixture = open_mixture(
        recipe.data,
        tokenizer,
        _token_cache(),
        seed=recipe.run.seed,
        rank=rank,
        world=world,
        progress=progress,
    )
    batches = Batches(mixture, recipe, window)
    _tell_sources(batches, recipe, announce)
    steps = recipe.steps(window, world)
    trainer = CrossbatchTrainer(
        model,
        recipe,
        batches,
        arguments(recipe, steps),
        callbacks=[_LogFile(output / "log.jsonl", announce), _StopOnCtrlC(announce)],
    )
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    announce(
        f"Training {sum(weight.numel() for weight in trained):,} of {sum(w.numel() for w in model.parameters()):,} weights, "
        f"{steps} steps of {recipe.tokens_per_step(window, world):,} tokens."
    )
    if start is not None:
        announce(f"Going on from {start}.")
        trainer.go_on_from(start)
    quiet(trainer)
    trainer.train_to_the_end(start)
    stopped = trainer.state.global_step < steps
    if not stopped and trainer.args.should_save:
        announce("Saving the result …")
        save_result(model, tokenizer, recipe, output)
        about = {
            "steps": trainer.state.global_step,
            "tokens": trainer.state.global_step * recipe.tokens_per_step(window, world),
            "processes": world,
            "sources": [vars(report) for report in mixture.report()],
            "longfocus": longfocus.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
            "date": time.strftime("%Y-%m-%d"),
        }
        (output / "result.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    tokens = trainer.state.global_step * recipe.tokens_per_step(window, world)
    return Result(output, trainer.state.global_step, tokens, stopped, trainer.state.log_history)


def _tell_sources(batches: Batches, recipe: Recipe, announce: Announce) -> None:
    """A line a source: what is in it, and how it will be cut.

    Raises:
        ConfigError: `data.strict`, and a document is longer than what a place reads in a step.
    """
    stream = batches.stream
    fits = stream.window * stream.windows_per_step
    for source, report in zip(stream.mixture.sources, stream.mixture.report(), strict=True):
        text = f"Source {report.name}: share {report.share_asked:.2f}"
        if isinstance(source, TokenizedSource):
            lengths = source.lengths
            windows = int((-(-(lengths - 1) // stream.window)).sum())
            longer = int((lengths > fits).sum())
            text += (
                f", {source.documents:,} documents, {source.tokens:,} tokens, {windows:,} windows of {stream.window}"
            )
            if longer and recipe.data.strict:
                raise ConfigError(
                    f"data.strict: {longer} documents of {report.name} are longer than the {fits:,} tokens that a place reads "
                    f"in a step (the longest: {int(lengths.max()):,}). Without strict they are read over several steps."
                )
            text += f", {longer:,} documents read over several steps" if longer else ""
        announce(text + (f", {report.skipped:,} left out as too short" if report.skipped else "") + ".")


def build_model(recipe: Recipe, announce: Announce = lambda text: None, *, frozen: torch.dtype = torch.float32) -> Any:
    """The model of a recipe, its trained weights chosen; attached for crossbatch, plain for long fine-tuning.

    Args:
        frozen: dtype in which weights that are not trained are held.
    """
    if recipe.method == "crossbatch":
        model = load(recipe.model, dtype=torch.float32, announce=announce, **recipe.focus)
        layers = model.focus.config.layers
    else:
        assert recipe.long is not None
        model = _plain_model(recipe.model, recipe.long.rope, recipe.long.tokens)
        layers = recipe.focus_config.resolve(model.config.num_hidden_layers, None).layers
    names = parts.select(model, recipe.train, layers)
    lora = recipe.train.lora
    if lora is not None:
        model = with_lora(model, lora, names)
    if recipe.train.what != "all":
        for weight in model.parameters():
            if not weight.requires_grad:
                weight.data = weight.data.to(frozen)
    return model


def with_lora(model: Any, lora: Any, names: list[str]) -> Any:
    """Wrap with peft adapters on the linear layers among the chosen weights."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("train.lora needs the package peft: pip install peft") from error
    modules = dict(model.named_modules())
    linear = sorted(
        {name.rpartition(".")[0] for name in names if isinstance(modules[name.rpartition(".")[0]], torch.nn.Linear)}
    )
    targets = [name for name in linear if not lora.targets or name.rpartition(".")[2] in lora.targets]
    if not targets:
        raise ConfigError(f"train.lora.targets: {lora.targets} given, none is among the chosen layers' projections.")
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        modules_to_save=lora.modules_to_save,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks for an attribute's old name
        wrapped = get_peft_model(model, config)
    wrapped.focus = getattr(model, "focus", None)
    return wrapped


def _plain_model(source: str, rope: Rope | None, tokens: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = resolve(source)
    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "longfocus"):
        del config.longfocus
    if rope is not None:
        original = config.max_position_embeddings
        config.rope_parameters = {
            **(getattr(config, "rope_parameters", None) or {}),
            "rope_type": rope.type,
            "factor": rope.factor,
            "original_max_position_embeddings": original,
        }
        config.max_position_embeddings = int(original * rope.factor)
    if tokens > config.max_position_embeddings:
        raise ConfigError(
            f"long.tokens: {tokens} given, expected at most the model's {config.max_position_embeddings} positions; "
            "give long.rope with a factor that covers it."
        )
    return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)


def arguments(recipe: Recipe, steps: int) -> TrainingArguments:
    """The ordinary trainer's arguments.

    Raises:
        ConfigError: `trainer` has an argument that TrainingArguments does not know, or one that the recipe sets.
    """
    settings, optimizer = recipe.run, recipe.optimizer
    values: dict[str, Any] = {
        "output_dir": settings.output,
        "max_steps": steps,
        "per_device_train_batch_size": 1,  # a batch is a whole step's windows, made by the stream
        "gradient_accumulation_steps": settings.gradient_accumulation,
        "activation_checkpointing": settings.gradient_checkpointing,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant_with_warmup" if optimizer.schedule == "constant" else optimizer.schedule,
        "warmup_steps": optimizer.warmup_steps,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "max_grad_norm": optimizer.max_grad_norm,
        "bf16": precision(settings.precision, settings.device) == torch.bfloat16,
        "use_cpu": settings.device == "cpu" or not torch.accelerator.is_available(),
        "seed": settings.seed,
        "save_strategy": "steps",
        "save_steps": settings.save_every,
        "save_total_limit": settings.keep,
        "logging_steps": settings.log_every,
        "logging_nan_inf_filter": False,
        "report_to": settings.report_to or "none",
        "push_to_hub": False,
        "hub_model_id": settings.push_to_hub,
        "remove_unused_columns": False,
        "ignore_data_skip": True,  # the stream's own position is in the checkpoint
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }
    clash = sorted(set(values) & set(recipe.trainer))
    if clash:
        raise ConfigError(f"trainer: {clash} are set by other sections of the recipe (run, optimizer); set them there.")
    try:
        return TrainingArguments(**values, **recipe.trainer)
    except TypeError as error:
        raise ConfigError(f"trainer: {error}; expected arguments of transformers.TrainingArguments.") from error


def precision(wanted: str, device: str) -> torch.dtype:
    """The dtype of products: bfloat16 where asked for, or (`auto`) where the machine is fast at it."""
    if wanted != "auto":
        return getattr(torch, wanted)
    if device != "cpu" and torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32


def save_result(model: Any, tokenizer: Any, recipe: Recipe, output: Path) -> Path:
    """Write `model/`: an ordinary checkpoint, or the adapter where it is not to be merged.

    Returns:
        The folder.
    """
    folder, unfinished = output / "model", output / "model.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    lora = recipe.train.lora
    if any(weight.dtype != torch.float32 for weight in model.parameters()):
        trained = parts.trained_weights(model)
        model = build_model(recipe)  # what was not trained, as it was
        with torch.no_grad():
            for name, weight in parts.trained_weights(model).items():
                weight.copy_(trained[name])
    if lora is not None and lora.merge:
        model = model.merge_and_unload()
    weights = parts.trained_weights(model)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    if lora is None and recipe.train.what != "all":
        about = {"base": recipe.model}
        if hasattr(model, "focus"):
            about["longfocus"] = json.dumps(model.focus.config.to_dict())
        save_weights(weights, unfinished / WEIGHTS, dtype=torch.bfloat16, about=about)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)
    return folder


def _token_cache() -> Path:
    from longfocus.model.default_model import cache_folder

    return cache_folder() / "tokens"


def _prepare_output(output: Path, recipe: Recipe, fresh: bool, *, main: bool) -> Path | None:
    """Make the folder, or find where to go on.

    Raises:
        TrainingError: the folder belongs to another recipe, or cannot be written.
    """
    file = output / "recipe.yaml"
    try:
        if fresh and main:
            for old in [*checkpoints(output), output / "model", output / "unfinished"]:
                shutil.rmtree(old, ignore_errors=True)
            for name in ("log.jsonl", "recipe.yaml", "result.json"):
                (output / name).unlink(missing_ok=True)
        found = checkpoints(output)
        if file.is_file() and found:
            before = Recipe.read(file)
            changed = _differences(before.model_dump(), recipe.model_dump())
            changed = [name for name in changed if not name.startswith(_MAY_CHANGE)]
            if changed:
                raise TrainingError(
                    f"{output} holds a run with other settings ({', '.join(changed[:5])}). Name another run.output, "
                    "or start anew with --fresh."
                )
        if main:
            output.mkdir(parents=True, exist_ok=True)
            file.write_text(recipe.dump(), "utf-8")
    except OSError as error:
        raise TrainingError(f"{output} cannot be written: {error.strerror or error}.") from error
    return found[-1] if found else None


_MAY_CHANGE = (
    "run.save_every",
    "run.keep",
    "run.log_every",
    "run.report_to",
    "run.push_to_hub",
    "run.output",
    "data.cache",
)


def _differences(one: Any, two: Any, name: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(two, dict):
        return [
            found
            for key in sorted({*one, *two})
            for found in _differences(one.get(key), two.get(key), f"{name}.{key}" if name else str(key))
        ]
    return [] if json.dumps(one, default=str) == json.dumps(two, default=str) else [name]


def quiet(trainer: Any) -> None:
    """Keep the trainer from printing its logs to stdout."""
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)


class _LogFile(TrainerCallback):
    """One JSON line a log, and a short line for the person."""

    def __init__(self, path: Path, announce: Announce) -> None:
        self.path, self.announce = path, announce

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Lines after the checkpoint that the run goes on from are written again."""
        if state.is_world_process_zero and self.path.is_file():
            lines = self.path.read_text("utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= state.global_step]
            self.path.write_text("".join(f"{line}\n" for line in kept), "utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the line."""
        if not state.is_world_process_zero or not logs:
            return
        with self.path.open("a", encoding="utf-8") as file:
            kept = {name: value for name, value in logs.items() if name != "epoch"}  # the stream has no epochs
            file.write(json.dumps({"step": state.global_step, **kept}) + "\n")
        if "loss" in logs:
            self.announce(_line(state.global_step, args.max_steps, logs))


def _line(step: int, steps: int, logs: dict[str, Any]) -> str:
    """A log for the eye."""
    windows = [f"{value:.2f}" for name, value in logs.items() if name.startswith("loss_window_")]
    mass = [
        f"{name.removeprefix('positive_mass_')}: {value:.2f}"
        for name, value in logs.items()
        if name.startswith("positive_mass_")
    ]
    rate = logs.get("tokens_per_second", 0.0)
    left = (steps - step) * (logs.get("tokens", 0) / max(1, step)) / max(1e-9, rate)
    return (
        f"step {step}/{steps}  loss {logs['loss']:.3f}"
        + (f"  by window {' '.join(windows)}" if windows else "")
        + (f"  positive mass {', '.join(mass)}" if mass else "")
        + f"  {rate:,.0f} tokens/s  {left / 60:.0f} min left"
    )


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return 1 << 62  # a line that a kill cut off


class _StopOnCtrlC(TrainerCallback):
    """The first Ctrl-C finishes the step, saves a checkpoint and stops; the second stops at once."""

    def __init__(self, announce: Announce) -> None:
        self.announce, self.asked = announce, False
        self._before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the signal over."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give it back."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.announce("Stopping after this step; its checkpoint will be kept (Ctrl-C again: at once).")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Stop between two steps."""
        if self.asked:
            control.should_save = True
            control.should_training_stop = True
        return control
