"""Longfocus: a far longer context for pretrained decoder models, by the Focused Transformer method.

    model = longfocus.load("default")                      # or longfocus.attach(your_model, FocusConfig(...))
    memory = longfocus.Memory(model, tokenizer)
    longfocus.Reader(model, tokenizer, memory).read(source)
    model.generate(ids, memory=memory)

Names are resolved when they are first used, so that `import longfocus` and `longfocus --help` load no torch.
"""

from __future__ import annotations

import os as _os
import sys as _sys
from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if "torch" not in _sys.modules:
    # Read by torch's thread pool when it starts: threads that spin while they wait ruin latency beside a busy
    # neighbour (seen here: 60 s instead of 1.4 s). Values of the environment are left as they are.
    _os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _os.environ.setdefault("GOMP_SPINCOUNT", "0")

if TYPE_CHECKING:
    from longfocus.analysis.attribution import Passage as Passage
    from longfocus.answering import Answer as Answer
    from longfocus.answering import Conversation as Conversation
    from longfocus.answering import Sampling as Sampling
    from longfocus.attention import attend as attend
    from longfocus.attention import merge as merge
    from longfocus.config import FocusConfig as FocusConfig
    from longfocus.data.documents import Source as Source
    from longfocus.data.documents import find_sources as find_sources
    from longfocus.errors import LongfocusError as LongfocusError
    from longfocus.k_rule import KRule as KRule
    from longfocus.memory.distributed.memory import ShardedMemory as ShardedMemory
    from longfocus.memory.memory import Memory as Memory
    from longfocus.model.attach import attach as attach
    from longfocus.model.attach import detach as detach
    from longfocus.model.cache import FocusCache as FocusCache
    from longfocus.model.load import load as load
    from longfocus.model.load import load_tokenizer as load_tokenizer
    from longfocus.model.parallel_reading import read_in_parallel as read_in_parallel
    from longfocus.model.reading import Reader as Reader
    from longfocus.model.reading import read_ids as read_ids

_PUBLIC = {
    "Answer": "longfocus.answering",
    "Conversation": "longfocus.answering",
    "FocusCache": "longfocus.model.cache",
    "FocusConfig": "longfocus.config",
    "KRule": "longfocus.k_rule",
    "LongfocusError": "longfocus.errors",
    "Memory": "longfocus.memory.memory",
    "Passage": "longfocus.analysis.attribution",
    "Reader": "longfocus.model.reading",
    "Sampling": "longfocus.answering",
    "ShardedMemory": "longfocus.memory.distributed.memory",
    "Source": "longfocus.data.documents",
    "attach": "longfocus.model.attach",
    "attend": "longfocus.attention",
    "detach": "longfocus.model.attach",
    "find_sources": "longfocus.data.documents",
    "load": "longfocus.model.load",
    "load_tokenizer": "longfocus.model.load",
    "merge": "longfocus.attention",
    "read_ids": "longfocus.model.reading",
    "read_in_parallel": "longfocus.model.parallel_reading",
}

__all__ = sorted(_PUBLIC)

try:
    __version__ = _version("longfocus")
except _PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(_import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'longfocus' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
