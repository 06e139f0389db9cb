"""Answering a question from a memory: the prompt, the streamed answer, and where it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import TextStreamer

from longfocus.analysis.attribution import NEUTRAL_QUESTION, Passage, passages, token_mass
from longfocus.errors import PromptTooLongError
from longfocus.memory.asked import AskedMemory
from longfocus.memory.context import MassRecorder
from longfocus.model.cache import FocusCache
from longfocus.model.focused import FocusedModel


@dataclass
class Answer:
    """What came back."""

    text: str
    tokens: int
    sources: list[Passage]
    """The passages that the question looked at; see `analysis.attribution`."""
    memory_mass: float
    """Share of the answer's attention in the memory layers that went to the memory at all."""
    stopped: str
    """`end` (the model ended its answer), `length` (max_new_tokens), or `interrupt` (Ctrl-C)."""


@dataclass
class Sampling:
    """How tokens are chosen; temperature 0 is greedy."""

    max_new_tokens: int = 200
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


_ANSWER_MARK = "<answer of the last turn>"


class _Callback(TextStreamer):
    """Hands finished text to a function; whole characters only, whatever the tokens."""

    def __init__(self, tokenizer: Any, emit: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.emit = emit

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.emit(text)


@dataclass
class Conversation:
    """Questions and answers over one memory; each sees the ones before, the memory is only read."""

    model: FocusedModel
    tokenizer: Any
    memory: AskedMemory | None
    sampling: Sampling = field(default_factory=Sampling)
    _ids: list[int] = field(default_factory=list)
    _cache: FocusCache | None = None
    _neutral: np.ndarray | None = None

    def ask(self, question: str, *, sources: int = 5, emit: Callable[[str], None] = lambda text: None) -> Answer:
        """Answer a question.

        Args:
            question: any text that fits the local window.
            sources: how many passages to name.
            emit: receives the answer's text as it comes.

        Raises:
            PromptTooLongError: the question does not fit the window.
        """
        if self._cache is None:
            self._cache = self.model.new_cache(self.memory)
        cache = self._cache
        prompt = self._prompt_ids(question)
        window = self.model.focus.config.window_tokens
        if len(prompt) > window:
            raise PromptTooLongError(
                f"The question takes {len(prompt)} tokens, more than the local window of {window}; shorten it, "
                "or put the long part into the memory (longfocus remember)."
            )
        ids = [*self._ids, *prompt]
        device = self.model.focus.device
        asked, recorder = (MassRecorder(self.memory.extent if self.memory is not None else 0) for _ in range(2))
        pieces: list[str] = []

        def receive(text: str) -> None:
            pieces.append(text)
            emit(text)

        output, stopped = ids, "length"
        restore, seen = cache.snapshot(), cache.seen
        try:
            with torch.no_grad():
                # all but the last: its query is the first that produces an answer token
                self._feed(prompt[:-1], cache, asked if sources else None)
                seen = cache.seen
                cache.recorder = recorder
                output = self.model.generate(
                    torch.tensor([ids], device=device),
                    cache=cache,
                    streamer=_Callback(self.tokenizer, receive),
                    **self._generation(),
                )[0].tolist()
        except KeyboardInterrupt:
            stopped = "interrupt"
        except BaseException:
            restore()
            raise
        finally:
            cache.recorder = None
        recorder.queries = max(1, cache.seen - seen)
        new = output[len(ids) :]
        if stopped == "interrupt":
            restore()  # a half-answered turn is forgotten; the ones before stay
        else:
            if new and new[-1] in self._end_ids():
                stopped = "end"
            self._ids = output
            self._catch_up(cache, output)
        found = []
        if self.memory is not None and sources:
            neutral = None if stopped == "interrupt" else self._neutral_mass(self.memory)  # Ctrl-C: compute no more
            found = passages(self.memory, token_mass(asked), sources, neutral)
        return Answer("".join(pieces).strip(), len(new), found, float(token_mass(recorder).sum()), stopped)

    def _neutral_mass(self, memory: AskedMemory) -> np.ndarray:
        """float64 (extent,): what a question that asks for nothing gives to each token of the memory; asked once."""
        if self._neutral is None or len(self._neutral) != memory.extent:
            recorder = MassRecorder(memory.extent)
            prompt = Conversation(self.model, self.tokenizer, memory)._prompt_ids(NEUTRAL_QUESTION)
            with torch.no_grad():
                self._feed(prompt[:-1], self.model.new_cache(memory), recorder)
            self._neutral = token_mass(recorder)
        return self._neutral

    def _feed(self, ids: list[int], cache: FocusCache, recorder: MassRecorder | None) -> None:
        """Feed tokens whose logits are not wanted; the recorder, if there is one, is told the mass that they give."""
        if not ids:
            return
        seen, cache.recorder = cache.seen, recorder
        fed = torch.tensor([ids], device=self.model.focus.device)
        try:
            self.model.forward(fed, cache=cache, use_cache=True, logits_to_keep=1)
        finally:
            cache.recorder = None
        if recorder is not None:
            recorder.queries = cache.seen - seen

    def _catch_up(self, cache: FocusCache, ids: list[int]) -> None:
        """Feed what generate left unfed (its last token), so that the next question follows the whole answer."""
        with torch.no_grad():
            self._feed(ids[cache.seen :], cache, None)

    def _end_ids(self) -> set[int]:
        config: Any = self.model
        ends = config.generation_config.eos_token_id
        return set(ends if isinstance(ends, list) else [ends] if ends is not None else [])

    def _generation(self) -> dict[str, Any]:
        sampling = self.sampling
        pad = self.tokenizer.pad_token_id
        chosen: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "do_sample": sampling.temperature > 0,
            "pad_token_id": pad if pad is not None else self.tokenizer.eos_token_id,
        }
        if sampling.temperature > 0:
            torch.manual_seed(sampling.seed)
            chosen |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        return chosen

    def _prompt_ids(self, question: str) -> list[int]:
        """Tokens of the next turn, up to where the answer begins; later turns continue the first one's text."""
        tokenizer = self.tokenizer
        asked = {"role": "user", "content": question}
        if not getattr(tokenizer, "chat_template", None):
            if not self._ids:
                return list(tokenizer(f"Question: {question}\nAnswer:")["input_ids"])
            return list(tokenizer(f"\n\nQuestion: {question}\nAnswer:", add_special_tokens=False)["input_ids"])
        turns = [asked]
        if self._ids:
            turns = [{"role": "user", "content": "…"}, {"role": "assistant", "content": _ANSWER_MARK}, asked]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        if self._ids:
            text = text.partition(_ANSWER_MARK)[2]
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if self._ids and ids and ids[0] == self._ids[-1] and ids[0] in self._end_ids():
            ids = ids[1:]  # the answer said it ended; one that was cut off is ended here
        return ids
