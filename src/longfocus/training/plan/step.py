"""What a step feeds: rows, tokens, and how many additional windows a row sees.

Windows are counted in tables that the recipe's own planner of contexts draws, as if each place held one long document.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from longfocus.crossbatch.plan import Contexts, Mix, Rows, plan_contexts
from longfocus.crossbatch.schedules import Drawn, Switched
from longfocus.training.recipes import Recipe

_DRAWS = 16  # tables drawn to find how many windows a row sees


@dataclass(frozen=True)
class Step:
    """One micro-batch of one process, every row full."""

    rows: int
    row_tokens: int
    targets: int
    """Tokens that a loss is taken on: those that were not fed in the step before."""
    mean_windows: float
    """Additional windows a row sees, over the run."""
    most_windows: float
    """The same under the largest mix of the run."""
    widest_row: int
    """Windows that one row sees at most."""

    @property
    def tokens(self) -> int:
        """Tokens fed."""
        return self.rows * self.row_tokens


def step_of(recipe: Recipe, window: int, devices: int = 1) -> Step:
    """What a step of a recipe feeds, from its own planner of contexts."""
    if recipe.method == "long":
        assert recipe.long is not None
        return Step(recipe.long.rows, recipe.long.tokens, recipe.long.rows * recipe.long.tokens, 0.0, 0.0, 0)
    part = recipe.crossbatch
    assert part is not None
    steps = recipe.steps(window, devices)
    schedule = part.schedule(steps)
    places = part.places * (devices if part.across_processes else 1)
    seen = [_windows_seen(mix, places, part.windows_per_step, part.negatives) for mix in schedule.mixes]
    means = [mean for mean, _ in seen]
    if isinstance(schedule, Switched):
        begun = [first for first, _ in schedule.stages] + [steps]
        lasting = [max(0, after - first) for first, after in itertools.pairwise(begun)]
        mean = sum(a * b for a, b in zip(means, lasting, strict=True)) / max(1, sum(lasting))
    elif isinstance(schedule, Drawn):
        mean = statistics.mean(means)
    else:  # switched by accuracy, no one knows when: as if from the start
        mean = means[-1]
    rows = part.places * part.windows_per_step
    targets = part.places * part.stride_windows * window
    return Step(rows, window, targets, mean, max(means), max(widest for _, widest in seen))


def _windows_seen(mix: Mix, places: int, windows: int, choice: Any) -> tuple[float, int]:
    """(mean, most) additional windows of a row, over a few drawn tables; long documents, one in each place."""
    if all(part.positives == part.negatives == 0 for part in mix):
        return 0.0, 0
    place = np.repeat(np.arange(places), windows)
    rows = Rows(place, place.copy(), np.tile(np.arange(windows), places), np.ones(len(place), dtype=np.int64))
    draws = _DRAWS if len(place) <= 64 else 2
    counts = [
        _count(plan_contexts(rows, mix, choice=choice, generator=np.random.default_rng(draw)), rows)
        for draw in range(draws)
    ]
    return float(np.mean(counts)), int(np.max(counts))


def _count(table: Contexts, rows: Rows) -> np.ndarray:
    others = np.array([(rows.documents != document).sum() for document in rows.documents])
    hard = np.minimum(table.wanted_hard, others)
    return (table.positives >= 0).sum(1) + (table.negatives >= 0).sum(1) + hard
