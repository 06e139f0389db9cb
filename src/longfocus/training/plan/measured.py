"""A few real steps of a recipe on this machine, on random tokens: cost does not depend on which tokens they are.

What plans are checked against. It needs the weights, trains in this one process, and keeps nothing.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longfocus.process_memory import forget_peak, peak_bytes, resident_bytes, return_freed
from longfocus.training.recipes import Recipe


@dataclass(frozen=True)
class Measured:
    """A few real steps on this machine."""

    steps: int
    seconds_per_step: float
    """Median, the first step left out."""
    tokens_per_s: float
    peak_bytes: int
    """Most memory in use, without the program itself."""
    program_bytes: int
    """Interpreter and libraries."""


def measure(recipe: Recipe, steps: int = 2) -> Measured:
    """Run a warm-up step and so many more of the recipe in this one process; nothing is kept.

    Raises:
        ModelNotFoundError: the weights are not here (a plan alone needs none).
    """
    from transformers import TrainerCallback
    from transformers.trainer_utils import SaveStrategy

    from longfocus.training.build import build_model
    from longfocus.training.callbacks import quiet
    from longfocus.training.run import arguments
    from longfocus.training.stream import Batches
    from longfocus.training.trainer import CrossbatchTrainer

    class Watch(TrainerCallback):
        """Notes how long steps take, and after the first what the program itself holds: libraries are all loaded then."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.begun = 0.0
            self.program = 0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.begun)
            if len(self.seconds) == 1:
                states = [value for state in kwargs["optimizer"].state.values() for value in state.values()]
                held = [*kwargs["model"].parameters(), *filter(torch.is_tensor, states)]
                return_freed()
                self.program = resident_bytes() - sum(tensor.numel() * tensor.element_size() for tensor in held)
                forget_peak()

    with tempfile.TemporaryDirectory() as folder:
        changes = {"output": folder, "steps": steps + 1, "tokens": None, "report_to": [], "push_to_hub": None}
        alone = {name: value for name, value in recipe.trainer.items() if not name.startswith("fsdp")}
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update=changes), "trainer": alone})
        model = build_model(recipe)
        window = model.focus.config.window_tokens if recipe.method != "long" else 0
        given = arguments(recipe, steps + 1)
        given.save_strategy = SaveStrategy.NO
        watch = Watch()
        text: Any = _RandomText(int(model.config.vocab_size), recipe.tokens_per_step(window))
        trainer = CrossbatchTrainer(model, recipe, Batches(text, recipe, window), given, callbacks=[watch])
        quiet(trainer)
        trainer.train()
    seconds = statistics.median(watch.seconds[1:])
    on_gpu = torch.cuda.is_available() and recipe.run.device != "cpu"
    peak = torch.cuda.max_memory_allocated() if on_gpu else max(0, peak_bytes() - watch.program)
    return Measured(steps, seconds, recipe.tokens_per_step(window) / seconds, peak, watch.program)


class _RandomText:
    """Stands for a mixture: one long document after another, of random tokens."""

    world, rank = 1, 0
    sources: Sequence[Any] = ()

    def __init__(self, vocabulary: int, tokens: int) -> None:
        self.vocabulary, self.tokens = vocabulary, tokens
        self.generator = np.random.default_rng(0)

    def next_document(self) -> Any:
        from longfocus.data.mixture import Drawn as Document

        return Document(0, ("random",), self.generator.integers(3, self.vocabulary, 16 * self.tokens), None)

    def remember(self, drawn: Any) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}
