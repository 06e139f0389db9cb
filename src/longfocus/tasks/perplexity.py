"""Perplexity against context: the same tokens of held-out texts, predicted with more and more of what stands before.

Blocks of a few hundred tokens are drawn from documents, all beyond the longest context, so that every context is full.
In each setting a block meets:

    single    the `context` tokens before it, all of its own document: memory that is cleared at each document
    multi     the last `own` tokens of its document, and before them stretches of as many tokens from other documents of
              the set: memory that is kept across documents (FoT, section 5.3); each of context / own documents has left as much

Context 0 is the window alone. A focused model meets a context as memory, a plain one directly; what the models see locally is
the block. A document is read once for all its blocks and contexts (`subjects.contract.PredictsTokens`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from longfocus.settings import Size, Sizes
from longfocus.subjects.contract import Completes, PredictsTokens
from longfocus.tasks.contract import Measure, Point, Row, Sample, Task, TaskOptions, Values
from longfocus.tasks.statistics import Estimate, exp_of, mean_by_group, percent_change_of
from longfocus.tasks.texts import HELD_OUT, Texts
from longfocus.tasks.token_documents import TokenDocument, TokenDocuments, draw_evenly

PERPLEXITY = "perplexity"
LOSS = "loss"
"""Nats a token: takes the place of perplexity by position, where first tokens are a thousand times harder than later ones."""
FROM_WINDOW = "change from the window alone, %"
FROM_OWN = "change from its own text alone, %"
_LEAST_DOCUMENTS = 2
"""A context that fewer documents of a set are longer than is not measured on that set (unless it has only one)."""


class PerplexityOptions(TaskOptions):
    """Options of `perplexity`."""

    lengths: Sizes = [2048, 8192, 16384, 32768, 65536]
    """Tokens of context before the predicted block; 0 (the window alone) is always measured too."""
    texts: Annotated[list[str], Field(min_length=1)] = list(HELD_OUT)
    """Sets of held-out documents, or names of texts of one's own (`--text NAME=PATH`)."""
    settings: Annotated[list[Literal["single", "multi"]], Field(min_length=1)] = ["single", "multi"]
    """`single`: context from the block's own document. `multi`: all but its last `own` tokens from other documents."""
    tokens: Size = 1 << 20
    """Tokens that are predicted at each point; fewer where the texts hold fewer blocks, as the table says."""
    block: Annotated[Size, Field(ge=2)] = 256
    """Tokens of a block; all but its first are predicted. At most the window of a focused model."""
    stride: Size = 2048
    """Blocks begin at multiples of it; a multiple of the models' windows, so that all models predict the same tokens. A smaller
    one gives more tokens, at more cost."""
    own: Size = 2048
    """In `multi`: tokens of the block's own document, and of each other one; a multiple of the models' windows."""
    documents: Annotated[int, Field(ge=1)] | None = None
    """Most documents of a set; all unless given."""
    up_to: Size | None = None
    """Tokens of each document that are used, from its beginning; all unless given. Reading is most of the work."""
    by_position: bool = False
    """Loss by place inside the block, in bins that begin at 1, 2, 4, 8, … tokens, instead of perplexity over all of it."""
    by_document: bool = True
    """Intervals over documents, which speak of other documents like these; else over blocks, which speak of other blocks of
    these documents. Over blocks anyway where there is one document."""

    @model_validator(mode="after")
    def _blocks_lie_apart(self) -> PerplexityOptions:
        if self.block > self.stride:
            raise ValueError(
                f"block: {self.block} given, expected at most the stride of {self.stride}, so that blocks lie apart"
            )
        return self


@dataclass(frozen=True)
class _Plan:
    """What is predicted on one set."""

    documents: Sequence[TokenDocument]
    blocks: dict[int, list[int]]
    """Document -> where its blocks start, ascending."""
    contexts: dict[str, list[int]]
    """Setting -> contexts, ascending, 0 first."""
    refused: dict[tuple[str, int], str]
    """(setting, context) -> why the set does not allow it."""

    @property
    def count(self) -> int:
        """Blocks."""
        return sum(map(len, self.blocks.values()))


class Perplexity(Task):
    """Perplexity of the same held-out tokens after 0, 2k, 8k, … tokens of context; of one document or of many.

    95% intervals are over documents unless `by_document` is false (blocks of one document are alike), and never narrower
    than over blocks. The changes are paired, block by block, and so far surer than the perplexities.
    """

    name, title = "perplexity", "Perplexity against context"
    paper = "Focused Transformer, arXiv 2307.03170, sections 5.3 and 5.4, appendix J"
    measures: tuple[Measure, ...] = (
        Measure(PERPLEXITY, "number", "lower"),
        Measure(FROM_WINDOW, "number", "lower"),
        Measure(FROM_OWN, "number", "lower"),
    )
    needs = "losses"
    Options = PerplexityOptions
    quick = {
        "lengths": [1024, 4096],
        "own": 1024,
        "texts": ["books", "code"],
        "documents": 3,
        "up_to": 6400,
        "by_document": False,
    }

    def __init__(self, options: PerplexityOptions, texts: Texts) -> None:
        super().__init__(options, texts)
        self.axes = ("position",) * options.by_position + ("context", "setting", "text")
        if options.by_position:
            self.measures = (Measure(LOSS, "number", "lower", "nats a token"), *self.measures[1:])
        self._tokenised: TokenDocuments | None = None
        self._plans: dict[str, _Plan] = {}

    # -- what is predicted -------------------------------------------------------------------------------

    def points(self, subject: Completes) -> Sequence[Point]:
        """One for each set and setting, with all contexts; those that the model or the set cannot take stand alone.

        Raises:
            InputError: a set is missing, or the tokenizer is no fast one.
        """
        options: PerplexityOptions = self.options
        found = []
        for part in options.texts:
            plan = self._plan(subject, part)
            for setting in options.settings:
                values: Values = {"setting": setting, "text": part}
                contexts = self._taken(subject, plan, setting)
                if contexts:
                    found.append(Point(values, plan.count * len(contexts)))
                for context in plan.contexts[setting]:
                    if context not in contexts:
                        found.append(Point({"context": context, **values}, 0, context + options.block))
                for (where, context), why in plan.refused.items():
                    if where == setting:
                        found.append(Point({"context": context, **values}, 0, refused=why))
        return found

    def _taken(self, subject: Completes, plan: _Plan, setting: str) -> list[int]:
        """Contexts of a plan that the model can take."""
        longest = subject.longest
        return [c for c in plan.contexts[setting] if longest is None or c + self.options.block <= longest]

    def _plan(self, subject: Completes, part: str) -> _Plan:
        if self._tokenised is None or self._tokenised.tokenizer is not subject.tokenizer:
            self._tokenised = TokenDocuments(subject.tokenizer, self.texts, self.options.up_to)
            self._plans = {}
        if part not in self._plans:
            self._plans[part] = self._planned(part, self._tokenised.of(part))
        return self._plans[part]

    def _planned(self, part: str, documents: Sequence[TokenDocument]) -> _Plan:
        options: PerplexityOptions = self.options
        single, multi = "single" in options.settings, "multi" in options.settings
        contexts: dict[str, list[int]] = {setting: [] for setting in options.settings}
        refused: dict[tuple[str, int], str] = {}
        least = min(_LEAST_DOCUMENTS, len(documents))
        full = [c for c in options.lengths if sum(1 for d in documents if self._starts(d, c)) >= least]
        if single:
            contexts["single"] = [0, *full]
            longest = max(map(len, documents))
            for context in sorted(set(options.lengths) - set(full)):
                refused["single", context] = (
                    f"fewer than {least} documents of {part} hold a block after {context:,} tokens; the longest has {longest:,}."
                )
        reach = max([0, *(full if single else []), *([options.own] if multi else [])])
        places = {number: self._starts(document, reach) for number, document in enumerate(documents)}
        rng = random.Random(f"{options.seed} {part}")
        usable = [number for number, starts in places.items() if starts]
        if options.documents is not None and options.documents < len(usable):
            usable = sorted(rng.sample(usable, options.documents))
        wanted = -(-options.tokens // (options.block - 1))
        blocks: dict[int, list[int]] = {}
        for number, start in draw_evenly({number: places[number] for number in usable}, wanted, rng):
            blocks.setdefault(number, []).append(start)
        blocks = {number: sorted(blocks[number]) for number in sorted(blocks)}
        if multi:
            others = min((len(self._stretches(documents, number)) for number in blocks), default=0)
            held = (1 + others) * options.own if others else 0
            for context in options.lengths:
                if context > held:
                    refused["multi", context] = f"the other documents of {part} hold {others * options.own:,} tokens."
            contexts["multi"] = sorted({0, options.own, *(c for c in options.lengths if c <= held)}) if others else []
        if not blocks:
            for setting in options.settings:
                contexts[setting] = []
                for context in options.lengths:
                    refused[setting, context] = f"no document of {part} holds a block after {reach:,} tokens."
        return _Plan(documents, blocks, contexts, refused)

    def _starts(self, document: TokenDocument, reach: int) -> range:
        """Where blocks may start that have `reach` tokens before them."""
        stride = self.options.stride
        return range(-(-reach // stride) * stride, len(document) - self.options.block + 1, stride)

    def _stretches(self, documents: Sequence[TokenDocument], number: int) -> dict[tuple[int, int], None]:
        """(document, start) of what other documents can leave in memory."""
        own = self.options.own
        return {
            (other, start): None
            for other, document in enumerate(documents)
            if other != number
            for start in range(0, len(document) - own + 1, own)
        }

    def _front(self, part: str, plan: _Plan, number: int, context: int) -> list[list[int]]:
        """What lies in memory before a document so that `context` tokens are full: stretches of the others in turn."""
        own = self.options.own
        places: dict[int, list[int]] = {}
        for other, start in self._stretches(plan.documents, number):
            places.setdefault(other, []).append(start)
        rng = random.Random(f"{self.options.seed} {part} {plan.documents[number].name} others")
        order = rng.sample(list(places), len(places))
        drawn = draw_evenly({other: places[other] for other in order}, max(0, -(-context // own) - 1), rng)
        # the first that were drawn lie nearest to the block, whatever the longest context is
        return [list(plan.documents[other].ids[start : start + own]) for other, start in reversed(drawn)]

    # -- measuring ---------------------------------------------------------------------------------------

    def samples(self, subject: PredictsTokens, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        """One for each block and context, document by document; a block's contexts follow one another."""
        part, setting = str(point.values["text"]), str(point.values["setting"])
        plan = self._plan(subject, part)
        contexts = self._taken(subject, plan, setting)
        for number, starts in plan.blocks.items():
            document = plan.documents[number]
            missing = [s for s in starts if any(_id(document, s, c) not in done for c in contexts)]
            if not missing:
                continue
            for start, context, nll in self._losses(subject, part, plan, setting, number, missing, contexts):
                if _id(document, start, context) not in done:
                    yield self._sample(point, document, start, context, nll)

    def _losses(
        self,
        subject: PredictsTokens,
        part: str,
        plan: _Plan,
        setting: str,
        number: int,
        starts: Sequence[int],
        contexts: Sequence[int],
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        ids, block, own = plan.documents[number].ids, self.options.block, self.options.own
        if setting == "single":
            for found in subject.block_losses(ids, starts, block, contexts):
                yield found.start, found.context, found.nll
            return
        before = self._front(part, plan, number, contexts[-1])
        for start in starts:
            piece = ids[start - own : start + block]
            for found in subject.block_losses(piece, [own], block, contexts, before):
                yield start, found.context, found.nll

    def _sample(self, point: Point, document: TokenDocument, start: int, context: int, nll: np.ndarray) -> Sample:
        tokens = self.options.block - 1
        assert nll.shape == (tokens,)
        total = float(nll.sum())
        details = {
            "document": document.name,
            "start": start,
            "tokens": tokens,
            "bytes": int(document.byte_at[start + tokens + 1] - document.byte_at[start + 1]),
            "nll": round(total, 6),
            "nll_by_position": [round(float(nll[low - 1 : high - 1].sum()), 6) for low, high in self._bins()],
        }
        values = {"context": context, **point.values}
        scores = {PERPLEXITY: _exp(total / tokens)}
        return Sample(_id(document, start, context), values, scores, float(tokens), details)

    def _bins(self) -> list[tuple[int, int]]:
        """First position of each bin in the block and the one after its last: 1, 2 to 3, 4 to 7, …"""
        block = self.options.block
        return [(1 << power, min(2 << power, block)) for power in range((block - 1).bit_length())]

    # -- summing up --------------------------------------------------------------------------------------

    def rows(self, samples: Sequence[Sample]) -> list[Row]:
        """One for each context of each point; with `by_position` one for each of its bins."""
        groups: dict[tuple[Any, ...], list[Sample]] = {}
        for sample in samples:
            at = sample.values
            groups.setdefault((at["text"], at["setting"], at["context"]), []).append(sample)
        bins = self._bins() if self.options.by_position else [None]
        rows = []
        for (text, setting, context), group in groups.items():
            bases = {FROM_WINDOW: groups.get((text, setting, 0), []) if context else []}
            if setting == "multi" and context > self.options.own:
                bases[FROM_OWN] = groups.get((text, setting, self.options.own), [])
            for number, one in enumerate(bins):
                place = None if one is None else number
                weights = self.options.block - 1 if one is None else one[1] - one[0]
                values: Values = {"context": context, "setting": setting, "text": text}
                if one is not None:
                    values = {"position": one[0], **values}
                rows.append(self._row(values, group, bases, place, float(weights)))
        return rows

    def _row(
        self, values: Values, group: Sequence[Sample], bases: dict[str, list[Sample]], place: int | None, weight: float
    ) -> Row:
        """Sums over blocks, of all positions or of one bin, and over documents."""
        by_document = self.options.by_document and len({s.details["document"] for s in group}) > 1

        def mean(losses: Sequence[float], of: Sequence[Sample]) -> Estimate:
            groups = [sample.details["document"] if by_document else sample.id for sample in of]
            return mean_by_group([loss / weight for loss in losses], [weight] * len(of), groups)

        loss = mean([_nll(sample, place) for sample in group], group)
        estimates = {PERPLEXITY: exp_of(loss)} if place is None else {LOSS: loss}
        for name, base in bases.items():
            known = {_block(sample): _nll(sample, place) for sample in base}
            pairs = [s for s in group if _block(s) in known]
            if pairs:
                changes = [_nll(sample, place) - known[_block(sample)] for sample in pairs]
                estimates[name] = percent_change_of(mean(changes, pairs))
        groups = len({sample.details["document"] if by_document else sample.id for sample in group})
        over = f"{groups} documents" if by_document else f"{groups} block{'s' * (groups != 1)}"
        notes: dict[str, Any] = {"interval over": over, "tokens": round(weight * len(group))}
        if place is None:
            bits = math.fsum(_nll(sample, None) for sample in group) / math.log(2)
            notes["bits per byte"] = round(bits / max(1, sum(s.details["bytes"] for s in group)), 4)
        return Row(values, len(group), estimates, {}, notes)


def _id(document: TokenDocument, start: int, context: int) -> str:
    return f"{document.name} @{start} +{context}"


def _block(sample: Sample) -> tuple[str, int]:
    return sample.details["document"], sample.details["start"]


def _nll(sample: Sample, place: int | None) -> float:
    """Summed loss of a block, or of a bin of its positions; nan where the model gave none."""
    found = sample.details["nll"] if place is None else sample.details["nll_by_position"][place]
    return math.nan if found is None else float(found)


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)
