"""The manifest of a sharded memory: which folders are its shards, and in what order their documents stand.

    big.memory/
        sharded-memory.json     this manifest, written whole
        shard-000/              an ordinary saved memory (memory/ondisk.py)
        shard-001/

The order is a list of (shard, generation, id). What counts is in the shards: a document that the order does not name comes
after those that it names, and an entry of another generation than its shard's counts for nothing. So a shard can be
compacted, which gives its documents new ids, without a moment at which the two disagree: the order first names a document by
its old and by its new entry.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longfocus.errors import MemoryFormatError, MemoryWriteError
from longfocus.files import write_whole
from longfocus.memory.manifest import checksum

FORMAT = "longfocus-sharded-memory"
VERSION = 1
MANIFEST = "sharded-memory.json"

Entry = tuple[int, int, int]
"""(shard, generation of its files, id of the document there)."""


def is_sharded(folder: str | Path) -> bool:
    """Whether the folder looks like a sharded memory."""
    try:
        return (Path(folder) / MANIFEST).is_file()
    except (OSError, ValueError):  # not a possible path
        return False


def shard_name(number: int) -> str:
    """Name of a shard's folder."""
    return f"shard-{number:03d}"


@dataclass
class Manifest:
    """What `sharded-memory.json` says; JSON both ways."""

    shards: tuple[str, ...]
    """Folders, relative to the manifest's."""
    geometry: dict[str, Any]
    """Of every shard; see `MemoryGeometry`."""
    order: list[Entry] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            MemoryWriteError: the disk refused; the one before is as it was.
        """
        data: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "shards": list(self.shards),
            "geometry": self.geometry,
            "order": [list(entry) for entry in self.order],
        }
        data["crc"] = checksum(data)
        try:
            write_whole(folder / MANIFEST, json.dumps(data) + "\n")
        except OSError as error:
            raise MemoryWriteError(f"{folder / MANIFEST} could not be written ({error.strerror or error}).") from error

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """
        Raises:
            MemoryFormatError: there is none, or it is corrupted, foreign or newer.
        """
        path = folder / MANIFEST
        try:
            data = json.loads(path.read_bytes())
        except OSError as error:
            raise MemoryFormatError(
                f"{folder} holds no sharded memory ({MANIFEST} is missing or unreadable: {error.strerror}); make one with "
                "longfocus remember PATH… --into DIR --shards N."
            ) from error
        except ValueError as error:
            raise MemoryFormatError(f"{path} is corrupted ({error}); restore it from a copy.") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise MemoryFormatError(f"{path} is not the manifest of a sharded longfocus memory.")
        if data.get("version") != VERSION:
            raise MemoryFormatError(
                f"{path} has format version {data.get('version')}; this longfocus reads version {VERSION}. Upgrade longfocus."
            )
        try:
            if data["crc"] != checksum(data):
                raise ValueError("its checksum is wrong")
            order = [(int(shard), int(generation), int(number)) for shard, generation, number in data["order"]]
            shards = tuple(map(str, data["shards"]))
            if not shards or any(not 0 <= shard < len(shards) for shard, _, _ in order):
                raise ValueError("its order names shards that it does not have")
            return cls(shards, dict(data["geometry"]), order)
        except (ValueError, KeyError, TypeError) as error:
            raise MemoryFormatError(f"{path} is corrupted ({error}); restore it from a copy.") from error
