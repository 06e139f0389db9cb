"""A training pass equals reading: with all earlier windows as positives, its loss is that of a model that read them.

python -m pytest tests/training/test_training_pass.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longfocus.crossbatch.context import CrossbatchContext
from longfocus.crossbatch.plan import Contexts, Rows, documents, plan_contexts
from longfocus.errors import UnsupportedCallError
from longfocus.model.token_loss import token_losses
from tests.model.helpers import focused
from tests.models import MODELS, assert_close, tokens

WINDOW = 12


def _rows(texts: int, windows: int, last: int = WINDOW) -> Rows:
    places = np.repeat(np.arange(texts), windows)
    lengths = np.full(texts * windows, WINDOW)
    lengths[windows - 1 :: windows] = last
    return Rows(places, places.copy(), np.tile(np.arange(windows), texts), lengths)


def _everything_before(rows: Rows, **options: Any) -> CrossbatchContext:
    table = plan_contexts(rows, documents(1, 99), generator=np.random.default_rng(0))
    return CrossbatchContext(rows, table, **options)


def _batch(ids: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (R, WINDOW) of texts (B, N), their lengths, and each position's next token."""
    windows = len(rows) // ids.shape[0]
    given = torch.zeros(len(rows), WINDOW, dtype=torch.long)
    targets = torch.full((len(rows), WINDOW), -100)
    for row in range(len(rows)):
        text, start, n = row // windows, row % windows * WINDOW, int(rows.lengths[row])
        given[row, :n] = ids[text, start : start + n]
        after = ids[text, start + 1 : start + n + 1]
        targets[row, : len(after)] = after
    return given, targets, torch.from_numpy(rows.lengths)


@pytest.mark.parametrize("last", [WINDOW, 9])
def test_replaced_firsts_of_windows_are_those_of_reading(last: int) -> None:
    model = focused("llama_9_heads", window=WINDOW, window_first="replaced")
    rows = _rows(2, 4, last)
    ids = tokens(2, 3 * WINDOW + last)
    given, targets, lengths = _batch(ids, rows)
    expected = model(ids, labels=ids, use_cache=False).loss.detach()
    kept, replaced = (
        model(
            given, context=_everything_before(rows, replace_first=replace), lengths=lengths, shift_labels=targets
        ).loss
        for replace in (False, True)
    )
    assert_close(replaced.detach(), expected, 2e-6, "loss")
    assert abs(float(kept.detach() - expected)) > 1e-3


def test_a_window_of_one_token_keeps_its_first() -> None:
    """There is padding where a second would be."""
    model = focused("llama_9_heads", window=WINDOW)
    rows = _rows(2, 2, 1)
    given, targets, lengths = _batch(tokens(2, WINDOW + 1), rows)
    negatives = plan_contexts(rows, documents(2, 2), generator=np.random.default_rng(0))
    losses = []
    for padding in (0, 5):
        given[torch.arange(WINDOW)[None] >= lengths[:, None]] = padding
        context = CrossbatchContext(rows, negatives, replace_first=True)
        losses.append(model(given, context=context, lengths=lengths, shift_labels=targets).loss.detach())
    assert (negatives.negatives >= 0).any()
    assert_close(losses[1], losses[0], 1e-9, "loss")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("last", [WINDOW, 9])
def test_loss_equals_that_of_reading_window_by_window(name: str, last: int) -> None:
    options: dict[str, Any] = {"window": WINDOW}
    model = focused(name, **options)
    rows = _rows(2, 4, last)
    ids = tokens(2, 3 * WINDOW + last)
    given, targets, lengths = _batch(ids, rows)
    expected = model(ids, labels=ids, use_cache=False).loss
    found = model(given, context=_everything_before(rows), lengths=lengths, shift_labels=targets)
    assert_close(found.loss.detach(), expected.detach(), 2e-6, "loss")
    assert int(found.row_targets.sum()) == int((targets != -100).sum())
    assert_close(found.row_losses.sum() / found.row_targets.sum(), expected.detach(), 2e-6, "row losses")


@pytest.mark.parametrize("positions", ["first", "none"])
def test_gradients_equal_those_of_reading_window_by_window(positions: str) -> None:
    rows = _rows(1, 3)
    ids = tokens(1, 3 * WINDOW)
    given, targets, lengths = _batch(ids, rows)
    grads = []
    for crossbatch in (False, True):
        model = focused("llama_9_heads", window=WINDOW, memory_positions=positions).train()
        if crossbatch:
            loss = model(given, context=_everything_before(rows), lengths=lengths, shift_labels=targets).loss
        else:
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        grads.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, grad in grads[1].items():
        # a memory holds detached records while reading, so only what leads to no memory key may be compared
        if "layers.3" in name or "lm_head" in name or name.endswith("model.norm.weight"):
            assert_close(grad, grads[0][name], 1e-5, name)


def _mixed(rows: Rows) -> CrossbatchContext:
    table = plan_contexts(rows, documents(3, 2), choice="random", generator=np.random.default_rng(3))
    return CrossbatchContext(rows, table, negative_copies=4.0)


def test_checkpointing_changes_neither_loss_nor_gradients() -> None:
    rows = _rows(3, 3, 5)
    given, targets, lengths = _batch(tokens(3, 2 * WINDOW + 5), rows)
    results = []
    for checkpointing in (False, True):
        model = focused("llama", window=WINDOW).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        context = _mixed(rows)
        loss = model(given, context=context, lengths=lengths, shift_labels=targets).loss
        loss.backward()
        grads = {name: weight.grad for name, weight in model.named_parameters()}
        results.append((loss.detach(), grads, {layer: mass.positive for layer, mass in context.mass.items()}))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][2] == results[1][2]
    for name, grad in results[0][1].items():
        assert_close(results[1][1][name], grad, 1e-12, name)


def test_gradients_reach_positives_and_negatives() -> None:
    """The loss of one row alone moves the embeddings of tokens that only its contexts hold."""
    rows = _rows(2, 2)
    model = focused("llama", window=WINDOW)
    given = torch.arange(3, 3 + 4 * WINDOW).view(4, WINDOW)  # every token once
    targets = torch.full((4, WINDOW), -100)
    targets[1] = 7  # the second window of the first text
    table = Contexts(
        np.array([[-1], [0], [-1], [-1]]), np.array([[-1], [2], [-1], [-1]]), np.zeros(4, dtype=int), np.arange(4)
    )
    model(given, context=CrossbatchContext(rows, table), shift_labels=targets).loss.backward()
    moved = model.get_input_embeddings().weight.grad.abs().sum(1)[3 : 3 + 4 * WINDOW].view(4, WINDOW).sum(1) > 0
    assert moved.tolist() == [True, True, True, False]


@pytest.mark.parametrize("choice", ["next", "random", "hard"])
@torch.no_grad()
def test_no_token_reaches_an_earlier_one_through_several_memory_layers(choice: Any) -> None:
    """Also not by way of other documents: a negative that sees this document hands on what it saw."""
    rows = _rows(3, 4)
    ids = tokens(12, WINDOW)
    for seed in range(3):
        model = focused("llama", window=WINDOW, memory_layers=(0, 1, 2, 3))

        def losses(given: Tensor, seed: int = seed, model: Any = model) -> Tensor:
            table = plan_contexts(rows, documents(3, 3), choice=choice, generator=np.random.default_rng(seed))
            states: list[Tensor] = []
            hook = model.model.norm.register_forward_hook(lambda module, args, out: states.append(out))
            model(given, context=CrossbatchContext(rows, table), shift_labels=given)
            hook.remove()
            return states[0]

        before = losses(ids)
        for row in range(12):
            changed = ids.clone()
            changed[row, -1] = 3 + (ids[row, -1] - 2) % 90
            moved = (losses(changed) - before).abs().amax(-1) > 1e-12
            document = rows.documents == rows.documents[row]
            earlier = document & (rows.windows < rows.windows[row])
            assert not moved[torch.from_numpy(earlier)].any(), f"row {row} moves an earlier window"
            if choice != "hard":  # which windows are hardest for a row depends on all of its queries
                assert not moved[row, :-1].any(), f"row {row} moves its own past"
            assert moved[row, -1]


@torch.no_grad()
def test_hard_negatives_are_those_that_score_highest() -> None:
    rows = _rows(4, 1)
    model = focused("llama", window=WINDOW)
    ids = tokens(4, WINDOW)
    table = plan_contexts(rows, documents(2), choice="hard", generator=np.random.default_rng(0))
    context = CrossbatchContext(rows, table)
    last = int(table.order.argmax())  # it may see all others
    others = [row for row in range(4) if row != last]
    seen: dict[str, Any] = {}
    original = context._hard

    def spy(query: Tensor, keys: Tensor, scale: float) -> list[list[int]]:
        found = original(query, keys, scale)
        mean = query[last].mean(1).reshape(2, 3, -1)
        scores = {
            other: float(torch.logsumexp(torch.einsum("hgd,htd->hgt", mean, keys[other]) * scale, -1).mean())
            for other in others
        }
        seen.setdefault("expected", max(scores, key=lambda other: scores[other]))
        seen.setdefault("found", found[last])
        return found

    context._hard = spy  # type: ignore[method-assign]
    model(ids, context=context, shift_labels=ids)
    assert seen["found"] == [seen["expected"]]
    assert context.additional_windows == pytest.approx(3 / 4)  # the first of the order has nothing to see


def test_what_a_training_pass_cannot_do_is_said() -> None:
    rows = _rows(1, 1)
    model = focused("llama", window=8)
    ids = tokens(1, WINDOW)
    with pytest.raises(UnsupportedCallError, match="rows of 12 tokens"):
        model(ids, context=_everything_before(rows), shift_labels=ids)
    model = focused("llama", window=WINDOW, memory_positions="absolute")
    with pytest.raises(UnsupportedCallError, match="absolute"):
        model(ids, context=_everything_before(rows), shift_labels=ids)
    with pytest.raises(UnsupportedCallError, match="no memory or cache"):
        model(ids, context=_everything_before(rows), shift_labels=ids, cache=model.new_cache())


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("biased", [False, True])
def test_token_losses_in_pieces_equal_cross_entropy(softcap: float | None, biased: bool, monkeypatch: Any) -> None:
    from longfocus.model import token_loss

    monkeypatch.setattr(token_loss, "PIECE_LOGITS", 70)
    torch.manual_seed(0)
    hidden = torch.randn(17, 6, requires_grad=True)
    weight = torch.randn(23, 6, requires_grad=True)
    bias = torch.randn(23, requires_grad=True) if biased else None
    targets = torch.randint(0, 23, (17,))
    targets[[3, 9]] = -100
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    logits = hidden @ weight.T + (0 if bias is None else bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    each = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    expected = torch.autograd.grad(each.sum() / 7, leaves)
    found = token_losses(hidden, weight, bias, targets, softcap)
    assert_close(found.each, each.detach(), 1e-5, "losses")
    assert torch.equal(found.right, (logits.argmax(-1) == targets))
    for name, grad, wanted in zip(
        ("hidden", "weight", "bias"), torch.autograd.grad(found.total / 7, leaves), expected, strict=False
    ):
        assert_close(grad, wanted, 1e-5, name)


def test_no_target_gives_no_loss_and_no_nan() -> None:
    hidden = torch.randn(3, 4, requires_grad=True)
    found = token_losses(hidden, torch.randn(5, 4), None, torch.full((3,), -100))
    found.total.backward()
    assert float(found.total.detach()) == 0 and hidden.grad is not None and float(hidden.grad.abs().sum()) == 0
