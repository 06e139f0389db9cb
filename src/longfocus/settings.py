"""Settings that people write (recipes, `--set key=value`): read as YAML, checked by pydantic, and every mistake told in
words that name the key and what is allowed there. Neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import pydantic
import yaml
from pydantic import BaseModel, BeforeValidator, Field

from longfocus.errors import ConfigError, did_you_mean

Settings = TypeVar("Settings", bound=BaseModel)

# -- sizes -------------------------------------------------------------------------------------------------


def size_of(text: Any) -> int:
    """Tokens: `8k` is 8,192, `1M` is 1,048,576; numbers as they are.

    Raises:
        ConfigError: no size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    found = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)([kKmM]?)", text.strip()) if isinstance(text, str) else None
    if not found:
        raise ConfigError(f"{text!r} given, expected a size in tokens such as 4096, 8k or 1M.")
    return round(float(found[1]) * {"": 1, "k": 1024, "m": 1024 * 1024}[found[2].lower()])


def sizes_of(text: str) -> list[int]:
    """Comma-separated sizes, without repeats, in order.

    Raises:
        ConfigError: one is no size.
    """
    return sorted({size_of(part) for part in text.split(",")})


def size_name(tokens: int) -> str:
    """As people read it, for tables and axes: 8k, 1M, 5,000."""
    if tokens and tokens % (1 << 20) == 0:
        return f"{tokens >> 20}M"
    return f"{tokens >> 10}k" if tokens and tokens % 1024 == 0 else f"{tokens:,}"


def _sizes(value: Any) -> Any:
    if isinstance(value, str):
        return sizes_of(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    return sorted({size_of(part) for part in value}) if isinstance(value, list) else value


Size = Annotated[int, BeforeValidator(size_of), Field(ge=1)]
"""A field that takes 8192 or "8k"."""
Sizes = Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(_sizes), Field(min_length=1)]
"""A field that takes [2048, 8192], ["2k", "8k"], "2k,8k" or one size."""

# -- checking ----------------------------------------------------------------------------------------------

_TOLD = 6
"""Mistakes that one message tells."""


def validated(kind: type[Settings], raw: Mapping[str, Any], where: str) -> Settings:
    """Plain data as a checked settings object.

    Args:
        where: what the message begins with.

    Raises:
        ConfigError: names every wrong key and what is allowed there.
    """
    try:
        text = json.dumps(raw, default=str)  # JSON, where lists stand for tuples
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: a value holds itself or is nested too deeply.") from None
    try:
        return kind.model_validate_json(text)
    except pydantic.ValidationError as error:
        found = [_explain(item, kind, raw) for item in error.errors(include_url=False)]
        more = f"; and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
        raise ConfigError(f"{where}: " + "; ".join(found[:_TOLD]) + more) from None


class _Loader(yaml.SafeLoader):
    """Plain data; 1e-3 is a number (YAML 1.1 wants 1.0e-3), and a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """
        Raises:
            yaml.YAMLError: two keys are the same, of which one would be lost.
        """
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(  # type: ignore[no-untyped-call]
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_yaml(text: str) -> Any:
    """Plain data.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


def apply_change(raw: dict[str, Any], change: str, option: str = "--set") -> None:
    """Set `a.b.0.c=value` in plain data; the value is YAML.

    Raises:
        ConfigError: no such place, or not YAML.
    """
    key, equals, text = change.partition("=")
    *path, last = key.split(".")
    if not equals or "" in (*path, last):
        raise ConfigError(f"{option} {change!r} given, expected key=value.")
    at: Any = raw
    for name in path:
        if isinstance(at, list):
            at = at[_index(at, name, change)]
        else:
            if at.get(name) is None:  # a section that is off, such as `lora: null`
                at[name] = {}
            at = at[name]
        if not isinstance(at, (dict, list)):
            raise ConfigError(f"{option} {change!r}: {name} is not a section, its value is {at!r}.")
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{option} {change!r}: the value is not YAML: {' '.join(str(error).split())}") from error
    if isinstance(at, list):
        at[_index(at, last, change)] = value
    else:
        at[last] = value


def _index(items: list[Any], name: str, change: str) -> int:
    """Position in a list, by number or by an item's `name`."""
    for number, item in enumerate(items):
        if str(number) == name or (isinstance(item, dict) and item.get("name") == name):
            return number
    raise ConfigError(f"--set {change!r}: no item {name} in a list of {len(items)}.")


def _explain(item: Any, root: type[BaseModel], raw: Mapping[str, Any]) -> str:
    kind = item["type"]
    place = _place(item["loc"], raw, added=kind in ("missing", "extra_forbidden"))
    if not place and kind == "value_error":  # what a check of several keys together says
        return str(item["msg"].removeprefix("Value error, "))
    place = place or "all of it"
    if kind == "extra_forbidden":
        known = _known_keys(root, item["loc"][:-1])
        hint = did_you_mean(str(item["loc"][-1]), known)
        return f"{place} is not a key here.{hint}" + (f" Known: {', '.join(known)}" if known else "")
    if kind == "missing":
        return f"{place} is missing"
    message = item["msg"].removeprefix("Value error, ")
    return (
        f"{place}: {item['input']!r} given; {message[:1].lower() + message[1:]}"
        if kind != "value_error"
        else f"{place}: {message}"
    )


def _place(path: Sequence[str | int], raw: Any, *, added: bool) -> str:
    """A path of pydantic as `--set` would have it: without the names of forms, which stand in no file.

    Args:
        added: the last part is a key that the data lack, or should lack.
    """
    *inner, last = path or ("",)
    parts: list[str | int] = []
    for part in inner if added else path:
        inside = (isinstance(raw, Mapping) and part in raw) or (isinstance(raw, list) and part in range(len(raw)))
        if inside or isinstance(part, int):  # else the name of a form
            raw = raw[part] if inside else None
            parts.append(part)
    return ".".join(map(str, [*parts, last] if added else parts))


def _known_keys(root: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Keys of the section at a path."""
    at: list[tuple[str, Any]] = [("", root)]
    for part in path:
        chosen = [section for name, section in at if part in (name, section.__name__)]
        holders = [section for _, section in at if part in section.model_fields]
        if chosen:  # one of several forms
            at = [("", chosen[0])]
        elif holders:
            at = _sections(holders[0].model_fields[str(part)].annotation)
    return list(at[0][1].model_fields) if at else []


def _sections(annotation: Any, name: str = "") -> list[tuple[str, Any]]:
    """(tag or nothing, section class) of all sections inside an annotation such as `Crossbatch | None` or a list of forms."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(name, annotation)]
    tags = [str(one.tag) for one in getattr(annotation, "__metadata__", ()) if isinstance(one, pydantic.Tag)]
    return [
        found
        for argument in getattr(annotation, "__args__", ())
        for found in _sections(argument, tags[0] if tags else name)
    ]
