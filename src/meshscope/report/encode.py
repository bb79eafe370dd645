"""JSON of every document, and its schema: one encoder, one envelope.

A document is a frozen dataclass. Its fields become keys: names keep their units, a missing value
is `{"unavailable": "why"}`, members of a text enum are their values and those of a number enum
their names in lower case. Numbers that JSON cannot hold are unavailable, too. The envelope is
`document` (its name) and `document_version`, which rises when a field changes its meaning. A
`Shape` says how the keys of a class differ from its fields.

`describe` gives the JSON Schema of a document from the same types and docstrings.
"""

import ast
import builtins
import dataclasses
import inspect
import json
import math
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.rank_ranges import RankRanges

_UNSEEN = re.compile(r"[\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""Characters that act on a terminal or are invisible there: JSON is read there, too."""
_UNAVAILABLE = {"$ref": "#/$defs/Unavailable"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the keys of a class differ from its fields."""

    dropped: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    """Properties added to the fields."""
    inlined: tuple[str, ...] = ()
    """Fields whose keys are merged into the others; the others take precedence."""
    ranges: tuple[str, ...] = ()
    """Ranks that are shown as ranges."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Field or property to its key."""


Shapes = Mapping[type, Shape]
_FIELDS = Shape()


def encode(name: str, version: int, document: object, shapes: Shapes | None = None) -> str:
    """Indented JSON with a final newline."""
    body = as_plain(document, shapes)
    text = _write({"document": name, "document_version": version, **body})
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def encode_line(name: str, version: int, document: object, shapes: Shapes | None = None) -> str:
    """The same JSON in one line, without a newline: for logs and for what is sent."""
    body = as_plain(document, shapes)
    plain = {"document": name, "document_version": version, **body}
    text = msgspec.json.encode(plain).decode()
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def encode_schema(name: str, version: int, document: type, shapes: Shapes | None = None) -> str:
    """The JSON Schema of a document, indented, with a final newline."""
    return _write(describe(name, version, document, shapes))


def embed(value: Mapping[str, object]) -> str:
    """ASCII JSON that cannot end the HTML element it stands in, nor open a comment there."""
    text = json.dumps(value)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _write(plain: Mapping[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode() + "\n"


def as_plain(value: object, shapes: Shapes | None = None) -> Any:
    """The JSON form of a value, field by field."""
    if value is None or (isinstance(value, (bool, int)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _missing(f"not a finite number ({value})")
    if isinstance(value, Enum):
        return value.value if isinstance(value, str) else value.name.lower()
    if isinstance(value, str):
        return _as_text(value)
    if isinstance(value, Unavailable):
        return _missing(value.reason)
    if isinstance(value, RankRanges):
        return [{"first": part[0], "last": part[-1]} for part in value.ranges]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _encode_fields(value, shapes)
    if isinstance(value, Mapping):
        return _encode_mapping(value, shapes)
    if isinstance(value, np.ndarray):
        return [as_plain(entry) for entry in value.tolist()]
    if isinstance(value, np.generic):
        return as_plain(value.item())
    if isinstance(value, (Sequence, Set)):
        return [as_plain(entry, shapes) for entry in value]
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _encode_fields(value: object, shapes: Shapes | None) -> dict[str, Any]:
    cls: type = type(value)
    shape = (shapes or {}).get(cls, _FIELDS)
    plain: dict[str, Any] = {}
    for name in shape.inlined:
        plain.update(as_plain(getattr(value, name), shapes))
    for name in _list_names(cls, shape.dropped + shape.inlined, shape.derived):
        found = getattr(value, name)
        if name in shape.ranges and not isinstance(found, RankRanges):
            found = RankRanges.of(found)
        plain[shape.renamed.get(name, name)] = as_plain(found, shapes)
    return plain


def _encode_mapping(value: Mapping[Any, object], shapes: Shapes | None) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, entry in value.items():
        name, found = _as_text(_show_key(key)), as_plain(entry, shapes)
        # Two invalid names may become one text; numbers of phases must still add up.
        is_again = name in plain and isinstance(found, (int, float))
        plain[name] = plain[name] + found if is_again else found
    return plain


def _as_text(text: str) -> str:
    """Replaces half surrogate pairs, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _missing(reason: str) -> dict[str, str]:
    return {"unavailable": _as_text(reason)}


def _show_key(key: object) -> str:
    if isinstance(key, Enum):
        return str(as_plain(key))
    return str(key)


@cache
def _list_names(
    cls: type, left_out: tuple[str, ...] = (), derived: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Fields that are shown (`metadata={"json": False}` hides one), then properties."""
    shown = [one.name for one in dataclasses.fields(cls) if one.metadata.get("json", True)]
    return *(name for name in shown if name not in left_out), *derived


# --- schema -------------------------------------------------------------------------------------


def describe(
    name: str, version: int, document: type, shapes: Shapes | None = None
) -> dict[str, Any]:
    """The JSON Schema of a document."""
    known = _Known(shapes=shapes or {})
    body = _describe_fields(document, known)
    known.by_name["Unavailable"] = {
        "type": "object",
        "description": "Stands where a value could not be had, with the reason.",
        "properties": {"unavailable": {"type": "string"}},
        "required": ["unavailable"],
    }
    envelope = {"document": {"const": name}, "document_version": {"const": version}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        **body,
        "properties": {**envelope, **body["properties"]},
        "required": [*envelope, *body["required"]],
        "$defs": dict(sorted(known.by_name.items())),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    shapes: Shapes
    by_name: dict[str, Any] = field(default_factory=dict)
    types: dict[str, type] = field(default_factory=dict)


def _describe_type(hint: Any, known: _Known) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _describe_union(arguments, known)
    if origin is Literal:
        return {"enum": list(arguments)}
    if hint is Any or hint is object:
        return {}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _describe_type(arguments[1], known)}
    if origin is not None and issubclass(origin, (Sequence, Set)) and arguments:
        items = [one for one in arguments if one is not Ellipsis]
        if origin is tuple and Ellipsis not in arguments and len(items) > 1:
            return {"type": "array", "prefixItems": [_describe_type(one, known) for one in items]}
        return {"type": "array", "items": _describe_type(items[0], known)}
    if origin is np.ndarray:
        return {"type": "array"}
    return _describe_plain(hint, known)


def _describe_union(arguments: Sequence[Any], known: _Known) -> dict[str, Any]:
    options = [_describe_type(argument, known) for argument in arguments]
    if float in arguments and Unavailable not in arguments:
        options.append(_UNAVAILABLE)
    unique = [option for at, option in enumerate(options) if option not in options[:at]]
    return unique[0] if len(unique) == 1 else {"anyOf": unique}


def _describe_plain(hint: Any, known: _Known) -> dict[str, Any]:
    simple: dict[Any, dict[str, Any]] = {
        bool: {"type": "boolean"},
        int: {"type": "integer"},
        str: {"type": "string"},
        float: {"anyOf": [{"type": "number"}, _UNAVAILABLE]},
        type(None): {"type": "null"},
        Unavailable: _UNAVAILABLE,
    }
    if hint in simple:
        return simple[hint]
    if isinstance(hint, typing.NewType):
        return _describe_type(hint.__supertype__, known)
    if hint is RankRanges:
        part = {"first": {"type": "integer"}, "last": {"type": "integer"}}
        item = {"type": "object", "properties": part, "required": ["first", "last"]}
        return {"type": "array", "items": item, "description": "Ranges of ranks, ends included."}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [as_plain(member) for member in hint]}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return {"$ref": f"#/$defs/{_define(hint, known)}"}
    raise TypeError(f"{hint!r} has no form in a schema")


def _define(cls: type, known: _Known) -> str:
    """Describes a class once, under its name; a second class of that name gets another one."""
    name = cls.__name__
    if known.types.setdefault(name, cls) is not cls:
        name = f"{cls.__module__.rpartition('.')[2]}.{name}"
    if name not in known.by_name:
        known.by_name[name] = {}  # a type may hold itself
        known.by_name[name] = _describe_fields(cls, known)
    return name


def _describe_fields(cls: type, known: _Known) -> dict[str, Any]:
    shape = known.shapes.get(cls, _FIELDS)
    hints, texts = _find_hints(cls, shape.derived), _read_docstrings(cls)
    properties: dict[str, Any] = {}
    for name in shape.inlined:
        properties.update(_describe_fields(hints[name], known)["properties"])
    for name in _list_names(cls, shape.dropped + shape.inlined, shape.derived):
        hint = RankRanges if name in shape.ranges else hints[name]
        found = _describe_type(hint, known)
        if name in texts:
            found = {**found, "description": texts[name]}
        properties[shape.renamed.get(name, name)] = found
    text = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
    if text.startswith(f"{cls.__name__}("):
        text = ""  # dataclasses write their signature where there is no docstring
    return {
        "type": "object",
        **({"description": " ".join(text.split())} if text else {}),
        "properties": properties,
        "required": list(properties),
    }


class _Names(dict[str, Any]):
    """Names of a module; imports for type checkers only become `Any`."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


def _find_hints(cls: type, derived: Sequence[str]) -> dict[str, Any]:
    names = _Names(vars(sys.modules[cls.__module__]))
    hints = get_type_hints(cls, names, names)
    for name in derived:
        hints[name] = get_type_hints(getattr(cls, name).fget, names, names)["return"]
    return hints


@cache
def _read_docstrings(cls: type) -> dict[str, str]:
    """Name to the string literal under a field, or to the docstring of a property."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    texts = {
        one.name: " ".join((ast.get_docstring(one) or "").split())
        for one in body
        if isinstance(one, ast.FunctionDef)
    }
    for above, below in pairwise(body):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[ast.unparse(above.target)] = " ".join(value.value.split())
    return texts
