"""Fixtures of these tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.machine import data_folder


@pytest.fixture(scope="session")
def real_texts() -> dict[str, str]:
    """A book, a repository, theories and LaTeX: the first of each test set."""
    names = ("books", "code", "isabelle", "arxiv")
    folder = data_folder(*names)
    texts = {}
    for name in names:
        with gzip.open(folder / name / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
            texts[name] = json.loads(next(lines))["text"]
    return texts


@pytest.fixture(scope="module")
def stream_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a test may write a source that is streamed."""
    return tmp_path_factory.mktemp("streamed") / "s.jsonl"
