"""`longfocus compact`: give back the space of removed documents. Loads no model."""

from __future__ import annotations

import json

from longfocus.commands import sharded
from longfocus.commands.options import AsJson, Folder
from longfocus.commands.output import counted

EPILOG = """Examples:

  longfocus compact project.memory

  longfocus compact project.memory --json

The memory is written anew, so there must be room for what is left of it meanwhile. Stopped at any moment, it is the old one or the new one; whoever asks it just then goes on with the old one.
"""


def compact(
    folder: Folder,
    as_json: AsJson = False,
) -> None:
    """Write a memory anew without what was removed from it."""
    with sharded.open_memory(folder, writable=True) as memory:
        removed = len(memory.removed)
        given_back = memory.compact()
        if as_json:
            data = {
                "removed_documents": removed,
                "bytes_given_back": given_back,
                "documents": len(memory.documents),
                "tokens": memory.tokens,
                "bytes": memory.nbytes,
            }
            print(json.dumps(data))
            return
        if not removed:
            print(f"{folder}: nothing was removed from it; there is nothing to give back.")
            return
        left = counted(len(memory.documents), "document")
        print(
            f"{folder}: {given_back / 1e6:,.1f} MB of {counted(removed, 'removed document')} given back; "
            f"{left}, {memory.tokens:,} tokens, {memory.nbytes / 1e6:,.1f} MB are left."
        )
