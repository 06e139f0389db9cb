"""What every test may count on: quiet threads, no network, two torch threads, one seed.

The environment is set before torch is imported, since its thread pool reads it once (DESIGN, section 8).
"""

from __future__ import annotations

import os

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["GOMP_SPINCOUNT"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from hypothesis import settings

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
