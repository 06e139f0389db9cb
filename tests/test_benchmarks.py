"""Benchmarks are run by hand and rarely; so what they share with the package is run here, on tiny models and few tokens.

That a number is right is each part's own test; here: a benchmark still fits the package, and what benchmarks make by themselves is right.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longfocus import Memory, attach, read_ids
from longfocus.attention import attend
from longfocus.memory.contract import chunk_of
from longfocus.memory.dense import Scratch
from tests.machine import data_folder
from tests.models import MEMORY_LAYERS, tiny, tokens

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import large_memory  # noqa: E402
import memory_search  # noqa: E402
import reading  # noqa: E402


def focused(**options: Any) -> Any:
    return attach(tiny("llama"), memory_layers=MEMORY_LAYERS, window=16, **options)


def memory_of(model: Any, count: int) -> Memory:
    memory = Memory(model)
    with torch.no_grad():
        read_ids(model, tokens(1, count), memory)
    return memory


def test_a_prefix_is_the_memory_of_its_tokens() -> None:
    """What a model says with the first tokens of a memory is what it says with a memory of those alone."""
    model = focused()
    ids, asked = tokens(1, 96), tokens(1, 8, seed=5)
    with torch.no_grad():
        whole, half = Memory(model), Memory(model)
        read_ids(model, ids, whole)
        read_ids(model, ids[:, :48], half)
        part = large_memory.Prefix(whole, 48)
        expected = model(asked, cache=model.new_cache(half), use_cache=True).logits
        found = model(asked, cache=model.new_cache(part), use_cache=True).logits
        more = model(asked, cache=model.new_cache(part.with_ranges((64, 80))), use_cache=True).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(more, expected, atol=1e-3)


def test_repeated_records_are_the_first_ones_with_noise() -> None:
    model = focused()
    memory = memory_of(model, 64)
    large_memory.repeat(memory, 64, 160, 0.0)
    assert memory.extent == 160
    for layer in MEMORY_LAYERS:
        records = torch.cat([chunk.records for chunk in memory.store.chunks(layer)], 1)[0]  # type: ignore[misc]
        assert torch.equal(records[64:128], records[:64]) and torch.equal(records[128:], records[:32])
    noisy = memory_of(model, 64)
    large_memory.repeat(noisy, 64, 128, 0.3)
    records = torch.cat([chunk.records for chunk in noisy.store.chunks(1)], 1)[0]  # type: ignore[misc]
    change = (records[64:] - records[:64]).std() / records[:64].std()
    assert 0.2 < change < 0.4


def test_memory_search_measures_all_its_rows() -> None:
    pytest.importorskip("faiss")
    model = focused()
    memory = memory_of(model, 96)
    large_memory.repeat(memory, 96, 8192 + 4096, 0.3)
    ids = tokens(1, 64, seed=7)[0].tolist()
    arguments = argparse.Namespace(
        k=4, kinds=[], kinds_up_to="1M", hnsw_up_to="1M", flat_up_to="1M", repeats=1, loss_tokens=32
    )
    whole = large_memory.Prefix(memory, memory.extent)
    queries = memory_search.real_queries(model, ids[:16], large_memory.Prefix(memory, 96))
    assert set(queries) == set(MEMORY_LAYERS)
    rows = list(memory_search.measure_search(whole, queries, arguments, [8]))
    assert [row["row"] for row in rows] == ["dense", "exact", "approximate, rerank 8"]
    assert all(0 < row["mass"] <= 1.0001 and row["recall"] > 0.5 for row in rows)
    decode = memory_search.measure_decode(model, [whole], ids, arguments, [8])
    losses = {row["row"]: row["loss"] for row in decode}
    assert len(losses) == 3 and abs(losses["exact"] - losses["approximate, rerank 8"]) < 0.3


@pytest.mark.parametrize("kept", [8, 1024])
def test_blocks_attend_to_what_their_mean_query_finds(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a plain computation; with at least as many keys as there are it is dense attention."""
    monkeypatch.setattr(reading, "BLOCK_KEYS", kept)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 2 * reading.BLOCK_QUERIES, 8, generator=generator)
    records = torch.randn(1, 50, 2, 2, 8, generator=generator)
    chunks = [chunk_of(records[:, :30], None, 0), chunk_of(records[:, 30:], None, 30)]
    found = reading.attend_by_blocks(query, chunks, scale=0.3, softcap=None, scratch=Scratch())
    assert found is not None
    keys, values = records[0, :, 0].transpose(0, 1), records[0, :, 1].transpose(0, 1)  # (Hkv, n, D)
    for head in range(4):
        for block in range(2):
            rows = slice(block * reading.BLOCK_QUERIES, (block + 1) * reading.BLOCK_QUERIES)
            mean = query[0, [head // 2 * 2, head // 2 * 2 + 1], rows].mean((0, 1))
            chosen = (keys[head // 2] @ mean).topk(min(kept, 50)).indices
            scores = 0.3 * query[0, head, rows] @ keys[head // 2, chosen].T
            out = scores.softmax(-1) @ values[head // 2, chosen]
            assert torch.allclose(found[0][0, head, rows], out, atol=1e-5)
            assert torch.allclose(found[1][0, head, rows], scores.logsumexp(-1), atol=1e-5)
    if kept >= 50:
        dense = attend(query, keys[None], values[None], scale=0.3, softcap=None)
        assert torch.allclose(found[0], dense[0], atol=1e-5)


def test_reading_by_blocks_with_all_keys_is_reading_the_whole_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_QUERIES", 4)
    model = focused()
    ids = tokens(1, 96)[0].tolist()
    memories = {}
    for way in ("document", "document, blocks"):
        memory = memories[way] = Memory(model)
        with torch.no_grad():
            place, _ = reading.read(model, ids, memory, way, False)
        assert place == (0, 96)
    for layer in MEMORY_LAYERS:
        one, other = (
            torch.cat([chunk.records for chunk in memory.store.chunks(layer)], 1)  # type: ignore[misc]
            for memory in memories.values()
        )
        assert torch.allclose(one, other, atol=1e-4)


SMALLEST = {
    "memory_search.py": "--sizes 2k,70k --read 2k --tile --kinds none --repeats 1 --loss-tokens 256 --queries 8",
    "large_passkey.py": "--sizes 2k,70k --read 2k --tile --samples 2 --document 600",
    "reading.py": "--documents 1 --length 1k --following 256 --sizes 2k,4k --read 2k --tile",
    "growth.py": "--sizes 2k,70k --read 2k --tile --document 1k --repeats 1",
}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.data
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    data = data_folder("books", "code")
    command = [sys.executable, FOLDER / name, *SMALLEST[name].split(), "--data", data, "--out", tmp_path / "out"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/results.json").exists() and "|" in (tmp_path / "out/table.md").read_text()
