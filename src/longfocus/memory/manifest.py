"""The manifest of a saved memory, `memory.json`: what made it, with a checksum of itself. Written whole or not at all."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longfocus.errors import MemoryFormatError
from longfocus.files import write_whole
from longfocus.memory.folder import MANIFEST, read_file
from longfocus.memory.geometry import MemoryGeometry

FORMAT = "longfocus-memory"
VERSION = 1
VERSION_WITH_REMOVED = 2
"""Of memories that hold removed documents, which a reader of version 1 would take for live ones."""


@dataclass(frozen=True)
class Manifest:
    """What `memory.json` says; JSON both ways."""

    geometry: MemoryGeometry
    focus_options: dict[str, Any]
    """Options of the model, for `FocusConfig.from_dict`."""
    model_source: str | None
    """Path or id that the model was loaded from."""
    version: int = VERSION

    def write(self, folder: Path) -> None:
        """
        Raises:
            OSError: the disk refused; the one before is as it was.
        """
        data: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
            "geometry": self.geometry.to_dict(),
            "focus": self.focus_options,
            "model_source": self.model_source,
        }
        data["crc"] = checksum(data)
        write_whole(folder / MANIFEST, json.dumps(data, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """
        Raises:
            MemoryFormatError: there is none, or it is corrupted, foreign or newer.
        """
        path = folder / MANIFEST
        text = read_file(path)
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise MemoryFormatError(f"{path} is not the manifest of a longfocus memory.")
            if data["version"] not in (VERSION, VERSION_WITH_REMOVED):
                raise MemoryFormatError(
                    f"{path} has format version {data['version']}; this longfocus reads versions {VERSION} and "
                    f"{VERSION_WITH_REMOVED}. Upgrade longfocus."
                )
            if data["crc"] != checksum(data):
                raise ValueError("its checksum is wrong")
            geometry = MemoryGeometry.from_dict(data["geometry"])
            return cls(geometry, dict(data["focus"]), data["model_source"], data["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise MemoryFormatError(f"{path} is corrupted ({error}); restore it from a copy.") from error


def checksum(manifest: Mapping[str, Any]) -> str:
    """CRC-32 of all but its `crc`, in hexadecimal."""
    rest = {key: value for key, value in manifest.items() if key != "crc"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True, separators=(',', ':')).encode()):08x}"
