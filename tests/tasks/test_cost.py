"""Speed and memory: numbers that exist, bytes that follow the formula, a peak that holds what was allocated.

python -m pytest tests/tasks/test_cost.py
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from longfocus import FocusConfig, attach
from longfocus.errors import ConfigError, UnsuitableError
from longfocus.evaluation.draw import figure
from longfocus.evaluation.run import evaluate
from longfocus.evaluation.tables import table
from longfocus.process_memory import forget_peak, peak_bytes, resident_bytes, return_freed
from longfocus.settings import validated
from longfocus.subjects.local import FocusedSubject, PlainModel
from longfocus.tasks import cost
from longfocus.tasks.contract import Sample
from longfocus.tasks.cost import DECODE, PEAK, PER_TOKEN, PREFILL, Cost, CostOptions
from longfocus.tasks.statistics import median_of
from longfocus.tasks.texts import Texts
from tests.models import MEMORY_LAYERS, tiny
from tests.small_tokenizers import tokenizer
from tests.tasks.fakes import Answers

WINDOW = 64
KNOWS_PEAK = forget_peak() and resident_bytes() > 0


def task(**options: Any) -> Cost:
    return Cost(
        validated(CostOptions, {"lengths": [128, 512], "samples": 2, "new_tokens": 3, **options}, "cost"), Texts()
    )


def plain(family: str = "llama", **changes: Any) -> PlainModel:
    return PlainModel(tiny(family, **changes), tokenizer("byte_level"), "plain")


def focused(family: str = "llama", **options: Any) -> FocusedSubject:
    config = FocusConfig(**{"memory_layers": MEMORY_LAYERS, "window": WINDOW, **options})
    return FocusedSubject(attach(tiny(family), config), tokenizer("byte_level"), "focused")


@pytest.mark.parametrize("subject", [plain, focused])
def test_every_number_is_there_and_finite(subject: Any, tmp_path: Path) -> None:
    results = evaluate(task(), subject(), tmp_path)
    assert [row.values for row in results.rows] == [{"tokens": 128}, {"tokens": 512}]
    for row in results.rows:
        assert row.samples == 2
        assert set(row.estimates) == {PREFILL, DECODE, PER_TOKEN} | ({PEAK} if KNOWS_PEAK else set())
        for name in (PREFILL, DECODE, PER_TOKEN):
            assert 0 < row.estimates[name].value < math.inf
        if KNOWS_PEAK:
            assert 0 <= row.estimates[PEAK].value < 1000
    text = table(results)
    assert all(name in text.splitlines()[0] for name in (PREFILL, DECODE, PER_TOKEN))
    panels = [axis.get_title() for axis in figure([results]).axes]
    assert panels == [name for name in (PREFILL, DECODE, PEAK, PER_TOKEN) if name in results.rows[0].estimates]


@pytest.mark.parametrize(
    ("family", "options", "bytes_of_a_number"),
    [
        ("llama", {}, 4),
        ("llama", {"memory_layers": (0, 1, 3), "memory_dtype": "float16"}, 2),
        ("qwen3", {"memory_layers": (2,)}, 4),
    ],
)
def test_a_token_in_memory_takes_what_the_formula_says(
    family: str, options: dict[str, Any], bytes_of_a_number: int
) -> None:
    subject = focused(family, **options)
    config = subject.model.config
    layers = options.get("memory_layers", MEMORY_LAYERS)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    formula = len(layers) * 2 * config.num_key_value_heads * head * bytes_of_a_number
    scores, details = cost.measure(subject, list(range(3, 90)) * 3, 2)
    assert details["bytes_per_token"] == formula
    assert scores[PER_TOKEN] == formula / 1024
    cache = subject.model.new_cache()  # and that is what the memory really holds
    with torch.no_grad():
        subject.model(torch.arange(3, 90).repeat(1, 3), cache=cache, use_cache=True, logits_to_keep=1)
    held = sum(
        chunk.keys.nbytes + chunk.values.nbytes
        for layer in layers
        for chunk in cache._own.chunks(layer)  # type: ignore[union-attr]
    )
    assert held == formula * cache.own_tokens > 0


def test_a_token_in_a_plain_cache_takes_keys_and_values_of_all_layers() -> None:
    scores, _ = cost.measure(plain(), list(range(3, 90)), 2)
    assert scores[PER_TOKEN] == 4 * 2 * 2 * 8 * 4 / 1024  # layers, keys and values, heads, head size, bytes
    narrow = PlainModel(tiny("llama", dtype=torch.bfloat16), tokenizer("byte_level"), "plain")
    assert cost.measure(narrow, list(range(3, 90)), 2)[0][PER_TOKEN] == 4 * 2 * 2 * 8 * 2 / 1024


@pytest.mark.skipif(not KNOWS_PEAK, reason="this system does not tell the peak of a process")
def test_the_peak_holds_what_was_allocated_meanwhile_and_nothing_from_before() -> None:
    """Twice in one process: the second, smaller one is not told the first one's peak."""
    wide = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16384}
    subject = plain(**wide)
    cost.measure(subject, list(range(3, 90)), 1)  # weights are in RAM from now on
    large = cost.measure(subject, list(range(3, 90)) * 80, 2)
    small = cost.measure(subject, list(range(3, 90)), 2)
    cache_bytes = large[1]["bytes_per_token"] * 87 * 80
    assert cache_bytes == 4 * 2 * 256 * 4 * 87 * 80 > 50e6
    assert cache_bytes < large[1]["peak_bytes"] < 10 * cache_bytes
    assert small[1]["peak_bytes"] < large[1]["peak_bytes"] / 3


@pytest.mark.skipif(not KNOWS_PEAK, reason="this system does not tell the peak of a process")
def test_a_peak_can_be_forgotten() -> None:
    block = torch.ones(30_000_000)
    assert peak_bytes() >= block.nbytes
    high = peak_bytes()
    del block
    return_freed()
    assert forget_peak()
    assert peak_bytes() < high - 60_000_000
    assert abs(peak_bytes() - resident_bytes()) < 20_000_000


def test_where_the_peak_is_not_known_the_other_numbers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "forget_peak", lambda: False)
    scores, details = cost.measure(focused(), list(range(3, 90)), 2)
    assert set(scores) == {PREFILL, DECODE, PER_TOKEN}
    assert "peak_bytes" not in details


def test_lengths_that_a_plain_model_cannot_take_are_refused_and_the_others_measured(tmp_path: Path) -> None:
    subject = plain(max_position_embeddings=200)
    results = evaluate(task(), subject, tmp_path)
    assert [row.values["tokens"] for row in results.rows] == [128]
    assert results.refused == {"tokens=512": "plain takes 200 tokens, this needs 515."}
    both = evaluate(task(samples=1), focused(), tmp_path / "focused")
    assert [row.values["tokens"] for row in both.rows] == [128, 512]


def test_a_model_that_runs_elsewhere_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UnsuitableError, match=r"cost cannot be measured on fake: .* give a model that runs here"):
        evaluate(task(), Answers(lambda prompt: ""), tmp_path)


def test_a_stopped_run_measures_only_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[int, ...], int]] = []
    real = cost.measure

    def measure(subject: Any, ids: Any, new_tokens: int) -> Any:
        asked.append((tuple(ids), new_tokens))
        return real(subject, ids, new_tokens)

    monkeypatch.setattr(cost, "measure", measure)
    made, subject = task(samples=3), focused()
    point = made.points(subject)[0]
    assert [sample.id for sample in made.samples(subject, point, frozenset())] == ["0", "1", "2"]
    whole = asked[1:]
    asked.clear()
    assert [sample.id for sample in made.samples(subject, point, frozenset({"0", "2"}))] == ["1"]
    assert asked[1:] == whole[1:2]  # the first is the one that is not counted
    asked.clear()
    assert list(made.samples(subject, point, frozenset({"0", "1", "2"}))) == []
    assert asked == []
    other = task(seed=1)
    list(other.samples(subject, point, frozenset()))
    assert asked[1:] != whole[:2]


def test_rows_are_medians() -> None:
    samples = [
        Sample(f"{number}", {"tokens": 128}, {PREFILL: rate, DECODE: 1.0, PER_TOKEN: 2.0})
        for number, rate in enumerate([5.0, 900.0, 7.0, 6.0, 1.0, 8.0])
    ]
    (row,) = task().rows(samples)
    estimate = row.estimates[PREFILL]
    assert (estimate.value, estimate.low, estimate.high) == (6.5, 1.0, 900.0)
    assert PEAK not in row.estimates


def test_the_interval_of_a_median_is_the_narrowest_that_covers_95_percent() -> None:
    """The known table: all of 6, 7 and 8 numbers; of 9 and 10 without the two ends; of 20 the 6th to the 15th."""
    for count, (low, high) in {6: (1, 6), 8: (1, 8), 9: (2, 8), 10: (2, 9), 20: (6, 15)}.items():
        found = median_of([float(number) for number in range(count, 0, -1)])
        assert (found.value, found.low, found.high) == ((count + 1) / 2, low, high)
    assert math.isnan(median_of([1.0, 2.0, 3.0, 4.0, 5.0]).low)
    assert math.isnan(median_of([]).value)
    assert math.isnan(median_of([1.0, math.nan]).value)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"samples": 0}, "samples"), ({"new_tokens": 0}, "new_tokens"), ({"repeats": 3}, "repeats is not a key here")],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(**options)
