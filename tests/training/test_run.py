"""Runs on a tiny model: exact resume after kill -9, checkpoints whole or absent, results that are ordinary checkpoints.

python -m pytest tests/training/test_run.py
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import longfocus
from longfocus.crossbatch.context import CrossbatchContext
from longfocus.crossbatch.plan import Rows, plan_contexts
from longfocus.errors import ConfigError, TrainingError
from longfocus.training.build import build_model
from longfocus.training.recipes import Recipe
from longfocus.training.run import run
from longfocus.training.stream import Batches, open_mixture
from longfocus.training.trainer import checkpoints
from tests.models import assert_close
from tests.processes import Child, start
from tests.training.tiny_run import WORDS, prepare


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("tiny"))


def _log(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text("utf-8").splitlines()]
    return [line for line in lines if "loss" in line]


def _start(recipe: Path, *changes: str) -> Child:
    return start("tests.training.tiny_run:train", str(recipe), *changes)


@pytest.fixture(scope="module")
def unbroken(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run without a stop; its output folder."""
    output = tmp_path_factory.mktemp("unbroken") / "run"
    result = run(Recipe.read(recipe, [f"run.output={output}"]))
    assert (result.steps, result.stopped) == (8, False)
    return output


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def test_killed_at_random_moments_and_started_again_it_is_the_same_run(
    recipe: Path, unbroken: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    rng = random.Random(1)
    kills = 0
    for _ in range(16):
        process = _start(recipe, f"run.output={output}")
        first = checkpoints(output)[-1:]
        while process.is_running and checkpoints(output)[-1:] == first:
            time.sleep(0.002)  # until the next checkpoint is there …
        if process.is_running:
            time.sleep(rng.uniform(0, 0.15))  # … and a random moment later, also within the writing of one
            process.kill()
            kills += 1
        if process.wait().code == 0:
            break
    assert kills >= 3, "it was hardly ever killed"
    assert (output / "result.json").is_file()
    assert [line["step"] for line in _log(output)] == list(range(1, 9))
    for mine, other in zip(_log(output), _log(unbroken), strict=True):
        for name in other:
            if "second" not in name:
                assert mine[name] == other[name], f"step {other['step']}: {name}"
    expected = _weights(unbroken)
    for name, weight in _weights(output).items():
        assert torch.equal(weight, expected[name]), name
    assert not (output / "unfinished").exists()


def test_ctrl_c_finishes_the_step_and_the_run_goes_on(recipe: Path, unbroken: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = _start(recipe, f"run.output={output}", "run.save_every=100")
    process.wait_for((output / "log.jsonl").is_file)
    process.kill(signal.SIGINT)
    ended = process.wait()
    assert ended.code == 0 and ended.out.split()[1] == "True", ended
    assert "Stopping after this step" in ended.err
    assert len(checkpoints(output)) == 1
    assert not (output / "model").exists()
    result = run(Recipe.read(recipe, [f"run.output={output}"]))
    assert not result.stopped
    expected = _weights(unbroken)
    assert all(torch.equal(weight, expected[name]) for name, weight in _weights(output).items())


def test_the_result_is_an_ordinary_checkpoint_and_only_chosen_weights_moved(recipe: Path, unbroken: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(Recipe.read(recipe).model)
    after = AutoModelForCausalLM.from_pretrained(unbroken / "model")
    moved = {
        name
        for (name, weight), other in zip(after.named_parameters(), before.parameters(), strict=True)
        if not torch.equal(weight, other)
    }
    parts = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (1, 2) for part in "qkvo"]
    assert moved == set(parts)
    focused = longfocus.load(unbroken / "model")
    assert focused.focus.config.layers == (1, 2) and focused.focus.config.window == 16
    small = load_file(unbroken / "model" / "trained.safetensors")
    assert set(small) == set(parts) and all(weight.dtype == torch.bfloat16 for weight in small.values())
    result = json.loads((unbroken / "result.json").read_text())
    assert 0.8 * 8 * 3 * 4 * 16 < result["tokens"] <= 8 * 3 * 4 * 16  # documents end inside windows
    assert result["tokens"] == _log(unbroken)[-1]["tokens"]
    assert {source["name"] for source in result["sources_of_first_process"]} == {"texts", "facts"}


def test_the_log_tells_what_users_look_for(unbroken: Path) -> None:
    line = _log(unbroken)[-1]
    assert {"loss", "loss_window_0", "loss_window_1", "tokens_per_second", "additional_windows", "accuracy"} <= set(
        line
    )
    assert 0 < line["positive_mass_1"] < 1 and 0 < line["additional_mass_2"] < 1


def test_a_folder_of_another_recipe_is_refused(recipe: Path, unbroken: Path) -> None:
    with pytest.raises(TrainingError, match=r"optimizer\.lr"):
        run(Recipe.read(recipe, [f"run.output={unbroken}", "optimizer.lr=0.1"]))
    run(Recipe.read(recipe, [f"run.output={unbroken}"]))  # and the run is as whole as before


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("theirs", ["model/weights.bin", "checkpoint-7/weights.bin", "checkpoint-7.txt", "recipe.yaml"])
def test_what_no_run_has_made_is_left_as_it_is(recipe: Path, tmp_path: Path, theirs: str, fresh: bool) -> None:
    mine = tmp_path / theirs
    mine.parent.mkdir(exist_ok=True)
    mine.write_text(f"# written by hand\n{recipe.read_text('utf-8')}", "utf-8")
    before = mine.read_bytes()
    changes = [f"run.output={tmp_path}", "run.steps=1"]
    if theirs == "checkpoint-7.txt":
        run(Recipe.read(recipe, changes), fresh=fresh)
    else:
        with pytest.raises(TrainingError, match=f"{theirs.partition('/')[0]}.*another run.output"):
            run(Recipe.read(recipe, changes), fresh=fresh)
    assert mine.read_bytes() == before


def test_a_recipe_that_lies_where_its_run_goes_keeps_its_comments(recipe: Path, tmp_path: Path) -> None:
    mine = tmp_path / "recipe.yaml"
    mine.write_text(f"# written by hand\n{recipe.read_text('utf-8')}".replace("steps: 8", "steps: 1"), "utf-8")
    for name in ("run", "again"):
        mine.write_text(mine.read_text("utf-8").replace(str(recipe.parent / "run"), str(tmp_path)), "utf-8")
        before = mine.read_bytes()
        assert run(Recipe.read(mine)).steps == 1, name
        assert mine.read_bytes() == before


def test_the_result_of_another_recipe_stays_though_its_checkpoints_are_gone(recipe: Path, tmp_path: Path) -> None:
    run(Recipe.read(recipe, [f"run.output={tmp_path}", "run.steps=1"]))
    shutil.rmtree(tmp_path / "checkpoint-1")
    before = _weights(tmp_path)
    with pytest.raises(TrainingError, match=r"other settings \(optimizer.lr\)"):
        run(Recipe.read(recipe, [f"run.output={tmp_path}", "run.steps=1", "optimizer.lr=0.1"]))
    assert all(torch.equal(weight, before[name]) for name, weight in _weights(tmp_path).items())


def test_one_process_at_a_time_trains_into_a_folder(recipe: Path, tmp_path: Path) -> None:
    child = _start(recipe, f"run.output={tmp_path}", "run.steps=10000")
    child.wait_for((tmp_path / "log.jsonl").is_file)
    try:
        for fresh in (False, True):
            with pytest.raises(TrainingError, match="another process is training into it"):
                run(Recipe.read(recipe, [f"run.output={tmp_path}", "run.steps=10000"]), fresh=fresh)
        assert child.is_running
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("what", ["memory_attention", "all"])
def test_of_a_damaged_checkpoint_the_damaged_file_is_named(recipe: Path, tmp_path: Path, what: str) -> None:
    whole = [f"run.output={tmp_path / 'whole'}", "run.steps=2", f"train.what={what}"]
    run(Recipe.read(recipe, whole))
    names = sorted(path.name for path in (tmp_path / "whole" / "checkpoint-1").iterdir())
    names = [name for name in names if name not in ("config.json", "generation_config.json", "training_args.bin")]
    assert len(names) == 6, names
    for name in names:
        for damage in ("gone", "empty", "cut", "turned"):
            output = tmp_path / f"{name} {damage}"
            shutil.copytree(tmp_path / "whole", output)
            shutil.rmtree(output / "checkpoint-2")
            path = output / "checkpoint-1" / name
            data = path.read_bytes()
            path.write_bytes({"cut": data[: len(data) // 2], "turned": data[::-1]}.get(damage, b""))
            if damage == "gone":
                path.unlink()
            place = "its weights" if name.endswith(".safetensors") else name
            message = (
                rf"checkpoint-1 is damaged \({place}: .*Remove that folder" if damage != "gone" else "checkpoint-1"
            )
            with pytest.raises(TrainingError, match=message):
                run(Recipe.read(recipe, [*whole, f"run.output={output}"]))


@pytest.mark.parametrize(
    ("most_bytes", "refused"),
    [
        (300, "run cannot be written"),
        (3_000, "checkpoint-1 could not be written"),
        (60_000, "checkpoint-1 could not be written"),
        (200_000, "model could not be written"),
    ],
)
def test_a_full_disk_is_said_and_with_room_the_run_goes_on(
    recipe: Path, unbroken: Path, tmp_path: Path, most_bytes: int, refused: str
) -> None:
    output = tmp_path / "run"
    command = (str(most_bytes), str(recipe), f"run.output={output}")
    ended = start("tests.training.tiny_run:train_where_files_are_small", *command).wait()
    assert ended.code == 0 and refused in ended.out, ended
    assert "ile too large" in ended.out or "is the disk full?" in ended.out
    assert not (output / "unfinished").exists() and not list(output.glob("*.new"))
    run(Recipe.read(recipe, [f"run.output={output}"]))
    expected = _weights(unbroken)
    assert all(torch.equal(weight, expected[name]) for name, weight in _weights(output).items())


@pytest.mark.parametrize("line", ["5", "{}", "[]", "null", '{"step": nu', "\\xff"])
def test_lines_of_the_log_that_mean_nothing_are_written_over(recipe: Path, tmp_path: Path, line: str) -> None:
    output = tmp_path / "run"
    run(Recipe.read(recipe, [f"run.output={output}", "run.steps=2"]))
    shutil.rmtree(output / "checkpoint-2")
    with (output / "log.jsonl").open("ab") as file:
        file.write(line.encode().replace(b"\\xff", b"\xff") + b"\n")
    run(Recipe.read(recipe, [f"run.output={output}", "run.steps=2"]))
    assert [entry["step"] for entry in _log(output)] == [1, 2]


@pytest.mark.parametrize("what", ["all", "layers"])
def test_other_parts_are_trained_and_resumed(recipe: Path, tmp_path: Path, what: str) -> None:
    changes = [f"run.output={tmp_path}", f"train.what={what}", "run.steps=4"] + (
        ["train.layers=[3]"] if what == "layers" else []
    )
    run(Recipe.read(recipe, changes))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = AutoModelForCausalLM.from_pretrained(Recipe.read(recipe).model)
    moved = [not torch.equal(a, b) for a, b in zip(after.parameters(), before.parameters(), strict=True)]
    names = [name for name, _ in after.named_parameters()]
    expected = [what == "all" or ".layers.3." in name for name in names]
    assert moved == expected
    again = tmp_path / "again"
    run(Recipe.read(recipe, [*changes, f"run.output={again}", "run.steps=4", "run.save_every=2", "run.keep=5"]))
    for name in ("model", "checkpoint-4"):
        shutil.rmtree(again / name)
    run(Recipe.read(recipe, [*changes, f"run.output={again}", "run.save_every=2", "run.keep=5"]))
    resumed = AutoModelForCausalLM.from_pretrained(again / "model")
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), after.parameters(), strict=True))


def test_accumulated_gradients_are_those_of_the_mean_over_all_tokens_of_the_step(recipe: Path, tmp_path: Path) -> None:
    changes = [f"run.output={tmp_path}", "run.steps=1", "run.gradient_accumulation=3", "trainer={optim: sgd}"]
    changes += ["optimizer={lr: 0.5, weight_decay: 0.0, max_grad_norm: 1e9}"]
    checked = Recipe.read(recipe, changes)
    run(checked)
    assert json.loads((tmp_path / "checkpoint-1" / "position-0.json").read_text())["batches"] == 3
    model = build_model(checked)
    mixture = open_mixture(checked.data, longfocus.load_tokenizer(checked.model), tmp_path, seed=0)
    total, targets = torch.zeros(()), 0
    part = checked.crossbatch
    assert part is not None
    for number, batch in zip(range(3), Batches(mixture, checked, 16), strict=False):
        rows = Rows(*(batch[name].numpy() for name in ("places", "documents", "windows", "lengths")))
        mix = part.schedule(1).mix(0, np.random.default_rng((0, 1, 0)))
        table = plan_contexts(rows, mix, choice="random", generator=np.random.default_rng((0, 2, number, 0)))
        out = model(
            batch["input_ids"],
            context=CrossbatchContext(rows, table),
            lengths=batch["lengths"],
            shift_labels=batch["labels"],
            num_items_in_batch=1,
        )
        total, targets = total + out.loss, targets + int((batch["labels"] != -100).sum())
    (total / targets).backward()
    found = _weights(tmp_path)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            expected = weight.detach() - 0.5 * weight.grad
            assert (found[name] - expected).abs().max() < 1e-5, name


@pytest.mark.parametrize(
    "changes",
    [
        ["run.gradient_accumulation=3"],
        ["train.lora={r: 4, alpha: 8, dropout: 0.2, modules_to_save: [norm]}"],
        ["run.precision=bfloat16", "run.gradient_checkpointing=true"],
        ["data.sources.facts.hay=[]", "data.sources.texts.stream=true"],
        ["crossbatch.mix=null", "crossbatch.by_accuracy=[{d: 1}, 0.05, {d: 3}]"],
        ["crossbatch.mix=null", "crossbatch.drawn=[{d: 1}, {d: 3}]", "crossbatch.negatives=hard"],
        ["crossbatch.windows_per_step=2", "crossbatch.stride=1", "crossbatch.mix={d: 2}"],
        ["method=long", "long={rows: 2, tokens: 64}", "train.what=attention"],
        ["run.log_every=3", "optimizer.schedule=cosine"],
    ],
    ids=lambda changes: changes[-1].split("=")[0],
)
def test_stopped_and_gone_on_equals_unbroken(recipe: Path, tmp_path: Path, changes: list[str]) -> None:
    """Every mode: as if it had been killed after the checkpoint of step 2 of 4."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(Recipe.read(recipe, ["run.steps=4", "run.keep=9", *changes, f"run.output={whole}"]))
    shutil.copytree(whole, broken)
    for name in ("model", "checkpoint-3", "checkpoint-4"):
        shutil.rmtree(broken / name)
    (broken / "result.json").unlink()
    torch.manual_seed(99)
    said: list[str] = []
    run(Recipe.read(recipe, ["run.steps=4", "run.keep=9", *changes, f"run.output={broken}"]), announce=said.append)
    assert any("Going on from" in text and "checkpoint-2" in text for text in said)
    for mine, other in zip(_log(broken), _log(whole), strict=True):
        assert {k: v for k, v in mine.items() if "second" not in k} == {
            k: v for k, v in other.items() if "second" not in k
        }
    files = [path.relative_to(whole) for path in (whole / "model").rglob("*.safetensors")]
    assert files
    for file in files:
        expected = load_file(whole / file)
        for name, weight in load_file(broken / file).items():
            assert torch.equal(weight, expected[name]), f"{file}: {name}"


@pytest.mark.parametrize(
    "rope", ["null", "{type: linear, factor: 2.0}", "{type: dynamic, factor: 2.0}", "{type: yarn, factor: 4.0}"]
)
def test_ordinary_long_fine_tuning_is_a_baseline_on_the_same_data(recipe: Path, tmp_path: Path, rope: str) -> None:
    changes = [
        f"run.output={tmp_path}",
        "method=long",
        "long={rows: 3, tokens: 64}",
        f"long.rope={rope}",
        "run.steps=3",
        "train.what=attention",
    ]
    result = run(Recipe.read(recipe, changes))
    assert 0.7 * 3 * 3 * 64 < result.tokens <= 3 * 3 * 64
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not hasattr(model.config, "longfocus")
    assert model.config.rope_parameters["rope_type"] == ("default" if rope == "null" else rope.split()[1].strip(","))


def test_no_crossbatch_and_previous_current_feeding(recipe: Path, tmp_path: Path) -> None:
    run(Recipe.read(recipe, [f"run.output={tmp_path / 'a'}", "crossbatch.mix=local", "run.steps=2"]))
    assert "positive_mass_1" not in _log(tmp_path / "a")[-1]
    changes = ["crossbatch.windows_per_step=2", "crossbatch.stride=1", "crossbatch.mix={d: 2, w: 1}", "run.steps=3"]
    run(Recipe.read(recipe, [f"run.output={tmp_path / 'b'}", *changes]))
    log = _log(tmp_path / "b")
    assert log[0]["loss_window_0"] > 0 and "loss_window_0" not in log[1], "context windows are not counted again"


def test_lora_is_trained_saved_and_merged(recipe: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = [f"run.output={tmp_path / 'adapter'}", "run.steps=3", "run.gradient_checkpointing=true"]
    run(Recipe.read(recipe, [*base, "train.lora={r: 4, alpha: 8, modules_to_save: [norm]}"]))
    folder = tmp_path / "adapter" / "model"
    weights = load_file(folder / "adapter_model.safetensors")
    moved = [name for name, weight in weights.items() if "lora_B" in name and weight.abs().sum() > 0]
    assert len(moved) == 8, "each projection of both memory layers has learnt"
    assert any("norm" in name for name in weights)
    ids = torch.arange(3, 60)[None]
    model = longfocus.load(Recipe.read(recipe).model, memory_layers=(1, 2), window=16)
    adapted = peft.PeftModel.from_pretrained(model, folder).eval()(input_ids=ids).logits
    opened = longfocus.load(folder)
    assert opened.focus.config.layers == (1, 2) and opened.focus.config.window == 16
    assert_close(opened(ids).logits.detach(), adapted.detach(), 1e-4, "an adapter opened by its folder")
    again = [f"run.output={tmp_path / 'merged'}", "run.steps=3", "run.gradient_checkpointing=true"]
    run(Recipe.read(recipe, [*again, "train.lora={r: 4, alpha: 8, modules_to_save: [norm], merge: true}"]))
    merged = longfocus.load(tmp_path / "merged" / "model")
    assert merged.focus.config.layers == (1, 2)
    assert_close(merged(ids).logits.detach(), adapted.detach(), 1e-4, "the same run, merged")
    plain = longfocus.load(Recipe.read(recipe).model, memory_layers=(1, 2), window=16)
    assert (plain(ids).logits - adapted).abs().max() > 1e-3


def test_impossible_recipes_are_refused_before_anything_is_loaded(recipe: Path) -> None:
    cases = {
        "run.stepps=3": r"run\.stepps is not a key here.*Did you mean 'steps'",
        "optimizer.lr=-1": r"optimizer\.lr",
        "crossbatch.mix={d: 0}": "mix",
        "crossbatch.negatives=hardest": "negatives",
        "focus.windoww=16": "windoww",
        "data.sources.texts.paths=[]": "paths",
        "trainer.learning_rate=1": "trainer",
        "trainer.learning_ratee=1": "learning_ratee",
        "trainer.optim=nonsense": "nonsense",
        "optimizer.lr=.inf": "lr",
        "optimizer.betas=[0.9, 1.0]": "betas",
        "data.sources.facts.tokens=[200, 80]": "smaller number first",
        "train={what: all, layers: [1]}": "layers: given with what: all",
        "train={what: layers}": "layers: missing",
        "train.lora={targets: [q_proj, qq_proj]}": "qq_proj.*k_proj, o_proj, q_proj, v_proj",
        "train.lora={modules_to_save: [norm, nrm]}": r"modules_to_save: \['nrm'\] given.*embed_tokens.*norm",
        "run.report_to=[nonsense]": "report_to: nonsense is not supported",
        "run.report_to=[comet_ml]": "report_to: .*comet",
        "trainer.fsdp=true": "fsdp only works in distributed",
        "trainer.optim=adamw_bnb_8bit": "pip install -U bitsandbytes",
        "trainer.eval_strategy=steps": r"\['eval_strategy'\] would change nothing",
        "trainer.save_only_model=true": "save_only_model",
    }
    for change, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            checked = Recipe.read(recipe, [change])
            run(checked)


def test_bfloat16_products_leave_what_is_not_trained_as_it_was(recipe: Path, tmp_path: Path) -> None:
    for changes in ([], ["train.lora={r: 4, alpha: 8, merge: true}"]):
        output = tmp_path / str(len(changes))
        run(Recipe.read(recipe, [f"run.output={output}", "run.steps=2", "run.precision=bfloat16", *changes]))
        before = AutoModelForCausalLM.from_pretrained(Recipe.read(recipe).model)
        after = AutoModelForCausalLM.from_pretrained(output / "model")
        for (name, weight), other in zip(after.named_parameters(), before.parameters(), strict=True):
            assert weight.dtype == torch.float32
            trained = any(f"layers.{layer}.self_attn" in name for layer in (1, 2))
            assert torch.equal(weight, other) != trained, name
        assert _log(output)[-1]["loss"] < 40  # these models begin far from uniform


def test_a_long_line_is_read_in_windows_and_none_of_it_is_lost(recipe: Path, tmp_path: Path) -> None:
    long_line = json.dumps({"text": " ".join(random.Random(0).choice(WORDS) for _ in range(5000))})
    (tmp_path / "long.jsonl").write_text(long_line + "\n", "utf-8")
    source = {"name": "long", "share": 1.0, "kind": "jsonl", "paths": [str(tmp_path / "long.jsonl")]}
    changes = [f"run.output={tmp_path / 'run'}", "run.steps=1", f"data.sources=[{json.dumps(source)}]"]
    said: list[str] = []
    run(Recipe.read(recipe, changes), announce=said.append)
    line = next(text for text in said if text.startswith("Source long"))
    tokens = int(line.split(" tokens")[0].split()[-1].replace(",", ""))
    windows = int(line.split(" windows")[0].split()[-1].replace(",", ""))
    assert tokens > 5000 and windows == -(-(tokens - 1) // 16)
    assert "1 documents longer than the 64 tokens of a step" in line
    with pytest.raises(ConfigError, match=r"more than the 64 that a place reads in a step; data\.strict"):
        run(Recipe.read(recipe, [*changes, "data.strict=true", f"run.output={tmp_path / 'strict'}"]))


@pytest.mark.parametrize("pieces", ["null", "100"])
def test_files_that_are_passed_over_are_told(recipe: Path, tmp_path: Path, pieces: str) -> None:
    texts = shutil.copytree(recipe.parent / "texts", tmp_path / "texts")
    (texts / "a.txt").write_bytes(b"\0\1")
    (texts / "b.txt").write_text("")
    said: list[str] = []
    changes = [f"run.output={tmp_path / 'run'}", "run.steps=1", f"data.sources.texts.paths=[{texts}]"]
    changes += [f"data.sources.texts.pieces_of={pieces}", "data.sources.facts.hay=[]"]
    run(Recipe.read(recipe, changes), announce=said.append)
    (line,) = [text for text in said if "passed over" in text]
    assert line.startswith("Source texts: 2 files or records passed over (")
    assert "a.txt is a binary file" in line and "b.txt is empty" in line


def test_two_processes_train_one_model(recipe: Path, tmp_path: Path) -> None:
    """Real processes, started as users start them; their models stay the same, and the run resumes."""
    for steps in (2, 4):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "localhost:0", "-m", "longfocus.cli", "train", str(recipe)]
        for change in (f"run.output={tmp_path}", f"run.steps={steps}", "crossbatch.across_processes=true"):
            command += ["--set", change]
        if steps == 4:  # as if it had been stopped after two of four
            kept = (tmp_path / "recipe.yaml").read_text("utf-8").replace("steps: 2", "steps: 4")
            (tmp_path / "recipe.yaml").write_text(kept, "utf-8")
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["steps"] == steps and 0.7 < result["tokens"] / (steps * 2 * 3 * 4 * 16) <= 1
    assert "Going on from" in done.stderr
    command[-1] = "crossbatch.across_processes=true"
    command[command.index(f"run.output={tmp_path}")] = f"run.output={tmp_path / 'unbroken'}"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    expected = _weights(tmp_path / "unbroken")
    for name, weight in _weights(tmp_path).items():
        assert torch.equal(weight, expected[name]), name
    assert {path.name for path in (tmp_path / "checkpoint-4").glob("position-*")} == {
        "position-0.json",
        "position-1.json",
    }
    assert [line["step"] for line in _log(tmp_path)] == [1, 2, 3, 4]
