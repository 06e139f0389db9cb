"""Perplexity against context: the same tokens at every context and for every model, sums and intervals as worked by hand,
known outcomes from subjects that follow a rule, real models against their own logits.

    python -m pytest tests/tasks/test_perplexity.py
"""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from longfocus.config import FocusConfig
from longfocus.errors import ConfigError, EvaluationError, InputError, UnsupportedCallError
from longfocus.evaluation.run import evaluate
from longfocus.model.attach import attach
from longfocus.settings import validated
from longfocus.subjects.local import FocusedSubject, PlainModel
from longfocus.tasks import find_task
from longfocus.tasks.contract import Row, Sample
from longfocus.tasks.perplexity import FROM_OWN, FROM_WINDOW, LOSS, PERPLEXITY, Perplexity, PerplexityOptions
from longfocus.tasks.texts import Texts
from tests.models import tiny
from tests.small_tokenizers import VOCABULARY, tokenizer
from tests.tasks.random_texts import RuledSubject, random_texts

SMALL = {"texts": ["mine"], "lengths": [64, 128, 192], "block": 32, "stride": 64, "own": 64}


def task(of: Texts, **options: Any) -> Perplexity:
    return Perplexity(validated(PerplexityOptions, {**SMALL, **options}, "options"), of)


def all_samples(made: Perplexity, subject: Any, done: frozenset[str] = frozenset()) -> list[Sample]:
    points = [point for point in made.points(subject) if point.samples]
    return [sample for point in points for sample in made.samples(subject, point, done)]


def row_of(rows: list[Row], **values: Any) -> Row:
    (found,) = [row for row in rows if all(row.values[name] == value for name, value in values.items())]
    return found


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    """Three documents of some 400, 500 and 700 tokens."""
    return random_texts(tmp_path, (1200, 1500, 2100))


# -- sums, by hand -----------------------------------------------------------------------------------------


def made_sample(document: str, start: int, context: int, nll: float, setting: str = "single") -> Sample:
    details = {"document": document, "start": start, "tokens": 3, "bytes": 6, "nll": nll, "nll_by_position": [nll, 0.0]}
    values = {"context": context, "text": "mine", "setting": setting}
    return Sample(f"{document} @{start} +{context}", values, {PERPLEXITY: math.exp(nll / 3)}, 3.0, details)


def test_a_row_is_the_exponential_of_the_mean_loss_and_its_interval_is_over_documents(tmp_path: Path) -> None:
    """Losses a token: a 1 and 3, b 2 and 2, c 4 and 6. Means of documents 2, 2, 5, their mean 3, standard error 1."""
    losses = {("a", 0): 3.0, ("a", 8): 9.0, ("b", 0): 6.0, ("b", 8): 6.0, ("c", 0): 12.0, ("c", 8): 18.0}
    samples = [made_sample(*block, context=0, nll=nll) for block, nll in losses.items()]
    # with context every token is easier by 0.5, but in c at 8 by 2.0: means of documents 0.5, 0.5, 1.25
    samples += [made_sample(*b, context=64, nll=n - (6.0 if b == ("c", 8) else 1.5)) for b, n in losses.items()]
    made = task(random_texts(tmp_path, (10,)), block=4)
    alone, more = made.rows(samples)
    assert (alone.values, alone.samples) == ({"context": 0, "text": "mine", "setting": "single"}, 6)
    t = 4.302652729911275  # of 2 degrees of freedom
    found = alone.estimates[PERPLEXITY]
    assert [found.value, found.low, found.high] == pytest.approx([math.exp(3 + k * t) for k in (0, -1, 1)])
    assert set(alone.estimates) == {PERPLEXITY}
    assert alone.notes["interval over"] == "3 documents" and alone.notes["tokens"] == 18
    assert alone.notes["bits per byte"] == pytest.approx(54 / math.log(2) / 36, abs=1e-4)
    assert more.estimates[PERPLEXITY].value == pytest.approx(math.exp(2.25))
    change = more.estimates[FROM_WINDOW]
    ends = [100 * math.expm1(-0.75 + k * t * 0.25) for k in (0, -1, 1)]
    assert [change.value, change.low, change.high] == pytest.approx(ends)
    assert FROM_OWN not in more.estimates
    alone, more = task(random_texts(tmp_path, (10,), name="other"), block=4, by_document=False).rows(samples)
    t = 2.570581835636314  # of 5 degrees of freedom; squares 4, 0, 1, 1, 1, 9 around the mean
    error = math.sqrt(16 / 6 / 5)
    found = alone.estimates[PERPLEXITY]
    assert [found.value, found.low, found.high] == pytest.approx([math.exp(3 + k * t * error) for k in (0, -1, 1)])
    assert alone.notes["interval over"] == "6 blocks"


def test_one_document_has_an_interval_over_its_blocks_and_losses_that_are_no_number_none(tmp_path: Path) -> None:
    made = task(random_texts(tmp_path, (10,)), block=4)
    (row,) = made.rows([made_sample("a", 0, 0, 3.0), made_sample("a", 8, 0, 9.0)])
    half = 12.706204736432095  # t of 1 degree of freedom, standard error 1
    found = row.estimates[PERPLEXITY]
    assert [found.value, found.low, found.high] == pytest.approx([math.exp(2 + k * half) for k in (0, -1, 1)])
    (row,) = made.rows([made_sample("a", 0, 0, 3.0)])
    assert row.estimates[PERPLEXITY].value == pytest.approx(math.e) and math.isnan(row.estimates[PERPLEXITY].low)
    broken = made_sample("a", 8, 0, 9.0)
    broken.details["nll"] = None  # nan, as it comes back from JSON
    (row,) = made.rows([made_sample("a", 0, 0, 3.0), broken])
    assert math.isnan(row.estimates[PERPLEXITY].value)


def test_bins_of_positions_cover_the_block(tmp_path: Path) -> None:
    def by_place(seen: list[int], part: list[int], token: int) -> float:
        return float(len(part))  # position p has a loss of p

    made = task(random_texts(tmp_path, (1500,)), block=21, by_position=True, settings=["single"])
    assert made.axes == ("position", "context", "setting", "text")
    rows = made.rows(all_samples(made, RuledSubject(by_place)))
    found = {row.values["position"]: row.estimates[LOSS].value for row in rows if row.values["context"] == 64}
    means = {1: 1.0, 2: 2.5, 4: 5.5, 8: 11.5, 16: 18.0}  # of 1; 2, 3; 4 … 7; 8 … 15; 16 … 20
    assert found == pytest.approx(means) and made.measures[0].name == LOSS
    assert [row.notes["tokens"] / row.samples for row in rows[:5]] == [1, 2, 4, 8, 5]


# -- what is predicted -------------------------------------------------------------------------------------


def test_every_context_and_setting_predicts_the_same_tokens_beyond_the_longest_context(texts: Texts) -> None:
    subject = RuledSubject(lambda *_: 1.0)
    made = task(texts)
    samples = all_samples(made, subject)
    blocks: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for sample in samples:
        key = (str(sample.values["setting"]), int(sample.values["context"]))
        blocks.setdefault(key, set()).add((sample.details["document"], sample.details["start"]))
    assert set(blocks) == {(setting, context) for setting in ("single", "multi") for context in (0, 64, 128, 192)}
    first = blocks["single", 0]
    assert all(found == first for found in blocks.values())
    assert len({document for document, _ in first}) == 3
    assert all(start >= 192 and start % 64 == 0 for _, start in first)
    assert len(subject.seen) == len(first), "the tokens themselves are the same"
    assert len(samples) == len({(sample.id, sample.values["setting"]) for sample in samples}) == 8 * len(first)


def test_a_document_is_read_once_for_all_its_blocks_and_contexts(texts: Texts) -> None:
    subject = RuledSubject(lambda *_: 1.0)
    all_samples(task(texts, settings=["single"]), subject)
    assert len(subject.calls) == 3
    assert all(contexts == (0, 64, 128, 192) for _, contexts in subject.calls)


def test_the_draw_is_spread_over_documents_and_depends_on_the_seed_only(texts: Texts) -> None:
    def drawn(**options: Any) -> list[tuple[str, int]]:
        samples = all_samples(task(texts, settings=["single"], **options), RuledSubject(lambda *_: 1.0))
        return sorted({(sample.details["document"], sample.details["start"]) for sample in samples})

    few = drawn(tokens=4 * 31)
    assert len(few) == 4 and len({document for document, _ in few}) == 3
    assert few == drawn(tokens=4 * 31) and few != drawn(tokens=4 * 31, seed=1)
    assert set(few) <= set(drawn())
    assert len({document for document, _ in drawn(documents=2)}) == 2
    assert max(start for _, start in drawn(up_to=300)) == 256


def test_multi_sees_its_own_last_tokens_and_before_them_other_documents(texts: Texts) -> None:
    subject = RuledSubject(lambda *_: 1.0)
    made = task(texts)
    all_samples(made, subject)
    documents = made._plan(subject, "mine").documents
    own = {}
    for number, document in enumerate(documents):
        for start in range(0, len(document) - 31):
            own[tuple(document.ids[start : start + 32])] = (number, start)
    for block, seen in subject.seen.items():
        number, start = own[block]
        single, multi = seen[:4], seen[4:]
        for (context, tokens), (multi_context, multi_tokens) in zip(single, multi, strict=True):
            assert context == multi_context
            assert tokens == list(documents[number].ids[start - context : start])
            near = min(context, 64)
            assert multi_tokens[context - near :] == list(documents[number].ids[start - near : start])
        longest = multi[-1][1]
        others = set()
        for at in (0, 64):
            stretch = longest[at : at + 64]
            (other,) = [n for n, d in enumerate(documents) if any(d.ids[s : s + 64] == stretch for s in range(len(d)))]
            others.add(other)
        assert others == {0, 1, 2} - {number}, "other documents, each in turn"
        assert multi[2][1] == longest[-128:], "smaller memories are the ends of larger ones"


# -- known outcomes ----------------------------------------------------------------------------------------


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary_and_no_change(texts: Texts) -> None:
    made = task(texts)
    rows = made.rows(all_samples(made, RuledSubject(lambda *_: math.log(VOCABULARY))))
    assert len(rows) == 8
    for row in rows:
        assert row.estimates[PERPLEXITY].value == pytest.approx(VOCABULARY)
        for name in set(row.estimates) - {PERPLEXITY}:
            assert row.estimates[name].value == pytest.approx(0, abs=1e-4)


def test_a_model_that_loses_with_each_token_of_context_shows_exactly_that(texts: Texts) -> None:
    made = task(texts)
    rows = made.rows(all_samples(made, RuledSubject(lambda seen, *_: 1 + len(seen) / 1000)))
    for context in (64, 128, 192):
        for setting in ("single", "multi"):
            row = row_of(rows, context=context, setting=setting)
            assert row.estimates[PERPLEXITY].value == pytest.approx(math.exp(1 + context / 1000))
            assert row.estimates[FROM_WINDOW].value == pytest.approx(100 * math.expm1(context / 1000))
            expected = 100 * math.expm1((context - 64) / 1000)
            if setting == "multi" and context > 64:
                assert row.estimates[FROM_OWN].value == pytest.approx(expected)
            else:
                assert FROM_OWN not in row.estimates


def test_a_model_that_recalls_gains_from_its_own_document_only(texts: Texts, tmp_path: Path) -> None:
    """It knows a token that stood before: pairs of tokens are rare, so more of the own text knows more of them."""

    def recalls(seen: list[int], part: list[int], token: int) -> float:
        own = [*seen[-64:], *part] if "distracted" in subject.name else [*seen, *part]
        pairs = set(pairwise(own))
        return 0.1 if (part[-1], token) in pairs else 5.0

    subject = RuledSubject(recalls)
    made = task(texts)
    rows = made.rows(all_samples(made, subject))
    single = [row_of(rows, context=c, setting="single").estimates[PERPLEXITY].value for c in (0, 64, 128, 192)]
    assert sorted(single, reverse=True) == single and single[-1] < 0.9 * single[0]
    subject.name = "distracted: sees its own last 64 tokens"
    rows = made.rows(all_samples(made, subject))
    for context in (128, 192):
        change = row_of(rows, context=context, setting="multi").estimates[FROM_OWN]
        assert change.value == pytest.approx(0, abs=1e-4)


def test_random_losses_change_by_nothing_within_the_interval(texts: Texts) -> None:
    rng = random.Random(3)
    made = task(texts, settings=["single"])
    rows = made.rows(all_samples(made, RuledSubject(lambda *_: rng.gauss(4.0, 2.0))))
    for context in (64, 128, 192):
        change = row_of(rows, context=context).estimates[FROM_WINDOW]
        assert change.low < 0 < change.high
        found = row_of(rows, context=context).estimates[PERPLEXITY]
        assert found.low < math.exp(4) < found.high


# -- real models -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subjects() -> dict[int, Any]:
    """The same tiny Llama: 0 plain, else focused with that window."""
    words = tokenizer("byte_level")
    made: dict[int, Any] = {0: PlainModel(tiny("llama", vocab_size=VOCABULARY), words, "plain")}
    for window in (32, 64):
        model = attach(tiny("llama", vocab_size=VOCABULARY), FocusConfig(memory_layers=(1, 2), window=window))
        made[window] = FocusedSubject(model, words, f"window {window}")
    return made


def test_losses_are_those_of_the_models_logits(texts: Texts, subjects: dict[int, Any]) -> None:
    made = task(texts, tokens=2 * 31)
    plain = subjects[0]
    documents = {document.name: document for document in made._plan(plain, "mine").documents}
    checked = 0
    for sample in all_samples(made, plain):
        if sample.values["setting"] == "multi":
            continue
        context, start = sample.values["context"], sample.details["start"]
        ids = torch.tensor([documents[sample.details["document"]].ids[start - context : start + 32]])
        with torch.no_grad():
            told = torch.log_softmax(plain.model(ids).logits[0].double(), -1)
        nll = -told[context:-1].gather(1, ids[0, context + 1 :, None]).sum()
        assert sample.details["nll"] == pytest.approx(float(nll), rel=1e-5)
        checked += 1
    assert checked == 8


def test_models_of_all_windows_agree_where_there_is_no_context(texts: Texts, subjects: dict[int, Any]) -> None:
    """And they predict the same tokens with it; with a memory the losses are others than with direct sight."""
    found: dict[int, dict[tuple[str, int], dict[str, float]]] = {}
    for window, subject in subjects.items():
        for sample in all_samples(task(texts, tokens=4 * 31), subject):
            key = (str(sample.values["setting"]), int(sample.values["context"]))
            found.setdefault(window, {}).setdefault(key, {})[sample.id] = sample.details["nll"]
    for window in (32, 64):
        assert found[window].keys() == found[0].keys()
        for key, losses in found[0].items():
            assert found[window][key].keys() == losses.keys()
            if key[1] == 0:
                assert found[window][key] == pytest.approx(losses, rel=1e-4)
            else:
                assert found[window][key] != pytest.approx(losses, rel=1e-4)


def test_a_memory_of_other_documents_is_read_once_for_all_blocks_of_a_document(
    texts: Texts, subjects: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives the numbers of reading it anew for each."""
    subject = subjects[64]
    read: list[int] = []
    known = FocusedSubject._read_into
    monkeypatch.setattr(
        FocusedSubject, "_read_into", lambda self, store, ids: (read.append(len(ids)), known(self, store, ids))[1]
    )
    made = task(texts, settings=["multi"], documents=1, tokens=3 * 31)
    together = {sample.id: sample.details["nll"] for sample in all_samples(made, subject)}
    assert read == [64, 64] and len(together) == 12
    apart = {}
    for name in together:
        subject._front = None
        (sample,) = all_samples(made, subject, frozenset(together) - {name})
        apart[name] = sample.details["nll"]
    assert together == apart


# -- runs --------------------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_and_ends_with_the_same_samples(texts: Texts, tmp_path: Path) -> None:
    def rule(seen: list[int], part: list[int], token: int) -> float:
        return 1 + (token % 7) / 10 - len(seen) / 1000

    few = {"tokens": 6 * 31}
    whole = evaluate(task(texts, **few), RuledSubject(rule), tmp_path / "whole")
    for _ in range(10):
        results = evaluate(task(texts, **few), RuledSubject(rule, stop_after=13), tmp_path / "parts")
        if not results.stopped:
            break
    assert not results.stopped and results.rows == whole.rows and len(whole.rows) == 8
    first, second = ((tmp_path / name / "samples.jsonl").read_text("utf-8").splitlines() for name in ("whole", "parts"))
    assert first == second
    assert (tmp_path / "whole" / "plot.png").is_file()


def test_a_finished_run_asks_for_nothing_more(texts: Texts, tmp_path: Path) -> None:
    evaluate(task(texts), RuledSubject(lambda *_: 1.0), tmp_path / "run")
    again = RuledSubject(lambda *_: 1.0)
    results = evaluate(task(texts), again, tmp_path / "run")
    assert again.calls == [] and len(results.rows) == 8


def test_contexts_that_a_model_or_a_set_cannot_take_are_refused_one_by_one(texts: Texts, tmp_path: Path) -> None:
    made = task(texts, lengths=[64, 128, 4096], settings=["single", "multi"])
    results = evaluate(made, RuledSubject(lambda *_: 1.0, longest=128), tmp_path / "run")
    assert {(row.values["context"], row.values["setting"]) for row in results.rows} == {
        (context, setting) for context in (0, 64) for setting in ("single", "multi")
    }
    why = results.refused
    assert "takes 128 tokens, this needs 160" in why["context=128, setting=single, text=mine"]
    assert (
        "fewer than 2 documents of mine hold a block after 4,096 tokens"
        in why["context=4096, setting=single, text=mine"]
    )
    assert "the other documents of mine hold" in why["context=4096, setting=multi, text=mine"]
    starts = {
        sample.details["start"] for sample in all_samples(made, RuledSubject(lambda *_: 1.0)) if sample.details["start"]
    }
    assert min(starts) == 128, "blocks lie where every model predicts them, whatever this one can take"


def test_one_document_alone_has_no_multi_setting(tmp_path: Path) -> None:
    made = task(random_texts(tmp_path, (2000,)))
    results = evaluate(made, RuledSubject(lambda *_: 1.0), tmp_path / "run")
    assert {row.values["setting"] for row in results.rows} == {"single"} and len(results.rows) == 4
    assert all("the other documents of mine hold 0 tokens" in why for why in results.refused.values())
    assert len(results.refused) == 3


def test_texts_that_hold_no_block_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="nothing fits"):
        evaluate(
            task(random_texts(tmp_path, (60, 60))),
            RuledSubject(lambda *_: 1.0),
            tmp_path / "run",
        )


def test_wrong_options_are_told(texts: Texts, subjects: dict[int, Any]) -> None:
    with pytest.raises(ConfigError, match="block: 128 given, expected at most the stride of 64"):
        task(texts, block=128)
    with pytest.raises(ConfigError, match="settings"):
        task(texts, settings=["both"])
    with pytest.raises(UnsupportedCallError, match="window of 64 tokens"):
        all_samples(task(texts, stride=96), subjects[64])
    with pytest.raises(InputError, match="not there"):
        task(texts, texts=["no such set"]).points(subjects[0])


def test_it_is_a_known_task() -> None:
    assert find_task("perplexity") is Perplexity
