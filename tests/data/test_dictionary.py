"""Made-up dictionaries: every question has exactly one answer, and it stands among the definitions.

python -m pytest tests/data/test_dictionary.py
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from longfocus.data.dictionary import Dictionary, DictionaryDocuments, DictionaryFormat
from longfocus.data.mixture import Mixture
from longfocus.data.windows import WindowStream
from longfocus.errors import ConfigError


@st.composite
def formats(draw: st.DrawFn) -> DictionaryFormat:
    symbols, keys = draw(st.integers(2, 70)), draw(st.integers(1, 5))
    values, first = draw(st.integers(1, 5)), draw(st.integers(0, 3000))
    most = min(40, symbols**keys)
    window = draw(st.integers(keys + values + 2, (most + 1) * (keys + values + 2) - 1))
    return DictionaryFormat(symbols, keys, values, first, window)


def read(ids: np.ndarray, form: DictionaryFormat, begin: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(key, value) of all records that begin with an id, read from the tokens as a person would."""
    text = " ".join(map(str, ids)) + " "
    symbol = r"(\d+ )"
    pattern = rf"(?<!\d){begin} ({symbol}{{{form.key_tokens}}}){form.value} ({symbol}{{{form.value_tokens}}})"
    found = re.findall(pattern, text)
    return [(tuple(map(int, key.split())), tuple(map(int, value.split()))) for key, _, value, _ in found]


@given(formats(), st.integers(0, 1 << 40))
def test_a_document_asks_for_each_of_its_definitions_once(form: DictionaryFormat, number: int) -> None:
    document = DictionaryDocuments(form, seed=3).document(number)
    assert document.dtype == np.int64 and document.shape == (2 * form.window,)
    defined = read(document[: form.window], form, form.define)
    asked = read(document[form.window :], form, form.ask)
    assert len(defined) == len(asked) == form.records
    assert len({key for key, _ in defined}) == form.records, "no key is defined twice"
    assert sorted(asked) == sorted(defined)
    used = form.records * form.record_tokens
    rest = np.concatenate((document[used : form.window], document[form.window + used :]))
    assert (rest == form.filler).all()
    symbols = [token for pair in defined for part in pair for token in part]
    assert min(symbols) >= form.first_id and max(symbols) < form.define
    assert document.min() >= form.first_id and document.max() < form.vocabulary


@given(formats(), st.integers(0, 1000))
def test_a_loss_is_taken_on_the_values_asked_for_and_nothing_else(form: DictionaryFormat, number: int) -> None:
    document = DictionaryDocuments(form, seed=3).document(number)
    marked = form.answers(document)
    assert marked.sum() == form.records * form.value_tokens
    asked = read(document[form.window :], form, form.ask)
    assert document[marked].tolist() == [token for _, value in asked for token in value]
    halves = form.answers(document.reshape(2, -1))  # as training sees it: a window a row
    assert (halves.reshape(-1) == marked).all() and not halves[0].any()


@given(formats(), st.integers(1, 4))
def test_no_key_comes_twice_in_a_long_dictionary(form: DictionaryFormat, windows: int) -> None:
    windows = min(windows, form.keys // form.records)
    made = Dictionary(form, "long")
    defined = [pair for window in range(windows) for pair in read(made.window(window), form, form.define)]
    assert len({key for key, _ in defined}) == windows * form.records
    numbers = list(range(windows * form.records))[::-3]
    assert read(made.questions(numbers), form, form.ask) == [defined[number] for number in numbers]


def test_all_keys_are_used_before_the_dictionary_ends() -> None:
    form = DictionaryFormat(symbols=5, key_tokens=3, value_tokens=1, window=30)
    made = Dictionary(form, "small")
    assert {tuple(key) for key in made.keys(range(125)).tolist()} == {
        (a, b, c) for a in range(5) for b in range(5) for c in range(5)
    }
    with pytest.raises(ConfigError, match="125 keys, and definition 125"):
        made.keys([125])


def test_keys_and_values_are_drawn_uniformly() -> None:
    form = DictionaryFormat()
    made = Dictionary(form, "uniform")
    numbers = np.arange(60_000)
    keys, values = made.keys(numbers), made.values(numbers)
    for name, drawn in (("keys", keys), ("values", values)):
        for place in range(4):
            counts = np.bincount(drawn[:, place], minlength=60)
            assert stats.chisquare(counts).pvalue > 0.001, f"{name}, token {place}"
    # neither a value nor its key's neighbour tells anything about a value
    for one in (keys[:, 0], values[:, 1], np.roll(values[:, 0], 1)):
        table = np.histogram2d(one, values[:, 0], bins=60)[0]
        assert stats.chisquare(table.reshape(-1)).pvalue > 0.001
    # and the values that a document asks for say nothing about the order of its questions
    source = DictionaryDocuments(form, seed=0)
    first = [read(source.document(n)[256:], form, form.ask)[0] for n in range(500)]
    places = [
        [pair[0] for pair in read(source.document(n)[:256], form, form.define)].index(first[n][0]) for n in range(500)
    ]
    assert stats.chisquare(np.bincount(places, minlength=25)).pvalue > 0.001


def test_it_is_the_same_on_every_machine() -> None:
    document = DictionaryDocuments(DictionaryFormat(), seed=7).document(11)
    again = DictionaryDocuments(DictionaryFormat(), seed=7).document(11)
    other = DictionaryDocuments(DictionaryFormat(), seed=8).document(11)
    assert (document == again).all() and not (document == other).all()
    assert document[:10].tolist() == [60, 31, 28, 40, 45, 61, 20, 2, 28, 43], "as written down once"


def test_the_paper_s_sizes() -> None:
    form = DictionaryFormat()
    assert (form.vocabulary, form.record_tokens, form.records, 2 * form.window) == (64, 10, 25, 512)
    assert form.keys > (16 << 20) // form.window * form.records, "keys for 16M tokens"
    shifted = DictionaryFormat(first_id=1000)
    assert (Dictionary(shifted, "a").window(5) == Dictionary(form, "a").window(5) + 1000).all()


def test_it_is_a_source_of_training_windows() -> None:
    form = DictionaryFormat()
    source = DictionaryDocuments(form, seed=5)
    mixture = Mixture([source], [1.0], seed=0, minimum_tokens=[0], join_below=0, separator_ids=[])
    stream = WindowStream(mixture, places=3, window=256, windows_per_step=2, stride=2)
    step = stream.next_step()
    assert step.window_index.tolist() == [0, 1] * 3
    assert (step.tokens[:2].reshape(-1) == source.document(0)).all()
    assert form.answers(step.tokens).sum(1).tolist() == [0, 100] * 3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"symbols": 1}, "symbols: 1 given"),
        ({"window": 9}, "window: 9 given, but a record is 10 tokens"),
        ({"symbols": 4, "key_tokens": 2, "window": 256}, "16 keys, but one window defines 32"),
        ({"key_tokens": 40, "window": 500}, "at most 2 \\*\\* 62"),
        ({"first_id": -1}, "first_id: -1 given"),
    ],
)
def test_impossible_formats_are_refused(changes: dict[str, int], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DictionaryFormat(**changes)
