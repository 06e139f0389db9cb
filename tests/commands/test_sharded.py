"""Commands on a sharded memory that start no process: info, forget, compact, and what is refused.

python -m pytest tests/commands/test_sharded.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.conftest import longfocus
from tests.memory.distributed.sharing import model_of, sharded, write_texts


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
        (("ask", folder, "Hm?", "--only", "nothing.txt"), "no document 'nothing.txt'"),
    ):
        ended = longfocus(*arguments)
        assert (ended.code, ended.out) == (2, ""), arguments
        assert message in " ".join(ended.err.replace("│", " ").split()), ended.err
