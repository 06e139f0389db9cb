"""Held-out texts, question sets and texts of one's own; stretches of them of a wished length.

python -m pytest tests/tasks/test_texts.py
"""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfocus.errors import InputError
from longfocus.tasks.haystack import Haystack, place_in
from longfocus.tasks.texts import Texts, default_folder
from tests.small_tokenizers import KINDS, tokenizer
from tests.tasks.fakes import write_sets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sets(
        tmp_path / "data",
        {
            "books/test": [{"id": "one", "text": "First.\n"}, {"id": "two", "text": "Second.\n"}],
            "trec/train": [{"text": "What ?", "fine": "A:b"}],
            "empty/test": [],
            "blank/test": [{"id": "x", "text": ""}],
            "fieldless/test": [{"id": "x", "text": "fine"}, {"id": "y"}],
            "listed/test": [["id", "text"]],
        },
    )


def test_documents_and_records_are_read(folder: Path) -> None:
    texts = Texts(folder)
    assert texts.documents("books") == [("one", "First.\n"), ("two", "Second.\n")]
    assert texts.records("trec/train", ("text", "fine")) == [{"text": "What ?", "fine": "A:b"}]
    assert texts.has("trec/train") and not texts.has("trec/test")
    assert texts.about() == {}


def test_the_folder_is_given_or_in_the_environment_or_beside(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("LONGFOCUS_DATA", raising=False)
    assert default_folder() == Path("../shared/data") == Texts().folder
    monkeypatch.setenv("LONGFOCUS_DATA", str(folder))
    assert len(Texts().documents("books")) == 2
    assert Texts(Path("elsewhere")).folder == Path("elsewhere")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("code", "code/test.jsonl.gz is not there; say with --data (or LONGFOCUS_DATA) which folder holds the sets"),
        ("empty", "empty: no text in it"),
        ("blank", "blank: no text in it"),
        ("fieldless", "fieldless/test.jsonl.gz, line 2: no text in it"),
        ("listed", "listed/test.jsonl.gz, line 1: no id, text in it"),
    ],
)
def test_what_cannot_be_read_is_named(folder: Path, name: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        Texts(folder).documents(name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"plain text", id="not compressed"),
        pytest.param(gzip.compress(b"not json\n"), id="not json"),
        pytest.param(gzip.compress(b'{"id": "x"}\n' * 99)[:-9], id="cut short"),
    ],
)
def test_a_damaged_set_is_named(folder: Path, data: bytes) -> None:
    (folder / "books" / "test.jsonl.gz").write_bytes(data)
    with pytest.raises(InputError, match=r"books/test\.jsonl\.gz is not gzip-compressed JSON lines"):
        Texts(folder).documents("books")


def test_texts_of_ones_own_take_a_sets_place_and_change_the_record(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "novel.txt").write_text("My own novel.\n" * 3)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text("A.\n")
    (tmp_path / "more" / "b.txt").write_text("B.\n")
    texts = Texts(folder, {"books": str(tmp_path / "novel.txt"), "mine": str(tmp_path / "more")})
    assert [text for _, text in texts.documents("books")] == ["My own novel.\n" * 3]
    assert texts.unused == ["mine"]
    assert [text for _, text in texts.documents("mine")] == ["A.\n", "B.\n"]
    assert texts.unused == []
    about = texts.about()["own_texts"]
    assert about["books"].startswith("1 document, sha256 ") and about["mine"].startswith("2 documents, sha256 ")
    moved = tmp_path / "elsewhere.txt"
    moved.write_text("My own novel.\n" * 3)
    assert Texts(None, {"books": str(moved)}).about()["own_texts"]["books"] == about["books"]
    moved.write_text("My own novel!\n" * 3)
    assert Texts(None, {"books": str(moved)}).about()["own_texts"]["books"] != about["books"]


def test_an_own_text_that_is_not_there_is_named(tmp_path: Path) -> None:
    texts = Texts(None, {"books": str(tmp_path / "nowhere.txt")})
    for ask in (texts.about, lambda: texts.documents("books")):
        with pytest.raises(InputError, match=r"nowhere\.txt"):
            ask()


# -- stretches ---------------------------------------------------------------------------------------------


@pytest.fixture
def long(tmp_path: Path) -> Texts:
    rng = random.Random(0)
    words = "the narrator she said was neither captain nor mate it was getting late très tard".split()
    lines = [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(400)]
    (tmp_path / "long.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "one line.txt").write_text(" ".join(lines))
    return Texts(None, {"books": str(tmp_path / "long.txt"), "code": str(tmp_path / "one line.txt")})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [40, 300, 20_000])
def test_lines_are_whole_and_together_about_so_many_tokens(long: Texts, kind: str, tokens: int) -> None:
    words = tokenizer(kind)
    stack = Haystack(words, long, "books")
    known = set(stack.text.splitlines(keepends=True)) | {"\n"}
    for seed in range(3):
        lines = stack.lines(tokens, random.Random(seed))
        assert set(lines) <= known
        count = len(words("".join(lines), add_special_tokens=False)["input_ids"])
        assert tokens - 60 < count <= tokens
        assert lines == stack.lines(tokens, random.Random(seed))


def test_a_line_longer_than_what_is_asked_for_is_cut(long: Texts) -> None:
    words = tokenizer("byte_level")
    text = Haystack(words, long, "code").cut(0, 50)
    assert len(words(text, add_special_tokens=False)["input_ids"]) == 50


@pytest.mark.parametrize("tokens", [0, -1, -50])
def test_of_no_room_nothing_is_taken(long: Texts, tokens: int) -> None:
    stack = Haystack(tokenizer("byte_level"), long, "books")
    assert stack.cut(0, tokens) == "" and stack.lines(tokens, random.Random(0)) == []


def test_a_document_that_is_no_text_is_named(tmp_path: Path) -> None:
    write_sets(tmp_path, {"books/test": [{"id": "a", "text": "yes"}, {"id": "b", "text": 5}]})
    with pytest.raises(InputError, match=r"books/test\.jsonl\.gz, line 2: text is a int, expected a string"):
        Texts(tmp_path).documents("books")


@given(st.lists(st.text("ab\n", min_size=1, max_size=9), max_size=20), st.floats(0, 1))
def test_a_place_is_the_nearest_between_lines(lines: list[str], depth: float) -> None:
    found = place_in(lines, depth)
    lengths = [len("".join(lines[:count])) for count in range(len(lines) + 1)]
    best = min(abs(length - depth * lengths[-1]) for length in lengths)
    assert abs(lengths[found] - depth * lengths[-1]) == best
    assert place_in(lines, 0.0) == 0 and place_in(lines, 1.0) == len(lines)
