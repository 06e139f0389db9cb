"""Real text of a wished length, with places between its lines: where other tasks hide things."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from longfocus.tasks.texts import Texts


class Haystack:
    """Held-out documents end to end, as characters and the tokens that they make."""

    def __init__(self, tokenizer: Any, texts: Texts, part: str) -> None:
        """
        Args:
            part: a set of held-out documents, see `texts`.

        Raises:
            InputError: the set is missing.
        """
        self.tokenizer = tokenizer
        self.text = "\n\n".join(text for _, text in texts.documents(part))

    def lines(self, tokens: int, rng: random.Random) -> list[str]:
        """Whole lines of about so many tokens, never more, from a random one on; at the end it goes on at the beginning."""
        start = self.text.rfind("\n", 0, rng.randrange(len(self.text))) + 1
        return self.cut(start, tokens).splitlines(keepends=True)

    def cut(self, start: int, tokens: int) -> str:
        """About `tokens` tokens from a character on; whole lines, unless the first line is longer. None for 0 and less."""
        if tokens < 1:
            return ""
        wanted = 4 * tokens
        while True:
            text = (self.text[start:] + "\n" + self.text * (1 + wanted // len(self.text)))[:wanted]
            offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            if len(offsets) >= tokens:
                break
            wanted *= 2
        text = text[: offsets[tokens - 1][1]]
        return text[: text.rfind("\n") + 1] or text


def place_in(lines: Sequence[str], depth: float) -> int:
    """Before which line something stands that is to be at a share `depth` (0 to 1) of the characters."""
    ends = [0]
    for line in lines:
        ends.append(ends[-1] + len(line))
    return min(range(len(ends)), key=lambda index: abs(ends[index] - depth * ends[-1]))
