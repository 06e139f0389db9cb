"""Documents of a memory are found, chosen, removed, replaced; what is left answers as if nothing else had ever been there.

Tiny random Llama, real files, real processes, real kills. A plain list of texts is the model that random sequences of
operations are compared with.

    python -m pytest tests/memory/test_documents.py
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longfocus import Memory, Reader, read_ids
from longfocus.analysis.attribution import passages, token_mass, window_starts
from longfocus.errors import (
    DocumentNotFoundError,
    MemoryFormatError,
    MemoryMismatchError,
    MemoryStoreError,
    MemoryWriteError,
)
from longfocus.memory.context import MassRecorder
from longfocus.memory.contract import CHUNK_TOKENS
from longfocus.memory.documents import TOKEN_DTYPE, Document, matching, ranges_of
from longfocus.model.updating import compare, settle, vanished
from tests import processes
from tests.machine import grow
from tests.memory.saved import (
    WINDOW,
    Held,
    Stopper,
    assert_same,
    focused,
    held,
    in_ram,
    question,
    read,
    source_of,
    where,
)
from tests.models import logits

KILLS = 10
FUSED = {"atol": 2e-5, "rtol": 1e-4}
"""Float32 sums of the same terms in another order: other borders of chunks."""


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Four files of about 10, 30, 60 and 100 tokens, in two folders."""
    paths = [tmp_path / name for name in ("a.txt", "docs/b.md", "docs/c.md", "docs/deep/d.md")]
    (tmp_path / "docs/deep").mkdir(parents=True)
    for number, path in enumerate(paths):
        count = (3, 8, 16, 30)[number]
        path.write_text("".join(f"{number} and {line}: neither here nor there.\n" for line in range(count)))
    return paths


def live(memory: Memory) -> Held:
    """What a memory holds of its documents, as if nothing else were in it: numbers count from 0."""
    whole = held(memory)
    keep = [number for low, high in memory.ranges for number in range(low, high)]
    documents, at, text_at = [], 0, 0
    for number, document in enumerate(whole.documents):
        documents.append({**document, "id": number, "start": at, "text_start": text_at})
        at, text_at = at + document["tokens"], text_at + document["text_bytes"]
    records = {layer: kv[keep] for layer, kv in whole_records(memory).items()}
    rows = memory._backend.read_table(0, memory.extent).tolist()
    return Held(len(keep), records, [rows[number] for number in keep], whole.texts, documents)


def whole_records(memory: Memory) -> dict[int, torch.Tensor]:
    records = {}
    for layer in memory.geometry.layers:
        pieces = [
            chunk.records[0] for chunk in memory.store.chunks(layer, 0, memory.extent) if chunk.records is not None
        ]
        shape = (0, 2, memory.geometry.kv_heads, memory.geometry.head_dim)
        empty = torch.zeros(shape, dtype=getattr(torch, memory.geometry.dtype))
        records[layer] = torch.cat([empty, *pieces])
    return records


def random_memory(model: Any, sizes: list[int], seed: int = 0) -> Memory:
    """Documents of random records in RAM."""
    generator = torch.Generator().manual_seed(seed)
    memory = Memory(model)
    for number, count in enumerate(sizes):
        document = memory.begin_document(f"{number}", kind="ids")
        rows = np.zeros(count, dtype=TOKEN_DTYPE)
        rows["id"] = np.arange(count) % 90
        memory.store.append({layer: torch.randn(1, count, 2, 2, 8, generator=generator) for layer in (1, 2)})
        memory.commit_window(document, rows, b"", 0, complete=True)
    return memory


def without(memory: Memory, model: Any, *names: str) -> Memory:
    """A memory that never had these documents."""
    other = Memory(model)
    for document in memory.documents:
        if document.name not in names:
            other.extend(memory.select(document))
    return other


# -- names and patterns ------------------------------------------------------------------------------------


def test_patterns_mean_a_name_then_a_glob_then_a_folder() -> None:
    named = [("docs/a.md", "/x/docs/a.md"), ("docs/sub/b.md", "/x/docs/sub/b.md"), ("*.md", None), ("docs", "/x/docs")]
    assert matching("docs/a.md", named) == [0]
    assert matching("/x/docs/a.md", named) == [0]
    assert matching("docs/*.md", named) == [0, 1], "as in git, * crosses folders"
    assert matching("*.md", named) == [2], "a document of that very name comes before the glob"
    assert matching("docs", named) == [3]
    assert matching("docs/sub", named) == matching("docs/sub/", named) == [1]
    assert matching("doc", named) == matching("DOCS/a.md", named) == matching("", []) == []


def test_unknown_names_are_errors_that_say_what_is_near(files: list[Path], model: Any) -> None:
    memory = in_ram(model, *files)
    with pytest.raises(DocumentNotFoundError, match=r"has no document '.*/a.tx'\. Did you mean '.*/a\.txt'\?"):
        memory.remove(str(files[1]), f"{files[0].parent}/a.tx")
    with pytest.raises(DocumentNotFoundError, match=r"Did you mean '.*/docs/deep/d\.md'\?"):
        memory.select("d.md")
    with pytest.raises(DocumentNotFoundError, match=r"It holds '.*/a\.txt', "):
        memory.find("*.nothing")
    assert len(memory.documents) == 4, "one wrong pattern, and nothing is removed"
    with pytest.raises(DocumentNotFoundError, match="holds no documents"):
        Memory(model).find("x")


def test_ranges_join_neighbours_and_leave_out_what_is_empty() -> None:
    def document(start: int, tokens: int) -> Document:
        return Document(0, "x", start, tokens, 0, 0, 0)

    assert ranges_of([document(0, 5), document(5, 0), document(5, 3), document(9, 0), document(10, 1)]) == (
        (0, 8),
        (10, 11),
    )
    assert ranges_of([]) == ranges_of([document(3, 0)]) == ()


# -- answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("options", [{}, {"retrieval": "exact", "k": 5}, {"memory_positions": "none"}])
def test_answers_after_a_removal_are_those_of_a_memory_that_never_had_it(
    place: str, options: dict[str, Any], files: list[Path], tmp_path: Path, words: Any
) -> None:
    """Removed first: what is left lies in one piece, and logits are the same bits. In the middle: two pieces."""
    model = focused(**options)
    asked = question(3 * WINDOW)
    for gone in (0, 2, 3):
        left = files[:gone] + files[gone + 1 :]
        with where(place, tmp_path / f"memory {gone}", model, words) as memory:
            read(model, memory, *files)
            expected = in_ram(model, *left)
            before = logits(model, asked, memory=memory)
            removed = memory.remove(str(files[gone]))
            assert [document.path for document in removed] == [str(files[gone])]
            assert [document.path for document in memory.documents] == list(map(str, left))
            assert (memory.tokens, memory.nbytes) == (expected.tokens, expected.nbytes)
            assert memory.extent == memory.tokens + removed[0].tokens
            assert_same(live(memory), held(expected))
            wanted, found = logits(model, asked, memory=expected), logits(model, asked, memory=memory)
            if gone in (0, 3):
                assert torch.equal(found, wanted)
            torch.testing.assert_close(found, wanted, **FUSED)
            assert (before - wanted).abs().max() > 1e-3, "the removed document made a difference"
            answers = [
                model.generate(asked, memory=each, max_new_tokens=WINDOW, do_sample=False)
                for each in (memory, expected)
            ]
            assert torch.equal(*answers)
            memory.compact()
            assert_same(held(memory), held(expected))
            assert torch.equal(logits(model, asked, memory=memory), wanted), "compacted: the same bits"


@pytest.mark.parametrize("retrieval", [{}, {"retrieval": "exact", "k": 9}])
def test_holes_across_chunks(retrieval: dict[str, Any]) -> None:
    """Thousands of records; removed pieces at, before and behind the borders of chunks, and a whole chunk."""
    model = focused(**retrieval)
    sizes = [CHUNK_TOKENS, 1, CHUNK_TOKENS - 2, 7, 100, 2 * CHUNK_TOKENS, 50]
    for names in (["0"], ["1"], ["2", "3"], ["5"], ["0", "2", "4", "6"], ["1", "3", "5"], list("012345")):
        memory = random_memory(model, sizes)
        expected = without(memory, model, *names)
        memory.remove(*names)
        found, wanted = logits(model, question(), memory=memory), logits(model, question(), memory=expected)
        if names == ["0"]:  # the rest moves by a whole chunk
            assert torch.equal(found, wanted)
        torch.testing.assert_close(found, wanted, **FUSED)


def test_nothing_is_left_and_the_memory_adds_nothing(files: list[Path], model: Any) -> None:
    memory = in_ram(model, *files)
    memory.remove(*memory.documents)
    assert (memory.tokens, memory.documents, memory.ranges) == (0, (), ())
    assert torch.equal(logits(model, question(), memory=memory), logits(model, question()))
    read(model, memory, files[2])
    assert torch.equal(
        logits(model, question(), memory=memory), logits(model, question(), memory=in_ram(model, files[2]))
    )


@pytest.mark.parametrize("span", [0, 5, 40, 10_000])
def test_looking_back_counts_only_what_may_be_seen(span: int, model: Any) -> None:
    """`read_span` over a memory with holes: the last so many records that are left, for one row and for several."""
    looking = focused(read_span=span)
    memory = random_memory(looking, [30, 20, 25, 10])
    expected = without(memory, looking, "1", "3")
    memory.remove("1", "3")
    ids = torch.arange(3, 3 + 4 * WINDOW).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, : 2 * WINDOW + 3] = 0
    for rows in (slice(0, 1), slice(0, 2)):
        found, wanted = (
            looking(ids[rows], attention_mask=mask[rows], memory=each).logits for each in (memory, expected)
        )
        torch.testing.assert_close(found, wanted, **FUSED)


# -- chosen documents --------------------------------------------------------------------------------------


def test_a_question_to_chosen_documents_sees_no_others(
    files: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    in_ram(model, *files).save(tmp_path / "memory")
    with Memory.open(tmp_path / "memory") as memory:
        docs = memory.select("*/docs/*.md")
        assert [document.path for document in docs.documents] == list(map(str, files[1:]))
        assert not docs.writable
        for chosen, paths in ((docs, files[1:]), (memory.select(str(files[3]), str(files[0])), [files[0], files[3]])):
            expected = in_ram(model, *paths)
            assert_same(live(chosen), held(expected))
            torch.testing.assert_close(
                logits(model, question(), memory=chosen), logits(model, question(), memory=expected), **FUSED
            )
            chosen.save(tmp_path / f"copy {len(paths)}")
            with Memory.open(tmp_path / f"copy {len(paths)}") as copy:
                assert_same(held(copy), held(expected))
            chosen.close()
        assert torch.equal(
            logits(model, question(), memory=memory), logits(model, question(), memory=in_ram(model, *files))
        )


def test_a_view_is_for_reading_and_follows_removals_but_not_compaction(
    files: list[Path], model: Any, words: Any
) -> None:
    memory = in_ram(model, *files)
    view = memory.select("*.md")
    cache = model.new_cache(view)
    for action in (
        lambda: Reader(model, words, view).read(source_of(files[0])),
        lambda: view.extend(memory),
        lambda: view.remove(str(files[1])),
        view.compact,
        view.clear,
    ):
        with pytest.raises(MemoryWriteError, match="chosen by select"):
            action()
    assert memory.extent == memory.tokens
    memory.remove(str(files[1]))
    assert [document.path for document in view.documents] == list(map(str, files[2:]))
    with torch.no_grad():
        model(question(), cache=cache)
    memory.compact()
    with pytest.raises(MemoryStoreError, match="select again"):
        _ = view.documents
    with pytest.raises(MemoryStoreError, match="start a new cache"), torch.no_grad():
        model(question(), cache=cache)


def test_memories_whose_keys_carry_their_place_are_not_reduced(tmp_path: Path) -> None:
    model = focused(memory_positions="absolute")
    memory = Memory(model)
    read_ids(model, range(3, 60), memory, "x")
    for action in (memory.remove, memory.select):
        with pytest.raises(MemoryMismatchError, match="absolute"):
            action("x")


def test_a_document_of_another_state_is_refused(files: list[Path], model: Any) -> None:
    memory = in_ram(model, *files)
    first, second = memory.documents[:2]
    memory.remove(first)
    for action in (memory.remove, memory.select):
        with pytest.raises(DocumentNotFoundError, match=r"does not hold .*a\.txt"):
            action(first)
    memory.compact()
    with pytest.raises(DocumentNotFoundError, match="any more"):
        memory.remove(second)
    assert memory.compact() == 0


# -- what an answer drew on --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"retrieval": "exact", "k": 7}])
@pytest.mark.parametrize("how", ["removed", "not chosen"])
def test_masses_and_passages_are_those_of_the_documents_that_are_left(
    options: dict[str, Any], how: str, files: list[Path]
) -> None:
    model = focused(**options)
    memory = in_ram(model, *files)
    expected = in_ram(model, files[1], files[3])
    if how == "removed":
        memory.remove(str(files[0]), str(files[2]))
    else:
        memory = memory.select(str(files[1]), str(files[3]))
    results = []
    for each in (memory, expected):
        cache = model.new_cache(each)
        cache.recorder = MassRecorder(each.extent)
        with torch.no_grad():
            model(question(), cache=cache)
        cache.recorder.queries = question().shape[1]
        results.append(token_mass(cache.recorder))
    found, wanted = results
    seen = np.zeros(memory.extent, dtype=bool)
    for low, high in memory.ranges:
        seen[low:high] = True
    assert found[~seen].sum() == 0
    assert wanted.sum() > 0.01
    np.testing.assert_allclose(found[seen], wanted, atol=1e-6)
    assert window_starts(memory)[seen].tolist() == window_starts(expected).tolist()
    assert not window_starts(memory)[~seen].any()
    mine, theirs = passages(memory, found, 50), passages(expected, wanted, 50)
    assert {(passage.place.document, passage.text) for passage in mine} == {
        (passage.place.document, passage.text) for passage in theirs
    }
    np.testing.assert_allclose([passage.mass for passage in mine], [passage.mass for passage in theirs], atol=1e-6)


# -- random sequences --------------------------------------------------------------------------------------

STEPS = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 4), st.integers(0, 3)),
    st.tuples(st.just("remove"), st.integers(0, 4), st.just(0)),
    st.tuples(st.just("update"), st.integers(0, 4), st.integers(0, 3)),
    st.tuples(st.sampled_from(["compact", "reopen", "save", "clear"]), st.just(0), st.just(0)),
)
VERSIONS = ("One, two.", "It was late, and again it was late; and so on.\n" * 3, "x" * 40, "Никто не знал.\n" * 5)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=2, max_size=12), place=st.sampled_from(["ram", "disk"]))
def test_a_random_sequence_leaves_what_a_plain_list_of_texts_says(
    steps: list[tuple[str, int, int]], place: str, model: Any, words: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        base, copies = Path(folder), 0
        memory = where(place, base / "memory", model, words)
        expected: list[tuple[str, str]] = []  # path and text of each document, in order
        encoded: dict[str, Held] = {}
        for number, (action, which, version) in enumerate(steps):
            path = base / f"{which}.txt"
            if action in ("read", "update"):
                path.write_text(VERSIONS[version])
                os.utime(path, ns=(number + 1, number + 1))
            mine = [item for item in expected if item[0] == str(path)]
            if action == "read":
                Reader(model, words, memory).read(source_of(path))
                expected.append((str(path), VERSIONS[version]))
            elif action == "remove":
                if mine:
                    memory.remove(str(path))
                expected = [item for item in expected if item[0] != str(path)]
            elif action == "update":
                changes = compare(memory, [source_of(path)])
                settle(memory, changes)
                for source in changes.to_read:
                    Reader(model, words, memory).read(source, replace=True)
                if mine and mine[-1][1] == VERSIONS[version]:
                    at = max(place for place, item in enumerate(expected) if item == mine[-1])
                    expected = [item for place, item in enumerate(expected) if place == at or item[0] != str(path)]
                else:
                    expected = [*(item for item in expected if item[0] != str(path)), (str(path), VERSIONS[version])]
                    assert len(changes.to_read) == 1
            elif action == "compact":
                memory.compact()
                assert memory.extent == memory.tokens
                assert not memory.removed
            elif action == "reopen" and place == "disk":
                memory.close()
                memory = Memory.open(base / "memory", model=model, tokenizer=words, writable=True)
            elif action == "save":
                copies += 1
                memory.save(base / f"copy {copies}")
                with Memory.open(base / f"copy {copies}") as copy:
                    assert_same(held(copy), live(memory))
            elif action == "clear":
                memory.clear()
                expected = []
            assert [(document.path, memory.text_of(document)) for document in memory.documents] == expected
            assert all(document.complete for document in memory.documents)
            memory.verify()
        found = live(memory)
        at = 0
        for _, text in expected:
            if text not in encoded:
                (base / "alone.txt").write_text(text)
                encoded[text] = held(in_ram(model, base / "alone.txt"))
            alone = encoded[text]
            for layer, records in alone.records.items():
                assert torch.equal(found.records[layer][at : at + alone.tokens], records)
            assert found.rows[at : at + alone.tokens] == alone.rows
            at += alone.tokens
        assert at == memory.tokens
        memory.close()


# -- on disk -----------------------------------------------------------------------------------------------


def test_a_removal_is_durable_and_older_versions_refuse_the_memory_until_it_is_compacted(
    files: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    folder = tmp_path / "memory"

    def version() -> int:
        return int(json.loads((folder / "memory.json").read_text())["version"])

    with Memory.create(folder, model, words) as memory:
        read(model, memory, *files)
        assert version() == 1
        memory.remove("*/docs/*")
        with Memory.open(folder) as reader:
            assert [document.path for document in reader.documents] == [str(files[0])]
            assert [document.path for document in reader.removed] == list(map(str, files[1:]))
            reader.verify()
        assert version() == 2
        last = json.loads((folder / "journal.jsonl").read_text().splitlines()[-1][9:])
        assert [document["removed"] for document in last["documents"]] == [True] * 3
        before = sum(path.stat().st_size for path in folder.iterdir())
        promised = memory.removed_bytes
        given_back = memory.compact()
        assert given_back == before - sum(path.stat().st_size for path in folder.iterdir())
        assert given_back >= promised > 0
        assert version() == 1
        assert {path.name for path in folder.iterdir()} == {
            "memory.json", "journal.jsonl", "lock", "kv-001.2.bin", "kv-002.2.bin", "tokens.2.bin", "text.2.bin"
        }  # fmt: skip
        read(model, memory, files[2])
    with Memory.open(folder) as reader:
        reader.verify()
        assert_same(held(reader), held(in_ram(model, files[0], files[2])))


def test_readers_that_were_open_before_a_compaction_go_on(
    files: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    in_ram(model, *files).save(tmp_path / "memory")
    untouched, used, writer = (
        Memory.open(tmp_path / "memory"),
        Memory.open(tmp_path / "memory"),
        Memory.open(tmp_path / "memory", model=model, tokenizer=words, writable=True),
    )
    expected = in_ram(model, *files)
    answer = logits(model, question(), memory=expected)
    assert torch.equal(logits(model, question(), memory=used), answer)
    old_store = writer.store
    writer.remove(str(files[1]))
    writer.compact()
    read(model, writer, files[1])
    for reader in (untouched, used):
        assert_same(held(reader), held(expected))
        assert torch.equal(logits(model, question(), memory=reader), answer)
        reader.close()
    first = next(iter(old_store.chunks(2)))  # a pass that was under way
    assert torch.equal(first.keys, next(iter(expected.store.chunks(2))).keys)
    assert_same(held(writer), held(in_ram(model, files[0], files[2], files[3], files[1])))
    writer.close()


@pytest.mark.parametrize("moment", range(6))
def test_a_compaction_that_is_interrupted_leaves_the_old_or_the_new_memory_and_an_object_that_knows_which(
    moment: int, files: list[Path], tmp_path: Path, model: Any, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before and after each of the renames: four data files, the journal, the manifest."""
    for after in (False, True):
        folder = tmp_path / f"memory {after}"
        in_ram(model, *files).save(folder)
        with Memory.open(folder, model=model, tokenizer=words, writable=True) as memory:
            memory.remove(str(files[1]))
            done, real = 0, os.replace

            def replace(source: Any, target: Any, after: bool = after, real: Any = real) -> None:
                nonlocal done
                if Path(source).parent.name != "unfinished" or str(source).endswith(".new"):
                    return real(source, target)
                done += 1
                if done == moment + 1 and not after:
                    raise KeyboardInterrupt
                real(source, target)
                if done == moment + 1:
                    raise KeyboardInterrupt

            monkeypatch.setattr(os, "replace", replace)
            with pytest.raises(KeyboardInterrupt):
                memory.compact()
            monkeypatch.setattr(os, "replace", real)
            new = moment == 5 or (moment == 4 and after)
            assert bool(memory.removed) != new
            assert_same(live(memory), held(in_ram(model, files[0], files[2], files[3])))
            assert len(list(folder.glob("*.bin"))) == 4
            assert not (folder / "unfinished").exists()
            read(model, memory, files[1])
            memory.verify()
            memory.compact()
        with Memory.open(folder) as reopened:
            reopened.verify()
            assert_same(held(reopened), held(in_ram(model, files[0], files[2], files[3], files[1])))


def _states(folder: Path, *, check: Callable[[Memory], None]) -> None:
    with Memory.open(folder) as memory:
        memory.verify()
        check(memory)


@pytest.mark.parametrize("what", ["change_documents", "remove_and_read_again"])
def test_killed_at_any_moment_of_an_update_a_removal_or_a_compaction(
    what: str, files: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    """Real kills in a loop. Documents that nobody touches are whole, and of the changed one there is always a version."""
    other = tmp_path / "other.txt"
    versions = ["First version, " * 12, "The second version. " * 9]
    for end, text in zip("ab", versions, strict=True):
        Path(f"{other}.{end}").write_text(text)
    other.write_text(versions[0])
    folder = tmp_path / "memory"
    in_ram(model, files[0], other, files[2]).save(folder)
    kept = held(in_ram(model, files[0], files[2]))
    alone = {}
    for text in versions:
        (tmp_path / "alone.txt").write_text(text)
        alone[text] = held(in_ram(model, tmp_path / "alone.txt"))

    def check(memory: Memory) -> None:
        untouched = memory.select(str(files[0]), str(files[2]))
        order = [{**document, "id": 0, "text_start": 0, "start": 0} for document in live(untouched).documents]
        assert order == [{**document, "id": 0, "text_start": 0, "start": 0} for document in kept.documents]
        found = live(untouched)
        assert found.texts == kept.texts
        for layer, records in kept.records.items():
            assert torch.equal(found.records[layer], records)
        whole = [found for found in memory.documents if found.path == str(other) and found.complete]
        if what == "change_documents":
            assert len(whole) == 1, "the old version or the new one, never none"
        for document in whole:
            expected = alone[memory.text_of(document)]
            assert document.tokens == expected.tokens
            mine = live(memory.select(document))
            for layer, records in expected.records.items():
                assert torch.equal(mine.records[layer], records)

    chance, seen = random.Random(1), set()
    arguments = (str(folder), str(other))
    for _ in range(KILLS):
        child = processes.start(f"tests.memory.children:{what}", *arguments)
        child.wait_for(lambda child=child: child.said("changing"))
        time.sleep(chance.random() * 0.4)
        if chance.random() < 0.5:  # open while it is being changed
            _states(folder, check=check)
        child.kill()
        assert child.wait().code == -9
        _states(folder, check=check)
        with Memory.open(folder) as memory:
            seen.add((memory._backend.generation, len(memory.removed), memory.extent))  # type: ignore[attr-defined]
    assert len(seen) >= KILLS // 2, f"kills came at too few different moments: {seen}"
    with Memory.open(folder, model=model, tokenizer=words, writable=True) as memory:
        generation = memory._backend.generation  # type: ignore[attr-defined]
        strays = [p.name for p in folder.glob("*.bin") if not p.name.endswith(f".{generation}.bin")]
        assert strays == [], "what killed compactions left is taken away"
        assert not (folder / "unfinished").exists()
        memory.remove(*memory.documents[1:])
        memory.compact()
        assert memory.text_of(memory.documents[0]) == files[0].read_text()


def test_a_full_disk_stops_a_compaction_or_a_removal_and_the_memory_is_as_before(
    small_disk: Callable[[int], Path],
    files: list[Path],
    tmp_path: Path,
    model: Any,
    words: Any,
) -> None:
    expected = held(in_ram(model, files[0], files[2], files[3]))
    whole = in_ram(model, *files)
    whole.save(tmp_path / "measured")
    kib = sum(path.stat().st_size for path in (tmp_path / "measured").iterdir()) // 1024
    refused = 0
    for part in (0.05, 0.2, 0.4, 0.6, 0.75, 1.2):  # of the room that a copy takes, which is free beside the memory
        disk = small_disk(kib + 32 + int(part * kib))
        whole.save(disk / "memory")
        with Memory.open(disk / "memory", model=model, tokenizer=words, writable=True) as memory:
            free = os.statvfs(disk)
            (disk / "filler").write_bytes(b"x" * (free.f_bavail * free.f_frsize))
            with pytest.raises(MemoryWriteError, match="full"):
                memory.remove(str(files[1]))
            assert_same(live(memory), held(whole))
            (disk / "filler").unlink()
            memory.remove(str(files[1]))
            try:
                assert memory.compact() > 0
            except MemoryWriteError as error:
                refused += 1
                assert "full" in str(error)
                assert not (disk / "memory" / "unfinished").exists()
                assert len(memory.removed) == 1
            assert_same(live(memory), expected)
            grow(disk, 4096)
            memory.compact()
            assert_same(held(memory), expected)
        with Memory.open(disk / "memory") as reopened:
            reopened.verify()
            assert_same(held(reopened), expected)
    assert 2 <= refused < 6


def test_files_of_a_copied_memory_that_vanished_are_still_an_error(
    files: list[Path], tmp_path: Path, model: Any
) -> None:
    """Looking for a newer generation must not hide damage."""
    in_ram(model, *files).save(tmp_path / "memory")
    shutil.copytree(tmp_path / "memory", tmp_path / "copy")
    (tmp_path / "copy" / "kv-002.1.bin").unlink()
    with pytest.raises(MemoryFormatError, match=r"kv-002\.1\.bin is missing"):
        Memory.open(tmp_path / "copy")


# -- updates -----------------------------------------------------------------------------------------------


def test_files_are_unchanged_touched_changed_new_or_gone(files: list[Path], model: Any, words: Any) -> None:
    memory = in_ram(model, *files[:3])
    ids = [document.id for document in memory.documents]
    os.utime(files[1], ns=(5, 5))
    same_size = files[2].read_text().replace("neither", "either ")
    files[2].write_text(same_size)
    os.utime(files[2], ns=(7, 7))
    changes = compare(memory, [source_of(path) for path in files])
    assert [source.path for source in changes.new] == [files[3]]
    assert [source.path for source in changes.changed] == [files[2]]
    assert [document.id for document, _ in changes.touched] == [ids[1]]
    assert [document.id for document in changes.unchanged] == ids[:2]
    settle(memory, changes)
    again = compare(memory, [source_of(path) for path in files])
    assert (again.touched, [document.id for document in again.unchanged]) == ([], ids[:2])
    for source in changes.to_read:
        Reader(model, words, memory).read(source, replace=True)
    assert [document.path for document in memory.documents] == [str(files[n]) for n in (0, 1, 3, 2)]
    assert memory.text_of(memory.documents[-1]) == same_size
    files[0].unlink()
    shutil.rmtree(files[3].parent)
    gone = [document.path for document in vanished(memory)]
    assert gone == [str(files[0]), str(files[3])]
    assert [document.path for document in vanished(memory, [files[1].parent])] == [str(files[3])]
    assert [document.path for document in vanished(memory, [files[0], str(files[1])[:-1]])] == [str(files[0])]


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_an_interrupted_update_keeps_the_old_version_and_goes_on(
    place: str, at: int, files: list[Path], tmp_path: Path, model: Any, words: Any
) -> None:
    with where(place, tmp_path / "memory", model, words) as memory:
        read(model, memory, *files[:2])
        old = memory.text_of(memory.documents[0])
        files[0].write_text("Now it is another text. " * 14)
        reader = Reader(model, words, memory)
        stop = Stopper(at)
        with pytest.raises(KeyboardInterrupt):
            reader.read(source_of(files[0]), stop, replace=True)
        assert memory.text_of(memory.documents[0]) == old
        assert [document.complete for document in memory.documents] == [True, True, False]
        beginning = memory.documents[2]
        changes = compare(memory, [source_of(path) for path in files[:2]])
        assert [source.path for source in changes.to_read] == [files[0]]
        document = reader.read(changes.to_read[0], replace=True)
        assert (document.id, document.start) == (beginning.id, beginning.start), "it goes on where it stopped"
        assert_same(live(memory), held(in_ram(model, files[1], files[0])))


def test_earlier_versions_beside_an_unchanged_file_go(files: list[Path], model: Any, words: Any) -> None:
    memory = in_ram(model, files[0])
    files[0].write_text("Second version.")
    read(model, memory, files[0], files[1])
    with pytest.raises(KeyboardInterrupt):
        Reader(model, words, memory).read(source_of(files[3]), Stopper(1))
    memory._backend.commit([dataclasses.replace(memory.documents[3], path=str(files[0]))])  # a beginning of it, too
    changes = compare(memory, [source_of(path) for path in files[:2]])
    settle(memory, changes)
    assert not changes.to_read
    assert_same(live(memory), held(in_ram(model, *files[:2])))


def test_a_beginning_with_something_behind_it_is_read_anew(files: list[Path], model: Any, words: Any) -> None:
    memory = in_ram(model, files[0])
    with pytest.raises(KeyboardInterrupt):
        Reader(model, words, memory).read(source_of(files[3]), Stopper(2))
    read(model, memory, files[1])
    memory.remove(str(files[1]))  # its records lie behind the beginning, though nobody sees them
    Reader(model, words, memory).read(source_of(files[3]), replace=True)
    assert_same(live(memory), held(in_ram(model, files[0], files[3])))
