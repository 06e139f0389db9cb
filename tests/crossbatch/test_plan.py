"""Which row sees which windows: no leak of the future, nothing twice, the shares that were asked for.

python -m pytest tests/crossbatch/test_plan.py
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longfocus.crossbatch.plan import CHOICES, NAMED_MIXES, Rows, Share, check_mix, documents, plan_contexts
from longfocus.errors import ConfigError


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """Places with windows of one or several documents each (a document may end inside a step), some rows unused."""
    places, numbers, windows, lengths = [], [], [], []
    number = 0
    per_place = draw(st.integers(1, 5))
    for place in range(draw(st.integers(1, 5))):
        window = draw(st.integers(0, 3))
        for _ in range(per_place):
            places.append(place)
            numbers.append(number)
            windows.append(window)
            lengths.append(draw(st.sampled_from([0, 1, 7, 8])))
            window += 1
            if draw(st.integers(0, 3)) == 0:
                number, window = number + 1, 0
        number += 1
    return Rows(*(np.array(values) for values in (places, numbers, windows, lengths)))


MIXES = [*NAMED_MIXES.values(), documents(1), documents(2), documents(3, 2), documents(8)]


@given(rows=batches(), mix=st.sampled_from(MIXES), choice=st.sampled_from(CHOICES), seed=st.integers(0, 99))
@settings(max_examples=300, deadline=None)
def test_rows_see_only_what_they_may(rows: Rows, mix: tuple[Share, ...], choice: str, seed: int) -> None:
    found = plan_contexts(rows, mix, choice=choice, generator=np.random.default_rng(seed))  # type: ignore[arg-type]
    positives, negatives = found.lists()
    most_positives, most_negatives = max(p.positives for p in mix), max(p.negatives for p in mix)
    for row in range(len(rows)):
        seen = positives[row] + negatives[row]
        assert len(set(seen)) == len(seen), "a window twice"
        assert row not in seen, "the row itself"
        assert all(rows.lengths[other] > 0 for other in seen), "an empty row"
        assert all(rows.documents[other] == rows.documents[row] for other in positives[row])
        assert all(rows.windows[other] < rows.windows[row] for other in positives[row]), "the future"
        assert all(rows.documents[other] != rows.documents[row] for other in negatives[row])
        assert len(positives[row]) <= most_positives
        assert len(negatives[row]) + found.wanted_hard[row] <= most_negatives
        order = rows.windows[positives[row]]
        assert (np.diff(order) < 0).all(), "nearest first"
        if rows.lengths[row] == 0:
            assert seen == [] and found.wanted_hard[row] == 0
        assert (choice == "hard") or found.wanted_hard[row] == 0
        assert all(found.order[other] < found.order[row] for other in seen), (
            "against the order: something may come back"
        )
    assert len(set(found.order.tolist())) == len(rows)


@given(rows=batches(), choice=st.sampled_from(["next", "random"]), d=st.integers(1, 6), w=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_every_row_gets_all_it_can(rows: Rows, choice: str, d: int, w: int) -> None:
    found = plan_contexts(rows, documents(d, w), choice=choice, generator=np.random.default_rng(0))  # type: ignore[arg-type]
    positives, negatives = found.lists()
    for row in np.flatnonzero(rows.lengths > 0):
        earlier = (rows.documents == rows.documents[row]) & (rows.windows < rows.windows[row]) & (rows.lengths > 0)
        others = (rows.documents != rows.documents[row]) & (rows.lengths > 0) & (found.order < found.order[row])
        assert len(positives[row]) == min(w, earlier.sum())
        assert len(negatives[row]) == min((d - 1) * w, others.sum())


def _grid(places: int, per_place: int) -> Rows:
    place = np.repeat(np.arange(places), per_place)
    return Rows(place, place + 10, np.tile(np.arange(per_place), places), np.full(places * per_place, 8))


def test_next_takes_the_documents_that_follow_in_the_batch() -> None:
    rows = _grid(4, 3)
    found = plan_contexts(rows, documents(3), generator=np.random.default_rng(0)).lists()[1]
    # window 2 of place 2: its own last one is window 1; then window 1 of places 3 and 0
    assert found[2 * 3 + 2] == [3 * 3 + 1, 0 * 3 + 1]


def test_negatives_come_from_as_many_documents_as_there_are() -> None:
    rows = _grid(3, 4)
    for choice in ("next", "random"):
        negatives = plan_contexts(rows, documents(5), choice=choice, generator=np.random.default_rng(0)).lists()[1]  # type: ignore[arg-type]
        for row in (2, 3, 6, 7, 10, 11):  # late enough for two windows of each other document to stand before
            assert sorted(Counter(rows.documents[negatives[row]]).values()) == [2, 2]


def test_a_document_that_ended_is_a_negative_of_the_next_one_in_its_place() -> None:
    rows = Rows(np.array([0, 0, 0]), np.array([1, 1, 2]), np.array([4, 5, 0]), np.array([8, 3, 8]))
    positives, negatives = plan_contexts(rows, documents(2), generator=np.random.default_rng(0)).lists()
    assert positives == [[], [0], []]
    assert negatives == [[], [], [1]]


@pytest.mark.parametrize("places", [1, 2, 4, 7])
@pytest.mark.parametrize("name", ["longllama_3b", "longllama_7b"])
def test_parts_of_a_mix_come_up_in_their_shares(name: str, places: int) -> None:
    mix, rows, seen = NAMED_MIXES[name], _grid(places, 4), Counter()
    for step in range(400):
        found = plan_contexts(rows, mix, generator=np.random.default_rng((7, step)))
        positives, _ = found.lists()
        for place in range(places):
            seen[len(positives[place * 4 + 3])] += 1  # the last window can have as many positives as asked
    for positives_asked in range(4):
        assert seen[positives_asked] / (400 * places) == pytest.approx(0.25, abs=0.06)


def test_a_whole_batch_is_cut_exactly_at_the_shares() -> None:
    rows = _grid(8, 4)
    for step in range(20):
        positives, _ = plan_contexts(rows, NAMED_MIXES["longllama_3b"], generator=np.random.default_rng(step)).lists()
        assert Counter(len(positives[place * 4 + 3]) for place in range(8)) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_the_same_seed_gives_the_same_table() -> None:
    rows = _grid(5, 4)
    one, two = (plan_contexts(rows, MIXES[2], choice="random", generator=np.random.default_rng((1, 2))) for _ in "ab")
    assert (one.positives == two.positives).all() and (one.negatives == two.negatives).all()


def test_impossible_mixes_are_refused() -> None:
    for mix in ((), (Share(0.5, 1, 1),), (Share(1.5, 1, 0), Share(-0.5, 1, 0))):
        with pytest.raises(ConfigError, match="add up to 1"):
            check_mix(mix)
    with pytest.raises(ConfigError, match="0 or more"):
        check_mix((Share(1.0, -1, 0),))
    with pytest.raises(ConfigError, match="d: 0 given"):
        documents(0)
    with pytest.raises(ConfigError, match="negatives: 'hardest' given"):
        plan_contexts(_grid(2, 2), documents(2), choice="hardest", generator=np.random.default_rng(0))  # type: ignore[arg-type]
