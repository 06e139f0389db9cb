"""Dictionary lookup: definitions in memory, window after window, and then questions about them.

For models that were trained on the form in `longfocus.data.dictionary` (token ids, no text); others can be asked too, and
a pretrained model that repeats sequences finds some of it. Sizes are tokens of memory:

    longfocus eval dictionary --model runs/dictionary/model --retrieval exact --k 32 --lengths 256,1k,16k,1M,16M

A focused model reads each block of definitions by itself (no definition needs another, reading costs the same per token in
a large memory, and in training a block of definitions is a document's first window), whatever `read_span` says; then the
questions are its local window. One dictionary grows from size to size. A plain model has all of it in its window, as
far as its positions go.

The questions are given with their answers and each value token is predicted from what stands before it; all of them are
the likeliest tokens exactly where greedy generation would have given the value.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, model_validator

from longfocus.data.dictionary import Dictionary, DictionaryFormat
from longfocus.errors import EvaluationError, UnsuitableError
from longfocus.memory.memory import Memory
from longfocus.model.reading import read_ids
from longfocus.settings import Size, Sizes
from longfocus.subjects.contract import Completes, HoldsMemory, PredictsTokens
from longfocus.tasks.contract import Measure, Point, Sample, Task, TaskOptions, Values
from longfocus.tasks.texts import Texts

ORDINARY_VOCABULARY = 1024
"""A model with more ids than these was not made for this task alone."""
FIRST_ORDINARY_ID = 1000
"""In an ordinary vocabulary, past the special tokens and single bytes that come first."""


class DictionaryOptions(TaskOptions):
    """Options of `dictionary`."""

    lengths: Sizes = [256, 1024, 4096, 16384, 65536, 1 << 18, 1 << 20]
    """Tokens of definitions, whole windows of them."""
    samples: Annotated[int, Field(ge=1)] = 200
    """Questions a length."""
    symbols: Annotated[int, Field(ge=2)] = 60
    """Ids that keys and values are made of; four special ones follow them."""
    first_id: Annotated[int, Field(ge=0)] | None = None
    """The first of them. None: 0 in a vocabulary of at most 1,024 ids, else 1,000."""
    key_tokens: Annotated[int, Field(ge=1)] = 4
    """Symbols of a key."""
    value_tokens: Annotated[int, Field(ge=1)] = 4
    """Symbols of a value."""
    window: Size = 256
    """Tokens of a block of definitions or questions; at most the model's window."""

    @model_validator(mode="after")
    def _possible(self) -> DictionaryOptions:
        self.form(self.first_id or 0)
        return self

    def form(self, first_id: int) -> DictionaryFormat:
        """How records are written, from an id on."""
        return DictionaryFormat(self.symbols, self.key_tokens, self.value_tokens, first_id, self.window)


class DictionaryLookup(Task):
    """Key-value lookup in token ids, for models trained for it; right when all value tokens are.

    The paper's figure: a 37M model, k = 32, about 99% at 256 tokens, 97% at 16k, 94% at 1M, above 92% at 16M; the plain
    transformer near 0 from 16k on. Chance is the value of any definition: one of so many.
    """

    name, title = "dictionary", "Dictionary lookup"
    paper = "Focused Transformer, arXiv 2307.03170, appendix F, figure 10"
    axes = ("tokens",)
    measures = (
        Measure("right", "share", "higher"),
        Measure("right tokens", "share", "higher"),
    )
    needs = "losses"
    Options = DictionaryOptions
    quick = {"lengths": [256, 4096], "samples": 50}

    def __init__(self, options: DictionaryOptions, texts: Texts) -> None:
        super().__init__(options, texts)
        self._held: tuple[Any, dict[int, Memory]] = None, {}

    def points(self, subject: Completes) -> Sequence[Point]:
        """Each length, in whole windows.

        Raises:
            UnsuitableError: the model has too few ids, or its window is too short.
        """
        options, form = self.options, self._form(subject)
        vocabulary = _vocabulary(subject)
        if vocabulary < form.vocabulary:
            raise UnsuitableError(
                f"{subject.name} has {vocabulary:,} ids; dictionary.symbols={form.symbols} from {form.first_id} on and four "
                f"more need {form.vocabulary:,}. Give fewer symbols or another first_id."
            )
        if isinstance(subject, HoldsMemory):
            config = subject.model.focus.config
            if form.window > config.window_tokens or not config.layers:
                what = f"a window of {config.window_tokens} tokens and {len(config.layers)} memory layers"
                raise UnsuitableError(
                    f"{subject.name} has {what}; blocks of {form.window} tokens are read by at least one memory layer. Give a "
                    "longer --window or a smaller dictionary.window."
                )
        found = []
        for windows in dict.fromkeys(max(1, tokens // form.window) for tokens in options.lengths):
            tokens, definitions = windows * form.window, windows * form.records
            refused = None
            if definitions > form.keys:
                refused = f"{form.symbols} symbols make {form.keys:,} keys, and {definitions:,} are defined."
            found.append(Point({"tokens": tokens}, options.samples, tokens + form.window, refused))
        return found

    def _form(self, subject: Completes) -> DictionaryFormat:
        options: DictionaryOptions = self.options
        first = options.first_id
        if first is None:
            first = 0 if _vocabulary(subject) <= ORDINARY_VOCABULARY else FIRST_ORDINARY_ID
        return options.form(first)

    def samples(self, subject: PredictsTokens, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        """A question each, a window of them at a time; no definition is asked for twice at a point."""
        form = self._form(subject)
        windows = int(point.values["tokens"]) // form.window
        for number, asked in self._questions(point, windows * form.records, form.records):
            names = [f"{number}.{definition}" for definition in asked]
            if done.issuperset(names):
                continue
            dictionary = Dictionary(form, f"{self.options.seed} {number}")
            hits = self._hits(subject, dictionary, number, windows, asked)
            for name, definition, hit in zip(names, asked, hits, strict=True):
                if name not in done:
                    scores = {"right": float(hit.all()), "right tokens": float(hit.mean())}
                    details = {"dictionary": number, "definition": definition, "hit": [int(token) for token in hit]}
                    yield Sample(name, point.values, scores, 1.0, details)

    def _questions(self, point: Point, definitions: int, at_once: int) -> Iterator[tuple[int, list[int]]]:
        """(number of the dictionary, definitions asked for), a window of questions at a time.

        All are of dictionary 0 where it has enough definitions, else of as many dictionaries as are needed.
        """
        left, number = point.samples, 0
        while left:
            count = min(left, definitions)
            rng = random.Random(f"{self.options.seed} {point.values['tokens']} {number} questions")
            asked = rng.sample(range(definitions), count)
            for start in range(0, count, at_once):
                yield number, asked[start : start + at_once]
            left, number = left - count, number + 1

    @torch.no_grad()
    def _hits(
        self, subject: PredictsTokens, dictionary: Dictionary, number: int, windows: int, asked: list[int]
    ) -> np.ndarray:
        """bool (questions, value_tokens): the token is the likeliest after what stands before it."""
        form = dictionary.form
        questions = dictionary.questions(asked)
        if isinstance(subject, HoldsMemory):
            memory = self._memory(subject, dictionary, number, windows)
            given = torch.from_numpy(questions).unsqueeze(0).to(subject.model.focus.device)
            logits = subject.model(given, memory=memory, use_cache=False).logits[0, :-1]
            hit = logits.argmax(-1).cpu().numpy() == questions[1:]
        else:
            defined = np.concatenate([dictionary.window(window) for window in range(windows)])
            ids = np.concatenate((defined, questions)).tolist()
            told = next(iter(subject.block_losses(ids, [len(defined)], len(questions), [len(defined)])))
            if told.hit is None:
                raise EvaluationError(f"{subject.name} gives losses but not which token is the likeliest.")
            hit = told.hit
        return hit[form.answers(questions)[1:]].reshape(len(asked), form.value_tokens)

    def _memory(self, subject: HoldsMemory, dictionary: Dictionary, number: int, windows: int) -> Memory:
        """A memory of so many blocks of definitions. That of dictionary 0 grows from point to point."""
        if self._held[0] is not subject:
            self._held = subject, {}
        held = self._held[1]
        for other in [other for other in held if other not in (0, number)]:
            del held[other]
        if number not in held or held[number].tokens > windows * dictionary.form.window:
            held[number] = Memory(subject.model)
        remember(subject.model, held[number], dictionary, windows)
        return held[number]

    def chance(self, values: Values) -> dict[str, float]:
        """The value of any definition, without looking at the key."""
        form: DictionaryFormat = self.options.form(0)
        any_one = 1 / (int(values["tokens"]) // form.window * form.records)
        by_luck = 1 / form.symbols
        return {
            "right": any_one + (1 - any_one) * by_luck**form.value_tokens,
            "right tokens": any_one + (1 - any_one) * by_luck,
        }


def remember(model: Any, memory: Memory, dictionary: Dictionary, windows: int) -> None:
    """Read blocks of definitions, each by itself, until a memory (in RAM or in a folder) holds so many.

    Args:
        model: attached; its window takes a block.
        memory: empty, or left by an earlier call with the same dictionary; it goes on where that stopped.
        windows: blocks in the end.
    """
    for window in range(memory.tokens // dictionary.form.window, windows):
        read_ids(model, torch.from_numpy(dictionary.window(window)), memory, name=f"definitions {window}")


def _vocabulary(subject: Any) -> int:
    """Ids of a model; where it is not at hand, of its tokenizer."""
    model = getattr(subject, "model", None)
    return int(model.config.get_text_config().vocab_size) if model is not None else len(subject.tokenizer)
