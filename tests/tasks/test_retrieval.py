"""Retrieval: questions have the answers they claim, recall is what its definition says, and known retrievers get what they must.

python -m pytest tests/tasks/test_retrieval.py
"""

from __future__ import annotations

import importlib.util
import logging
import random
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import longfocus
from longfocus import FocusConfig, Memory, attach
from longfocus.analysis.attribution import token_mass, window_starts
from longfocus.analysis.memory_search import by_passage, head_mass
from longfocus.errors import ConfigError, EvaluationError, InputError
from longfocus.evaluation.record import Results
from longfocus.evaluation.run import evaluate
from longfocus.memory.context import MassRecorder
from longfocus.model.cache import FocusCache
from longfocus.model.reading import read_ids
from longfocus.subjects.local import FocusedSubject, PlainModel
from longfocus.tasks import retrieval as module
from longfocus.tasks.ranking import rank, recall
from longfocus.tasks.retrieval import KS, MADE, Retrieval, RetrievalOptions
from longfocus.tasks.retrieval_questions import (
    WHAT,
    WHO,
    exact_words,
    other_words,
    paper_questions,
    stretch,
    strew,
    what_comes_next,
)
from longfocus.tasks.retrievers import Bm25, Corpus, Embeddings, TfIdf, cut, embedder_of, why_not
from longfocus.tasks.texts import Texts
from tests.analysis.copying import HEADS, copying_model
from tests.machine import data_folder
from tests.models import MEMORY_LAYERS, MODELS, VOCABULARY, tiny, tokens
from tests.small_tokenizers import KINDS, tokenizer
from tests.tasks.fakes import write_sets

HAS_VECTORS = importlib.util.find_spec("wordllama") is not None
_STOP = {
    "the",
    "a",
    "an",
    "in",
    "of",
    "at",
    "on",
    "from",
    "each",
    "near",
    "beneath",
    "what",
    "did",
    "does",
    "to",
    "every",
}

# -- recall ------------------------------------------------------------------------------------------------


def test_recall_and_rank_worked_by_hand() -> None:
    scores = np.array([0.1, 0.9, 0.5, 0.5, 0.2])
    assert [recall(scores, [1], [], k) for k in (1, 2)] == [1, 1]
    assert [recall(scores, [4], [], k) for k in (3, 4)] == [0, 1]
    assert rank(scores, [4], []) == 4
    assert [recall(scores, [2], [], k) for k in (1, 2, 3)] == [0, 0.5, 1]  # one of two that are alike
    assert rank(scores, [2], []) == 2.5
    assert [recall(scores, [2], [1], k) for k in (1, 2)] == [0.5, 1]  # the best one is left out
    assert recall(scores, [0, 1], [], 1) == 1  # any right passage will do
    assert rank(scores, [0, 4], []) == 4
    assert recall(np.zeros(5), [3], [], 2) == pytest.approx(2 / 5)
    assert recall(np.zeros(5), [3], [0], 2) == pytest.approx(2 / 4)
    assert recall(np.zeros(3), [1], [], 20) == 1
    assert np.isnan(recall(np.array([1.0, np.nan]), [0], [], 1)) and np.isnan(rank(np.array([1.0, np.inf]), [0], []))


def test_recall_and_rank_are_means_over_all_orders_of_what_is_alike() -> None:
    rng = random.Random(0)
    for _ in range(30):
        scores = np.array([rng.choice([0.0, 1.0, 2.0]) for _ in range(6)])
        numbers = rng.sample(range(6), 6)
        right, left_out = numbers[: rng.randint(1, 3)], numbers[3 : 3 + rng.randint(0, 2)]
        ranked = [n for n in range(6) if n not in left_out]
        places = []
        for order in permutations(ranked):
            if all(scores[a] >= scores[b] for a, b in pairwise(order)):
                places.append(1 + min(order.index(number) for number in right))
        assert rank(scores, right, left_out) == pytest.approx(np.mean(places))
        for k in range(1, 6):
            assert recall(scores, right, left_out, k) == pytest.approx(np.mean([place <= k for place in places]))


# -- passages ----------------------------------------------------------------------------------------------


def sample_text(seed: int, words: int = 900) -> str:
    """Sentences, lines and paragraphs of words that mean nothing."""
    rng = random.Random(seed)
    made = []
    for number in range(words):
        made.append("".join(rng.choices("abcdefghilmnoprstuvé", k=rng.randint(2, 9))))
        made.append(rng.choices([" ", "\n", ". ", ".\n", "\n\n", "  ", "\t"], [60, 10, 6, 3, 2, 2, 1])[0])
        if number % 200 == 77:
            made.append("x" * 300)
    return "".join(made)


@pytest.mark.parametrize("kind", KINDS)
def test_passages_cover_the_text_and_fit(kind: str) -> None:
    words = tokenizer(kind)
    for text in (sample_text(1), "word", "a\n" * 500, "y" * 2000, "one. two.\n\n\n\n\n\n", " "):
        pieces = cut(text, words, 64)
        assert "".join(text[start:stop] for start, stop in pieces) == text
        assert all(start < stop for start, stop in pieces)
        assert all(text[start:stop].strip() for start, stop in pieces) or not text.strip()
        offsets = words(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        for start, stop in pieces:
            inside = [first for first, last in offsets if first >= start and last <= stop and first < stop]
            blank = len(text[start:stop]) - len(text[start:stop].rstrip())
            assert len(inside) <= 64 + blank, "white space may be added that would be a passage of its own"


def test_passages_end_with_sentences_then_lines_then_words() -> None:
    words = tokenizer("byte_level")
    text = ("Aa bb cc dd. " * 40).strip()
    assert all(text[start:stop].rstrip().endswith("dd.") for start, stop in cut(text, words, 64))
    text = ("aa bb cc dd\n" * 40).strip()
    assert all(text[stop - 1] == "\n" for _, stop in cut(text, words, 64)[:-1])
    text = "aabb " * 90
    assert all(text[stop - 1] == " " for _, stop in cut(text, words, 64))


def test_the_passage_at_a_character() -> None:
    corpus = Corpus.of([("a", sample_text(2)), ("b", sample_text(3))], tokenizer("byte_level"), 64)
    for number, passage in enumerate(corpus.passages):
        for char in (passage.start, passage.stop - 1):
            assert corpus.passage_at(passage.document, char) == number
        assert passage.text == corpus.texts[passage.document][passage.start : passage.stop]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stretch_holds_so_many_tokens_and_ends_with_a_line(kind: str) -> None:
    words, text = tokenizer(kind), sample_text(4)
    for start, wanted in ((0, 300), (500, 700), (len(text) - 40, 300), (0, 1 << 20)):
        stop, used = stretch(words, text, start, wanted)
        count = len(words(text[start:stop], add_special_tokens=False)["input_ids"])
        assert count <= used + 2 and used <= wanted
        if stop < len(text):
            assert text[stop - 1] == "\n" and count > wanted / 3
    assert stretch(words, text, 7, 0) == (7, 0)
    assert stretch(words, text, len(text), 50) == (len(text), 0)


# -- questions ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.of([(f"book {n}", sample_text(10 + n)) for n in range(3)], tokenizer("byte_level"), 128)


def test_exact_words_stand_once_and_inside_their_passage(corpus: Corpus) -> None:
    asked = exact_words(corpus, 20, random.Random(0))
    assert len({question.right for question in asked}) == len(asked) == 20
    for question in asked:
        assert len(question.text.split()) == 8
        assert sum(text.count(question.text) for text in corpus.texts) == 1
        passage = corpus.passages[question.right[0]].text
        assert question.text in passage
        assert len(passage.split(question.text)[0].split()) >= 2 and len(passage.split(question.text)[1].split()) >= 1


def test_repeated_words_are_no_question() -> None:
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen.\n\n"
    same = Corpus.of([("a", text * 12)], tokenizer("byte_level"), 64)
    assert len(same.passages) > 5
    assert exact_words(same, 5, random.Random(0)) == []
    assert what_comes_next(same, 5, random.Random(0), tokenizer("byte_level")) == []


def test_what_comes_next_asks_for_the_passage_behind_the_words(corpus: Corpus) -> None:
    words = tokenizer("byte_level")
    asked = what_comes_next(corpus, 20, random.Random(0), words)
    assert len(asked) == 20
    for question in asked:
        (before,), (right,) = question.left_out, question.right
        assert right == before + 1
        assert corpus.passages[right].document == corpus.passages[before].document
        assert corpus.passages[before].text.rstrip().endswith(question.text)
        assert len(words(question.text)["input_ids"]) <= 34
        text = corpus.texts[corpus.passages[right].document]
        place = text.index(question.text)
        assert text[place + len(question.text) : corpus.passages[right].start].strip() == ""


def test_made_up_facts_share_no_content_word_with_their_questions() -> None:
    for said, meant in WHO.items():
        for done, asking in WHAT.items():
            fact, question = f"The {said} {done}.", asking.format(meant)
            words = [set(re.findall(r"[^\W_]+", text.lower())) - _STOP for text in (fact, question)]
            assert not words[0] & words[1], (fact, question)
            assert meant in question
    assert len(WHO) * len(WHAT) == 144


def test_facts_are_strewn_as_paragraphs_and_asked_of_the_passage_that_holds_them() -> None:
    facts = [(f"The {said} {done}.", WHAT[done].format(WHO[said])) for said in WHO for done in list(WHAT)[:4]]
    documents = [(f"book {n}", sample_text(20 + n)) for n in range(3)] + [("line", "no end"), ("empty", "")]
    made = strew([fact for fact, _ in facts], documents, random.Random(0))
    for (_, text), (_, before) in zip(made, documents, strict=True):
        without = text
        for fact, _ in facts:
            without = without.replace(f"\n\n{fact}\n", "")
        assert without == before
    corpus = Corpus.of(made, tokenizer("byte_level"), 256)
    asked = other_words(corpus, facts)
    assert len(asked) >= len(facts) - 2
    for question in asked:
        assert question.id in corpus.passages[question.right[0]].text
        assert dict(facts)[question.id] == question.text


def test_paper_questions_have_their_quotations_in_the_right_passages() -> None:
    texts = {
        "p1": sample_text(30) + "We used the green corpus. " + sample_text(31),
        "p2": sample_text(32) + "green corpus",
    }
    corpus = Corpus.of(list(texts.items()), tokenizer("byte_level"), 96)

    def record(id: str, answers: list[str], kinds: list[str], paper: str = "p1") -> dict[str, Any]:
        return {"id": id, "paper": paper, "question": f"{id}?", "answers": answers, "answer_type": kinds}

    records = [
        record("quoted", ["the green corpus", "yes"], ["extractive", "boolean"]),
        record("not in it", ["the red corpus"], ["extractive"]),
        record("own words", ["the green corpus"], ["abstractive"]),
        record("everywhere", ["e"], ["extractive"]),
        record("other paper", ["green corpus"], ["extractive"], "p3"),
        record("second", ["green corpus", "green corpus "], ["extractive", "extractive"], "p2"),
    ]
    asked = {question.id: question for question in paper_questions(corpus, records)}
    assert list(asked) == ["quoted", "second"]
    assert "the green corpus" in "".join(
        corpus.passages[n].text for n in (asked["quoted"].right[0], asked["quoted"].right[0] + 1)
    )
    assert corpus.passages[asked["second"].right[0]].document == 1, "the same words in another paper are not right"


# -- retrievers --------------------------------------------------------------------------------------------

ENGLISH = [
    "The physician purchased a scarlet automobile.",
    "Rain fell on the harbour all night, and the boats lay still.",
    "She baked bread with rye flour and sold it at the market.",
    "The parliament voted on the new tax in the spring.",
    "A flock of geese crossed the lake before the frost came.",
]


def english() -> Corpus:
    return Corpus.of([(str(n), text) for n, text in enumerate(ENGLISH)], tokenizer("byte_level"), 64)


def best(scores: np.ndarray, corpus: Corpus) -> int:
    return corpus.passages[int(scores.argmax())].document


def test_word_retrievers_find_words_and_score_nothing_where_no_word_is_shared() -> None:
    corpus = english()
    for retriever in (Bm25(corpus), TfIdf(corpus)):
        assert best(retriever.scores("who sold RYE bread?"), corpus) == 2
        assert best(retriever.scores("geese, before the frost"), corpus) == 4
        for text in ("doctor bought car", "?", ""):
            scores = retriever.scores(text)
            assert scores.shape == (len(corpus.passages),) and not scores.any(), (type(retriever), text)


def test_bm25_is_the_formula() -> None:
    """Lucene's: idf ln(1 + (N - n + 0.5) / (n + 0.5)) times tf / (tf + k1 (1 - b + b length / mean))."""
    texts = ["apple pear apple", "pear plum", "plum plum plum cherry grape melon"]
    corpus = Corpus.of([(str(n), text) for n, text in enumerate(texts)], tokenizer("byte_level"), 64)
    assert len(corpus.passages) == 3
    scores = Bm25(corpus).scores("apple plum")
    counts = [Counter(text.split()) for text in texts]
    mean = np.mean([sum(count.values()) for count in counts])
    for number, count in enumerate(counts):
        wanted = 0.0
        for word in ("apple", "plum"):
            n = sum(word in other for other in counts)
            norm = 1.5 * (1 - 0.75 + 0.75 * sum(count.values()) / mean)
            wanted += np.log(1 + (3 - n + 0.5) / (n + 0.5)) * count[word] / (count[word] + norm)
        assert scores[number] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.skipif(not HAS_VECTORS, reason="wordllama is not installed")
def test_word_vectors_load_without_a_network_and_know_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", refuse)
    handlers, level = list(logging.root.handlers), logging.root.level
    embed = embedder_of(None)
    assert (logging.root.handlers, logging.root.level) == (handlers, level)
    corpus = english()
    retriever = Embeddings(corpus, embed)
    assert best(retriever.scores("Which car did the doctor buy?"), corpus) == 0
    assert best(retriever.scores("birds flying over water in winter"), corpus) == 4
    assert np.isfinite(retriever.scores("")).all()


def test_a_named_embedding_model_is_used_and_one_that_does_not_load_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = types.ModuleType("sentence_transformers")

    class SentenceTransformer:
        def __init__(self, name: str) -> None:
            if name != "letters":
                raise OSError(f"no {name} anywhere")

        def encode(self, texts: list[str], **named: Any) -> np.ndarray:
            return np.array([[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts])

    package.SentenceTransformer = SentenceTransformer  # type: ignore[attr-defined]
    package.__spec__ = importlib.util.spec_from_loader("sentence_transformers", None)
    monkeypatch.setitem(sys.modules, "sentence_transformers", package)
    assert why_not("embeddings", "letters") is None
    corpus = english()
    assert best(Embeddings(corpus, embedder_of("letters")).scores(ENGLISH[3][::-1]), corpus) == 3
    with pytest.raises(ConfigError, match="embedder: digits cannot be loaded: OSError: no digits anywhere"):
        embedder_of("digits")


def test_what_is_not_installed_is_left_out_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longfocus.tasks.retrievers.find_spec", lambda name: None)
    assert "pip install 'longfocus[eval]'" in str(why_not("BM25", None))
    assert "scikit" in str(why_not("tf-idf", None)) or "sklearn" in str(why_not("tf-idf", None))
    assert "wordllama" in str(why_not("embeddings", None))
    assert "pip install sentence-transformers" in str(why_not("embeddings", "some/model"))
    assert why_not("memory", None) is None and why_not("memory, best head", None) is None


# -- the memory's keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("retrieval", ["dense", "exact"])
def test_the_mean_of_heads_is_the_mass_that_answers_are_attributed_by(name: str, retrieval: str) -> None:
    model: Any = tiny(name)
    attach(model, FocusConfig(memory_layers=MEMORY_LAYERS, window=12, retrieval=retrieval, k=5))
    memory = Memory(model)
    for seed in (1, 2):
        read_ids(model, tokens(1, 30, seed)[0], memory)
    ids = tokens(1, 9, 5)[0].tolist()
    mass = head_mass(model, memory, ids, leading=2)
    heads = model.config.get_text_config().num_attention_heads
    assert mass.shape == (2, heads, 60)
    assert (mass >= 0).all() and (mass.sum(-1) <= 1 + 1e-5).all()
    assert not mass[:, :, window_starts(memory)].any() and mass.sum() > 0

    cache = FocusCache(model.focus, memory)
    recorder = MassRecorder(memory.tokens)
    with torch.no_grad():
        model.forward(torch.tensor([ids[:2]]), cache=cache, use_cache=True)
        cache.recorder = recorder
        model.forward(torch.tensor([ids[2:]]), cache=cache, use_cache=True)
    recorder.queries = 7
    expected = np.where(window_starts(memory), 0.0, token_mass(recorder))
    np.testing.assert_allclose(mass.mean((0, 1)), expected, rtol=1e-6, atol=1e-9)
    assert (mass[0, 0] != mass[0, -1]).any(), "heads differ"


def test_passages_get_the_sum_of_their_tokens() -> None:
    mass = np.random.default_rng(0).random((2, 3, 10))
    bounds = np.array([[0, 4], [4, 5], [5, 5], [5, 10]])
    found = by_passage(mass, bounds)
    for number, (start, stop) in enumerate(bounds):
        np.testing.assert_allclose(found[..., number], mass[..., start:stop].sum(-1), atol=1e-12)


WORD_COUNT = 150


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token a word, and one for a line's end."""
    known = {f"w{number}": number for number in range(WORD_COUNT - 1)} | {"\n": WORD_COUNT - 1}
    made = Tokenizer(models.WordLevel(known, unk_token="w0"))
    split: Any = pre_tokenizers.Split(" ", "removed")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.Split("\n", "isolated")])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", pad_token="w0")


@pytest.fixture(scope="module")
def word_texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    folder = tmp_path_factory.mktemp("words")
    for number in range(2):
        rng = random.Random(number)
        lines = [" ".join(f"w{rng.randrange(1, WORD_COUNT - 1)}" for _ in range(16)) for _ in range(150)]
        (folder / f"{number}.txt").write_text(" \n ".join(lines), "utf-8")
    return Texts(tmp_path_factory.mktemp("none"), {"books": str(folder)})


def copying_subject() -> FocusedSubject:
    model: Any = copying_model(WORD_COUNT, previous=(0, 1), copying=(2, 3))
    attach(model, FocusConfig(memory_layers=(1, 2), window=64))
    return FocusedSubject(model, word_tokenizer(), "copying")


def rows_of(results: Results) -> dict[tuple[str, str], dict[str, float]]:
    return {
        (str(row.values["questions"]), str(row.values["retriever"])): {k: e.value for k, e in row.estimates.items()}
        for row in results.rows
    }


def test_a_head_that_was_built_to_copy_is_chosen_and_finds_exact_words(word_texts: Texts, tmp_path: Path) -> None:
    """Layer 1 and all other heads look everywhere alike; that head looks behind each word of the question."""
    options = RetrievalOptions(
        texts=["books"],
        questions=["exact words"],
        retrievers=["BM25", "memory", "memory, beyond neutral", "memory, best head"],
        tokens=2000,
        passage_tokens=48,
        samples=25,
        choice_tokens=1000,
        choice_samples=5,
    )
    results = evaluate(Retrieval(options, word_texts), copying_subject(), tmp_path / "run")
    found = rows_of(results)
    assert found["exact words", "memory, best head"]["recall@1"] >= 0.9
    assert found["exact words", "memory"]["recall@5"] >= 0.9
    assert found["exact words", "memory, beyond neutral"]["recall@5"] >= 0.9
    assert found["exact words", "BM25"]["recall@1"] == 1
    (row,) = [row for row in results.rows if row.values["retriever"] == "memory, best head"]
    assert row.notes["head"] == "layer 2 head 3" and HEADS == 4
    assert row.chance["recall@1"] == pytest.approx(1 / row.notes["passages"])
    assert row.chance["recall@1"] < 0.05


# -- known retrievers --------------------------------------------------------------------------------------


class _Scripted:
    """In place of the memory: heads whose scores are known."""

    fill: Any = staticmethod(lambda shape: np.zeros(shape))

    def __init__(self, corpus: Corpus, subject: Any) -> None:
        self.count = len(corpus.passages)

    def by_head(self, question: str) -> np.ndarray:
        return np.asarray(type(self).fill((2, 3, self.count)))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Scripted]]:
    monkeypatch.setattr(module, "MemoryKeys", _Scripted)
    before = _Scripted.fill
    yield _Scripted
    _Scripted.fill = before


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    folder = tmp_path_factory.mktemp("prose")
    for number in range(3):
        (folder / f"{number}.txt").write_text(sample_text(40 + number, 2500), "utf-8")
    return Texts(tmp_path_factory.mktemp("none"), {"books": str(folder), "code": str(folder)})


def tiny_subject() -> FocusedSubject:
    words = tokenizer("byte_level")
    model: Any = tiny("llama", vocab_size=len(words))
    attach(model, FocusConfig(memory_layers=MEMORY_LAYERS, window=64))
    return FocusedSubject(model, words, "tiny")


def small(prose: Texts, **changes: Any) -> Retrieval:
    given: dict[str, Any] = {
        "texts": ["books"],
        "tokens": 6000,
        "samples": 12,
        "choice_tokens": 1500,
        "choice_samples": 4,
    }
    return Retrieval(RetrievalOptions(**{**given, "retrievers": ["BM25", "memory"], **changes}), prose)


def test_scores_that_are_all_alike_are_exactly_chance(prose: Texts, scripted: type[_Scripted], tmp_path: Path) -> None:
    results = evaluate(small(prose, retrievers=["memory", "memory, best head"]), tiny_subject(), tmp_path / "run")
    assert len(results.rows) == 3 * 2
    for row in results.rows:
        assert set(row.chance) == {f"recall@{k}" for k in KS}
        for name, estimate in row.estimates.items():
            assert estimate.value == pytest.approx(row.chance[name])
        ranked = row.notes["passages"] - (row.values["questions"] == "what comes next")
        assert row.chance["recall@5"] == pytest.approx(5 / ranked)


def test_random_scores_are_chance_within_the_interval(prose: Texts, scripted: type[_Scripted], tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    scripted.fill = generator.random
    task = small(prose, samples=60, retrievers=["memory"], questions=["exact words", "what comes next"])
    for row in evaluate(task, tiny_subject(), tmp_path / "run").rows:
        for k in (5, 20):
            estimate = row.estimates[f"recall@{k}"]
            assert estimate.low <= row.chance[f"recall@{k}"] <= estimate.high, (row.values, k)


def test_injected_answers_are_always_first(prose: Texts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The answer is put into one head only: the best head finds it always, the mean of noisy heads does not."""
    task = small(prose, retrievers=["memory", "memory, best head"])
    generator = np.random.default_rng(0)

    class Knows(_Scripted):
        def __init__(self, corpus: Corpus, subject: Any) -> None:
            super().__init__(corpus, subject)
            self.corpus = corpus

        def by_head(self, question: str) -> np.ndarray:
            scores = 10 * generator.random((2, 3, self.count))
            for number, passage in enumerate(self.corpus.passages):
                following = number and self.corpus.passages[number - 1].text.rstrip().endswith(question)
                told = any(
                    f"The {said} {done}." in passage.text
                    for said in WHO
                    for done in WHAT
                    if WHAT[done].format(WHO[said]) == question
                )
                scores[1, 2, number] = float(question in passage.text) + 2 * bool(following) + float(told)
            return scores

    monkeypatch.setattr(module, "MemoryKeys", Knows)
    results = evaluate(task, tiny_subject(), tmp_path / "run")
    found = rows_of(results)
    for kind in MADE:
        assert found[kind, "memory, best head"]["recall@1"] == 1, kind
        assert found[kind, "memory"]["recall@1"] < 0.6, kind
    (note,) = {row.notes["head"] for row in results.rows if "head" in row.notes}
    assert note == f"layer {MEMORY_LAYERS[1]} head 2"


# -- as a task ---------------------------------------------------------------------------------------------


def test_the_choice_of_a_head_sees_nothing_that_is_tested(prose: Texts) -> None:
    task, words = small(prose), tokenizer("byte_level")
    tested, choice = task._stretches(words, "books")
    for name, text in tested:
        whole = dict(prose.documents("books"))[name]
        other = dict(choice)[name]
        assert whole.index(other) >= whole.index(text) + len(text)
    assert not {fact for fact, _ in task._facts("books")} & {fact for fact, _ in task._facts("books", choice=True)}
    count = sum(len(words(text, add_special_tokens=False)["input_ids"]) for _, text in tested)
    assert 5000 < count <= 6000


def test_questions_depend_on_the_seed_alone(prose: Texts) -> None:
    subject: Any = types.SimpleNamespace(tokenizer=tokenizer("byte_level"))
    first = small(prose)._questions(subject, "books")
    assert small(prose, texts=["code", "books"])._questions(subject, "books") == first
    assert small(prose, seed=1)._questions(subject, "books") != first


def test_questions_do_not_depend_on_where_own_texts_lie(prose: Texts, tmp_path: Path) -> None:
    subject: Any = types.SimpleNamespace(tokenizer=tokenizer("byte_level"))
    for number, (_, text) in enumerate(prose.documents("books")):
        (tmp_path / f"{number}.txt").write_text(text, "utf-8")
    moved = small(Texts(tmp_path, {"books": str(tmp_path)}))._questions(subject, "books")
    here = small(prose)._questions(subject, "books")
    assert not isinstance(moved, str) and not isinstance(here, str)
    assert moved[0].texts == here[0].texts and moved[1] == here[1]


def test_a_stopped_run_goes_on_to_the_same_samples(prose: Texts, tmp_path: Path) -> None:
    def measured(name: str) -> list[str]:
        lines = (tmp_path / name / "samples.jsonl").read_text("utf-8").splitlines()
        return [re.sub(r'"seconds": [\d.e-]+', "", line) for line in lines]

    def task() -> Retrieval:
        return small(prose, samples=4, retrievers=["BM25", "memory", "memory, best head"])

    def interrupt(point: Any, done: int, total: int) -> None:
        if done == 17:
            raise KeyboardInterrupt

    whole = evaluate(task(), tiny_subject(), tmp_path / "whole")
    assert evaluate(task(), tiny_subject(), tmp_path / "parts", step=interrupt).stopped
    assert evaluate(task(), tiny_subject(), tmp_path / "parts").rows == whole.rows
    assert measured("parts") == measured("whole") and len(measured("whole")) == 3 * 4 * 3
    header = (tmp_path / "whole" / "table.md").read_text("utf-8").splitlines()[0]
    assert header.startswith("| questions | retriever | text | recall@1 | recall@5 | recall@20 |")
    assert (tmp_path / "whole" / "plot.png").stat().st_size > 5000


def test_what_cannot_be_used_is_said_with_the_results(
    prose: Texts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "longfocus.tasks.retrievers.find_spec", lambda name: None if name == "wordllama" else real(name)
    )
    task = small(prose, questions=["exact words"], retrievers=["BM25", "embeddings"])
    results = evaluate(task, tiny_subject(), tmp_path / "run")
    assert [row.values["retriever"] for row in results.rows] == ["BM25"]
    (reason,) = results.refused.values()
    assert "needs the package wordllama" in reason


def test_word_vectors_that_do_not_load_are_left_out_and_a_named_model_is_an_error(
    prose: Texts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(name: str | None) -> Any:
        raise ConfigError(f"embedder: {name} cannot be loaded")

    monkeypatch.setattr(module, "embedder_of", broken)
    monkeypatch.setattr("longfocus.tasks.retrievers.find_spec", lambda name: True)
    options: dict[str, Any] = {"questions": ["exact words"], "retrievers": ["BM25", "embeddings"]}
    results = evaluate(small(prose, **options), tiny_subject(), tmp_path / "run")
    assert list(results.refused.values()) == ["embedder: None cannot be loaded"]
    with pytest.raises(ConfigError, match="some/model cannot be loaded"):
        small(prose, **options, embedder="some/model").points(tiny_subject())


def test_qasper_is_read_whole_and_asked_about_by_paper(prose: Texts, tmp_path: Path) -> None:
    short, long = sample_text(50, 300) + " the green corpus. ", sample_text(51, 4000)
    records = [
        {
            "id": f"q{number}",
            "paper": paper,
            "full_text": text,
            "question": "Which corpus?",
            "answers": ["the green corpus"],
            "answer_type": ["extractive"],
        }
        for number, (paper, text) in enumerate([("long", long), ("short", short)])
    ]
    texts = Texts(write_sets(tmp_path / "sets", {"qasper/test": records}))
    task = small(texts, texts=["qasper"], tokens=4000)
    (point,) = task.points(tiny_subject())
    assert point.values == {"questions": "paper questions", "text": "qasper"} and point.samples == 2
    results = evaluate(task, tiny_subject(), tmp_path / "run")
    assert results.rows[0].estimates["recall@1"].value == 1  # BM25
    (refused,) = small(texts, texts=["qasper"], tokens=500).points(tiny_subject())
    assert "no paper fits" in str(refused.refused)
    (refused, _) = small(texts, texts=["qasper"], tokens=4000, retrievers=["memory", "memory, best head"]).points(
        tiny_subject()
    )
    assert "the best head is chosen on held-out texts" in str(refused.refused)


def test_texts_that_are_missing_or_too_short_are_said(tmp_path: Path, prose: Texts) -> None:
    with pytest.raises(InputError, match="books"):
        small(Texts(tmp_path)).points(tiny_subject())
    (tmp_path / "short.txt").write_text("Too short.", "utf-8")
    with pytest.raises(EvaluationError, match="gives no question of this kind"):
        evaluate(
            small(Texts(tmp_path, {"books": str(tmp_path / "short.txt")}), questions=["exact words"]),
            tiny_subject(),
            tmp_path / "run",
        )
    plain = PlainModel(tiny("llama"), tokenizer("byte_level"), "plain")
    with pytest.raises(EvaluationError, match="looks into memory layers"):
        evaluate(small(prose), plain, tmp_path / "other")


# -- real texts --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def held_out() -> Texts:
    return Texts(data_folder("books", "code"))


@pytest.mark.data
def test_word_retrievers_find_exact_words_of_real_texts_and_not_other_words(held_out: Texts, tmp_path: Path) -> None:
    task = Retrieval(
        RetrievalOptions(texts=["books", "code"], retrievers=["BM25", "tf-idf"], tokens=20_000, samples=30), held_out
    )
    subject = tiny_subject()
    results = evaluate(task, subject, tmp_path / "run")
    assert len(results.rows) == 2 * 3 * 2
    for row in results.rows:
        value = row.estimates["recall@5"].value
        if row.values["questions"] == "exact words":
            assert value > 0.85, row.values
        elif row.values["questions"] == "other words":
            assert value < 0.25, row.values


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.data
def test_the_default_models_memory_finds_exact_words(
    held_out: Texts, tmp_path: Path, default_model: str, default_tokenizer: Any
) -> None:
    model: Any = longfocus.load("default", dtype=torch.bfloat16)
    subject = FocusedSubject(model, default_tokenizer, "default")
    options = RetrievalOptions(
        texts=["books"], questions=["exact words"], retrievers=["memory"], tokens=2048, samples=12
    )
    (row,) = evaluate(Retrieval(options, held_out), subject, tmp_path / "run").rows
    assert row.estimates["recall@5"].low > row.chance["recall@5"]


def test_the_tiny_models_vocabulary_is_not_mixed_up() -> None:
    """`tiny` has a small vocabulary of its own; here it must have the tokenizer's."""
    assert len(tokenizer("byte_level")) != VOCABULARY
    assert tiny_subject().model.config.vocab_size == len(tokenizer("byte_level"))
