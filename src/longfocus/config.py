"""FocusConfig: what turns a base model into a focused one. Plain data, checked when made, JSON both ways.

It does not import torch, so a recipe can be validated before a model is loaded. Values that need the
model (the number of layers, its longest window) are checked in `resolve`, which `attach` calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from longfocus.errors import ConfigError, did_you_mean

Positions = Literal["first", "none", "absolute"]
Retrieval = Literal["dense", "exact", "approximate"]
Overflow = Literal["slide", "anchor", "all"]
WindowFirst = Literal["kept", "replaced"]
WEIGHT_DTYPES = ("float32", "float16", "bfloat16")
"""What weights may be loaded in."""
MEMORY_DTYPES = (*WEIGHT_DTYPES, "int8")
"""How memory keys and values may be stored."""
DEFAULT_WINDOW_TOKENS = 512
DENSE_UP_TO_TOKENS = 131_072
"""Memories that the command line attends to whole when it is to choose; larger ones are searched approximately."""


@dataclass(frozen=True)
class FocusConfig:
    """Options of a focused model (the method: Focused Transformer, arXiv 2307.03170, section 3).

    Raises:
        ConfigError: a value is impossible; the message names field, value and range.
    """

    memory_layers: tuple[int, ...] | None = None
    """Indices of the layers that also see the memory. None: at a quarter, half and three quarters of the depth."""

    window: int | None = None
    """Local window in tokens: what ordinary layers see. None: 512, or the model's longest window if shorter."""

    overlap: int = 0
    """Tokens of the previous window that ordinary layers keep as local context while a long text is read."""

    last_window: int | None = None
    """Tokens that stay local after a text longer than the window was read, and when generation has filled it.
    A text that fits stays local whole. None: at least half a window."""

    memory_positions: Positions = "first"
    """How memory keys are encoded. `first`: as if at position 0 of the window (the paper's fine-tuning).
    `none`: memory layers use no positions at all, local or memory (models trained so from scratch).
    `absolute`: at their true distance; only for an ablation that the paper never ran."""

    retrieval: Retrieval = "dense"
    """`dense`: attend to all of memory. `exact`: each query of each head takes its own k largest inner products.
    `approximate`: as `exact`, but what a saved or shared memory holds is found through an index (needs faiss). While
    windows are being read within `read_span`, and so near, it is dense; tokens outside an index are searched exactly."""

    k: int = 64
    """Keys per query and head under `exact` and `approximate` retrieval (the paper: 32, 64 or 128)."""

    rerank: int = 8
    """Candidates that an approximate search proposes for each of the k, and that are then scored exactly."""

    memory_dtype: str | None = None
    """Storage of memory keys and values: float32, float16, bfloat16, or int8 with a scale per token and head (half the
    bytes of float16). None: the model's own dtype."""

    memory_device: str | None = None
    """Where memory lies, for instance `cpu` while the model is on a GPU. None: where the model is."""

    read_span: int | None = None
    """While windows are being read into memory, consult at most this many of the nearest memory tokens.
    None: all of them (the method as published). Answering always consults all."""

    window_first: WindowFirst = "kept"
    """The first token of a window draws attention whatever it says (an attention sink), and a memory holds one for each window.
    `kept`: as the method is published. `replaced`: its place in memory holds the key and value of the token after it."""

    balance_tokens: int | None = None
    """With n tokens of memory in sight, each key of the local window counts 1 + n / balance_tokens times in memory layers, so that
    what many irrelevant keys draw does not grow with their number. None: once (the method as published)."""

    overflow: Overflow = "anchor"
    """When the window is full. `slide`: its older part moves to memory, the recent `last_window` stays local.
    `anchor`: the same, but the window's very first token stays among them: attention leans on it whatever it says, and a
    window that lost it predicts far worse (attention sinks, arXiv 2309.17453; `benchmarks/overflow.py`).
    With an overlap or absolute positions it is the same as `slide`.
    `all`: everything local moves at once and `last_window` also splits prompts that would fit, as in the
    authors' code; for released LongLLaMA checkpoints."""

    def __post_init__(self) -> None:
        if self.memory_layers is not None:
            layers = tuple(self.memory_layers)
            for layer in layers:
                if isinstance(layer, bool) or not isinstance(layer, int):
                    raise ConfigError(f"memory_layers: {layer!r} is not a layer index; give whole numbers such as 6.")
            if len(set(layers)) != len(layers):
                raise ConfigError(f"memory_layers: {list(layers)} names a layer twice.")
            object.__setattr__(self, "memory_layers", tuple(sorted(layers)))
        self._whole("window", minimum=2, optional=True)
        self._whole("overlap", minimum=0)
        self._whole("last_window", minimum=1, optional=True)
        self._whole("k", minimum=1)
        self._whole("rerank", minimum=1)
        self._whole("read_span", minimum=0, optional=True)
        self._whole("balance_tokens", minimum=1, optional=True)
        self._choice("memory_positions", get_args(Positions))
        self._choice("retrieval", get_args(Retrieval))
        self._choice("overflow", get_args(Overflow))
        self._choice("window_first", get_args(WindowFirst))
        if self.memory_dtype is not None:
            self._choice("memory_dtype", MEMORY_DTYPES)
        if self.window is not None:
            self._check_against_window(self.window)

    def _whole(self, name: str, *, minimum: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            allowed = f"a whole number of {minimum} or more" + (", or null" if optional else "")
            raise ConfigError(f"{name}: {value!r} given, expected {allowed}.")

    def _choice(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigError(f"{name}: {value!r} given, expected one of {', '.join(allowed)}.")

    def _check_against_window(self, window: int) -> None:
        if self.overlap >= window:
            raise ConfigError(f"overlap: {self.overlap} given, expected less than the window of {window} tokens.")
        if self.last_window is not None and self.last_window > window and self.overflow != "all":
            raise ConfigError(
                f"last_window: {self.last_window} given, expected at most the window of {window} tokens "
                "(only overflow='all', the authors' rule, allows more)."
            )

    def resolve(self, num_layers: int, longest_window: int | None) -> FocusConfig:
        """Fill in what depends on the model and check against it.

        Args:
            num_layers: layers of the model.
            longest_window: tokens that the model's positions were made for, or None where there is no limit.

        Raises:
            ConfigError: a layer index or the window is outside the model's range.
        """
        layers = self.memory_layers
        if layers is None:
            layers = tuple(sorted({min(num_layers - 1, round(num_layers * quarter / 4)) for quarter in (1, 2, 3)}))
        wrong = [layer for layer in layers if not 0 <= layer < num_layers]
        if wrong:
            raise ConfigError(f"memory_layers: {wrong} given, expected indices from 0 to {num_layers - 1}.")
        window = self.window
        if window is None:
            window = min(DEFAULT_WINDOW_TOKENS, longest_window or DEFAULT_WINDOW_TOKENS)
        elif longest_window is not None and window > longest_window:
            raise ConfigError(
                f"window: {window} given, expected at most the {longest_window} tokens that the model's positions cover."
            )
        self._check_against_window(window)
        return dataclasses.replace(self, memory_layers=layers, window=window)

    @property
    def anchored(self) -> bool:
        """Whether a window that overflows keeps its first token."""
        return self.overflow == "anchor" and self.overlap == 0 and self.memory_positions != "absolute"

    @property
    def layers(self) -> tuple[int, ...]:
        """Memory layers of a resolved config."""
        assert self.memory_layers is not None, "resolve() first"
        return self.memory_layers

    @property
    def window_tokens(self) -> int:
        """Local window of a resolved config, in tokens."""
        assert self.window is not None, "resolve() first"
        return self.window

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` gives an equal config."""
        data = dataclasses.asdict(self)
        if data["memory_layers"] is not None:
            data["memory_layers"] = list(data["memory_layers"])
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FocusConfig:
        """Inverse of `to_dict`.

        Raises:
            ConfigError: an unknown key; the message lists the known ones.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in data:
            if key not in known:
                hint = did_you_mean(key, known)
                raise ConfigError(f"{key!r} is not an option of FocusConfig.{hint} Known: {', '.join(known)}.")
        values = dict(data)
        layers = values.get("memory_layers")
        if layers is not None:
            if isinstance(layers, str) or not isinstance(layers, (list, tuple)):
                raise ConfigError(f"memory_layers: {layers!r} given, expected a list of layer indices.")
            values["memory_layers"] = tuple(layers)
        return cls(**values)
