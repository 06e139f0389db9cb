"""One memory, several users: threads at once, numbers that a storage dtype cannot hold, places that cannot be joined.

python -m pytest tests/memory/test_sharing.py
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from longfocus import Memory, attach, read_ids
from longfocus.errors import MemoryMismatchError, MemoryStoreError, UnsupportedCallError
from tests.models import tiny


def test_two_threads_that_read_one_memory_at_once_get_what_each_gets_alone() -> None:
    """Stored float16 is widened in buffers; a buffer shared by threads would mix their keys."""
    model = attach(tiny("llama_9_heads"), memory_layers=(1, 2), window=24, memory_dtype="float16")
    memory = Memory(model)
    read_ids(model, torch.randint(3, 97, (1500,)), memory)
    prompts = [torch.randint(3, 97, (1, 10)) for _ in range(8)]

    def answer(ids: torch.Tensor) -> list[int]:
        with torch.no_grad():
            return model.generate(ids, memory=memory, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()

    alone = [answer(ids) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, prompts)) == alone


def test_a_number_that_float16_cannot_hold_is_an_error_and_not_a_nan_later() -> None:
    model = attach(tiny("llama"), memory_layers=(1,), window=8, memory_dtype="float16")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e6)
    memory = Memory(model)
    with pytest.raises(UnsupportedCallError, match=r"float16 holds numbers up to 65,504.*use bfloat16 or float32"):
        read_ids(model, torch.randint(3, 97, (30,)), memory)
    assert memory.tokens == 0


def test_memories_with_absolute_positions_are_not_joined() -> None:
    """Their keys carry their place in the memory, which joining would change."""
    model = attach(tiny("llama"), memory_layers=(1,), window=8, memory_positions="absolute")
    memories = [Memory(model), Memory(model)]
    for memory in memories:
        read_ids(model, torch.randint(3, 97, (30,)), memory)
    with pytest.raises(MemoryMismatchError, match="absolute"):
        memories[0].extend(memories[1])
    assert memories[0].tokens == 30


def test_what_is_added_to_a_memory_while_a_question_runs_is_not_seen_by_it() -> None:
    model = attach(tiny("llama"), memory_layers=(1,), window=16)
    ids, question, later = (torch.randint(3, 97, (size,)) for size in (100, 10, 60))
    memory = Memory(model)
    read_ids(model, ids, memory)
    with torch.no_grad():
        cache = model.new_cache(memory)
        read_ids(model, later, memory)
        found = model(question[None], cache=cache).logits
        before = Memory(model)
        read_ids(model, ids, before)
        expected = model(question[None], memory=before).logits
        assert torch.equal(found, expected)
        assert not torch.equal(model(question[None], memory=memory).logits, expected)


def test_a_closed_memory_says_so(tmp_path: Path) -> None:
    model = attach(tiny("llama"), memory_layers=(1,), window=16)
    with Memory.create(tmp_path / "memory", model) as memory:
        read_ids(model, torch.randint(3, 97, (40,)), memory)
    ids = torch.randint(3, 97, (1, 5))
    with pytest.raises(MemoryStoreError, match="is closed; open it again"), torch.no_grad():
        memory.token_ids()
    with pytest.raises(MemoryStoreError, match="is closed; open it again"):
        read_ids(model, ids, memory)
    with Memory.open(tmp_path / "memory", model=model) as again:
        assert again.tokens == 40
