"""Texts of every kind of source come whole, in order, one at a time; reading stops and goes on anywhere.

python -m pytest tests/data/test_corpus.py
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longfocus.data.corpus import Corpus
from longfocus.data.source_spec import SourceSpec, list_files
from longfocus.errors import ConfigError, InputError
from tests.machine import data_folder

TEXTS = ["One.\n", "Zwei: größer — 二.\r\n", "  three\n\n"]


def lines(path: Path, records: list[Any]) -> Path:
    """A .jsonl or .jsonl.gz file."""
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def parquet(path: Path, records: list[dict[str, Any]], **options: Any) -> Path:
    pq, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    pq.write_table(arrow.Table.from_pylist(records), path, **options)
    return path


def read(spec: SourceSpec) -> list[tuple[str, str]]:
    return [(document.id, document.text) for document in Corpus(spec)]


def files(root: Path, texts: dict[str, str | bytes]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return root


def test_text_files_come_as_they_are(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in (2, 0, 1)]
    for path, text in zip(paths, TEXTS, strict=True):
        path.write_bytes(text.encode())
    spec = SourceSpec("texts", paths=tuple(map(str, paths)))
    assert read(spec) == list(zip(map(str, paths), TEXTS, strict=True))


def test_a_folder_of_texts_is_sorted_and_says_what_it_passed_over(tmp_path: Path) -> None:
    files(
        tmp_path,
        {"b.txt": "b", "a/z.txt": "z", "a/bad.bin": b"\0\1", "empty.txt": "  \n", ".hidden": "h", "__pycache__/x": "x"},
    )
    corpus = Corpus(SourceSpec("folder", paths=(str(tmp_path),)))
    assert [document.text for document in corpus] == ["b", "z"]
    assert corpus.skipped_count == 2
    assert [Path(name).name for name, _ in corpus.skipped] == ["empty.txt", "bad.bin"]
    assert "NUL" in corpus.skipped[1][1]
    only = SourceSpec("folder", paths=(str(tmp_path),), suffixes=(".bin", "b.txt"))
    assert [text for _, text in read(only)] == ["b"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    path = lines(
        tmp_path / name,
        [{"id": "first", "text": TEXTS[0]}, {"text": ""}, {"id": 7, "text": TEXTS[1]}, {"text": None}, {"text": "t"}],
    )
    corpus = Corpus(SourceSpec("records", "jsonl", (str(path),)))
    found = list(corpus)
    assert [(document.id, document.text) for document in found] == [
        ("first", TEXTS[0]),
        ("7", TEXTS[1]),
        (f"{path}:5", "t"),
    ]
    assert corpus.skipped_count == 2
    assert found[-1].bytes_read == corpus.bytes_total == path.stat().st_size


def test_other_fields_and_lone_surrogates(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", [{"body": "a\ud800", "key": 1}, {"body": "fine", "key": "k"}])
    corpus = Corpus(SourceSpec("records", "jsonl", (str(tmp_path),), text_field="body", id_field="key"))
    assert [(document.id, document.text) for document in corpus] == [("k", "fine")]
    assert corpus.skipped == [(f"{path}:1", "holds halves of characters (lone surrogates)")]


def test_parquet(tmp_path: Path) -> None:
    records = [{"id": f"d{number}", "text": f"text {number}", "more": [number]} for number in range(200)]
    path = parquet(tmp_path / "x.parquet", records, row_group_size=70)
    corpus = Corpus(SourceSpec("table", "parquet", (str(tmp_path),)))
    found = list(corpus)
    assert [(document.id, document.text) for document in found] == [(r["id"], r["text"]) for r in records]
    assert found[-1].bytes_read == path.stat().st_size


def test_a_repository_is_one_document_by_folder(tmp_path: Path) -> None:
    files(
        tmp_path,
        {
            "flask/src/z.py": "z = 1\n",
            "flask/src/a-b/c.py": "c = 1",
            "flask/src/a/y.py": "\ny = 1\n\n",
            "flask/setup.py": "setup()\r\n",
            "flask/logo.png": b"\x89PNG\0",
            "flask/.git/config": "no",
            "click/b.py": "b\n",
            "click/a.py": "a\n",
            "loose.py": "alone\n",
            "nothing/only.bin": b"\0",
        },
    )
    corpus = Corpus(SourceSpec("code", "code", (str(tmp_path),)))
    assert [(document.id, document.text) for document in corpus] == [
        (tmp_path.name, "=== loose.py ===\nalone\n"),
        ("click", "=== a.py ===\na\n\n=== b.py ===\nb\n"),
        (
            "flask",
            "=== setup.py ===\nsetup()\r\n\n=== src/z.py ===\nz = 1\n\n=== src/a/y.py ===\n\ny = 1\n\n\n"
            "=== src/a-b/c.py ===\nc = 1\n",
        ),
    ]
    assert [Path(name).name for name, _ in corpus.skipped] == ["logo.png", "only.bin"]


def test_a_data_set_of_the_hub_resumes_by_its_own_state(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    for part in range(3):
        lines(tmp_path / f"set/train-{part}.jsonl", [{"id": f"{part}.{n}", "text": f"t{part}{n}"} for n in range(4)])
    spec = SourceSpec("hub", "hub", dataset=str(tmp_path / "set"))
    whole = read(spec)
    assert len(set(whole)) == 12
    for stop in (0, 1, 5, 12):
        corpus = Corpus(spec)
        found = [(document.id, document.text) for document in islice(corpus, stop)]
        state = json.loads(json.dumps(corpus.state_dict()))
        later = Corpus(spec)
        later.load_state_dict(state)
        found += [(document.id, document.text) for document in later]
        assert found == whole
        if stop == 5:
            assert [(document.id, document.text) for document in later] == whole, "the next pass begins at the start"


def test_hub_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = SourceSpec("c4", "hub", dataset="nobody/nothing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        list(Corpus(spec))
    monkeypatch.undo()
    pytest.importorskip("datasets")
    with pytest.raises(InputError, match=r"'nobody/nothing' cannot be opened .* The hub is out of reach"):
        list(Corpus(spec))
    lines(tmp_path / "train.jsonl", [{"text": "t"}])
    with pytest.raises(InputError, match="Bad split"):
        list(Corpus(SourceSpec("here", "hub", dataset=str(tmp_path), split="nowhere")))
    with pytest.raises(InputError, match="has no field 'body'; it has text"):
        list(Corpus(SourceSpec("here", "hub", dataset=str(tmp_path), text_field="body")))


def test_a_missing_pyarrow_names_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match="pip install pyarrow"):
        list(Corpus(SourceSpec("table", "parquet", (str(tmp_path),))))


def truncated(root: Path) -> None:
    path = lines(root / "x.jsonl.gz", [{"text": os.urandom(50).hex()} for _ in range(400)])
    path.write_bytes(path.read_bytes()[:-2000])


@pytest.mark.parametrize(
    ("kind", "make", "message"),
    [
        ("text", lambda root: None, r"no file in .*"),
        ("jsonl", lambda root: files(root, {"a.txt": "x"}), r"no file that ends in \.jsonl or \.jsonl\.gz"),
        ("text", lambda root: files(root, {"a": b"\0", "b": " "}), r"has no document: .*NUL.*is empty"),
        ("code", lambda root: files(root, {"r/a": b"\0"}), r"has no document: .*NUL"),
        ("jsonl", lambda root: files(root, {"x.jsonl": ""}), r"has no document: nothing to read"),
        ("jsonl", lambda root: files(root, {"x.jsonl": '{"text": "a"}\n{"text'}), r"x\.jsonl, line 2 is not JSON"),
        ("jsonl", lambda root: files(root, {"x.jsonl": "[1]\n"}), r"line 1 is a list; expected a JSON object"),
        ("jsonl", lambda root: lines(root / "x.jsonl", [{"body": "a", "n": 1}]), r"no field 'text'; it has body, n"),
        ("jsonl", lambda root: lines(root / "x.jsonl", [{"text": 3}]), r"field 'text' is a int; expected a text"),
        ("jsonl", truncated, r"cannot be read beyond line \d+: .*Is it a whole file"),
        ("jsonl", lambda root: files(root, {"x.jsonl.gz": "not packed"}), r"cannot be read beyond line 0"),
        ("parquet", lambda root: files(root, {"x.parquet": "PAR1 no"}), r"not a readable parquet file"),
        ("parquet", lambda root: parquet(root / "x.parquet", [{"b": "a"}]), r"no field 'text'; it has b\."),
    ],
)
def test_a_source_that_cannot_be_read(tmp_path: Path, kind: Any, make: Callable[[Path], None], message: str) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    make(tmp_path)
    with pytest.raises(InputError, match=message):
        list(Corpus(SourceSpec("s", kind, (str(tmp_path),))))


def test_a_named_file_must_be_there_and_readable(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Source 's': .*nowhere\.txt does not exist"):
        Corpus(SourceSpec("s", paths=(str(tmp_path / "nowhere.txt"),)))
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match="empty is empty"):
        list(Corpus(SourceSpec("s", paths=(str(tmp_path / "empty"),))))
    with pytest.raises(InputError, match="expected a folder of repositories"):
        Corpus(SourceSpec("s", "code", (str(tmp_path / "empty"),)))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="expected a file or a folder"):
        Corpus(SourceSpec("s", paths=(str(tmp_path / "pipe"),)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "expected a short name"),
        ({"name": "s", "kind": "csv", "paths": ["x"]}, "expected one of text, jsonl"),
        ({"name": "s"}, "takes one or more files or folders"),
        ({"name": "s", "kind": "hub"}, "takes the data set's id"),
        ({"name": "s", "kind": "hub", "dataset": "a/b", "paths": ["x"]}, "takes the data set's id"),
        ({"name": "s", "paths": ["x"], "text_fields": "y"}, "Did you mean 'text_field'"),
        ({"paths": ["x"]}, "name: missing"),
    ],
)
def test_an_impossible_spec(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SourceSpec.from_dict(options)


def test_a_spec_goes_to_json_and_back() -> None:
    for spec in (
        SourceSpec("a", "code", ("x", "y"), suffixes=(".py",)),
        SourceSpec("b", "hub", dataset="allenai/c4", subset="en"),
    ):
        assert SourceSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert SourceSpec("a", paths="x", suffixes=".py").to_dict()["suffixes"] == [".py"]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[SourceSpec]:
    """One of each kind, with several files and things to pass over."""
    root = tmp_path_factory.mktemp("sources")
    files(root / "text", {"a": "a", "b": b"\0", "c/d": "d", "e": "e"})
    files(root / "code", {"r1/a": "a", "r2/b": "b", "r2/c": b"\0", "r3/d": "d"})
    (root / "jsonl").mkdir()
    lines(root / "jsonl/1.jsonl", [{"text": "1"}, {"text": ""}, {"text": "3"}])
    lines(root / "jsonl/2.jsonl.gz", [{"text": ""}])
    lines(root / "jsonl/3.jsonl.gz", [{"text": "4"}, {"text": "5"}])
    made = ["text", "code", "jsonl"]
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        pass
    else:
        (root / "parquet").mkdir()
        for part in (1, 2):
            parquet(root / f"parquet/{part}.parquet", [{"text": f"{part}{n}" if n != 1 else None} for n in range(3)])
        made.append("parquet")
    return [SourceSpec(kind, kind, (str(root / kind),)) for kind in made]  # type: ignore[arg-type]


@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, 4), max_size=6))
def test_reading_goes_on_from_any_place(sources: list[SourceSpec], cuts: list[int]) -> None:
    for spec in sources:
        whole = read(spec)
        corpus, found = Corpus(spec), []
        for count in cuts:
            found += [(document.id, document.text) for document in islice(corpus, count)]
            state = json.loads(json.dumps(corpus.state_dict()))
            corpus = Corpus(spec)
            corpus.load_state_dict(state)
        while len(found) < 3 * len(whole):  # passes begin anew
            found += [(document.id, document.text) for document in corpus]
        assert found[: 3 * len(whole)] == whole * 3


def test_a_big_file_is_never_held(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl.gz", [{"text": f"{number} " * 1000} for number in range(3000)])
    corpus = Corpus(SourceSpec("big", "jsonl", (str(path),)))
    tracemalloc.start()
    try:
        sizes = [(len(document.text), document.bytes_read) for document in corpus]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(size for size, _ in sizes) > 10e6
    assert peak < 2e6
    assert sizes[0][1] < path.stat().st_size


@pytest.mark.data
def test_the_real_texts() -> None:
    names = ("books", "code", "isabelle", "arxiv")
    folder = data_folder(*names)
    for name in names:
        path = folder / name / "test.jsonl.gz"
        with gzip.open(path, "rt", encoding="utf-8") as records:
            expected = [(record["id"], record["text"]) for record in map(json.loads, records)]
        assert read(SourceSpec(name, "jsonl", (str(path),))) == expected


def test_an_installed_package_is_a_source_of_text_on_every_machine() -> None:
    import email

    spec = SourceSpec("python", paths=("package:email",), suffixes=(".py",))
    documents = {document.id: document.text for document in Corpus(spec)}
    folder = Path(email.__file__).parent
    assert documents[str(folder / "charset.py")] == (folder / "charset.py").read_text("utf-8")
    for wrong in ("package:no_such_package", "package:", "package:sys", "package:../etc", "package:email.charset"):
        with pytest.raises(InputError, match="expected the name of an installed Python package"):
            list_files(SourceSpec("python", paths=(wrong,)))
