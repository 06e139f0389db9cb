"""What a task may ask of a model, whatever runs it.

    Completes        text after a prompt: every subject
    PredictsTokens   the loss of given tokens after so much context: models that run here
    HoldsMemory      a focused model itself, for measures of its attention

A task names the ones it needs (`Task.needs`); a subject that lacks one is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One question to a model."""

    text: str
    """Continued by the model as it stands, without a chat template."""
    documents: tuple[str, ...] = ()
    """Texts that come before. A focused model reads each by itself into one memory, as `longfocus ask` does; other
    models see them before the text, blank lines between."""
    names: tuple[str, ...] = ()
    """One a document, or none."""
    wanted: str | None = None
    """The only answer that counts, where there is one: generation may end as soon as the answer differs from it or holds
    it. White space at the beginning is not compared."""

    def __post_init__(self) -> None:
        assert len(self.names) in (0, len(self.documents)), "a name for each document, or none"

    @property
    def joined(self) -> str:
        """All of it as one text."""
        return "\n\n".join((*self.documents, self.text))


@dataclass(frozen=True)
class Completion:
    """What a model said."""

    text: str
    """Generated text only, special tokens left out."""
    prompt_tokens: int
    seconds: float
    local_from: int | None = None
    """First character of the joined prompt that lay in the local window when the answer began; what is before it was
    in memory. None: everything was seen directly."""
    document_mass: tuple[float, ...] | None = None
    """Share of the memory's attention mass that each document received, in order; None: no documents or not known."""
    shared_tokens: int = 0
    """Tokens that were read once for this and other prompts; the numbers are those of reading them alone."""


@dataclass(frozen=True)
class BlockLosses:
    """Losses of one block of a text, after so much context."""

    start: int
    """First token of the block in the text."""
    context: int
    """Tokens before the block that the model could use."""
    nll: np.ndarray
    """float64 (block - 1,): negative log-likelihood in nats of each token but the block's first."""
    hit: np.ndarray | None = None
    """bool (block - 1,): whether that token was the likeliest one; None: not known."""


@runtime_checkable
class Completes(Protocol):
    """Every subject."""

    name: str
    """As tables call it."""

    @property
    def longest(self) -> int | None:
        """Most tokens of a prompt and its answer; None: no limit."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Counts and cuts texts; for an endpoint the nearest thing that is at hand."""
        ...

    def about(self) -> dict[str, Any]:
        """All that a result depends on: kind, model, fingerprint, dtype, options, versions. JSON."""
        ...

    def complete(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, stop: str | None = None, mass: bool = False
    ) -> Iterator[Completion]:
        """Greedy completions, in the order of the prompts; prompts that begin alike, side by side, may share reading.

        Args:
            max_new_tokens: longest answer.
            stop: a regular expression; the answer ends with what it finds first.
            mass: fill `document_mass` where the subject can.

        Raises:
            UnsupportedCallError: a prompt is longer than the model can take.
        """
        ...


@runtime_checkable
class PredictsTokens(Completes, Protocol):
    """A model that gives probabilities of given tokens."""

    def block_losses(
        self,
        ids: Sequence[int],
        starts: Sequence[int],
        block: int,
        contexts: Sequence[int],
        before: Sequence[Sequence[int]] = (),
    ) -> Iterator[BlockLosses]:
        """The same blocks predicted with more and more context.

        Args:
            ids: the tokens of one document.
            starts: first tokens of blocks, ascending; multiples of the model's window where it has one.
            block: tokens of a block, at most the window.
            contexts: how many tokens before the block may be used; larger than `start` where `before` is given.
            before: other documents that were read before this one (multi-document): a focused model keeps them in
                memory, others see them in front. Their last tokens are used when a context is longer than `start`.

        Yields:
            one record for each start and context, in order.

        Raises:
            UnsupportedCallError: context and block are longer than the model can take, or a start does not fit it.
        """
        ...

    def choice_losses(self, prompt: Prompt, choices: Sequence[str]) -> list[float]:
        """Summed negative log-likelihood of each choice as the continuation of the prompt, nats.

        Prompt and choice are tokenised together. Where the border falls inside a token for some choice, the sums of all
        choices begin with that token, so that their differences are those of whole texts.

        Args:
            choices: not empty, none of them.

        Raises:
            UnsupportedCallError: prompt and choice are longer than the model can take.
        """
        ...


@runtime_checkable
class HoldsMemory(PredictsTokens, Protocol):
    """A focused model that runs here."""

    model: Any
    """Attached (`longfocus.attach`)."""

    def memory_of(self, prompt: Prompt) -> Any:
        """A `Memory` of the prompt's documents, each read by itself."""
        ...


CAPABILITIES: dict[str, type] = {"complete": Completes, "losses": PredictsTokens, "memory": HoldsMemory}
"""What `Task.needs` names."""

WHY_NOT: dict[str, str] = {
    "losses": "it needs probabilities of given tokens; an endpoint gives only text",
    "memory": "it looks into memory layers; give a model that runs here, without --plain",
}
