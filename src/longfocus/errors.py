"""Errors that a user can meet. Every message says what was given, what was expected and what to do.

    LongfocusError                 anything below; the command line prints it in one line and exits with 2
    ├── ConfigError                an option is unknown, or its value impossible (also a ValueError)
    ├── UnsupportedModelError      this model cannot carry memory layers (raised when attaching)
    ├── UnsupportedCallError       the model can, but not with this argument (beams of a cropped cache, …)
    ├── ModelNotFoundError         no model at that path or id; names the command that brings the default one
    ├── InputError                 a text cannot be read: missing, empty, binary, unknown encoding, no permission
    ├── PromptTooLongError         the question does not fit the local window
    ├── TrainingError              a run cannot begin, go on or be resumed
    ├── EvaluationError            an evaluation cannot begin or be resumed
    │   ├── UnsuitableError        this task cannot be measured on this model, or at none of these lengths
    │   └── EndpointError          a model behind an endpoint cannot be reached, or refuses
    └── MemoryStoreError           a saved memory cannot be used
        ├── MemoryFormatError      truncated, corrupted, foreign or newer than this version
        ├── MemoryMismatchError    made by another model, other layers, another window or dtype
        ├── MemoryLockedError      another process is writing to it
        ├── MemoryWriteError       the disk refused: full, read-only, no permission
        ├── DocumentNotFoundError  no document of that name or pattern is in the memory
        └── ShardError             a part of a sharded memory does not answer, or Ray cannot be used

Programmers' mistakes inside the package are `assert`s, not members of this tree.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class LongfocusError(Exception):
    """Base of every error that is meant for a user."""


class ConfigError(LongfocusError, ValueError):
    """An option is unknown or its value impossible; raised at construction, before anything is loaded."""


class UnsupportedModelError(LongfocusError, TypeError):
    """The model's family, attention implementation or positions cannot carry memory layers."""


class UnsupportedCallError(LongfocusError, ValueError):
    """A call that memory attention cannot honour; never ignored in silence."""


class ModelNotFoundError(LongfocusError, FileNotFoundError):
    """No model at the given path or hub id."""


class InputError(LongfocusError):
    """A document cannot be read as text."""


class PromptTooLongError(LongfocusError, ValueError):
    """The question does not fit the local window."""


class TrainingError(LongfocusError, RuntimeError):
    """A training run cannot begin, go on or be resumed; its checkpoints are as they were."""


class EvaluationError(LongfocusError, RuntimeError):
    """An evaluation cannot begin, go on or be resumed; what it measured before is as it was."""


class UnsuitableError(EvaluationError):
    """A task needs what the model cannot do, or all its points are too long for it; `eval all` leaves it out."""


class EndpointError(EvaluationError):
    """A model behind an OpenAI-compatible endpoint cannot be reached, or refuses."""


class MemoryStoreError(LongfocusError):
    """A saved memory cannot be used."""


class MemoryFormatError(MemoryStoreError):
    """A file of a saved memory is truncated, corrupted, foreign or of a newer format."""


class MemoryMismatchError(MemoryStoreError, ValueError):
    """A memory was made by another model, other layers, another window or another dtype."""


class MemoryLockedError(MemoryStoreError):
    """Another process is writing to this memory."""


class MemoryWriteError(MemoryStoreError):
    """The disk refused a write; what was committed before is intact."""


class DocumentNotFoundError(MemoryStoreError, LookupError):
    """A memory holds no document of that name, and none that matches the pattern."""


class ShardError(MemoryStoreError):
    """A shard of a memory does not answer and cannot be started again, or the Ray that runs shards is not there."""


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The hint after an unknown name, for a name that is nearly a known one; else nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
