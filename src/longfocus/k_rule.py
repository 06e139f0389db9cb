"""KRule: which queries need a memory at all, and how many of its keys. Plain data, checked when made, JSON both ways.

What it does is in `memory/adaptive_k.py`; `longfocus calibrate-k` makes one for a model. Like `config`, this does not import
torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longfocus.errors import ConfigError, InputError, did_you_mean
from longfocus.files import write_whole


@dataclass(frozen=True)
class KRule:
    """How top-k retrieval depends on the query.

    Raises:
        ConfigError: a value is impossible; the message names field, value and range.
    """

    skip_from: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(memory layer, a number for each query head), by layer. A query of a head whose normaliser over the local window (the
    logarithm, in nats, after `balance_tokens`) is this or more retrieves nothing. inf, and layers left out: never skipped."""

    least_share: float = 0.0
    """Retrieved keys that would receive less than this part of a query's attention (over its local keys and its k best) are not
    used. 0: all are."""

    window: int | None = None
    """Local window, in tokens, that the numbers of `skip_from` were found with. None: any."""

    balance_tokens: int | None = None
    """FocusConfig.balance_tokens that they were found with."""

    about: str = ""
    """How the rule was found, for people."""

    def __post_init__(self) -> None:
        rows = []
        for layer, numbers in self.skip_from:
            if not _is_whole(layer, 0):
                raise ConfigError(f"skip_from: {layer!r} is not a layer index; give whole numbers such as 6.")
            if not numbers or any(not _is_number(number) or not number > -math.inf for number in numbers):
                raise ConfigError(
                    f"skip_from: layer {layer}: {list(numbers)} given, expected a number for each query head, and for never inf (null in a file)."
                )
            rows.append((layer, tuple(float(number) for number in numbers)))
        if len({layer for layer, _ in rows}) != len(rows):
            raise ConfigError(f"skip_from: {[layer for layer, _ in rows]} names a layer twice.")
        object.__setattr__(self, "skip_from", tuple(sorted(rows)))
        if not _is_number(self.least_share) or not 0 <= self.least_share <= 1:
            raise ConfigError(f"least_share: {self.least_share!r} given, expected a number from 0 to 1.")
        for name in ("window", "balance_tokens"):
            value = getattr(self, name)
            if value is not None and not _is_whole(value, 1):
                raise ConfigError(f"{name}: {value!r} given, expected a whole number of 1 or more, or null.")
        if not isinstance(self.about, str):
            raise ConfigError(f"about: {self.about!r} given, expected a text.")

    def numbers(self, layer: int, heads: int) -> tuple[float, ...]:
        """`skip_from` of a layer with so many query heads."""
        return dict(self.skip_from).get(layer, (math.inf,) * heads)

    def check(self, layers: tuple[int, ...], heads: int, window: int, balance_tokens: int | None) -> None:
        """Whether the rule is for a model with these memory layers, query heads a layer and options.

        Raises:
            ConfigError: it is not.
        """
        wrong = [layer for layer, _ in self.skip_from if layer not in layers]
        if wrong:
            raise ConfigError(f"k_rule: layers {wrong} given, expected memory layers of the model: {list(layers)}.")
        for layer, numbers in self.skip_from:
            if len(numbers) != heads:
                raise ConfigError(
                    f"k_rule: {len(numbers)} numbers for layer {layer} given, expected one for each of its {heads} query heads."
                )
        if self.skip_from and self.balance_tokens != balance_tokens:
            raise ConfigError(
                f"k_rule: found with balance_tokens {self.balance_tokens}, and the model has {balance_tokens}, with which "
                "normalisers are others; calibrate one with these options (longfocus calibrate-k)."
            )
        if self.skip_from and self.window not in (None, window):
            raise ConfigError(
                f"k_rule: found with a window of {self.window} tokens, and the model has one of {window}; calibrate one with "
                "these options (longfocus calibrate-k)."
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, inf as None; `from_dict` gives an equal rule."""
        data = dataclasses.asdict(self)
        data["skip_from"] = {
            str(layer): [None if number == math.inf else number for number in numbers]
            for layer, numbers in self.skip_from
        }
        return data

    @classmethod
    def from_dict(cls, data: Any) -> KRule:
        """Inverse of `to_dict`.

        Raises:
            ConfigError: an unknown key, or a value of another kind.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"k_rule: {data!r} given, expected a rule as longfocus calibrate-k writes it.")
        known = [field.name for field in dataclasses.fields(cls)]
        for key in data:
            if key not in known:
                hint = did_you_mean(str(key), known)
                raise ConfigError(f"{key!r} is not a part of a k rule.{hint} Known: {', '.join(known)}.")
        by_layer = data.get("skip_from", {})
        if not isinstance(by_layer, Mapping) or not all(isinstance(row, (list, tuple)) for row in by_layer.values()):
            raise ConfigError(f"skip_from: {by_layer!r} given, expected layers, each with a list of numbers.")
        rows = []
        for layer, numbers in by_layer.items():
            if not str(layer).isdecimal():
                raise ConfigError(f"skip_from: {layer!r} is not a layer index; give whole numbers such as 6.")
            rows.append((int(layer), tuple(math.inf if number is None else number for number in numbers)))
        return cls(**{**data, "skip_from": tuple(rows)})

    @classmethod
    def read(cls, path: str | Path) -> KRule:
        """The rule in a file.

        Raises:
            InputError: there is no such file, or it is no rule; the message says what is wrong.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text("utf-8")))
        except OSError as error:
            raise InputError(
                f"{path}: {error.strerror or error}; give a file that longfocus calibrate-k wrote."
            ) from error
        except ConfigError as error:
            raise InputError(f"{path} holds no k rule: {error}") from error
        except ValueError as error:  # no JSON, or no UTF-8
            raise InputError(f"{path} holds no k rule, for it is not JSON: {error}") from error

    def write(self, path: str | Path) -> None:
        """Write it to a file, whole or not at all.

        Raises:
            InputError: the disk refused it.
        """
        try:
            write_whole(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror or error}.") from error


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
