"""A mixture keeps its shares in tokens, takes each document once an epoch, and goes on exactly from a saved state.

python -m pytest tests/data/test_mixture.py
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longfocus.data.mixture import Drawn, Mixture
from longfocus.data.source_spec import SourceSpec
from longfocus.data.streamed import StreamedSource
from longfocus.errors import ConfigError
from tests.data.marked import Endless, Marked, marks, streamed
from tests.small_tokenizers import tokenizer

SEPARATOR = [10**9, 10**9 + 1]
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=8)


def mixture(sources: list[Any], shares: list[float] | None = None, **options: Any) -> Mixture:
    settings: dict[str, Any] = {
        "seed": 3,
        "minimum_tokens": [0] * len(sources),
        "join_below": 0,
        "separator_ids": SEPARATOR,
    }
    return Mixture(sources, shares or [1.0] * len(sources), **{**settings, **options})


def draw(stream: Mixture, count: int) -> list[Drawn]:
    return [stream.next_document() for _ in range(count)]


def as_text(documents: list[Drawn]) -> list[tuple[int, tuple[str, ...], list[int]]]:
    return [(drawn.source, drawn.ids, drawn.tokens.tolist()) for drawn in documents]


def saved(stream: Mixture) -> dict[str, Any]:
    return json.loads(json.dumps(stream.state_dict()))


@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 50), min_size=4, max_size=4),
    count=st.integers(1, 60),
    join_below=st.sampled_from([0, 30]),
)
def test_shares_are_of_tokens(lengths: list[list[int]], weights: list[int], count: int, join_below: int) -> None:
    sources = [Marked(number, some) for number, some in enumerate(lengths)]
    stream = mixture(sources, [float(weight) for weight in weights[: len(sources)]], join_below=join_below)
    delivered = [0] * len(sources)
    longest = 0.0
    for drawn in draw(stream, count):
        delivered[drawn.source] += len(drawn.tokens)
        longest = max(longest, len(drawn.tokens) / stream.shares[drawn.source])
        for source, share in enumerate(stream.shares):
            assert abs(delivered[source] - share * sum(delivered)) <= share * longest + 1e-6
    report = stream.report()
    assert [line.tokens for line in report] == delivered
    assert sum(line.share_delivered for line in report) == pytest.approx(1)
    assert [line.share_asked for line in report] == stream.shares


@given(lengths=LENGTHS, seed=st.integers(0, 5), epochs=st.integers(1, 4), world=st.integers(1, 4))
def test_ranks_together_take_each_document_once_an_epoch(
    lengths: list[int], seed: int, epochs: int, world: int
) -> None:
    found: dict[int, list[str]] = {}
    total = epochs * len(lengths)
    for rank in range(world):
        stream = mixture([Marked(0, lengths)], seed=seed, rank=rank, world=world)
        for place in range(rank, total, world):
            found[place] = [*stream.next_document().ids]
    for epoch in range(epochs):
        ids = [name for place in range(epoch * len(lengths), (epoch + 1) * len(lengths)) for name in found[place]]
        assert sorted(ids) == sorted(f"0/{n}" for n in range(len(lengths)))


def test_orders_differ_between_epochs_seeds_and_sources_and_never_change() -> None:
    def order(seed: int, source: int = 0) -> list[str]:
        stream = mixture([Marked(n, [1] * 12) for n in range(2)], seed=seed)
        return [drawn.ids[0].partition("/")[2] for drawn in draw(stream, 48) if drawn.source == source]

    one = order(1)
    assert len({tuple(ids) for ids in (one[:12], one[12:], order(2)[:12], order(1, 1)[:12])}) == 4
    assert " ".join(one[:12]) == "9 2 4 7 5 0 11 8 10 6 3 1", (
        "a state saved by an earlier version would go on with other documents"
    )


@given(lengths=LENGTHS, join_below=st.integers(0, 120), leading=st.sampled_from([(), (7,)]))
def test_short_documents_are_joined_until_they_are_long_enough(
    lengths: list[int], join_below: int, leading: tuple[int, ...]
) -> None:
    source = Marked(0, lengths)
    joined = draw(mixture([source], join_below=join_below, leading_ids=leading), 12)
    single = mixture([source])
    for drawn in joined:
        parts: list[int] = []
        for number, name in enumerate(drawn.ids):
            assert number == 0 or len(parts) < join_below, "long enough already"
            part = single.next_document()
            assert part.ids == (name,)
            parts += [*(SEPARATOR if number else []), *part.tokens]
        assert drawn.tokens.tolist() == [*leading, *parts]
        assert drawn.tokens.dtype == np.int64
        assert len(parts) >= join_below


def test_documents_below_the_minimum_are_left_out_and_counted(tmp_path: Path) -> None:
    lengths = [5, 20, 9, 10, 30]
    sources = [Marked(0, lengths), Endless(1, lengths), streamed(tmp_path / "s", lengths)]
    stream = mixture(sources, minimum_tokens=[10, 10, 10])
    found = draw(stream, 90)
    assert {len(drawn.tokens) for drawn in found} == {10, 20, 30}
    finite, endless, in_order = stream.report()
    assert (finite.skipped, in_order.skipped) == (2, 2)
    assert endless.skipped / endless.documents == pytest.approx(2 / 3, abs=0.1)
    assert finite.epochs == finite.documents / 3
    assert in_order.epochs == (in_order.documents - 1) // 3
    assert endless.epochs == 0
    assert {"endless 1:1", "0/1", "s1"} < {name for drawn in found for name in drawn.ids}


def test_generated_documents_are_counted_upward_by_rank() -> None:
    for rank in range(3):
        found = draw(mixture([Endless(4, [3])], rank=rank, world=3), 5)
        assert [drawn.tokens.tolist() for drawn in found] == [marks(4, rank + 3 * n, 3).tolist() for n in range(5)]


@pytest.mark.parametrize(("count", "world"), [(7, 3), (2, 4), (1, 1)])
def test_a_streamed_source_is_shared_in_order(tmp_path: Path, count: int, world: int) -> None:
    letters = [n + 1 for n in range(count)]
    for rank in range(world):
        stream = mixture([streamed(tmp_path / "s", letters)], rank=rank, world=world)
        expected = [place % count for place in range(rank, 12 * world, world)]
        found = draw(stream, 12)
        assert [drawn.ids for drawn in found] == [(f"s{n}",) for n in expected]
        assert [len(drawn.tokens) for drawn in found] == [n + 1 for n in expected]


@settings(max_examples=50)
@given(
    lengths=st.lists(LENGTHS, min_size=2, max_size=2),
    cuts=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    join_below=st.sampled_from([0, 25]),
    minimum=st.sampled_from([0, 4]),
    world=st.integers(1, 3),
    data=st.data(),
)
def test_a_saved_state_goes_on_exactly(
    stream_file: Path,
    lengths: list[list[int]],
    cuts: list[int],
    join_below: int,
    minimum: int,
    world: int,
    data: st.DataObject,
) -> None:
    rank = data.draw(st.integers(0, world - 1))

    def fresh() -> Mixture:
        sources = [
            Marked(0, [*lengths[0], 9]),
            Endless(1, [9, 9, 9, *lengths[1]]),
            streamed(stream_file, [3, 0, 40, 5, 1, 12]),
        ]
        options = {"join_below": join_below, "minimum_tokens": [minimum] * 3, "rank": rank, "world": world}
        return mixture(sources, [0.5, 0.2, 0.3], **options)

    whole = fresh()
    expected = draw(whole, sum(cuts) + 8)
    stream, found = fresh(), []
    for count in [*cuts, 8]:
        state = saved(stream)
        stream = fresh()
        stream.load_state_dict(state)
        assert saved(stream) == state
        found += draw(stream, count)
    assert as_text(found) == as_text(expected)
    assert stream.report() == whole.report()
    state = saved(stream)
    for drawn in found:
        record = json.loads(json.dumps(stream.remember(drawn)))
        assert as_text([stream.recall(record)]) == as_text([drawn])
    assert saved(stream) == state, "recalling does not move the stream"


def test_a_state_stays_small() -> None:
    stream = mixture([Marked(0, [5] * 5000), Endless(1, [5])])
    draw(stream, 4000)
    assert len(json.dumps(stream.state_dict())) < 1000


def test_a_streamed_state_reads_nothing_again(tmp_path: Path) -> None:
    for part in range(20):
        (tmp_path / f"{part:02}.jsonl").write_text(f'{{"id": "{part}", "text": "abc"}}\n')

    def fresh() -> StreamedSource:
        return StreamedSource(SourceSpec("parts", "jsonl", (str(tmp_path),)), tokenizer("byte_level"))

    stream = mixture([fresh()])
    draw(stream, 10)
    state = saved(stream)
    later = mixture([fresh()])
    for part in range(9):
        (tmp_path / f"{part:02}.jsonl").unlink()  # reading them would fail
    later.load_state_dict(state)
    assert [drawn.ids for drawn in draw(later, 10)] == [(str(part),) for part in range(10, 20)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sources": [Marked(0, [4, 5, 6]), Marked(1, [7, 8])]}, "sources"),
        ({"sources": [Marked(0, [4, 5], "renamed"), Marked(1, [7, 8])]}, "sources"),
        ({"shares": [0.5, 0.4]}, "shares"),
        ({"seed": 4}, "seed"),
        ({"minimum_tokens": [0, 2]}, "minimum_tokens"),
        ({"join_below": 1}, "join_below"),
        ({"separator_ids": [3]}, "separator_ids"),
        ({"leading_ids": [3]}, "leading_ids"),
        ({"world": 2}, "world"),
    ],
)
def test_a_state_of_another_mixture_is_refused(change: dict[str, Any], named: str) -> None:
    options: dict[str, Any] = {"sources": [Marked(0, [4, 5]), Marked(1, [7, 8])]}
    state = saved(mixture(**options))
    other = mixture(**{**options, **change})
    with pytest.raises(ConfigError, match=rf"made with {named} .* but .* is given now.* start a new run"):
        other.load_state_dict(state)
    with pytest.raises(ConfigError, match="version 7, expected 1"):
        other.load_state_dict({**state, "version": 7})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": []}, "0 sources"),
        ({"shares": [1.0]}, "2 sources, 1 shares"),
        ({"shares": [1.0, 0.0]}, "share of source 'source 1': 0.0 given"),
        ({"shares": [1.0, float("nan")]}, "share of source 'source 1': nan given"),
        ({"sources": [Marked(0, [1], "same"), Marked(1, [1], "same")]}, "not all different"),
        ({"minimum_tokens": [0, -1]}, "minimum_tokens of source 'source 1': -1"),
        ({"minimum_tokens": [0, 9]}, "9 given, but none of its 2 documents"),
        ({"join_below": -1}, "join_below: -1"),
        ({"separator_ids": [3, -1]}, r"separator_ids: \[3, -1\] given"),
        ({"rank": 2, "world": 2}, "rank: 2 of 2"),
    ],
)
def test_an_impossible_mixture(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixture(**{"sources": [Marked(0, [4, 5]), Marked(1, [7, 8])], **change})


def test_a_source_without_a_long_document_does_not_search_for_ever(tmp_path: Path) -> None:
    for source in (Endless(0, [3]), streamed(tmp_path / "s", [3, 4, 2])):
        for world in (1, 2):
            stream = mixture([source], minimum_tokens=[5], world=world)
            with pytest.raises(ConfigError, match="5 given, but no document of that length comes"):
                stream.next_document()


def test_lengths_differ_but_shares_hold() -> None:
    """Ten times longer documents are drawn ten times more rarely."""
    stream = mixture([Marked(0, [1000] * 9), Marked(1, [100] * 9)])
    counts = Counter(drawn.source for drawn in draw(stream, 1100))
    assert counts == {0: 100, 1: 1000}
