"""r_d from log-normalisers is r_d from explicit softmax weights, for every family; the pass gives the loss of ordinary
reading; keys are held once.

    python -m pytest tests/analysis/test_attention_mass.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longfocus.analysis.attention_mass import PositiveMass, ReadWindows, positive_mass
from longfocus.attention.context import LocalWindow
from longfocus.crossbatch.context import CrossbatchContext
from longfocus.crossbatch.plan import Contexts, Rows
from longfocus.subjects.local import FocusedSubject
from tests.model.helpers import WINDOW, focused
from tests.models import FAMILIES, MEMORY_LAYERS, assert_close, tokens
from tests.small_tokenizers import tokenizer

PIECES = 5


def pieces(count: int = PIECES, size: int = WINDOW) -> list[list[int]]:
    return tokens(count, size, seed=2).tolist()


BLOCK = tokens(1, WINDOW, seed=3)[0].tolist()


class Spy(PositiveMass):
    """Remembers what each layer was handed, and its answer."""

    def __init__(self, read: ReadWindows, positive: int, negatives: Sequence[int]) -> None:
        super().__init__(read, positive, negatives)
        self.handed: dict[int, tuple[LocalWindow, float, float | None, Tensor]] = {}

    def join(self, layer: int, window: LocalWindow, *, scale: float, softcap: float | None) -> Tensor:
        out = super().join(layer, window, scale=scale, softcap=softcap)
        self.handed[layer] = (window, scale, softcap, out)
        return out


def passed(model: Any, spy: Spy, block: Sequence[int] = BLOCK) -> float:
    """Loss of the block beside the pieces, through the model's forward."""
    targets = torch.tensor([[*block[1:], -100]])
    with torch.no_grad():
        return float(model(torch.tensor([list(block)]), context=spy, shift_labels=targets).row_losses[0])


def records(model: Any, ids: Sequence[int], layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values (Hkv, n, D) of a piece that is read by itself."""
    read = ReadWindows(model)
    read.add(ids)
    window = model.focus.config.window_tokens
    first = torch.arange(len(ids)) % window == 0
    found = []
    for kind in (0, 1):
        parts = {}
        for part in (True, False):
            chunks = list(read.chunks(layer, [0], first=part))
            parts[part] = torch.cat([(chunk.keys, chunk.values)[kind][0] for chunk in chunks], 1)
        whole = parts[True].new_empty(parts[True].shape[0], len(ids), parts[True].shape[2])
        whole[:, first], whole[:, ~first] = parts[True], parts[False]
        found.append(whole)
    return found[0], found[1]


def softmax_by_hand(
    model: Any, spy: Spy, layer: int, given: Sequence[Sequence[int]], k: int | None = None
) -> tuple[Tensor, Tensor]:
    """Weights (Hq, T, local + additional) of one softmax over everything, keys repeated per query head, and its output.

    Additional keys come piece by piece, as in `given`; with k each query of each head keeps its k best of them.
    """
    window, scale, softcap, _ = spy.handed[layer]
    groups = window.query.shape[1] // window.key.shape[1]
    held = [records(model, ids, layer) for ids in given]
    keys = torch.cat([key for key, _ in held], 1).to(window.query.dtype).repeat_interleave(groups, 0)
    values = torch.cat([value for _, value in held], 1).to(window.query.dtype).repeat_interleave(groups, 0)
    local = window.query[0] @ window.key[0].repeat_interleave(groups, 0).transpose(-1, -2) * scale
    outer = window.outer_query[0] @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        local, outer = softcap * torch.tanh(local / softcap), softcap * torch.tanh(outer / softcap)
    local = local.masked_fill(torch.ones(local.shape[-2:]).triu(1).bool(), -torch.inf)
    if k is not None:
        outer = outer.masked_fill(outer < outer.topk(k).values[..., -1:], -torch.inf)
    weights = torch.softmax(torch.cat((local, outer), -1), -1)
    every = torch.cat((window.value[0].repeat_interleave(groups, 0), values), 1)
    return weights, weights @ every


def check(model: Any, spy: Spy, given: Sequence[Sequence[int]], tolerance: float, k: int | None = None) -> None:
    """Shares and outputs of every layer; the positive is the first of `given`."""
    window = model.focus.config.window_tokens
    assert set(spy.positive) == set(MEMORY_LAYERS)
    for layer in MEMORY_LAYERS:
        weights, out = softmax_by_hand(model, spy, layer, given, k)
        assert_close(spy.handed[layer][3][0], out, tolerance, f"output of layer {layer}")
        outside = weights[:, :, len(BLOCK) :]
        own = outside[:, :, : len(given[0])]
        r_d = (own.sum(-1) / outside.sum(-1)).mean(-1)
        assert_close(spy.positive[layer], r_d, tolerance, f"r_d of layer {layer}")
        assert_close(spy.additional[layer], outside.sum(-1).mean(-1), tolerance, f"share outside in layer {layer}")
        firsts = torch.cat([torch.arange(len(ids)) % window == 0 for ids in given])
        rest, own_rest = outside[:, :, ~firsts].sum(-1), own[:, :, ~firsts[: len(given[0])]].sum(-1)
        held = rest > 0
        r_rest = torch.where(held, own_rest / rest, 0.0).sum(-1) / held.sum(-1)
        assert_close(spy.positive_rest[layer], r_rest, tolerance, f"r_d without first tokens of layer {layer}")
        spread = r_d.max() - r_d.min()
        assert spread > 0.01, "heads differ, so that a mistaken head would show"


@pytest.mark.parametrize("name", [*FAMILIES, "llama_9_heads", "llama_1_kv_head", "llama_yarn", "phi3_partial"])
def test_shares_are_those_of_explicit_softmax_weights(name: str) -> None:
    model = focused(name)
    read = ReadWindows(model)
    given = pieces()
    own, *others = [read.add(ids) for ids in given]
    spy = Spy(read, own, others)
    passed(model, spy)
    check(model, spy, given, 1e-5)


def test_in_float32_and_with_records_in_float16() -> None:
    model = focused("llama", dtype=torch.float32, memory_dtype="float16")
    read = ReadWindows(model)
    given = pieces()
    own, *others = [read.add(ids) for ids in given]
    spy = Spy(read, own, others)
    passed(model, spy)
    check(model, spy, given, 1e-4)


@pytest.mark.parametrize("k", [1, 7, 64])
def test_with_top_k_retrieval_only_the_retrieved_keys_count(k: int) -> None:
    model = focused("llama_9_heads", retrieval="exact", k=k)
    read = ReadWindows(model)
    given = pieces()
    own, *others = [read.add(ids) for ids in given]
    spy = Spy(read, own, others)
    passed(model, spy)
    check(model, spy, given, 1e-5, k=k)


def test_enough_keys_retrieved_is_dense_and_one_document_has_it_all() -> None:
    given = pieces()
    found = []
    for options in ({}, {"retrieval": "exact", "k": PIECES * WINDOW}):
        model = focused("qwen3", **options)
        read = ReadWindows(model)
        own, *others = [read.add(ids) for ids in given]
        found.append(positive_mass(model, BLOCK, read, own, others))
        alone = positive_mass(model, BLOCK, read, own, [])
        for layer in MEMORY_LAYERS:
            assert alone.positive[layer] == pytest.approx([1.0] * 6, abs=1e-9)
            assert alone.positive_rest[layer] == pytest.approx([1.0] * 6, abs=1e-9)
            assert max(alone.additional[layer]) < 1
    dense, retrieved = found
    assert dense.nll == pytest.approx(retrieved.nll, rel=1e-6)
    for layer in MEMORY_LAYERS:
        assert dense.positive[layer] == pytest.approx(retrieved.positive[layer], rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_the_loss_is_that_of_a_memory_of_the_same_documents(name: str) -> None:
    """Ordinary reading: others by themselves, then the own document; the block meets the last d windows."""
    model = focused(name)
    subject = FocusedSubject(model, tokenizer("byte_level"), name)
    given = pieces()
    read = ReadWindows(model)
    own, *others = [read.add(ids) for ids in given]
    ids = [*given[0], *BLOCK]
    for d in (1, 3, 5):
        found = positive_mass(model, BLOCK, read, own, others[: d - 1])
        before = given[1:d]
        (expected,) = subject.block_losses(ids, [WINDOW], WINDOW, [d * WINDOW], before)
        assert found.tokens == WINDOW - 1
        assert found.nll == pytest.approx(float(expected.nll.sum()), rel=1e-5)


def test_it_is_what_training_reports_where_both_see_the_same_keys() -> None:
    """With one memory layer the keys of a batch's rows do not depend on what the rows see."""
    model = focused("llama", memory_layers=(2,))
    given = pieces()
    count = len(given)
    ids = torch.tensor([*given, BLOCK])
    rows = Rows(
        np.array([*range(count), 0]),
        np.array([*range(count), 0]),
        np.array([0] * count + [1]),
        np.full(count + 1, WINDOW),
    )
    positives, negatives = np.full((count + 1, 1), -1), np.full((count + 1, count - 1), -1)
    positives[-1], negatives[-1] = 0, np.arange(1, count)
    table = Contexts(positives, negatives, np.zeros(count + 1, dtype=np.int64), np.arange(count + 1))
    context = CrossbatchContext(rows, table)
    targets = torch.cat((ids[:, 1:], torch.full((count + 1, 1), -100)), 1)
    with torch.no_grad():
        output = model(ids, context=context, shift_labels=targets)
    read = ReadWindows(model)
    own, *others = [read.add(ids) for ids in given]
    found = positive_mass(model, BLOCK, read, own, others)
    assert math.fsum(found.positive[2]) / 6 == pytest.approx(context.mass[2].positive, rel=1e-5)
    assert math.fsum(found.additional[2]) / 6 == pytest.approx(context.mass[2].additional, rel=1e-5)
    assert found.nll == pytest.approx(float(output.row_losses[-1]), rel=1e-5)


def test_pieces_of_several_windows_have_several_first_tokens() -> None:
    model = focused("llama")
    read = ReadWindows(model)
    given = [ids[:size] for ids, size in zip(pieces(4, 60), (60, 24, 25, 59), strict=True)]
    numbers = [read.add(ids) for ids in given]
    assert numbers == [0, 1, 2, 3]
    assert read.first.tokens == 3 + 1 + 2 + 3
    spy = Spy(read, 0, [1, 2, 3])
    passed(model, spy)
    check(model, spy, given, 1e-5)


def test_keys_are_held_once_and_seen_in_place() -> None:
    model = focused("llama")
    read = ReadWindows(model)
    for ids in pieces():
        read.add(ids)
    before = read.first.nbytes + read.rest.nbytes
    for own in range(PIECES):
        positive_mass(model, BLOCK, read, own, [number for number in range(PIECES) if number != own])
    assert read.first.tokens + read.rest.tokens == PIECES * WINDOW
    assert read.first.nbytes + read.rest.nbytes == before
    chunks = list(read.chunks(1, [4, 0, 1, 3], first=False))
    assert [chunk.keys.shape[2] for chunk in chunks] == [2 * (WINDOW - 1), 2 * (WINDOW - 1)], "neighbours are one chunk"
    whole = next(read.rest.chunks(1))
    at = chunks[1].start * whole.keys.stride(2) * whole.keys.element_size()
    assert chunks[1].keys.data_ptr() == whole.keys.data_ptr() + at, "a view, not a copy"


def test_the_order_of_documents_does_not_matter() -> None:
    model = focused("llama")
    given = pieces()
    found = []
    for order in (range(PIECES), (3, 1, 4, 0, 2)):
        read = ReadWindows(model)
        numbers = {at: read.add(given[at]) for at in order}
        found.append(positive_mass(model, BLOCK, read, numbers[0], [numbers[at] for at in (1, 2, 3, 4)]))
    assert found[0].nll == pytest.approx(found[1].nll, rel=1e-6)
    assert found[0].positive[2] == pytest.approx(found[1].positive[2], rel=1e-6)
