"""A rule that is found does what its level says where it was found, and costs what was measured where it was measured.

On a tiny random Llama. What calibration notes inside is found again from outside: normalisers and shares by a second look at every
window, losses by a model that is attached with the rule and asked as any other.

    python -m pytest tests/analysis/test_k_calibration.py
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from longfocus import FocusConfig, KRule, Memory, attach, read_ids
from longfocus.analysis import k_calibration
from longfocus.analysis.k_calibration import Calibration, Tried, calibrate, stretches
from longfocus.errors import ConfigError
from longfocus.memory.context import MemoryContext
from tests.models import MEMORY_LAYERS, tiny, tokens

WINDOW, HELD, K = 24, 96, 4
LEVELS = (0.02, 0.2, 0.5)


def _model(**options: Any) -> Any:
    given = {"memory_layers": MEMORY_LAYERS, "window": WINDOW, "retrieval": "exact", "k": K, **options}
    return attach(tiny("llama"), FocusConfig(**given))


def _blocks(count: int, windows: int = 1) -> list[list[int]]:
    return [tokens(1, HELD + windows * WINDOW, seed=seed)[0].tolist() for seed in range(count)]


def _asked(model: Any, block: list[int]) -> float:
    """Loss of the window after a block's memory, as anybody would measure it."""
    memory = Memory(model)
    read_ids(model, block[:HELD], memory)
    ids = torch.tensor([block[HELD:]])
    with torch.no_grad():
        logits = model(ids, cache=model.new_cache(memory, last_window=WINDOW)).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))


@pytest.fixture(scope="module")
def found() -> Calibration:
    return calibrate(_model(), _blocks(6), HELD, levels=LEVELS)


def test_a_level_bounds_what_skipped_queries_would_have_given_to_memory(
    found: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each head on the blocks that were calibrated on; and one query more would be too many."""
    noted: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    join = MemoryContext.join

    def noting(self: MemoryContext, layer: int, window: Any, *, scale: float, softcap: float | None) -> Tensor:
        local = window.attend(scale=scale, softcap=softcap)[1]
        best = self.best(layer, window.outer_query, scale=scale, softcap=softcap)
        assert best is not None
        far = torch.logsumexp(best.scores, -1).flatten(1, 2)
        noted[layer].append((local[0], torch.exp(far - torch.logaddexp(far, local))[0]))
        return join(self, layer, window, scale=scale, softcap=softcap)

    model = _model()
    memories = []
    for block in _blocks(6)[::2]:
        memories.append(Memory(model))
        read_ids(model, block[:HELD], memories[-1])
    monkeypatch.setattr(MemoryContext, "join", noting)
    for block, memory in zip(_blocks(6)[::2], memories, strict=True):
        with torch.no_grad():
            model(torch.tensor([block[HELD:]]), cache=model.new_cache(memory, last_window=WINDOW))
    some = 0
    for tried in found.tried:
        for layer in MEMORY_LAYERS:
            local, share = (torch.cat(parts, 1).double() for parts in zip(*noted[layer], strict=True))
            for head, number in enumerate(tried.rule.numbers(layer, 6)):
                order = local[head].argsort(descending=True)
                skipped = int((local[head] >= number - 1e-5).sum())
                so_far = share[head][order].cumsum(0) / torch.arange(1, len(order) + 1)
                assert skipped == 0 or so_far[skipped - 1] <= tried.level + 1e-6
                assert not (so_far[skipped:] <= tried.level - 1e-6).any()
                some += 0 < skipped < len(order)
    assert some > 10, "rules that skip some queries and not others"


def test_what_was_measured_is_what_the_rule_costs(found: Calibration) -> None:
    measured = _blocks(6)[1::2]
    assert found.plain == pytest.approx([_asked(_model(), block) for block in measured], abs=1e-5)
    for tried in found.tried:
        # windows that are read see no rule within a span; here the span is longer than the memory
        model = _model(k_rule=tried.rule, read_span=HELD)
        assert tried.losses == pytest.approx([_asked(model, block) for block in measured], abs=1e-5)
        counts = model.focus.k_counts
        assert tried.skipped == counts.skipped_share
        assert tried.mean_k == counts.mean_k
        assert tried.rule.least_share == tried.level / K
        assert tried.time > 0
    shares = [tried.skipped_share for tried in found.tried]
    assert shares == sorted(shares) and shares[0] < 0.05 < shares[-1]
    assert [tried.lost for tried in found.tried] == sorted(tried.lost for tried in found.tried)
    assert 0 < found.tried[0].lost < 2 * LEVELS[0]


def test_the_strictest_within_the_bound_is_chosen(found: Calibration) -> None:
    costs = [found.percent(tried) for tried in found.tried]
    plain = math.exp(statistics.mean(found.plain))
    for tried, cost in zip(found.tried, costs, strict=True):
        assert cost == pytest.approx(100 * (math.exp(statistics.mean(tried.losses)) / plain - 1), abs=1e-6)
    assert found.strictest(max(costs)) is found.tried[-1]
    assert found.strictest(min(costs) - 1e-6) is None
    for bound in (*costs, 0.5, 5.0):
        chosen = found.strictest(bound)
        assert chosen is None or found.percent(chosen) <= bound
        stricter = found.tried if chosen is None else found.tried[found.tried.index(chosen) + 1 :]
        assert all(found.percent(tried) > bound for tried in stricter)


def test_a_rule_that_never_skips_costs_nothing() -> None:
    """At a level below what any query gives."""
    found = calibrate(_model(), _blocks(2), HELD, levels=(1e-12,))
    assert found.tried[0].losses == found.plain
    assert found.tried[0].lost == pytest.approx(0, abs=1e-6)
    assert set(found.tried[0].rule.numbers(1, 6)) == {math.inf}


def test_several_windows_see_all_that_stands_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    join = MemoryContext.join

    def noting(self: MemoryContext, layer: int, *rest: Any, **more: Any) -> Tensor:
        if self.rule is not None:
            seen.append(int(self.visible[0]))
        return join(self, layer, *rest, **more)

    monkeypatch.setattr(MemoryContext, "join", noting)
    told: list[tuple[str, int, int]] = []
    calibrate(_model(read_span=48), _blocks(2, 3), HELD, levels=(0.5,), told=lambda *step: told.append(step))
    layers = len(MEMORY_LAYERS)
    places = [HELD, HELD + WINDOW, HELD + 2 * WINDOW]
    assert seen == [at for at in places for _ in range(layers)] + [at for at in places for _ in range(2 * layers)]
    assert [done for _, done, _ in told] == list(range(1, len(told) + 1))
    assert told[-1][1] == told[-1][2]


def test_the_model_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(k_rule=KRule(least_share=0.5))
    config, counts = model.focus.config, model.focus.k_counts
    calibrate(model, _blocks(2), HELD, levels=(0.5,))
    assert model.focus.config is config and model.focus.k_counts is counts
    monkeypatch.setattr(k_calibration, "read_ids", None)
    with pytest.raises(TypeError):
        calibrate(model, _blocks(2), HELD)
    assert model.focus.config is config and model.focus.k_counts is counts


def test_a_found_rule_knows_the_options_that_it_is_for() -> None:
    rule = calibrate(_model(balance_tokens=50), _blocks(2), HELD, levels=(0.5,)).tried[0].rule
    assert (rule.window, rule.balance_tokens) == (WINDOW, 50)
    _model(balance_tokens=50, k_rule=rule)
    with pytest.raises(ConfigError, match="balance_tokens 50, and the model has None"):
        _model(k_rule=rule)


def test_stretches_come_from_all_documents_first() -> None:
    documents = [list(range(0, 25)), list(range(100, 109)), list(range(200, 240))]
    assert [part[0] for part in stretches(documents, 10, 9)] == [0, 200, 10, 210, 220, 230]
    assert stretches(documents, 10, 2) == [list(range(0, 10)), list(range(200, 210))]
    assert stretches([], 10, 2) == []


@pytest.mark.parametrize(
    ("options", "blocks", "held", "levels", "words"),
    [
        ({"retrieval": "dense"}, 2, HELD, (0.1,), "'dense' given"),
        ({}, 1, HELD, (0.1,), "1 blocks of text given, expected 2 or more"),
        ({}, 2, HELD + 1, (0.1,), "one or more whole windows of 24 tokens"),
        ({}, 2, HELD, (0.2, 0.1), "from mild to strict"),
        ({}, 2, HELD, (0.0,), "from mild to strict"),
        ({}, 2, HELD, (), "from mild to strict"),
        ({"memory_layers": ()}, 2, HELD, (0.1,), "this model has none"),
    ],
)
def test_impossible_calibrations_say_why(
    options: dict[str, Any], blocks: int, held: int, levels: tuple[float, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        calibrate(_model(**options), _blocks(blocks), held, levels=levels)


def test_changes_are_paired() -> None:
    tried = Tried(0.1, KRule(), (2.0, 3.5), {}, 0.0, 1.0, 0.0, 1.0)
    found = Calibration((1.5, 3.5), (tried,))
    assert found.changes(tried) == [0.5, 0.0]
    assert found.percent(tried) == pytest.approx(100 * (math.exp(0.25) - 1))
