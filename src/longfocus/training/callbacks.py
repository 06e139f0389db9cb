"""What goes on beside the steps: the log file, a line for the person, stopping at Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from longfocus.files import write_whole
from longfocus.training.build import Announce
from longfocus.training.trainer import writing


def quiet(trainer: Any) -> None:
    """Keep the trainer from printing its logs to stdout."""
    trainer.remove_callback(PrinterCallback)


class LogFile(TrainerCallback):
    """One JSON line a log, and a short line for the person."""

    def __init__(self, path: Path, announce: Announce) -> None:
        self.path, self.announce = path, announce

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Lines after the checkpoint that the run goes on from are written again."""
        if state.is_world_process_zero and self.path.is_file():
            lines = self.path.read_text("utf-8", errors="replace").splitlines()
            kept = [line for line in lines if _step_of(line) <= state.global_step]
            with writing(self.path, "The checkpoints are whole"):
                write_whole(self.path, "".join(f"{line}\n" for line in kept))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the line."""
        if not state.is_world_process_zero or not logs:
            return
        with writing(self.path, "The last checkpoint is whole"), self.path.open("a", encoding="utf-8") as file:
            kept = {name: value for name, value in logs.items() if name != "epoch"}  # the stream has no epochs
            file.write(json.dumps({"step": state.global_step, **kept}) + "\n")
        if "loss" in logs:
            self.announce(_line(state.global_step, args.max_steps, logs))


def _line(step: int, steps: int, logs: dict[str, Any]) -> str:
    """A log for the eye."""
    windows = [f"{value:.2f}" for name, value in logs.items() if name.startswith("loss_window_")]
    prefix = "positive_mass_"
    mass = [f"{name.removeprefix(prefix)}: {value:.2f}" for name, value in logs.items() if name.startswith(prefix)]
    minutes = (steps - step) * logs.get("seconds_per_step", 0.0) / 60
    return (
        f"step {step}/{steps}  loss {logs['loss']:.3f}"
        + (f"  by window {' '.join(windows)}" if windows else "")
        + (f"  positive mass {', '.join(mass)}" if mass else "")
        + f"  {logs.get('tokens_per_second', 0.0):,.0f} tokens/s  {minutes:.0f} min left"
    )


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62  # a line that a kill cut off


class StopOnCtrlC(TrainerCallback):
    """The first Ctrl-C finishes the step, saves a checkpoint and stops; the second stops at once.

    With several processes all stop after the same step, whichever got the signal.
    """

    def __init__(self, announce: Announce) -> None:
        self.announce, self.asked = announce, False
        self._before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the signal over."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)

    def give_back(self) -> None:
        """Let whoever had it before have the signal again."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        text = "Stopping after this step; its checkpoint will be kept (Ctrl-C again: at once)."
        try:
            self.announce(text)
        except RuntimeError:  # the signal came while a line was being written, and streams take one writer at a time
            os.write(2, f"{text}\n".encode())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Stop between two steps."""
        asked = self.asked
        if args.world_size > 1:
            flag = torch.tensor(float(asked), device=args.device)
            torch.distributed.all_reduce(flag)
            asked = bool(flag)
        if asked:
            control.should_save = True
            control.should_training_stop = True
        return control
