"""Attention over a union of key sets is computed set by set and merged exactly; the fast form equals the definition.

Shows: `attend` (fused and reference) equals softmax written out with repeated heads, in its output, its
log-normaliser and every gradient, at awkward sizes and under every mask; `merge` of any split of the keys
equals attention over all of them; empty sets are 0 and -inf and never NaN, in every dtype.

    python -m pytest tests/attention/test_primitive.py
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longfocus.attention import attend as chosen
from longfocus.attention import fused, merge, reference, select, share
from tests.models import assert_close

# float64 keeps 16 digits; sums over at most 1,100 keys of scores below 30 lose three or four of them.
EXACT = 1e-12
# One rounding of an output of size 1 to 3, and one of the weights inside the kernel.
HALF = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def _fused(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return fused.attend(query, key, value, mask=mask, scale=query.shape[-1] ** -0.5)


IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"reference": reference.attend, "fused": _fused}


class Sizes(NamedTuple):
    """B rows, Hq query heads, Hkv key/value heads, T queries, N keys, D numbers in a head."""

    rows: int
    query_heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int


SIZES = [
    Sizes(1, 1, 1, 1, 1, 1),
    Sizes(2, 6, 2, 7, 13, 5),
    Sizes(3, 9, 3, 1, 31, 8),
    Sizes(1, 4, 1, 5, 17, 3),
    Sizes(2, 3, 3, 11, 513, 4),
    Sizes(1, 4, 2, 3, 1100, 2),
    Sizes(2, 8, 2, 33, 64, 16),
]
MASKS = [
    "none",
    "causal",
    "random",
    "shared_by_rows",
    "per_kv_head",
    "empty_in_one_kv_head",
    "by_key",
    "empty_queries",
    "late_keys",
    "nothing",
]


def _mask(kind: str, sizes: Sizes) -> Tensor | None:
    rows, _, key_heads, queries, keys, _ = sizes
    match kind:
        case "none":
            return None
        case "causal":
            return torch.ones(queries, keys).tril(keys - queries).bool()[None, None]
        case "random":
            return torch.rand(rows, 1, queries, keys) < 0.6
        case "shared_by_rows":
            return torch.rand(1, 1, queries, keys) < 0.6
        case "per_kv_head":
            return torch.rand(rows, key_heads, queries, keys) < 0.6
        case "empty_in_one_kv_head":
            mask = torch.rand(rows, key_heads, queries, keys) < 0.6
            mask[:, 0, : (queries + 1) // 2] = False
            return mask
        case "by_key":
            return torch.rand(rows, 1, 1, keys) < 0.6
        case "empty_queries":
            mask = torch.rand(rows, 1, queries, keys) < 0.6
            mask[0, :, : (queries + 1) // 2] = False
            return mask
        case "late_keys":  # the kernel works in blocks of 512 keys: some are masked whole
            mask = torch.zeros(1, 1, queries, keys, dtype=torch.bool)
            mask[..., keys * 3 // 5 :] = True
            return mask
        case "nothing":
            return torch.zeros(rows, 1, queries, keys, dtype=torch.bool)
    raise ValueError(kind)


def _inputs(sizes: Sizes, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value; scores of deviation about 4, so that attention is far from uniform."""
    rows, query_heads, key_heads, queries, keys, dim = sizes
    query = 2 * torch.randn(rows, query_heads, queries, dim, dtype=torch.float64)
    key = 2 * torch.randn(rows, key_heads, keys, dim, dtype=torch.float64)
    value = torch.randn(rows, key_heads, keys, dim, dtype=torch.float64)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _by_hand(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax written out in float64, key heads repeated, queries without a key set to 0 and -inf."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("bhtd,bhnd->bhtn", query, key) / query.shape[-1] ** 0.5
    if mask is not None:
        mask = mask.expand(query.shape[0], mask.shape[1], *scores.shape[2:])
        mask = mask.repeat_interleave(groups, 1) if mask.shape[1] == key.shape[1] // groups else mask
        scores = scores.masked_fill(~mask, -torch.inf)
    empty = (scores == -torch.inf).all(-1)
    weights = torch.softmax(scores.masked_fill(empty.unsqueeze(-1), 0.0), -1).masked_fill(empty.unsqueeze(-1), 0.0)
    return weights @ value, torch.logsumexp(scores, -1)


def _check_lse(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Equal where finite, and -inf in the same places."""
    assert torch.equal(actual == -torch.inf, expected == -torch.inf), f"{what}: -inf in other places than expected"
    finite = expected != -torch.inf
    assert_close(actual[finite], expected[finite], tolerance, what)


def _scalar(out: Tensor, lse: Tensor, weight_out: Tensor, weight_lse: Tensor) -> Tensor:
    """A number that depends on every finite result."""
    finite = lse.isfinite()
    return (out * weight_out).sum() + (torch.where(finite, lse, torch.zeros_like(lse)) * weight_lse).sum()


# -- attend ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_out_and_lse_equal_softmax_written_out(name: str, sizes: Sizes, mask_kind: str) -> None:
    query, key, value = _inputs(sizes)
    mask = _mask(mask_kind, sizes)
    out, lse = IMPLEMENTATIONS[name](query, key, value, mask=mask)
    expected_out, expected_lse = _by_hand(query, key, value, mask)
    assert_close(out, expected_out, EXACT, "out")
    _check_lse(lse, expected_lse, EXACT, "lse")
    assert (out[expected_lse == -torch.inf] == 0).all(), "out must be 0 where a query has no key"


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "x".join(map(str, s)))
def test_fused_gradients_equal_reference_also_through_lse(
    sizes: Sizes, mask_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # small blocks, so that the backward pass has several and the last is shorter
    monkeypatch.setattr(fused, "_BACKWARD_SCORES", 3 * sizes.query_heads * sizes.keys)
    mask = _mask(mask_kind, sizes)
    start = _inputs(sizes)
    weight_out = torch.randn(sizes.rows, sizes.query_heads, sizes.queries, sizes.dim, dtype=torch.float64)
    weight_lse = torch.randn(sizes.rows, sizes.query_heads, sizes.queries, dtype=torch.float64)
    gradients = {}
    for name, attend in IMPLEMENTATIONS.items():
        leaves = [x.clone().requires_grad_() for x in start]
        _scalar(*attend(*leaves, mask=mask), weight_out, weight_lse).backward()
        gradients[name] = [leaf.grad for leaf in leaves]
    for what, definition, fast in zip(("query", "key", "value"), *gradients.values(), strict=True):
        assert_close(fast, definition, EXACT, f"gradient of {what}")


@pytest.mark.parametrize("only", ["out", "lse"])
def test_gradient_through_one_result_alone(only: str) -> None:
    """The kernel's own derivative ignores lse, so each result is asked for by itself."""
    start = _inputs(Sizes(2, 6, 2, 7, 13, 5))
    gradients = []
    for attend in IMPLEMENTATIONS.values():
        leaves = [x.clone().requires_grad_() for x in start]
        out, lse = attend(*leaves)
        (out.sin().sum() if only == "out" else lse.sin().sum()).backward()
        gradients.append([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
    for what, expected, actual in zip(("query", "key", "value"), *gradients, strict=True):
        assert_close(actual, expected, EXACT, f"gradient of {what} through {only}")
    assert gradients[0][0].abs().max() > 1e-2, "the gradient that is compared is not 0"


@pytest.mark.parametrize("mask_kind", ["none", "random", "empty_in_one_kv_head", "empty_queries"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_gradcheck(name: str, mask_kind: str) -> None:
    sizes = Sizes(2, 4, 2, 3, 5, 3)
    mask = _mask(mask_kind, sizes)
    leaves = [x.requires_grad_() for x in _inputs(sizes)]

    def function(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = IMPLEMENTATIONS[name](query, key, value, mask=mask)
        return out, torch.where(lse.isfinite(), lse, torch.zeros_like(lse))

    assert torch.autograd.gradcheck(function, leaves)


def test_gradcheck_of_softcap_and_scale() -> None:
    leaves = [x.requires_grad_() for x in _inputs(Sizes(1, 4, 2, 3, 5, 3))]
    assert torch.autograd.gradcheck(lambda q, k, v: chosen(q, k, v, scale=0.7, softcap=2.0), leaves)


def test_softcap_bounds_scores_before_the_softmax() -> None:
    query, key, value = _inputs(Sizes(1, 4, 2, 3, 7, 5))
    scores = torch.einsum("bhtd,bhnd->bhtn", query, key.repeat_interleave(2, 1)) * 0.9
    scores = 3.0 * torch.tanh(scores / 3.0)
    out, lse = chosen(query, key, value, scale=0.9, softcap=3.0)
    assert_close(lse, torch.logsumexp(scores, -1), EXACT, "lse")
    assert_close(out, torch.softmax(scores, -1) @ value.repeat_interleave(2, 1), EXACT, "out")


@pytest.mark.parametrize("scale", [0.25, 1.0])
@pytest.mark.parametrize("attend", [reference.attend, fused.attend], ids=["reference", "fused"])
def test_scale_multiplies_the_inner_products(attend: Any, scale: float) -> None:
    query, key, value = _inputs(Sizes(1, 4, 2, 3, 7, 5))
    out, lse = attend(query, key, value, mask=None, scale=scale)
    expected_out, expected_lse = _by_hand(query * scale * 5**0.5, key, value)
    assert_close(out, expected_out, EXACT, "out")
    assert_close(lse, expected_lse, EXACT, "lse")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_strided_views_as_a_cache_hands_them_out(name: str) -> None:
    query, key, value = _inputs(Sizes(2, 6, 2, 5, 40, 8))
    records = torch.stack((key, value), 2).permute(0, 3, 2, 1, 4).contiguous()  # (B, N, 2, Hkv, D)
    key_view, value_view = (records[:, 3:30, i].transpose(1, 2) for i in (0, 1))
    query_view = query.transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = IMPLEMENTATIONS[name](query_view, key_view, value_view)
    expected_out, expected_lse = _by_hand(query, key[:, :, 3:30], value[:, :, 3:30])
    assert_close(out, expected_out, EXACT, "out")
    assert_close(lse, expected_lse, EXACT, "lse")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1024), (1, 4096), (1, 4095), (2, 2048), (5, 1028), (6, 1024), (1, 1023)]
)
def test_long_key_sets_met_by_few_queries(queries: int, keys: int, dtype: torch.dtype) -> None:
    """Generation with a long memory takes another way through the kernel: cut into pieces, as strided views."""
    torch.manual_seed(0)
    sizes = Sizes(1, 9, 3, queries, keys, 8)
    query, key, value = (tensor.to(dtype) for tensor in _inputs(sizes))
    records = torch.stack((key, value), dim=3).permute(0, 2, 1, 3, 4).contiguous()  # as a memory stores them
    key_view, value_view = records[:, :, :, 0].transpose(1, 2), records[:, :, :, 1].transpose(1, 2)
    expected_out, expected_lse = _by_hand(query.double(), key.double(), value.double())
    tolerance = EXACT if dtype == torch.float64 else 1e-5
    for keys_given, values_given in ((key, value), (key_view, value_view)):
        out, lse = _fused(query, keys_given, values_given)
        assert out.dtype == dtype
        assert_close(out, expected_out, tolerance, "out")
        _check_lse(lse, expected_lse, tolerance, "lse")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_no_keys_is_the_empty_set(dtype: torch.dtype) -> None:
    query, key, value = _inputs(Sizes(2, 6, 2, 3, 0, 5), dtype)
    query.requires_grad_()
    out, lse = chosen(query, key, value)
    assert out.dtype == dtype
    assert out.shape == (2, 6, 3, 5)
    assert (out == 0).all()
    assert lse.shape == (2, 6, 3)
    assert (lse == -torch.inf).all()
    assert select.choose(query, key, value, None) == ("reference", "no keys")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("mask_kind", [*MASKS, "first_query_of_600_keys"])
def test_half_precision_is_never_nan_and_near_float64(dtype: torch.dtype, mask_kind: str) -> None:
    """CASES 5: fully masked queries, in float16 and bfloat16."""
    sizes = Sizes(2, 6, 2, 5, 600, 8)
    query, key, value = _inputs(sizes, dtype)
    if mask_kind == "first_query_of_600_keys":
        mask = torch.ones(2, 1, 5, 600, dtype=torch.bool)
        mask[:, :, 0] = False
    else:
        mask = _mask(mask_kind, sizes)
    expected_out, expected_lse = _by_hand(query, key, value, mask)
    for name, attend in IMPLEMENTATIONS.items():
        out, lse = attend(query, key, value, mask=mask)
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        assert_close(out, expected_out, HALF[dtype], f"{name} out")
        _check_lse(lse, expected_lse, HALF[dtype], f"{name} lse")
        assert (out[expected_lse == -torch.inf] == 0).all(), f"{name}: out must be 0 where a query has no key"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_very_negative_scores_beat_the_mask(name: str, dtype: torch.dtype) -> None:
    """CASES 6: every score is below -1e5 and half of the keys are masked; the other half still counts."""
    # powers of two, so that float16 holds the inputs exactly; scores are -2^17 - 8j
    query = torch.full((1, 2, 3, 4), 256.0, dtype=dtype)
    key = torch.full((1, 1, 10, 4), -256.0, dtype=dtype)
    key[..., 0] -= torch.arange(10, dtype=dtype) / 16 * (0 if dtype == torch.bfloat16 else 1)
    value = torch.randn(1, 1, 10, 4, dtype=torch.float64).to(dtype)
    mask = torch.arange(10).remainder(2).eq(1)[None, None, None]
    out, lse = IMPLEMENTATIONS[name](query, key, value, mask=mask)
    expected_out, expected_lse = _by_hand(query, key, value, mask)
    assert (expected_lse < -1e5).all()
    # float32 holds scores of 1.3e5 to 1/64, so weights to 1.6 %
    tolerance = EXACT if dtype == torch.float64 else 2e-2
    assert_close(out, expected_out, max(tolerance, HALF.get(dtype, 0.0)), "out")
    assert_close(lse / 1e5, expected_lse / 1e5, EXACT if dtype == torch.float64 else 1e-6, "lse / 1e5")
    assert expected_out.abs().max() > 0.1


def test_very_negative_scores_merge_with_an_empty_and_with_a_masked_part() -> None:
    query, key, value = _inputs(Sizes(1, 2, 1, 3, 8, 4), torch.float32)
    query, key = query.abs() * 1e3, -key.abs() * 1e3
    whole = reference.attend(query.double(), key.double(), value.double())
    assert (whole[1] < -1e5).all()
    nothing = chosen(query, key, value, mask=torch.zeros(1, 1, 3, 8, dtype=torch.bool))
    empty = chosen(query, key[:, :, :0], value[:, :, :0])
    for parts in ((nothing, chosen(query, key, value)), (chosen(query, key, value), empty, nothing)):
        out, lse = merge(parts)
        assert_close(out, whole[0], 1e-4, "out")
        assert_close(lse / 1e6, whole[1] / 1e6, 1e-6, "lse / 1e6")


# -- merge -----------------------------------------------------------------------------------------------


@given(
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (9, 3), (5, 1)]),
    rows=st.integers(1, 3),
    queries=st.integers(1, 6),
    cuts=st.lists(st.integers(0, 40), min_size=0, max_size=5),
    keys=st.integers(1, 40),
    dim=st.integers(1, 9),
    masked=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=80)
def test_merge_of_any_split_equals_attention_over_the_union(
    heads: tuple[int, int], rows: int, queries: int, cuts: list[int], keys: int, dim: int, masked: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    sizes = Sizes(rows, *heads, queries, keys, dim)
    query, key, value = _inputs(sizes)
    mask = torch.rand(rows, 1, queries, keys) < 0.5 if masked else None
    edges = [0, *sorted(min(cut, keys) for cut in cuts), keys]
    parts = []
    for low, high in pairwise(edges):
        part_mask = None if mask is None else mask[..., low:high]
        parts.append(chosen(query, key[:, :, low:high], value[:, :, low:high], mask=part_mask))
    expected_out, expected_lse = _by_hand(query, key, value, mask)
    for what, (out, lse) in {"merge": merge(parts), "definition": reference.merge(parts)}.items():
        assert_close(out, expected_out, EXACT, f"{what}: out")
        _check_lse(lse, expected_lse, EXACT, f"{what}: lse")
    out, lse = merge(reversed(parts))
    assert_close(out, expected_out, EXACT, "out in reverse order")
    shares = sum(share(part_lse, lse) for _, part_lse in parts)
    assert_close(shares, (lse != -torch.inf).double(), EXACT, "sum of shares")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_gradients_through_a_merge_equal_those_over_the_union(name: str) -> None:
    attend = IMPLEMENTATIONS[name]
    sizes = Sizes(2, 6, 2, 5, 23, 4)
    start = _inputs(sizes)
    mask = _mask("empty_queries", sizes)
    assert mask is not None
    weight_out, weight_lse = torch.randn(2, 6, 5, 4, dtype=torch.float64), torch.randn(2, 6, 5, dtype=torch.float64)
    gradients = []
    for edges in ([0, 23], [0, 4, 5, 18, 23]):
        query, key, value = (x.clone().requires_grad_() for x in start)
        parts = [
            attend(query, key[:, :, low:high], value[:, :, low:high], mask=mask[..., low:high])
            for low, high in pairwise(edges)
        ]
        _scalar(*merge(parts), weight_out, weight_lse).backward()
        gradients.append((query.grad, key.grad, value.grad))
    for what, whole, merged in zip(("query", "key", "value"), *gradients, strict=True):
        assert_close(merged, whole, EXACT, f"gradient of {what}")


def test_gradcheck_of_merge() -> None:
    parts = [
        (torch.randn(1, 2, 3, 4, dtype=torch.float64), 3 * torch.randn(1, 2, 3, dtype=torch.float64)) for _ in range(3)
    ]
    leaves = [x.requires_grad_() for part in parts for x in part]

    def function(*flat: Tensor) -> tuple[Tensor, Tensor]:
        return merge(zip(flat[::2], flat[1::2], strict=True))

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_an_empty_part_changes_nothing(dtype: torch.dtype) -> None:
    query, key, value = _inputs(Sizes(2, 4, 2, 3, 9, 4), dtype)
    part = chosen(query, key, value)
    empty = chosen(query, key[:, :, :0], value[:, :, :0])
    for parts in ((part, empty), (empty, part), (empty, part, empty)):
        out, lse = merge(parts)
        assert out.dtype == dtype
        assert torch.equal(out, part[0])
        assert torch.equal(lse, part[1])


def test_empty_parts_alone_stay_empty_with_finite_gradients() -> None:
    out_a, out_b = (torch.zeros(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    lse_a, lse_b = (torch.full((1, 2, 3), -torch.inf, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out, lse = merge(((out_a, lse_a), (out_b, lse_b)))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    out.sum().backward()
    for name, leaf in {"out": out_a, "lse": lse_a}.items():
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all(), f"gradient of {name}"


def test_merge_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no part given"):
        merge(())


def test_share_is_the_explicit_softmax_mass_of_a_part() -> None:
    query, key, value = _inputs(Sizes(1, 2, 1, 5, 20, 4))
    scores = torch.einsum("bhtd,bhnd->bhtn", query, key.expand(1, 2, -1, -1)) / 2
    _, lse_all = chosen(query, key, value)
    _, lse_part = chosen(query, key[:, :, 12:], value[:, :, 12:])
    assert_close(share(lse_part, lse_all), torch.softmax(scores, -1)[..., 12:].sum(-1), EXACT, "share")


def test_share_is_zero_where_both_are_empty() -> None:
    empty = torch.full((3,), -torch.inf)
    assert share(empty, empty).tolist() == [0, 0, 0]
    assert share(empty, torch.zeros(3)).tolist() == [0, 0, 0]


# -- select ----------------------------------------------------------------------------------------------


def test_choice_says_why() -> None:
    query, key, value = _inputs(Sizes(1, 2, 1, 3, 4, 4), torch.float32)
    assert select.choose(query, key, value, None) == ("fused", "fused CPU kernel")
    assert select.choose(query, key, value, 5.0) == ("reference", "softcap")
    assert select.choose(query, key.half(), value.half(), None)[0] == "reference"
    assert select.choose(query, key, value[..., :2], None)[0] == "reference"


def test_values_of_another_width_than_keys() -> None:
    query, key, value = _inputs(Sizes(1, 4, 2, 3, 7, 6))
    out, lse = chosen(query, key, value[..., :2])
    expected_out, expected_lse = _by_hand(query, key, value[..., :2])
    assert_close(out, expected_out, EXACT, "out")
    assert_close(lse, expected_lse, EXACT, "lse")
