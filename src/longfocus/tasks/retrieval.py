"""Retrieval: do the memory layers' keys find the passage that holds the answer, as well as a search engine would?

Real held-out texts are read into a memory and cut into passages. A question has one right passage; each retriever (see
`retrievers`) orders all passages by it, and recall@k is the share of questions whose right passage is among the first k.
Of passages that a retriever scores alike, any order is as good, so recall is what a random order among them would give.

**Questions** are made from the texts themselves:

    exact words       8 consecutive words of a passage, not at its edges, that stand in the corpus once; asked: that passage
    what comes next   the end of a passage; asked: the passage that follows it in its document. The passage with the
                      question's own words is left out of everyone's order: finding it is the kind above
    other words       "The physician purchased a scarlet automobile." is strewn into the text, a line of its own, with many
                      others like it; asked: "What colour was the car that the doctor bought?" No content word is shared, and
                      each half of a sentence occurs in others too, so that both must be understood
    paper questions   Qasper's questions that annotators answered by quoting; asked: a passage of that paper in which a
                      quotation begins (any of them; questions whose quotations stand in more than 5 are left out, as short
                      words do), among the passages of all papers

**Memory.** Passages are ordered by the attention mass that the question's tokens gave to them, meaned over heads, memory layers
and tokens. `memory, beyond neutral` takes from it what a question that asks for nothing gives, as the sources of `longfocus ask`
do. `memory, best head` orders by one head: the one with the best mean reciprocal rank on questions of the first three
kinds, made in the same way from other stretches of the documents and with other made-up facts. The answering model
writes nothing here, so a passage that ranks high was looked at; whether it is used is what other tasks measure.

The form is that of the premise-selection table in the authors' answers to reviewers (after Magnushammer, arXiv 2303.04488):
BM25, tf-idf and an embedding model beside the method.
"""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from longfocus.errors import ConfigError, InputError
from longfocus.settings import Size, size_name
from longfocus.subjects.contract import Completes, HoldsMemory
from longfocus.tasks.contract import Measure, Point, Row, Sample, Task, TaskOptions, Values
from longfocus.tasks.ranking import rank, recall
from longfocus.tasks.retrieval_questions import (
    Question,
    exact_words,
    made_up_facts,
    other_words,
    paper_questions,
    stretch,
    strew,
    what_comes_next,
)
from longfocus.tasks.retrievers import Bm25, Corpus, Embeddings, MemoryKeys, Retriever, TfIdf, embedder_of, why_not
from longfocus.tasks.statistics import mean_of
from longfocus.tasks.texts import Texts

Kind = Literal["exact words", "what comes next", "other words", "paper questions"]
MADE: tuple[Kind, ...] = ("exact words", "what comes next", "other words")
"""Kinds that are made from any text."""

MOST_CHOSEN_ON = 40
FEWEST_FACTS = 48
"""Made-up facts in a corpus, asked or not, so that most halves of sentences occur more than once."""
KS = (1, 5, 20)


class RetrievalOptions(TaskOptions):
    """Options of `retrieval`."""

    texts: Annotated[list[Literal["books", "code", "arxiv", "isabelle", "qasper"]], Field(min_length=1)] = [
        "books",
        "code",
        "arxiv",
        "isabelle",
        "qasper",
    ]
    """Sets of held-out documents; `qasper` has paper questions only, the others the other kinds."""
    questions: Annotated[list[Kind], Field(min_length=1)] = [*MADE, "paper questions"]
    """Kinds of questions."""
    retrievers: Annotated[
        list[Literal["BM25", "tf-idf", "embeddings", "memory", "memory, beyond neutral", "memory, best head"]],
        Field(min_length=1),
    ] = ["BM25", "tf-idf", "embeddings", "memory", "memory, beyond neutral", "memory, best head"]
    """What is compared."""
    embedder: str | None = None
    """A sentence-transformers model for `embeddings`; null: the static word vectors of the package wordllama."""
    tokens: Size = 65536
    """Of a text in memory."""
    passage_tokens: Annotated[int, Field(ge=48)] = 96
    """Longest passage."""
    samples: Annotated[int, Field(ge=1)] = 50
    """Questions of a kind and text."""
    choice_tokens: Size = 8192
    """Of each text's other stretches, on which the best head is chosen."""
    choice_samples: Annotated[int, Field(ge=1, le=MOST_CHOSEN_ON)] = 20
    """Questions of a kind and text, on which the best head is chosen."""


class Retrieval(Task):
    """The memory's keys against BM25, tf-idf and embeddings: is the passage that holds the answer found?"""

    name, title = "retrieval", "Retrieval"
    paper = "Focused Transformer, answers to reviewers, table of premise selection (its form; questions are our own)"
    axes: tuple[str, ...] = ("questions", "retriever", "text")
    measures = tuple(Measure(f"recall@{k}", "share", "higher") for k in KS)
    needs = "memory"
    Options = RetrievalOptions
    quick = {
        "texts": ["books", "code"],
        "tokens": 8192,
        "samples": 12,
        "choice_tokens": 2048,
        "choice_samples": 6,
    }

    def __init__(self, options: RetrievalOptions, texts: Texts) -> None:
        super().__init__(options, texts)
        self._asked: dict[str, tuple[Corpus, dict[str, list[Question]]] | str] = {}
        self._head: tuple[int, int] | None = None
        self._memory: tuple[Corpus, MemoryKeys] | None = None
        self._others: dict[tuple[str, str], Retriever] = {}
        self._embedder: Any = None

    # -- what is asked -----------------------------------------------------------------------------------

    def points(self, subject: Completes) -> Sequence[Point]:
        """Each text and kind of question; all retrievers are asked together. One that cannot be used is refused."""
        options: RetrievalOptions = self.options
        found: list[Point] = []
        for text in options.texts:
            made = self._questions(subject, text)
            for kind in options.questions:
                if (kind in MADE) == (text == "qasper"):
                    continue
                values: Values = {"questions": kind, "text": text}
                if isinstance(made, str):
                    found.append(Point(values, 0, refused=made))
                    continue
                asked = made[1][kind]
                if not asked:
                    found.append(Point(values, 0, refused=f"{text} gives no question of this kind; give longer texts."))
                    continue
                reasons = {name: self._why_not(name) for name in options.retrievers}
                for name, reason in reasons.items():
                    if reason is not None:
                        found.append(Point({**values, "retriever": name}, 0, refused=reason))
                found.append(Point(values, len(asked) * sum(reason is None for reason in reasons.values())))
        return found

    def _why_not(self, name: str) -> str | None:
        """
        Raises:
            ConfigError: a named embedding model cannot be loaded.
        """
        if name == "memory, best head" and not self._choice_texts():
            return "the best head is chosen on held-out texts, and none of them is among `texts`."
        reason = why_not(name, self.options.embedder)
        if name == "embeddings" and reason is None:
            try:
                self._embed()
            except ConfigError as error:
                if self.options.embedder is not None:
                    raise
                reason = str(error)
        return reason

    def _choice_texts(self) -> list[str]:
        return [text for text in self.options.texts if text != "qasper"]

    def _questions(self, subject: Completes, text: str) -> tuple[Corpus, dict[str, list[Question]]] | str:
        """The corpus of a text and its questions by kind, or why there are none."""
        if text not in self._asked:
            options: RetrievalOptions = self.options
            rng = random.Random(f"{options.seed} retrieval {text}")
            if text == "qasper":
                self._asked[text] = self._of_papers(subject.tokenizer)
            else:
                tested, _ = self._stretches(subject.tokenizer, text)
                self._asked[text] = self._made(subject.tokenizer, tested, self._facts(text), options.samples, rng)
        return self._asked[text]

    def _facts(self, text: str, *, choice: bool = False) -> list[tuple[str, str]]:
        """Made-up facts (statement, question) of a text: those that are tested, or the others, for the choice of a head."""
        facts = made_up_facts()
        mixed = random.Random(f"{self.options.seed} facts {text}").sample(facts, len(facts))
        return mixed[-MOST_CHOSEN_ON:] if choice else mixed[:-MOST_CHOSEN_ON]

    def _stretches(self, tokenizer: Any, text: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Parts of each document: those that are tested, and others, behind them, on which a head is chosen."""
        options: RetrievalOptions = self.options
        documents = self.texts.documents(text)
        tested: list[tuple[str, str]] = []
        choice: list[tuple[str, str]] = []
        room, other_room = options.tokens, options.choice_tokens
        # short ones first, so that longer ones can take what they leave
        order = sorted(range(len(documents)), key=lambda number: len(documents[number][1]))
        for done, number in enumerate(order):
            name, whole = documents[number]
            share, other_share = room // (len(order) - done), other_room // (len(order) - done)
            rng = random.Random(f"{options.seed} stretch {text} {number}")
            spare = len(whole) - 5 * (share + other_share)  # about 4 characters a token
            start = whole.rfind("\n", 0, rng.randrange(spare)) + 1 if spare > 0 else 0
            stop, used = stretch(tokenizer, whole, start, share)
            other_stop, other_used = stretch(tokenizer, whole, stop, other_share)
            room, other_room = room - used, other_room - other_used
            tested.append((name, whole[start:stop]))
            choice.append((name, whole[stop:other_stop]))
        return [(n, t) for n, t in tested if t.strip()], [(n, t) for n, t in choice if t.strip()]

    def _made(
        self,
        tokenizer: Any,
        documents: Sequence[tuple[str, str]],
        facts: Sequence[tuple[str, str]],
        samples: int,
        rng: random.Random,
    ) -> tuple[Corpus, dict[str, list[Question]]]:
        """Documents with facts strewn into them, as a corpus, and its questions; more facts are strewn than asked."""
        kinds = self.options.questions
        said = [fact for fact, _ in facts[: max(samples, FEWEST_FACTS)]]
        strewn = strew(said, documents, rng) if "other words" in kinds else documents
        corpus = Corpus.of(strewn, tokenizer, self.options.passage_tokens)
        return corpus, {
            "exact words": exact_words(corpus, samples, rng),
            "what comes next": what_comes_next(corpus, samples, rng, tokenizer),
            "other words": other_words(corpus, facts[:samples]) if "other words" in kinds else [],
        }

    def _of_papers(self, tokenizer: Any) -> tuple[Corpus, dict[str, list[Question]]] | str:
        """Qasper's papers, the shortest first, as many whole ones as fit, and their questions."""
        records = self.texts.records("qasper/test", ("id", "paper", "full_text", "question", "answers", "answer_type"))
        papers = {record["paper"]: record["full_text"] for record in records}
        room, documents = self.options.tokens, []
        for paper, text in sorted(papers.items(), key=lambda item: (len(item[1]), item[0])):
            room -= len(tokenizer(text, add_special_tokens=False)["input_ids"])
            if room < 0:
                break
            documents.append((paper, text))
        if not documents:
            return f"no paper fits tokens={size_name(self.options.tokens)}."
        corpus = Corpus.of(documents, tokenizer, self.options.passage_tokens)
        return corpus, {"paper questions": paper_questions(corpus, records)[: self.options.samples]}

    # -- asking ------------------------------------------------------------------------------------------

    def samples(self, subject: HoldsMemory, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        """Each question to each retriever, one after another."""
        options: RetrievalOptions = self.options
        kind, text = str(point.values["questions"]), str(point.values["text"])
        made = self._questions(subject, text)
        assert not isinstance(made, str)
        corpus, questions = made
        usable = [name for name in options.retrievers if self._why_not(name) is None]
        for question in questions[kind]:
            by_head: np.ndarray | None = None
            for name in usable:
                id = f"{question.id}, {name}"
                if id in done:
                    continue
                begun = time.perf_counter()
                if name.startswith("memory"):
                    head = self._best_head(subject) if name == "memory, best head" else None
                    if by_head is None:
                        by_head = self._memory_keys(subject, corpus).by_head(question.text)
                    scores = by_head.mean((0, 1)) if head is None else by_head[head]
                    if name == "memory, beyond neutral":
                        scores = scores - self._memory_keys(subject, corpus).neutral
                else:
                    head, scores = None, self._other(name, text, corpus).scores(question.text)
                details: dict[str, Any] = {
                    "question": question.text,
                    "right": list(question.right),
                    "passages": len(corpus.passages),
                    "rank": rank(scores, question.right, question.left_out),
                    "chance": [recall(np.zeros(len(scores)), question.right, question.left_out, k) for k in KS],
                    "seconds": round(time.perf_counter() - begun, 3),
                }
                if head is not None:
                    details["head"] = [subject.model.focus.config.layers[head[0]], head[1]]
                if question.paper is not None:
                    details["paper"] = question.paper
                values: Values = {"questions": kind, "retriever": name, "text": text}
                recalls = {f"recall@{k}": recall(scores, question.right, question.left_out, k) for k in KS}
                yield Sample(id, values, recalls, 1.0, details)

    def _other(self, name: str, text: str, corpus: Corpus) -> Retriever:
        """A retriever without a model, over a text."""
        if (name, text) not in self._others:
            if name == "BM25":
                self._others[name, text] = Bm25(corpus)
            elif name == "tf-idf":
                self._others[name, text] = TfIdf(corpus)
            else:
                self._others[name, text] = Embeddings(corpus, self._embed())
        return self._others[name, text]

    def _embed(self) -> Any:
        if self._embedder is None:
            self._embedder = embedder_of(self.options.embedder)
        return self._embedder

    def _memory_keys(self, subject: HoldsMemory, corpus: Corpus) -> MemoryKeys:
        """The memory of a corpus; that of the last one is kept."""
        if self._memory is None or self._memory[0] is not corpus:
            self._memory = None
            self._memory = (corpus, MemoryKeys(corpus, subject))
        return self._memory[1]

    def _best_head(self, subject: HoldsMemory) -> tuple[int, int]:
        """The head with the best mean reciprocal rank on other texts (number of the memory layer, head)."""
        if self._head is None:
            options: RetrievalOptions = self.options
            total: Any = 0.0
            for text in self._choice_texts():
                _, documents = self._stretches(subject.tokenizer, text)
                facts = self._facts(text, choice=True)
                rng = random.Random(f"{options.seed} choice {text}")
                corpus, questions = self._made(subject.tokenizer, documents, facts, options.choice_samples, rng)
                if not corpus.passages:
                    continue
                keys = MemoryKeys(corpus, subject)
                for question in [asked for kind in questions.values() for asked in kind]:
                    heads = keys.by_head(question.text)
                    ranks = [[rank(head, question.right, question.left_out) for head in layer] for layer in heads]
                    total = total + np.nan_to_num(1 / np.array(ranks))
            if not isinstance(total, np.ndarray):
                raise InputError("retrieval: the texts are too short to choose a head on; leave memory, best head out.")
            layer, head = np.unravel_index(int(total.argmax()), total.shape)
            self._head = (int(layer), int(head))
        return self._head

    # -- what it comes to --------------------------------------------------------------------------------

    def row(self, group: Sequence[Sample]) -> Row:
        """Means, with what a random order would give."""
        chance = {
            f"recall@{k}": mean_of([sample.details["chance"][at] for sample in group]).value for at, k in enumerate(KS)
        }
        return replace(super().row(group), chance=chance)

    def cluster(self, sample: Sample) -> Hashable | None:
        """Questions about one paper are not independent."""
        found: str | None = sample.details.get("paper")
        return found

    def notes(self, group: Sequence[Sample]) -> dict[str, Any]:
        """Where a head was chosen, which."""
        heads = {tuple(sample.details["head"]) for sample in group if "head" in sample.details}
        found: dict[str, Any] = {"passages": group[0].details["passages"]}
        return found | ({"head": ", ".join(f"layer {a} head {b}" for a, b in sorted(heads))} if heads else {})
