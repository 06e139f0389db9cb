"""How a text is cut: no token lost, no window too long, none needlessly tiny, the last one of the size asked for.

python -m pytest tests/model/test_windows.py
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from longfocus.config import FocusConfig
from longfocus.model.windows import Step, plan_steps

WINDOWS = st.integers(2, 24)


class Held(NamedTuple):
    """Local tokens around one step."""

    before: int
    """After the drop, before the new tokens."""
    after: int


def _follow(steps: list[Step], local: int) -> list[Held]:
    """Local tokens at every step; a step cannot let go of tokens that are not there."""
    held = []
    for step in steps:
        assert 0 <= step.drop <= local, f"{step} lets go of {step.drop} of {local} local tokens"
        held.append(Held(local - step.drop, local - step.drop + step.tokens))
        local = held[-1].after
    return held


@st.composite
def sliding(draw: st.DrawFn, last: bool | None = None) -> tuple[FocusConfig, int, int]:
    """A config with overflow='slide', the new tokens, and the local tokens so far.

    `last`: whether the config sets last_window; None: either.
    """
    window = draw(WINDOWS)
    with_last = draw(st.booleans()) if last is None else last
    config = FocusConfig(
        window=window,
        overlap=draw(st.integers(0, window - 1)),
        last_window=draw(st.integers(1, window)) if with_last else None,
    )
    return config, draw(st.integers(1, 6 * window)), draw(st.integers(0, window))


# -- the examples of the docstring -----------------------------------------------------------------------


def test_the_documented_examples() -> None:
    config = FocusConfig(window=8)
    assert plan_steps(21, 0, config) == [Step(8, 0, True), Step(8, 8, True), Step(5, 8, False)]
    assert plan_steps(18, 0, config) == [Step(8, 0, True), Step(6, 8, True), Step(4, 6, False)]


def test_a_text_that_fits_is_one_window() -> None:
    assert plan_steps(8, 0, FocusConfig(window=8)) == [Step(8, 0, False)]
    assert plan_steps(3, 5, FocusConfig(window=8)) == [Step(3, 0, False)]


def test_when_generation_fills_the_window_half_of_it_slides() -> None:
    assert plan_steps(1, 8, FocusConfig(window=8)) == [Step(1, 4, False)]
    assert plan_steps(1, 8, FocusConfig(window=8, last_window=6)) == [Step(1, 2, False)]
    assert plan_steps(1, 8, FocusConfig(window=8, last_window=8)) == [Step(1, 1, False)]


def test_overlap_keeps_the_end_of_each_window_local() -> None:
    config = FocusConfig(window=8, overlap=3, last_window=4)
    assert plan_steps(20, 0, config) == [Step(8, 0, True), Step(5, 5, True), Step(3, 5, True), Step(4, 3, False)]


def test_last_window_of_the_call_overrides_the_configs() -> None:
    config = FocusConfig(window=8, last_window=6)
    assert plan_steps(20, 0, config, last_window=2) == plan_steps(20, 0, FocusConfig(window=8, last_window=2))
    assert plan_steps(20, 0, config, last_window=2)[-1].tokens == 2


# -- overflow='slide' ------------------------------------------------------------------------------------


@given(sliding())
def test_every_token_is_fed_once(case: tuple[FocusConfig, int, int]) -> None:
    config, new, local = case
    steps = plan_steps(new, local, config)
    assert sum(step.tokens for step in steps) == new
    assert all(step.tokens >= 1 for step in steps)


@given(sliding())
def test_no_window_is_longer_than_allowed(case: tuple[FocusConfig, int, int]) -> None:
    config, new, local = case
    for step, held in zip(plan_steps(new, local, config), _follow(plan_steps(new, local, config), local), strict=True):
        assert held.after <= config.window_tokens, f"{held.after} local tokens after {step}"


@given(sliding())
def test_only_the_last_step_is_not_stored(case: tuple[FocusConfig, int, int]) -> None:
    config, new, local = case
    assert [step.store for step in plan_steps(new, local, config)][-1] is False
    assert all(step.store for step in plan_steps(new, local, config)[:-1])


@given(sliding())
def test_a_stored_window_leaves_just_the_overlap(case: tuple[FocusConfig, int, int]) -> None:
    """A full `overlap` while reading on; before the last window as much of it as fits."""
    config, new, local = case
    steps = plan_steps(new, local, config)
    held = _follow(steps, local)
    for number in range(1, len(steps)):
        available = min(config.overlap, held[number - 1].after)
        if number == len(steps) - 1:
            available = min(available, config.window_tokens - steps[number].tokens)
        assert held[number].before == available, f"step {number} of {steps}"


@given(sliding())
def test_windows_between_the_first_and_the_last_two_are_full(case: tuple[FocusConfig, int, int]) -> None:
    config, new, local = case
    steps = plan_steps(new, local, config)
    held = _follow(steps, local)
    for number in range(len(steps) - 2):
        assert held[number].after == config.window_tokens, f"step {number} of {steps}"


@given(sliding(last=True))
def test_the_last_window_feeds_as_many_tokens_as_asked_for(case: tuple[FocusConfig, int, int]) -> None:
    """`last_window`: what stays local after a long text was read."""
    config, new, local = case
    assert config.last_window is not None
    assume(local + new > config.window_tokens)
    steps = plan_steps(new, local, config)
    if new > config.window_tokens:
        assert steps[-1].tokens == config.last_window
    else:  # the older part leaves
        assert len(steps) == 1
        assert _follow(steps, local)[-1].before == min(config.last_window, config.window_tokens - new, local)


@given(sliding(last=True))
@example((FocusConfig(window=8, last_window=4), 6, 0))
def test_a_text_that_fits_the_window_stays_local_whole_also_with_last_window(
    case: tuple[FocusConfig, int, int],
) -> None:
    """Splitting prompts that would fit is the authors' rule, said to be for overflow='all' only."""
    config, new, local = case
    assume(local + new <= config.window_tokens)
    assert plan_steps(new, local, config) == [Step(new, 0, False)]


@given(sliding(last=False))
@example((FocusConfig(window=8), 5, 8))
@settings(max_examples=300)
def test_no_window_is_shorter_than_half_where_that_can_be_avoided(case: tuple[FocusConfig, int, int]) -> None:
    """By default every window that was cut holds at least half a window of local tokens.

    Unavoidable: the first step finds a partly filled window and cannot take what is not there.
    """
    config, new, local = case
    window = config.window_tokens
    assume(local + new > window)
    steps = plan_steps(new, local, config)
    for step, held in zip(steps, _follow(steps, local), strict=True):
        assert held.after >= min(window // 2, local + new), f"{held.after} local tokens at {step} of {steps}"


@given(sliding(last=False))
def test_at_least_half_a_window_stays_local(case: tuple[FocusConfig, int, int]) -> None:
    config, new, local = case
    steps = plan_steps(new, local, config)
    at_least = min(config.window_tokens // 2, new + local)
    assert _follow(steps, local)[-1].after >= at_least


@given(window=WINDOWS, data=st.data())
def test_generation_slides_for_ever(window: int, data: st.DataObject) -> None:
    """Token by token: the window fills, its older part leaves, `last_window` tokens stay; none is stored early."""
    last = data.draw(st.none() | st.integers(1, window))
    config = FocusConfig(window=window, last_window=last)
    keep = min(max(1, window // 2) if last is None else last, window - 1)
    local = 0
    for _ in range(4 * window):
        (step,) = plan_steps(1, local, config)
        assert step == Step(1, local - keep if local == window else 0, False)
        local += 1 - step.drop
        assert 1 <= local <= window


# -- overflow='all', the authors' rule -------------------------------------------------------------------


@st.composite
def authors(draw: st.DrawFn) -> tuple[FocusConfig, int, int]:
    window = draw(WINDOWS)
    last = draw(st.none() | st.integers(1, 2 * window))
    config = FocusConfig(window=window, last_window=last, overflow="all")
    return config, draw(st.integers(1, 6 * window)), draw(st.integers(0, window))


def test_the_authors_rule_by_example() -> None:
    config = FocusConfig(window=8, last_window=4, overflow="all")
    assert plan_steps(21, 0, config) == [Step(8, 0, True), Step(8, 8, True), Step(1, 8, True), Step(4, 1, False)]
    assert plan_steps(6, 0, config) == [Step(2, 0, True), Step(4, 2, False)], "it splits a prompt that would fit"
    assert plan_steps(1, 8, config) == [Step(1, 8, False)], "everything local leaves at once"
    assert plan_steps(1, 7, config) == [Step(1, 0, False)]


@given(authors())
def test_the_authors_rule_feeds_every_token_once(case: tuple[FocusConfig, int, int]) -> None:
    config, new, local = case
    steps = plan_steps(new, local, config)
    assert sum(step.tokens for step in steps) == new
    assert all(step.tokens >= 1 for step in steps)
    _follow(steps, local)


@given(authors())
def test_the_authors_rule_cuts_off_the_last_tokens_and_drops_all_or_nothing(case: tuple[FocusConfig, int, int]) -> None:
    config, new, local = case
    last = config.last_window or config.window_tokens
    steps = plan_steps(new, local, config)
    held = _follow(steps, local)
    assert steps[-1].tokens == min(new, last)
    assert not steps[-1].store
    before = local
    for number, (step, state) in enumerate(zip(steps, held, strict=True)):
        assert step.drop in (0, before), "whatever is local leaves at once"
        before = state.after
        if number < len(steps) - 1:
            assert state.after <= config.window_tokens
        elif step.tokens <= config.window_tokens:
            assert state.after <= config.window_tokens, "only a last window of more tokens may exceed it"
