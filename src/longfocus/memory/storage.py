"""How memory keys and values are written: as plain numbers, or as int8 codes with a scale.

A storage dtype is one small class: `encode` writes vectors, `decode_into` reads them. Stores, files and retrieval know
nothing else of it. A further one is a class here, an entry in STORAGE_DTYPES and a name in `config.MEMORY_DTYPES`.

Every vector (the key or the value of one token in one head) is written by itself, and takes the same number of bytes.
So what is stored does not depend on how a text was cut into windows and appends, a record is copied as it is from one
memory into another, and a retrieved token is one read.

The form of int8. A vector x of D numbers, D a multiple of 8, is D signed bytes q, and x = q * scale(c), where c is the
vector's scale code, 0 to 254:

    scale(c) = 2 ** ((c - 176) / 8), rounded to float32      c = 255: no scale fits, all D numbers are nan
    c = the sum of (q[i] & 1) << i over i = 0 … 7

The scale is kept in the lowest bits of the vector's first eight bytes: those are rounded to the nearest whole number
whose lowest bit is the one to be kept. So they may be off by one step, scale(c), the others by half a step, and the
scales take no space: D bytes a vector, half of float16. With m the largest |x|, a step is between m / 127 and
m / 116 (for m above 3e-5; below, a step is 2.4e-7).

Why a scale per token and not one per channel and block of tokens (as KIVI has it for keys, arXiv 2402.02750): a block
would have to be closed, padded and written anew wherever a window, a document or a crop ends; and at equal bytes, on the
default model's keys and values of a novel and of code, attention was nearer to the exact one with a scale per token, for
keys and for values, than with blocks of 32 to 256 tokens. Not covered: models whose keys have a large constant part
(a bias) in a few channels, whose other channels a scale per token leaves few codes; per-channel offsets would be needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor


class StorageDtype(ABC):
    """How the vectors of a memory are written."""

    name: str
    """As `FocusConfig.memory_dtype` and a memory's geometry have it."""
    element: torch.dtype
    """Of the tensors that stores and files hold."""
    largest: float
    """The largest number that can be written."""

    def elements(self, head_dim: int) -> int:
        """Elements that a vector of `head_dim` numbers takes."""
        return head_dim

    def bytes(self, head_dim: int) -> int:
        """Bytes that a vector of `head_dim` numbers takes, scales included."""
        return self.elements(head_dim) * self.element.itemsize

    def why_not(self, head_dim: int) -> str | None:
        """Why vectors of this size cannot be written, for a message; None: they can."""
        return None

    def store(self, vectors: Tensor) -> Tensor:
        """What is to be stored of vectors (…, head_dim): (…, elements), on the same device; what has the element's dtype
        is stored already and is given back as it is."""
        return vectors if vectors.dtype == self.element else self.encode(vectors)

    @abstractmethod
    def encode(self, vectors: Tensor) -> Tensor:
        """Write vectors (…, head_dim) of any floating dtype: (…, elements)."""

    @abstractmethod
    def decode_into(self, out: Tensor, stored: Tensor) -> None:
        """Read stored vectors (…, elements) into `out` (…, head_dim), of any floating dtype, on any device."""


class Plain(StorageDtype):
    """The numbers themselves, rounded to a dtype."""

    def __init__(self, element: torch.dtype) -> None:
        self.name, self.element = str(element).removeprefix("torch."), element
        self.largest = torch.finfo(element).max

    def encode(self, vectors: Tensor) -> Tensor:
        return vectors.to(self.element)

    def decode_into(self, out: Tensor, stored: Tensor) -> None:
        out.copy_(stored)


class Int8(StorageDtype):
    """Signed bytes with a scale per token and head; the form is above."""

    name, element = "int8", torch.int8
    _SCALES = torch.from_numpy(np.append(np.exp2((np.arange(255) - 176) / 8), np.nan).astype(np.float32))
    _LARGEST = 127 * _SCALES[:255]  # number that is a code of 127 under each scale
    _BITS = torch.arange(8)
    _EACH_LOWEST, _GATHER = (
        0x0101010101010101,
        0x0102040810204080,
    )  # lowest bits of 8 bytes; times this, in the top byte
    largest = float(_LARGEST[-1])

    def why_not(self, head_dim: int) -> str | None:
        if head_dim % 8 == 0:
            return None
        return f"int8 needs heads of a multiple of 8 numbers, and this model's have {head_dim}; use float16"

    def encode(self, vectors: Tensor) -> Tensor:
        wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        limits = self._LARGEST.to(device=wide.device, dtype=wide.dtype)
        which = torch.searchsorted(limits, wide.abs().amax(-1, keepdim=True))  # 255 if none is large enough, or for nan
        codes = wide / self._scale(which).to(wide.dtype)
        bits = which >> self._BITS.to(which.device) & 1
        first = torch.round((codes[..., :8] - bits) / 2) * 2 + bits
        codes.round_()[..., :8] = torch.clamp(first, bits - 128, bits + 126)
        codes[..., :8] = torch.where(which == 255, bits.to(codes.dtype), codes[..., :8])
        return codes.nan_to_num_(0.0).to(torch.int8)

    def decode_into(self, out: Tensor, stored: Tensor) -> None:
        scale = self._scale(self._which(stored)).unsqueeze(-1)
        if out.dtype.itemsize < 4:  # a rounded scale would pull a whole vector to one side
            out.copy_(stored.to(torch.float32).mul_(scale))
            return
        out.copy_(stored)
        out.mul_(scale.to(out))

    def _scale(self, which: Tensor) -> Tensor:
        """float32, the shape of `which`."""
        scales = self._SCALES.to(which.device)
        return scales.index_select(0, which.reshape(-1)).view(which.shape)

    def _which(self, stored: Tensor) -> Tensor:
        """Scale codes int64 (…) of stored vectors int8 (…, D)."""
        lowest = stored.view(torch.int64).select(-1, 0) & self._EACH_LOWEST
        return lowest.mul_(self._GATHER).bitwise_right_shift_(56).bitwise_and_(255)


STORAGE_DTYPES: dict[str, StorageDtype] = {
    storage.name: storage
    for storage in (
        Plain(torch.float32),
        Plain(torch.float16),
        Plain(torch.bfloat16),
        Plain(torch.float64),  # of models that compute in it; not on offer as an option
        Int8(),
    )
}


def storage_dtype(name: str | torch.dtype) -> StorageDtype:
    """A storage dtype by its name, or the plain one of a torch dtype.

    Raises:
        ValueError: there is none of this name.
    """
    name = str(name).removeprefix("torch.")
    if name not in STORAGE_DTYPES:
        raise ValueError(f"the storage dtype {name!r} is not one of {', '.join(STORAGE_DTYPES)}")
    return STORAGE_DTYPES[name]
