"""Subjects whose answers are known, and question sets in a folder."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longfocus.subjects.contract import Completion, Prompt
from tests.small_tokenizers import tokenizer

Answer = Callable[[str], str]
"""Prompt -> answer."""


class Answers:
    """Says what a function says, and remembers its prompts."""

    def __init__(self, answer: Answer, *, kind: str = "byte_level", longest: int | None = None) -> None:
        self.answer, self.longest, self.name = answer, longest, "fake"
        self.tokenizer: Any = tokenizer(kind)
        self.asked: list[str] = []

    def about(self) -> dict[str, Any]:
        return {"name": self.name, "kind": "fake"}

    def complete(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, stop: str | None = None, mass: bool = False
    ) -> Iterator[Completion]:
        for prompt in prompts:
            self.asked.append(prompt.text)
            yield Completion(self.answer(prompt.text), len(self.tokenizer(prompt.text)["input_ids"]), 0.0)


class Chooses(Answers):
    """The same with probabilities: the loss of a choice is what a function says."""

    def __init__(self, answer: Answer, loss: Callable[[str, str], float], **more: Any) -> None:
        super().__init__(answer, **more)
        self.loss = loss
        self.chosen: list[str] = []

    def block_losses(self, *arguments: Any, **named: Any) -> Iterator[Any]:
        raise AssertionError("not asked for here")

    def choice_losses(self, prompt: Prompt, choices: Sequence[str]) -> list[float]:
        self.chosen.append(prompt.text)
        return [self.loss(prompt.text, choice) for choice in choices]


def write_sets(folder: Path, sets: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    """`SET/FILE` -> records, as `Texts` reads them."""
    for name, records in sets.items():
        path = folder / f"{name}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    return folder
