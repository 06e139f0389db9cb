"""Commands on a sharded memory that start no process: info, forget, compact, and what is refused.

python -m pytest tests/commands/test_sharded.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.conftest import longfocus
from tests.memory.distributed.sharing import large_shards, model_of, sharded, write_texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five documents in two shards."""
    texts = write_texts(tmp_path / "texts")
    sharded(tmp_path / "big.memory", model_of(), texts[:5], shards=2).close()
    return tmp_path / "big.memory"


def test_info_shows_documents_and_shards(folder: Path) -> None:
    shown = longfocus("info", folder, "--verify")
    assert shown.code == 0, shown.err
    assert "Shards       2\n" in shown.out
    assert "shard-000: 3 documents" in shown.out
    assert "shard-001: 2 documents" in shown.out
    assert shown.out.index("0-cyrillic.txt") < shown.out.index("1-latin.txt") < shown.out.index("4-spaces.txt")
    assert "Every checksum is right." in shown.out


def test_forget_and_compact(folder: Path) -> None:
    said = json.loads(longfocus("forget", folder, "*latin.txt", "*code.txt", "--dry-run", "--json").out)
    assert (said["documents"], len(said["removed"])) == (5, 2)
    said = json.loads(longfocus("forget", folder, "*latin.txt", "*code.txt", "--json").out)
    assert (said["documents"], len(said["removed"])) == (3, 2)
    assert said["bytes_to_compact"] > 0
    said = json.loads(longfocus("compact", folder, "--json").out)
    assert (said["removed_documents"], said["documents"]) == (2, 3)
    assert said["bytes_given_back"] > 0
    names = [
        Path(document["name"]).name for document in json.loads(longfocus("info", folder, "--json").out)["documents"]
    ]
    assert names == ["0-cyrillic.txt", "3-arabic.txt", "4-spaces.txt"]


def test_what_cannot_be_is_refused_with_what_to_do(folder: Path, saved: Path, note: Path) -> None:
    for arguments, message in (
        (("remember", "--into", folder, "--update"), "longfocus forget"),
        (("remember", note, "--into", folder, "--shards", 3), "has 2; leave the option out"),
        (("remember", note, "--into", saved, "--shards", 2), "is not a sharded memory; choose a new folder"),
        (("remember", note, "--into", saved, "--ray-address", "auto"), "they go with --shards"),
        (("ask", folder, note, "Hm?"), "asked by itself; remember the other texts into it first"),
        (("ask", saved, "Hm?", "--shard-timeout", "5"), "they go with a sharded memory"),
        (("ask", folder, "Hm?", "--shard-timeout", "0"), "expected seconds above 0"),
        (("ask", folder, "Hm?", "--retrieval", "best"), "expected one of dense, exact, approximate, auto"),
        (("ask", folder, "Hm?", "--only", "nothing.txt"), "no document 'nothing.txt'"),
    ):
        ended = longfocus(*arguments)
        assert (ended.code, ended.out) == (2, ""), arguments
        assert message in " ".join(ended.err.replace("│", " ").split()), ended.err


def test_a_large_sharded_memory_is_indexed_and_small_shards_need_none(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    done = longfocus("index", folder)
    assert done.code == 0, done.err
    assert "tokens in 2 shards need no index; that of a shard begins at 16,384." in done.out
    large_shards(tmp_path / "large.memory", model_of(), shards=2, tokens=16_400)[0].close()
    said = json.loads(longfocus("index", tmp_path / "large.memory", "--json").out)
    assert said == {"tokens": 32_800, "indexed_tokens": 32_768, "encoded_tokens": 32_768}
    assert all((tmp_path / "large.memory" / shard / "index.1.json").exists() for shard in ("shard-000", "shard-001"))
    assert "0 tokens indexed, 32,768 of 32,800 together" in longfocus("index", tmp_path / "large.memory").out
    assert longfocus("forget", tmp_path / "large.memory", "shard-000").code == 0
    assert "0 tokens indexed, 32,768 of 32,800 together" in longfocus("index", tmp_path / "large.memory").out
