"""How a memory is searched, in one folder or in shards: whole, or through an index that is kept up to date."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from longfocus.commands.output import counted, note

if TYPE_CHECKING:
    from collections.abc import Callable

    from longfocus.memory.distributed.memory import ShardedMemory
    from longfocus.memory.memory import Memory


def settle_retrieval(model: Any, memory: Memory | ShardedMemory, how: str, *, quiet: bool = False) -> None:
    """Choose how the memory is searched, if it is left to us, and say what was chosen where it is not plain dense.

    Args:
        how: what `--retrieval` was given; not auto: the model has it already.
        quiet: say nothing.
    """
    from longfocus.config import DENSE_UP_TO_TOKENS
    from longfocus.memory.memory import Memory
    from longfocus.memory.quantiser import has_faiss

    def say(text: str) -> None:
        if not quiet:
            note(text)

    focus = model.focus
    if how == "auto" and focus.config.retrieval == "dense" and memory.tokens > DENSE_UP_TO_TOKENS:
        if not has_faiss():
            say(
                f"{memory.tokens:,} tokens are attended to whole; with faiss they are searched approximately, and faster: "
                "pip install 'longfocus[approximate]'"
            )
            return
        focus.config = dataclasses.replace(focus.config, retrieval="approximate")
        say(f"{memory.tokens:,} tokens: searched approximately (--retrieval dense attends to all of them).")
    if focus.config.k_rule is not None and focus.config.retrieval == "dense":
        say("The k rule has no effect: all of the memory is attended to. It is for --retrieval exact or approximate.")
    if focus.config.retrieval == "approximate":
        if isinstance(memory, Memory):
            _index_in_ram(memory, say)
        else:
            _say_what_lacks_an_index(memory, say)


def _index_in_ram(memory: Memory, say: Callable[[str], None]) -> None:
    """Before the first question, rather than in it."""
    from longfocus.memory.approximate import TRAIN_TOKENS

    behind = memory.extent - memory.indexed_tokens
    problem = f" (the saved index is not used: {memory.index_problem})" if memory.index_problem else ""
    if memory.tokens >= TRAIN_TOKENS and behind >= TRAIN_TOKENS:
        where = "; remembering more into it, or longfocus index, saves the index" if memory.is_saved else ""
        say(f"Indexing {behind:,} tokens in RAM{problem}{where} …")
        memory.search()


def _say_what_lacks_an_index(memory: ShardedMemory, say: Callable[[str], None]) -> None:
    """Shards make an index where they are, at their first question, which takes its time."""
    from longfocus.memory.approximate import TRAIN_TOKENS

    without = [shard for shard in memory.shards if shard.tokens >= TRAIN_TOKENS and not shard.has_index]
    if without:
        say(
            f"{counted(len(without), 'shard')} of {len(memory.shards)} without an index: the first answer waits until they have made "
            f"one in RAM; longfocus index {memory.folder} saves it."
        )


def index_memory(memory: Memory | ShardedMemory) -> None:
    """Bring a memory's saved index up to date, or make one for a memory that is large enough to be searched through it."""
    from longfocus.config import DENSE_UP_TO_TOKENS
    from longfocus.errors import MemoryWriteError
    from longfocus.memory.quantiser import has_faiss

    if not has_faiss() or not (memory.has_index or memory.tokens > DENSE_UP_TO_TOKENS):
        return
    try:
        encoded = memory.update_index()
    except MemoryWriteError as error:
        note(f"The index could not be saved; the memory is whole, and asked without it. {error}")
        return
    if encoded:
        note(f"Indexed {encoded:,} tokens for approximate search.")
