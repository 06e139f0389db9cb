"""Questions about research papers (QASPER, Dasigi et al. 2021, arXiv 2105.03011), scored as in SCROLLS, by context length.

    Stay On-Topic: Generating Context-specific Fake Restaurant Reviews …  (the paper, cut to the length)

    Question: Which dataset do they use a starting point in generating fake reviews?
    Answer:

and right are "the Yelp Challenge dataset" and "Yelp Challenge dataset BIBREF2", one from each annotator.

**Few questions.** `shared/data` holds 42 questions about 7 papers, from QASPER's training part. That is far too few for a
score to compare with publications; it shows that the pipeline is right, and gross differences between models.

**Protocol** (Focused Transformer, section 4.3 and table 6: zero-shot, in the form of EleutherAI's lm-evaluation-harness):
the prompt above; a question that all annotators answer with yes or no is decided by which of " yes" and " no" is
likelier; other answers are generated up to the end of the line, and nothing at all counts as `Unanswerable`. The score is
the F1 of normalised words, the largest over the annotators' answers, then the mean over questions (SCROLLS, arXiv
2201.03533); `unanswerable` is an answer like any other. An endpoint gives no probabilities: there, yes and no are
generated too.

**Length.** It holds text, question and answer. SCROLLS cuts the end of a text that is too long and keeps the question
whole; so here. The harness cuts the beginning (as that of any long prompt), and the Focused Transformer's figures were made
with it: `keep=end`. All questions of a paper follow the same cut, which is read once by a model that shares reading.

**Guessing.** One who answers `unanswerable`, and yes or no at random, scores what is called chance: 23% on the 42 questions.
"""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from longfocus.errors import ConfigError
from longfocus.settings import Sizes
from longfocus.subjects.contract import Completes, Completion, PredictsTokens, Prompt
from longfocus.tasks.contract import AnswerTask, Example, Measure, Point, Sample, TaskOptions, Values
from longfocus.tasks.scores import best_f1, normalised
from longfocus.tasks.texts import Texts

SET = "qasper/test"
FIELDS = ("id", "paper", "full_text", "question", "answers", "answer_type")
NOTHING_SAID = "Unanswerable"


class QasperOptions(TaskOptions):
    """Options of `qasper`."""

    lengths: Sizes = [2048, 4096, 6144, 8192, 16384]
    """Tokens of text, question and answer together."""
    samples: Annotated[int, Field(ge=1)] | None = None
    """Questions a length, drawn at random; null: all."""
    keep: Literal["beginning", "end"] = "beginning"
    """Which part of a text that is too long stays."""


class Qasper(AnswerTask):
    """Questions about research papers: F1 as in SCROLLS. 42 questions: too few to compare with published scores."""

    name, title = "qasper", "Questions about papers (Qasper)"
    paper = (
        "Focused Transformer, arXiv 2307.03170, section 4.3 and table 6; QASPER, arXiv 2105.03011; SCROLLS, arXiv "
        "2201.03533. 42 questions here: too few to compare with published scores"
    )
    axes: tuple[str, ...] = ("tokens",)
    measures = (Measure("F1", "share", "higher"),)
    max_new_tokens, stop = 64, r"\n"
    Options = QasperOptions
    quick = {"lengths": [1024, 4096], "samples": 6}

    def __init__(self, options: QasperOptions, texts: Texts) -> None:
        super().__init__(options, texts)
        self._chosen: dict[str, list[dict[str, Any]]] | None = None

    # -- what is measured --------------------------------------------------------------------------------

    def points(self, subject: Completes) -> Sequence[Point]:
        """Each length.

        Raises:
            InputError: the data set is missing.
            ConfigError: a length is too short for a question.
        """
        options: QasperOptions = self.options
        papers = self._papers()
        needed = max(len(subject.tokenizer(_end(r))["input_ids"]) for r in self.texts.records(SET, FIELDS))
        needed += self.max_new_tokens + 1
        if needed > options.lengths[0]:
            raise ConfigError(
                f"qasper.lengths: {options.lengths[0]} given; the longest question and its answer take {needed} tokens."
            )
        count = sum(len(records) for records in papers.values())
        return [Point({"tokens": tokens}, count, tokens) for tokens in options.lengths]

    def examples(self, subject: Completes, point: Point) -> Iterator[Example]:
        """Paper by paper."""
        for records in self._papers().values():
            yield from self._about(subject, point, records)

    def samples(self, subject: Completes, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        """Paper by paper; its yes-no questions first."""
        for records in self._papers().values():
            left = [record for record in records if record["id"] not in done]
            if not left:
                continue
            examples = self._about(subject, point, left)
            if isinstance(subject, PredictsTokens):
                for example in [e for e in examples if _is_yes_no(e.expected["answers"])]:
                    yield self._decide(subject, point, example)
                examples = [e for e in examples if not _is_yes_no(e.expected["answers"])]
            yield from self.ask(subject, point, examples)

    def _papers(self) -> dict[str, list[dict[str, Any]]]:
        """Paper -> its questions, of those that are asked."""
        if self._chosen is None:
            records = list(self.texts.records(SET, FIELDS))
            wanted = self.options.samples
            if wanted is not None and wanted < len(records):
                ids = sorted(record["id"] for record in records)
                drawn = set(random.Random(f"{self.options.seed} qasper").sample(ids, wanted))
                records = [record for record in records if record["id"] in drawn]
            self._chosen = {}
            for record in records:
                self._chosen.setdefault(record["paper"], []).append(record)
        return self._chosen

    def _about(self, subject: Completes, point: Point, records: Sequence[dict[str, Any]]) -> list[Example]:
        """Questions about one paper, after its text as far as it fits."""
        text, whole = self._cut(subject, int(point.values["tokens"]), records[0])
        return [
            Example(
                record["id"],
                Prompt(text + _end(record)),
                {
                    "question": record["question"],
                    "answers": record["answers"],
                    "types": record["answer_type"],
                    "paper": record["paper"],
                    "whole": whole,
                },
            )
            for record in records
        ]

    def _cut(self, subject: Completes, tokens: int, record: dict[str, Any]) -> tuple[str, bool]:
        """A paper's text so that each question about it fits behind it, asked here or not; and whether it is whole."""
        count, text = subject.tokenizer, record["full_text"]
        ends = [_end(other) for other in self.texts.records(SET, FIELDS) if other["paper"] == record["paper"]]
        offsets = count(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        kept = min(len(offsets), tokens)
        while kept > 0:
            if kept == len(offsets):
                part = text
            else:
                part = text[: offsets[kept - 1][1]] if self.options.keep == "beginning" else text[offsets[-kept][0] :]
            excess = max(len(count(part + end)["input_ids"]) for end in ends) + self.max_new_tokens - tokens
            if excess <= 0:
                return part, kept == len(offsets)
            kept -= excess
        return "", False

    # -- judging -----------------------------------------------------------------------------------------

    def _decide(self, subject: PredictsTokens, point: Point, example: Example) -> Sample:
        """Yes or no, whichever is likelier."""
        begun = time.perf_counter()
        yes, no = subject.choice_losses(example.prompt, [" yes", " no"])
        answer = "yes" if yes < no else "no"
        details = {
            **example.expected,
            "answer": answer,
            "loss of yes, no": [round(yes, 4), round(no, 4)],
            "prompt_tokens": len(subject.tokenizer(example.prompt.text)["input_ids"]),
            "seconds": round(time.perf_counter() - begun, 3),
        }
        return Sample(example.id, point.values, {"F1": best_f1(answer, example.expected["answers"])}, 1.0, details)

    def score(self, example: Example, completion: Completion) -> dict[str, float]:
        """F1 of the first line; of `Unanswerable` where nothing stands on it."""
        said = completion.text.partition("\n")[0].strip() or NOTHING_SAID
        return {"F1": best_f1(said, example.expected["answers"])}

    def cluster(self, sample: Sample) -> Hashable | None:
        """The paper."""
        return str(sample.details["paper"])

    def chance(self, values: Values) -> dict[str, float]:
        """Always `unanswerable`; yes and no by a coin where all annotators say one of them."""
        every = [record["answers"] for records in self._papers().values() for record in records]
        return {"F1": sum(_guess(answers) for answers in every) / len(every)}

    def notes(self, group: Sequence[Sample]) -> dict[str, Any]:
        """F1 by kind of question, and how many papers fitted whole."""
        kinds: dict[str, list[float]] = {"yes-no": [], "unanswerable": [], "open": []}
        for sample in group:
            kinds[_kind(sample.details["answers"])].append(sample.scores["F1"])
        found: dict[str, Any] = {
            f"F1, {kind}": f"{100 * sum(scores) / len(scores):.1f}% of {len(scores)}"
            for kind, scores in kinds.items()
            if scores
        }
        papers = {sample.details["paper"]: sample.details["whole"] for sample in group}
        return found | {"papers read whole": f"{sum(papers.values())} of {len(papers)}"}


def _end(record: dict[str, Any]) -> str:
    return f"\n\nQuestion: {record['question']}\nAnswer:"


def _is_yes_no(answers: Sequence[str]) -> bool:
    return all(normalised(answer) in ("yes", "no") for answer in answers)


def _kind(answers: Sequence[str]) -> str:
    """`unanswerable`: all annotators say so."""
    if _is_yes_no(answers):
        return "yes-no"
    return "unanswerable" if all(normalised(a) == normalised(NOTHING_SAID) for a in answers) else "open"


def _guess(answers: Sequence[str]) -> float:
    words = ("yes", "no") if _is_yes_no(answers) else (NOTHING_SAID,)
    return sum(best_f1(word, answers) for word in words) / len(words)
