"""An index beside a saved memory's files: a cache, which the memory does not need and which is never trusted unseen.

The format, described for other programs in docs/formats.md. In the memory's folder, for its generation G:

    index.G.json       the header: what the index is of, how much it covers, checksums; written whole, and last
    index-008.G.bin    of memory layer 8: rotations, centroids and lists, then blocks of codes; only appended to, until it is made anew

Codes are appended and synced before the header that counts them is moved into place. So a kill leaves the index as it was,
or none while it is made anew. A header or file that is missing, damaged, of another format or
of other records is a reason to make the index again, and never an error.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from longfocus.files import write_whole
from longfocus.memory.approximate import MemoryIndex
from longfocus.memory.quantiser import BLOCK_TOKENS, Quantiser

FORMAT, VERSION = "longfocus-index", 2
KIND = "ivf-pq4"
_LEAST_ALIKE = 0.9
"""Share of bytes of a block's codes that must come out the same when it is encoded again: rounding may differ between
machines, records may not."""


class IndexFiles:
    """Reads and writes the index of one generation of a memory."""

    def __init__(self, folder: Path, generation: int) -> None:
        self.folder, self.generation = folder, generation
        self.problem: str | None = None
        """Why `load` gave no index, for people; None: it did, or there is no file."""

    @property
    def header_file(self) -> Path:
        return self.folder / f"index.{self.generation}.json"

    def layer_file(self, layer: int) -> Path:
        """Centroids and codes of a layer."""
        return self.folder / f"index-{layer:03d}.{self.generation}.bin"

    def load(self, index: MemoryIndex, tokens: int) -> bool:
        """Fill a fresh index with what is saved; its codes stay in the files, mapped.

        Args:
            tokens: committed records of the memory.

        Returns:
            Whether there was a usable one; `problem` says why not.
        """
        self.problem = None
        try:
            header = self._header()
            if header is None:
                return False
            self._check(header, index)
            quantisers, piece = self._read(header, index, verify=True)
        except KeyError as error:
            self.problem = f"{self.header_file.name} lacks {error}"
            return False
        except (OSError, ValueError, TypeError) as error:
            self.problem = str(error) or type(error).__name__
            return False
        covered = min(header["tokens"], tokens // BLOCK_TOKENS * BLOCK_TOKENS)  # a writer may have added since
        index.quantisers, index.pieces = (
            quantisers,
            [{at: codes[: covered // BLOCK_TOKENS] for at, codes in piece.items()}],
        )
        index.covered, index.trained_on = covered, header["trained_on"]
        self.problem = self._compare(index)
        if self.problem is not None:
            index.quantisers, index.pieces, index.covered, index.trained_on = {}, [], 0, 0
        return self.problem is None

    def save(self, index: MemoryIndex) -> None:
        """Make the files hold what the index holds, writing only what is new; then map the codes from there.

        Raises:
            OSError: the disk refused; there is the saved index as it was, or none.
        """
        if not index.trained_on:
            return
        try:
            header = self._write(index)
        except OSError:
            if not self.header_file.exists():  # nothing would use what was written
                for layer in index.geometry.layers:
                    self.layer_file(layer).unlink(missing_ok=True)
                    self._unfinished(layer).unlink(missing_ok=True)
            raise
        self.problem = None
        index.pieces = [self._read(header, index, verify=False)[1]]

    # -- parts -------------------------------------------------------------------------------------------

    def _write(self, index: MemoryIndex) -> dict[str, Any]:
        """Write what is new; the header."""
        header = self._usable_header(index)
        if header is None:
            self.header_file.unlink(missing_ok=True)
            header = {
                "format": FORMAT,
                "version": VERSION,
                "kind": KIND,
                "block_tokens": BLOCK_TOKENS,
                "layers": list(index.geometry.layers),
                "kv_heads": index.geometry.kv_heads,
                "head_dim": index.geometry.head_dim,
                "lists": _lists_of(index),
                "trained_on": index.trained_on,
                "tokens": 0,
                "crc": {
                    self._name(layer): self._begin(layer, quantisers) for layer, quantisers in index.quantisers.items()
                },
            }
        done = header["tokens"] // BLOCK_TOKENS
        if header["tokens"] < index.covered:
            for layer in index.geometry.layers:
                name = self._name(layer)
                header["crc"][name] = self._append(layer, index, done, header["crc"][name])
            header["tokens"] = index.covered
            write_whole(self.header_file, json.dumps(header, indent=1) + "\n")
        return header

    def _unfinished(self, layer: int) -> Path:
        path = self.layer_file(layer)
        return path.with_name(path.name + ".new")

    @staticmethod
    def _name(layer: int) -> str:
        return f"index-{layer:03d}"

    def _header(self) -> dict[str, Any] | None:
        try:
            data = self.header_file.read_bytes()
        except FileNotFoundError:
            return None
        try:
            header = json.loads(data)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ValueError(f"{self.header_file.name} is not the header of an index")
        return header

    def _check(self, header: dict[str, Any], index: MemoryIndex) -> None:
        geometry = index.geometry
        expected: dict[str, Any] = {
            "version": VERSION,
            "kind": KIND,
            "block_tokens": BLOCK_TOKENS,
            "layers": list(geometry.layers),
            "kv_heads": geometry.kv_heads,
            "head_dim": geometry.head_dim,
        }
        for name, value in expected.items():
            if header[name] != value:
                raise ValueError(f"{self.header_file.name} has {name} {header[name]!r}, expected {value!r}")
        for name in ("tokens", "trained_on", "lists"):
            if isinstance(header[name], bool) or not isinstance(header[name], int) or header[name] < 0:
                raise ValueError(f"{self.header_file.name} has {name} {header[name]!r}")
        if not isinstance(header["crc"], dict):
            raise ValueError(f"{self.header_file.name} has crc {header['crc']!r}, expected one of each layer's file")
        if not header["trained_on"] or not header["lists"]:
            raise ValueError(f"{self.header_file.name} is of an index that was not trained")
        if header["tokens"] % BLOCK_TOKENS:
            raise ValueError(f"{self.header_file.name} covers {header['tokens']} tokens, not whole blocks")

    def _read(
        self, header: dict[str, Any], index: MemoryIndex, *, verify: bool
    ) -> tuple[dict[int, list[Quantiser]], dict[int, np.ndarray]]:
        """Quantisers and mapped codes of all layers; ValueError where a file is not what the header says."""
        geometry, blocks = index.geometry, header["tokens"] // BLOCK_TOKENS
        shape = (geometry.kv_heads, Quantiser.numbers(geometry.head_dim, header["lists"]))
        begin = 4 * shape[0] * shape[1]
        quantisers, piece = {}, {}
        for layer in geometry.layers:
            path = self.layer_file(layer)
            size = begin + blocks * geometry.kv_heads * Quantiser.block_bytes(geometry.head_dim)
            if path.stat().st_size < size:
                raise ValueError(f"{path.name} is truncated")
            whole = np.memmap(path, np.uint8, "r", shape=(size,))
            if verify and zlib.crc32(whole.data) != header["crc"][self._name(layer)]:
                raise ValueError(f"{path.name} is corrupted")
            blocks_of = whole[begin:].reshape(blocks, geometry.kv_heads, -1)
            if verify and blocks and Quantiser.last_list(blocks_of, geometry.head_dim) >= header["lists"]:
                raise ValueError(f"{path.name} is corrupted")
            numbers = np.frombuffer(whole[:begin].tobytes(), "<f4").reshape(shape)
            quantisers[layer] = [Quantiser.from_array(each, geometry.head_dim) for each in numbers]
            piece[layer] = blocks_of
        return quantisers, piece

    def _compare(self, index: MemoryIndex) -> str | None:
        """Why the codes are not those of the memory's records, judged by the first and the last block; None: they are."""
        for start in {0, index.covered - BLOCK_TOKENS} if index.covered else ():
            again = index.encode(start, start + BLOCK_TOKENS)
            for layer, codes in index.pieces[0].items():
                if (again[layer][0] == codes[start // BLOCK_TOKENS]).mean() < _LEAST_ALIKE:
                    return f"{self.layer_file(layer).name} is of other records"
        return None

    def _usable_header(self, index: MemoryIndex) -> dict[str, Any] | None:
        """The header of the files, if they hold the beginning of this index."""
        try:
            header = self._header()
            if header is None:
                return None
            self._check(header, index)
            same = header["trained_on"] == index.trained_on and header["tokens"] <= index.covered
            same = same and header["lists"] == _lists_of(index)
            for layer, quantisers in index.quantisers.items():
                numbers = self._numbers(quantisers)
                with self.layer_file(layer).open("rb") as file:
                    same = same and file.read(len(numbers)) == numbers
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return header if same and self.problem is None else None

    @staticmethod
    def _numbers(quantisers: list[Quantiser]) -> bytes:
        return np.stack([each.to_array() for each in quantisers]).astype("<f4").tobytes()

    def _begin(self, layer: int, quantisers: list[Quantiser]) -> int:
        """A new file with rotations, centroids and lists; its checksum."""
        data = self._numbers(quantisers)
        unfinished = self._unfinished(layer)
        unfinished.write_bytes(data)
        os.replace(unfinished, self.layer_file(layer))  # who reads the old one goes on with it
        return zlib.crc32(data)

    def _append(self, layer: int, index: MemoryIndex, done: int, crc: int) -> int:
        """Write the blocks from `done` on behind those before; the file's checksum."""
        path = self.layer_file(layer)
        block_bytes = index.geometry.kv_heads * Quantiser.block_bytes(index.geometry.head_dim)
        with path.open("r+b") as file:
            file.seek(len(self._numbers(index.quantisers[layer])) + done * block_bytes)
            at = 0
            for piece in index.pieces:
                codes = piece[layer]
                new = codes[max(0, done - at) :]
                at += len(codes)
                if len(new):
                    data = np.ascontiguousarray(new).data
                    file.write(data)
                    crc = zlib.crc32(data, crc)
            file.flush()
            os.fsync(file.fileno())
        return crc


def _lists_of(index: MemoryIndex) -> int:
    """How many lists its quantisers have, all the same."""
    return len(next(iter(index.quantisers.values()))[0].lists)
