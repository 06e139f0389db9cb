"""MemoryGeometry: what a memory and a model must agree on before one may read the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longfocus.errors import MemoryMismatchError
from longfocus.memory.storage import storage_dtype

_MEANING = {
    "model": "the model's weights",
    "model_dtype": "the dtype the model computed in",
    "layers": "the memory layers",
    "kv_heads": "the number of key/value heads",
    "head_dim": "the size of a head",
    "dtype": "the storage dtype",
    "window": "the local window",
    "overlap": "the overlap of windows",
    "memory_positions": "the encoding of memory keys",
    "tokenizer": "the tokenizer",
}


@dataclass(frozen=True)
class MemoryGeometry:
    """Fields that shape or give meaning to memory records; JSON both ways."""

    model: str
    """Fingerprint of the weights."""
    model_name: str
    """For people; not compared."""
    model_dtype: str
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    """Storage dtype of records."""
    window: int
    """Tokens."""
    overlap: int
    """Tokens."""
    memory_positions: str
    tokenizer: str | None = None
    """Fingerprint of the tokenizer that cut the text; None where only token ids were given."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all memory layers."""
        return len(self.layers) * 2 * self.kv_heads * storage_dtype(self.dtype).bytes(self.head_dim)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**dataclasses.asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MemoryGeometry:
        """Inverse of `to_dict`; unknown or missing keys raise TypeError, an unknown storage dtype ValueError."""
        storage_dtype(data["dtype"])
        return cls(**{**data, "layers": tuple(data["layers"])})

    def check(self, other: MemoryGeometry, what: str) -> None:
        """Compare a memory (self) with what a model or another memory expects.

        Args:
            other: the expected geometry; a tokenizer of None is not compared.
            what: names the memory in the message.

        Raises:
            MemoryMismatchError: names each field that differs, with both values.
        """
        wrong = []
        for name, meaning in _MEANING.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "tokenizer" and (mine is None or theirs is None):
                continue
            if mine != theirs:
                if name == "model":
                    mine, theirs = f"{self.model_name} ({mine[:8]})", f"{other.model_name} ({theirs[:8]})"
                wrong.append(f"{meaning} (made with {_plain(mine)}, now {_plain(theirs)})")
        if wrong:
            raise MemoryMismatchError(
                f"{what} cannot be read by this model: it differs in {'; '.join(wrong)}. "
                "Use the model and options that it was made with, or remember the texts again."
            )


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
