"""A made-up dictionary in token ids: definitions, and questions about them (Focused Transformer, appendix F).

    definition   <define> k k k k <value> v v v v
    question     <ask>    k k k k <value> v v v v      the v are to be predicted

A training document is two windows of 256 tokens, one of definitions, one of questions; a longer dictionary has more windows
of definitions, and the questions stay its last window. The model that answers was trained on such documents; nothing here
is text, and no tokenizer is needed.

    made = Dictionary(DictionaryFormat(), "seed 7")
    made.window(0)                     # int64 (256,), 25 definitions
    made.questions([3, 17])            # int64 (20,), two questions with their answers
    DictionaryDocuments(DictionaryFormat(), seed=7).document(0)      # int64 (512,), a source for `Mixture`

From the paper: three special tokens, four value tokens, documents of 512 tokens whose first half defines and whose second
half asks, loss on the values asked for only. Chosen here, where our notes on it are silent: keys of four tokens like values;
60 symbols, so that the vocabulary is 64; keys never repeat in a dictionary (a question has one answer) and values
are drawn uniformly; records are never cut by a window's end, and the six tokens that are left at the end of each window hold a
filler, a fourth special token; a training document asks for each of its definitions once, in random order, so that no
answer stands among the questions.

Everything is a function of (format, seed, number): no list of used keys is kept, and the millionth window costs what the
first does. Keys are a pseudo-random permutation of all keys (a Feistel network), values a hash of the number.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longfocus.errors import ConfigError

_ROUNDS = 6
_MOST_KEYS = 1 << 62


@dataclass(frozen=True)
class DictionaryFormat:
    """How records are written.

    Raises:
        ConfigError: a number is out of range, or a window holds no record.
    """

    symbols: int = 60
    """Ids that keys and values are made of: first_id … first_id + symbols - 1; four special ones follow."""
    key_tokens: int = 4
    value_tokens: int = 4
    first_id: int = 0
    window: int = 256
    """Tokens of a block of definitions or questions."""

    def __post_init__(self) -> None:
        for name, least in (("symbols", 2), ("key_tokens", 1), ("value_tokens", 1), ("first_id", 0), ("window", 1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name}: {value} given, expected {least} or more.")
        if self.window < self.record_tokens:
            raise ConfigError(f"window: {self.window} given, but a record is {self.record_tokens} tokens long.")
        if self.keys > _MOST_KEYS:
            raise ConfigError(f"symbols ** key_tokens is {self.keys:,}, expected at most 2 ** 62.")
        if self.keys < self.records:
            raise ConfigError(f"{self.symbols} symbols make {self.keys} keys, but one window defines {self.records}.")

    @property
    def define(self) -> int:
        """Id that begins a definition."""
        return self.first_id + self.symbols

    @property
    def value(self) -> int:
        """Id between key and value."""
        return self.define + 1

    @property
    def ask(self) -> int:
        """Id that begins a question."""
        return self.define + 2

    @property
    def filler(self) -> int:
        """Id of what is left at a window's end."""
        return self.define + 3

    @property
    def vocabulary(self) -> int:
        """Ids that a model must have: one more than the largest."""
        return self.define + 4

    @property
    def record_tokens(self) -> int:
        """Tokens of a definition, and of a question with its answer."""
        return self.key_tokens + self.value_tokens + 2

    @property
    def records(self) -> int:
        """Records of a window."""
        return self.window // self.record_tokens

    @property
    def keys(self) -> int:
        """Different keys that there are."""
        return int(self.symbols**self.key_tokens)

    def answers(self, ids: np.ndarray) -> np.ndarray:
        """bool, shaped as ids (…, tokens): the tokens that a loss is taken on, values of questions."""
        found = np.zeros(ids.shape, dtype=bool)
        first = self.key_tokens + 2
        for distance in range(first, first + self.value_tokens):
            found[..., distance:] |= ids[..., : ids.shape[-1] - distance] == self.ask
        return found


class Dictionary:
    """Definitions 0, 1, 2, …, as many as there are keys."""

    def __init__(self, form: DictionaryFormat, seed: str) -> None:
        """
        Args:
            seed: any text; another text is another dictionary.
        """
        self.form = form
        rng = random.Random(seed)
        self._keys = _Permutation(form.keys, rng)
        self._values = np.uint64(rng.getrandbits(64))

    def keys(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 (n, key_tokens): the keys of definitions; no two are equal.

        Raises:
            ConfigError: there are not so many keys.
        """
        form, at = self.form, np.asarray(numbers, dtype=np.int64)
        if len(at) and int(at.max()) >= form.keys:
            raise ConfigError(
                f"{form.symbols} symbols make {form.keys:,} keys, and definition {int(at.max()):,} needs another; give more "
                "symbols or key tokens."
            )
        left = self._keys(at.astype(np.uint64))
        digits = []
        for _ in range(form.key_tokens):
            left, digit = np.divmod(left, np.uint64(form.symbols))
            digits.append(digit.astype(np.int64))
        return np.stack(digits, -1) + form.first_id

    def values(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 (n, value_tokens): the values of definitions."""
        form, at = self.form, np.asarray(numbers, dtype=np.uint64)
        places = np.arange(1, form.value_tokens + 1, dtype=np.uint64)
        drawn = _mix(_mix(at + self._values)[:, None] + places)
        return (drawn % np.uint64(form.symbols)).astype(np.int64) + form.first_id

    def records(self, numbers: Sequence[int] | np.ndarray, begin: int) -> np.ndarray:
        """int64 (n, record_tokens), each begun with the id `begin`."""
        count = len(numbers)
        parts = (
            np.full((count, 1), begin),
            self.keys(numbers),
            np.full((count, 1), self.form.value),
            self.values(numbers),
        )
        return np.concatenate(parts, 1)

    def window(self, number: int) -> np.ndarray:
        """int64 (window,): one block of definitions, number * records … (number + 1) * records - 1."""
        form = self.form
        numbers = np.arange(number * form.records, (number + 1) * form.records)
        return self._filled(self.records(numbers, form.define))

    def questions(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 (n * record_tokens,): questions about definitions, with their answers."""
        return self.records(numbers, self.form.ask).reshape(-1)

    def _filled(self, records: np.ndarray) -> np.ndarray:
        window = np.full(self.form.window, self.form.filler, dtype=np.int64)
        window[: records.size] = records.reshape(-1)
        return window

    def document(self, asked: Sequence[int]) -> np.ndarray:
        """int64 (2 * window,): the first block of definitions and questions about them."""
        return np.concatenate((self.window(0), self._filled(self.records(asked, self.form.ask))))


class DictionaryDocuments:
    """Training documents, each a dictionary of its own; an endless source for `Mixture`."""

    documents = None

    def __init__(self, form: DictionaryFormat, *, seed: int, name: str = "dictionary") -> None:
        self.form, self.seed, self.name = form, seed, name

    def document(self, number: int) -> np.ndarray:
        """int64 (2 * window,): definitions, then each of them asked for once."""
        asked = list(range(self.form.records))
        random.Random(f"{self.seed} {number} order").shuffle(asked)
        return Dictionary(self.form, f"{self.seed} {number}").document(asked)

    def targets(self, tokens: np.ndarray) -> np.ndarray:
        """bool, shaped as tokens (rows, window): those that a loss is taken on."""
        return self.form.answers(tokens)


class _Permutation:
    """A pseudo-random one-to-one map of 0 … size - 1."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self.size = size
        half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half, self._low = np.uint64(half), np.uint64((1 << half) - 1)
        self._seeds = [np.uint64(rng.getrandbits(64)) for _ in range(_ROUNDS)]

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """uint64 (n,) -> uint64 (n,)."""
        found = self._once(numbers)
        while (outside := found >= np.uint64(self.size)).any():  # walk on until back inside: still one-to-one
            found[outside] = self._once(found[outside])
        return found

    def _once(self, numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> self._half, numbers & self._low
        for seed in self._seeds:
            left, right = right, left ^ (_mix(right + seed) & self._low)
        return (left << self._half) | right


def _mix(numbers: np.ndarray) -> np.ndarray:
    """uint64 arrays to uint64, every bit depending on every bit (the finaliser of SplitMix64, Steele et al. 2014)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
