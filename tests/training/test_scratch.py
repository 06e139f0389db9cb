"""Models from scratch: ordinary checkpoints whatever was learned beside them; made-up data with loss on answers only.

python -m pytest tests/training/test_scratch.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import longfocus
from longfocus.data.dictionary import Dictionary, DictionaryFormat
from longfocus.errors import ConfigError
from longfocus.training.build import build_model
from longfocus.training.plan import plan
from longfocus.training.recipes import Recipe, Scratch
from longfocus.training.run import run
from longfocus.training.scratch import (
    TEMPERATURE,
    add_temperatures,
    count_weights,
    fold_temperatures,
    llama_config,
    new_model,
    scratch_tokenizer,
)
from longfocus.training.stream import Batches, open_mixture
from longfocus.training.trainer import checkpoints
from tests.models import assert_close

TINY: dict[str, Any] = {
    "layers": 3,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "intermediate": 48,
    "tokenizer": "ids",
    "vocabulary": 16,
    "temperature": True,
}
DICTIONARY: dict[str, Any] = {
    "model": TINY,
    "focus": {"memory_layers": [1], "window": 32, "memory_positions": "none"},
    "crossbatch": {"places": 4, "windows_per_step": 2, "by_accuracy": [{"d": 1}, 0.98, {"d": 4}]},
    "train": {"what": "all"},
    "data": {
        "sources": [
            {"kind": "dictionary", "symbols": 12, "key_tokens": 2, "value_tokens": 2, "window": 32, "share": 1.0}
        ]
    },
    "optimizer": {"lr": 1e-2},
    "run": {"steps": 6, "device": "cpu", "precision": "float32", "save_every": 1, "log_every": 1},
}


def _recipe(**changes: Any) -> Recipe:
    return Recipe.check({**DICTIONARY, **changes})


def _of(output: Path) -> Recipe:
    return _recipe(run={**DICTIONARY["run"], "output": str(output)})


def test_weights_depend_on_shape_and_seed_only() -> None:
    scratch = Scratch(**TINY)
    first = new_model(scratch, 3)
    state = torch.random.get_rng_state()
    torch.randn(7)
    again, other = new_model(scratch, 3), new_model(scratch, 4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)
    torch.random.set_rng_state(state)
    assert torch.equal(torch.randn(7), torch.randn(7, generator=torch.Generator().set_state(state)))


def test_matrices_are_drawn_with_the_deviation_that_is_asked_for() -> None:
    for deviation in (0.02, 0.3):
        model = new_model(Scratch(**{**TINY, "hidden": 128, "deviation": deviation}), 0)
        assert abs(float(model.model.layers[0].mlp.up_proj.weight.detach().std()) / deviation - 1) < 0.05


def test_temperatures_scale_the_scores_of_their_heads_and_are_folded_away() -> None:
    model = longfocus.attach(new_model(Scratch(**TINY), 0), memory_layers=(1,), window=8, memory_positions="none")
    for weight in model.parameters():
        weight.data.mul_(6)
    names = [name for name, _ in model.named_parameters()]
    ids = torch.randint(16, (2, 30), generator=torch.Generator().manual_seed(0))  # four windows: memory too
    with torch.no_grad():
        before = model(ids).logits
        add_temperatures(model, [1])
        assert_close(model(ids).logits, before, 1e-5, "temperature 1")
        (temperature,) = (weight for name, weight in model.named_parameters() if TEMPERATURE in name)
        temperature.copy_(torch.tensor([0.5, -0.5, 1.0, 0.0]))
        warm = model(ids).logits
        assert (warm - before).abs().max() > 0.1
        by_hand = longfocus.attach(new_model(Scratch(**TINY), 0), memory_layers=(1,), window=8, memory_positions="none")
        for weight in by_hand.parameters():
            weight.data.mul_(6)
        for head, value in enumerate((0.5, -0.5, 1.0, 0.0)):
            by_hand.model.layers[1].self_attn.q_proj.weight[8 * head : 8 * head + 8] *= torch.tensor(value).exp()
        assert_close(warm, by_hand(ids).logits, 1e-5, "scaled by hand")
        fold_temperatures(model)
        assert_close(model(ids).logits, warm, 1e-5, "folded")
    assert sorted(name for name, _ in model.named_parameters()) == sorted(names)


def test_loss_is_taken_on_answers_only_and_on_each_of_them() -> None:
    recipe = _recipe()
    form = DictionaryFormat(symbols=12, key_tokens=2, value_tokens=2, window=32)
    tokenizer = scratch_tokenizer(Scratch(**TINY))
    mixture = open_mixture(recipe.data, tokenizer, Path("unused"), seed=0)
    batches = iter(Batches(mixture, recipe, 32))
    for _ in range(2):
        batch = next(batches)
        ids, labels = batch["input_ids"], batch["labels"]
        assert ids.shape == (8, 32)
        assert (labels[0::2] == -100).all(), "windows of definitions"
        for row in (1, 3, 5, 7):
            found = {at: int(labels[row, at]) for at in range(32) if labels[row, at] != -100}
            assert len(found) == form.records * form.value_tokens
            for at, target in found.items():
                assert target == int(ids[row, at + 1])
                assert at % form.record_tokens in (3, 4), "after <value>, and after the first value token"


def test_interrupted_anywhere_it_goes_on_to_the_same_ordinary_checkpoint(tmp_path: Path) -> None:
    class KilledError(Exception):
        pass

    def killing(step: int) -> Any:
        def announce(text: str) -> None:
            if text.startswith(f"step {step}/"):
                raise KilledError

        return announce

    unbroken = run(_of(tmp_path / "whole"))
    for step in (2, 4):
        with pytest.raises(KilledError):
            run(_of(tmp_path / "broken"), announce=killing(step))
        assert checkpoints(tmp_path / "broken")
    assert run(_of(tmp_path / "broken")).steps == unbroken.steps == 6
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("whole", "broken"))
    for (name, weight), other in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(weight, other), name
    begun = new_model(Scratch(**TINY), 0)
    assert type(one) is LlamaForCausalLM and [*one.state_dict()] == [*begun.state_dict()]
    assert not torch.equal(one.model.layers[1].self_attn.q_proj.weight, begun.model.layers[1].self_attn.q_proj.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "whole" / "model")("3 15 0")["input_ids"] == [3, 15, 0]
    assert longfocus.load(tmp_path / "whole" / "model").focus.config.memory_positions == "none"


def test_every_memory_layer_gets_temperatures_and_no_other() -> None:
    model = build_model(_recipe())
    found = [name for name, _ in model.named_parameters() if TEMPERATURE in name]
    assert found == [f"model.layers.1.self_attn.q_proj.parametrizations.weight.0.{TEMPERATURE}"]
    assert all(weight.requires_grad for weight in model.parameters())


BYTES = scratch_tokenizer(Scratch(layers=1, hidden=8, heads=2, intermediate=8))


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_bytes_come_back_as_the_text(text: str) -> None:
    ids = BYTES(text)["input_ids"]
    assert len(BYTES) == 256 and len(ids) == len(text.encode())
    assert BYTES.decode(ids) == text


def test_the_config_is_that_of_an_ordinary_llama_and_weights_are_counted_without_making_them() -> None:
    scratch = Scratch(layers=12, hidden=1024, heads=8, intermediate=2736, vocabulary=32_000, longest=1024)
    config = llama_config(scratch)
    assert (config.head_dim, config.num_key_value_heads, config.max_position_embeddings) == (128, 8, 1024)
    assert count_weights(scratch) == 183_985_152
    assert count_weights(Scratch(**TINY)) == sum(
        weight.numel() for weight in new_model(Scratch(**TINY), 0).parameters()
    )


def test_a_plan_counts_a_model_from_scratch() -> None:
    assert plan(_recipe()).weights == count_weights(Scratch(**TINY))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {**TINY, "heads": 5}}, "heads: 5 given, expected heads of an even width"),
        ({"model": {**TINY, "kv_heads": 3}}, "kv_heads: 3 given, expected a divisor"),
        ({"model": {**TINY, "vocabulary": None}}, "vocabulary: missing; tokenizer: ids"),
        ({"model": {**TINY, "hiden": 3}}, "hiden is not a key here. Did you mean 'hidden'"),
        ({"model": {**TINY, "layers": 0}}, "layers: 0 given"),
        (
            {"data": {"sources": [{"kind": "dictionary", "symbls": 3}]}},
            r"^recipe: data.sources.0.symbls is not a key here. Did you mean 'symbols'\? Known: kind, name, share, symbols[^;]*$",
        ),
        (
            {"data": {"sources": [{"kind": "dictionary", "symbols": 3, "key_tokens": 1}]}},
            "3 symbols make 3 keys, but one window defines 36",
        ),
        ({"train": {"what": "memory_attention"}}, "trained whole; give what: all"),
        ({"focus": {"memory_layers": [3], "window": 32}}, "memory_layers: .3. given, expected indices from 0 to 2"),
        ({"focus": {"memory_layers": [1], "window": 64}}, "focus.window: 64 given, expected dictionary's window, 32"),
        ({"model": {**TINY, "vocabulary": 15}}, "vocabulary: 16 or more"),
        ({"model": "default-base"}, "give a model from scratch with tokenizer: ids"),
        ({"method": "long", "long": {"tokens": 64}}, "temperature: given with method: long"),
        (
            {"method": "long", "long": {"tokens": 60}, "model": {**TINY, "temperature": False}},
            "long.tokens: 60 given, expected a document of 64 tokens",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _recipe(**changes)


def test_a_plain_model_learns_from_the_same_documents() -> None:
    recipe = _recipe(method="long", long={"rows": 2, "tokens": 64}, model={**TINY, "temperature": False})
    mixture = open_mixture(recipe.data, scratch_tokenizer(Scratch(**TINY)), Path("unused"), seed=5)
    batch = next(iter(Batches(mixture, recipe, 0)))
    form = DictionaryFormat(symbols=12, key_tokens=2, value_tokens=2, window=32)
    assert batch["input_ids"][0, :32].tolist() == Dictionary(form, "5 0").window(0).tolist()
    assert (batch["labels"] != -100).sum(1).tolist() == [form.records * form.value_tokens] * 2
