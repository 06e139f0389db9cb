"""Reading prompts together gives the bits of reading each alone, and really reads less.

python -m pytest tests/subjects/test_shared_reading.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longfocus.config import FocusConfig
from longfocus.model import reading_pass
from longfocus.model.windows import plan_steps
from longfocus.subjects import shared_reading
from longfocus.subjects.shared_reading import SharedReading
from tests.models import tokens
from tests.subjects.tiny_subjects import focused

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": 5},
    "short last window": {"last_window": 3},
    "full last window": {"last_window": 32},
    "read span": {"read_span": 20},
    "authors' rule": {"overflow": "all", "last_window": 16},
}


@torch.no_grad()
def assert_alike(model: Any, prompts: list[list[int]]) -> list[int]:
    """Next-token logits of each prompt, going on from the shared cache and alone; how much each shared."""
    shared = []
    for ids, cache in zip(prompts, SharedReading(model).caches(prompts), strict=True):
        shared.append(cache.seen)
        assert cache.seen < len(ids)
        after = model(torch.tensor([ids[cache.seen :]]), cache=cache, use_cache=True, logits_to_keep=1).logits
        alone = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1).logits
        assert torch.equal(after, alone)
    return shared


def prompts_of(*ends: tuple[int, int]) -> list[list[int]]:
    """(tokens of a common text, other tokens after them) of each prompt."""
    common = tokens(1, 400)[0].tolist()
    return [common[:alike] + tokens(1, rest, seed=9 + n)[0].tolist() for n, (alike, rest) in enumerate(ends)]


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_prompts_read_together_give_the_bits_of_each_alone(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_pass, "PASS_TOKENS", at_once * 32)
    model = focused(**OPTIONS[name]).model
    prompts = prompts_of((40, 110), (40, 110), (97, 53), (150, 1), (150, 20), (10, 140), (200, 40))
    shared = assert_alike(model, prompts)
    if name in ("plain", "read span"):
        expected = {1: [32, 32, 96, 96, 96], 2: [0, 0, 64, 128, 128], 3: [0, 0, 96, 96, 96]}[at_once]
        assert shared == [*expected, 0, 0]
    elif name != "authors' rule":
        assert max(shared) >= 64
    assert shared[5:] == [0, 0]


def test_what_is_shared_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(reading_pass, "PASS_TOKENS", 64)
    original = shared_reading.read_windows

    def watched(model: Any, ids: torch.Tensor, cache: Any) -> None:
        read.append(ids.shape[1])
        original(model, ids, cache)

    monkeypatch.setattr(shared_reading, "read_windows", watched)
    list(SharedReading(focused().model).caches(prompts_of((70, 80), (70, 80), (70, 80), (140, 10))))
    assert read == [64]
    read.clear()
    list(SharedReading(focused().model).caches(prompts_of((150, 10), (130, 50), (150, 10))))
    assert read == [64] * 2


def test_a_single_prompt_and_none() -> None:
    model = focused().model
    assert list(SharedReading(model).caches([])) == []
    (cache,) = SharedReading(model).caches(prompts_of((100, 5)))
    assert cache.seen == 0


def test_a_long_text_is_not_planned_again_for_each_window() -> None:
    """A million tokens: the windows are looked at a few times, not once for each window."""
    reading = SharedReading(focused().model)
    planned: list[int] = []
    original = shared_reading.plan_steps

    def watched(new: int, local: int, config: FocusConfig) -> Any:
        planned.append(new)
        return original(new, local, config)

    shared_reading.plan_steps = watched  # type: ignore[assignment]
    try:
        one, other = [3] * 100_000, [3] * 99_999 + [4]
        assert reading._end_alike(one, other) == 98_304
    finally:
        shared_reading.plan_steps = original
    assert len(planned) < 20


@given(
    st.integers(8, 40),
    st.integers(0, 7),
    st.sampled_from([None, 1, 5, 8]),
    st.integers(1, 200),
    st.integers(1, 200),
    st.integers(0, 200),
)
@settings(max_examples=200)
def test_the_rest_of_both_prompts_is_cut_as_before(
    window: int, overlap: int, last: int | None, one: int, other: int, alike: int
) -> None:
    """From the end that is found, what is left gives the steps that the whole prompt has after it."""
    alike = min(alike, one, other)
    reading = SharedReading(focused().model)
    reading.config = FocusConfig(memory_layers=(1,), window=window, overlap=overlap, last_window=last)
    end = reading._end_alike([3] * alike + [4] * (one - alike), [3] * alike + [5] * (other - alike))
    assert 0 <= end <= alike
    for length in (one, other):
        if not end:
            continue
        steps, at, local = plan_steps(length, 0, reading.config), 0, 0
        while at < end:
            step = steps.pop(0)
            assert step.store
            at, local = at + step.tokens, local - step.drop + step.tokens
        assert at == end
        assert plan_steps(length - end, local, reading.config) == steps
