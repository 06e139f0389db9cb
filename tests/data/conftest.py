"""Fixtures of these tests: the default model's tokenizer, and a few real texts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def default_tokenizer() -> Any:
    from longfocus.errors import ModelNotFoundError
    from longfocus.model.load import load_tokenizer

    try:
        return load_tokenizer()
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def real_texts() -> dict[str, str]:
    """A book, a repository, theories and LaTeX: the first of each test set."""
    if not DATA.is_dir():
        pytest.skip(f"the texts in {DATA} are not here")
    texts = {}
    for name in ("books", "code", "isabelle", "arxiv"):
        with gzip.open(DATA / name / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
            texts[name] = json.loads(next(lines))["text"]
    return texts
