"""`longfocus info`: what a saved memory holds and what made it. Loads no model."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from longfocus.commands import sharded
from longfocus.commands.options import AsJson, Folder
from longfocus.commands.output import counted, print_documents

EPILOG = """Examples:

  longfocus info project.memory

  longfocus info project.memory --json

  longfocus info project.memory --verify
"""


def info(
    folder: Folder,
    as_json: AsJson = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every byte with its checksum, however large the memory.")
    ] = False,
) -> None:
    """Say what is inside a memory: documents, tokens, bytes, model, layers."""
    with sharded.open_memory(folder) as memory:
        if verify:
            memory.verify()
        geometry = memory.geometry
        if as_json:
            data = {
                "documents": [document.to_dict() for document in memory.documents],
                "tokens": memory.tokens,
                "bytes": memory.nbytes,
                "removed": {
                    "documents": len(memory.removed),
                    "tokens": sum(document.tokens for document in memory.removed),
                    "bytes": memory.removed_bytes,
                },
                **sharded.shards_of(memory),
                "bytes_per_token": geometry.bytes_per_token,
                "model_source": memory.model_source,
                "options": memory.focus_options,
                **geometry.to_dict(),
            }
            print(json.dumps(data))
            return
        print(f"Memory       {folder}")
        print(f"Documents    {len(memory.documents)}")
        print(f"Tokens       {memory.tokens:,}")
        print(
            f"Bytes        {memory.nbytes:,} of keys and values ({geometry.bytes_per_token:,} a token, {geometry.dtype})"
        )
        if memory.removed:
            print(
                f"Removed      {counted(len(memory.removed), 'document')} that still take {memory.removed_bytes:,} bytes "
                "(longfocus compact gives them back)"
            )
        print(
            f"Model        {geometry.model_name} ({geometry.model[:8]}) in {geometry.model_dtype}, from "
            f"{memory.model_source or 'unknown'}"
        )
        print(f"Layers       {', '.join(map(str, geometry.layers))}")
        print(
            f"Window       {geometry.window} tokens, overlap {geometry.overlap}, memory keys {geometry.memory_positions}"
        )
        sharded.print_shards(memory)
        print()
        print_documents(memory.documents, geometry.bytes_per_token)
        if verify:
            print("\nEvery checksum is right.")
