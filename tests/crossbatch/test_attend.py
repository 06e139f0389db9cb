"""Crossbatch attention: the form without copies equals the definition, in values and in every gradient.

python -m pytest tests/crossbatch/test_attend.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longfocus.crossbatch import reference
from longfocus.crossbatch.attend import Table, attend_rows

EXACT = 1e-9
NAMES = ("query", "key", "value", "outer_query", "context_key", "context_value")


def _inputs(heads: tuple[int, int], rows: int, tokens: int, dim: int, dtype: torch.dtype, kind: str) -> list[Any]:
    """Six leaves; under `shared` the outer query is the query, and contexts' values are the rows' own."""
    query = torch.randn(rows, heads[0], tokens, dim, dtype=dtype, requires_grad=True)
    key, value, context_key = (
        torch.randn(rows, heads[1], tokens, dim, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    if kind == "shared":
        return [query, key, value, None, context_key, None]
    outer = torch.randn(rows, heads[0], tokens, dim, dtype=dtype, requires_grad=True)
    more = torch.randn(rows, heads[1], tokens, dim, dtype=dtype, requires_grad=True)
    return [query, key, value, outer, context_key, more]


def _written_out(inputs: list[Any], table: Table, scale: float, softcap: float | None) -> Tensor:
    query, key, value, outer, context_key, context_value = inputs
    return reference.attend_rows(
        query,
        key,
        value,
        query if outer is None else outer,
        context_key,
        value if context_value is None else context_value,
        table.positives,
        table.negatives,
        table.lengths,
        scale=scale,
        softcap=softcap,
        negative_copies=table.negative_copies,
    )


def _compare(inputs: list[Any], table: Table, softcap: float | None, tolerance: float) -> None:
    leaves = [tensor for tensor in inputs if tensor is not None]
    names = [name for name, tensor in zip(NAMES, inputs, strict=True) if tensor is not None]
    expected = _written_out(inputs, table, 0.3, softcap)
    weight = torch.randn_like(expected)
    for row, length in enumerate(table.lengths):  # queries of padding have no loss
        weight[row, :, length:] = 0
    expected_grads = torch.autograd.grad((expected * weight).sum(), leaves, allow_unused=True)
    out, _ = attend_rows(*inputs, table, scale=0.3, softcap=softcap)
    grads = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    difference = ((out - expected) * (weight != 0)).abs().max()
    assert difference <= tolerance, f"out differs by {difference:.2e}"
    for name, grad, wanted in zip(names, grads, expected_grads, strict=True):
        wanted = torch.zeros_like(grad) if wanted is None else wanted
        assert (grad - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max())), f"gradient of {name}"


@given(
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (2, 2)]),
    tokens=st.sampled_from([1, 2, 7, 16]),
    rows=st.integers(1, 5),
    kind=st.sampled_from(["shared", "separate"]),
    softcap=st.sampled_from([None, 2.0]),
    copies=st.sampled_from([1.0, 8.0]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_equals_one_softmax_over_gathered_keys(
    heads: tuple[int, int], tokens: int, rows: int, kind: str, softcap: float | None, copies: float, data: Any
) -> None:
    torch.manual_seed(rows * 100 + tokens)
    positives, negatives = [], []
    for row in range(rows):
        others = data.draw(st.permutations([source for source in range(rows) if source != row]))
        cut = data.draw(st.integers(0, len(others)))
        end = data.draw(st.integers(cut, len(others)))
        positives.append(others[:cut])
        negatives.append(others[cut:end])
    lengths = [data.draw(st.integers(1, tokens)) for _ in range(rows)]
    table = Table(positives, negatives, lengths, negative_copies=copies)
    _compare(_inputs(heads, rows, tokens, 6, torch.float64, kind), table, softcap, EXACT)


def test_plain_form_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form for other devices and for softcaps, cut into many small blocks."""
    from longfocus.crossbatch import attend

    monkeypatch.setattr(attend, "BLOCK_SCORES", 40)
    torch.manual_seed(0)
    table = Table([[1], [0, 2], []], [[2], [], [0, 1]], [9, 5, 9])
    _compare(_inputs((6, 2), 3, 9, 4, torch.float64, "shared"), table, 3.0, EXACT)


def test_no_context_is_local_attention() -> None:
    torch.manual_seed(0)
    query, key, value, _, context_key, _ = _inputs((4, 2), 3, 8, 5, torch.float64, "shared")
    table = Table([[]] * 3, [[]] * 3, [8] * 3)
    out, mass = attend_rows(query, key, value, None, context_key, None, table, scale=0.3)
    local = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    assert (out - local).abs().max() < EXACT
    assert (mass.rows, mass.rows_with_context, mass.additional) == (0, 0, 0.0)


def test_padding_of_a_context_is_seen_by_none() -> None:
    torch.manual_seed(0)
    inputs = _inputs((4, 2), 2, 8, 5, torch.float32, "shared")
    table = Table([[1], []], [[], [0]], [8, 3])
    first, _ = attend_rows(*inputs, table, scale=0.3)
    with torch.no_grad():
        inputs[4][1, :, 3:] = torch.nan
        inputs[2][1, :, 3:] = 1e4
    second, _ = attend_rows(*inputs, table, scale=0.3)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1, :, :3], second[1, :, :3])


@torch.no_grad()
def test_mass_is_what_the_softmax_gives() -> None:
    torch.manual_seed(0)
    query, key, value, _, context_key, _ = _inputs((4, 2), 3, 8, 5, torch.float64, "shared")
    table = Table([[1], [], []], [[2], [], []], [8, 8, 5], negative_copies=3.0)
    _, mass = attend_rows(query, key, value, None, context_key, None, table, scale=0.3)

    def total(keys: Tensor) -> Tensor:
        return (query[0] @ keys.repeat_interleave(2, 0).transpose(1, 2) * 0.3).exp()

    positive, negative = total(context_key[1]).sum(-1), 3 * total(context_key[2][:, :5]).sum(-1)
    local = total(key[0]).tril().sum(-1)
    assert mass.positive == pytest.approx(float((positive / (positive + negative)).mean()))
    outside = positive + negative
    assert mass.additional == pytest.approx(float((outside / (outside + local)).mean()))
    assert (mass.rows, mass.rows_with_context) == (1, 1)


def test_copies_of_negatives_equal_as_many_equal_windows() -> None:
    torch.manual_seed(0)
    query, key, value, _, context_key, _ = _inputs((4, 2), 3, 6, 5, torch.float64, "shared")
    with torch.no_grad():
        context_key[2], value[2], key[2] = context_key[1], value[1], key[1]
    twice, _ = attend_rows(
        query, key, value, None, context_key, None, Table([[]] * 3, [[1, 2], [], []], [6] * 3), scale=1.0
    )
    copied = Table([[]] * 3, [[1], [], []], [6] * 3, negative_copies=2.0)
    once, _ = attend_rows(query, key, value, None, context_key, None, copied, scale=1.0)
    assert (twice[0] - once[0]).abs().max() < EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_near_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = _inputs((9, 3), 4, 32, 16, dtype, "shared")
    table = Table([[], [0], [1, 0], []], [[3], [], [3], [0, 1, 2]], [32, 32, 32, 20])
    wide = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = _written_out(wide, table, 0.25, None)
    out, _ = attend_rows(*inputs, table, scale=0.25)
    assert out.dtype == dtype
    assert (out.double() - expected)[:3].abs().max() < 0.05
    out[:3].float().sum().backward()
    expected[:3].sum().backward()
    for name, narrow, exact in zip(NAMES, inputs, wide, strict=True):
        if narrow is not None:
            assert narrow.grad.isfinite().all(), name
            assert (narrow.grad.double() - exact.grad).abs().max() < 0.08 * max(1.0, float(exact.grad.abs().max())), (
                name
            )
