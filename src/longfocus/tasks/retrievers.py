"""Retrievers that are compared: each scores all passages of a corpus for a question.

    BM25               words, weighted by rarity and passage length: bm25s with its defaults and English stop words
    tf-idf             the same words as vectors, cosine: scikit-learn with its defaults
    embeddings         one vector a passage, cosine: a sentence-transformers model, or, where none is named, the static word
                       vectors in the package wordllama (means of 256 numbers a token; no network, no neural network)
    memory             the memory layers' keys: attention of the question's tokens, meaned over layers and heads
    memory, best head  the same of one head, chosen on other texts and other questions

Only `memory` needs the model. What a retriever's package lacks is a reason to leave it out, not an error.
"""

from __future__ import annotations

import importlib
import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from longfocus.analysis.attribution import NEUTRAL_QUESTION
from longfocus.analysis.memory_search import by_passage, head_mass
from longfocus.data.tokens import leading_ids
from longfocus.errors import ConfigError
from longfocus.subjects.contract import HoldsMemory, Prompt

PACKAGES = {"BM25": "bm25s", "tf-idf": "sklearn"}
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*\s+|\n\s*\n")
_LINE_END = re.compile(r"\n")
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Passage:
    """A piece of a document."""

    document: int
    start: int
    """First character in its document."""
    stop: int
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents cut into passages; every character is in one of them."""

    names: tuple[str, ...]
    texts: tuple[str, ...]
    passages: tuple[Passage, ...]

    @classmethod
    def of(cls, documents: Sequence[tuple[str, str]], tokenizer: Any, passage_tokens: int) -> Corpus:
        """Cut documents (name, text) into passages of at most so many tokens."""
        passages = [
            Passage(number, start, stop, text[start:stop])
            for number, (_, text) in enumerate(documents)
            for start, stop in cut(text, tokenizer, passage_tokens)
        ]
        return cls(tuple(name for name, _ in documents), tuple(text for _, text in documents), tuple(passages))

    def passage_at(self, document: int, char: int) -> int:
        """The number of the passage that a character of a document is in."""
        return bisect_left(self.passages, (document, char + 1), key=lambda passage: (passage.document, passage.stop))


def cut(text: str, tokenizer: Any, passage_tokens: int) -> list[tuple[int, int]]:
    """Consecutive pieces (start, stop) in characters: as long as fit, but where the second half of a piece has a sentence's
    or paragraph's end it ends with the last of these, else with a line, else with a word."""
    starts = [first for first, _ in _offsets(tokenizer, text)]
    pieces: list[tuple[int, int]] = []
    begin = 0
    while begin < len(text):
        token = bisect_left(starts, begin)
        stop = len(text)
        if token + passage_tokens < len(starts):
            stop = _break(text, begin, max(begin + 1, starts[token + passage_tokens]))
        if pieces and not text[begin:stop].strip():
            pieces[-1] = (pieces[-1][0], stop)
        else:
            pieces.append((begin, stop))
        begin = stop
    return pieces


def _offsets(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    return found


def _break(text: str, begin: int, limit: int) -> int:
    half = begin + (limit - begin) // 2
    for pattern in (_SENTENCE_END, _LINE_END, _SPACE):
        ends = [match.end() for match in pattern.finditer(text, half, limit)]
        if ends:
            return ends[-1]
    return limit


# -- the contract ------------------------------------------------------------------------------------------


class Retriever(Protocol):
    """Scores of passages; only their order counts."""

    def scores(self, question: str) -> np.ndarray:
        """float64 (passages,): larger for passages that are more likely asked for; the same for equally likely ones."""
        ...


class Bm25:
    """BM25 as in Lucene (Robertson; Kamphuis et al. 2020), k1 = 1.5, b = 0.75: the defaults of bm25s (Lù 2024)."""

    def __init__(self, corpus: Corpus) -> None:
        self.package = importlib.import_module("bm25s")
        self.index = self.package.BM25()
        self.known = len(corpus.passages)
        self.index.index(self._words([passage.text for passage in corpus.passages]), show_progress=False)

    def _words(self, texts: list[str]) -> list[list[str]]:
        found: list[list[str]] = self.package.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
        return found

    def scores(self, question: str) -> np.ndarray:
        """See `Retriever`."""
        (words,) = self._words([question])
        return np.asarray(self.index.get_scores(words), dtype=np.float64) if words else np.zeros(self.known)


class TfIdf:
    """Cosine of tf-idf vectors, scikit-learn's defaults."""

    def __init__(self, corpus: Corpus) -> None:
        text = importlib.import_module("sklearn.feature_extraction.text")
        self.vectorizer = text.TfidfVectorizer()
        self.passages = self.vectorizer.fit_transform([passage.text for passage in corpus.passages])

    def scores(self, question: str) -> np.ndarray:
        """See `Retriever`."""
        found = self.passages @ self.vectorizer.transform([question]).T
        return np.asarray(found.toarray(), dtype=np.float64)[:, 0]


class Embeddings:
    """Cosine of one vector for each passage and one for the question."""

    def __init__(self, corpus: Corpus, embed: Callable[[list[str]], np.ndarray]) -> None:
        self.embed = embed
        self.passages = self._unit([passage.text for passage in corpus.passages])

    def _unit(self, texts: list[str]) -> np.ndarray:
        vectors = np.asarray(self.embed(texts), dtype=np.float64)
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    def scores(self, question: str) -> np.ndarray:
        """See `Retriever`."""
        found: np.ndarray = self.passages @ self._unit([question])[0]
        return found


class MemoryKeys:
    """Attention of the question's tokens in the memory layers."""

    def __init__(self, corpus: Corpus, subject: HoldsMemory) -> None:
        """
        Args:
            subject: reads the corpus into a memory, each document by itself.
        """
        self.subject = subject
        self.memory = subject.memory_of(Prompt("", corpus.texts, corpus.names))
        self.leading = len(leading_ids(subject.tokenizer))
        first = [self._token(passage.document, passage.start) for passage in corpus.passages]
        last = [self._token(passage.document, passage.stop) for passage in corpus.passages]
        self.bounds = np.array([first, last]).T

    def _token(self, number: int, char: int) -> int:
        """The first token of a document that begins at a character or behind it."""
        document = self.memory.documents[number]
        tokens = range(document.start, document.stop)
        return document.start + bisect_left(
            tokens, char, key=lambda token: self.memory.span(document, token, token + 1)[0]
        )

    @cached_property
    def neutral(self) -> np.ndarray:
        """float64 (passages,): what a question that asks for nothing gives, meaned over layers and heads."""
        return self.by_head(NEUTRAL_QUESTION).mean((0, 1))

    def by_head(self, question: str) -> np.ndarray:
        """float64 (memory layers, heads, passages)."""
        ids = self.subject.tokenizer(question)["input_ids"]
        return by_passage(head_mass(self.subject.model, self.memory, ids, leading=self.leading), self.bounds)


# -- vectors -----------------------------------------------------------------------------------------------


def why_not(name: str, embedder: str | None) -> str | None:
    """Why a retriever cannot be used here; None: it can."""
    package = PACKAGES.get(name)
    if name == "embeddings":
        package = "sentence_transformers" if embedder is not None else "wordllama"
    if package is None or find_spec(package) is not None:
        return None
    install = "sentence-transformers" if package == "sentence_transformers" else "'longfocus[eval]'"
    return f"{name} needs the package {package}: pip install {install}"


def embedder_of(name: str | None) -> Callable[[list[str]], np.ndarray]:
    """A function from texts to vectors, float (texts, size).

    Args:
        name: a sentence-transformers model (folder or hub id); None: wordllama's vectors.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    try:
        return _word_vectors() if name is None else _sentence_vectors(name)
    except Exception as error:  # a folder or id that holds no model, a package that changed
        raise ConfigError(
            f"embedder: {name or 'wordllama'} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _sentence_vectors(name: str) -> Callable[[list[str]], np.ndarray]:
    model = importlib.import_module("sentence_transformers").SentenceTransformer(name)

    def embed(texts: list[str]) -> np.ndarray:
        return np.asarray(model.encode(texts, show_progress_bar=False, convert_to_numpy=True))

    return embed


def _word_vectors() -> Callable[[list[str]], np.ndarray]:
    quiet = logging.NullHandler()
    logging.root.addHandler(quiet)  # without a handler there, the package would set up logging for everyone
    try:
        package = importlib.import_module("wordllama")
    finally:
        logging.root.removeHandler(quiet)
    # the wheel holds vectors and tokenizer, but looks for the latter in another folder and then in the network
    model = package.WordLlama.load(cache_dir=Path(str(package.__file__)).parent, disable_download=True)

    def embed(texts: list[str]) -> np.ndarray:
        return np.asarray(model.embed(texts))

    return embed
