"""`longfocus index`: index a saved memory, whole or in shards, for approximate search. Loads no model."""

from __future__ import annotations

import json

from longfocus.commands.options import AsJson, Folder
from longfocus.commands.sharded import open_memory

EPILOG = """Examples:

  longfocus index project.memory

  longfocus index library/novels.memory

Remembering does this by itself for memories of more than 131,072 tokens, and for those that have an index. Needs faiss: pip install 'longfocus[approximate]'. The index is a file beside the memory's; without it, or where it is damaged or behind, answers are the same and come later. In shards, each shard has its own.
"""


def index(
    folder: Folder,
    as_json: AsJson = False,
) -> None:
    """Index a memory, so that ask and chat search it approximately without indexing it each time."""
    from longfocus.memory.approximate import TRAIN_TOKENS
    from longfocus.memory.distributed.memory import ShardedMemory

    with open_memory(folder, writable=True) as memory:
        encoded = memory.update_index()
        covered = memory.indexed_tokens
        shards = memory.shards if isinstance(memory, ShardedMemory) else (memory,)
        tokens = sum(shard.extent for shard in shards)  # with removed ones, which stay in the files until compacted
        if as_json:
            print(json.dumps({"tokens": tokens, "indexed_tokens": covered, "encoded_tokens": encoded}))
        elif not covered:
            where, what = ("", "it") if len(shards) == 1 else (f" in {len(shards)} shards", "that of a shard")
            print(f"{folder}: {memory.tokens:,} tokens{where} need no index; {what} begins at {TRAIN_TOKENS:,}.")
        else:
            print(f"{folder}: {encoded:,} tokens indexed, {covered:,} of {tokens:,} together.")
