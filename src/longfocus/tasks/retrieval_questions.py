"""What `retrieval` asks: questions made from the texts of a corpus, each with the passages that are right.

The kinds are described in `retrieval.py`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longfocus.tasks.retrievers import Corpus

WORDS = 8
NEXT_TOKENS = 32
MOST_PLACES = 5

WHO = {
    "physician": "doctor",
    "attorney": "lawyer",
    "seaman": "sailor",
    "tutor": "teacher",
    "monarch": "king",
    "author": "writer",
    "merchant": "trader",
    "burglar": "thief",
    "cleric": "priest",
    "warrior": "soldier",
    "detective": "investigator",
    "joiner": "carpenter",
}
"""As a made-up fact calls someone -> as the question does."""
WHAT = {
    "purchased a scarlet automobile": "What colour was the car that the {} bought?",
    "resides in a cottage near Tromsø": "Where does the {} live?",
    "feeds nine felines each dawn": "How many cats does the {} give food to every morning?",
    "detests boiled turnips": "Which vegetable does the {} hate?",
    "misplaced an emerald brooch": "What piece of jewellery did the {} lose?",
    "constructed a raft from barrels": "What kind of boat did the {} build?",
    "wedded a florist in Lucerne": "Whom did the {} marry?",
    "gulps peppermint infusion at dusk": "What tea does the {} drink in the evening?",
    "mended an antique chronometer": "Which old clock did the {} repair?",
    "instructs youngsters in fencing": "Which sport does the {} teach children?",
    "slumbers beneath a maple": "Under which tree does the {} sleep?",
    "sketches windmills on Sundays": "What does the {} draw at the weekend?",
}
"""What is said of someone -> how it is asked."""


@dataclass(frozen=True)
class Question:
    """What is asked of a corpus."""

    id: str
    text: str
    right: tuple[int, ...]
    """Passages, any of which is right."""
    left_out: tuple[int, ...] = ()
    """Passages that are not ranked."""
    paper: str | None = None


def made_up_facts() -> list[tuple[str, str]]:
    """All of them, as (statement, question)."""
    return [(f"The {said} {done}.", asked.format(meant)) for said, meant in WHO.items() for done, asked in WHAT.items()]


def stretch(tokenizer: Any, text: str, start: int, tokens: int) -> tuple[int, int]:
    """Where a stretch of about so many tokens, never more, ends, at a line's end if it can; and its tokens."""
    if tokens < 1 or start >= len(text):
        return start, 0
    chars = 5 * tokens
    while True:
        part = text[start : start + chars]
        offsets = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if len(offsets) > tokens or start + chars >= len(text):
            break
        chars *= 2
    if len(offsets) <= tokens:
        return len(text), len(offsets)
    limit = offsets[tokens - 1][1]
    line = part.rfind("\n", limit // 2, limit) + 1
    return start + (line or limit), tokens


def strew(facts: Sequence[str], documents: Sequence[tuple[str, str]], rng: random.Random) -> list[tuple[str, str]]:
    """Facts as paragraphs at random ends of paragraphs (of lines, where a document has no paragraphs)."""
    places = []
    for number, (_, text) in enumerate(documents):
        pattern = r"\n(?=\n)" if "\n\n" in text else r"\n"
        found = [match.start() for match in re.finditer(pattern, text)] or [len(text)]
        places += [(number, at) for at in found]
    chosen: dict[int, list[tuple[int, str]]] = {}
    for fact in facts if places else []:
        number, at = rng.choice(places)
        chosen.setdefault(number, []).append((at, fact))
    made = []
    for number, (name, text) in enumerate(documents):
        pieces, begin = [], 0
        for at, fact in sorted(chosen.get(number, [])):
            pieces += [text[begin:at], f"\n\n{fact}\n"]
            begin = at
        made.append((name, "".join([*pieces, text[begin:]])))
    return made


def exact_words(corpus: Corpus, count: int, rng: random.Random) -> list[Question]:
    """`WORDS` consecutive words of passages, each passage once, that stand in the corpus once."""
    whole = "\n".join(corpus.texts)
    found: list[Question] = []
    for number in rng.sample(range(len(corpus.passages)), len(corpus.passages)):
        if len(found) == count:
            break
        text = corpus.passages[number].text
        words = list(re.finditer(r"\S+", text))
        if len(words) < WORDS + 4:
            continue
        at = rng.randrange(2, len(words) - WORDS - 1)
        asked = text[words[at].start() : words[at + WORDS - 1].end()]
        if _stands_once(asked, whole):
            found.append(Question(f"{number}", asked, (number,)))
    return found


def what_comes_next(corpus: Corpus, count: int, rng: random.Random, tokenizer: Any) -> list[Question]:
    """The last tokens of passages whose document goes on, where these tokens stand in the corpus once."""
    passages, whole = corpus.passages, "\n".join(corpus.texts)
    possible = [
        number
        for number in range(1, len(passages))
        if passages[number - 1].document == passages[number].document
        and min(len(passages[n].text.split()) for n in (number - 1, number)) >= WORDS
    ]
    found: list[Question] = []
    for number in rng.sample(possible, len(possible)):
        if len(found) == count:
            break
        before = passages[number - 1].text.rstrip()
        offsets = tokenizer(before, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        asked = before[offsets[-min(NEXT_TOKENS, len(offsets))][0] :].strip()
        if _stands_once(asked, whole):
            found.append(Question(f"{number}", asked, (number,), (number - 1,)))
    return found


def _stands_once(text: str, whole: str) -> bool:
    return whole.find(text, whole.find(text) + 1) < 0


def other_words(corpus: Corpus, facts: Sequence[tuple[str, str]]) -> list[Question]:
    """Made-up facts that stand in one passage whole."""
    found = []
    for fact, question in facts:
        right = tuple(number for number, passage in enumerate(corpus.passages) if fact in passage.text)
        if len(right) == 1:
            found.append(Question(fact, question, right))
    return found


def paper_questions(corpus: Corpus, records: Sequence[dict[str, Any]]) -> list[Question]:
    """Questions with a quoted answer that stands in few passages of their paper, which is in the corpus."""
    found = []
    for record in records:
        if record["paper"] not in corpus.names:
            continue
        document = corpus.names.index(record["paper"])
        quoted = [
            answer.strip()
            for answer, kind in zip(record["answers"], record["answer_type"], strict=True)
            if kind == "extractive" and answer.strip()
        ]
        places = {
            corpus.passage_at(document, match.start())
            for answer in quoted
            for match in re.finditer(re.escape(answer), corpus.texts[document])
        }
        if 1 <= len(places) <= MOST_PLACES:
            right = tuple(sorted(places))
            found.append(Question(record["id"], record["question"], right, paper=record["paper"]))
    return found
