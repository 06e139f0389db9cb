"""Speed and memory of reading and answering, by context length."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field

from longfocus.errors import UnsuitableError
from longfocus.process_memory import forget_peak, peak_bytes, resident_bytes, return_freed
from longfocus.settings import Sizes
from longfocus.subjects.contract import Completes
from longfocus.subjects.local import FocusedSubject, LocalModel
from longfocus.tasks.contract import Measure, Point, Row, Sample, Task, TaskOptions
from longfocus.tasks.statistics import median_of

PREFILL, DECODE, PEAK, PER_TOKEN = "prefill tokens/s", "decode tokens/s", "peak MB over the model", "KB a token"
_WARM_UP_TOKENS = 1024


class CostOptions(TaskOptions):
    """Options of `cost`."""

    lengths: Sizes = [2048, 8192, 32768]
    """Prompt lengths in tokens."""
    samples: Annotated[int, Field(ge=1)] = 6
    """Repeats a length; fewer than 6 medians have no interval."""
    new_tokens: Annotated[int, Field(ge=1)] = 16
    """Tokens generated after each prompt."""


class Cost(Task):
    """A model that runs here reads a prompt of random tokens and generates some more; medians of several repeats.

    For each length N:

        prefill tokens/s         N over the seconds until the first token is known
        decode tokens/s          one over the median seconds of a token after that
        peak MB over the model   the most memory in use meanwhile, less what the loaded model takes (1 MB: 2^20 bytes)
        KB a token               keys and values that a token leaves behind (1 KB: 1,024 bytes): in a focused model's memory,
                                 memory layers x 2 x key/value heads x head size x bytes of a number; in a plain
                                 model's cache the same with all layers

    The cost does not depend on which tokens they are, and no data set is needed. Speeds are those of this machine with its
    threads and whatever else it does; both are in the results. The peak is what Linux says of this process, set back
    before each repeat, or what torch has allocated on a GPU; where neither is known it is left out.
    """

    name, title = "cost", "Speed and memory"
    paper = "A protocol of our own: the Focused Transformer paper (arXiv 2307.03170) reports no speed or memory of inference"
    axes: tuple[str, ...] = ("tokens",)
    measures = (
        Measure(PREFILL, "number", "higher", drawn=True),
        Measure(DECODE, "number", "higher", drawn=True),
        Measure(PEAK, "number", "lower", drawn=True),
        Measure(PER_TOKEN, "number", "lower", drawn=True),
    )
    Options = CostOptions
    quick = {"lengths": [1024, 4096], "samples": 2}

    def points(self, subject: Completes) -> Sequence[Point]:
        """Each length.

        Raises:
            UnsuitableError: the model runs elsewhere.
        """
        if not isinstance(subject, LocalModel):
            raise UnsuitableError(
                f"{self.name} cannot be measured on {subject.name}: it takes its time and memory elsewhere; give a model that "
                "runs here."
            )
        options: CostOptions = self.options
        return [Point({"tokens": tokens}, options.samples, tokens + options.new_tokens) for tokens in options.lengths]

    def samples(self, subject: Any, point: Point, done: frozenset[str]) -> Iterator[Sample]:
        """Repeats, after one that is not counted."""
        tokens, wanted = int(point.values["tokens"]), int(self.options.new_tokens)
        numbers = [number for number in range(self.options.samples) if f"{number}" not in done]
        if numbers:
            measure(subject, self._ids(subject, min(tokens, _WARM_UP_TOKENS), "warm-up"), 2)
        for number in numbers:
            scores, details = measure(subject, self._ids(subject, tokens, number), wanted)
            yield Sample(f"{number}", point.values, scores, details=details)

    def _ids(self, subject: Any, tokens: int, number: int | str) -> list[int]:
        size = int(subject.model.config.get_text_config().vocab_size)
        return random.Random(f"{self.options.seed} {tokens} {number}").choices(range(size), k=tokens)

    def row(self, group: Sequence[Sample]) -> Row:
        """Medians: one repeat that was disturbed does not count."""
        estimates = {
            m.name: median_of([sample.scores[m.name] for sample in group if m.name in sample.scores])
            for m in self.measures
            if any(m.name in sample.scores for sample in group)
        }
        return Row(group[0].values, len(group), estimates)


@torch.no_grad()
def measure(subject: LocalModel, ids: Sequence[int], new_tokens: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Read a prompt and go on greedily, once.

    Returns:
        scores, by measure; and details: seconds, and bytes where they are known.
    """
    model: Any = subject.model
    fed = torch.tensor([list(ids)], device=model.device)
    watch = _Peak(model.device)
    cache = _new_cache(subject)
    seconds = []
    for _ in range(1 + new_tokens):
        begun = time.perf_counter()
        logits = model(fed, cache=cache, use_cache=True, logits_to_keep=1).logits
        fed = logits[:, -1:].argmax(-1)
        _wait(model.device)
        seconds.append(time.perf_counter() - begun)
    peak = watch.bytes()
    kept = bytes_per_token(subject, cache)
    scores = {
        PREFILL: len(ids) / seconds[0],
        DECODE: 1 / statistics.median(seconds[1:]),
        PER_TOKEN: kept / 1024,
    }
    details: dict[str, Any] = {
        "prefill_seconds": round(seconds[0], 4),
        "decode_seconds": [round(taken, 5) for taken in seconds[1:]],
        "bytes_per_token": kept,
    }
    if peak is not None:
        scores[PEAK] = peak / 2**20
        details["peak_bytes"] = peak
    return scores, details


def bytes_per_token(subject: LocalModel, cache: Any) -> float:
    """What each token adds for good: to a focused model's memory, or to the cache of a plain one that has read some."""
    if isinstance(subject, FocusedSubject):
        return float(subject.model.focus.geometry.bytes_per_token)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return float(held / cache.get_seq_length())


def _new_cache(subject: LocalModel) -> Any:
    if isinstance(subject, FocusedSubject):
        return subject.model.new_cache()
    from transformers import DynamicCache

    return DynamicCache(config=subject.model.config)


def _wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Peak:
    """The most memory in use from now on, over what is in use now."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        return_freed()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        else:
            self.known = forget_peak()
            self.before = resident_bytes()

    def bytes(self) -> int | None:
        """None where the system does not say."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return max(0, peak_bytes() - self.before) if self.known and self.before else None
