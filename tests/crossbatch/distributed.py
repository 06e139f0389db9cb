"""Two real processes, each with half of a batch; the windows of both serve as contexts. Started by test_distributed.py.

torchrun --nproc-per-node 2 -m tests.crossbatch.distributed OUTPUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from longfocus.crossbatch.context import CrossbatchContext, gather_rows
from longfocus.crossbatch.plan import Rows, documents, plan_contexts
from tests.model.helpers import focused
from tests.models import tokens

WINDOW, WINDOWS, PLACES = 10, 3, 2


def rank_rows(rank: int) -> Rows:
    """Rows of one process; places and documents are numbered by each process for itself."""
    places = np.repeat(np.arange(PLACES), WINDOWS)
    lengths = np.full(PLACES * WINDOWS, WINDOW)
    lengths[-1] = 4 + rank
    return Rows(places, places.copy(), np.tile(np.arange(WINDOWS), PLACES), lengths)


def rank_ids(rank: int) -> torch.Tensor:
    """Their tokens."""
    return tokens(PLACES * WINDOWS, WINDOW, seed=5 + rank)


def context_of(rows: Rows, choice: Any = "next", **options: Any) -> CrossbatchContext:
    """The same table in every process."""
    contexts = plan_contexts(rows, documents(4, 2), choice=choice, generator=np.random.default_rng(1))
    return CrossbatchContext(rows, contexts, **options)


def labels_of(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Next tokens inside each row."""
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    labels[torch.arange(ids.shape[1])[None] >= lengths[:, None] - 1] = -100
    return labels


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    group = torch.distributed.group.WORLD
    for choice in ("next", "hard"):
        model = focused("llama", window=WINDOW).train()
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        rows = gather_rows(rank_rows(rank), group)
        context = context_of(rows, choice, group=group, first_row=rank * PLACES * WINDOWS)
        ids, lengths = rank_ids(rank), torch.from_numpy(rank_rows(rank).lengths)
        loss = wrapped(
            ids, context=context, lengths=lengths, shift_labels=labels_of(ids, lengths), num_items_in_batch=50
        ).loss
        loss.backward()
        if rank == 0:
            grads = {name: weight.grad for name, weight in model.named_parameters()}
            save_file(grads, Path(sys.argv[1]) / f"{choice}.safetensors")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
