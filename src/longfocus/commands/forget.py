"""`longfocus forget`: remove documents from a saved memory. Loads no model."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from longfocus.commands import sharded
from longfocus.commands.options import AsJson, Folder
from longfocus.commands.output import counted, print_documents

EPILOG = """Examples:

  longfocus forget project.memory docs/old.md

  longfocus forget project.memory 'tests/*' '*.csv' --dry-run

  longfocus forget project.memory vendor --json

Nobody sees the documents any more from then on; the command compact gives their space back.
"""


def forget(
    folder: Folder,
    patterns: Annotated[
        list[str],
        typer.Argument(
            metavar="PATTERN…",
            help="Names as info shows them, paths, globs such as 'docs/*.md' (* also matches /), or folders.",
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove documents from a memory."""
    with sharded.open_memory(folder, writable=not dry_run) as memory:
        chosen = memory.find(*patterns) if dry_run else memory.remove(*patterns)
        tokens = sum(document.tokens for document in chosen)
        if as_json:
            data = {
                "dry_run": dry_run,
                "removed": [document.to_dict() for document in chosen],
                "removed_tokens": tokens,
                "documents": len(memory.documents),
                "tokens": memory.tokens,
                "bytes_to_compact": memory.removed_bytes,
            }
            print(json.dumps(data))
            return
        print("Would remove:" if dry_run else "Removed:")
        print_documents(chosen, memory.geometry.bytes_per_token)
        what = counted(len(chosen), "document")
        if dry_run:
            print(f"{what}, {tokens:,} tokens of {memory.tokens:,}. Nothing was changed.")
            return
        left = counted(len(memory.documents), "document")
        print(f"{what}, {tokens:,} tokens; {left}, {memory.tokens:,} tokens are left.")
        print(f"longfocus compact {folder} gives back {memory.removed_bytes / 1e6:,.1f} MB.")
