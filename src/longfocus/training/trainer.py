"""What differs from `transformers.Trainer`: batches, contexts, the loss and what is logged. The loop, devices, precision,
accumulation, logging back ends and uploads are the ordinary ones.

One micro-batch: windows of the stream -> table of contexts -> forward with `context=` -> loss. The table is drawn from
(seed, number of the batch) and the mix from (seed, step), so a resumed run draws the same.

Checkpoints are made in a folder beside and renamed when whole (`checkpoint-N`), with the position in the data; a run
that is killed at any moment goes on from its newest one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState, TrainingArguments

from longfocus.crossbatch.context import CrossbatchContext, gather_rows
from longfocus.crossbatch.plan import Rows, plan_contexts
from longfocus.errors import LongfocusError, TrainingError
from longfocus.files import sync
from longfocus.model.weights import load_weights, save_weights
from longfocus.training import parts
from longfocus.training.baselines.carried import Carried
from longfocus.training.baselines.contexts import MemorizingContext, TransformerXLContext
from longfocus.training.recipes import Recipe
from longfocus.training.scratch import TEMPERATURE
from longfocus.training.stream import Batches

WEIGHTS = "trained.safetensors"
POSITION = "position-{rank}.json"
CARRIED = "carried-{rank}.safetensors"
WINDOW_BINS = ((0, 0), (1, 1), (2, 3), (4, 7), (8, None))
"""Windows of a document that the loss is reported for (first, last)."""


class CrossbatchTrainer(Trainer):
    """The ordinary trainer, fed with windows and contexts."""

    def __init__(self, model: Any, recipe: Recipe, batches: Batches, args: TrainingArguments, **kwargs: Any) -> None:
        """
        Args:
            model: attached (crossbatch) or plain (long); its trained weights chosen, maybe wrapped by peft.
            recipe: of the run.
            batches: of this process.
            args: from `run.arguments`.
        """
        super().__init__(model=model, args=args, **kwargs)
        self.recipe, self.batches = recipe, batches
        self.schedule = recipe.crossbatch.schedule(args.max_steps) if recipe.crossbatch is not None else None
        self.carried = _carried(model, recipe)
        self.model_accepts_loss_kwargs = True  # the loss is a sum over all tokens of a step, divided once
        self.trained_tokens = 0
        """Predicted tokens so far, of all processes; up to date at logs and checkpoints."""
        self._staging: Path | None = None
        self._sums: defaultdict[str, float] = defaultdict(float)  # of this process, since the last log
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._targets = self._logged_tokens = 0
        self._step_seen = [0.0, 0.0, 0.0]  # right, targets, micro-batches of the current step
        self._since, self._since_step = time.monotonic(), 0
        self._restored: dict[str, Any] = {}
        self.add_callback(_GoOnLogging(self))

    # -- data --------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Batches as the stream makes them; each process has its own stream."""
        # a generator of its own: otherwise starting the loader moves the global one, and dropout after a resume differs
        return DataLoader(self.batches, batch_size=None, num_workers=0, generator=torch.Generator())

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        total = sum((batch["labels"] != -100).sum() for batch in batch_samples)
        total = torch.as_tensor(total, device=device)
        if self.args.world_size > 1:
            total = self.accelerator.gather(total).sum()
        return total.clamp(min=1)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """As ever, without temperatures."""
        return [name for name in super().get_decay_parameter_names(model) if TEMPERATURE not in name]

    # -- loss --------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of a micro-batch: the sum of its token losses over all targets of the step."""
        ids, labels, lengths = inputs["input_ids"], inputs["labels"], inputs["lengths"]
        if self.recipe.method == "long":
            mask = torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]
            outputs = model(
                input_ids=ids,
                attention_mask=mask.long(),
                labels=labels,
                shift_labels=labels,
                num_items_in_batch=num_items_in_batch,
                use_cache=False,
            )
        else:
            context: Any = self._carried_context(model, inputs) if self.carried is not None else self._context(inputs)
            outputs = model(
                input_ids=ids,
                context=context,
                lengths=lengths,
                shift_labels=labels,
                num_items_in_batch=num_items_in_batch,
            )
            if self.carried is not None:
                self.carried.keep(context.new, lengths.cpu().numpy())
            self._note(inputs, outputs, context)
        loss = outputs.loss
        self._check_finite("loss", loss)
        self._targets += int((labels != -100).sum())
        if self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes afterwards
        part = self.recipe.crossbatch
        if (
            part is not None and part.contrast and self.recipe.method == "crossbatch"
        ):  # a mean over micro-batches and processes
            losses = list(context.contrast.values())
            loss = loss + part.contrast * sum(losses) / (len(losses) * self.args.gradient_accumulation_steps)
        return (loss, outputs) if return_outputs else loss

    def _check_finite(self, what: str, value: torch.Tensor) -> None:
        if not bool(torch.isfinite(value)):
            raise TrainingError(
                f"The {what} became {float(value.detach())} after step {self.state.global_step}. Checkpoints in "
                f"{self.args.output_dir} are from before. Start again with a smaller optimizer.lr, in another run.output or with "
                "--fresh."
            )

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        if norm is not None:
            self._check_finite("gradient", torch.as_tensor(norm))
        return norm

    def _context(self, inputs: dict[str, Any]) -> CrossbatchContext:
        assert self.recipe.crossbatch is not None and self.schedule is not None
        part, seed = self.recipe.crossbatch, self.recipe.run.seed
        number = int(inputs["number"])
        rows = Rows(*(inputs[name].cpu().numpy() for name in ("places", "documents", "windows", "lengths")))
        group, first, rank = None, 0, self.args.process_index
        if part.across_processes and self.args.world_size > 1:
            group, first, rank = torch.distributed.group.WORLD, rank * len(rows), 0
            rows = gather_rows(rows, group)
        mix = self.schedule.mix(self.state.global_step, np.random.default_rng((seed, 1, self.state.global_step)))
        contexts = plan_contexts(
            rows, mix, choice=part.negatives, generator=np.random.default_rng((seed, 2, number, rank))
        )
        return CrossbatchContext(
            rows,
            contexts,
            negative_copies=part.negative_copies,
            contrast=part.contrast > 0,
            replace_first=self.recipe.focus_config.window_first == "replaced",
            group=group,
            first_row=first,
        )

    def _carried_context(self, model: Any, inputs: dict[str, Any]) -> MemorizingContext | TransformerXLContext:
        """What the places of a baseline carry on, for this step."""
        assert self.carried is not None
        seen = self.carried.begin(inputs["documents"].cpu().numpy())
        if self.recipe.memorizing is not None and self.recipe.method == "memorizing":
            return MemorizingContext(seen, self.recipe.memorizing.k)
        return TransformerXLContext(seen, self.accelerator.unwrap_model(model).focus.tables)

    def _note(
        self,
        inputs: dict[str, Any],
        outputs: Any,
        context: CrossbatchContext | MemorizingContext | TransformerXLContext,
    ) -> None:
        """Keep what will be logged; sums of this process since the last log."""
        windows = inputs["windows"].cpu()
        losses, targets = outputs.row_losses.cpu(), outputs.row_targets.cpu()
        for bounds in WINDOW_BINS:
            first, last = bounds
            chosen = (windows >= first) & (windows <= (last if last is not None else torch.inf))
            self._add(_bin_name(bounds), float(losses[chosen].sum()), float(targets[chosen].sum()))
        right, total = float(outputs.row_right.sum()), float(targets.sum())
        self._add("accuracy", right, total)
        if isinstance(context, CrossbatchContext):
            self._add("additional_windows", context.additional_windows, 1)
            for layer, mass in context.mass.items():
                self._add(f"positive_mass_{layer}", mass.positive * mass.rows, mass.rows)
                self._add(f"additional_mass_{layer}", mass.additional * mass.rows_with_context, mass.rows_with_context)
            for layer, contrast in context.contrast.items():
                self._add(
                    f"contrast_{layer}", float(contrast.detach()) * context.mass[layer].rows, context.mass[layer].rows
                )
            self._observe(right, total)
        else:
            self._add("carried_tokens", float(context.seen.held.sum()), len(context.seen.held))

    def _observe(self, right: float, total: float) -> None:
        """Tell the schedule the accuracy of a whole step, of all processes."""
        assert self.schedule is not None
        self._step_seen = [old + new for old, new in zip(self._step_seen, (right, total, 1.0), strict=True)]
        if self._step_seen[2] < self.args.gradient_accumulation_steps:
            return
        seen = torch.tensor(self._step_seen[:2], dtype=torch.float64 if self.args.use_cpu else torch.float32)
        self._step_seen = [0.0, 0.0, 0.0]
        right, total = self._over_processes(seen).tolist()
        if total:
            self.schedule.observe(right / total)

    def _over_processes(self, numbers: torch.Tensor) -> torch.Tensor:
        """Their sum over all processes; all must call it."""
        if self.args.world_size > 1:
            numbers = numbers.to(self.args.device)
            torch.distributed.all_reduce(numbers)
        return numbers.cpu()

    def _add(self, name: str, value: float, weight: float) -> None:
        self._sums[name] += value
        self._counts[name] += weight

    def _count_tokens(self) -> int:
        """Move this process's targets into the total of all; the number that was added. All must call it."""
        added = int(self._over_processes(torch.tensor([self._targets]))[0])
        self.trained_tokens += added
        self._targets = 0
        return added

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The ordinary log, with what was kept since the last one, of all processes."""
        if "loss" in logs:
            names = self._names()
            kept = torch.tensor([[self._sums[name], self._counts[name]] for name in names], dtype=torch.float32)
            for name, (total, weight) in zip(names, self._over_processes(kept).tolist(), strict=True):
                if weight:
                    logs[name] = round(total / weight, 4)
            before = self._logged_tokens
            self._count_tokens()
            seconds = max(1e-9, time.monotonic() - self._since)
            logs["tokens"] = self.trained_tokens
            logs["tokens_per_second"] = round((self.trained_tokens - before) / seconds, 1)
            logs["seconds_per_step"] = round(seconds / max(1, self.state.global_step - self._since_step), 3)
            self._logged_tokens = self.trained_tokens
            self._since, self._since_step = time.monotonic(), self.state.global_step
            self._sums.clear()
            self._counts.clear()
        super().log(logs, start_time)

    def _names(self) -> list[str]:
        """What may be kept, in an order that all processes share."""
        if self.recipe.method == "long":
            return []
        if self.carried is not None:
            return [*map(_bin_name, WINDOW_BINS), "accuracy", "carried_tokens"]
        layers = self.accelerator.unwrap_model(self.model).focus.config.layers
        kinds = ["positive_mass", "additional_mass"]
        if self.recipe.crossbatch is not None and self.recipe.crossbatch.contrast:
            kinds.append("contrast")
        of_layers = [f"{kind}_{layer}" for kind in kinds for layer in layers]
        return [*map(_bin_name, WINDOW_BINS), "accuracy", "additional_windows", *of_layers]

    # -- checkpoints -------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As ever, but whole or not at all."""
        output = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        self._staging = output / "unfinished"
        try:
            with writing(output / name, "The checkpoints before it are whole"):
                self._save_whole(model, trial, output, name)
        except BaseException:
            if self.args.should_save:
                shutil.rmtree(output / "unfinished", ignore_errors=True)  # a full disk has no room for it
            raise
        finally:
            self._staging = None

    def _save_whole(self, model: Any, trial: Any, output: Path, name: str) -> None:
        assert self._staging is not None
        if self.args.should_save:
            shutil.rmtree(self._staging, ignore_errors=True)
        self._wait()
        super()._save_checkpoint(model, trial)
        made = self._staging / name
        made.mkdir(parents=True, exist_ok=True)
        self._count_tokens()
        position = {
            **self.batches.state_after(self.state.global_step * self.args.gradient_accumulation_steps),
            "schedule": self.schedule.state_dict() if self.schedule is not None else {},
            "log": {
                "sums": dict(self._sums),
                "counts": dict(self._counts),
                "loss": float(self._tr_loss),
                "last_logged": self._globalstep_last_logged,
                "tokens": self.trained_tokens,
                "logged_tokens": self._logged_tokens,
            },
        }
        (made / POSITION.format(rank=self.args.process_index)).write_text(json.dumps(position), "utf-8")
        if self.carried is not None:
            save_file(self.carried.state_dict(), made / CARRIED.format(rank=self.args.process_index))
        self._wait()
        if self.args.should_save:
            _sync(made)
            shutil.rmtree(output / name, ignore_errors=True)
            os.replace(made, output / name)
            sync(output)
            shutil.rmtree(self._staging, ignore_errors=True)
            for old in checkpoints(output)[: -(self.args.save_total_limit or 1_000_000)]:
                shutil.rmtree(old, ignore_errors=True)
        self._wait()

    def _wait(self) -> None:
        if self.args.world_size > 1:
            torch.distributed.barrier()

    @property
    def _saves_part(self) -> bool:
        """Only trained weights are worth a checkpoint: the others are those of the base model."""
        return isinstance(self.model, PreTrainedModel) and self.recipe.train.what != "all" and not self.is_fsdp_enabled

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not self._saves_part:
            super()._save(output_dir, state_dict)
            return
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            save_weights(parts.trained_weights(self.model), folder / WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        try:
            if self._saves_part:
                load_weights(self.model, folder / WEIGHTS)
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        except (OSError, ValueError, SafetensorError) as error:  # ours for missing weights are among them
            raise _damaged(folder, "its weights", error) from error

    def train_to_the_end(self, start: Path | None) -> None:
        """Train from the beginning or a checkpoint; one that is the end already only gives its weights."""
        if start is not None and int(start.name.rpartition("-")[2]) >= self.args.max_steps:
            self._load_from_checkpoint(str(start))
            self.state = TrainerState.load_from_json(str(start / "trainer_state.json"))
        else:
            self.train(resume_from_checkpoint=str(start) if start is not None else None)

    def _check_whole(self, checkpoint: Path) -> None:
        """Look at the files that the ordinary trainer goes on without, or fails over in words of its own.

        Raises:
            TrainingError: one is missing or damaged.
        """
        several = self.args.world_size > 1
        names = ["trainer_state.json", f"rng_state_{self.args.process_index}.pth" if several else "rng_state.pth"]
        names += [] if self.is_fsdp_enabled else ["optimizer.pt", "scheduler.pt"]
        for name in names:
            try:
                if name.endswith(".json"):
                    json.loads((checkpoint / name).read_text("utf-8"))
                    continue
                with zipfile.ZipFile(checkpoint / name) as parts_of_it:
                    if parts_of_it.testzip() is not None:
                        raise zipfile.BadZipFile("a checksum is wrong")
            except (OSError, ValueError, zipfile.BadZipFile) as error:
                raise _damaged(checkpoint, name, error) from error

    def go_on_from(self, checkpoint: Path) -> None:
        """Set data and schedule to where the checkpoint was taken.

        Raises:
            TrainingError: the checkpoint is damaged, or has no position for this process.
            ConfigError: the position is of other data or settings.
        """
        path = checkpoint / POSITION.format(rank=self.args.process_index)
        try:
            position = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            if self.args.world_size > 1 or not (checkpoint / POSITION.format(rank=0)).is_file():
                raise TrainingError(
                    f"{path} cannot be read ({getattr(error, 'strerror', None) or error}); go on with as many processes as before."
                ) from error
            raise _damaged(checkpoint, path.name, error) from error
        self.batches.load_state_dict(position)  # another number of processes shows here
        self._check_whole(checkpoint)
        if self.carried is not None:
            carried = checkpoint / CARRIED.format(rank=self.args.process_index)
            try:
                state = load_file(carried)
            except (OSError, SafetensorError) as error:
                raise _damaged(checkpoint, carried.name, error) from error
            self.carried.load_state_dict(state, self.args.device)
        if self.schedule is not None:
            self.schedule.load_state_dict(position["schedule"])
        self._restored = position["log"]
        self._sums.update(self._restored["sums"])
        self._counts.update(self._restored["counts"])
        self.trained_tokens, self._logged_tokens = self._restored["tokens"], self._restored["logged_tokens"]


def _carried(model: Any, recipe: Recipe) -> Carried | None:
    """Where a baseline keeps windows from step to step; None for methods without."""
    if recipe.method == "memorizing":
        assert recipe.memorizing is not None
        return Carried(recipe.memorizing.places, recipe.memorizing.memory)
    if recipe.method == "transformer_xl":
        assert recipe.transformer_xl is not None
        return Carried(recipe.transformer_xl.places, recipe.transformer_xl.cache or model.focus.config.window_tokens)
    return None


def _bin_name(bounds: tuple[int, int | None]) -> str:
    first, last = bounds
    return f"loss_window_{first}" + ("" if last == first else "+" if last is None else f"-{last}")


class _GoOnLogging(TrainerCallback):
    """Puts back what a resumed run had summed up since its last log; the trainer forgets it when it begins."""

    def __init__(self, trainer: CrossbatchTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the trainer has cleared it."""
        trainer = self.trainer
        trainer._since, trainer._since_step = time.monotonic(), state.global_step
        kept = trainer._restored
        if kept:
            trainer._tr_loss = torch.tensor(kept["loss"], device=args.device)
            trainer._globalstep_last_logged = kept["last_logged"]


@contextlib.contextmanager
def writing(path: Path, safe: str) -> Iterator[None]:
    """While something is saved, what the disk refuses becomes an error that says so.

    Args:
        safe: what is not lost.

    Raises:
        TrainingError: the disk is full, too slow, or not to be written to.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save's own errors are RuntimeErrors
        if isinstance(error, (LongfocusError, torch.OutOfMemoryError)):
            raise
        told = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        if isinstance(error, RuntimeError):  # whose words are of positions in a file
            told = f"is the disk full? ({told})"
        raise TrainingError(
            f"{path} could not be written: {told}. {safe}; make room, and the same command goes on from there."
        ) from error


def _damaged(checkpoint: Path, name: str, error: Exception) -> TrainingError:
    told = getattr(error, "strerror", None) or " ".join(str(error).split())
    return TrainingError(
        f"{checkpoint} is damaged ({name}: {told}). Remove that folder; the run then goes on from the checkpoint before "
        "it, or from its beginning."
    )


def checkpoints(output: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    found = [path for path in output.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)
    sync(folder)
