"""A text that streams through the tokenizer in blocks gives the tokens of the whole text, wherever the blocks end.

Shown for five kinds of tokenizers (see small_tokenizers.py) and for the default model's: ids, character and
byte offsets against the tokenizer's own over the whole text; texts of the pieces join to the whole.

    python -m pytest tests/data/test_tokens.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from longfocus.data.tokens import leading_ids, stream_tokens
from longfocus.errors import InputError
from tests.small_tokenizers import BOS, EOS, KINDS, SAMPLES, tokenizer

MARGIN = 48
"""Smallest margin tried: longer than any token of the small tokenizers, shorter than most texts here."""


CHUNKS = st.one_of(
    st.sampled_from([sample[:20] for sample in SAMPLES.values()] + [sample[-17:] for sample in SAMPLES.values()]),
    st.sampled_from(["\r\n", "\n", "\r", "\t", " ", "\u00a0", "\u3000", "\u2028", "\u200d", "\ufeff"]),
    st.builds(lambda space, count: space * count, st.sampled_from(" \n\t\u3000"), st.integers(1, 40)),
    st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=6),
    st.text(alphabet="ae\u0301\u0308\u0323\u094d\u0ba3\u0bbf", max_size=8),
    st.sampled_from(["👩‍👩‍👧‍👦", "🇫🇷🇯🇵🇫", "👍🏽👍", "ﬁﬀ", "①½", "뷁각", "İı", "ß"]),
    st.text(alphabet="0123456789", min_size=1, max_size=40),
)
TEXTS = st.lists(CHUNKS, max_size=40).map("".join)
SIZES = st.tuples(st.integers(1, 200), st.integers(MARGIN, 120), st.sampled_from([400, 1000, 5000]))


def cut(text: str, lengths: Sequence[int]) -> list[str]:
    """The text in blocks of these lengths, again and again; a length of 0 is an empty block."""
    blocks, at, number = [], 0, 0
    while at < len(text):
        length = lengths[number % len(lengths)]
        blocks.append(text[at : at + length])
        at, number = at + length, number + 1
    return blocks


def streamed(made: Any, blocks: Sequence[str], sizes: tuple[int, int, int] | None = None) -> tuple[list, list, list]:
    """(ids, characters, bytes) of the stream, after checking that its pieces' texts join to the whole."""
    options = {} if sizes is None else dict(zip(("block_chars", "margin_chars", "history_chars"), sizes, strict=True))
    found = list(stream_tokens(made, blocks, **options))
    assert "".join(piece.text for piece in found) == "".join(blocks)
    if not found:
        return [], [], []
    rows = np.concatenate([piece.rows for piece in found])
    at = 0
    for piece in found:
        assert piece.rows["char"][0] == at, "a piece's text begins at its first token"
        assert (piece.rows["char"] < at + len(piece.text)).all()
        at += len(piece.text)
    return rows["id"].tolist(), rows["char"].tolist(), rows["byte"].tolist()


def whole(made: Any, text: str) -> tuple[list, list, list]:
    """The same from the tokenizer itself, given the whole text."""
    encoded = made(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    chars = np.maximum.accumulate([start for start, _ in encoded["offset_mapping"]] or [0])[: len(encoded["input_ids"])]
    widths = np.array([len(char.encode()) for char in text], dtype=np.int64)
    return encoded["input_ids"], chars.tolist(), np.concatenate(([0], widths.cumsum()))[chars].tolist()


def check(made: Any, text: str, blocks: Sequence[str], sizes: tuple[int, int, int] | None = None) -> None:
    ids, chars, offsets = streamed(made, blocks, sizes)
    expected_ids, expected_chars, expected_offsets = whole(made, text)
    if ids != expected_ids:
        first = next(
            (i for i, (a, b) in enumerate(zip(ids, expected_ids, strict=False)) if a != b),
            min(len(ids), len(expected_ids)),
        )
        raise AssertionError(
            f"token {first} of {len(expected_ids)} (got {len(ids)}) at character {expected_chars[first : first + 1]}: "
            f"{made.convert_ids_to_tokens(ids[first : first + 6])}, expected "
            f"{made.convert_ids_to_tokens(expected_ids[first : first + 6])}"
        )
    # the first token may begin before its first visible character (a metaspace, a stripped space)
    assert chars[1:] == expected_chars[1:]
    assert offsets[1:] == expected_offsets[1:]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(text=TEXTS, sizes=SIZES, lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4))
@example(text="word " * 300, sizes=(64, MARGIN, 400), lengths=[7])
@example(text=SAMPLES["emoji"] * 20, sizes=(1, MARGIN, 400), lengths=[1])
@example(text="a\r\n" * 150, sizes=(50, MARGIN, 400), lengths=[2])
@example(text="".join(SAMPLES.values()) * 3, sizes=(100, 64, 1000), lengths=[100, 1, 33])
def test_streamed_tokens_are_those_of_the_whole_text(
    kind: str, text: str, sizes: tuple[int, int, int], lengths: list[int]
) -> None:
    check(tokenizer(kind), text, cut(text, lengths), sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAMPLES)
def test_every_script_at_every_block_size(kind: str, name: str) -> None:
    """The same 600 characters with blocks of many sizes, so that a cut falls at every place."""
    text = (SAMPLES[name] * 40)[:600]
    for block in (*range(1, 12), 17, 97, 151, 211):
        check(tokenizer(kind), text, [text], (block, 64, 1000))
        check(tokenizer(kind), text, cut(text, [block]), (2 * MARGIN, 64, 1000))


@pytest.mark.parametrize("kind", ["byte_level", "digits", "metaspace"])
@pytest.mark.parametrize("character", [" ", "\n", "\t", "\u3000", "7", "a"])
def test_one_character_repeated_beyond_a_margin(kind: str, character: str) -> None:
    text = f"before{character * 3000}in between{character * 511} {character * 513}after"
    check(tokenizer(kind), text, cut(text, [640]), (1 << 10, 1 << 9, 1 << 14))


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_as_shipped(kind: str) -> None:
    """About three blocks of the size that readers use."""
    text = "".join(f"{number} {sample}" for number in range(190) for sample in SAMPLES.values())
    assert len(text) > 2 * (1 << 16)
    check(tokenizer(kind), text, cut(text, [10007]))


@pytest.mark.model
def test_the_default_models_tokenizer(default_tokenizer: Any) -> None:
    text = "".join(SAMPLES.values()) + "    \n\n\n" + "x = 1234567890;\r\n" * 3
    for block in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233):
        check(default_tokenizer, text, cut(text, [block]), (block, MARGIN, 2000))
    long = text * 180
    assert len(long) > 2 * (1 << 16)
    check(default_tokenizer, long, cut(long, [9973]))


@pytest.mark.model
@pytest.mark.data
def test_the_default_models_tokenizer_on_real_texts(default_tokenizer: Any, real_texts: dict[str, str]) -> None:
    for name, text in real_texts.items():
        text = text[:120_000]
        ids, _, _ = streamed(default_tokenizer, cut(text, [4096]), (1 << 12, 1 << 9, 1 << 14))
        assert ids == whole(default_tokenizer, text)[0], name


@pytest.mark.model
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(text=TEXTS, sizes=SIZES)
def test_the_default_models_tokenizer_on_any_text(
    default_tokenizer: Any, text: str, sizes: tuple[int, int, int]
) -> None:
    check(default_tokenizer, text, [text], sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_byte_offsets_point_at_the_same_place_as_characters(kind: str) -> None:
    text = "".join(SAMPLES.values()) * 4
    data = text.encode()
    _, chars, offsets = streamed(tokenizer(kind), cut(text, [61]), (100, MARGIN, 1000))
    assert chars == sorted(chars)
    for char, byte in zip(chars, offsets, strict=True):
        assert data[byte:] == text[char:].encode()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unigram"])  # there they are ordinary pieces too
def test_a_special_token_spelt_in_a_text_is_ordinary_text(kind: str) -> None:
    made = tokenizer(kind)
    text = f"He wrote {EOS} and {BOS} on the wall. {EOS}{EOS}\n" * 20
    ids, _, _ = streamed(made, cut(text, [11]), (64, MARGIN, 1000))
    special = {made.bos_token_id, made.eos_token_id}
    assert not special & set(ids)
    assert special <= set(made(text)["input_ids"]), "the tokenizer itself takes them for special"
    assert ids == whole(made, text)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_streaming_leaves_the_tokenizer_as_it_was(kind: str) -> None:
    made = tokenizer(kind)
    before = made.backend_tokenizer.to_str(), made(f"a {EOS} b")["input_ids"]
    list(stream_tokens(made, ["some text"]))
    assert (made.backend_tokenizer.to_str(), made(f"a {EOS} b")["input_ids"]) == before


def test_truncation_and_padding_left_on_by_an_earlier_call_change_nothing() -> None:
    """`tokenizer(..., truncation=True, padding=...)` leaves both switched on inside a fast tokenizer."""
    made = tokenizer("byte_level")
    text = SAMPLES["latin"] * 30
    expected = whole(made, text)[0]
    try:
        made(["a", "b"], truncation=True, max_length=5, padding="max_length")
        assert streamed(made, [text])[0] == expected
    finally:
        made("a")  # switches both off again


@pytest.mark.parametrize("kind", KINDS)
def test_documents_in_a_row_do_not_touch(kind: str) -> None:
    """Each stream is its own text: the end of one document and the start of the next are tokenised apart."""
    made = tokenizer(kind)
    for before, after in (("half a wo", "rd"), ("a ", " b"), ("e", "\u0301"), ("👩‍", "👧"), ("\r", "\n")):
        assert (
            streamed(made, [before])[0] + streamed(made, [after])[0] == whole(made, before)[0] + whole(made, after)[0]
        )


@pytest.mark.parametrize("blocks", [[], [""], ["", ""]])
def test_an_empty_text_has_no_tokens(blocks: list[str]) -> None:
    assert list(stream_tokens(tokenizer("byte_level"), blocks)) == []


def test_empty_blocks_between_others_change_nothing() -> None:
    text = SAMPLES["latin"]
    check(tokenizer("byte_level"), text, ["", text[:10], "", "", text[10:], ""], (1, MARGIN, 400))


@pytest.mark.parametrize("text", ["\u200b\u200b", "\u00ad", " ", "\n"])
def test_a_text_that_the_tokenizer_hardly_sees_is_not_lost(text: str) -> None:
    """Whatever a normaliser drops, the pieces still join to the text."""
    for kind in KINDS:
        if whole(tokenizer(kind), text)[0]:
            assert "".join(piece.text for piece in stream_tokens(tokenizer(kind), [text])) == text, kind


def test_special_tokens_that_stand_before_a_text_are_found() -> None:
    bos = tokenizer("metaspace").bos_token_id
    assert leading_ids(tokenizer("byte_level")) == leading_ids(tokenizer("digits")) == []
    for kind in ("metaspace", "unsplit", "unigram"):
        assert leading_ids(tokenizer(kind)) == [bos], kind


@pytest.mark.model
def test_the_default_models_tokenizer_puts_nothing_before_a_text(default_tokenizer: Any) -> None:
    assert leading_ids(default_tokenizer) == []


def test_a_slow_tokenizer_is_refused_by_name() -> None:
    class SlowTokenizer:
        """Has no backend that would know offsets."""

    with pytest.raises(InputError, match="SlowTokenizer does not tell where tokens start"):
        list(stream_tokens(SlowTokenizer(), ["text"]))
