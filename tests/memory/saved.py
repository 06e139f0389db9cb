"""A tiny model and tokenizer, and what a memory holds as plain values that can be compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from longfocus import FocusConfig, Memory, Reader, attach, find_sources
from longfocus.data.documents import Source
from tests.models import MEMORY_LAYERS, tiny
from tests.small_tokenizers import SAMPLES, VOCABULARY, tokenizer

WINDOW = 16
TEXT = "".join(
    SAMPLES[name] for name in ("latin", "cyrillic", "arabic", "chinese", "emoji", "combining", "code", "spaces")
)
"""Some 400 tokens in many scripts, more than the first block of a store in RAM."""


def focused(*, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A tiny Llama with memory layers 1 and 2 and a window of 16 tokens, the same weights at every call."""
    model = tiny("llama", vocab_size=VOCABULARY, seed=seed, dtype=dtype)
    return attach(model, FocusConfig(**{"memory_layers": MEMORY_LAYERS, "window": WINDOW, **options}))


def tokenizer_of_these_tests() -> Any:
    return tokenizer("byte_level")


def source_of(path: Path) -> Source:
    return find_sources([path]).sources[0]


def read(model: Any, memory: Memory, *paths: Path) -> Memory:
    """Read files into a memory, one after another, and return it."""
    reader = Reader(model, tokenizer_of_these_tests(), memory)
    for path in paths:
        reader.read(source_of(path))
    return memory


def in_ram(model: Any, *paths: Path) -> Memory:
    """A memory in RAM of these files."""
    return read(model, Memory(model, tokenizer_of_these_tests()), *paths)


@dataclasses.dataclass
class Held:
    """Everything in a memory."""

    tokens: int
    records: dict[int, torch.Tensor]
    """(tokens, 2, Hkv, head_dim) of each layer, in the storage dtype."""
    rows: list[tuple[int, int, int]]
    """(character, byte, id) of each token."""
    texts: list[str]
    documents: list[dict[str, Any]]

    def up_to(self, tokens: int) -> Held:
        """Records and rows of the first tokens; for comparing with an unfinished memory."""
        return Held(tokens, {i: kv[:tokens] for i, kv in self.records.items()}, self.rows[:tokens], [], [])


def held(memory: Memory) -> Held:
    """A copy of all that a memory holds."""
    records = {}
    for layer in memory.geometry.layers:
        pieces = [
            torch.stack((chunk.keys[0], chunk.values[0]), 1).permute(2, 1, 0, 3)
            for chunk in memory.store.chunks(layer, 0, memory.tokens)
        ]
        shape = (0, 2, memory.geometry.kv_heads, memory.geometry.head_dim)
        empty = torch.zeros(shape, dtype=getattr(torch, memory.geometry.dtype))
        records[layer] = torch.cat([empty, *pieces])
    rows = memory._backend.read_table(0, memory.tokens).tolist()  # no public door to offsets, only to what they mean
    documents = [document.to_dict() for document in memory.documents]
    return Held(memory.tokens, records, rows, [memory.text_of(document) for document in memory.documents], documents)


def assert_same(actual: Held, expected: Held) -> None:
    """Equal bit for bit; the message names what differs."""
    assert actual.tokens == expected.tokens
    assert actual.rows == expected.rows
    assert actual.texts == expected.texts
    assert actual.documents == expected.documents
    assert set(actual.records) == set(expected.records)
    for layer, records in expected.records.items():
        mine = actual.records[layer]
        assert mine.dtype == records.dtype
        assert mine.shape == records.shape
        same = (mine.contiguous().view(torch.uint8) == records.contiguous().view(torch.uint8)).flatten(1).all(1)
        assert same.all(), f"layer {layer}: the records of tokens {(~same).nonzero().flatten().tolist()[:8]} differ"


def assert_begins(actual: Held, expected: Held, *, window: int = WINDOW) -> None:
    """The memory of an unfinished reading: whole windows, as in the finished one."""
    assert_same(Held(actual.tokens, actual.records, actual.rows, [], []), expected.up_to(actual.tokens))
    assert len(actual.documents) <= len(expected.documents)
    for mine, whole in zip(actual.documents, expected.documents, strict=False):
        assert (mine["name"], mine["start"], mine["text_start"]) == (whole["name"], whole["start"], whole["text_start"])
        assert mine["tokens"] % window == 0 or mine["tokens"] == whole["tokens"]
        assert mine["complete"] == (mine["tokens"] == whole["tokens"])
    for number, (mine, whole) in enumerate(zip(actual.texts, expected.texts, strict=False)):
        document = actual.documents[number]
        stop = document["start"] + document["tokens"]
        known = len(whole) if document["complete"] else expected.rows[stop][0]
        assert mine == whole[:known], "the text reaches to the next window's first token"
    unfinished = [not document["complete"] for document in actual.documents]
    assert not any(unfinished[:-1]), "only the last document may be unfinished"


def question(count: int = 11) -> torch.Tensor:
    """Ids (1, count)."""
    return torch.arange(5, 5 + count).unsqueeze(0)


def where(place: str, path: Path, model: Any, words: Any) -> Memory:
    """A new memory in RAM or on disk."""
    return Memory(model, words) if place == "ram" else Memory.create(path, model, words)


class Stopper:
    """Raises KeyboardInterrupt at the n-th time it is asked."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
