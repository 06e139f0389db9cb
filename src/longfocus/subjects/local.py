"""Models that run here: plain, as `transformers` alone runs them, and focused, with a memory."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers

import longfocus
from longfocus.analysis.attribution import token_mass, window_starts
from longfocus.data.documents import Source
from longfocus.errors import UnsupportedCallError
from longfocus.memory.context import MassRecorder
from longfocus.memory.fingerprint import model_fingerprint, tokenizer_fingerprint
from longfocus.memory.memory import Memory
from longfocus.model.cache import FocusCache
from longfocus.model.reading import Reader
from longfocus.model.reading_pass import pass_tokens, read_windows
from longfocus.model.windows import plan_steps
from longfocus.subjects.contract import BlockLosses, Completion, Prompt
from longfocus.subjects.scoring import Scorer
from longfocus.subjects.shared_reading import SharedReading

KEPT_DOCUMENT_TOKENS = 1 << 18
"""Encoded documents of prompts that are kept for the next prompts."""


class LocalModel:
    """What plain and focused models share."""

    kind = "plain"

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        """
        Args:
            model: in evaluation mode.
            tokenizer: its own.
            name: as tables call it.
        """
        self.model, self._tokenizer, self.name = model, tokenizer, name

    @property
    def tokenizer(self) -> Any:
        """The model's own."""
        return self._tokenizer

    @property
    def longest(self) -> int | None:
        """Tokens that the positions cover; None: no limit."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(limit) if limit else None

    def about(self) -> dict[str, Any]:
        """All that a result depends on."""
        return {
            "kind": self.kind,
            "name": self.name,
            "architecture": type(self.model).__name__.removeprefix("Focused"),
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "fingerprint": self.fingerprint,
            "tokenizer": tokenizer_fingerprint(self._tokenizer),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "longfocus": longfocus.__version__,
        }

    @property
    def fingerprint(self) -> str:
        """Digest of the weights."""
        return model_fingerprint(self.model)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the tokenizer puts in front.

        Raises:
            UnsupportedCallError: there are none.
        """
        ids = list(self._tokenizer(text)["input_ids"])
        if not ids:
            raise UnsupportedCallError(f"{self.name} was asked with an empty prompt; give at least one token.")
        return ids

    def _check_length(self, tokens: int, what: str) -> None:
        if self.longest is not None and tokens > self.longest:
            raise UnsupportedCallError(
                f"{self.name} takes {self.longest:,} tokens; {what} is {tokens:,}. Ask for shorter ones."
            )

    def _generate(
        self, ids: Sequence[int], max_new_tokens: int, stop: str | None, wanted: str | None = None, **more: Any
    ) -> str:
        """The answer, greedily."""
        given = torch.tensor([list(ids)], device=self.model.device)
        pad = self._tokenizer.pad_token_id
        criteria: list[Any] = [_Found(self._tokenizer, len(ids), stop)] if stop else []
        if wanted:
            criteria.append(_Decided(self._tokenizer, len(ids), wanted))
        out = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=pad if pad is not None else self._tokenizer.eos_token_id or 0,
            stopping_criteria=criteria,
            **more,
        )
        text = str(self._tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))
        found = re.search(stop, text) if stop else None
        return text[: found.end()] if found else text

    def _with_choices(self, text: str, choices: Sequence[str]) -> tuple[list[list[int]], int]:
        """Tokens of the prompt with each choice, and how many of the prompt's own all of them begin with."""
        assert choices and all(choices), "choices with text"
        ids = list(self._tokenizer(text)["input_ids"])
        wholes = [self.encode(text + choice) for choice in choices]
        begin = len(ids)
        for whole in wholes:
            begin = next((at for at, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), begin)
            ids = ids[:begin]
        return wholes, begin

    @torch.no_grad()
    def _losses_from(self, wholes: Sequence[list[int]], begin: int, memory: Memory | None = None) -> list[float]:
        """Summed losses of texts that begin alike, from token `begin` on; nothing predicts a text's first token."""
        scorer = Scorer(self)
        if begin:
            scores = scorer.after(wholes[0][:begin], [whole[begin:] for whole in wholes], memory)
            return [-score.log_likelihood for score in scores]
        rests = [(whole[:1], [whole[1:]]) for whole in wholes]
        return [-scorer.after(*rest, memory)[0].log_likelihood if rest[1][0] else 0.0 for rest in rests]


class _Found(transformers.StoppingCriteria):
    """Stop when a pattern is found in the answer."""

    def __init__(self, tokenizer: Any, prompt_tokens: int, pattern: str) -> None:
        self.tokenizer, self.prompt_tokens, self.pattern = tokenizer, prompt_tokens, re.compile(pattern)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = [self.tokenizer.decode(row[self.prompt_tokens :]) for row in input_ids]
        return torch.tensor([self.pattern.search(text) is not None for text in texts], device=input_ids.device)


class _Decided(transformers.StoppingCriteria):
    """Stop when an answer differs from the only one that counts, or holds all of it."""

    def __init__(self, tokenizer: Any, prompt_tokens: int, wanted: str) -> None:
        self.tokenizer, self.prompt_tokens, self.wanted = tokenizer, prompt_tokens, wanted.lstrip()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = [self.tokenizer.decode(row[self.prompt_tokens :]) for row in input_ids]
        so_far = [text.rstrip("\ufffd").lstrip() for text in texts]  # the last character may not be whole yet
        open_ones = [len(text) < len(self.wanted) and self.wanted.startswith(text) for text in so_far]
        return ~torch.tensor(open_ones, device=input_ids.device)


class PlainModel(LocalModel):
    """Full attention, as `transformers` alone would run it."""

    def complete(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, stop: str | None = None, mass: bool = False
    ) -> Iterator[Completion]:
        """See `contract.Completes`."""
        for prompt in prompts:
            begun = time.perf_counter()
            ids = self.encode(prompt.joined)
            self._check_length(len(ids) + max_new_tokens, "a prompt with its answer")
            text = self._generate(ids, max_new_tokens, stop, prompt.wanted)
            yield Completion(text, len(ids), time.perf_counter() - begun)

    @torch.no_grad()
    def block_losses(
        self,
        ids: Sequence[int],
        starts: Sequence[int],
        block: int,
        contexts: Sequence[int],
        before: Sequence[Sequence[int]] = (),
    ) -> Iterator[BlockLosses]:
        """See `contract.PredictsTokens`."""
        self._check_length(max(contexts) + block, "context and block")
        front = [token for document in before for token in document]
        for start in starts:
            told = list(ids[start : start + block])
            for context in contexts:
                seen = _last([*front, *ids[:start]], context)
                part = torch.tensor([[*seen, *told]], device=self.model.device)
                logits = self.model(part, use_cache=False, logits_to_keep=len(told)).logits
                yield BlockLosses(start, context, *_told(logits[0], part[0, -len(told) :]))

    def choice_losses(self, prompt: Prompt, choices: Sequence[str]) -> list[float]:
        """See `contract.PredictsTokens`; the prompt is read once."""
        wholes, begin = self._with_choices(prompt.joined, choices)
        self._check_length(max(map(len, wholes)), "a prompt with its answer")
        return self._losses_from(wholes, begin)


class FocusedSubject(LocalModel):
    """A model with memory layers: its window, and everything before in memory."""

    kind = "focused"

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        """
        Args:
            model: attached.
        """
        super().__init__(model, tokenizer, name)
        self._documents: dict[tuple[str, str], Memory] = {}
        self._joined: tuple[tuple[tuple[str, str], ...], Memory] | None = None
        self._front: tuple[tuple[tuple[int, ...], ...], Any] | None = None

    @property
    def longest(self) -> int | None:
        """No limit."""
        return None

    def about(self) -> dict[str, Any]:
        """All that a result depends on."""
        return {**super().about(), "focus": self.model.focus.config.to_dict()}

    @property
    def fingerprint(self) -> str:
        """Digest of the weights."""
        return str(self.model.focus.fingerprint)

    # -- text --------------------------------------------------------------------------------------------

    def complete(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, stop: str | None = None, mass: bool = False
    ) -> Iterator[Completion]:
        """See `contract.Completes`."""
        at = 0
        while at < len(prompts):
            end = at
            while end < len(prompts) and not prompts[end].documents:
                end += 1
            if end > at:
                yield from self._texts(prompts[at:end], max_new_tokens, stop)
            else:
                end += 1
                yield self._about_documents(prompts[at], max_new_tokens, stop, mass)
            at = end

    def _texts(self, prompts: Sequence[Prompt], max_new_tokens: int, stop: str | None) -> Iterator[Completion]:
        encoded = [self.encode(prompt.text) for prompt in prompts]
        caches = SharedReading(self.model).caches(encoded)
        for prompt, ids in zip(prompts, encoded, strict=True):
            begun = time.perf_counter()
            cache = next(caches)
            shared = cache.seen
            text = self._generate(ids, max_new_tokens, stop, prompt.wanted, cache=cache)
            local = plan_steps(len(ids), 0, self.model.focus.config)[-1].tokens
            seconds = time.perf_counter() - begun
            yield Completion(text, len(ids), seconds, self._character(prompt.text, len(ids) - local), None, shared)

    def _character(self, text: str, token: int) -> int:
        """First character of a token of a prompt."""
        encoded = self._tokenizer(text, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        return int(offsets[token][0]) if token < len(offsets) else len(text)

    def _about_documents(self, prompt: Prompt, max_new_tokens: int, stop: str | None, mass: bool) -> Completion:
        begun = time.perf_counter()
        memory = self.memory_of(prompt)
        cache = FocusCache(self.model.focus, memory)
        ids = self.encode(prompt.text)
        recorder = MassRecorder(memory.extent)
        if len(ids) > 1:  # so that only queries that produce answer tokens are recorded
            with torch.no_grad():
                fed = torch.tensor([ids[:-1]], device=self.model.focus.device)
                self.model.forward(fed, cache=cache, use_cache=True, logits_to_keep=1)
        local = self._local_from(prompt, ids, cache)
        seen = cache.seen
        cache.recorder = recorder if mass else None
        text = self._generate(ids, max_new_tokens, stop, prompt.wanted, cache=cache)
        shares = None
        if mass:
            recorder.queries = max(1, cache.seen - seen)
            received = np.where(window_starts(memory), 0.0, token_mass(recorder))
            total = received.sum()
            parts = [float(received[d.start : d.stop].sum()) for d in memory.documents]
            shares = tuple(part / total if total > 0 else 1 / len(parts) for part in parts)
        tokens = memory.tokens + len(ids)
        return Completion(text, tokens, time.perf_counter() - begun, local, shares, memory.tokens)

    def _local_from(self, prompt: Prompt, ids: Sequence[int], cache: FocusCache) -> int:
        """First local character of a prompt after documents, once its last token is read."""
        held = int(cache.local_tokens[0]) if cache.rows else 0
        local = held - plan_steps(1, held, self.model.focus.config)[-1].drop + 1
        before = sum(len(document) + 2 for document in prompt.documents)
        return before + self._character(prompt.text, len(ids) - local)

    def memory_of(self, prompt: Prompt) -> Memory:
        """A memory of a prompt's documents, each read by itself; kept while the next prompts want the same ones."""
        names = prompt.names or tuple(f"document {number + 1}" for number in range(len(prompt.documents)))
        keys = tuple(zip(names, prompt.documents, strict=True))
        if self._joined is not None and self._joined[0] == keys:
            return self._joined[1]
        self._joined = None
        for name, text in keys:
            if (name, text) not in self._documents:
                memory = Memory(self.model, self._tokenizer)
                Reader(self.model, self._tokenizer, memory).read(Source.of_text(name, text))
                self._documents[name, text] = memory
        joined = Memory.merge([self._documents[key] for key in keys], self.model, self._tokenizer)
        while sum(m.tokens for m in self._documents.values()) > KEPT_DOCUMENT_TOKENS and len(self._documents) > 1:
            self._documents.pop(next(iter(self._documents)))
        self._joined = (keys, joined)
        return joined

    # -- losses ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def block_losses(
        self,
        ids: Sequence[int],
        starts: Sequence[int],
        block: int,
        contexts: Sequence[int],
        before: Sequence[Sequence[int]] = (),
    ) -> Iterator[BlockLosses]:
        """See `contract.PredictsTokens`.

        A document is read once, window by window, as `longfocus remember` reads (a window looks back at what was read before
        it, or at `read_span`), and each block meets the last `context` records when reading gets there. The records
        themselves were encoded with all that reading saw.
        """
        config = self.model.focus.config
        window = config.window_tokens
        if config.overlap:
            raise UnsupportedCallError(
                f"{self.name} reads with an overlap of {config.overlap} tokens; blocks that begin afresh need overlap 0."
            )
        wrong = [start for start in starts if start % window]
        if block > window or wrong:
            raise UnsupportedCallError(
                f"{self.name} has a window of {window} tokens: blocks of {block} from {wrong[:1] or list(starts[:1])} on "
                "were asked for, expected blocks within one window that begin at its multiples."
            )
        key = tuple(map(tuple, before))
        store = self._store_after(key)
        front = store.tokens
        try:
            yield from self._blocks(store, ids, sorted(set(starts)), block, contexts)
        finally:
            if key:  # for the next call
                store.rewind(front)
                self._front = (key, store)

    def _blocks(
        self, store: Any, ids: Sequence[int], starts: Sequence[int], block: int, contexts: Sequence[int]
    ) -> Iterator[BlockLosses]:
        """Losses of blocks of a document that is read into a store behind what it holds."""
        front = store.tokens
        reading = FocusCache(self.model.focus, own=store, document_start=front)
        for start in starts:
            while store.tokens < front + start:
                at = store.tokens - front
                stop = min(at + pass_tokens(self.model.focus.config, at), starts[-1])
                read_windows(self.model, torch.tensor([list(ids[at:stop])]), reading)
            part = torch.tensor([list(ids[start : start + block])], device=self.model.device)
            for context in contexts:
                # a window that stays local writes nothing into the store that it reads from
                first, stop = max(0, front + start - context), front + start
                cache = FocusCache(self.model.focus, own=store, document_start=first, document_stop=stop)
                logits = self.model(part, cache=cache, use_cache=True).logits
                yield BlockLosses(start, context, *_told(logits[0], part[0]))

    def _store_after(self, before: tuple[tuple[int, ...], ...]) -> Any:
        """A store that holds other documents, each read by itself; the last call's, where it had the same ones."""
        known, self._front = self._front, None
        if known is not None and known[0] == before:
            return known[1]
        store = self.model.focus.new_store()
        for document in before:
            self._read_into(store, document)
        return store

    def _read_into(self, store: Any, ids: Sequence[int]) -> None:
        """Read a document by itself into a store that holds others."""
        cache = FocusCache(self.model.focus, own=store, document_start=store.tokens)
        read_windows(self.model, torch.tensor([list(ids)]), cache)

    def choice_losses(self, prompt: Prompt, choices: Sequence[str]) -> list[float]:
        """See `contract.PredictsTokens`; the prompt is read once, and each choice goes on from there as an answer does."""
        wholes, begin = self._with_choices(prompt.text, choices)
        return self._losses_from(wholes, begin, self.memory_of(prompt) if prompt.documents else None)


def _last(tokens: list[int], count: int) -> list[int]:
    return tokens[-count:] if count else []


def _nll(logits: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    """float64 (n - 1,): losses of all but the first target, from logits (n, vocabulary)."""
    assert logits.shape[0] == targets.shape[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1].float(), targets[1:].to(logits.device), reduction="none")
    return losses.double().cpu().numpy()


def _told(logits: torch.Tensor, targets: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """float64 (n - 1,) losses of all but the first target, and bool (n - 1,) whether it was the likeliest token."""
    return _nll(logits, targets), (logits[:-1].argmax(-1) == targets[1:].to(logits.device)).cpu().numpy()
