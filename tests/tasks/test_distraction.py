"""Distraction: 1 / d where documents cannot be told apart, more where they can, sums as worked by hand, and runs that go on.

python -m pytest tests/tasks/test_distraction.py
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longfocus.analysis import attention_mass
from longfocus.config import FocusConfig
from longfocus.errors import EvaluationError
from longfocus.evaluation.run import evaluate
from longfocus.model.attach import attach
from longfocus.settings import validated
from longfocus.subjects.local import FocusedSubject, PlainModel
from longfocus.tasks import distraction, find_task
from longfocus.tasks.contract import Row, Sample
from longfocus.tasks.distraction import CHANGE, MASS, PERPLEXITY, REST, Distraction, DistractionOptions
from longfocus.tasks.texts import Texts
from tests.analysis.copying import copying_model
from tests.models import tiny
from tests.small_tokenizers import VOCABULARY, tokenizer
from tests.tasks.random_texts import random_texts

SMALL = {"texts": ["mine"], "documents": [1, 2, 4], "samples": 6}
WINDOW = 16


def task(of: Texts, **options: Any) -> Distraction:
    return Distraction(validated(DistractionOptions, {**SMALL, **options}, "options"), of)


def subject_of(model: Any, layers: tuple[int, ...] = (1, 2), **options: Any) -> FocusedSubject:
    config = FocusConfig(**{"memory_layers": layers, "window": WINDOW, **options})
    return FocusedSubject(attach(model, config), tokenizer("byte_level"), "tiny")


def llama(**options: Any) -> FocusedSubject:
    return subject_of(tiny("llama", vocab_size=VOCABULARY), **options)


def all_samples(made: Distraction, subject: Any, done: frozenset[str] = frozenset()) -> list[Sample]:
    points = [point for point in made.points(subject) if point.samples]
    return [sample for point in points for sample in made.samples(subject, point, done)]


def row_of(rows: list[Row], **values: Any) -> Row:
    (found,) = [row for row in rows if all(row.values.get(name) == value for name, value in values.items())]
    return found


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    """Four documents of some 100 to 300 tokens."""
    return random_texts(tmp_path, (500, 700, 400, 800))


# -- known outcomes ----------------------------------------------------------------------------------------


def test_random_weights_on_random_tokens_give_one_of_d_within_the_interval(tmp_path: Path) -> None:
    """Own and other windows are the same kind of noise, so no head can prefer its own."""
    of = random_texts(tmp_path, (1500,) * 8, letters="".join(map(chr, range(33, 127))))
    made = task(of, documents=[2, 4, 8], samples=40)
    rows = made.rows(all_samples(made, llama()))
    for d in (2, 4, 8):
        for layer in ("all layers", 1, 2):
            row = row_of(rows, documents=d, layer=layer)
            assert row.chance == {MASS: 1 / d, REST: 1 / d}
            for name in (MASS, REST):
                found = row.estimates[name]
                assert found.low < 1 / d < found.high, (d, layer, name, found)
                assert found.high - found.low < 0.6 / d, "an interval that says something"
    assert row_of(rows, documents=1, layer="all layers").estimates[MASS].value == pytest.approx(1)


def test_a_head_that_finds_its_own_document_again_has_more_and_the_others_have_one_of_d(tmp_path: Path) -> None:
    """Each document repeats a sequence of its own; one head of layer 2 goes to where the token at hand stood before."""
    words = tokenizer("byte_level")
    place = tmp_path / "mine"
    place.mkdir()
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-"
    for number in range(4):
        own = letters[16 * number : 16 * (number + 1)]
        (place / f"{number}.txt").write_text(own * 12)
    of = Texts(tmp_path, {"mine": str(place)})
    subject = FocusedSubject(
        attach(
            copying_model(VOCABULARY, previous=(0, 1), copying=(2, 3)), FocusConfig(memory_layers=(1, 2), window=WINDOW)
        ),
        words,
        "copying",
    )
    made = task(of, by_head=True, samples=4)
    rows = made.rows(all_samples(made, subject))
    for d in (2, 4):
        for layer in (1, 2):
            for head in range(4):
                found = row_of(rows, documents=d, layer=layer, head=head).estimates
                if (layer, head) == (2, 3):
                    assert found[MASS].value > 0.8 and found[REST].value > 0.8, found
                else:
                    assert found[MASS].value == pytest.approx(1 / d, abs=1e-4)
                    assert found[REST].value == pytest.approx(1 / d, abs=1e-4)
        finding = row_of(rows, documents=d, layer=2, head=3).estimates[MASS].value
        mean = row_of(rows, documents=d, layer="all layers", head="all heads").estimates[MASS].value
        assert mean == pytest.approx((finding + 7 / d) / 8, abs=1e-4)


def test_documents_that_say_the_same_cannot_be_told_apart(tmp_path: Path) -> None:
    """All documents are one text: whatever the weights, each gets the same, and nothing changes but the memory's size."""
    place = tmp_path / "mine"
    place.mkdir()
    for number in range(4):
        (place / f"{number}.txt").write_text("ABCDEFGHIJKLMNOP" * 10)
    made = task(Texts(tmp_path, {"mine": str(place)}), documents=[1, 4])
    for sample in all_samples(made, llama()):
        d = sample.values["documents"]
        for shares in (*sample.details["mass"].values(), *sample.details["mass_without_first_tokens"].values()):
            assert shares == pytest.approx([1 / d] * 6, abs=1e-5)


# -- what is measured --------------------------------------------------------------------------------------


def test_a_window_meets_the_one_before_it_and_windows_of_other_documents(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[list[int], list[list[int]], int, list[int]]] = []
    read: list[list[int]] = []

    class Reading(attention_mass.ReadWindows):
        def add(self, ids: Any) -> int:
            read.append(list(ids))
            return super().add(ids)

    def spied(model: Any, ids: Any, windows: Any, positive: int, negatives: Any) -> Any:
        calls.append((list(ids), read, positive, list(negatives)))
        return attention_mass.positive_mass(model, ids, windows, positive, negatives)

    monkeypatch.setattr(distraction, "ReadWindows", Reading)
    monkeypatch.setattr(distraction, "positive_mass", spied)
    subject = llama()
    made = task(texts, documents=[1, 4, 8], samples=8)
    samples = all_samples(made, subject)
    documents = {d.name: list(d.ids) for d in made._plan(subject, "mine").documents}
    place = {tuple(ids[s : s + WINDOW]): name for name, ids in documents.items() for s in range(len(ids))}
    assert len(calls) == len(samples) == 3 * 8
    assert {sample.details["document"] for sample in samples} == set(documents)
    last: dict[str, set[int]] = {}
    for (ids, pieces, positive, negatives), sample in zip(calls, samples, strict=True):
        name, start, d = sample.details["document"], sample.details["start"], sample.values["documents"]
        whole = documents[name]
        assert ids == whole[start : start + WINDOW]
        assert pieces[positive] == whole[start - WINDOW : start]
        assert len(set(negatives)) == len(negatives) == d - 1
        others = [place[tuple(pieces[number])] for number in negatives]
        assert name not in others
        assert len(set(others[:3])) == min(3, d - 1), "other documents in turn"
        key = f"{name} {start}"
        assert last.get(key, set()) <= set(negatives), "more documents come to those that were there"
        last[key] = set(negatives)


def test_sizes_of_pieces_and_texts_are_options(texts: Texts) -> None:
    subject = llama()
    made = task(texts, tokens=40, up_to=90, samples=3)
    plan = made._plan(subject, "mine")
    assert all(len(document) <= 90 for document in plan.documents)
    samples = all_samples(made, subject)
    assert {sample.details["start"] % 40 for sample in samples} == {0}
    found = row_of(made.rows(samples), documents=2, layer="all layers")
    assert found.samples == 3 and found.estimates[MASS].value < 1


def test_what_a_set_does_not_allow_is_refused_with_the_reason(texts: Texts, tmp_path: Path) -> None:
    results = evaluate(task(texts, documents=[1, 2, 5000], up_to=64, samples=2), llama(), tmp_path / "run")
    assert {row.values["documents"] for row in results.rows} == {1, 2}
    (why,) = results.refused.values()
    assert "windows of other documents" in why
    alone = random_texts(tmp_path, (900,), name="alone")
    results = evaluate(task(alone, texts=["alone"], samples=2), llama(), tmp_path / "alone run")
    assert {row.values["documents"] for row in results.rows} == {1} and len(results.refused) == 2
    short = random_texts(tmp_path, (20,), name="short")
    with pytest.raises(EvaluationError, match="no document of short holds a window"):
        evaluate(task(short, texts=["short"]), llama(), tmp_path / "short run")


def test_a_model_without_memory_layers_to_look_into_is_refused(texts: Texts, tmp_path: Path) -> None:
    plain = PlainModel(tiny("llama", vocab_size=VOCABULARY), tokenizer("byte_level"), "plain")
    with pytest.raises(EvaluationError, match="memory layers"):
        evaluate(task(texts), plain, tmp_path / "run")


def test_any_layers_of_a_plain_checkpoint_can_be_looked_into(texts: Texts) -> None:
    made = task(texts, documents=[1, 2], samples=2)
    rows = made.rows(all_samples(made, llama(memory_layers=(0, 1, 2, 3))))
    assert [row.values["layer"] for row in rows] == ["all layers", 0, 1, 2, 3] * 2


# -- sums, by hand -----------------------------------------------------------------------------------------


def made_sample(document: str, d: int, mass: dict[str, list[float | None]], nll: float) -> Sample:
    details = {
        "document": document,
        "start": 16,
        "tokens": 10,
        "nll": nll,
        "mass": mass,
        "mass_without_first_tokens": mass,
        "on_memory": {layer: [0.5, 0.25] for layer in mass},
    }
    return Sample(f"{document} d={d}", {"documents": d, "text": "mine"}, {}, 1.0, details)


def test_rows_are_means_over_windows_layers_and_heads(texts: Texts) -> None:
    """Two documents. Layer 1: heads 0.2 and 0.4, then 0.4 and 0.8; layer 3: 0.6 and 0.2, then 0.6 and 0.4."""
    samples = [
        made_sample("a", 1, {"1": [1.0, 1.0], "3": [1.0, 1.0]}, 20.0),
        made_sample("b", 1, {"1": [1.0, 1.0], "3": [1.0, 1.0]}, 30.0),
        made_sample("a", 4, {"1": [0.2, 0.4], "3": [0.6, 0.2]}, 21.0),
        made_sample("b", 4, {"1": [0.4, 0.8], "3": [0.6, 0.4]}, 33.0),
    ]
    rows = task(texts, by_head=True).rows(samples)
    assert [tuple(row.values) for row in rows] == [("documents", "head", "layer", "text")] * 14
    t = 12.706204736432095  # of 1 degree of freedom

    def estimate(name: str, **values: Any) -> list[float]:
        found = row_of(rows, documents=4, **values).estimates[name]
        return [found.value, found.low, found.high]

    assert estimate(MASS, layer="all layers", head="all heads") == pytest.approx([0.45, 0.0, 1.0])  # 0.35 and 0.55
    assert estimate(MASS, layer=1, head="all heads") == pytest.approx([0.45, 0.0, 1.0])  # 0.3 and 0.6
    assert estimate(MASS, layer=3, head="all heads") == pytest.approx(
        [0.45, max(0, 0.45 - 0.05 * t), 1.0]
    )  # 0.4 and 0.5
    assert estimate(MASS, layer=3, head=0) == pytest.approx([0.6, 0.6, 0.6])
    assert estimate(MASS, layer=1, head=1) == pytest.approx([0.6, 0.0, 1.0])
    loss, error = 2.7, 0.6  # nats a token, of 2.1 and 3.3
    ends = [math.exp(loss + k * t * error) for k in (0, -1, 1)]
    assert estimate(PERPLEXITY, layer="all layers", head="all heads") == pytest.approx(ends)
    ends = [100 * math.expm1(0.2 + k * t * 0.1) for k in (0, -1, 1)]  # of 0.1 and 0.3
    assert estimate(CHANGE, layer="all layers", head="all heads") == pytest.approx(ends)
    assert row_of(rows, documents=4, layer=1, head="all heads").notes["by head, %"] == "30 60"
    assert row_of(rows, documents=4, layer=1, head=0).notes["attention on memory, %"] == 50
    assert PERPLEXITY not in row_of(rows, documents=4, layer=1, head="all heads").estimates
    assert CHANGE not in row_of(rows, documents=1, layer="all layers", head="all heads").estimates
    assert rows[0].notes["interval over"] == "2 documents"
    (row,) = task(texts, by_layer=False, by_document=False).rows(samples[2:3])
    assert row.notes["interval over"] == "1 window" and row.values == {"documents": 4, "text": "mine"}


def test_heads_that_retrieved_nothing_are_left_out(texts: Texts) -> None:
    """As null in a file: with few keys retrieved, all of them may be first tokens."""
    samples = [made_sample("a", 2, {"1": [None, 0.5]}, 20.0), made_sample("b", 2, {"1": [0.3, 0.7]}, 20.0)]
    rows = task(texts, by_head=True).rows(samples)
    assert row_of(rows, head=0, layer=1).estimates[REST].value == pytest.approx(0.3)
    assert row_of(rows, head="all heads", layer=1).estimates[REST].value == pytest.approx(0.5)


# -- runs --------------------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_with_the_same_numbers(
    texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(task(texts, samples=3), llama(), tmp_path / "whole")
    measured = iter(range(10**6))

    def stopping(*arguments: Any) -> Any:
        if next(measured) % 5 == 4:
            raise KeyboardInterrupt
        return attention_mass.positive_mass(*arguments)

    monkeypatch.setattr(distraction, "positive_mass", stopping)
    for _ in range(5):
        results = evaluate(task(texts, samples=3), llama(), tmp_path / "parts")
        if not results.stopped:
            break
    assert not results.stopped and results.rows == whole.rows
    files = [(tmp_path / name / "samples.jsonl").read_text("utf-8") for name in ("whole", "parts")]
    assert files[0] == files[1] and len(files[0].splitlines()) == 9


def test_rows_can_be_asked_for_anew_without_measuring(
    texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluate(task(texts, samples=2), llama(), tmp_path / "run")
    assert first.axes == ["documents", "layer", "text"] and len(first.rows) == 3 * 3

    def never(*arguments: Any) -> Iterator[Any]:
        raise AssertionError("nothing is left to measure")

    monkeypatch.setattr(distraction, "positive_mass", never)
    monkeypatch.setattr(distraction, "ReadWindows", never)
    heads = evaluate(task(texts, samples=2, by_head=True), llama(), tmp_path / "run")
    assert heads.axes == ["documents", "head", "layer", "text"] and len(heads.rows) == 3 * (3 + 2 * 6)
    mean = evaluate(task(texts, samples=2, by_layer=False), llama(), tmp_path / "run")
    assert mean.axes == ["documents", "text"] and len(mean.rows) == 3
    with pytest.raises(EvaluationError, match="other settings"):
        evaluate(task(texts, samples=3), llama(), tmp_path / "run")


def test_the_same_seed_gives_the_same_windows_and_another_one_others(texts: Texts) -> None:
    def names(**options: Any) -> list[str]:
        return [sample.id for sample in all_samples(task(texts, documents=[1], **options), subject)]

    subject = llama()
    assert names() == names() and set(names()) != set(names(seed=1))


def test_samples_are_json_and_it_is_a_known_task(texts: Texts) -> None:
    (sample, *_) = all_samples(task(texts, samples=1), llama())
    assert json.loads(json.dumps(sample.details)) == sample.details
    assert set(sample.scores) == {MASS, REST, PERPLEXITY}
    assert random.Random("0 mine").random() != random.Random("1 mine").random()
    assert find_task("distraction") is Distraction
