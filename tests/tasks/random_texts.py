"""Documents of random words on disk, and a subject whose losses follow a rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longfocus.subjects.contract import BlockLosses
from longfocus.tasks.texts import Texts
from tests.small_tokenizers import tokenizer

Rule = Callable[[list[int], list[int], int], float]
"""(tokens before the block that may be used, the block up to the token, the token) -> loss in nats."""


def random_texts(folder: Path, characters: Sequence[int], name: str = "mine", letters: str = "abcdefgh") -> Texts:
    """A set of that name, one document for each number of characters: words of 1 to 6 random letters."""
    place = folder / name
    place.mkdir()
    for number, wanted in enumerate(characters):
        rng = random.Random(f"{name} {number}")
        words: list[str] = []
        while sum(map(len, words)) + len(words) < wanted:
            words.append("".join(rng.choices(letters, k=rng.randint(1, 6))))
        (place / f"document {number}.txt").write_text(" ".join(words)[:wanted], "utf-8")
    return Texts(folder, {name: str(place)})


class RuledSubject:
    """Predicts tokens by a rule that sees what the protocol lets it see."""

    def __init__(self, rule: Rule, *, longest: int | None = None, stop_after: int | None = None) -> None:
        """
        Args:
            stop_after: blocks and contexts after which it is as if Ctrl-C were pressed.
        """
        self.rule, self._longest, self.stop_after = rule, longest, stop_after
        self.name = "ruled"
        self.tokenizer: Any = tokenizer("byte_level")
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """(starts, contexts) of each call."""
        self.seen: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        """Predicted block -> (context, tokens before it)."""

    @property
    def longest(self) -> int | None:
        return self._longest

    def about(self) -> dict[str, Any]:
        return {"name": self.name, "kind": "ruled"}

    def complete(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        raise AssertionError("no text was asked for")

    def choice_losses(self, *arguments: Any) -> list[float]:
        raise AssertionError("no choice was asked for")

    def block_losses(
        self,
        ids: Sequence[int],
        starts: Sequence[int],
        block: int,
        contexts: Sequence[int],
        before: Sequence[Sequence[int]] = (),
    ) -> Iterator[BlockLosses]:
        self.calls.append((tuple(starts), tuple(contexts)))
        front = [token for document in before for token in document]
        for start in starts:
            for context in contexts:
                if self.stop_after is not None:
                    if self.stop_after == 0:
                        raise KeyboardInterrupt
                    self.stop_after -= 1
                seen = [*front, *ids[:start]]
                assert len(seen) >= context, "a context that is not full"
                seen = seen[len(seen) - context :]
                part = list(ids[start : start + block])
                assert len(part) == block
                self.seen.setdefault(tuple(part), []).append((context, seen))
                nll = [self.rule(seen, part[:at], part[at]) for at in range(1, block)]
                yield BlockLosses(start, context, np.array(nll))
