"""What a program was told to do: hyper-parameters and arguments, flat, bounded, without secrets.

Any mapping, dataclass, namespace or object with `to_dict` becomes dotted names with plain values.
Of other objects only the type is kept: their text may be long, or need a device to be waited for.
Values are stored by the rules of command lines (`store.write.redaction`), under their whole name.
"""

import argparse
import hashlib
import json
import os
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from itertools import islice
from typing import Any

from meshscope.errors import CaptureError
from meshscope.store.write.redaction import redact_settings

MAX_KEYS = 1000
"""Of one group; more are counted."""
MAX_GROUPS = 16
MAX_VALUE_CHARACTERS = 200
_MAX_NAME_CHARACTERS = 160
_MAX_DEPTH = 8
_MAX_ELEMENTS = 64
"""Of a list; a longer one ends in how many there were."""
_MAX_LOOKS = 8 * MAX_KEYS
"""Values looked at, whatever they hold."""
_PLAIN_MODULES = ("datetime", "decimal", "fractions", "uuid")
_TORCH_VALUES = ("dtype", "device", "layout", "memory_format")

Plain = str | int | float | bool | None

GIVEN = "config"
"""The group of what the program itself hands over."""


@dataclass(slots=True)
class _Group:
    known_by: str
    values: dict[str, Plain] = field(default_factory=dict)
    num_left_out: int = 0


class Settings:
    """Settings of one process by group; every change is a line of the journal."""

    def __init__(self, write: Callable[..., None]) -> None:
        """`write` adds a line to the journal, or does nothing while there is none."""
        self._write = write
        self.groups: dict[str, _Group] = {}

    def write_all(self) -> None:
        """Writes all groups into a journal that was just opened."""
        for name in self.groups:
            self._write_group(name)

    def add(self, value: object, name: str, known_by: str) -> None:
        """Adds to a group, the last value of a name counts. CaptureError if `value` has no names.

        A group that is given again unchanged writes nothing.
        """
        found, num_left_out = flatten_settings(value)
        group = self.groups.get(name)
        if group is None:
            if len(self.groups) >= MAX_GROUPS:
                raise CaptureError(f"{name}: more than {MAX_GROUPS} groups of settings")
            group = self.groups[name] = _Group(known_by)
        elif group.values == {**group.values, **found}:
            return
        group.known_by = known_by
        for key, plain in found.items():
            if key in group.values or len(group.values) < MAX_KEYS:
                group.values[key] = plain
            else:
                num_left_out += 1
        group.num_left_out = max(group.num_left_out, num_left_out)
        self._write_group(name)

    def _write_group(self, name: str) -> None:
        group = self.groups[name]
        line = {
            "name": name,
            "known_by": group.known_by,
            "values": dict(group.values),
            "num_left_out": group.num_left_out,
        }
        self._write("update", settings=line)


def flatten_settings(value: object) -> tuple[dict[str, Plain], int]:
    """Dotted names with what may be stored of their values, and how many names were left out."""
    opened = _open(value)
    if opened is None and (opened := _read_attributes(value)) is None:
        raise CaptureError(
            f"settings are a {type(value).__name__}; expected a mapping, a dataclass, a namespace "
            "or an object with to_dict"
        )
    found: dict[str, Plain] = {}
    num_left_out = 0
    for num_looks, (name, leaf) in enumerate(_walk(opened, "", 0)):
        if num_looks >= _MAX_LOOKS:
            break
        if len(found) >= MAX_KEYS:
            num_left_out += 1
        else:
            found[_store_name(name)] = _store_value(leaf, name)
    return found, num_left_out


def _walk(value: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, object]]:
    for key, inner in _read_items(value):
        name = f"{prefix}{key}" if isinstance(key, (str, int, float, bool)) else f"{prefix}(key)"
        opened = _open_inner(inner)
        if not opened or depth >= _MAX_DEPTH:
            yield name, "{}" if opened == {} else inner
        else:
            yield from _walk(opened, f"{name}.", depth + 1)


def _read_items(value: Mapping[Any, Any]) -> Iterator[tuple[Any, object]]:
    """Mappings that work their values out (OmegaConf) may not be able to for each."""
    for key in value:
        try:
            inner = value[key]
        except Exception as error:  # noqa: BLE001 - any mapping of the program's
            inner = f"<{type(error).__name__}>"
        yield key, inner


def _open(value: object) -> Mapping[Any, Any] | None:
    """The names and values of a configuration; None if it is none."""
    opened = None if isinstance(value, (list, tuple)) else _open_inner(value)
    if opened is not None or value is None or isinstance(value, type):
        return opened
    for method in ("to_dict", "model_dump"):
        convert = getattr(value, method, None)
        if callable(convert):
            converted = convert()
            if isinstance(converted, Mapping):
                return converted
    return None


def _open_inner(value: object) -> Mapping[Any, Any] | None:
    """The same of a value inside a configuration, none of whose methods is called; also lists of
    such values."""
    if isinstance(value, Mapping):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _read_field(value, one.name) for one in fields(value)}
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return vars(value)
    if isinstance(value, (list, tuple)) and len(value) <= _MAX_ELEMENTS:
        opened = [_open_inner(inner) for inner in value]
        return dict(enumerate(value)) if any(opened) else None
    return None


def _read_field(owner: object, name: str) -> object:
    try:
        return getattr(owner, name, None)
    except Exception as error:  # noqa: BLE001 - a property of the program's
        return f"<{type(error).__name__}>"


def _read_attributes(value: object) -> Mapping[str, Any] | None:
    """The public attributes of a plain object that was given as a configuration."""
    if isinstance(value, (str, bytes, int, float, list, tuple, set, type, types.ModuleType)):
        return None
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return None
    return {name: inner for name, inner in attributes.items() if name[:1] != "_"} or None


def _store_name(name: str) -> str:
    shown = ".".join(str(redact_settings(part)) for part in name.split("."))
    return _cut(shown, _MAX_NAME_CHARACTERS)


def _store_value(value: object, name: str) -> Plain:
    if value is None or isinstance(value, bool):
        return value
    plain = redact_settings(_make_plain(value), name)
    if isinstance(plain, list):
        plain = json.dumps(plain)
    if isinstance(plain, (int, float)):
        return plain
    return _cut(str(plain), MAX_VALUE_CHARACTERS)


def _make_plain(value: object, depth: int = 0) -> object:
    """A value as text, number or list, without calling methods of the program's own types."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else "(a very large integer)"
    if isinstance(value, float):
        number = float(value)
        return number if number - number == 0 else str(number)  # JSON has no inf and no nan
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, (list, tuple, set, frozenset)) and depth < _MAX_DEPTH:
        return _list_plain(value, depth)
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if package in _PLAIN_MODULES or (package == "torch" and kind.__name__ in _TORCH_VALUES):
        return str(value)
    if package == "numpy" and getattr(value, "ndim", None) == 0:
        return _make_plain(value.item(), depth)  # type: ignore[attr-defined]  # numpy's scalars have it
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str) and (isinstance(value, type) or callable(value)):
        return name.replace("<locals>", "").replace("<", "").replace(">", "").replace("..", ".")
    return f"<{kind.__name__}>"


def _list_plain(value: Collection[object], depth: int) -> list[object]:
    plain = [_make_plain(inner, depth + 1) for inner in islice(value, _MAX_ELEMENTS)]
    if isinstance(value, (set, frozenset)):
        plain = sorted(plain, key=str) if len(value) <= _MAX_ELEMENTS else []
    left_out = len(value) - len(plain)
    return [*plain, f"{left_out}-more"] if left_out else plain


def _cut(text: str, limit: int) -> str:
    """A long text shortened so that two that differ anywhere still do."""
    if len(text) <= limit:
        return text
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]
    return f"{text[: limit - 12]}… #{digest}"
