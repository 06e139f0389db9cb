"""The explicit contrastive loss: against its definition in float64 with every gradient, and in a run.

python -m pytest tests/crossbatch/test_contrast.py
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from longfocus.crossbatch import reference
from longfocus.crossbatch.attend import Table, attend_rows
from longfocus.crossbatch.contrast import contrast_rows
from longfocus.errors import ConfigError
from longfocus.training.recipes import Recipe
from longfocus.training.run import run
from tests.models import assert_close
from tests.training.tiny_run import prepare

TABLES = {
    "both": Table([[1], [0, 2], [1]], [[2], [3], [0, 3]], [7, 5, 7, 1]),
    "some": Table([[1], [], [1], []], [[2, 3], [0], [], []], [7, 7, 3, 7], negative_copies=4.0),
    "none": Table([[1], [], [], []], [[], [0], [], []], [7, 7, 7, 7]),
}


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
@pytest.mark.parametrize("name", TABLES)
def test_it_is_its_definition_with_every_gradient(name: str, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    table, rows = TABLES[name], len(TABLES[name].positives)
    query = torch.randn(rows, heads[0], 7, 6, dtype=torch.float64, requires_grad=True)
    key = torch.randn(4, heads[1], 7, 6, dtype=torch.float64, requires_grad=True)
    actual = contrast_rows(query, key, table, scale=0.4)
    expected = reference.contrast_rows(
        query,
        key,
        table.positives,
        table.negatives,
        table.lengths,
        scale=0.4,
        negative_copies=table.negative_copies,
    )
    assert_close(actual, expected, 1e-12, "loss")
    if name == "none":
        assert actual == 0 and not actual.requires_grad
        return
    assert actual > 0
    for what, tensor in (("query", query), ("key", key)):
        one, two = (torch.autograd.grad(loss, tensor, retain_graph=True)[0] for loss in (actual, expected))
        assert_close(one, two, 1e-12, f"gradient of {what}")


def test_of_one_query_it_is_the_negative_logarithm_of_the_paper_s_share() -> None:
    torch.manual_seed(1)
    query, key = torch.randn(3, 1, 1, 4, dtype=torch.float64), torch.randn(3, 1, 1, 4, dtype=torch.float64)
    table = Table([[1], [], []], [[2], [], []], [1, 1, 1])
    _, mass = attend_rows(query, key, key, None, key, None, table, scale=0.5)
    assert float(contrast_rows(query, key, table, scale=0.5)) == pytest.approx(-math.log(mass.positive), abs=1e-12)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("tiny"))


def _log(recipe: Path, output: Path, *changes: str) -> list[dict[str, Any]]:
    told = ["run.steps=8", f"run.output={output}", "optimizer.lr=0.01", "crossbatch.mix={d: 2}", *changes]
    return [line for line in run(Recipe.read(recipe, told)).log if "loss" in line]


def test_a_run_takes_its_weight_and_makes_it_less(recipe: Path, tmp_path: Path) -> None:
    without, hardly, much = (
        _log(recipe, tmp_path / str(weight), f"crossbatch.contrast={weight}") for weight in (0, 0.001, 10)
    )
    assert "contrast_1" not in without[0]
    added = (much[0]["contrast_1"] + much[0]["contrast_2"]) / 2
    assert much[0]["loss"] - without[0]["loss"] == pytest.approx(10 * added, abs=1e-3), "its mean over layers"
    late = [sum(line["contrast_1"] + line["contrast_2"] for line in log[-3:]) for log in (hardly, much)]
    assert late[1] < 0.96 * late[0]


def test_accumulated_steps_and_a_resumed_run_take_the_same_steps(recipe: Path, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(text: str) -> None:
        if text.startswith("step 2/"):
            raise StopError

    changes = ["run.steps=3", "crossbatch.mix={d: 2}", "crossbatch.contrast=0.5", "run.gradient_accumulation=2"]
    whole = run(Recipe.read(recipe, [*changes, f"run.output={tmp_path / 'whole'}"])).log
    with pytest.raises(StopError):
        run(Recipe.read(recipe, [*changes, f"run.output={tmp_path / 'broken'}"]), announce=stop)
    again = run(Recipe.read(recipe, [*changes, f"run.output={tmp_path / 'broken'}"])).log
    (one,), (two,) = (
        [line["contrast_1"] for line in log if line["step"] == 3 and "loss" in line] for log in (whole, again)
    )
    assert one == two


def test_it_does_not_go_with_gradient_checkpointing(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"crossbatch\.contrast: 0\.1 given with run\.gradient_checkpointing"):
        Recipe.read(recipe, ["crossbatch.contrast=0.1", "run.gradient_checkpointing=true"])
    with pytest.raises(ConfigError, match="contrast"):
        Recipe.read(recipe, ["crossbatch.contrast=-1"])
