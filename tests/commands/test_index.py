"""Approximate search from the command line: indexed by remember or index, chosen by size, and said so.

A tiny model in forked children, in which memories of 700 tokens are large.

    python -m pytest tests/commands/test_index.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longfocus import Memory
from tests import processes
from tests.commands.conftest import longfocus

ASK = ("--json", "--max-new-tokens", 4)


def small(*arguments: Any, without_faiss: bool = False, **options: Any) -> processes.Ended:
    """The command where memories of more than 700 tokens are large."""
    name = "longfocus_without_faiss" if without_faiss else "longfocus_in_the_small"
    return processes.run(f"tests.commands.children:{name}", *map(str, arguments), **options)


@pytest.fixture
def large(tmp_path: Path, tiny_model: Path, prose: Path) -> Path:
    """A memory of some thousand tokens, without an index."""
    folder = tmp_path / "large.memory"
    ended = longfocus("remember", prose, "--into", folder, "--model", tiny_model)
    assert ended.code == 0, ended.err
    assert not list(folder.glob("index*"))
    return folder


def test_a_large_memory_is_indexed_grown_and_asked_approximately(
    tmp_path: Path, tiny_model: Path, prose: Path, note: Path
) -> None:
    folder = tmp_path / "grown.memory"
    done = small("remember", prose, "--into", folder, "--model", tiny_model)
    assert done.code == 0, done.err
    assert "tokens for approximate search." in done.err
    header = json.loads((folder / "index.1.json").read_text())
    done = small("remember", note, "--into", folder)
    assert done.code == 0, done.err
    grown = json.loads((folder / "index.1.json").read_text())
    assert grown["trained_on"] == header["trained_on"]
    assert grown["tokens"] > header["tokens"]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done = small("ask", folder, "Who was late?", *ASK)
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert result["retrieval"] == "approximate"
    assert result["sources"]
    assert 0 < result["memory_mass"] <= 1
    done = small("chat", folder, "--max-new-tokens", 2, stdin=b"Who was late?\n")
    assert done.code == 0
    assert f"{result['memory']['tokens']:,} tokens: searched approximately (--retrieval dense" in done.err
    assert "Indexing" not in done.err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_every_retrieval_answers_and_auto_keeps_small_memories_dense(large: Path, saved: Path) -> None:
    for how in ("dense", "exact", "approximate"):
        done = small("ask", large, "Who was late?", "--retrieval", how, "--k", 16, *ASK)
        assert (done.code, json.loads(done.out)["retrieval"]) == (0, how)
    done = small("ask", saved, "Who?", *ASK)
    assert json.loads(done.out)["retrieval"] == "dense"
    done = longfocus("ask", large, "Who was late?", *ASK)
    assert json.loads(done.out)["retrieval"] == "dense", "131,072 tokens are the real limit"


def test_asking_a_memory_without_an_index_says_that_one_is_made(large: Path) -> None:
    done = small("ask", large, "Who was late?", "--max-new-tokens", 2)
    assert done.code == 0, done.err
    assert "tokens in RAM; remembering more into it, or longfocus index, saves the index" in done.err
    assert not list(large.glob("index*"))
    done = small("index", large)
    assert done.code == 0, done.err
    assert "tokens indexed" in done.out
    data = bytearray((large / "index-001.1.bin").read_bytes())
    data[9] ^= 1
    (large / "index-001.1.bin").write_bytes(data)
    done = small("ask", large, "Who was late?", "--max-new-tokens", 2)
    assert "(the saved index is not used: index-001.1.bin is corrupted)" in done.err
    done = small("index", large, "--json")
    with Memory.open(large) as memory:
        indexed = memory.extent // 32 * 32
        assert json.loads(done.out) == {
            "tokens": memory.extent,
            "indexed_tokens": indexed,
            "encoded_tokens": indexed,
        }
    assert "Indexing" not in small("ask", large, "Who was late?", "--max-new-tokens", 2).err


def test_texts_are_read_and_then_asked_by_their_size(tiny_model: Path, prose: Path) -> None:
    done = small("ask", prose, "Who was late?", "--model", tiny_model, *ASK)
    assert done.code == 0, done.err
    assert json.loads(done.out)["retrieval"] == "approximate"


def test_without_faiss_large_memories_are_asked_densely_or_refused(large: Path, note: Path) -> None:
    command = "pip install 'longfocus[approximate]'"
    done = small("ask", large, "Who was late?", "--max-new-tokens", 2, without_faiss=True)
    assert done.code == 0, done.err
    assert command in done.err
    for arguments in (("ask", large, "Who?", "--retrieval", "approximate"), ("index", large)):
        done = small(*arguments, without_faiss=True)
        assert done.code == 2
        assert command in done.err
        assert done.err.count("\n") == 1
    done = small("remember", note, "--into", large, without_faiss=True)
    assert (done.code, "ndex" in done.err) == (0, False)


def test_a_retrieval_that_does_not_exist_is_refused(large: Path) -> None:
    done = longfocus("ask", large, "Who?", "--retrieval", "faiss")
    assert done.code == 2
    assert "--retrieval: 'faiss' given, expected one of dense, exact, approximate, auto." in done.err
