"""What every test may count on: quiet threads, no network, two torch threads, one seed.

The environment is set before torch is imported, since its thread pool reads it once (DESIGN, section 8).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["GOMP_SPINCOUNT"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from hypothesis import settings

from tests import machine

# as many workers as cores under `pytest -n auto`, two threads alone
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
transformers.utils.logging.disable_progress_bar()

# Examples are the same in every run; a neighbour on the machine must not fail a test by slowness.
settings.register_profile("longfocus", derandomize=True, deadline=None, database=None)
settings.load_profile("longfocus")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers of one run must call their tests the same: gzip's bytes hold the time, and addresses differ."""
    passing = [item.nodeid for item in items if "\\x1f\\x8b" in item.nodeid or " at 0x" in item.nodeid]
    if passing:
        raise pytest.UsageError(f"called differently in each process, give the parameter an id: {passing[0]}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def default_model() -> str:
    """The folder of the default model."""
    from longfocus.errors import ModelNotFoundError
    from longfocus.model.load import resolve

    try:
        return resolve("default")
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def default_tokenizer(default_model: str) -> Any:
    from longfocus.model.load import load_tokenizer

    return load_tokenizer()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a new file system of so many KiB."""
    mounted: list[Path] = []

    def mount(kib: int) -> Path:
        folder = tmp_path / f"disk {len(mounted)}"
        machine.mount(folder, kib)
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)
