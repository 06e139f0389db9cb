"""What `longfocus plan` says: FLOPs as counted while a step runs, memory as measured, the paper's recipes as published.

python -m pytest tests/training/test_plan.py
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longfocus.crossbatch.context import CrossbatchContext
from longfocus.crossbatch.plan import Rows, plan_contexts
from longfocus.errors import ConfigError, ModelNotFoundError
from longfocus.training import plan as planning
from longfocus.training.recipes import Recipe
from longfocus.training.run import arguments, build_model
from tests import processes
from tests.models import VOCABULARY, tiny
from tests.training.tiny_run import prepare

ROOT = Path(__file__).parents[2]
PAPER = {"3b": 3_426_473_600, "7b": 6_738_415_616}
"""Weights of OpenLLaMA."""
NAMES = ("llama_1_kv_head", "qwen3", "gemma2", "phi3", "gpt_neox", "olmo2")
"""One model of each build: gates or none, norms inside attention, fused or parallel parts, softcap."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a tiny checkpoint by name of the model."""
    folder = tmp_path_factory.mktemp("models")

    def saved(name: str) -> Path:
        if not (folder / name).exists():
            tiny(name).save_pretrained(folder / name)
        return folder / name

    return saved


# -- the CPU kernels' formulas, which PyTorch's counter does not know --------------------------------------


def _pairs(query: Any, key: Any, causal: bool) -> int:
    queries, keys = query[-2], key[-2]
    return queries * (queries + 1) // 2 if causal else queries * keys


def _forward(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, **kwargs: Any) -> int:
    return 2 * 2 * q[0] * q[1] * q[-1] * _pairs(q, k, causal)


def _backward(grad: Any, q: Any, k: Any, *rest: Any, **kwargs: Any) -> int:
    causal = next(value for value in rest if isinstance(value, bool))
    return 5 * 2 * q[0] * q[1] * q[-1] * _pairs(q, k, causal)


KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


class Counted:
    """One real forward and backward of a recipe, beside what is planned for it."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.shape = planning.build_shape(recipe)
        self.step = planning.step_of(recipe, self.shape.window)
        model = build_model(recipe).train()
        if recipe.run.gradient_checkpointing:
            model.activation_checkpointing_enable()
        ids = torch.randint(3, VOCABULARY, (self.step.rows, self.step.row_tokens))
        call: dict[str, Any] = {"input_ids": ids, "shift_labels": ids}
        if recipe.method == "crossbatch":
            call["context"] = self._context()
        else:
            call |= {"labels": ids, "use_cache": False}
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage
            return tensor

        with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(**call).loss
            self.kept_bytes = sum(storage.nbytes() for storage in kept.values())
            kept.clear()
            loss.backward()
        self.flops = counter.get_total_flops()

    def _context(self) -> CrossbatchContext:
        part = self.recipe.crossbatch
        assert part is not None
        place = np.repeat(np.arange(part.places), part.windows_per_step)
        index = np.tile(np.arange(part.windows_per_step), part.places)
        rows = Rows(place, place.copy(), index, np.full(len(place), self.step.row_tokens))
        generator = np.random.default_rng(0)
        table = plan_contexts(rows, part.schedule(10).mix(0, generator), choice=part.negatives, generator=generator)
        context = CrossbatchContext(rows, table)
        self.step = dataclasses.replace(self.step, mean_windows=context.additional_windows)
        return context

    @property
    def planned_flops(self) -> float:
        return planning.count_flops(
            self.shape,
            self.step,
            masked=self.recipe.method == "crossbatch",
            checkpointing=self.recipe.run.gradient_checkpointing,
            on_cpu=True,
        ).total

    @property
    def planned_kept_bytes(self) -> float:
        memory = planning.count_memory(self.shape, self.step, self.recipe, dtype=torch.float32, on_cpu=True)
        grad_hidden = 4 * self.step.tokens * self.shape.hidden  # of the loss, which keeps it too
        return memory["activations"] + grad_hidden * (self.recipe.method == "crossbatch")


def _recipe(path: Path, model: Path, *changes: str) -> Recipe:
    base = [f"model={model}", "focus.window=64", "crossbatch.mix={shares: [[0.5,0,0],[0.5,2,3]]}"]
    return Recipe.read(path, [*base, *changes])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["memory_attention", "all"])
def test_flops_are_those_of_a_real_step(recipe: Path, checkpoints: Any, name: str, what: str) -> None:
    counted = Counted(_recipe(recipe, checkpoints(name), f"train.what={what}"))
    assert counted.planned_flops == pytest.approx(counted.flops, rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        ["train.what=attention"],
        ["train.what=layers", "train.layers=[2,3]"],
        ["train.what=memory_attention", "train.names=[v_proj]"],
        ["train.lora={r: 4, alpha: 8}"],
        ["run.gradient_checkpointing=true"],
        ["run.gradient_checkpointing=true", "train.what=all"],
        ["method=long", "long={rows: 3, tokens: 256}"],
        ["method=long", "long={rows: 3, tokens: 256}", "train.what=all"],
        ["crossbatch.mix=local"],
    ],
    ids=" ".join,
)
def test_flops_and_kept_activations_follow_what_is_trained(recipe: Path, checkpoints: Any, changes: list[str]) -> None:
    counted = Counted(_recipe(recipe, checkpoints("llama_9_heads"), *changes))
    assert counted.planned_flops == pytest.approx(counted.flops, rel=0.02)
    if "run.gradient_checkpointing=true" not in changes:  # there, hooks see only what leaves a layer
        assert counted.planned_kept_bytes == pytest.approx(counted.kept_bytes, rel=0.15)


def measured_steps(recipe: str, *cases: str) -> None:
    """Runs in a process of its own: planned and measured bytes, and tokens/s, for each list of changes."""
    torch.set_num_threads(1)
    # freed memory goes back at once: at full size tensors are large enough for that, at this size they are not
    threshold = -3
    ctypes.CDLL(None).mallopt(threshold, 65536)
    for case in cases:
        read = Recipe.read(recipe, json.loads(case))
        made, found = planning.plan(read), planning.measure(read, 1)
        print(json.dumps([made.memory["peak"], found.peak_bytes, found.tokens_per_s]), flush=True)


def test_peak_memory_is_within_a_third_of_a_measured_run(recipe: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 1000}
    tiny("llama", **sizes).save_pretrained(tmp_path / "model")
    base = [
        f"model={tmp_path / 'model'}",
        "focus.window=64",
        "crossbatch.places=8",
        "crossbatch.windows_per_step=8",
        "crossbatch.mix={shares: [[0.5,0,0],[0.5,2,3]]}",
    ]
    cases = [base, [*base, "train.what=all", "run.gradient_checkpointing=true"]]
    done = processes.run("tests.training.test_plan:measured_steps", str(recipe), *map(json.dumps, cases))
    assert done.code == 0, done.err
    results = [json.loads(line) for line in done.out.splitlines() if line.startswith("[")]
    assert len(results) == len(cases)
    for changes, (planned, measured, speed) in zip(cases, results, strict=True):
        assert planned == pytest.approx(measured, rel=0.3), changes[len(base) :]
        assert speed > 0


# -- steps and schedules -----------------------------------------------------------------------------------


def test_tokens_steps_and_devices(recipe: Path) -> None:
    read = Recipe.read(recipe, ["run.steps=null", "run.tokens=10000", "run.gradient_accumulation=2"])
    made = planning.plan(read, devices=3)
    assert made.tokens_per_step == 3 * 4 * 16 * 2 * 3
    assert (made.steps, made.tokens) == (9, 9 * made.tokens_per_step)
    one = planning.plan(read)
    assert made.tokens_per_s == pytest.approx(3 * one.tokens_per_s)
    stated = planning.plan(read, flops_per_s=1e9)
    assert stated.tokens_per_s == pytest.approx(1e9 / stated.flops_per_token["total"])
    assert stated.hours == pytest.approx(stated.tokens / stated.tokens_per_s / 3600)
    assert one.trained == 2 * (2 * 48 * 48 + 2 * 48 * 16)


def test_windows_of_the_previous_step_cost_but_count_once(recipe: Path) -> None:
    mix = "crossbatch.mix={d: 1, w: 1}"
    all_new = planning.plan(Recipe.read(recipe, ["crossbatch.windows_per_step=2", mix]), flops_per_s=1.0)
    again = planning.plan(
        Recipe.read(recipe, ["crossbatch.windows_per_step=2", "crossbatch.stride=1", mix]), flops_per_s=1.0
    )
    assert again.tokens_per_step * 2 == all_new.tokens_per_step
    assert (
        1.7 < again.flops_per_token["total"] / all_new.flops_per_token["total"] < 2.0
    )  # the head sees new tokens only


@pytest.mark.parametrize(
    ("schedule", "mean", "most"),
    [
        ("crossbatch.mix=local", 0.0, 0.0),
        # 3 places of 4 windows; a row sees windows of others before it in the order: 0, 1, 2 | 2, 3, 4 | 4, 5, 6 | 6, 7, 8
        ("crossbatch.mix={shares: [[1.0, 0, 3]]}", 29 / 12, 29 / 12),
        ("crossbatch.mix={shares: [[1.0, 1, 0]]}", 0.75, 0.75),  # the first of four windows has none before it
        ("crossbatch.mix={shares: [[1.0, 0, 99]]}", 4.0, 4.0),  # the batch has no more
        ("crossbatch.drawn=[local, {shares: [[1.0, 0, 4]]}]", 1.5, 3.0),
        (
            "crossbatch.stages=[{after: 0.0, mix: {shares: [[1.0, 0, 1]]}}, {after: 0.9, mix: {shares: [[1.0, 0, 8]]}}]",
            0.9 * 11 / 12 + 0.1 * 4.0,
            4.0,
        ),
        ("crossbatch.by_accuracy=[local, 0.98, {shares: [[1.0, 0, 4]]}]", 3.0, 3.0),
    ],
)
def test_additional_windows_over_a_run(recipe: Path, schedule: str, mean: float, most: float) -> None:
    changes = ["run.steps=100", "crossbatch.negatives=random", schedule]
    if not schedule.startswith("crossbatch.mix"):
        changes.insert(0, "crossbatch.mix=null")
    made = planning.plan(Recipe.read(recipe, changes))
    assert (made.mean_windows, made.most_windows) == (pytest.approx(mean), pytest.approx(most))
    assert made.flops_per_token["additional_most"] >= made.flops_per_token["additional"]
    assert (made.flops_per_token["additional"] == 0) == (mean == 0)


def test_more_processes_hold_less_each_when_states_are_spread(recipe: Path) -> None:
    changes = ["train.what=all"]
    alone = planning.plan(Recipe.read(recipe, changes), devices=4).memory
    spread = planning.plan(Recipe.read(recipe, [*changes, "trainer={fsdp: true}"]), devices=4).memory
    for name in ("weights", "gradients", "optimizer"):
        assert spread[name] == alone[name] / 4
    assert spread["peak"] < alone["peak"]


def test_what_cannot_be_planned_is_said(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="--device: 'abacus' given, expected one of cpu, a100"):
        planning.plan(Recipe.read(recipe), device="abacus")
    with pytest.raises(ConfigError, match="--devices: 0"):
        planning.plan(Recipe.read(recipe), devices=0)
    with pytest.raises(ModelNotFoundError, match="--config"):
        planning.plan(Recipe.read(recipe, ["model=nobody/nothing"]))


# -- the paper's recipes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "layers", "tokens", "windows"), [("3b", (6, 12, 18), 10e9, 5 / 4), ("7b", (8, 16, 24), 3e9, 4.25)]
)
def test_the_papers_recipes_are_complete(size: str, layers: tuple[int, ...], tokens: float, windows: float) -> None:
    recipe = Recipe.read(ROOT / f"recipes/longllama-{size}.yaml")
    made = planning.plan(recipe, device="h100", devices=8, config=ROOT / f"recipes/configs/open_llama_{size}")
    assert (made.weights, made.trained) == (PAPER[size], PAPER[size])
    assert made.memory_layers == layers
    assert made.tokens_per_step == 256 * 1024
    assert tokens <= made.tokens < tokens + made.tokens_per_step
    assert made.window == 2048
    assert recipe.crossbatch is not None and recipe.crossbatch.windows_per_step * made.window == 8192
    shares = {source.name: source.share for source in recipe.data.sources}
    assert shares == {
        "arxiv": 0.25,
        "python": 0.25,
        "books": 0.10,
        "common_crawl": 0.29,
        "c4": 0.05,
        "github": 0.02,
        "stackexchange": 0.02,
        "wikipedia": 0.02,
    }
    assert (recipe.optimizer.lr, recipe.optimizer.schedule, recipe.optimizer.weight_decay) == (2e-5, "constant", 0.01)
    given = arguments(recipe, made.steps)
    assert given.bf16 and given.activation_checkpointing and given.fsdp
    assert made.fits
    # six FLOPs a weight and token, and the forward pass again
    lower, upper = 6 * PAPER[size], 10 * PAPER[size]
    assert lower < made.flops_per_token["total"] < upper
    assert 0.01 < made.flops_per_token["additional"] / made.flops_per_token["total"] < 0.05
    assert made.mean_windows < windows + 0.5
    assert 5 < made.hours < 500
