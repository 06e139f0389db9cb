"""Training through memory layers: gradients in one window are those of transformers, over several windows those of
brute force with memory as a constant, and gradient checkpointing changes none of them (CASES 15).

    python -m pytest tests/model/test_gradients.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from longfocus.model.attach import attach
from tests.model.brute_force import focused_logits
from tests.model.helpers import WINDOWS, focused, planned, unless_refused
from tests.models import MEMORY_LAYERS, MODELS, logits, tiny, tokens


def _gradients(model: PreTrainedModel, loss: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    value = loss()
    value.backward()
    return value.detach(), {
        name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None
    }


def _check(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], tolerance: float = WINDOWS
) -> None:
    """The same loss; each weight's gradient within `tolerance` of the size of that gradient."""
    assert abs(float(found[0] - expected[0])) < tolerance * float(expected[0]), "loss"
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        worst = float((found[1][name] - gradient).abs().max())
        size = float(gradient.abs().max())
        # norms are computed in float32, so a gradient that is 0 but for cancellation is 1e-8 and not 0
        assert worst <= tolerance * size + 1e-8, f"gradient of {name}: off by {worst:.1e}, of size {size:.1e}"


def _checkpointed(model: Any) -> Any:
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")


@pytest.mark.parametrize("name", MODELS)
def test_gradients_in_one_window_are_those_of_transformers(name: str) -> None:
    ids = tokens(2, 20)
    plain, model = tiny(name, dtype=torch.float64), focused(name)
    expected = _gradients(plain, lambda: plain(ids, labels=ids).loss)
    _check(_gradients(model, lambda: model(ids, labels=ids).loss), expected)
    layer = next(key for key in expected[1] if f"layers.{MEMORY_LAYERS[0]}." in key and "weight" in key)
    assert expected[1][layer].abs().max() > 1e-4


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", ["llama_9_heads", "qwen3", "gemma2", "gpt_neox"])
def test_checkpointing_changes_no_gradient(name: str, use_cache: bool) -> None:
    """use_cache=True is what a model's config says by default."""
    ids = tokens(2, 20)
    plain = tiny(name, dtype=torch.float64)
    expected = _gradients(plain, lambda: plain(ids, labels=ids).loss)
    model = _checkpointed(focused(name))
    _check(_gradients(model, lambda: model(ids, labels=ids, use_cache=use_cache).loss), expected)


def test_padding_gets_no_gradient() -> None:
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 9] = -100  # transformers would predict the first token from padding
    plain, model = tiny("llama_9_heads", dtype=torch.float64), focused("llama_9_heads")
    expected = _gradients(plain, lambda: plain(ids, attention_mask=mask, labels=labels).loss)
    found = _gradients(model, lambda: model(ids, attention_mask=mask, labels=labels).loss)
    _check(found, expected)
    assert all(gradient.isfinite().all() for gradient in found[1].values())


@pytest.mark.parametrize("retrieval", ["dense", "exact"])
@pytest.mark.parametrize("name", ["llama_9_heads", "gpt_neox"])
def test_gradients_over_windows_are_those_of_brute_force_with_memory_as_a_constant(name: str, retrieval: str) -> None:
    ids = tokens(1, 80)
    plain, model = tiny(name, dtype=torch.float64), focused(name, retrieval=retrieval, k=6)
    windows = planned(model, 80)

    def by_definition() -> Tensor:
        found = focused_logits(
            plain, ids[0], windows, memory_layers=MEMORY_LAYERS, k=6 if retrieval == "exact" else None
        )
        return torch.nn.functional.cross_entropy(found[:-1].float(), ids[0, 1:])

    _check(_gradients(model, lambda: model(ids, labels=ids).loss), _gradients(plain, by_definition))


def test_checkpointing_over_windows_is_exact_or_refused() -> None:
    """Checkpointed layers get no cache, so nothing could move to memory; then the call must say so."""
    ids = tokens(1, 80)
    model = focused("llama_9_heads")
    plain = tiny("llama_9_heads", dtype=torch.float64)
    windows = planned(model, 80)

    def by_definition() -> Tensor:
        found = focused_logits(plain, ids[0], windows, memory_layers=MEMORY_LAYERS)
        return torch.nn.functional.cross_entropy(found[:-1].float(), ids[0, 1:])

    _checkpointed(model)
    found = unless_refused(lambda: _gradients(model, lambda: model(ids, labels=ids).loss), "checkpointing")
    if found is not None:
        _check(found, _gradients(plain, by_definition))


def test_checkpointing_hands_out_no_cache_that_forgot_its_text() -> None:
    ids = tokens(1, 20)
    model = _checkpointed(focused("llama_9_heads"))
    cache = model(ids).cache
    if cache is not None:
        model.eval()
        more = tokens(1, 4, seed=7)
        with torch.no_grad():
            expected = model(torch.cat((ids, more), 1)).logits[:, 20:]
            assert torch.allclose(model(more, cache=cache).logits, expected, atol=WINDOWS)


def test_attention_dropout_acts_in_memory_layers_as_in_the_others_or_is_refused() -> None:
    """A config with attention_dropout asks for it in every layer while training; it must not be skipped in silence."""
    model = tiny("llama", attention_dropout=0.5).train()
    ids = tokens(1, 20)

    def twice() -> list[Tensor]:
        attach(model, memory_layers=(0, 1, 2, 3), window=24)
        return [logits(model, ids), logits(model, ids)]

    found = unless_refused(twice, "dropout")
    if found is not None:
        assert not torch.equal(*found)
        model.eval()
        assert torch.equal(logits(model, ids), logits(model, ids))
