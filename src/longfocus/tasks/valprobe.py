"""VaL Probing: a list of short pieces fills the context, and a question names one of them by a part of it.

    document   8 words of a sentence are given, the whole sentence is asked: it stands on both sides of them
    code       a line of code is given, the name of its function is asked: it stands before the line
    database   an identifier is given, label and description are asked: they stand after it

**Contexts.** Pieces of one kind, drawn without replacement, as many as fit the length together with the longest question. A
context is called a set, as FILM does (4 sets of 800, 800 and 750 pieces). Its places are cut into as many spans as
`positions` says, and in each span random places are asked. A place whose keyword occurs more than once in the context, as
a substring, is ambiguous and is not asked (FILM skips such prompts). All questions about a set stand side by
side behind the same context, so that a model that shares reading reads it once.

**Scores**, as FILM's plot.py has them. Document: the share of the sentence's distinct lower-cased white-space words that are
words of the answer. Code: 1 where the function's name, without outer full stops, is a substring of the answer. Database: 1
where the label or the description is, lower-cased. One value a span: the mean over sets of the mean within the set. The
rows over all positions give FILM's **Avg**, the mean of these values, as their score, and its **Gap**, the largest value
minus the smallest. plot.py as it is leaves out the last place of each span (it takes 49 of 50); `leave_out_last` does the same.

**Decided here.** FILM's repository shows its prompt's frame, not the wording of its questions, so that wording is ours and
ends in the beginning of an answer, which models without chat training continue. An answer ends with its first line that
does not end in a colon, and no more than its first 128 words are looked at (FILM let its models write 128 tokens): whoever
repeats the whole context finds what stands at its beginning and nothing else. A Gap is largest minus smallest and
so is never 0 for a few samples; the table says what it would be if the same scores fell on the positions at random.

**Guessing.** Document: repeating the given words, which are part of the sentence. Code and database: naming another piece of
the context. Its score is worked out for each question.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from longfocus.settings import Sizes, size_name
from longfocus.subjects.contract import Completes, Completion, Prompt
from longfocus.tasks.contract import AnswerTask, Example, Measure, Point, Row, Sample, TaskOptions, Values
from longfocus.tasks.statistics import mean_of, share_of, within
from longfocus.tasks.texts import Texts

Style = Literal["document", "code", "database"]
Piece = Mapping[str, str]

FRAME = (
    "Read the context, then do what the instruction asks.\n\n### Context:\n{context}\n\n### Instruction:\n{question}"
)
_SHUFFLES = 200
_BLOCK = 256
_WORDS = 128
_FIRST_WORDS = re.compile(rf"(?:\s*\S+){{0,{_WORDS}}}")


@dataclass(frozen=True)
class Kind:
    """One style: where its pieces are, how they are written, what names one, how it is asked for."""

    file: str
    written: str
    keyword: str
    asked: str
    right: tuple[str, ...]
    """Fields that are asked for; any of them is enough."""


KINDS: dict[str, Kind] = {
    "document": Kind(
        "valprobe/document_sentences",
        "{sentence}",
        "piece",
        'One sentence of the context contains the words "{piece}". Write out that sentence from its beginning to its '
        "end.\nThe sentence is:",
        ("sentence",),
    ),
    "code": Kind(
        "valprobe/code_functions",
        "def {function_name}(...):\n{function_define}",
        "piece",
        "One function of the context contains the line `{piece}`. Write down the name of that function.\n"
        "The line belongs to: def",
        ("function_name",),
    ),
    "database": Kind(
        "valprobe/database_entities",
        "ID: {id}, label: {label}, description: {dcpt}",
        "id",
        "Write down the label and the description of the entity with the ID {id}.\nID: {id}, label:",
        ("label", "dcpt"),
    ),
}


class ValProbeOptions(TaskOptions):
    """Options of `valprobe`."""

    lengths: Sizes = [4096, 8192, 16384, 32768]
    """Prompt lengths in tokens."""
    styles: Annotated[list[Style], Field(min_length=1)] = ["document", "code", "database"]
    """Look both ways, back, ahead."""
    positions: Annotated[int, Field(ge=2)] = 16
    """Spans of equal size that a context's places are cut into (FILM: 16, 16 and 15)."""
    samples: Annotated[int, Field(ge=1)] = 8
    """Prompts a span, over all sets (FILM: 200)."""
    sets: Annotated[int, Field(ge=1)] = 4
    """Contexts a style and length; no more than `samples`."""
    leave_out_last: bool = False
    """Leave the last place of each span out of all numbers, as FILM's plot.py does."""


@dataclass(frozen=True)
class Context:
    """A set: pieces in their order, and which places are asked."""

    number: int
    style: str
    pieces: tuple[Piece, ...]
    asked: tuple[int, ...]
    """Places, ascending."""

    @property
    def text(self) -> str:
        """As it stands in prompts."""
        return write(self.style, self.pieces)


class ValProbe(AnswerTask):
    """A sentence, a function or an entity among hundreds, named by a part of it; score by place, average and gap."""

    name, title = "valprobe", "VaL Probing"
    paper = "Make Your LLM Fully Utilize the Context (FILM), arXiv 2404.16811, section 3.1"
    axes: tuple[str, ...] = ("position", "style", "tokens")
    measures = (Measure("score", "share", "higher"), Measure("Gap", "share", "lower"))
    log_x = False
    max_new_tokens, stop = _WORDS, r"[^\s:][ \t]*\n"
    Options = ValProbeOptions
    quick = {"lengths": [4096], "positions": 6, "samples": 1, "sets": 1}

    def __init__(self, options: ValProbeOptions, texts: Texts) -> None:
        super().__init__(options, texts)
        self._sets: dict[tuple[str, int], list[Context] | str] = {}

    # -- what is asked -----------------------------------------------------------------------------------

    def points(self, subject: Completes) -> Sequence[Point]:
        """Each style and length; the positions of a set are measured together."""
        found = []
        for style in self.options.styles:
            for tokens in self.options.lengths:
                values: Values = {"style": style, "tokens": tokens}
                sets = self._composed(subject, style, tokens)
                if isinstance(sets, str):
                    found.append(Point(values, 0, refused=sets))
                    continue
                samples = sum(len(context.asked) for context in sets)
                found.append(Point(values, samples, tokens + self.max_new_tokens))
        return found

    def examples(self, subject: Completes, point: Point) -> Iterator[Example]:
        """Set by set, the places of each from its beginning to its end."""
        style, tokens = str(point.values["style"]), int(point.values["tokens"])
        sets = self._composed(subject, style, tokens)
        assert not isinstance(sets, str)
        spans = self.options.positions
        for context in sets:
            text, count = context.text, len(context.pieces)
            for place in context.asked:
                piece, span = context.pieces[place], span_of(place, count, spans)
                expected = {
                    **{name: piece[name] for name in KINDS[style].right},
                    "keyword": piece[KINDS[style].keyword],
                    "set": context.number,
                    "place": place,
                    "places": count,
                    "last of its span": place + 1 == count or span_of(place + 1, count, spans) != span,
                    "position": position_of(span, spans),
                    "guess": round(guess(style, context.pieces, place), 6),
                }
                prompt = FRAME.format(context=text, question=KINDS[style].asked.format_map(piece))
                yield Example(f"set {context.number}, place {place}", Prompt(prompt), expected)

    def samples(self, subject: Completes, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        """Ask; each sample says which position it is of."""
        for sample in super().samples(subject, point, done):
            yield replace(sample, values={"position": sample.details["position"], **point.values})

    def score(self, example: Example, completion: Completion) -> dict[str, float]:
        """FILM's score of the answer's first words."""
        style = next(name for name, kind in KINDS.items() if kind.right[0] in example.expected)
        return {"score": score(style, example.expected, completion.text)}

    def _composed(self, subject: Completes, style: str, tokens: int) -> list[Context] | str:
        """The sets of a style and length, or why there are none."""
        key = (style, tokens)
        if key not in self._sets:
            self._sets[key] = self._compose(subject.tokenizer, style, tokens)
        return self._sets[key]

    def _compose(self, tokenizer: Any, style: str, tokens: int) -> list[Context] | str:
        options: ValProbeOptions = self.options
        kind = KINDS[style]
        pool = self.texts.records(kind.file, sorted({kind.keyword, *kind.right}))
        made = []
        for number in range(min(options.sets, options.samples)):
            rng = random.Random(f"{options.seed} {style} {tokens} {number}")
            pieces = fill(tokenizer, style, rng.sample(pool, len(pool)), tokens)
            if len(pieces) == len(pool):
                return f"the {len(pool):,} pieces of this style do not fill {size_name(tokens)} tokens."
            if len(pieces) < options.positions:
                return (
                    f"{len(pieces)} pieces of this style fit, fewer than positions={options.positions}; "
                    "ask for fewer positions or longer contexts."
                )
            wanted = len(range(number, options.samples, min(options.sets, options.samples)))
            made.append(Context(number, style, pieces, choose(style, pieces, options.positions, wanted, rng)))
        return made

    # -- what it comes to --------------------------------------------------------------------------------

    def rows(self, samples: Sequence[Sample]) -> list[Row]:
        """For each style and length first a row over all positions with Avg and Gap, then one for each position."""
        kept = [s for s in samples if not (self.options.leave_out_last and s.details["last of its span"])]
        groups: dict[tuple[Any, ...], list[Sample]] = {}
        for sample in kept:
            groups.setdefault((sample.values["style"], sample.values["tokens"]), []).append(sample)
        whole = [self._over_all(group) for group in groups.values()]
        parts: list[Row] = []
        for group in groups.values():
            for position in sorted({float(sample.values["position"]) for sample in group}):
                parts.append(self._row([s for s in group if s.values["position"] == position], by_span=False))
        return [*whole, *parts]

    def _over_all(self, group: Sequence[Sample]) -> Row:
        row = self._row(group, by_span=True)
        scores = [sample.scores["score"] for sample in group]
        order = {position: at for at, position in enumerate(dict.fromkeys(s.values["position"] for s in group))}
        spans = [order[sample.values["position"]] for sample in group]
        weights = equal_parts(group, by_span=True)
        if len(order) < 2:
            return row
        rng = random.Random(f"{self.options.seed} {row.values} gap")
        shuffled = sorted(gap(rng.sample(scores, len(scores)), spans, weights) for _ in range(_SHUFFLES))
        usual, most = shuffled[_SHUFFLES // 2], shuffled[int(0.95 * _SHUFFLES)]
        estimates = {**row.estimates, "Gap": mean_of([gap(scores, spans, weights)])}
        notes = {"Gap by chance": f"{100 * usual:.0f}%, 95% below {100 * most:.0f}%"}
        return replace(row, estimates=estimates, notes=notes)

    def _row(self, group: Sequence[Sample], *, by_span: bool) -> Row:
        """The mean of equal parts: sets, or sets within spans."""
        scores = [sample.scores["score"] for sample in group]
        weights = equal_parts(group, by_span=by_span)
        even = len(set(weights)) == 1
        if even and set(scores) <= {0.0, 1.0}:
            estimate = share_of(int(sum(scores)), len(scores))
        else:
            estimate = within(mean_of(scores, weights), 0.0, 1.0)
        chance = mean_of([sample.details["guess"] for sample in group], weights).value
        left_out = ("position",) if by_span else ()
        values = {axis: group[0].values[axis] for axis in self.axes if axis not in left_out}
        return Row(values, len(group), {"score": estimate}, {"score": chance})


# -- composing ---------------------------------------------------------------------------------------------


def write(style: str, pieces: Sequence[Piece]) -> str:
    """Pieces as a context: one after another, functions with a blank line between."""
    return ("\n\n" if style == "code" else "\n").join(KINDS[style].written.format_map(piece) for piece in pieces)


def fill(tokenizer: Any, style: str, pieces: Sequence[Piece], tokens: int) -> tuple[Piece, ...]:
    """The first pieces, as many as fit a prompt of so many tokens whichever of them is asked for.

    Args:
        tokenizer: called with a text (or list of texts), gives `input_ids`.
        pieces: in the order in which they are taken.
    """

    def count(texts: list[str]) -> list[int]:
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    kind = KINDS[style]
    used = len(tokenizer(FRAME.format(context="", question=""))["input_ids"])
    taken: list[Piece] = []
    asking: list[int] = []
    full = False
    for start in range(0, len(pieces), _BLOCK):
        block = pieces[start : start + _BLOCK]
        # a piece as it stands behind another one, so with what is written between them
        sizes = count([write(style, [piece, piece]).removeprefix(write(style, [piece])) for piece in block])
        questions = count([kind.asked.format_map(piece) for piece in block])
        longest = max(asking, default=0)
        for piece, size, question in zip(block, sizes, questions, strict=True):
            longest = max(longest, question)
            full = used + size + longest > tokens
            if full:
                break
            taken.append(piece)
            asking.append(question)
            used += size
        if full:
            break
    while taken:  # tokens at the seams may differ
        asked = kind.asked.format_map(taken[asking.index(max(asking))])
        prompt = FRAME.format(context=write(style, taken), question=asked)
        if len(tokenizer(prompt)["input_ids"]) <= tokens:
            break
        del taken[-1], asking[-1]
    return tuple(taken)


def choose(style: str, pieces: Sequence[Piece], spans: int, wanted: int, rng: random.Random) -> tuple[int, ...]:
    """So many random places of each span whose keyword occurs once in the context; fewer where there are fewer."""
    text, keyword = write(style, pieces), KINDS[style].keyword
    by_span: dict[int, list[int]] = {}
    for place in range(len(pieces)):
        by_span.setdefault(span_of(place, len(pieces), spans), []).append(place)
    chosen: list[int] = []
    for places in by_span.values():
        clear = (place for place in rng.sample(places, len(places)) if occurs_once(pieces[place][keyword], text))
        chosen += [place for place, _ in zip(clear, range(wanted), strict=False)]
    return tuple(sorted(chosen))


def occurs_once(keyword: str, text: str) -> bool:
    """Whether there is exactly one place, overlapping ones counted."""
    first = text.find(keyword)
    return first >= 0 and text.find(keyword, first + 1) < 0


def span_of(place: int, places: int, spans: int) -> int:
    """Which of `spans` parts of equal size a place is in, all counted from 0."""
    return place * spans // places


def position_of(span: int, spans: int) -> float:
    """The middle of a span: 0 the beginning of the context, 1 its end."""
    return round((span + 0.5) / spans, 2 if spans <= 50 else 4)


# -- scoring -----------------------------------------------------------------------------------------------


def score(style: str, right: Mapping[str, Any], answer: str) -> float:
    """FILM's score of one answer, 0 to 1; only the answer's first 128 words are looked at.

    Args:
        right: the fields that are asked for.
    """
    begun = _FIRST_WORDS.match(answer)
    answer = begun[0] if begun else ""
    if style == "document":
        return word_recall(right["sentence"], answer)
    if style == "code":
        return float(right["function_name"].strip(".") in answer)
    said = answer.lower()
    return float(any(right[name].strip(".").lower() in said for name in ("label", "dcpt")))


def word_recall(truth: str, answer: str) -> float:
    """Share of the distinct lower-cased white-space words of a text that are words of the answer."""
    wanted = set(truth.lower().split())
    return len(wanted & set(answer.lower().split())) / len(wanted)


def guess(style: str, pieces: Sequence[Piece], place: int) -> float:
    """What is scored without having found the piece: for repeating the given words, or for another piece's answer."""
    piece = pieces[place]
    if style == "document":
        return word_recall(piece["sentence"], piece["piece"])
    others = [other for number, other in enumerate(pieces) if number != place]
    said = [", ".join(other[name] for name in KINDS[style].right) for other in others]
    return sum(score(style, piece, answer) for answer in said) / max(1, len(said))


def equal_parts(group: Sequence[Sample], *, by_span: bool) -> list[float]:
    """Weights with which a mean is the mean of the sets' means, within each span where `by_span`; 1 where all are alike."""
    keys: list[tuple[Hashable, Hashable]] = [
        (sample.values["position"] if by_span else 0, sample.details["set"]) for sample in group
    ]
    sizes = Counter(keys)
    sets = Counter(span for span, _ in sizes)
    weights = [1 / (sizes[key] * sets[key[0]]) for key in keys]
    return [1.0] * len(weights) if len(set(weights)) == 1 else weights


def gap(scores: Sequence[float], spans: Sequence[int], weights: Sequence[float]) -> float:
    """Largest minus smallest (weighted) mean of a span.

    Args:
        spans: numbers from 0, none of them without a score.
    """
    totals = np.bincount(spans, np.multiply(scores, weights))
    means = totals / np.bincount(spans, weights)
    return float(means.max() - means.min())
