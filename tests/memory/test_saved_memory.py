"""A memory on disk is the memory in RAM, bit for bit, and survives kills, full disks, damage and other programs.

Tiny random Llama, real files, real processes, real signals. Comparisons are of every record, token row, text
and document; see saved.py.

    python -m pytest tests/memory/test_saved_memory.py
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import longfocus
from longfocus import Memory, Reader, find_sources, read_ids
from longfocus.errors import (
    MemoryFormatError,
    MemoryLockedError,
    MemoryMismatchError,
    MemoryStoreError,
    MemoryWriteError,
)
from longfocus.memory.documents import TOKEN_DTYPE
from longfocus.model import reading_pass
from longfocus.model.reading import Progress, not_remembered
from tests import processes
from tests.data.pdf import pdf
from tests.machine import grow
from tests.memory.saved import (
    WINDOW,
    Held,
    Stopper,
    assert_begins,
    assert_same,
    focused,
    held,
    in_ram,
    question,
    read,
    source_of,
    tokenizer_of_these_tests,
    where,
)
from tests.models import MEMORY_LAYERS, MODELS, logits, tiny
from tests.small_tokenizers import talking, tokenizer

DTYPES = ["float32", "float16", "bfloat16", "int8"]
KILLS = 16


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


# -- the same as in RAM ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_and_reopened_memory_equals_memory_in_ram(
    dtype: str, texts: list[Path], tmp_path: Path, words: Any
) -> None:
    model = focused(memory_dtype=dtype)
    ram = in_ram(model, *texts)
    assert ram.tokens > 30 * WINDOW
    ram.save(tmp_path / "memory", model=model)
    with Memory.open(tmp_path / "memory", model=model, tokenizer=words) as reopened:
        assert_same(held(reopened), held(ram))
        assert reopened.geometry == ram.geometry
        assert (
            reopened.nbytes
            == ram.nbytes
            == ram.tokens * 2 * 2 * 2 * 8 * torch.tensor([], dtype=getattr(torch, dtype)).itemsize
        )
        assert torch.equal(logits(model, question(), memory=reopened), logits(model, question(), memory=ram))


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_that_is_read_onto_disk_equals_memory_in_ram(
    dtype: str, texts: list[Path], tmp_path: Path, words: Any
) -> None:
    model = focused(memory_dtype=dtype, overlap=4)
    with Memory.create(tmp_path / "memory", model, words) as disk:
        read(model, disk, *texts)
        assert_same(held(disk), held(in_ram(model, *texts)))
    with Memory.open(tmp_path / "memory") as reopened:
        assert_same(held(reopened), held(in_ram(model, *texts)))


@pytest.mark.parametrize("model_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_dtypes_store_their_own(model_dtype: torch.dtype, texts: list[Path], tmp_path: Path) -> None:
    model = focused(dtype=model_dtype)
    ram = in_ram(model, texts[1])
    ram.save(tmp_path / "memory")
    with Memory.open(tmp_path / "memory", model=model) as reopened:
        assert held(reopened).records[1].dtype == model_dtype
        assert_same(held(reopened), held(ram))


@pytest.mark.parametrize(
    "options", [{}, {"retrieval": "exact", "k": 5}, {"memory_positions": "none"}, {"read_span": 20}]
)
def test_answers_do_not_depend_on_where_the_memory_lies(
    options: dict[str, Any], texts: list[Path], tmp_path: Path, words: Any
) -> None:
    model = focused(memory_dtype="float16", **options)
    ram = in_ram(model, *texts)
    ram.save(tmp_path / "memory")
    with Memory.open(tmp_path / "memory") as disk:
        assert torch.equal(logits(model, question(), memory=disk), logits(model, question(), memory=ram))
        long = question(3 * WINDOW)
        answers = [
            model.generate(long, memory=memory, max_new_tokens=2 * WINDOW, do_sample=False) for memory in (ram, disk)
        ]
        assert torch.equal(*answers)
        assert disk.tokens == ram.tokens, "a memory is only read while it answers"


def test_logits_are_the_same_bits_for_memories_of_several_chunks(tmp_path: Path, model: Any) -> None:
    """9,000 records, more than two chunks: results must not depend on where a store cuts its chunks."""
    generator = torch.Generator().manual_seed(3)
    memory = Memory(model)
    document = memory.begin_document("records", kind="ids")
    for count in (100, 5000, 3900):
        rows = np.zeros(count, dtype=TOKEN_DTYPE)
        rows["id"] = np.arange(count)
        memory.store.append({layer: torch.randn(1, count, 2, 2, 8, generator=generator) for layer in (1, 2)})
        document = memory.commit_window(document, rows, b"", 0)
    memory.save(tmp_path / "memory")
    with Memory.open(tmp_path / "memory") as disk:
        assert torch.equal(held(disk).records[2], held(memory).records[2])
        assert torch.equal(logits(model, question(), memory=disk), logits(model, question(), memory=memory))


def test_an_empty_memory_can_be_saved_and_adds_nothing(tmp_path: Path, model: Any, words: Any) -> None:
    Memory(model, words).save(tmp_path / "memory")
    with Memory.open(tmp_path / "memory", model=model) as empty:
        assert (empty.tokens, empty.documents, empty.nbytes, len(empty)) == (0, (), 0, 0)
        assert torch.equal(logits(model, question(), memory=empty), logits(model, question()))


def test_token_ids_without_a_text_are_kept(tmp_path: Path, model: Any) -> None:
    ids = torch.arange(3, 3 + 3 * WINDOW + 5)
    ram = Memory(model)
    read_ids(model, ids, ram, "numbers")
    with Memory.create(tmp_path / "memory", model) as disk:
        read_ids(model, ids, disk, "numbers")
    with Memory.open(tmp_path / "memory") as reopened:
        assert_same(held(reopened), held(ram))
        assert reopened.token_ids().tolist() == ids.tolist()
        assert reopened.token_ids(10, 20).tolist() == ids[10:20].tolist()


def test_every_token_knows_its_place_in_its_documents_text(texts: list[Path], tmp_path: Path, model: Any) -> None:
    in_ram(model, *texts).save(tmp_path / "memory")
    with Memory.open(tmp_path / "memory") as memory:
        rows = held(memory).rows
        for document, path in zip(memory.documents, texts, strict=True):
            text = path.read_bytes().decode()
            assert memory.text_of(document) == text
            assert (document.chars, document.text_bytes) == (len(text), len(text.encode()))
            expected = tokenizer_of_these_tests()(text, add_special_tokens=False, return_offsets_mapping=True)
            mine = rows[document.start : document.stop]
            assert [token for _, _, token in mine] == expected["input_ids"]
            assert [char for char, _, _ in mine] == [start for start, _ in expected["offset_mapping"]]
            for char, byte, _ in mine:
                assert text.encode()[:byte].decode() == text[:char]
            for token in (document.start, document.stop - 1):
                assert memory.document_of(token) == document


def test_names_and_paths_of_documents_come_back_as_they_were(tmp_path: Path, model: Any, words: Any) -> None:
    names = ["日本語.txt", 'quo"te\\.txt', "with\nnewline.txt", b"caf\xe9.txt".decode("utf-8", "surrogateescape")]
    paths = []
    for name in names:
        paths.append(tmp_path / name)
        paths[-1].write_text("hello there")
    in_ram(model, *paths).save(tmp_path / "memory")
    with Memory.open(tmp_path / "memory") as memory:
        assert [document.path for document in memory.documents] == list(map(str, paths))
        assert [document.name for document in memory.documents] == list(map(str, paths))


def test_the_options_and_source_of_the_model_are_kept(tmp_path: Path, words: Any) -> None:
    model = focused(overlap=3, memory_dtype="float16")
    Memory.create(tmp_path / "memory", model, words, model_source="org/name").close()
    with Memory.open(tmp_path / "memory") as memory:
        assert longfocus.FocusConfig.from_dict(memory.focus_options) == model.focus.config
        assert memory.model_source == "org/name"


@pytest.mark.model
def test_remembering_takes_300_mb_at_most_beside_the_model_and_the_memory(tmp_path: Path, default_model: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text(
        "".join(f"{number}. It was late; she said that it was neither here nor there.\n" for number in range(90))
    )
    ended = processes.run("tests.memory.children:peak_while_remembering", str(tmp_path / "memory"), str(path))
    assert ended.code == 0, ended.err
    with Memory.open(tmp_path / "memory") as memory:
        assert memory.tokens > 3 * memory.geometry.window
        assert float(ended.out) < 300 + memory.nbytes / 1e6


# -- kills -------------------------------------------------------------------------------------------------


def test_killed_at_any_moment_it_reopens_with_whole_windows_and_goes_on(texts: list[Path], tmp_path: Path) -> None:
    """Real kills of a real process while it reads; each time the next process goes on where the last one was stopped."""
    texts[0].write_bytes(texts[0].read_bytes() * 3)
    paths = list(map(str, texts))
    assert processes.run("tests.memory.children:remember", str(tmp_path / "whole"), *paths).code == 0
    with Memory.open(tmp_path / "whole") as memory:
        expected = held(memory)
    chance = random.Random(0)
    kills, seen, memory_number = 0, set(), 0
    while kills < KILLS:
        folder = tmp_path / f"killed {memory_number}"
        child = processes.start("tests.memory.children:remember", str(folder), *paths)
        if chance.random() < 0.7:  # the rest are killed while the memory is made or opened
            child.wait_for(lambda child=child: child.said("reading") or not child.is_running)
        time.sleep(chance.random() * 0.25)
        child.kill()
        ended = child.wait()
        if ended.code == 0:
            with Memory.open(folder) as memory:
                assert_same(held(memory), expected)
            memory_number += 1
            continue
        assert ended.code == -9, ended.err
        kills += 1
        if (folder / "memory.json").exists():
            with Memory.open(folder) as memory:
                memory.verify()
                assert_begins(held(memory), expected)
                seen.add(memory.tokens)
    assert len(seen) >= 6, f"kills came at too few different moments to show anything: {sorted(seen)}"
    ended = processes.run("tests.memory.children:remember", str(folder), *paths)
    assert ended.code == 0, ended.err
    with Memory.open(folder) as memory:
        assert_same(held(memory), expected)


def test_a_memory_whose_making_was_cut_short_can_be_made(
    texts: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    """What a kill between the files of a new memory leaves behind is no obstacle."""
    Memory.create(tmp_path / "model", model, words).close()
    names = [path.name for path in (tmp_path / "model").iterdir() if path.name != "memory.json"]
    assert names
    for leftovers in (names, ["journal.jsonl.new", "lock"], ["memory.json.new", "journal.jsonl", "lock"]):
        folder = tmp_path / "-".join(leftovers)
        folder.mkdir()
        for name in leftovers:
            (folder / name).write_bytes(b"half a li")
        with Memory.create(folder, model, words) as memory:
            read(model, memory, texts[1])
        with Memory.open(folder) as memory:
            assert_same(held(memory), held(in_ram(model, texts[1])))


def test_a_line_of_the_journal_that_was_not_finished_does_not_count(
    texts: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    """Cut the journal at every byte of its last line: the memory is the one before that commit."""
    states: list[Held] = []
    with Memory.create(tmp_path / "memory", model, words) as memory:
        reader = Reader(model, words, memory)
        reader.read(source_of(texts[1]), lambda _: states.append(held(memory)))
    journal = tmp_path / "memory" / "journal.jsonl"
    whole = journal.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for size in range(last, len(whole)):
        journal.write_bytes(whole[:size])
        with Memory.open(tmp_path / "memory") as memory:
            assert_same(held(memory), states[-2])
    for rest in (b"deadbeef {", b"\0\0\0\0", b"00000000 {}", b"longer than any line " * 1000):
        journal.write_bytes(whole[:last] + rest)
        with Memory.open(tmp_path / "memory", writable=True) as memory:
            assert_same(held(memory), states[-2])
            Reader(model, words, memory).read(source_of(texts[1]))
            assert_same(held(memory), states[-1])
        assert journal.read_bytes() == whole, "the next writer writes over it"


def test_data_beyond_the_last_commit_does_not_count(texts: list[Path], tmp_path: Path, model: Any, words: Any) -> None:
    with Memory.create(tmp_path / "memory", model, words) as memory:
        read(model, memory, texts[1])
        before = held(memory)
    for path in (tmp_path / "memory").glob("*.bin"):
        path.write_bytes(path.read_bytes() + b"rubbish" * 100)
    with Memory.open(tmp_path / "memory", model=model, tokenizer=words, writable=True) as memory:
        memory.verify()
        assert_same(held(memory), before)
        read(model, memory, texts[0])
        after = held(memory)
    with Memory.open(tmp_path / "memory") as memory:
        assert_same(held(memory), after)
        assert_same(after, held(in_ram(model, texts[1], texts[0])))


# -- damage ------------------------------------------------------------------------------------------------

FILES = ("memory.json", "journal.jsonl", "kv-001.1.bin", "kv-002.1.bin", "tokens.1.bin", "text.1.bin")
DATA_FILES = FILES[2:]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, model: Any, words: Any) -> Path:
    """A memory of four commits, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "text.txt").write_text("It was late. She said that it was neither the captain nor the mate.\n" * 2)
    with Memory.create(folder / "memory", model, words) as memory:
        read(model, memory, folder / "text.txt")
        assert memory.tokens > 2 * WINDOW
    return folder / "memory"


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "memory"))


def refuses(folder: Path, name: str) -> str:
    """Opening fails with an error that names the file; read-only and for writing."""
    for writable in (False, True):
        with pytest.raises(MemoryFormatError) as refused:
            Memory.open(folder, writable=writable)
        assert name in str(refused.value), f"the message does not name {name}: {refused.value}"
        assert "\n" not in str(refused.value)
    return str(refused.value)


def test_these_are_all_files_of_the_format(sound: Path) -> None:
    assert sorted(path.name for path in sound.iterdir() if path.name != "lock") == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(name: str, damaged: Path) -> None:
    (damaged / name).unlink()
    refuses(damaged, name)


@pytest.mark.parametrize("name", FILES)
def test_an_empty_file_is_named(name: str, damaged: Path) -> None:
    (damaged / name).write_bytes(b"")
    refuses(damaged, name)


@pytest.mark.parametrize("name", [name for name in FILES if name != "journal.jsonl"])  # there it is an unfinished line
def test_a_truncated_file_is_named(name: str, damaged: Path) -> None:
    data = (damaged / name).read_bytes()
    for size in {len(data) - (3 if name == "memory.json" else 1), len(data) // 2, 1}:
        (damaged / name).write_bytes(data[:size])
        refuses(damaged, name)


@pytest.mark.parametrize("name", FILES)
def test_one_wrong_bit_anywhere_is_noticed_and_its_file_named(name: str, damaged: Path) -> None:
    size = (damaged / name).stat().st_size
    if name == "journal.jsonl":
        size -= 1  # without its last line end the last line is an unfinished one, which is ignored
    chance = random.Random(name)
    places = range(size) if size < 300 else sorted(chance.sample(range(size), 300))
    for at in places:
        bit = chance.randrange(8)
        flip(damaged / name, at, bit)
        try:
            with pytest.raises(MemoryFormatError, match=re.escape(name)):
                Memory.open(damaged)
        except BaseException as error:
            shown = (damaged / name).read_bytes()[max(0, at - 10) : at + 10]
            error.add_note(f"byte {at}, bit {bit} of {name}: {shown!r}")
            raise
        flip(damaged / name, at, bit)
    Memory.open(damaged).close()


@pytest.mark.parametrize("name", FILES)
def test_a_foreign_file_is_named(name: str, damaged: Path) -> None:
    size = (damaged / name).stat().st_size
    for content in (
        random.Random(0).randbytes(size),
        b"\x89PNG\r\n\x1a\n" * size,
        b"{}\n" * size,
        b'{"format": "other"}\n',
    ):
        if len(content) < size and name in DATA_FILES:
            continue
        (damaged / name).write_bytes(content)
        refuses(damaged, name)


@pytest.mark.parametrize("name", DATA_FILES)
def test_a_file_of_another_memory_is_named(name: str, damaged: Path, tmp_path: Path, model: Any, words: Any) -> None:
    (tmp_path / "other.txt").write_text(
        "Another text, at least as long as the first one, so that sizes are no help at all. " * 3
    )
    with Memory.create(tmp_path / "other", model, words) as memory:
        read(model, memory, tmp_path / "other.txt")
    shutil.copy(tmp_path / "other" / name, damaged / name)
    refuses(damaged, name)


def test_the_journal_of_another_memory_is_noticed(damaged: Path, tmp_path: Path, model: Any, words: Any) -> None:
    (tmp_path / "other.txt").write_text("Another text, quite short.")
    with Memory.create(tmp_path / "other", model, words) as memory:
        read(model, memory, tmp_path / "other.txt")
    shutil.copy(tmp_path / "other" / "journal.jsonl", damaged / "journal.jsonl")
    with pytest.raises(MemoryFormatError, match=re.escape(str(damaged))):
        Memory.open(damaged)


@pytest.mark.parametrize("version", [3, 999, "next"])
def test_a_newer_version_is_named_as_such(version: Any, damaged: Path) -> None:
    """Also when everything else in the manifest is new to us."""
    manifest = json.loads((damaged / "memory.json").read_text())
    for content in ({**manifest, "version": version}, {"format": manifest["format"], "version": version, "new": []}):
        (damaged / "memory.json").write_text(json.dumps(content))
        assert f"version {version}" in refuses(damaged, "memory.json")


def test_a_wrong_line_in_the_middle_of_the_journal_is_an_error_that_names_it(damaged: Path) -> None:
    journal = damaged / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) >= 4
    for number in range(len(lines)):
        for wrong in (b"\n", b"deadbeef" + lines[number][8:], lines[number][:-5] + b"\n", b"{}\n"):
            journal.write_bytes(b"".join([*lines[:number], wrong, *lines[number + 1 :]]))
            assert f"line {number + 1}" in refuses(damaged, "journal.jsonl")
    journal.write_bytes(b"".join([lines[0], lines[2], lines[1], *lines[3:]]))  # right lines in a wrong order
    refuses(damaged, "journal.jsonl")
    journal.write_bytes(b"".join([lines[0], *lines[2:]]))  # one is missing
    with pytest.raises(MemoryFormatError, match=re.escape(str(damaged))):
        Memory.open(damaged)


def test_large_memories_are_checked_when_asked(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a size, opening compares sizes only; `verify` compares every byte."""
    monkeypatch.setattr("longfocus.memory.ondisk.VERIFY_ON_OPEN_BYTES", 0)
    flip(damaged / "kv-002.1.bin", 100)
    with Memory.open(damaged) as memory, pytest.raises(MemoryFormatError, match=r"kv-002\.1\.bin is corrupted"):
        memory.verify()
    (damaged / "text.1.bin").write_bytes(b"")
    with pytest.raises(MemoryFormatError, match=r"text\.1\.bin is truncated"):
        Memory.open(damaged)


@pytest.mark.parametrize("content", ["a folder of texts", "an empty folder", "a file", "nothing"])
def test_what_is_no_memory_says_so(content: str, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    if content == "a file":
        path.write_text("hello")
    elif content != "nothing":
        path.mkdir()
        if content == "a folder of texts":
            (path / "text.txt").write_text("hello")
    with pytest.raises(MemoryFormatError, match=r"memory holds no memory \(there is no memory\.json\)"):
        Memory.open(path)


# -- other models ------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "weights": (lambda: focused(seed=1), "the model's weights"),
    "layers": (lambda: focused(memory_layers=(0, 2)), r"the memory layers \(made with 1, 2, now 0, 2\)"),
    "window": (lambda: focused(window=WINDOW + 1), r"the local window \(made with 16, now 17\)"),
    "overlap": (lambda: focused(overlap=2), r"the overlap of windows \(made with 0, now 2\)"),
    "memory dtype": (lambda: focused(memory_dtype="float16"), r"the storage dtype \(made with float32, now float16\)"),
    "model dtype": (lambda: focused(dtype=torch.bfloat16, memory_dtype="float32"), "the dtype the model computed in"),
    "positions": (
        lambda: focused(memory_positions="none"),
        r"the encoding of memory keys \(made with first, now none\)",
    ),
}


@pytest.mark.parametrize("difference", OTHERS)
def test_another_model_is_refused_with_the_reason(difference: str, sound: Path, words: Any, tmp_path: Path) -> None:
    make, reason = OTHERS[difference]
    other = make()
    with pytest.raises(MemoryMismatchError, match=reason) as refused:
        Memory.open(sound, model=other)
    assert str(sound) in str(refused.value)
    with Memory.open(sound) as memory:
        with pytest.raises(MemoryMismatchError, match=reason):
            other.new_cache(memory)
        with pytest.raises(MemoryMismatchError, match=reason):
            logits(other, question(), memory=memory)
        with pytest.raises(MemoryMismatchError, match=reason):
            other.generate(question(), memory=memory, max_new_tokens=1)
        with pytest.raises(MemoryMismatchError, match=reason):
            Reader(other, words, memory)
        with pytest.raises(MemoryMismatchError, match=reason):
            read_ids(other, [3, 4, 5], memory)
        with pytest.raises(MemoryMismatchError, match=reason):
            Memory(other, words).extend(memory)
        with pytest.raises(MemoryMismatchError, match=reason):
            Memory.merge([memory], other, words)
    with Memory.open(sound, writable=True):  # a refused opening has let go of the lock
        pass
    with pytest.raises(MemoryMismatchError, match=reason):
        Memory.open(sound, model=other, writable=True)
    with Memory.open(sound, writable=True):
        pass


def test_another_tokenizer_is_refused_with_the_reason(sound: Path, model: Any) -> None:
    other = tokenizer("metaspace")
    with pytest.raises(MemoryMismatchError, match="the tokenizer"):
        Memory.open(sound, model=model, tokenizer=other)
    with Memory.open(sound) as memory, pytest.raises(MemoryMismatchError, match="the tokenizer"):
        Reader(model, other, memory)


def test_training_any_one_matrix_makes_another_model(sound: Path) -> None:
    """A fine-tune may touch a few matrices only, and those only a little; here the second half of one at a time."""
    model = focused()
    config = model.focus.config
    with Memory.open(sound) as memory:
        for name, weight in model.named_parameters():
            was = weight.detach().clone()
            with torch.no_grad():
                weight.view(-1)[weight.numel() // 2 :] *= 1.0001
            with pytest.raises(MemoryMismatchError, match="the model's weights"):
                memory.check(longfocus.attach(model, config))
                raise AssertionError(name)
            with torch.no_grad():
                weight.copy_(was)
        memory.check(longfocus.attach(model, config))


def test_how_a_tokenizer_was_called_before_makes_no_other_tokenizer(sound: Path, model: Any) -> None:
    """Truncation and padding of an earlier call stay switched on inside a fast tokenizer."""
    words = talking(None)
    with Memory.open(sound, model=model, tokenizer=words):
        words(["a", "b c d"], truncation=True, max_length=2, padding="max_length")
    with Memory.open(sound, model=model, tokenizer=words):
        pass


def test_a_tokenizer_that_was_saved_and_loaded_is_the_same(sound: Path, model: Any, tmp_path: Path) -> None:
    talking(None).save_pretrained(tmp_path)
    focused().save_pretrained(tmp_path)
    with Memory.open(sound, model=model, tokenizer=longfocus.load_tokenizer(tmp_path)):
        pass


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_was_saved_and_loaded_opens_its_memories(name: str, tmp_path: Path) -> None:
    window = 12 if name == "gemma3_mixed" else WINDOW  # no wider than its sliding layers
    model = longfocus.attach(tiny(name), memory_layers=MEMORY_LAYERS, window=window)
    with Memory.create(tmp_path / "memory", model) as memory:
        read_ids(model, range(3, 50), memory)
        answer = logits(model, question(), memory=memory)
    model.save_pretrained(tmp_path / "model")
    loaded = longfocus.load(tmp_path / "model")
    with Memory.open(tmp_path / "memory", model=loaded) as memory:
        assert torch.equal(logits(loaded, question(), memory=memory), answer)


def test_a_model_that_is_trained_after_attaching_is_another_model(sound: Path, tmp_path: Path) -> None:
    """What it makes from then on can be opened by the trained model, loaded afresh, and what it made before cannot."""
    model = focused()
    with Memory.open(sound, model=model) as memory:  # the model's digest has been asked for now
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight.mul_(1.01)
        with pytest.raises(MemoryMismatchError, match="the model's weights"):
            memory.check(model)
    model.save_pretrained(tmp_path / "model")
    with Memory.create(tmp_path / "memory", model) as memory:
        read_ids(model, [3, 4, 5], memory)
    with Memory.open(tmp_path / "memory", model=longfocus.load(tmp_path / "model")) as memory:
        assert memory.tokens == 3


def test_what_only_concerns_answering_may_differ(sound: Path, words: Any) -> None:
    model = focused(retrieval="exact", k=3, last_window=8, read_span=100)
    with Memory.open(sound, model=model, tokenizer=words) as memory:
        assert logits(model, question(), memory=memory).isfinite().all()


# -- several processes -------------------------------------------------------------------------------------


def test_a_lock_keeps_a_second_writer_out_until_the_first_is_gone(damaged: Path, model: Any, words: Any) -> None:
    child = processes.start("tests.memory.children:hold", str(damaged))
    child.wait_for(lambda: child.said("holding"))
    for _ in range(2):
        with pytest.raises(MemoryLockedError, match=re.escape(str(damaged))):
            Memory.open(damaged, writable=True)
    with Memory.open(damaged, model=model) as memory:
        assert memory.tokens > 0
    second = processes.run("tests.memory.children:hold", str(damaged))
    assert second.code == 1
    assert "MemoryLockedError" in second.err
    child.kill()
    assert child.wait().code == -9
    with Memory.open(damaged, writable=True), pytest.raises(MemoryLockedError):
        Memory.open(damaged, writable=True)
    with Memory.open(damaged, writable=True):
        pass


def test_of_two_processes_that_make_the_same_memory_one_is_refused(texts: list[Path], tmp_path: Path) -> None:
    expected = None
    for attempt in range(3):
        folder = tmp_path / f"memory {attempt}"
        children = [processes.start("tests.memory.children:remember", str(folder), str(texts[0])) for _ in range(2)]
        ended = [child.wait() for child in children]
        assert sorted(end.code for end in ended) == [0, 1], ended
        assert any("MemoryLockedError" in end.err or "MemoryWriteError" in end.err for end in ended)
        with Memory.open(folder) as memory:
            expected = expected or held(memory)
            assert_same(held(memory), expected)


def test_readers_see_whole_windows_while_another_process_writes(
    texts: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    folder = tmp_path / "memory"
    assert processes.run("tests.memory.children:remember", str(folder), str(texts[0])).code == 0
    with Memory.open(folder) as memory:
        once = held(memory)
    per_text = once.tokens
    early = Memory.open(folder)
    child = processes.start("tests.memory.children:write_until_killed", str(folder), str(texts[0]))
    child.wait_for(lambda: child.said("writing"))
    sizes = set()
    while len(sizes) < 12:
        with Memory.open(folder, model=model, tokenizer=words) as memory:
            memory.verify()
            sizes.add(memory.tokens)
            now = held(memory)
            for number, document in enumerate(memory.documents):
                assert document.start == number * per_text
                part = slice(document.start, document.stop)
                assert now.rows[part] == once.rows[: document.tokens]
                for layer, records in now.records.items():
                    assert torch.equal(records[part], once.records[layer][: document.tokens])
            assert sum(document.tokens for document in memory.documents) == memory.tokens
            assert memory.tokens % per_text % WINDOW == 0
    assert child.is_running
    assert_same(held(early), once)  # opened before, read for the first time now
    child.kill()
    assert child.wait().code == -9
    assert_same(held(early), once)
    early.close()


def test_a_reader_that_was_open_before_a_clear_still_reads(
    texts: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    in_ram(model, texts[0]).save(tmp_path / "memory")
    expected = held(in_ram(model, texts[0]))
    untouched, used = Memory.open(tmp_path / "memory"), Memory.open(tmp_path / "memory")
    assert_same(held(used), expected)
    answer = logits(model, question(), memory=used)
    with Memory.open(tmp_path / "memory", model=model, tokenizer=words, writable=True) as writer:
        writer.clear()
        read(model, writer, texts[1])
    for reader in (untouched, used):
        assert_same(held(reader), expected)
        assert torch.equal(logits(model, question(), memory=reader), answer)
        reader.close()
    with Memory.open(tmp_path / "memory") as memory:
        assert_same(held(memory), held(in_ram(model, texts[1])))


# -- extend, merge, clear, save ----------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["ram", "disk"])
@pytest.mark.parametrize("source", ["ram", "disk"])
def test_extending_gives_what_reading_both_gives(
    source: str, target: str, texts: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    with where(target, tmp_path / "target", model, words) as memory:
        read(model, memory, texts[1])
        with where(source, tmp_path / "source", model, words) as other:
            read(model, other, texts[0])
            memory.extend(other)
            assert_same(held(other), held(in_ram(model, texts[0])))
        assert_same(held(memory), held(in_ram(model, texts[1], texts[0])))
        read(model, memory, texts[1])
        assert_same(held(memory), held(in_ram(model, texts[1], texts[0], texts[1])))
    if target == "disk":
        with Memory.open(tmp_path / "target") as memory:
            assert_same(held(memory), held(in_ram(model, texts[1], texts[0], texts[1])))


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_a_memory_can_be_added_to_itself(place: str, texts: list[Path], tmp_path: Path, model: Any, words: Any) -> None:
    with where(place, tmp_path / "memory", model, words) as memory:
        read(model, memory, *texts)
        memory.extend(memory)
        assert_same(held(memory), held(in_ram(model, *texts, *texts)))


def test_merging_gives_what_reading_all_gives(texts: list[Path], tmp_path: Path, model: Any, words: Any) -> None:
    in_ram(model, texts[0]).save(tmp_path / "memory")
    with Memory.open(tmp_path / "memory") as first:
        merged = Memory.merge([first, in_ram(model, texts[1])], model, words)
    assert_same(held(merged), held(in_ram(model, *texts)))
    assert_same(held(Memory.merge([], model, words)), held(Memory(model, words)))


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_an_extension_that_fails_leaves_the_memory_as_it_was(
    place: str, texts: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    """The other memory's files become shorter while they are copied: a half-copied document would be a trap."""
    in_ram(model, texts[1], texts[0]).save(tmp_path / "other")
    expected = held(in_ram(model, texts[1], texts[1]))
    for name, kept in (("kv-002.1.bin", 1000), ("tokens.1.bin", 10), ("text.1.bin", 300)):
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        shutil.rmtree(tmp_path / "memory", ignore_errors=True)
        shutil.copytree(tmp_path / "other", tmp_path / "damaged")
        with where(place, tmp_path / "memory", model, words) as memory, Memory.open(tmp_path / "damaged") as other:
            read(model, memory, texts[1])
            before = held(memory)
            if name == "kv-002.1.bin":  # a shortened map would end the process; a copy that is interrupted will do
                other.store.chunks = lambda *_, **__: iter(_interrupted())  # type: ignore[method-assign]
            else:
                os.truncate(tmp_path / "damaged" / name, kept)
            with pytest.raises((MemoryFormatError, KeyboardInterrupt)):
                memory.extend(other)
            for document in memory.documents:
                assert document.complete
                assert len(memory.text_of(document)) == document.chars
            after = held(memory)
            assert_same(
                Held(
                    before.tokens,
                    after.up_to(before.tokens).records,
                    after.rows[: before.tokens],
                    after.texts[:1],
                    after.documents[:1],
                ),
                before,
            )
            if memory.tokens == before.tokens:
                read(model, memory, texts[1])
                assert_same(held(memory), expected)
            else:
                read(model, memory, texts[0])


def _interrupted() -> Iterator[Any]:
    raise KeyboardInterrupt
    yield


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_a_cleared_memory_is_as_good_as_new(
    place: str, texts: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    with where(place, tmp_path / "memory", model, words) as memory:
        for paths in (texts, texts[::-1], texts[1:]):
            read(model, memory, *paths)
            assert_same(held(memory), held(in_ram(model, *paths)))
            if place == "disk":
                with Memory.open(tmp_path / "memory") as reopened:
                    assert_same(held(reopened), held(in_ram(model, *paths)))
            memory.clear()
            assert (memory.tokens, memory.documents, memory.nbytes) == (0, (), 0)
            assert torch.equal(logits(model, question(), memory=memory), logits(model, question()))
    if place == "disk":
        assert not list((tmp_path / "memory").glob("*.1.bin")), "what was cleared takes no space"


@pytest.mark.parametrize("method", ["save", "create"])
def test_a_folder_that_holds_something_is_refused_and_left_alone(
    method: str, texts: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "letter.txt").write_text("keep me")
    in_ram(model, texts[1]).save(tmp_path / "memory")
    present = sorted((tmp_path / "memory").iterdir())
    for target in (folder, tmp_path / "memory", folder / "letter.txt"):
        with pytest.raises(MemoryWriteError, match=re.escape(str(target))):
            if method == "save":
                in_ram(model, texts[1]).save(target)
            else:
                Memory.create(target, model, words)
    assert (folder / "letter.txt").read_text() == "keep me"
    assert [path.name for path in folder.iterdir()] == ["letter.txt"]
    assert sorted((tmp_path / "memory").iterdir()) == present
    with Memory.open(tmp_path / "memory") as memory:
        assert_same(held(memory), held(in_ram(model, texts[1])))


def test_saving_into_an_empty_folder_or_a_new_one_below_others_works(
    texts: list[Path], tmp_path: Path, model: Any
) -> None:
    memory = in_ram(model, texts[1])
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "new" / "folder" / "below"):
        memory.save(target)
        with Memory.open(target) as saved:
            assert_same(held(saved), held(memory))
        assert sorted(path.name for path in target.parent.iterdir() if "unfinished" in path.name) == []


def test_saving_that_is_interrupted_leaves_nothing_and_can_be_done_again(
    texts: list[Path], tmp_path: Path, model: Any
) -> None:
    memory = in_ram(model, *texts)
    chunks, calls = memory.store.chunks, 0

    def interrupted(*where: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:  # the second document's second layer
            raise KeyboardInterrupt
        return chunks(*where)

    memory.store.chunks = interrupted  # type: ignore[method-assign]
    (tmp_path / "disk").mkdir()
    with pytest.raises(KeyboardInterrupt):
        memory.save(tmp_path / "disk" / "memory")
    assert list((tmp_path / "disk").iterdir()) == []
    memory.save(tmp_path / "disk" / "memory")
    with Memory.open(tmp_path / "disk" / "memory") as saved:
        assert_same(held(saved), held(in_ram(model, *texts)))


@pytest.mark.parametrize("action", ["read", "read ids", "extend", "clear"])
def test_a_memory_opened_for_reading_refuses_writing(
    action: str, sound: Path, texts: list[Path], model: Any, words: Any
) -> None:
    before = {path.name: path.read_bytes() for path in sound.iterdir()}
    with Memory.open(sound, model=model, tokenizer=words) as memory:
        assert not memory.writable
        held_before = held(memory)
        with pytest.raises(MemoryStoreError, match="writable=True"):
            if action == "read":
                Reader(model, words, memory).read(source_of(texts[1]))
            elif action == "read ids":
                read_ids(model, [3, 4, 5], memory)
            elif action == "extend":
                memory.extend(in_ram(model, texts[1]))
            else:
                memory.clear()
        assert_same(held(memory), held_before)
    assert {path.name: path.read_bytes() for path in sound.iterdir()} == before


def test_a_closed_memory_refuses_writing_and_may_be_closed_again(tmp_path: Path, model: Any, words: Any) -> None:
    memory = Memory.create(tmp_path / "memory", model, words)
    memory.close()
    memory.close()
    with pytest.raises(MemoryStoreError):
        read_ids(model, [3, 4, 5], memory)
    with Memory.open(tmp_path / "memory", writable=True) as again:
        assert again.tokens == 0


# -- full disks --------------------------------------------------------------------------------------------


def test_a_full_disk_stops_with_an_error_and_keeps_what_was_committed(
    small_disk: Callable[[int], Path], texts: list[Path], model: Any, words: Any
) -> None:
    """Disks of ever more pages, so that the disk is full at ever other writes; then there is room, and reading goes on."""
    expected = held(in_ram(model, *texts))
    committed = set()
    for kib in range(12, 120, 9):
        disk = small_disk(kib)
        try:
            memory = Memory.create(disk / "memory", model, words)
        except MemoryWriteError as error:
            assert "full" in str(error)
            continue
        with memory:
            with pytest.raises(MemoryWriteError, match=r"disk is full: .* could not be written") as refused:
                read(model, memory, *texts)
            assert str(disk / "memory") in str(refused.value)
            assert_begins(held(memory), expected)  # the object that met the full disk
        with Memory.open(disk / "memory") as reopened:
            reopened.verify()
            assert_begins(held(reopened), expected)
            committed.add(reopened.tokens)
        grow(disk, 4096)
        with Memory.open(disk / "memory", model=model, tokenizer=words, writable=True) as memory:
            reader = Reader(model, words, memory)
            for path in texts:
                if not_remembered(memory, [source_of(path)]):
                    reader.read(source_of(path))
            assert_same(held(memory), expected)
    assert len(committed) >= 5, committed


def test_the_object_that_met_a_full_disk_can_go_on_when_there_is_room(
    small_disk: Callable[[int], Path], texts: list[Path], model: Any, words: Any
) -> None:
    disk = small_disk(100)
    with Memory.create(disk / "memory", model, words) as memory:
        with pytest.raises(MemoryWriteError):
            read(model, memory, *texts)
        assert memory.tokens > 0
        grow(disk, 4096)
        read(model, memory, *texts)
        assert_same(held(memory), held(in_ram(model, *texts)))
    with Memory.open(disk / "memory") as reopened:
        assert_same(held(reopened), held(in_ram(model, *texts)))


def test_a_memory_that_cannot_be_made_or_saved_leaves_nothing_behind(
    small_disk: Callable[[int], Path], texts: list[Path], model: Any, words: Any
) -> None:
    for kib in (4, 8, 100):
        disk = small_disk(kib)
        for _ in range(2):
            with pytest.raises(MemoryWriteError, match=r"full|No space"):
                in_ram(model, *texts).save(disk / "memory")
            assert [path.name for path in disk.iterdir()] == []
    disk = small_disk(4)
    (disk / "letter").write_bytes(b"x" * 4096)
    with pytest.raises(MemoryWriteError, match="full"):
        Memory.create(disk / "memory", model, words)
    assert not (disk / "memory" / "memory.json").exists()
    grow(disk, 4096)
    with Memory.create(disk / "memory", model, words) as memory:
        read(model, memory, texts[1])
        assert_same(held(memory), held(in_ram(model, texts[1])))


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path, model: Any, words: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    for target in (tmp_path / "file" / "memory", Path("/proc/memory"), tmp_path / ("x" * 300)):
        with pytest.raises(MemoryWriteError) as refused:
            Memory.create(target, model, words)
        assert str(target) in str(refused.value)
        with pytest.raises(MemoryWriteError):
            Memory(model, words).save(target)


# -- interruptions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("moment", ["progress", "first layer", "last layer"])
@pytest.mark.parametrize("at_once", [1, 3])
def test_interrupted_reading_goes_on_and_equals_an_unbroken_one(
    at_once: int,
    moment: str,
    place: str,
    texts: list[Path],
    tmp_path: Path,
    words: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At each pass in turn, also the first and the last one; the same reader goes on, or another one does."""
    monkeypatch.setattr(reading_pass, "PASS_TOKENS", at_once * WINDOW)
    model = focused()
    expected = held(in_ram(model, *texts))
    step = at_once * WINDOW
    for at in range(-(-expected.documents[1]["tokens"] // step)):
        with where(place, tmp_path / f"memory {at}", model, words) as memory:
            reader = Reader(model, words, memory)
            reader.read(source_of(texts[0]))
            stop = Stopper(at)
            layers = model.model.layers
            hook = None
            if moment != "progress":
                hook = layers[0 if moment == "first layer" else -1].register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                reader.read(source_of(texts[1]), stop if moment == "progress" else None)
            if hook is not None:
                hook.remove()
            assert_begins(held(memory), expected)
            done = (at + 1 if moment == "progress" else at) * step
            assert memory.tokens == min(expected.documents[0]["tokens"] + done, expected.tokens)
            assert logits(model, question(), memory=memory).isfinite().all()
            if at % 2:
                reader = Reader(model, words, memory)
            if not_remembered(memory, [source_of(texts[1])]):
                reader.read(source_of(texts[1]))
            assert_same(held(memory), expected)
        if place == "disk":
            with Memory.open(tmp_path / f"memory {at}") as reopened:
                assert_same(held(reopened), expected)


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_an_interrupted_pdf_knows_its_pages_and_goes_on(place: str, tmp_path: Path, model: Any, words: Any) -> None:
    path = tmp_path / "paper.pdf"
    path.write_bytes(pdf([[f"Page {page} has line {line}." for line in range(page)] for page in range(1, 9)]))
    expected = held(in_ram(model, path))
    with where(place, tmp_path / "memory", model, words) as memory:
        reader = Reader(model, words, memory)
        with pytest.raises(KeyboardInterrupt):
            reader.read(source_of(path), Stopper(9))
        document = memory.documents[0]
        assert document.tokens == 10 * WINDOW
        text = memory.text_of(document)
        page = int(text[: text.rindex(" has line")].rpartition("Page ")[2])
        assert memory.place(document, text, text.rindex("Page ")).page == page > 1
        reader.read(source_of(path))
        assert_same(held(memory), expected)


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_reading_ids_that_is_interrupted_leaves_whole_windows(place: str, tmp_path: Path) -> None:
    model = focused()
    ids = list(range(3, 3 + 4 * WINDOW))
    with where(place, tmp_path / "memory", model, None) as memory:
        hook = model.model.layers[2].register_forward_pre_hook(Stopper(2))
        with pytest.raises(KeyboardInterrupt):
            read_ids(model, ids, memory)
        hook.remove()
        whole = Memory(model)
        read_ids(model, ids, whole)
        assert memory.tokens == 2 * WINDOW
        assert_begins(held(memory), held(whole))
        read_ids(model, ids, memory, "again")
        assert held(memory).rows[2 * WINDOW :] == held(whole).rows
        for layer in (1, 2):
            assert torch.equal(held(memory).records[layer][2 * WINDOW :], held(whole).records[layer])


class InterruptedRecords(dict):
    """Records whose reader is interrupted after it took so many layers' tensors, counted over all its rounds."""

    left = 0

    def items(self) -> Any:
        for item in super().items():
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield item


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("taken", range(5))
def test_an_append_that_is_interrupted_halfway_is_as_if_it_had_never_been(
    taken: int, place: str, tmp_path: Path, model: Any
) -> None:
    """Ctrl-C between two layers' records, or between two blocks of RAM; 9,000 records fill three blocks."""
    ids = range(3, 3 + WINDOW)
    with where(place, tmp_path / "memory", model, None) as memory:
        read_ids(model, ids, memory)
        before = held(memory)
        records = InterruptedRecords({layer: torch.ones(1, 9000, 2, 2, 8) for layer in (1, 2)})
        records.left = taken
        with contextlib.suppress(KeyboardInterrupt):  # on disk the whole append takes two
            memory.store.append(records)
        memory.rollback()
        assert_same(held(memory), before)
        read_ids(model, ids, memory)
        after = held(memory)
        assert after.rows == before.rows * 2
        for layer in (1, 2):
            assert torch.equal(after.records[layer], before.records[layer].repeat(2, 1, 1, 1))


def test_a_file_that_grew_after_an_interruption_is_remembered_as_it_is_now(
    texts: list[Path], model: Any, words: Any
) -> None:
    memory = Memory(model, words)
    reader = Reader(model, words, memory)
    with pytest.raises(KeyboardInterrupt):
        reader.read(source_of(texts[0]), Stopper(3))
    with texts[0].open("ab") as file:
        file.write(b"One more line.\n")
    reader.read(source_of(texts[0]))
    assert_same(held(memory), held(in_ram(model, texts[0])))
    assert not not_remembered(memory, [source_of(texts[0])])


def test_a_file_that_changed_after_an_interruption_is_read_anew(texts: list[Path], model: Any, words: Any) -> None:
    memory = Memory(model, words)
    reader = Reader(model, words, memory)
    with pytest.raises(KeyboardInterrupt):
        reader.read(source_of(texts[0]), Stopper(3))
    texts[0].write_text("Something else entirely, " * 30)
    document = reader.read(source_of(texts[0]))
    assert memory.text_of(document) == texts[0].read_text()
    assert [document.complete for document in memory.documents] == [False, True]
    alone = held(in_ram(model, texts[0]))
    for layer in (1, 2):
        assert torch.equal(held(memory).records[layer][document.start :], alone.records[layer])


@pytest.mark.parametrize("change", ["content", "time", "gone from memory"])
def test_only_the_very_same_file_is_remembered(change: str, texts: list[Path], model: Any, words: Any) -> None:
    memory = in_ram(model, texts[1])
    assert not not_remembered(memory, [source_of(texts[1])])
    assert not_remembered(memory, [source_of(texts[0])])
    if change == "content":
        with texts[1].open("ab") as file:
            file.write(b"x")
    elif change == "time":
        os.utime(texts[1], ns=(1, 1))
    else:
        memory.clear()
    assert not_remembered(memory, [source_of(texts[1])])


def test_progress_adds_up_to_the_document(texts: list[Path], model: Any, words: Any) -> None:
    memory = Memory(model, words)
    steps: list[Progress] = []
    document = Reader(model, words, memory).read(source_of(texts[0]), steps.append)
    assert sum(step.tokens for step in steps) == document.tokens == memory.tokens
    assert [step.document.tokens for step in steps] == list(np.cumsum([step.tokens for step in steps]))
    assert [step.tokens for step in steps[:-1]] == [WINDOW] * (len(steps) - 1)
    assert steps[-1].source_bytes == texts[0].stat().st_size


# -- no pickle ---------------------------------------------------------------------------------------------

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib", "marshal", "jsonpickle"}
CALLS = {("torch", "save"), ("torch", "load"), ("np", "load"), ("np", "save"), ("np", "savez"), ("numpy", "load")}


def test_nothing_in_the_package_pickles() -> None:
    files = sorted(Path(longfocus.__file__).parent.rglob("*.py"))
    assert len(files) > 30
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").partition(".")[0]]
            assert not PICKLES & set(names), f"{path.name}:{node.lineno}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in CALLS, f"{path.name}:{node.lineno}"


def test_a_saved_memory_is_json_and_raw_numbers(sound: Path, model: Any) -> None:
    """Read without the package, as docs/formats.md describes it."""
    manifest = json.loads((sound / "memory.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("longfocus-memory", 1)
    lines = [json.loads(line[9:]) for line in (sound / "journal.jsonl").read_text().splitlines()]
    tokens, text_bytes = lines[-1]["tokens"], lines[-1]["text_bytes"]
    with Memory.open(sound) as memory:
        assert memory.tokens == tokens
        table = np.fromfile(sound / "tokens.1.bin", [("char", "<u8"), ("byte", "<u8"), ("id", "<u4")])
        assert table.tolist() == held(memory).rows
        text = (sound / "text.1.bin").read_bytes()
        assert (len(text), text.decode()) == (text_bytes, memory.text_of(memory.documents[0]))
        for layer in manifest["geometry"]["layers"]:
            raw = np.fromfile(sound / f"kv-{layer:03d}.1.bin", "<f4").reshape(tokens, 2, 2, 8)
            assert np.array_equal(raw, held(memory).records[layer].numpy())


def test_sources_found_by_the_public_function_can_be_read(
    texts: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    """The example of the module's docstring."""
    with Memory.create(tmp_path / "memory", model, words) as memory:
        for source in find_sources(texts).sources:
            Reader(model, words, memory).read(source)
    with Memory.open(tmp_path / "memory") as memory:
        assert [document.complete for document in memory.documents] == [True, True]
        out = model.generate(question(), memory=memory, max_new_tokens=3, do_sample=False)
    assert out.shape == (1, question().shape[1] + 3)
