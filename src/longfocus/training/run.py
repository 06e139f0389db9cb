"""A whole run: recipe -> model, data, trainer -> checkpoints -> an ordinary checkpoint at the end.

    result = run(Recipe.read("recipes/smollm2-135m-quick.yaml"))

The output folder of a run is described in docs/formats.md.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

import longfocus
from longfocus.data.pieces import Pieces
from longfocus.data.token_cache import TokenizedSource
from longfocus.errors import ConfigError, LongfocusError
from longfocus.files import write_whole
from longfocus.model.load import fast_dtype
from longfocus.process_memory import keep_freed
from longfocus.training.build import Announce, build_model
from longfocus.training.callbacks import LogFile, StopOnCtrlC, quiet
from longfocus.training.output import LOG, RESULT, prepared, save_result, upload
from longfocus.training.recipes import Recipe
from longfocus.training.scratch import recipe_tokenizer
from longfocus.training.stream import Batches, open_mixture
from longfocus.training.trainer import CrossbatchTrainer, writing

_WITHOUT_EFFECT = {
    "do_eval",
    "eval_on_start",
    "eval_strategy",
    "label_smoothing_factor",
    "num_train_epochs",
    "resume_from_checkpoint",
    "save_only_model",
}
"""Arguments of the ordinary trainer that mean nothing here, or would break what a recipe promises."""


@dataclass
class Result:
    """What a run left."""

    output: Path
    steps: int
    tokens: int
    """Predicted tokens that the weights were trained on, of all processes."""
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
        TrainingError: the output folder is of another recipe or another process, or the loss is not a number.
    """
    arguments(recipe, recipe.run.steps or 1)  # what is wrong there shows now
    rank = int(os.environ.get("RANK", 0))
    with prepared(Path(recipe.run.output), recipe, fresh, main=rank == 0) as start:
        return _run(recipe, start, announce, progress)


def _run(recipe: Recipe, start: Path | None, announce: Announce, progress: Any) -> Result:
    """In a folder that is this run's."""
    output = Path(recipe.run.output)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(recipe.run.seed)
    announce(f"{'Loading' if isinstance(recipe.model, str) else 'Making'} {recipe.model_name} …")
    sharded = bool(recipe.trainer.get("fsdp"))  # which wants one dtype in all weights
    products = precision(recipe.run.precision, recipe.run.device)
    model = build_model(recipe, announce, frozen=torch.float32 if sharded else products)
    tokenizer = recipe_tokenizer(recipe)
    window = model.focus.config.window_tokens if recipe.method != "long" else 0
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
    stop = StopOnCtrlC(announce)
    try:
        trainer = CrossbatchTrainer(
            model, recipe, batches, arguments(recipe, steps), callbacks=[LogFile(output / LOG, announce), stop]
        )
        trainer.get_optimizer_cls_and_kwargs(trainer.args, model)  # an optimizer that is not installed shows now
    except (ValueError, ImportError) as error:
        if isinstance(error, LongfocusError):
            raise
        raise _refused(error) from error
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    announce(
        f"Training {sum(weight.numel() for weight in trained):,} of {sum(w.numel() for w in model.parameters()):,} weights, "
        f"{steps} steps of {recipe.tokens_per_step(window, world):,} tokens."
    )
    if torch.cuda.device_count() > 1 and world == 1 and recipe.run.device != "cpu":
        announce(
            f"{torch.cuda.device_count()} GPUs are here and one is used; for all of them: torchrun --nproc-per-node "
            f"{torch.cuda.device_count()} -m longfocus.cli train …"
        )
    if start is not None:
        announce(f"Going on from {start}.")
        trainer.go_on_from(start)
    quiet(trainer)
    if trainer.args.device.type == "cpu":
        keep_freed()
    try:
        trainer.train_to_the_end(start)
    finally:
        stop.give_back()
    stopped = trainer.state.global_step < steps
    if not stopped:
        announce("Saving the result …")
        folder = save_result(trainer, tokenizer, recipe, output)
        if trainer.args.should_save:
            about = {
                "steps": trainer.state.global_step,
                "tokens": trainer.trained_tokens,
                "processes": world,
                "sources_of_first_process": [vars(report) for report in mixture.report()],
                "longfocus": longfocus.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "machine": platform.machine(),
                "date": time.strftime("%Y-%m-%d"),
            }
            with writing(output / RESULT, f"{folder} is whole"):
                write_whole(output / RESULT, json.dumps(about, indent=1) + "\n")
            if recipe.run.push_to_hub:
                announce(f"Uploading to {recipe.run.push_to_hub} …")
                upload(folder, recipe.run.push_to_hub)
    return Result(output, trainer.state.global_step, trainer.trained_tokens, stopped, trainer.state.log_history)


def _tell_sources(batches: Batches, recipe: Recipe, announce: Announce) -> None:
    """A line a source: what is in it, and how it will be cut; and what of the recipe's mixes a step cannot hold."""
    stream = batches.stream
    fits = stream.window * stream.windows_per_step
    for source, report in zip(stream.mixture.sources, stream.mixture.report(), strict=True):
        text = f"Source {report.name}: share {report.share_asked:.2f}"
        if isinstance(source, (TokenizedSource, Pieces)):
            lengths = source.lengths
            windows = int((-(-(lengths - 1) // stream.window)).sum())
            longer = int((lengths > fits).sum())
            text += f", {source.documents:,} {'pieces' if isinstance(source, Pieces) else 'documents'}, {source.tokens:,} tokens, {windows:,} windows of {stream.window}"
            text += f", {longer:,} documents longer than the {fits:,} tokens of a step" if longer else ""
        announce(text + (f", {report.skipped:,} left out as too short" if report.skipped else "") + ".")
        whole = source.source if isinstance(source, Pieces) else source
        if isinstance(whole, TokenizedSource) and whole.skipped:
            told = "; ".join(f"{name} {why}" for name, why in whole.skipped_examples[:3])
            announce(
                f"Source {report.name}: {whole.skipped:,} files or records passed over ({told or 'no token in them'})."
            )
    part = recipe.crossbatch
    if recipe.method == "crossbatch" and part is not None:
        shares = [share for mix in part.schedule(1000).mixes for share in mix]
        positives, negatives = max(s.positives for s in shares), max(s.negatives for s in shares)
        processes = batches.stream.mixture.world if part.across_processes else 1
        most = (part.windows_per_step - 1, (part.places * processes - 1) * part.windows_per_step)
        for name, asked, held in (("positives", positives, most[0]), ("negatives", negatives, most[1])):
            if asked > held:
                announce(f"The mix asks for up to {asked} {name}; a step of this shape holds at most {held}.")


def arguments(recipe: Recipe, steps: int) -> TrainingArguments:
    """The ordinary trainer's arguments.

    Raises:
        ConfigError: `trainer` has an argument that TrainingArguments does not take, or one that the recipe sets.
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
        "push_to_hub": False,  # the result is uploaded at the end, checkpoints are not
        "remove_unused_columns": False,
        "ignore_data_skip": True,  # the stream's own position is in the checkpoint
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }
    clash = sorted(set(values) & set(recipe.trainer))
    if clash:
        raise ConfigError(f"trainer: {clash} are set by other sections of the recipe (run, optimizer); set them there.")
    vain = sorted(_WITHOUT_EFFECT & {name for name, value in recipe.trainer.items() if value})
    if vain:
        raise ConfigError(
            f"trainer: {vain} would change nothing here, or keep the run from going on after a stop; leave them out."
        )
    try:
        made = TrainingArguments(**values, **recipe.trainer)
        for callback in get_reporting_integration_callbacks(made.report_to):
            callback()  # one whose package is missing says so
    except (TypeError, ValueError, RuntimeError, ImportError) as error:
        raise _refused(error) from error
    made._n_gpu = min(made.n_gpu, 1)  # one device a process: rows of a batch belong together
    return made


def _refused(error: Exception) -> ConfigError:
    """What `transformers` does not take, in its own words."""
    return ConfigError(
        f"trainer, run.report_to: {' '.join(str(error).split()).rstrip('.')}; expected what transformers.TrainingArguments takes."
    )


def precision(wanted: str, device: str) -> torch.dtype:
    """The dtype of products: bfloat16 where asked for, or (`auto`) where the machine is fast at it."""
    if wanted != "auto":
        return getattr(torch, wanted)
    return fast_dtype(device) or torch.float32


def _token_cache() -> Path:
    from longfocus.model.default_model import cache_folder

    return cache_folder() / "tokens"
