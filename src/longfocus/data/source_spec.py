"""Where the texts of a training source lie: its specification, checked when made, and the files that it means.

    spec = SourceSpec("books", kind="jsonl", paths=("books",))       # every .jsonl and .jsonl.gz below the folder
    list_files(spec)

Kinds: `text` (files, or every text file of folders), `jsonl` (also .jsonl.gz), `parquet`, `code` (folders of
repositories) and `hub` (a data set by name, through the package `datasets`). Plain data, JSON both ways.
A path may be `package:NAME`, the folder of an installed Python package: real text that is there on every machine.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from longfocus.data.documents import SKIPPED_FOLDERS
from longfocus.errors import ConfigError, InputError, did_you_mean

Kind = Literal["text", "jsonl", "parquet", "code", "hub"]
PACKAGE = "package:"
_SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz"), "parquet": (".parquet",)}


@dataclass(frozen=True)
class SourceSpec:
    """Where the documents of one training source lie, and how they are to be read.

    Raises:
        ConfigError: a value is impossible; the message names field, value and what is allowed.
    """

    name: str
    """As shown in reports; unique in a mixture."""
    kind: Kind = "text"
    paths: tuple[str, ...] = ()
    """Files, folders and `package:NAME`, in this order; folders in sorted order. Empty for `hub`."""
    text_field: str = "text"
    """Field or column of the text (jsonl, parquet, hub)."""
    id_field: str = "id"
    """Field or column of the document's id; where it is missing, file and record number stand for it."""
    suffixes: tuple[str, ...] | None = None
    """Take only files of these endings from folders (text, code). None: every file that is text."""
    encoding: str | None = None
    """Of text and code files. None: by byte-order mark, else UTF-8."""
    dataset: str | None = None
    """Id on the hub (or a local folder that `datasets` can load), for `hub`."""
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    """Commit or tag of the hub data set; without one the set may change under its name."""

    def __post_init__(self) -> None:
        if isinstance(self.paths, (str, os.PathLike)):
            object.__setattr__(self, "paths", (self.paths,))
        object.__setattr__(self, "paths", tuple(map(str, self.paths)))
        if self.suffixes is not None:
            given = (self.suffixes,) if isinstance(self.suffixes, str) else self.suffixes
            object.__setattr__(self, "suffixes", tuple(given))
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"name: {self.name!r} given, expected a short name for the source.")
        if self.kind not in get_args(Kind):
            raise ConfigError(
                f"kind of source {self.name!r}: {self.kind!r} given, expected one of {', '.join(get_args(Kind))}."
            )
        if self.kind == "hub" and (not self.dataset or self.paths):
            raise ConfigError(f"Source {self.name!r}: kind 'hub' takes the data set's id in `dataset`, and no `paths`.")
        if self.kind != "hub" and (not self.paths or self.dataset):
            raise ConfigError(
                f"Source {self.name!r}: kind {self.kind!r} takes one or more files or folders in `paths`, and no `dataset`."
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` gives an equal spec."""
        data = dataclasses.asdict(self)
        data["paths"] = list(self.paths)
        data["suffixes"] = list(self.suffixes) if self.suffixes is not None else None
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SourceSpec:
        """Inverse of `to_dict`.

        Raises:
            ConfigError: an unknown key; the message lists the known ones.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in data:
            if key not in known:
                hint = did_you_mean(key, known)
                raise ConfigError(f"{key!r} is not an option of a source.{hint} Known: {', '.join(known)}.")
        if "name" not in data:
            raise ConfigError("name: missing; every source needs a short name.")
        return cls(**data)


@dataclass(frozen=True)
class SourceFile:
    """A file of a source, as it was when listed."""

    name: str
    """The path, beginning as the user wrote it."""
    path: Path
    size_bytes: int
    mtime_ns: int
    root: Path | None
    """The named folder it was found in; None: the user named the file itself."""


def list_files(spec: SourceSpec) -> list[SourceFile]:
    """The files of a source in reading order; of a hub data set none, unless it is a local folder.

    Raises:
        InputError: a path does not exist or cannot be looked at, or folders hold no file of the kind.
    """
    paths = list(spec.paths)
    if spec.kind == "hub":
        assert spec.dataset is not None
        paths = [spec.dataset] if Path(spec.dataset).is_dir() else []
    suffixes = _SUFFIXES.get(spec.kind, spec.suffixes)
    files: dict[Path, SourceFile] = {}
    for given in paths:
        root = _package_folder(spec, given) if given.startswith(PACKAGE) else Path(given)
        found: list[tuple[Path, Path | None]]
        try:
            if root.is_dir():
                found = [(path, root) for path in _walk(root) if suffixes is None or path.name.endswith(suffixes)]
            else:
                found = [(root, None)]
                if root.exists() and (spec.kind == "code" or not root.is_file()):
                    wanted = "a folder of repositories" if spec.kind == "code" else "a file or a folder"
                    raise InputError(f"Source {spec.name!r}: {root} given, expected {wanted}.")
            for path, folder in found:
                status = path.stat()
                files.setdefault(
                    path.absolute(), SourceFile(str(path), path, status.st_size, status.st_mtime_ns, folder)
                )
        except FileNotFoundError as error:
            raise InputError(f"Source {spec.name!r}: {error.filename} does not exist.") from None
        except (OSError, ValueError) as error:
            raise InputError(
                f"Source {spec.name!r}: {given!r} cannot be opened ({getattr(error, 'strerror', None) or error})."
            ) from None
    if not files and spec.kind != "hub":
        wanted = f" that ends in {' or '.join(suffixes)}" if suffixes else ""
        raise InputError(f"Source {spec.name!r}: no file{wanted} in {', '.join(spec.paths)}.")
    return list(files.values())


def _package_folder(spec: SourceSpec, given: str) -> Path:
    """Where an installed package lies; nothing of it is run."""
    name = given.removeprefix(PACKAGE)
    try:
        found = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        found = None
    places = list(found.submodule_search_locations or []) if found is not None else []
    if not places:
        raise InputError(
            f"Source {spec.name!r}: {given!r} given, expected the name of an installed Python package that is a folder, "
            "such as package:email."
        )
    return Path(places[0])


def _walk(folder: Path) -> Iterator[Path]:
    """Files below a folder in sorted order; hidden ones, caches and build folders are passed over."""

    def refused(error: OSError) -> None:
        raise error

    for base, folders, names in os.walk(folder, onerror=refused):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in SKIPPED_FOLDERS and not name.endswith(".egg-info")
        )
        yield from (path for name in sorted(names) if not name.startswith(".") and (path := Path(base, name)).is_file())
