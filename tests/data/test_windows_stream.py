"""Windows keep their place and their document, no token or target is lost or repeated, and a stop changes nothing.

Tokens say which document and position they are (see marked.py), so rows are checked against the documents themselves.

    python -m pytest tests/data/test_windows_stream.py
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longfocus.data.mixture import Mixture
from longfocus.data.source_spec import SourceSpec
from longfocus.data.token_cache import tokenize_source
from longfocus.data.windows import StepWindows, WindowStream
from longfocus.errors import ConfigError
from tests.data.marked import Endless, Marked, streamed
from tests.small_tokenizers import tokenizer

SHAPES = st.fixed_dictionaries({"places": st.integers(1, 4), "window": st.integers(2, 7)}).flatmap(
    lambda shape: st.integers(1, 4).flatmap(
        lambda count: st.fixed_dictionaries(
            {
                **{k: st.just(v) for k, v in shape.items()},
                "windows_per_step": st.just(count),
                "stride": st.integers(1, count),
            }
        )
    )
)
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=6).map(lambda lengths: [*lengths, 17])


def stream_of(lengths: list[int], shape: dict[str, int], *more: Any, **options: Any) -> WindowStream:
    sources = [Marked(0, lengths), Endless(1, lengths[::-1]), *more]
    settings: dict[str, Any] = {
        "seed": 5,
        "minimum_tokens": [0] * len(sources),
        "join_below": 0,
        "separator_ids": [10**9],
    }
    return WindowStream(Mixture(sources, [1.0] * len(sources), **{**settings, **options}), **shape)


def recorded(stream: WindowStream) -> dict[int, np.ndarray]:
    """Documents of the stream by number, filled as they are begun."""
    tokens: dict[int, np.ndarray] = {}
    begin = stream._begin

    def noted() -> Any:
        held = begin()
        assert held.number not in tokens
        tokens[held.number] = held.drawn.tokens
        return held

    stream._begin = noted  # type: ignore[method-assign]
    return tokens


def rows(step: StepWindows) -> list[dict[str, Any]]:
    names = [field.name for field in dataclasses.fields(step)]
    return [{name: getattr(step, name)[row] for name in names} for row in range(len(step.lengths))]


@given(lengths=LENGTHS, shape=SHAPES, steps=st.integers(1, 12), join_below=st.sampled_from([0, 20]))
def test_no_token_or_target_is_lost_or_repeated(
    lengths: list[int], shape: dict[str, int], steps: int, join_below: int
) -> None:
    stream = stream_of(lengths, shape, join_below=join_below)
    documents = recorded(stream)
    fed: dict[int, list[int]] = defaultdict(list)
    targets: dict[int, Counter[int]] = defaultdict(Counter)
    ended = set()
    for _ in range(steps):
        for row in rows(stream.next_step()):
            tokens, length, number = row["tokens"], row["lengths"], int(row["documents"])
            assert 2 <= length <= shape["window"]
            assert (tokens[length:] == 0).all()
            whole = documents[number]
            start = row["window_index"] * shape["window"]
            assert tokens[:length].tolist() == whole[start : start + shape["window"]].tolist()
            after = whole[start + shape["window"] :]
            assert row["next_token"] == (after[0] if len(after) else -1)
            if row["context_only"]:
                assert fed[number][start : start + length] == tokens[:length].tolist(), "fed before"
                continue
            assert number not in ended
            assert len(fed[number]) == start, "windows are consecutive, each new once"
            fed[number] += tokens[:length].tolist()
            targets[number].update(range(start + 1, start + length))
            if row["next_token"] >= 0:
                targets[number][start + length] += 1
            if len(after) <= 1:
                ended.add(number)
    for number, tokens in fed.items():
        whole = documents[number]
        assert tokens == whole[: len(tokens)].tolist()
        if number in ended:
            assert len(whole) - len(tokens) == (len(whole) % shape["window"] == 1), (
                "only a single last token is in no row"
            )
            assert targets[number] == Counter(range(1, len(whole))), "every token but the first is a target once"


@given(lengths=LENGTHS, shape=SHAPES, steps=st.integers(2, 12))
def test_a_place_keeps_its_document_until_it_ends(lengths: list[int], shape: dict[str, int], steps: int) -> None:
    stream = stream_of(lengths, shape)
    documents = recorded(stream)
    per_step, again = shape["windows_per_step"], shape["windows_per_step"] - shape["stride"]

    def is_last(row: dict[str, Any]) -> bool:
        """At most a single token is left after it."""
        return (row["window_index"] + 1) * shape["window"] >= len(documents[int(row["documents"])]) - 1

    before: dict[int, list[dict[str, Any]]] = {place: [] for place in range(shape["places"])}
    for _ in range(steps):
        everything = rows(stream.next_step())
        for place in before:
            here = everything[place * per_step : (place + 1) * per_step]
            for earlier, later in pairwise(here):
                if is_last(earlier):
                    assert later["documents"] != earlier["documents"]
                    assert later["window_index"] == 0 and not later["context_only"]
                else:
                    assert later["documents"] == earlier["documents"]
                    assert later["window_index"] == earlier["window_index"] + 1
            context = [int(row["window_index"]) for row in here if row["context_only"]]
            if not before[place] or is_last(before[place][-1]):
                assert context == [] and here[0]["window_index"] == 0
            else:
                last = before[place][-1]
                assert here[0]["documents"] == last["documents"]
                known = [int(row["window_index"]) for row in before[place] if row["documents"] == last["documents"]]
                assert context == known[len(known) - min(again, len(known)) :]
                assert here[len(context)]["window_index"] == last["window_index"] + 1
            before[place] = here
    where: dict[int, set[int]] = defaultdict(set)
    for place, last_rows in before.items():
        for row in last_rows:
            where[int(row["documents"])].add(place)
    assert all(len(places) == 1 for places in where.values())


@settings(max_examples=50)
@given(lengths=LENGTHS, shape=SHAPES, cuts=st.lists(st.integers(0, 4), min_size=1, max_size=4), join=st.booleans())
def test_a_saved_stream_goes_on_exactly(
    stream_file: Path, lengths: list[int], shape: dict[str, int], cuts: list[int], join: bool
) -> None:
    def fresh() -> WindowStream:
        more = streamed(stream_file, [30, 0, 3, 9, 1, 100])
        return stream_of(lengths, shape, more, join_below=15 if join else 0)

    whole = fresh()
    expected = [whole.next_step() for _ in range(sum(cuts) + 3)]
    stream, found = fresh(), []
    for count in [*cuts, 3]:
        state = json.loads(json.dumps(stream.state_dict()))
        stream = fresh()
        stream.load_state_dict(state)
        assert json.loads(json.dumps(stream.state_dict())) == state
        found += [stream.next_step() for _ in range(count)]
    for mine, theirs in zip(found, expected, strict=True):
        for field in dataclasses.fields(theirs):
            np.testing.assert_array_equal(getattr(mine, field.name), getattr(theirs, field.name), err_msg=field.name)
    assert stream.dropped_tokens == whole.dropped_tokens


@given(lengths=LENGTHS, shape=SHAPES, cut=st.integers(0, 6), world=st.integers(1, 3))
def test_one_number_is_one_document_in_the_whole_run(
    lengths: list[int], shape: dict[str, int], cut: int, world: int
) -> None:
    documents: dict[int, set[int]] = defaultdict(set)
    places: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for rank in range(world):
        stream = stream_of(lengths, shape, rank=rank, world=world)
        for number in range(8):
            if number == cut:
                state = json.loads(json.dumps(stream.state_dict()))
                stream = stream_of(lengths, shape, rank=rank, world=world)
                stream.load_state_dict(state)
            for index, row in enumerate(rows(stream.next_step())):
                documents[int(row["documents"])] |= {int(token) // 10**4 for token in row["tokens"][: row["lengths"]]}
                places[int(row["documents"])].add((rank, index // shape["windows_per_step"]))
    assert all(len(marks) == 1 for marks in documents.values())
    assert all(len(where) == 1 for where in places.values())


def test_the_papers_way_written_out() -> None:
    """Previous and current window: documents of 3 and 2 windows (5 and 4 tokens, windows of 2; 1 token is left over)."""
    shape = {"places": 1, "window": 2, "windows_per_step": 2, "stride": 1}
    source = Endless(0, [6, 5])
    stream = WindowStream(Mixture([source], [1], seed=0, minimum_tokens=[0], join_below=0, separator_ids=[]), **shape)
    steps = [stream.next_step() for _ in range(4)]
    assert [step.tokens.tolist() for step in steps] == [
        [[0, 1], [2, 3]],
        [[2, 3], [4, 5]],
        [[10000, 10001], [10002, 10003]],
        [[20000, 20001], [20002, 20003]],
    ]
    assert [step.context_only.tolist() for step in steps] == [[False, False], [True, False], [False] * 2, [False] * 2]
    assert [step.next_token.tolist() for step in steps] == [[2, 4], [4, -1], [10002, 10004], [20002, 20004]]
    assert [step.documents.tolist() for step in steps] == [[0, 0], [0, 0], [1, 1], [2, 2]]
    assert stream.dropped_tokens == 1


def test_from_files_to_windows(tmp_path: Path) -> None:
    texts = [f"Number {n}: " + "once upon a time, " * (3 * n + 1) for n in range(6)]
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"id": str(n), "text": text}) + "\n" for n, text in enumerate(texts))
    )
    made = tokenizer("byte_level")
    source = tokenize_source(SourceSpec("tales", "jsonl", (str(tmp_path / "x.jsonl"),)), made, tmp_path / "cache")
    shortest = int(source.lengths.min())
    mixture = Mixture([source], [1], seed=0, minimum_tokens=[shortest + 1], join_below=0, separator_ids=[])
    stream = WindowStream(mixture, places=2, window=8, windows_per_step=2, stride=1)
    documents = recorded(stream)
    ids: dict[int, list[int]] = defaultdict(list)
    while mixture.report()[0].epochs < 2:
        for row in rows(stream.next_step()):
            if not row["context_only"]:
                ids[int(row["documents"])] += row["tokens"][: row["lengths"]].tolist()
                if len(documents[int(row["documents"])]) - len(ids[int(row["documents"])]) == 1:
                    ids[int(row["documents"])].append(int(row["next_token"]))
    read = {made.decode(tokens) for tokens in ids.values()}
    assert len(read & set(texts)) == 5
    assert mixture.report()[0].skipped == 1


def test_remaining_rows_begin_the_next_document() -> None:
    shape = {"places": 1, "window": 4, "windows_per_step": 3, "stride": 3}
    stream = WindowStream(
        Mixture([Endless(0, [6, 1, 3])], [1], seed=0, minimum_tokens=[0], join_below=0, separator_ids=[]), **shape
    )
    step = stream.next_step()
    assert step.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 0, 0], [20000, 20001, 20002, 0]]
    assert step.lengths.tolist() == [4, 2, 3]
    assert step.documents.tolist() == [0, 0, 1]
    assert step.window_index.tolist() == [0, 1, 0]
    assert step.next_token.tolist() == [4, -1, -1]
    assert stream.dropped_tokens == 1


def test_other_shapes_and_impossible_ones_are_refused() -> None:
    shape = {"places": 2, "window": 4, "windows_per_step": 2, "stride": 1}
    state = stream_of([9], shape).state_dict()
    for name, value in (("places", 3), ("window", 5), ("windows_per_step", 3), ("stride", 2)):
        with pytest.raises(ConfigError, match=rf"made with {name} {shape[name]}, but {value} is given"):
            stream_of([9], {**shape, name: value}).load_state_dict(state)
    with pytest.raises(ConfigError, match="made with seed 5, but 6"):
        stream_of([9], shape, seed=6).load_state_dict(state)
    for name, value, message in (
        ("places", 0, "expected 1 or more"),
        ("window", 1, "expected 2 or more"),
        ("windows_per_step", 0, "expected 1 or more"),
        ("stride", 0, "expected 1 or more"),
        ("stride", 3, "at most windows_per_step"),
    ):
        with pytest.raises(ConfigError, match=rf"{name}: {value} given, {message}|{message}"):
            stream_of([9], {**shape, name: value})


def test_documents_of_one_token_do_not_search_for_ever() -> None:
    shape = {"places": 1, "window": 4, "windows_per_step": 1, "stride": 1}
    with pytest.raises(ConfigError, match="set minimum_tokens to 2 or more"):
        stream_of([1], shape).next_step()
