"""A tiny checkpoint on disk that talks, another one, and small real texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longfocus import FocusConfig, Memory, attach
from tests import processes
from tests.models import tiny
from tests.small_tokenizers import VOCABULARY, talking

WINDOW = 64


def _checkpoint(folder: Path, seed: int) -> Path:
    words = talking("chat")
    model = tiny("llama", vocab_size=VOCABULARY, seed=seed, eos_token_id=words.eos_token_id)
    model.generation_config.eos_token_id = words.eos_token_id
    attach(model, FocusConfig(memory_layers=(1, 2), window=WINDOW)).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers that says random bytes."""
    return _checkpoint(tmp_path_factory.mktemp("models") / "tiny", 0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with other weights."""
    return _checkpoint(tmp_path_factory.mktemp("models") / "other", 1)


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    """About 130 lines."""
    path = tmp_path / "prose.txt"
    lines = [
        f"{number}. It was late; she said that it was neither the captain nor the mate.\n" for number in range(1, 131)
    ]
    path.write_text("".join(lines))
    return path


@pytest.fixture
def note(tmp_path: Path) -> Path:
    """Three lines in two scripts."""
    path = tmp_path / "nöte.txt"
    path.write_text("First line.\r\nВторая строка.\r\nThird: 👍🏽\r\n", newline="")
    return path


@pytest.fixture
def saved(tmp_path: Path, tiny_model: Path, note: Path) -> Path:
    """A memory of the note."""
    ended = longfocus("remember", note, "--into", tmp_path / "saved.memory", "--model", tiny_model)
    assert ended.code == 0, ended.err
    return tmp_path / "saved.memory"


def longfocus(*arguments: Any, **options: Any) -> processes.Ended:
    """Run a command in a child process."""
    return processes.run("tests.commands.children:longfocus", *map(str, arguments), **options)


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """All files below a folder, with what is in them."""
    return lambda folder: {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.fixture
def opened() -> Callable[[Path], Memory]:
    return Memory.open
