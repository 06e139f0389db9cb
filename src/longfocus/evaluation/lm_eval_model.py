"""Our models inside lm-evaluation-harness: any of its tasks, with a memory and without.

    longfocus lm-eval --model_args pretrained=default --tasks hellaswag --limit 100
    longfocus lm-eval --model_args pretrained=default,plain=true --tasks hellaswag --limit 100

    from longfocus.evaluation.lm_eval_model import LongfocusLM
    lm_eval.simple_evaluate(model=LongfocusLM("path/to/model", memory_layers="6+17"), tasks=["hellaswag"])

Importing this module registers the model as `longfocus`; versions of lm_eval that have plug-ins find it by its entry
point. Inside one window, and for a plain model, the numbers are those of lm_eval's own `hf` model; beyond it the text
before the window is in memory (`subjects/scoring.py`). Nothing is cut off in silence: what is longer than `max_length` is
refused before the first token is computed, or with `truncation=true` cut from the left and counted in the results.

One process and one device; text tasks only.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from longfocus.config import FocusConfig
from longfocus.errors import ConfigError, UnsupportedCallError, did_you_mean
from longfocus.k_rule import KRule
from longfocus.model.load import load_tokenizer
from longfocus.settings import size_of
from longfocus.subjects.local import FocusedSubject, PlainModel
from longfocus.subjects.open import open_local
from longfocus.subjects.scoring import Score, Scorer, by_input, left_padded

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.models.utils_hf import stop_sequences_criteria
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm  # type: ignore[import-untyped]
except ImportError as error:
    raise ConfigError(
        f"lm-evaluation-harness cannot be used here ({error}): pip install 'longfocus[harness]'"
    ) from error

_LOG = logging.getLogger("lm_eval.longfocus")
NO_LIMIT = 1 << 40
"""`max_length` of a model with a memory, unless one is given."""


@register_model("longfocus")
class LongfocusLM(TemplateLM):
    """A model that runs here, plain or focused, as lm_eval wants it."""

    def __init__(
        self,
        pretrained: Any = "default",
        *,
        tokenizer: Any = None,
        plain: bool = False,
        dtype: str | None = None,
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | str | None = None,
        max_gen_toks: int = 256,
        truncation: bool = False,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        **focus: Any,
    ) -> None:
        """
        Args:
            pretrained: a folder, an adapter's folder, a hub id, `default`, `default-base`, or a model in evaluation
                mode (attached or not).
            tokenizer: a folder, a hub id or a tokenizer; needed with a model, else the model's own.
            plain: full attention, as transformers alone runs it.
            dtype: of the weights: float32, bfloat16 or float16; as stored unless given.
            device: cpu or cuda; the harness's own default, cuda:0, becomes cpu where there is no GPU.
            batch_size: texts computed together; those of a focused model that are longer than its window go alone.
            max_batch_size: of lm_eval; not used.
            max_length: most tokens that are fed for one request (`32k` too). Unless given, what a plain model's positions
                cover, and no limit for a model with a memory.
            max_gen_toks: longest answer in tokens, where a task says nothing.
            truncation: cut longer requests from the left and count them, instead of refusing.
            add_bos_token: put the tokenizer's special tokens around texts or not; as the tokenizer does unless given.
            prefix_token_id: token before a text without context; BOS, else EOS, unless given.
            focus: fields of FocusConfig that differ from the checkpoint's; layers also as `6+17`.

        Raises:
            ConfigError: an unknown or impossible argument.
            ModelNotFoundError, UnsupportedModelError: as `longfocus.load`.
        """
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ConfigError(f"batch_size: {batch_size!r} given, expected a whole number of 1 or more.")
        options = _focus_options(focus)
        if isinstance(pretrained, str):
            subject = open_local(pretrained, plain=plain, dtype=dtype, device=_device(device), **options)
        else:
            subject = _subject_of(pretrained, tokenizer, plain, {"dtype": dtype, **options})
        self.subject, self.model, self.scorer = subject, subject.model, Scorer(subject)
        given = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.tokenizer = given if given is not None else subject.tokenizer
        self.batch_size = int(batch_size)
        self.max_gen_toks, self.truncation, self.add_bos_token = int(max_gen_toks), truncation, add_bos_token
        self._device = torch.device(self.model.device)
        self._max_length = None if max_length is None else size_of(max_length)
        self._prefix_token_id = prefix_token_id
        self.counts = {"requests": 0, "longest_tokens": 0, "beyond_window": 0, "truncated": 0}
        """Of all requests so far; `beyond_window`: those of which a part was in memory."""
        if self._max_length is not None and subject.longest is not None and self._max_length > subject.longest:
            _LOG.warning(
                "max_length: %s given, but the positions of %s were made for %s tokens; beyond them it may fail.",
                *(f"{self._max_length:,}", subject.name, f"{subject.longest:,}"),
            )

    # -- what lm_eval asks of a model --------------------------------------------------------------------

    @property
    def max_length(self) -> int:
        """Most tokens that are fed for one request."""
        return self._max_length or self.subject.longest or NO_LIMIT

    @property
    def eot_token_id(self) -> int:
        """End of text."""
        known: int | None = self.tokenizer.eos_token_id
        return self.prefix_token_id if known is None else known

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text that has no context."""
        found = (self._prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        known = next((token for token in found if token is not None), None)
        if known is None:
            raise ConfigError("prefix_token_id: missing, and the tokenizer has neither BOS nor EOS.")
        return int(known)

    @property
    def tokenizer_name(self) -> str:
        """Names lm_eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; a text that spells the prefix token (a chat template does) gets no other."""
        wanted = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            wanted = False
        return list(self.tokenizer.encode(string, **({} if wanted is None else {"add_special_tokens": wanted})))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as one text; a template that knows no system messages gets none."""
        from jinja2 import TemplateError

        more = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **more))
        except TemplateError:
            without = [message for message in chat_history if message["role"] != "system"]
            if len(without) == len(chat_history):
                raise
            _LOG.warning("The chat template takes no system message; it is left out.")
            return str(self.tokenizer.apply_chat_template(without, tokenize=False, **more))

    def get_model_info(self) -> dict[str, Any]:
        """For lm_eval's results: what was measured, and how many requests were long."""
        about = self.subject.about()
        return {
            "model_num_parameters": about["parameters"],
            "model_dtype": about["dtype"],
            "max_length": None if self.max_length == NO_LIMIT else self.max_length,
            "longfocus": {**about, "requests": dict(self.counts)},
        }

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding gives it) of (texts, context, continuation), in their order."""
        contexts = self._fitted(
            [context for _, context, _ in requests], [max(0, len(rest) - 1) for *_, rest in requests], "request"
        )
        answers = [(0.0, True)] * len(requests)  # of no token at all, which a tokenizer may make of a continuation
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Log-likelihoods") as bar:
            for number, score in self._scores(contexts, [rest for *_, rest in requests]):
                answers[number] = (score.log_likelihood, score.greedy)
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], answers[number])
                bar.update()
        return answers

    @torch.no_grad()
    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts in nats. Each token is predicted once: by a plain model in parts of `max_length`
        tokens, each with the one token before it; by a focused model window by window, from the text before (of the
        part, where a `max_length` is given)."""
        totals = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Log-likelihoods of texts"):
            (text,) = request.args
            ids = self.tok_encode(text)
            parts = get_rolling_token_windows(ids, self.prefix_token_id, min(self.max_length, len(ids) + 1), 1)
            total = 0.0
            for context, rest in map(make_disjoint_window, parts):
                self._count(len(context) + len(rest) - 1)
                total += self.scorer.after(context, [rest])[0].log_likelihood
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            totals.append(total)
        return totals

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers up to a stop text; greedy unless the task or `--gen_kwargs` asks for sampling."""
        wanted = [normalize_gen_kwargs(request.args[1], self.max_gen_toks) for request in requests]
        encoded = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        prompts = self._fitted(encoded, [kwargs["max_gen_toks"] for kwargs in wanted], "prompt with its answer")
        order = sorted(range(len(prompts)), key=lambda number: (repr(wanted[number]), -len(prompts[number])))
        answers = [""] * len(prompts)
        with tqdm(total=len(prompts), disable=disable_tqdm, desc="Answers") as bar:
            while order:
                first = order[0]
                many = self.batch_size if self._in_window(len(prompts[first])) else 1
                numbers = [number for number in order[:many] if wanted[number] == wanted[first]]
                order = order[len(numbers) :]
                found = self._generate([prompts[number] for number in numbers], dict(wanted[first]))
                for number, text in zip(numbers, found, strict=True):
                    answers[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                bar.update(len(numbers))
        return answers

    # -- lengths -----------------------------------------------------------------------------------------

    def _fitted(self, contexts: Sequence[list[int]], rooms: Sequence[int], what: str) -> list[list[int]]:
        """Contexts as they are fed. Before anything is computed, so that hours are not lost at the longest one.

        Args:
            rooms: tokens that are fed after each.

        Raises:
            UnsupportedCallError: some are longer than `max_length`, and may not be cut or cannot be.
        """
        fitted, too_long = [], []
        for context, room in zip(contexts, rooms, strict=True):
            surplus = max(0, len(context) + room - self.max_length)
            if surplus:
                too_long.append(len(context) + room)
            if self.truncation and surplus >= len(context):
                raise UnsupportedCallError(
                    f"max_length: {self.max_length:,} given, but a {what} needs {room + 1:,} tokens even without what "
                    "could be cut."
                )
            fitted.append(context[surplus:])
            self._count(len(fitted[-1]) + room)
        many = [f"{number:,}" for number in (len(too_long), len(contexts), max(too_long, default=0), self.max_length)]
        if too_long and not self.truncation:
            raise UnsupportedCallError(
                "{} of {} requests are too long: the longest {what} takes {} tokens, max_length is {}. Give a larger "
                "max_length=N in --model_args, or truncation=true to cut them from the left.".format(*many, what=what)
            )
        if too_long:
            _LOG.warning("%s of %s requests, the longest of %s tokens, were cut from the left to max_length=%s.", *many)
            self.counts["truncated"] += len(too_long)
        return fitted

    def _count(self, fed: int) -> None:
        self.counts["requests"] += 1
        self.counts["longest_tokens"] = max(self.counts["longest_tokens"], fed)
        self.counts["beyond_window"] += not self._in_window(fed)

    def _in_window(self, tokens: int) -> bool:
        return self.scorer.window is None or tokens <= self.scorer.window

    # -- computing ---------------------------------------------------------------------------------------

    def _scores(self, contexts: Sequence[list[int]], rests: Sequence[list[int]]) -> Iterator[tuple[int, Score]]:
        """(number of the request, its score), longest contexts first; those without a token to predict are left out."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, context in enumerate(contexts):
            if rests[number]:
                groups.setdefault(tuple(context), []).append(number)
        waiting: list[tuple[tuple[int, ...], list[int]]] = []

        def batch() -> Iterator[tuple[int, Score]]:
            found = self.scorer.batch([(context, [rests[n] for n in numbers]) for context, numbers in waiting])
            for (_, numbers), scores in zip(waiting, found, strict=True):
                yield from zip(numbers, scores, strict=True)
            waiting.clear()

        for text, numbers in sorted(groups.items(), key=lambda group: -len(group[0])):
            mine = [rests[number] for number in numbers]
            if self.batch_size == 1 or not self._in_window(len(text) + max(map(len, mine)) - 1):
                yield from zip(numbers, self.scorer.after(text, mine), strict=True)
                continue
            for members in by_input(text, mine).values():
                waiting.append((text, [numbers[member] for member in members]))
                if len(waiting) == self.batch_size:
                    yield from batch()
        if waiting:
            yield from batch()

    def _generate(self, prompts: Sequence[list[int]], kwargs: dict[str, Any]) -> list[str]:
        """Answers to prompts that are generated with the same options."""
        words = self.tokenizer
        eos = words.decode([words.eos_token_id]) if words.eos_token_id is not None else None
        until = handle_stop_sequences(kwargs.pop("until"), eos)
        tokens = kwargs.pop("max_gen_toks")
        if not kwargs.get("do_sample"):
            kwargs.pop("temperature", None)
        pads = (words.pad_token_id, words.unk_token_id, words.eos_token_id, 0)
        pad = int(next(token for token in pads if token is not None))
        ids, mask = left_padded(prompts, pad, self._device)
        out = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            stopping_criteria=stop_sequences_criteria(words, until, ids.shape[1], ids.shape[0]),
            pad_token_id=pad,
            **kwargs,
        )
        said = [words.decode(row[ids.shape[1] :], skip_special_tokens=True) for row in out]
        return [postprocess_generated_text(text, until, None) for text in said]


def _device(wanted: str | None) -> str | None:
    """The device that there is."""
    if wanted is not None and wanted.startswith("cuda") and not torch.cuda.is_available():
        _LOG.info("device: %s given, but there is no GPU here; the CPU is used.", wanted)
        return None
    return wanted


def _focus_options(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of FocusConfig as lm_eval hands them on.

    Raises:
        ConfigError: an unknown name, or layers that are no numbers.
        InputError: the file of a k rule is not there, or damaged.
    """
    known = [field.name for field in dataclasses.fields(FocusConfig)]
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"model_args: {name!r} is not known.{hint} Options of the memory: {', '.join(known)}.")
    options = dict(given)
    layers = options.get("memory_layers")
    if isinstance(layers, (str, int)):
        try:
            options["memory_layers"] = [int(part) for part in str(layers).split("+")]
        except ValueError:
            raise ConfigError(f"memory_layers: {layers!r} given, expected numbers such as 6+17+18.") from None
    if isinstance(options.get("k_rule"), str):
        options["k_rule"] = KRule.read(options["k_rule"])
    return options


def _subject_of(model: Any, tokenizer: Any, plain: bool, options: dict[str, Any]) -> PlainModel | FocusedSubject:
    """A model that is loaded already."""
    if tokenizer is None:
        raise ConfigError("tokenizer: missing; a model that is loaded already needs its tokenizer beside it.")
    fixed = [name for name, value in options.items() if value is not None]
    if fixed:
        raise ConfigError(f"{', '.join(fixed)}: the model is loaded already, so these cannot be chosen.")
    if plain and hasattr(model, "focus"):
        raise ConfigError("plain: the model has memory layers; longfocus.detach(model) takes them off.")
    words = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    name = getattr(model, "name_or_path", "") or type(model).__name__
    return (FocusedSubject if hasattr(model, "focus") else PlainModel)(model, words, name)
