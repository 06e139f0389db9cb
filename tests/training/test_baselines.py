"""Memorizing Transformer and Transformer-XL: against their definitions in float64, against transformers' own cache and our own
reading, with staleness, gates, resumption and ordinary results.

python -m pytest tests/training/test_baselines.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

import longfocus
from longfocus.attention.context import LocalWindow
from longfocus.errors import ConfigError
from longfocus.model.gates import GATE, add_gates, join_gated, restore_gates, settle_gates
from longfocus.positions import RotaryTable, rotate
from longfocus.subjects.local import FocusedSubject
from longfocus.training.baselines import reference
from longfocus.training.baselines.carried import Carried, Seen
from longfocus.training.baselines.contexts import MemorizingContext, TransformerXLContext
from longfocus.training.recipes import Recipe
from longfocus.training.run import run
from tests.models import assert_close, logits, tiny
from tests.training.tiny_run import prepare

SCALE = 0.4


def _table(dim: int) -> RotaryTable:
    frequencies = 0.9 ** torch.arange(dim // 2, dtype=torch.float64)

    def function(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None].double() * torch.cat((frequencies, frequencies))
        return angles.cos(), angles.sin()

    return RotaryTable(function, 2)


def _drawn(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).mul_(1.5).requires_grad_() for shape in shapes]


def _window(query: Any, key: Any, value: Any, outer_query: Any = None, outer_key: Any = None) -> LocalWindow:
    causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
    return LocalWindow(
        query,
        key,
        value,
        causal,
        query if outer_query is None else outer_query,
        key if outer_key is None else outer_key,
        None,
    )


def _compare(actual: torch.Tensor, expected: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
    """Output and every gradient."""
    assert_close(actual, expected, 1e-12, "out")
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for name, tensor in inputs.items():
        (one,) = torch.autograd.grad((actual * weights).sum(), tensor, retain_graph=True, allow_unused=True)
        (two,) = torch.autograd.grad((expected * weights).sum(), tensor, retain_graph=True, allow_unused=True)
        nothing = torch.zeros_like(tensor)  # what is not used has no gradient
        one, two = (nothing if gradient is None else gradient for gradient in (one, two))
        assert_close(one, two, 1e-11, f"gradient of {name}")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("k", [1, 3, None])
@pytest.mark.parametrize("held", [[0, 0], [5, 0], [2, 7], [7, 7]])
def test_memorizing_is_its_definition_with_every_gradient(held: list[int], k: int | None, gated: bool) -> None:
    query, outer_query, key, value = _drawn(1, (2, 4, 5, 6), (2, 4, 5, 6), (2, 2, 5, 6), (2, 2, 5, 6))
    far_key, far_value, gate = _drawn(2, (2, 2, 7, 6), (2, 2, 7, 6), (4,))
    seen = Seen({3: (far_key, far_value)}, np.array(held))
    context, window = MemorizingContext(seen, k), _window(query, key, value, outer_query)
    if gated:
        actual = join_gated(gate, context, 3, window, scale=SCALE, softcap=None)
    else:
        actual = context.join(3, window, scale=SCALE, softcap=None)
    expected = reference.memorizing(
        query,
        key,
        value,
        outer_query,
        far_key,
        far_value,
        held,
        k=k if k is None or any(held) else None,
        scale=SCALE,
        gate=gate if gated else None,
    )
    inputs = {"query": query, "outer_query": outer_query, "key": key, "value": value}
    _compare(actual, expected, inputs | ({"gate": gate} if gated and any(held) else {}))
    kept_key, kept_value = context.new[3]
    assert torch.equal(kept_key, key) and torch.equal(kept_value, value) and not kept_key.requires_grad


def test_no_gradient_reaches_what_is_carried() -> None:
    query, key, value = _drawn(3, (1, 2, 4, 6), (1, 2, 4, 6), (1, 2, 4, 6))
    carried = Carried(1, 8)
    carried.begin(np.array([5]))
    carried.keep({0: (key, value)}, np.array([4]))
    for context in (
        MemorizingContext(carried.begin(np.array([5])), 2),
        TransformerXLContext(carried.begin(np.array([5])), {0: _table(6)}),
    ):
        new_key, new_value = _drawn(4, (1, 2, 4, 6), (1, 2, 4, 6))
        out = context.join(0, _window(query, new_key, new_value), scale=SCALE, softcap=None)
        assert torch.autograd.grad(out.sum(), [key, value], allow_unused=True, retain_graph=True) == (None, None)
        assert torch.autograd.grad(out.sum(), query)[0].abs().max() > 0


@pytest.mark.parametrize("held", [[0, 0], [6, 0], [3, 6]])
def test_transformer_xl_is_its_definition_with_every_gradient(held: list[int]) -> None:
    table = _table(6)
    query, key, value, before_key, before_value = _drawn(
        5, (2, 4, 5, 6), (2, 2, 5, 6), (2, 2, 5, 6), (2, 2, 6, 6), (2, 2, 6, 6)
    )
    at = torch.arange(5)[None]
    window = _window(rotate(query, *table.at(at)), rotate(key, *table.at(at)), value, outer_key=key)
    context = TransformerXLContext(Seen({0: (before_key, before_value)}, np.array(held)), {0: table})
    actual = context.join(0, window, scale=SCALE, softcap=None)

    def turned(vector: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(vector[None, None, None], *table.at(torch.tensor([[position]])))[0, 0, 0]

    expected = reference.transformer_xl(query, key, value, before_key, before_value, held, turned, scale=SCALE)
    _compare(actual, expected, {"query": query, "key": key, "value": value})
    assert torch.equal(context.new[0][0], key), "carried on unrotated"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(1, 9),
)
def test_what_is_carried_is_the_last_tokens_of_each_places_document(
    steps: list[list[tuple[int, bool]]], tokens: int
) -> None:
    """Windows of 4 and shorter last ones, places whose documents end at different steps; tokens told apart by number."""
    count = min(len(place) for place in steps)
    carried, places = Carried(len(steps), tokens), len(steps)
    expected: list[list[int]] = [[] for _ in steps]
    documents, number, ended = np.arange(places), 0, [False] * places
    for step in range(count):
        documents = np.where(ended, documents + places, documents)
        expected = [[] if end else kept for end, kept in zip(ended, expected, strict=True)]
        seen = carried.begin(documents)
        for place in range(places):
            held = int(seen.held[place])
            assert held == len(expected[place])
            if held:
                keys = seen.layers[0][0][place, 0, -held:, 0]
                assert keys.tolist() == expected[place] and torch.equal(seen.layers[0][1][place, 0, -held:, 0], -keys)
        lengths = np.array([place[step][0] for place in steps])
        new = torch.zeros(places, 1, 4, 1)
        for place, length in enumerate(lengths):
            new[place, 0, :length, 0] = torch.arange(number + 1, number + 1 + length)
            expected[place] = [*expected[place], *range(number + 1, number + 1 + int(length))][-tokens:]
            number += int(length)
        carried.keep({0: (new, -new)}, lengths)
        ended = [place[step][1] for place in steps]
    again = Carried(places, tokens)
    again.load_state_dict(carried.state_dict(), "cpu")
    assert again.begin(documents).held.tolist() == carried.begin(documents).held.tolist()


def _steps(
    model: Any, context_of: Any, ids: torch.Tensor, window: int, tokens: int, between: Any = None
) -> list[float]:
    """Losses of consecutive windows fed as training does."""
    carried, losses = Carried(1, tokens), []
    for number, part in enumerate(ids[:, :-1].split(window, 1)):
        if between is not None and number:
            between(model)
        context = context_of(carried.begin(np.array([0])))
        targets = ids[:, number * window + 1 : number * window + 1 + part.shape[1]]
        with torch.no_grad():
            losses.append(float(model(part, context=context, shift_labels=targets).loss))
        carried.keep(context.new, np.array([part.shape[1]]))
    return losses


@pytest.mark.parametrize(
    ("retrieval", "k", "positions"), [("dense", None, "first"), ("exact", 5, "first"), ("exact", 5, "none")]
)
def test_with_unchanged_weights_memorizing_trains_on_what_reading_sees(
    retrieval: str, k: int | None, positions: str
) -> None:
    model = tiny("llama", dtype=torch.float64)
    options = {"retrieval": retrieval, "memory_positions": positions, "k": k or 1}
    longfocus.attach(model, memory_layers=(1, 2), window=8, last_window=8, **options)
    ids = torch.randint(3, 97, (1, 41), generator=torch.Generator().manual_seed(1))
    found = _steps(model, lambda seen: MemorizingContext(seen, k), ids, 8, 1000)
    read = torch.nn.functional.cross_entropy(logits(model, ids[:, :40])[0], ids[0, 1:], reduction="none")
    assert_close(torch.tensor(found), read.view(5, 8).mean(1).float(), 1e-6, "loss by window")


def test_memory_is_stale_where_weights_have_moved() -> None:
    """Keys stay as they were computed: with layer 1's keys changed between two windows, the second meets the old ones."""

    def move(model: Any) -> None:
        model.model.layers[1].self_attn.k_proj.weight.data.neg_()

    ids = torch.randint(3, 97, (1, 17), generator=torch.Generator().manual_seed(2))

    def losses(between: Any) -> list[float]:
        model = longfocus.attach(tiny("llama"), memory_layers=(1,), window=8, memory_positions="none")
        return _steps(model, lambda seen: MemorizingContext(seen, None), ids, 8, 100, between)

    moved = longfocus.attach(tiny("llama"), memory_layers=(1,), window=8, memory_positions="none")
    move(moved)
    anew = _steps(moved, lambda seen: MemorizingContext(seen, None), ids, 8, 100)
    assert losses(move)[0] == losses(None)[0]
    assert abs(losses(move)[1] - losses(None)[1]) > 1e-3 and abs(losses(move)[1] - anew[1]) > 1e-3


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama_yarn", "phi3_partial"])
def test_with_unchanged_weights_transformer_xl_is_transformers_own_cache_of_one_window(name: str) -> None:
    plain = tiny(name, dtype=torch.float64)
    model = longfocus.attach(tiny(name, dtype=torch.float64), memory_layers=(0, 1, 2, 3), window=8)
    ids = torch.randint(3, 97, (1, 41), generator=torch.Generator().manual_seed(3))
    found = _steps(model, lambda seen: TransformerXLContext(seen, model.focus.tables), ids, 8, 8)
    expected = _cache_of_one_window(plain, ids, 8).mean(1)
    assert_close(torch.tensor(found), expected.float(), 1e-6, "loss by window")


def _cache_of_one_window(plain: Any, ids: torch.Tensor, window: int) -> torch.Tensor:
    """Losses (windows, window) by transformers alone, which keeps the keys and values of the window before."""
    cache, losses = DynamicCache(), []
    for start in range(0, ids.shape[1] - 1, window):
        part, targets = ids[:, start : start + window], ids[0, start + 1 : start + window + 1]
        positions = torch.arange(start, start + window)[None]
        with torch.no_grad():
            out = plain(part, cache=cache, position_ids=positions, use_cache=True).logits
        losses.append(torch.nn.functional.cross_entropy(out[0], targets, reduction="none"))
        kept = [(layer.keys[:, :, -window:], layer.values[:, :, -window:]) for layer in cache.layers]
        cache = DynamicCache()  # of the window before only
        for layer, pair in enumerate(kept):
            cache.update(*pair, layer)
    return torch.stack(losses)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_transformer_xl_is_read_as_it_was_trained(name: str) -> None:
    """Absolute positions in all layers, and a span of one window (as `longfocus reproduce extending` reads it)."""
    options: dict[str, Any] = {"memory_layers": (0, 1, 2, 3), "memory_positions": "absolute", "read_span": 8}
    model = longfocus.attach(tiny(name, dtype=torch.float64), window=8, **options)
    ids = torch.randint(3, 97, (1, 41), generator=torch.Generator().manual_seed(3))
    expected = _cache_of_one_window(tiny(name, dtype=torch.float64), ids, 8)
    for found in FocusedSubject(model, None, "xl").block_losses(ids[0].tolist(), [8, 24, 32], 8, [0, 8]):
        nll, same = torch.from_numpy(found.nll), expected[found.start // 8, :7]
        if found.context:
            assert_close(nll, same, 1e-6, f"block at {found.start}")
        else:
            assert (nll - same).abs().max() > 1e-3, "the window alone is another thing"


def test_gates_are_kept_in_the_config_and_read_with_the_memory(tmp_path: Path) -> None:
    model = longfocus.attach(tiny("llama"), memory_layers=(1, 2), window=8)
    ids = torch.randint(3, 97, (1, 30), generator=torch.Generator().manual_seed(4))
    before = logits(model, ids)
    add_gates(model, [1, 2], 0.0)
    model.model.layers[1].self_attn.memory_gate.data.copy_(torch.tensor([-30.0, -2, 0, 2, 3, 30]))
    gated = logits(model, ids)
    assert_close(gated[:, :8], before[:, :8], 1e-5, "the first window has no memory")
    assert (gated[:, 8:] - before[:, 8:]).abs().max() > 0.1
    settle_gates(model)
    assert torch.equal(logits(model, ids), gated)
    model.save_pretrained(tmp_path)
    again = longfocus.load(tmp_path)
    assert torch.equal(logits(again, ids), gated)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(longfocus.load(tmp_path / "again"), ids), gated)
    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    assert_close(logits(plain, ids[:, :8]), before[:, :8], 1e-5, "an ordinary short-context model")
    again.config.longfocus_gates = {"1": [0.0]}
    with pytest.raises(ConfigError, match="1 numbers for layer 1 given, expected 6"):
        restore_gates(again)


def test_a_gate_that_is_shut_leaves_the_window_alone() -> None:
    model = longfocus.attach(tiny("llama"), memory_layers=(1,), window=8, last_window=8)
    ids = torch.randint(3, 97, (1, 16), generator=torch.Generator().manual_seed(4))
    add_gates(model, [1], -1000.0)
    assert_close(logits(model, ids)[:, 8:], logits(model, ids[:, 8:]), 1e-5, "second window")


METHODS: dict[str, dict[str, Any]] = {
    "gated": {"places": 3, "memory": 40, "k": 4, "combine": "gate", "gate_bias": 0.5},
    "transformer_xl": {"places": 3},
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("tiny"))


def _recipe(path: Path, name: str, output: Path) -> Recipe:
    method = "memorizing" if name == "gated" else name
    options = str(METHODS[name]).replace("'", "")
    changes = [
        f"method={method}",
        f"{method}={options}",
        "run.steps=4",
        f"run.output={output}",
        "data.sources.facts.share=0.1",
    ]
    return Recipe.read(path, changes + (["train.what=attention"] if method == "transformer_xl" else []))


@pytest.mark.parametrize("name", METHODS)
def test_a_run_goes_on_with_what_it_carried_and_ends_in_an_ordinary_checkpoint(
    recipe: Path, name: str, tmp_path: Path
) -> None:
    class StopError(Exception):
        pass

    def stop(text: str) -> None:
        if text.startswith("step 3/"):
            raise StopError

    whole = run(_recipe(recipe, name, tmp_path / "whole"))
    with pytest.raises(StopError):
        run(_recipe(recipe, name, tmp_path / "broken"), announce=stop)
    run(_recipe(recipe, name, tmp_path / "broken"))
    assert whole.steps == 4 and any(line.get("carried_tokens", 0) > 0 for line in whole.log)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / part / "model") for part in ("whole", "broken")]
    for (weight, one), two in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two), weight
    config = models[0].config
    assert hasattr(config, "longfocus") == (name != "transformer_xl")
    gates = getattr(config, "longfocus_gates", None)
    assert (gates is not None) == (name == "gated") and gates == getattr(models[1].config, "longfocus_gates", None)
    if gates is not None:
        assert set(gates) == {"1", "2"} and all(value != 0.5 for value in gates["1"])
        assert (
            getattr(longfocus.load(tmp_path / "whole" / "model").model.layers[2].self_attn, GATE).tolist() == gates["2"]
        )
        with pytest.raises(ConfigError, match="joins its memory by gates; only memorizing trains those"):
            run(Recipe.read(recipe, [f"model={tmp_path / 'whole' / 'model'}", f"run.output={tmp_path / 'crossbatch'}"]))


def test_a_baseline_needs_its_section(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="method: 'memorizing' given, expected a section of that name"):
        Recipe.read(recipe, ["method=memorizing"])
    with pytest.raises(ConfigError, match=r"'gate' given with train\.lora or train\.names"):
        Recipe.read(recipe, ["method=memorizing", "memorizing={combine: gate}", "train.lora={r: 2}"])
    with pytest.raises(ConfigError, match="given with method: transformer_xl, whose result is a plain model"):
        Recipe.read(recipe, ["method=transformer_xl", "transformer_xl={places: 2}", "train.lora={r: 2}"])
    with pytest.raises(ConfigError, match="combine"):
        Recipe.read(recipe, ["method=memorizing", "memorizing={combine: sum}"])
