"""Documents of other processes as negatives: two real processes give the gradients of one with the joined batch.

python -m pytest tests/crossbatch/test_distributed.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from longfocus.crossbatch.plan import Rows
from tests.crossbatch.distributed import WINDOW, context_of, labels_of, rank_ids, rank_rows
from tests.model.helpers import focused
from tests.models import assert_close

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("gradients")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "-m",
        "tests.crossbatch.distributed",
        str(output),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return output


def _joined() -> Rows:
    first, second = rank_rows(0), rank_rows(1)
    return Rows(
        np.concatenate([first.places, second.places + 10]),
        np.concatenate([first.documents, second.documents + 10]),
        np.concatenate([first.windows, second.windows]),
        np.concatenate([first.lengths, second.lengths]),
    )


@pytest.mark.parametrize("choice", ["next", "hard"])
def test_gradients_equal_those_of_the_joined_batch(two_processes: Path, choice: str) -> None:
    rows = _joined()
    ids, lengths = torch.cat([rank_ids(0), rank_ids(1)]), torch.from_numpy(rows.lengths)
    model = focused("llama", window=WINDOW).train()
    context = context_of(rows, choice)
    assert (
        any(other // 6 != row // 6 for row, others in enumerate(context.contexts.lists()[1]) for other in others)
        or choice == "hard"
    )
    loss = model(
        ids, context=context, lengths=lengths, shift_labels=labels_of(ids, lengths), num_items_in_batch=50
    ).loss
    loss.backward()
    found = load_file(two_processes / f"{choice}.safetensors")
    for name, weight in model.named_parameters():
        # gradients of both processes are averaged, as accelerate's loops expect
        assert_close(found[name] * 2, weight.grad, 1e-9, name)
