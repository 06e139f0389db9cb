"""Distraction: how much of its attention a model keeps on its own document when others lie in memory beside it.

Windows of held-out documents are read, each by itself, into a memory. Then a window meets the one before it (the positive) and
d - 1 windows of other documents, and for each memory layer and head r_d is measured, the positive's share of the attention
that all d receive together (`analysis.attention_mass`). A model that cannot tell documents apart has 1 / d. The same passes
give the perplexity of the same tokens while more and more of the memory is foreign.

Any checkpoint can be measured: `--memory-layers` says in which layers, whether they were trained for it or not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any

from pydantic import Field

from longfocus.analysis.attention_mass import Found, ReadWindows, positive_mass
from longfocus.settings import Size, Sizes
from longfocus.subjects.contract import Completes, HoldsMemory
from longfocus.tasks.contract import Measure, Point, Row, Sample, Task, TaskOptions, Values
from longfocus.tasks.statistics import Estimate, exp_of, mean_by_group, percent_change_of, within
from longfocus.tasks.texts import HELD_OUT, Texts
from longfocus.tasks.token_documents import TokenDocument, TokenDocuments, draw_evenly

MASS = "positive attention mass"
REST = "positive attention mass without first tokens"
PERPLEXITY = "perplexity"
CHANGE = "change from one document, %"
ALL = "all"
"""In the place of a layer or head: the mean of all."""


class DistractionOptions(TaskOptions):
    """Options of `distraction`."""

    documents: Sizes = [1, 2, 4, 8, 16, 32, 64]
    """d: how many documents have a window in memory, the own one among them."""
    texts: Annotated[list[str], Field(min_length=1)] = list(HELD_OUT)
    """Sets of held-out documents, or names of texts of one's own (`--text NAME=PATH`). A set with fewer than d documents
    gives several windows of each, but never one of the own document as another's."""
    samples: Annotated[int, Field(ge=1)] = 64
    """Windows of each set that are measured, spread over its documents."""
    tokens: Size | None = None
    """Tokens of each document in memory; the model's window unless given."""
    up_to: Size | None = None
    """Tokens of each document that windows are drawn from, from its beginning; all unless given."""
    by_layer: bool = True
    """A row for each memory layer, beside their mean."""
    by_head: bool = False
    """A row for each head too."""
    by_document: bool = True
    """Intervals over documents, which speak of other documents like these; else over windows, which speak of other windows of
    these documents. Over windows anyway where there is one document."""


@dataclass(frozen=True)
class _Place:
    """A window and the piece before it."""

    document: int
    start: int
    """First token of the window."""


@dataclass(frozen=True)
class _Plan:
    """What is measured on one set."""

    documents: Sequence[TokenDocument]
    pool: Sequence[_Place]
    """Places whose pieces lie in memory."""
    queries: int
    """How many of them, from the first on, are measured."""
    most: int
    """Largest d that the set allows; 0 where it holds no window with a piece before it."""

    def negatives(self, query: int) -> list[int]:
        """Places of other documents, in the order in which they come into memory: documents in turn."""
        own = self.pool[query].document
        left: dict[int, list[int]] = {}
        for number in (*range(query + 1, len(self.pool)), *range(query)):
            if self.pool[number].document != own:
                left.setdefault(self.pool[number].document, []).append(number)
        rounds = zip_longest(*left.values())
        return [number for one in rounds for number in one if number is not None]


class Distraction(Task):
    """Share of the attention on memory that stays on the own document among d, per layer and head, beside 1 / d.

    95% intervals are over documents unless `by_document` is false, and never narrower than over windows.
    """

    name, title = "distraction", "Distraction by other documents"
    paper = "Focused Transformer, arXiv 2307.03170, sections 3.3 and 5.3, figures 3 and 8"
    measures = (
        Measure(MASS, "share", "higher"),
        Measure(REST, "share", "higher"),
        Measure(PERPLEXITY, "number", "lower"),
        Measure(CHANGE, "number", "lower"),
    )
    needs = "memory"
    Options = DistractionOptions
    quick = {"documents": [1, 4, 16], "texts": ["books", "code"], "samples": 8}

    def __init__(self, options: DistractionOptions, texts: Texts) -> None:
        super().__init__(options, texts)
        layers = options.by_layer or options.by_head
        self.axes = ("documents",) + ("head",) * options.by_head + ("layer",) * layers + ("text",)
        self._tokenised: TokenDocuments | None = None
        self._plans: dict[tuple[str, int], _Plan] = {}

    # -- what is measured --------------------------------------------------------------------------------

    def points(self, subject: Completes) -> Sequence[Point]:
        """One for each set, with all d; those that the set does not allow stand alone.

        Raises:
            InputError: a set is missing, or the tokenizer is no fast one.
        """
        options: DistractionOptions = self.options
        found = []
        for part in options.texts:
            plan = self._plan(subject, part)
            counts = self._counts(plan)
            if counts:
                found.append(Point({"text": part}, plan.queries * len(counts)))
            for d in options.documents:
                if d not in counts:
                    why = f"{part} gives each window at most {plan.most - 1:,} windows of other documents."
                    if not plan.most:
                        why = f"no document of {part} holds a window and as much before it."
                    found.append(Point({"documents": d, "text": part}, 0, refused=why))
        return found

    def _counts(self, plan: _Plan) -> list[int]:
        """The d that a set allows; 1 always among them, since changes are against it."""
        return sorted({1, *(d for d in self.options.documents if d <= plan.most)}) if plan.most else []

    def _sizes(self, subject: Any) -> tuple[int, int]:
        """Tokens of a window, and of a piece of a document in memory."""
        window = int(subject.model.focus.config.window_tokens)
        return window, self.options.tokens or window

    def _plan(self, subject: Any, part: str) -> _Plan:
        window, piece = self._sizes(subject)
        if self._tokenised is None or self._tokenised.tokenizer is not subject.tokenizer:
            self._tokenised = TokenDocuments(subject.tokenizer, self.texts, self.options.up_to)
            self._plans = {}
        if (part, window) not in self._plans:
            self._plans[part, window] = self._planned(part, self._tokenised.of(part), window, piece)
        return self._plans[part, window]

    def _planned(self, part: str, documents: Sequence[TokenDocument], window: int, piece: int) -> _Plan:
        options: DistractionOptions = self.options
        places = {number: range(piece, len(document) - window + 1, piece) for number, document in enumerate(documents)}
        rng = random.Random(f"{options.seed} {part}")
        drawn = [_Place(*place) for place in draw_evenly(places, sum(map(len, places.values())), rng)]
        queries = min(options.samples, len(drawn))
        asked = {place.document for place in drawn[:queries]}
        held = dict.fromkeys(range(len(documents)), 0)
        size = 0
        for place in drawn:  # until every window has enough pieces of other documents
            if size >= queries and all(size - held[own] >= options.documents[-1] - 1 for own in asked):
                break
            held[place.document] += 1
            size += 1
        others = min((size - held[own] for own in asked), default=-1)
        return _Plan(documents, drawn[:size], queries, 1 + others)

    # -- measuring ---------------------------------------------------------------------------------------

    def samples(self, subject: HoldsMemory, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        """One for each window and d; the windows of all documents are read before the first."""
        plan = self._plan(subject, str(point.values["text"]))
        window, piece = self._sizes(subject)
        missing = [
            (query, d)
            for query in range(plan.queries)
            for d in self._counts(plan)
            if _id(plan, plan.pool[query], d) not in done
        ]
        if not missing:
            return
        read = ReadWindows(subject.model)
        for place in plan.pool:  # always all of them: the same numbers to the last bit, whatever was done before
            read.add(plan.documents[place.document].ids[place.start - piece : place.start])
        for query, d in missing:
            place = plan.pool[query]
            ids = plan.documents[place.document].ids[place.start : place.start + window]
            found = positive_mass(subject.model, ids, read, query, plan.negatives(query)[: d - 1])
            yield self._sample(point, plan, place, d, found)

    def _sample(self, point: Point, plan: _Plan, place: _Place, d: int, found: Found) -> Sample:
        mass, rest = _rounded(found.positive), _rounded(found.positive_rest)
        details = {
            "document": plan.documents[place.document].name,
            "start": place.start,
            "tokens": found.tokens,
            "nll": round(found.nll, 6),
            "mass": mass,
            "mass_without_first_tokens": rest,
            "on_memory": _rounded(found.additional),
        }
        scores = {MASS: _mean(mass, ALL, ALL), PERPLEXITY: math.exp(min(700.0, found.nll / found.tokens))}
        if rest:
            scores[REST] = _mean(rest, ALL, ALL)
        return Sample(_id(plan, place, d), {"documents": d, **point.values}, scores, 1.0, details)

    # -- summing up --------------------------------------------------------------------------------------

    def rows(self, samples: Sequence[Sample]) -> list[Row]:
        """For each set and d the mean of all layers and heads, with the perplexity; then layers, then heads, as asked."""
        groups: dict[tuple[str, int], list[Sample]] = {}
        for sample in samples:
            groups.setdefault((str(sample.values["text"]), int(sample.values["documents"])), []).append(sample)
        rows = []
        for (text, d), group in groups.items():
            one = {_window(sample): sample for sample in groups.get((text, 1), [])}
            for layer, head in self._parts(group[0]):
                names = ("all heads" if head == ALL else head, "all layers" if layer == ALL else layer)
                every: Values = {"documents": d, "head": names[0], "layer": names[1], "text": text}
                rows.append(self._row({axis: every[axis] for axis in self.axes}, group, layer, head, one))
        return rows

    def _parts(self, sample: Sample) -> list[tuple[str | int, str | int]]:
        """(layer, head) of the rows of a group."""
        parts: list[tuple[str | int, str | int]] = [(ALL, ALL)]
        if "layer" in self.axes:
            parts += [(int(layer), ALL) for layer in sample.details["mass"]]
        if "head" in self.axes:
            parts += [(int(layer), n) for layer, heads in sample.details["mass"].items() for n in range(len(heads))]
        return parts

    def _row(
        self,
        values: Values,
        group: Sequence[Sample],
        layer: str | int,
        head: str | int,
        one: dict[tuple[str, int], Sample],
    ) -> Row:
        by_document = self.options.by_document and len({s.details["document"] for s in group}) > 1

        def mean(of: Callable[[Sample], float], taken: Sequence[Sample] = group) -> Estimate:
            return mean_by_group(
                [of(sample) for sample in taken],
                [float(sample.details["tokens"]) for sample in taken],
                [sample.details["document"] if by_document else sample.id for sample in taken],
            )

        def mean_share(key: str, head: str | int = head) -> Estimate:
            known = [s for s in group if math.isfinite(_mean(s.details[key], layer, head))]
            return within(mean(lambda sample: _mean(sample.details[key], layer, head), known), 0.0, 1.0)

        d = int(values["documents"])
        estimates = {MASS: mean_share("mass")}
        if group[0].details["mass_without_first_tokens"]:
            estimates[REST] = mean_share("mass_without_first_tokens")
        groups = len({sample.details["document"] if by_document else sample.id for sample in group})
        over = f"{groups} {'document' if by_document else 'window'}{'s' * (groups != 1)}"
        notes: dict[str, Any] = {"interval over": over}
        notes |= {"attention on memory, %": round(100 * mean_share("on_memory").value, 2)}
        if layer == ALL:
            estimates[PERPLEXITY] = exp_of(mean(_loss))
            pairs = [sample for sample in group if _window(sample) in one]
            if d > 1 and pairs:
                estimates[CHANGE] = percent_change_of(mean(lambda s: _loss(s) - _loss(one[_window(s)]), pairs))
        elif head == ALL:
            heads = range(len(group[0].details["mass"][str(layer)]))
            notes["by head, %"] = " ".join(f"{100 * mean_share('mass', number).value:.3g}" for number in heads)
        return Row(values, len(group), estimates, {MASS: 1 / d, REST: 1 / d}, notes)


def _id(plan: _Plan, place: _Place, d: int) -> str:
    return f"{plan.documents[place.document].name} @{place.start} d={d}"


def _window(sample: Sample) -> tuple[str, int]:
    return sample.details["document"], sample.details["start"]


def _loss(sample: Sample) -> float:
    """Nats a token; nan where the model gave no number."""
    nll = sample.details["nll"]
    return math.nan if nll is None else float(nll) / float(sample.details["tokens"])


def _rounded(by_layer: Mapping[int, Sequence[float]]) -> dict[str, list[float]]:
    return {str(layer): [round(share, 7) for share in heads] for layer, heads in by_layer.items()}


def _mean(by_layer: Mapping[str, Sequence[float | None]], layer: str | int, head: str | int) -> float:
    """Of all layers or one, all heads or one; heads that saw nothing are left out, nan where all did."""
    chosen = by_layer.values() if layer == ALL else [by_layer[str(layer)]]
    shares = [share for heads in chosen for share in (heads if head == ALL else [heads[int(head)]])]
    known = [share for share in shares if share is not None and not math.isnan(share)]
    return math.fsum(known) / len(known) if known else math.nan
