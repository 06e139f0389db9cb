"""A sharded memory on disk: what is in it, in what order, removed, compacted, damaged. No process is started.

python -m pytest tests/memory/distributed/test_sharded_files.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longfocus import Memory, Reader, ShardedMemory, find_sources
from longfocus.errors import (
    ConfigError,
    DocumentNotFoundError,
    MemoryFormatError,
    MemoryLockedError,
    MemoryMismatchError,
    MemoryStoreError,
    MemoryWriteError,
    ShardError,
)
from longfocus.memory.approximate import TRAIN_TOKENS
from longfocus.memory.context import MemoryContext, Part
from longfocus.memory.dense import Scratch, attend_dense
from longfocus.memory.distributed.manifest import MANIFEST, Manifest, is_sharded
from longfocus.memory.distributed.processes import ClusterOptions
from longfocus.memory.distributed.worker import Packed, Question, Seen, ShardWorker
from longfocus.memory.quantiser import BLOCK_TOKENS
from longfocus.model.reading import not_remembered
from tests.memory.distributed.sharing import large_shards, model_of, one_memory, sharded, write_texts
from tests.small_tokenizers import talking


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    return write_texts(tmp_path / "texts")


@pytest.fixture
def memory(tmp_path: Path, model: Any, texts: list[Path]) -> ShardedMemory:
    return sharded(tmp_path / "big.memory", model, texts, shards=3)


def names(memory: Any) -> list[str]:
    return [Path(document.name).name for document in memory.documents]


def test_documents_tokens_texts_and_places_are_those_of_one_memory(
    memory: ShardedMemory, model: Any, texts: list[Path]
) -> None:
    single = one_memory(model, texts)
    assert (memory.tokens, memory.extent, memory.nbytes) == (single.tokens, single.extent, single.nbytes)
    assert names(memory) == [path.name for path in texts]
    for mine, theirs in zip(memory.documents, single.documents, strict=True):
        assert (mine.id, mine.start, mine.tokens) == (theirs.id, theirs.start, theirs.tokens)
        text = memory.text_of(mine)
        assert text == single.text_of(theirs)
        for start in range(mine.start, mine.stop, 7):
            stop = min(start + 7, mine.stop)
            assert memory.span(mine, start, stop) == single.span(theirs, start, stop)
        assert memory.place(mine, text, len(text) - 1) == single.place(theirs, text, len(text) - 1)
    assert not not_remembered(memory, find_sources(texts).sources)


def test_a_shard_is_an_ordinary_memory(memory: ShardedMemory, tmp_path: Path, model: Any) -> None:
    with Memory.open(tmp_path / "big.memory" / "shard-001", model=model, tokenizer=talking()) as shard:
        assert names(shard) == ["1-latin.txt", "4-spaces.txt"]


def test_removed_documents_are_gone_and_compaction_keeps_the_order(
    memory: ShardedMemory, model: Any, texts: list[Path], tmp_path: Path
) -> None:
    removed = memory.remove("*latin.txt", "*arabic.txt")
    assert [Path(document.name).name for document in removed] == ["1-latin.txt", "3-arabic.txt"]
    left = [path for path in texts if path not in (texts[1], texts[3])]
    for again in range(2):
        single = one_memory(model, left)
        assert names(memory) == names(single)
        assert [document.start for document in memory.documents] == [document.start for document in single.documents]
        assert [memory.text_of(document) for document in memory.documents] == [
            path.read_bytes().decode() for path in left
        ]
        if again == 0:
            assert len(memory.removed) == 2
            assert memory.compact() > 0
    assert (memory.removed, memory.removed_bytes, memory.compact()) == ((), 0, 0)
    with ShardedMemory.open(tmp_path / "big.memory") as reopened:
        assert names(reopened) == names(memory)


def test_a_kill_between_compacting_and_writing_the_order_changes_nothing(memory: ShardedMemory, tmp_path: Path) -> None:
    memory.remove("*cyrillic.txt")
    before = names(memory)
    memory.order_as(memory._also_as_compacted())
    for compacted in (False, True):
        if compacted:
            with Memory.open(tmp_path / "big.memory" / "shard-000", writable=True) as shard:
                shard.compact()
        memory.refresh()
        assert names(memory) == before


def test_documents_that_the_order_does_not_name_come_last(memory: ShardedMemory) -> None:
    memory.order_as([entry for entry in memory._table if entry[0] == 2])
    memory.refresh()
    assert names(memory) == [
        "2-code.txt",
        "5-greek.txt",
        "0-cyrillic.txt",
        "3-arabic.txt",
        "1-latin.txt",
        "4-spaces.txt",
    ]


def test_a_selection_holds_the_chosen_documents_with_their_numbers(memory: ShardedMemory) -> None:
    chosen = memory.select("*code.txt", "*greek.txt")
    assert names(chosen) == ["2-code.txt", "5-greek.txt"]
    assert chosen.documents == tuple(document for document in memory.documents if document.id in (2, 5))
    assert chosen.visible().tokens == chosen.tokens < memory.tokens == chosen.extent
    with pytest.raises(MemoryWriteError, match="whole memory"):
        chosen.remove("*code.txt")
    with pytest.raises(DocumentNotFoundError, match="latn"):
        memory.select("1-latn.txt")


def test_the_last_tokens_are_those_of_the_last_documents(memory: ShardedMemory) -> None:
    whole = memory.visible()
    for count in (
        0,
        1,
        17,
        memory.documents[-1].tokens,
        memory.documents[-1].tokens + 5,
        memory.tokens,
        memory.tokens + 9,
    ):
        part = whole.last(count)
        assert part.tokens == min(count, memory.tokens)
        numbers = [piece.number + at for piece in part.pieces for at in range(piece.stop - piece.start)]
        assert numbers == list(range(max(0, memory.tokens - count), memory.tokens))
    for shard, seen in whole.seen.items():
        local = torch.cat([torch.arange(*piece) for piece in seen.ranges])
        here = whole.numbers(shard, local)
        mine = [document for document in memory.documents if memory.home(document) == shard]
        assert here.tolist() == [number for document in mine for number in range(document.start, document.stop)]


def test_one_writes_at_a_time(memory: ShardedMemory, tmp_path: Path) -> None:
    with ShardedMemory.open(tmp_path / "big.memory") as other, memory.writing():
        with pytest.raises(MemoryLockedError, match="being written"):
            other.remove("*latin.txt")
        assert len(other.documents) == 6


def test_another_model_is_refused(memory: ShardedMemory) -> None:
    with pytest.raises(MemoryMismatchError, match="the local window"):
        memory.check(model_of(window=16))
    with pytest.raises(MemoryMismatchError, match="absolute"):
        ShardedMemory.create("never-made", model_of(memory_positions="absolute"), shards=2)
    assert not Path("never-made").exists()


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path, model: Any, memory: ShardedMemory) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("x")
    for folder in (tmp_path / "mine", tmp_path / "big.memory"):
        with pytest.raises(MemoryWriteError, match="not an empty folder"):
            ShardedMemory.create(folder, model, talking(), shards=2)


def test_creation_goes_on_where_it_was_killed(tmp_path: Path, model: Any) -> None:
    Memory.create(tmp_path / "big" / "shard-000", model, talking()).close()
    (tmp_path / "big/shard-001").mkdir()
    assert not is_sharded(tmp_path / "big")
    with ShardedMemory.create(tmp_path / "big", model, talking(), shards=2) as memory:
        assert (len(memory.shards), memory.tokens) == (2, 0)


def _broken_manifest(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"order": [[0,', '"order": [[1,'))


def _newer(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))


def _no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def _missing_shard(folder: Path) -> None:
    (folder / "shard-001").rename(folder / "elsewhere")


def _foreign_shard(folder: Path) -> None:
    _missing_shard(folder)
    Memory.create(folder / "shard-001", model_of(window=16), talking()).close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_broken_manifest, "checksum"),
        (_newer, "version 2.*Upgrade"),
        (_no_manifest, "sharded-memory.json is missing"),
        (_missing_shard, "Shard 1 of .* no memory"),
        (_foreign_shard, "Shard 1 of .* the local window"),
    ],
)
def test_damage_is_named(memory: ShardedMemory, tmp_path: Path, damage: Any, message: str) -> None:
    memory.close()
    damage(tmp_path / "big.memory")
    with pytest.raises((MemoryFormatError, MemoryMismatchError), match=message):
        ShardedMemory.open(tmp_path / "big.memory")


def test_opening_it_as_an_ordinary_memory_says_what_it_is(memory: ShardedMemory, tmp_path: Path) -> None:
    with pytest.raises(MemoryFormatError, match="is a sharded memory"):
        Memory.open(tmp_path / "big.memory")
    assert Manifest.read(tmp_path / "big.memory").shards == ("shard-000", "shard-001", "shard-002")


def test_it_is_passed_over_where_texts_are_looked_for(memory: ShardedMemory, tmp_path: Path) -> None:
    found = find_sources([tmp_path])
    assert [source.path.parent.name for source in found.sources if source.path is not None] == ["texts"] * 6


def test_without_ray_the_error_names_the_command(
    memory: ShardedMemory, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with torch.no_grad(), pytest.raises(ShardError, match=r"pip install 'longfocus\[cluster\]'"):
        model(torch.tensor([[5, 6]]), memory=memory)


@pytest.mark.parametrize("wrong", [{"answer_seconds": 0}, {"tries": 0}, {"threads": 0}, {"start_seconds": -1.0}])
def test_impossible_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ClusterOptions(**wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_a_worker_answers_is_attention_in_the_dtype_of_the_query(
    memory: ShardedMemory, tmp_path: Path, dtype: torch.dtype
) -> None:
    worker = ShardWorker(str(tmp_path / "big.memory" / "shard-001"), threads=1)
    shard = memory.shards[1]
    seen = Seen(shard.generation, ((0, 9), (13, shard.extent)))
    query = torch.randn(2, 6, 3, 8).to(dtype)
    part = Part(shard.store, ranges=seen.ranges)
    asked = Question(2, Packed.of(query), 0.3, None)
    assert torch.equal(asked.query.tensor(), query)
    out, lse = (packed.tensor() for packed in worker.attend(seen, asked))
    expected = attend_dense(query, part.chunks(2), scale=0.3, softcap=None, scratch=Scratch())
    assert expected is not None
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    scores, values, numbers = worker.best(seen, asked, 4, True)
    assert numbers is not None
    assert scores.array.shape == numbers.array.shape == (2, 2, 3, 3, 4)
    assert values.tensor().dtype == dtype
    assert not set(numbers.array.flatten().tolist()) & set(range(9, 13)), "what may not be seen"
    mass = worker.mass(seen, asked, Packed.of(lse))
    assert mass.shape == (part.tokens,)
    assert mass.sum() == pytest.approx(6, rel=1e-2), "the mass of six queries"


def test_a_worker_searches_approximately_as_one_memory_does(tmp_path: Path, model: Any) -> None:
    """With an index that is saved, behind by a document, and removed documents."""
    pytest.importorskip("faiss")
    memory, _ = large_shards(tmp_path / "large.memory", model, shards=2, tokens=TRAIN_TOKENS + 100)
    assert (memory.has_index, memory.indexed_tokens) == (False, 0)
    each = (TRAIN_TOKENS + 100) // BLOCK_TOKENS * BLOCK_TOKENS
    assert memory.update_index() == 2 * each
    assert (memory.has_index, memory.indexed_tokens, memory.update_index()) == (True, 2 * each, 0)
    worker = ShardWorker(str(tmp_path / "large.memory" / "shard-001"), threads=1)
    shard = memory.shards[1]
    seen = Seen(shard.generation, ((0, 5000), (5200, shard.extent)))
    query = torch.randn(1, 6, 2, 8)
    asked = Question(2, Packed.of(query), 0.3, None)
    part = Part(shard.store, ranges=seen.ranges, search=shard.search(seen.ranges))
    local = MemoryContext(part, None, retrieval="approximate", k=6, rerank=5, scratch=Scratch())
    expected = local.best(2, query, scale=0.3, softcap=None)
    found = worker.best(seen, asked, 6, True, 5)
    assert expected is not None
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None and torch.equal(mine.tensor(), theirs)
    exactly = worker.best(seen, asked, 6, True)
    assert exactly[2] is not None and found[2] is not None
    common = (exactly[2].tensor().unsqueeze(-1) == found[2].tensor().unsqueeze(-2)).any(-1).float().mean()
    assert 0.3 < common < 1, "candidates are few, so that some of the best are missed"


def test_a_worker_looks_again_for_what_was_added_and_refuses_other_files(
    memory: ShardedMemory, tmp_path: Path, model: Any, texts: list[Path]
) -> None:
    folder = tmp_path / "big.memory" / "shard-000"
    worker = ShardWorker(str(folder), threads=1)
    worker.open()
    asked = Question(1, Packed.of(torch.randn(1, 6, 1, 8)), 1.0, None)
    with Memory.open(folder, model=model, tokenizer=talking(), writable=True) as writer:
        Reader(model, talking(), writer).read(find_sources([texts[1]]).sources[0])
        seen = Seen(writer.generation, ((0, writer.extent),))
        out, _ = worker.attend(seen, asked)
        assert out.array.shape == (1, 6, 1, 8)
        writer.remove("*cyrillic.txt")
        writer.compact()
    assert np.array_equal(worker.attend(seen, asked)[0].array, out.array), "from the files that it holds open"
    worker.open()  # as its successor would
    with pytest.raises(MemoryStoreError, match="compacted or cleared meanwhile"):
        worker.attend(seen, asked)
