"""Files to read, and a model that reads them, for test_saved_memory.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longfocus.model import reading_pass
from tests.memory.saved import TEXT, focused, tokenizer_of_these_tests


@pytest.fixture(scope="package", autouse=True)
def _a_window_at_a_time() -> Iterator[None]:
    """Small texts are read in many steps, as large ones are; tests of more windows a pass set their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_pass, "PASS_TOKENS", 1)
        yield


@pytest.fixture(scope="session")
def model() -> Any:
    return focused()


@pytest.fixture(scope="session")
def words() -> Any:
    return tokenizer_of_these_tests()


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """Two files: some 400 tokens in many scripts, and 100 tokens of prose."""
    paths = [tmp_path / "many scripts.txt", tmp_path / "prose.txt"]
    paths[0].write_bytes(TEXT.encode())
    paths[1].write_bytes(b"It was late. She said that it was neither the captain nor the mate.\r\n" * 4)
    return paths
