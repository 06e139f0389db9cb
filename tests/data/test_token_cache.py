"""A source is tokenised once, wholly and rightly: other sources have other entries, and a kill leaves none.

python -m pytest tests/data/test_token_cache.py
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
import time
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longfocus.data import token_cache
from longfocus.data.source_spec import SourceSpec
from longfocus.data.token_cache import Progress, TokenizedSource, tokenize_source
from longfocus.errors import InputError
from tests.machine import data_folder
from tests.processes import start
from tests.small_tokenizers import SAMPLES, talking, tokenizer

TEXTS = [*SAMPLES.values(), " ".join(SAMPLES.values()) * 200]


def records(path: Path, texts: list[str]) -> SourceSpec:
    lines = [json.dumps({"id": f"d{number}", "text": text}) + "\n" for number, text in enumerate(texts)]
    path.write_text("".join(lines), encoding="utf-8")
    return SourceSpec("records", "jsonl", (str(path),))


def whole(made: Any, text: str) -> list[int]:
    backend = made.backend_tokenizer.from_str(made.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    return list(backend.encode(text, add_special_tokens=False).ids)


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.is_dir()) if cache.exists() else []


@pytest.mark.parametrize("kind", ["byte_level", "unigram"])
def test_documents_are_tokenised_as_the_tokenizer_does(tmp_path: Path, kind: str) -> None:
    made = tokenizer(kind)
    source = tokenize_source(records(tmp_path / "x.jsonl", TEXTS), made, tmp_path / "cache")
    expected = [whole(made, text) for text in TEXTS]
    assert source.name == "records"
    assert source.documents == len(TEXTS)
    assert source.tokens == sum(map(len, expected)) == source.lengths.sum()
    for number, ids in enumerate(expected):
        found = source.document(number)
        assert found.tolist() == ids
        assert found.dtype == np.uint16
        assert isinstance(found, np.memmap) and not found.flags.writeable
        assert source.document_id(number) == f"d{number}"


@settings(max_examples=25)
@given(texts=st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=50), min_size=1, max_size=5))
def test_no_token_is_lost_or_repeated(texts: list[str]) -> None:
    made = tokenizer("byte_level")
    with tempfile.TemporaryDirectory() as folder:
        spec = records(Path(folder, "x.jsonl"), [*texts, "end"])
        source = tokenize_source(spec, made, Path(folder, "cache"))
        kept = [text for text in [*texts, "end"] if text]
        assert [source.document(n).tolist() for n in range(source.documents)] == [whole(made, text) for text in kept]
        assert source.skipped == len(texts) + 1 - len(kept)


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    made = tokenizer("byte_level")
    large = SimpleNamespace(backend_tokenizer=made.backend_tokenizer, get_vocab=lambda: {"far": 1 << 16})
    source = tokenize_source(records(tmp_path / "x.jsonl", TEXTS), large, tmp_path / "cache")
    assert source.document(0).dtype == np.uint32
    assert source.document(0).tolist() == whole(made, TEXTS[0])


def test_progress_ends_with_the_counts(tmp_path: Path) -> None:
    spec = records(tmp_path / "x.jsonl", TEXTS)
    seen: list[Progress] = []
    source = tokenize_source(spec, tokenizer("byte_level"), tmp_path / "cache", seen.append)
    size = (tmp_path / "x.jsonl").stat().st_size
    assert seen[-1] == Progress(source.documents, source.tokens, size, size)
    for earlier, later in pairwise(seen):
        assert (earlier.documents, earlier.tokens, earlier.bytes_read) <= (later.documents, later.tokens, size)


def test_an_entry_is_made_once_for_the_same_source(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    spec = records(tmp_path / "x.jsonl", TEXTS)
    made = talking()  # a tokenizer of its own, to be spoilt
    first = tokenize_source(spec, made, cache)

    def again(spec: SourceSpec, made: Any = made) -> TokenizedSource:
        return tokenize_source(spec, made, cache, lambda _: pytest.fail("tokenised again"))

    made(["a", "b b"], padding=True, truncation=True, max_length=2)  # leaves settings behind in the tokenizer
    assert again(spec).digest == first.digest
    renamed = again(SourceSpec("other name", "jsonl", spec.paths))
    assert (renamed.digest, renamed.name) == (first.digest, "other name")
    os.utime(spec.paths[0], (1, 1))
    assert again(spec).digest == first.digest, "a small file counts by its contents"


def test_whatever_changes_the_tokens_changes_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, path = tmp_path / "cache", tmp_path / "x.jsonl"
    spec = records(path, TEXTS[:3])
    seen = {tokenize_source(spec, tokenizer("byte_level"), cache).digest}

    def new(spec: SourceSpec, kind: str = "byte_level") -> TokenizedSource:
        source = tokenize_source(spec, tokenizer(kind), cache)
        assert source.digest not in seen
        seen.add(source.digest)
        return source

    new(spec, "digits")
    new(SourceSpec("records", "jsonl", spec.paths, text_field="id"))
    times = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().replace(b"captain", b"CAPTAIN"))
    os.utime(path, ns=(times, times))
    changed = new(spec)
    assert changed.document(0).tolist() == whole(tokenizer("byte_level"), TEXTS[0].replace("captain", "CAPTAIN"))
    monkeypatch.setattr(token_cache, "HASHED_FILE_BYTES", 0)
    new(spec)
    os.utime(path, ns=(times + 1, times + 1))
    new(spec)
    assert len(entries(cache)) == len(seen)


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "ids.bin", "id_offsets.bin", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "flip the last", "longer", "gone"])
def test_a_corrupted_entry_is_an_error_that_names_the_file(tmp_path: Path, name: str, damage: str) -> None:
    spec = records(tmp_path / "x.jsonl", TEXTS[:3])
    made = tokenizer("byte_level")
    cache = tmp_path / "cache"
    good = tokenize_source(spec, made, cache)
    tokens = good.document(0).tolist()
    path = good.folder / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "flip the last":
        data[-3] ^= 1  # of the manifest the closing brace's neighbour
    path.unlink()
    if damage != "gone":
        path.write_bytes({"cut": data[:-1], "longer": data + b"}"}.get(damage, data))
    if name == "manifest.json" and damage in ("cut", "gone"):
        if damage == "gone":  # no entry, then: it is made anew
            assert tokenize_source(spec, made, cache).document(0).tolist() == tokens
            return
        path.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=rf"{name} is corrupted .* Delete the folder"):
        tokenize_source(spec, made, cache)
    shutil.rmtree(good.folder)
    assert tokenize_source(spec, made, cache).document(0).tolist() == tokens


def test_a_newer_or_foreign_manifest(tmp_path: Path) -> None:
    source = tokenize_source(records(tmp_path / "x.jsonl", TEXTS[:2]), tokenizer("byte_level"), tmp_path / "cache")
    path = source.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for change, message in (({"version": 99}, "Upgrade longfocus"), ({"format": "x"}, "not the manifest")):
        path.write_text(json.dumps({**manifest, **change}))
        with pytest.raises(InputError, match=message):
            TokenizedSource(source.folder, "records")


def test_failures_leave_nothing_behind(tmp_path: Path) -> None:
    spec, made, cache = records(tmp_path / "x.jsonl", TEXTS), tokenizer("byte_level"), tmp_path / "cache"

    def fail(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize_source(spec, made, cache, fail)
    assert entries(cache) == []

    def write(_: Progress) -> None:
        with Path(spec.paths[0]).open("a") as file:
            file.write("\n")

    with pytest.raises(InputError, match="changed while it was being tokenised"):
        tokenize_source(spec, made, cache, write)
    assert entries(cache) == []
    with pytest.raises(InputError, match=r"bad\.jsonl, line 1 is not JSON"):
        (tmp_path / "bad.jsonl").write_text("{")
        tokenize_source(SourceSpec("bad", "jsonl", (str(tmp_path / "bad.jsonl"),)), made, cache)
    assert entries(cache) == []
    with pytest.raises(InputError, match=r"token cache .* could not be written"):
        tokenize_source(spec, made, tmp_path / "x.jsonl")


def tokenize(path: str, cache: str, seconds: str) -> None:
    """In another process: tokenise, with a pause after each block."""

    def pause(progress: Progress) -> None:
        print("block", flush=True)
        time.sleep(float(seconds))

    print("begun", flush=True)
    source = tokenize_source(SourceSpec("records", "jsonl", (path,)), tokenizer("byte_level"), cache, pause)
    print("tokens", source.tokens, flush=True)


def test_a_killed_tokenisation_leaves_a_usable_cache(tmp_path: Path) -> None:
    spec, made, cache = records(tmp_path / "x.jsonl", TEXTS[:-1]), tokenizer("byte_level"), tmp_path / "cache"
    child = start("tests.data.test_token_cache:tokenize", spec.paths[0], str(cache), "0.2")
    child.wait_for(lambda: child.out.count("block") >= 3)
    child.kill()
    assert child.wait().code == -9
    (left,) = entries(cache)
    assert left.name.endswith(".unfinished")
    other = tokenize_source(SourceSpec("x", "jsonl", spec.paths, text_field="id"), made, cache)
    assert entries(cache) == [other.folder], "what was abandoned is cleared away"
    source = tokenize_source(spec, made, cache)
    assert source.tokens == sum(len(whole(made, text)) for text in TEXTS[:-1])
    assert len(entries(cache)) == 2


def test_of_two_processes_one_tokenises(tmp_path: Path) -> None:
    spec, cache = records(tmp_path / "x.jsonl", TEXTS[:-1]), tmp_path / "cache"
    children = [start("tests.data.test_token_cache:tokenize", spec.paths[0], str(cache), "0.02") for _ in range(2)]
    ended = [child.wait() for child in children]
    assert [end.code for end in ended] == [0, 0], ended
    assert sorted("block" in end.out for end in ended) == [False, True]
    assert len({end.out.splitlines()[-1] for end in ended}) == 1
    assert len(entries(cache)) == 1


def test_an_empty_source(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").touch()
    spec = SourceSpec("nothing", "jsonl", (str(tmp_path / "x.jsonl"),))
    with pytest.raises(InputError, match="Source 'nothing' has no document"):
        tokenize_source(spec, tokenizer("byte_level"), tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


@pytest.mark.data
def test_real_texts_are_tokenised_as_the_tokenizer_does(tmp_path: Path) -> None:
    path = data_folder("arxiv") / "arxiv/test.jsonl.gz"
    with gzip.open(path, "rb") as lines:
        first = list(islice(lines, 3))
    (tmp_path / "arxiv.jsonl.gz").write_bytes(gzip.compress(b"".join(first)))
    made = tokenizer("digits")
    source = tokenize_source(SourceSpec("arxiv", "jsonl", (str(tmp_path),)), made, tmp_path / "cache")
    for number, record in enumerate(map(json.loads, first)):
        assert source.document_id(number) == record["id"]
        assert source.document(number).tolist() == whole(made, record["text"])
    assert source.documents == 3
