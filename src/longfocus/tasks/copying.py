"""Copying: a stretch of text stands early in a long text, its beginning stands at the end, and the rest must follow.

The authors of the positional vectors paper repeat substrings of 20, 50 and 200 tokens until a length is reached, and
ask for the first tokens of the next copy. That form is here (`repeated`), but in it the last copy always lies beside the
question. So the other forms have the substring once, in the first quarter of the prompt, and all other text between it
and the end:

    … nobody came. ¦The ferry was late, so we sat down on the pier and counted the boats¦ until …
    … thousands of tokens of the same text …
    ¦The ferry was late, so we sat down  →  on the pier and counted the boats

* `books`, `code`, `arxiv`, `isabelle`: held-out text as it is; the substring begins with a line. A model may know the
  book, or guess, so the same end is also asked for where the substring is not in the text (`guessed`).
* `random`: random words (and beginnings of words), each one token, so that nothing but copying gives them; chance is known.
* `repeated`: the paper's form. A substring of `books` over and over, a line break between copies; its first ten tokens
  are to follow. How many first tokens were asked for is not in our notes; ten is chosen here.

The cue is ten tokens (half of a substring shorter than twenty) and occurs once before. Answers are greedy. They are text,
so that endpoints can be asked, and are counted in tokens of the tokenizer up to the first that differs; white space
before the first word is not compared. Whoever repeats the cue or the whole prompt instead of going on has nothing right.
Each text is asked about one substring of each length, so that it is read once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from longfocus.errors import InputError
from longfocus.settings import Size, Sizes
from longfocus.subjects.contract import Completes, Completion, Prompt
from longfocus.tasks.contract import Measure, Point, Sample, Task, TaskOptions, Values
from longfocus.tasks.haystack import Haystack
from longfocus.tasks.texts import Texts

CUE = 10
"""Tokens of a substring that are given, and first tokens that are asked for in the repeated form."""
EARLY = 4
"""The substring begins in the first quarter."""
UNSEEN = 256
"""Tokens of text before the cue where the substring is not in the text."""
_TRIES = 40


class CopyingOptions(TaskOptions):
    """Options of `copying`."""

    lengths: Sizes = [2048, 8192, 32768]
    """Prompt lengths in tokens."""
    samples: Annotated[int, Field(ge=1)] = 20
    """Texts a length, each asked about one substring of each length."""
    substrings: Sizes = [20, 50, 200]
    """Lengths of the repeated substring in tokens, with its cue."""
    texts: Annotated[list[Literal["books", "code", "arxiv", "isabelle", "random", "repeated"]], Field(min_length=1)] = [
        "books",
        "random",
        "repeated",
    ]
    """Text around the substring: held-out sets, `random` words, or nothing but its copies (`repeated`)."""
    words: Size = 1000
    """Different words in random text."""


@dataclass(frozen=True)
class Repeat:
    """A prompt whose end was there before."""

    prompt: str
    rest: str
    """What must follow."""
    ends: tuple[int, ...]
    """Characters of `rest` up to the end of each of its tokens."""
    before: tuple[int, int]
    """First and last character of the substring in the prompt, the last not included."""
    distance: int
    """Tokens from the substring's end to the prompt's end."""
    unseen: str | None = None
    """The prompt's end alone, without the substring."""

    def right(self, answer: str) -> int:
        """Tokens of the rest that an answer begins with."""
        lead = len(self.rest) - len(self.rest.lstrip())
        said, wanted = answer.lstrip(), self.rest[lead:]
        alike = next((at for at, (a, b) in enumerate(zip(said, wanted, strict=False)) if a != b), None)
        alike = min(len(said), len(wanted)) if alike is None else alike
        return sum(end <= lead + alike for end in self.ends) if alike else 0


class Copying(Task):
    """A substring of 20, 50 or 200 tokens from far back must be carried on; right are tokens up to the first error."""

    name, title = "copying", "Copying a repeated substring"
    paper = "Decomposed positional vectors, arXiv 2405.18009, answers to reviewers; one distant copy: longfocus"
    axes: tuple[str, ...] = ("tokens", "substring", "text")
    measures = (
        Measure("copied", "share", "higher"),
        Measure("copied whole", "share", "higher"),
        Measure("guessed", "share", "neither"),
    )
    Options = CopyingOptions
    quick = {"lengths": [1024, 4096], "substrings": [20, 50], "samples": 4, "texts": ["books", "random"]}

    def __init__(self, options: CopyingOptions, texts: Texts) -> None:
        super().__init__(options, texts)
        self._stacks: dict[str, Haystack] = {}
        self._words: list[str] | None = None

    # -- what is asked -----------------------------------------------------------------------------------

    def points(self, subject: Completes) -> Sequence[Point]:
        """Each text and length; all substrings of a text are measured together.

        Raises:
            InputError: a set of texts is missing.
        """
        options: CopyingOptions = self.options
        found = []
        for part in options.texts:
            for tokens in options.lengths:
                values: Values = {"tokens": tokens, "text": part}
                fitting = self._fitting(tokens)
                for size in (size for size in options.substrings if size not in fitting):
                    why = f"a substring of {size} tokens in the first quarter needs {EARLY * size:,} tokens or more."
                    found.append(Point({**values, "substring": _named(size)}, 0, refused=why))
                if fitting:
                    count = options.samples * len(fitting)
                    longest = tokens + self._longest_answer(fitting)
                    found.append(Point(values, count, longest, self._lacking(subject, part, tokens)))
        return found

    def _fitting(self, tokens: int) -> list[int]:
        return [size for size in self.options.substrings if size >= 2 and EARLY * size <= tokens]

    def _longest_answer(self, sizes: Sequence[int]) -> int:
        return max(max(size - _cue(size) for size in sizes), CUE) + 8

    def _lacking(self, subject: Completes, part: str, tokens: int) -> str | None:
        """Why there are no such texts."""
        options: CopyingOptions = self.options
        if part == "random":
            words = len(self._some_words(subject))
            if words < options.words:
                return f"the tokenizer has {words:,} words of one token, copying.words asks for {options.words:,}."
            return None
        stack = self._stack(subject, part)
        wanted = max(options.substrings) if part == "repeated" else tokens
        enough = wanted < len(stack.text.encode("utf-8")) and len(stack.cut(0, wanted)) < len(stack.text)
        return None if enough else f"{part} holds less text than that."

    def repeats(self, subject: Completes, part: str, tokens: int) -> Iterator[tuple[str, int, Repeat]]:
        """(id, length of the substring, prompt) of all samples of a point, in order."""
        for number in range(self.options.samples):
            for size, made in self._of_one_text(subject, part, tokens, number).items():
                yield f"{number} {size}", size, made

    def _of_one_text(self, subject: Completes, part: str, tokens: int, number: int) -> dict[int, Repeat]:
        sizes = self._fitting(tokens)
        for attempt in range(_TRIES):
            rng = random.Random(f"{self.options.seed} {part} {tokens} {number} {attempt}")
            if part == "repeated":
                made = {size: self._over_and_over(subject, tokens, size, rng) for size in sizes}
            else:
                made = self._once(subject, part, tokens, sizes, rng)
            found = {size: repeat for size, repeat in made.items() if repeat is not None}
            if len(found) == len(sizes):
                return found
        raise InputError(
            f"{part}: in {_TRIES} texts of {tokens:,} tokens there was no substring whose beginning occurs once; give longer or "
            "less repetitive texts."
        )

    def _once(
        self, subject: Completes, part: str, tokens: int, sizes: Sequence[int], rng: random.Random
    ) -> dict[int, Repeat | None]:
        """Prompts over one text, by the length of the substring that it holds once."""
        room = max(
            1, tokens - max(map(_cue, sizes)) - 1 - _special_tokens(subject.tokenizer)
        )  # 1: a break before the cue
        if part == "random":
            text = " ".join(rng.choices(self._some_words(subject), k=room)) + " "
            starts = [at + 1 for at, letter in enumerate(text[:-1]) if letter == " "]
        else:
            text = "".join(self._stack(subject, part).lines(room, rng))
            text += "" if text.endswith("\n") else "\n"
            starts = [at + 1 for at, letter in enumerate(text[:-1]) if letter == "\n"]
        cut = _Tokens(subject.tokenizer, text)
        places = [cut.at[start] for start in starts if start in cut.at and cut.at[start] <= len(cut.ids) // EARLY]
        found: dict[int, Repeat | None] = {}
        for size in sizes:
            rng.shuffle(places)
            tries = (self._repeat(subject, cut, place, size, seen_once=part == "random") for place in places)
            found[size] = next((repeat for repeat in tries if repeat is not None), None)
        return found

    def _repeat(self, subject: Completes, cut: _Tokens, place: int, size: int, *, seen_once: bool) -> Repeat | None:
        """The prompt that asks for the substring at a token; None where that would not be clear."""
        stop, cued = place + size, place + _cue(size)
        if stop > len(cut.ids):
            return None
        begin = cut.first(place)
        cue, rest = cut.text[begin : cut.end(cued - 1)], cut.text[cut.end(cued - 1) : cut.end(stop - 1)]
        if not rest.strip() or cut.text.count(cue) != 1:
            return None
        near = max(0, len(cut.text) - 200)
        near = max(cut.text.rfind("\n", 0, near), cut.text.rfind(" ", 0, near), 0)
        again = _Tokens(subject.tokenizer, cut.text[near:] + cue).ids
        if again[len(again) - (cued - place) :] != cut.ids[place:cued]:  # the same tokens in both places
            return None
        tail = cut.text[cut.first(max(stop, len(cut.ids) - UNSEEN)) :] if stop < len(cut.ids) else ""
        return Repeat(
            cut.text + cue,
            rest,
            tuple(cut.end(token) - cut.end(cued - 1) for token in range(cued, stop)),
            (begin, cut.end(stop - 1)),
            len(cut.ids) - stop + cued - place,
            None if seen_once else tail + cue,
        )

    def _over_and_over(self, subject: Completes, tokens: int, size: int, rng: random.Random) -> Repeat | None:
        """The paper's form: copies up to a length, and the next one is to begin."""
        text = "".join(self._stack(subject, "repeated").lines(2 * size, rng))
        cut = _Tokens(subject.tokenizer, text)
        if len(cut.ids) < size or cut.first(0) != 0:
            return None
        copy = text[: cut.end(size - 1)].rstrip("\n") + "\n"
        first = min(CUE, size)
        rest = text[: cut.end(first - 1)]
        if not rest.strip() or len(rest) > len(copy):
            return None
        room = tokens - _special_tokens(subject.tokenizer)
        length = len(_Tokens(subject.tokenizer, 8 * copy).ids)
        copies = max(2, 8 * room // length)
        prompt = copy * copies
        begin = len(prompt) - len(copy)
        ends = tuple(cut.end(token) for token in range(first))
        return Repeat(prompt, rest, ends, (begin, begin + len(rest)), max(0, length // 8 - first))

    def _stack(self, subject: Completes, part: str) -> Haystack:
        source = "books" if part == "repeated" else part
        if source not in self._stacks:
            self._stacks[source] = Haystack(subject.tokenizer, self.texts, source)
        return self._stacks[source]

    def _some_words(self, subject: Completes) -> list[str]:
        """As many words as are wanted, or all there are, each one token after a space."""
        if self._words is None:
            known = words_of_one_token(subject.tokenizer)
            rng = random.Random(f"{self.options.seed} words")
            self._words = sorted(rng.sample(known, min(self.options.words, len(known))))
        return self._words

    # -- asking ------------------------------------------------------------------------------------------

    def samples(self, subject: Completes, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        """A sample a substring; what is guessed is asked for beside it."""
        part, tokens = str(point.values["text"]), int(point.values["tokens"])
        wanted = [one for one in self.repeats(subject, part, tokens) if one[0] not in done]
        most = self._longest_answer(self._fitting(tokens))
        seen = subject.complete([Prompt(one.prompt, wanted=one.rest) for _, _, one in wanted], max_new_tokens=most)
        short = [Prompt(one.unseen, wanted=one.rest) for _, _, one in wanted if one.unseen is not None]
        guesses = subject.complete(short, max_new_tokens=most)
        for (name, size, one), completion in zip(wanted, seen, strict=True):
            guess = next(guesses) if one.unseen is not None else None
            yield self._sample(name, {**point.values, "substring": _named(size)}, one, completion, guess)

    def _sample(self, name: str, values: Values, one: Repeat, said: Completion, guess: Completion | None) -> Sample:
        right = one.right(said.text)
        scores = {"copied": right / len(one.ends), "copied whole": float(right == len(one.ends))}
        if guess is not None:
            scores["guessed"] = one.right(guess.text) / len(one.ends)
        details = {
            "rest": one.rest,
            "answer": said.text,
            "right_tokens": right,
            "of_tokens": len(one.ends),
            "distance": one.distance,
            "beyond_window": said.local_from is not None and one.before[1] <= said.local_from,
            "prompt_tokens": said.prompt_tokens,
            "seconds": round(said.seconds, 3),
        }
        if guess is not None:
            details["guess"] = guess.text
        if said.shared_tokens:
            details["tokens_read_with_others"] = said.shared_tokens
        return Sample(name, values, scores, 1.0, details)

    def chance(self, values: Values) -> dict[str, float]:
        """Naming words at random, in random text."""
        if values["text"] != "random":
            return {}
        size = int(str(values["substring"]).split()[0])
        asked, luck = size - _cue(size), 1 / self.options.words
        return {
            "copied": sum(luck**count for count in range(1, asked + 1)) / asked,
            "copied whole": luck**asked,
        }

    def notes(self, group: Sequence[Sample]) -> dict[str, Any]:
        """How far away the substring was, and how often it was in memory."""
        distance = sum(sample.details["distance"] for sample in group) / len(group)
        beyond = sum(sample.details["beyond_window"] for sample in group)
        return {"mean distance": round(distance), "in memory": f"{beyond} of {len(group)}"}


class _Tokens:
    """A text's tokens and where they stand; spaces before a token's letters do not count."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        self.text, self.ids = text, list(encoded["input_ids"])
        self._offsets = encoded["offset_mapping"]
        self.at: dict[int, int] = {}
        """First character that is no space -> its token."""
        for number, (start, stop) in enumerate(self._offsets):
            letters = text[start:stop].lstrip(" ")
            if letters:
                self.at.setdefault(stop - len(letters), number)

    def first(self, token: int) -> int:
        """First character of a token that is no space."""
        start, stop = self._offsets[token]
        return int(stop - len(self.text[start:stop].lstrip(" ")))

    def end(self, token: int) -> int:
        """One past a token's last character."""
        return int(self._offsets[token][1])


def words_of_one_token(tokenizer: Any) -> list[str]:
    """Words of three to twelve small Latin letters that are one token after a space, in alphabetical order."""
    decoded = {tokenizer.decode([number]).strip() for number in range(len(tokenizer))}
    likely = sorted(
        word for word in decoded if 3 <= len(word) <= 12 and word.isascii() and word.islower() and word.isalpha()
    )
    if not likely:
        return []
    alone = len(tokenizer("a", add_special_tokens=False)["input_ids"])
    cut = tokenizer([f"a {word}" for word in likely], add_special_tokens=False)["input_ids"]
    return [word for word, ids in zip(likely, cut, strict=True) if len(ids) == alone + 1]


def _cue(size: int) -> int:
    """Tokens of a substring that are given."""
    return min(CUE, size // 2)


def _named(size: int) -> str:
    return f"{size} tokens"


def _special_tokens(tokenizer: Any) -> int:
    return len(tokenizer("")["input_ids"])
