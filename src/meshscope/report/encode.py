"""JSON of every document, and its schema: one encoder, one envelope.

A document is a frozen dataclass. Its fields become keys: names keep their units, a missing value
is `{"unavailable": "why"}`, members of a text enum are their values and those of a number enum
their names in lower case. A number that JSON cannot hold is unavailable, too. The envelope is
`document` (its name) and `document_version`, which rises when a field changes its meaning.

`describe` gives the JSON Schema of a document from the same types and docstrings.
"""

import ast
import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.rank_ranges import RankRanges

_UNAVAILABLE = {"$ref": "#/$defs/Unavailable"}


def encode(name: str, version: int, document: object) -> str:
    """Indented JSON with a final newline."""
    body = as_plain(document)
    text = msgspec.json.encode({"document": name, "document_version": version, **body})
    return msgspec.json.format(text, indent=2).decode() + "\n"


def as_plain(value: object) -> Any:
    """What JSON can hold of a value, field by field."""
    if value is None or (isinstance(value, (bool, int)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _missing(f"not a finite number ({value})")
    if isinstance(value, Enum):
        return value.value if isinstance(value, str) else value.name.lower()
    if isinstance(value, str):
        return as_text(value)
    if isinstance(value, Unavailable):
        return _missing(value.reason)
    if isinstance(value, RankRanges):
        return [{"first": part[0], "last": part[-1]} for part in value.stretches]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: as_plain(getattr(value, name)) for name in _list_names(type(value))}
    if isinstance(value, Mapping):
        return {as_text(_show_key(key)): as_plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return [as_plain(entry) for entry in value.tolist()]
    if isinstance(value, np.generic):
        return as_plain(value.item())
    if isinstance(value, (Sequence, Set)):
        return [as_plain(entry) for entry in value]
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def as_text(text: str) -> str:
    """JSON is UTF-8; half a surrogate pair from a hostile name is not."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _missing(reason: str) -> dict[str, str]:
    return {"unavailable": as_text(reason)}


def _show_key(key: object) -> str:
    if isinstance(key, Enum):
        return str(as_plain(key))
    return str(key)


@cache
def _list_names(cls: type) -> tuple[str, ...]:
    """Fields that are shown; `metadata={"json": False}` leaves one out."""
    return tuple(
        field.name for field in dataclasses.fields(cls) if field.metadata.get("json", True)
    )


# --- schema -------------------------------------------------------------------------------------


def describe(name: str, version: int, document: type) -> dict[str, Any]:
    """The JSON Schema of a document."""
    known: dict[str, Any] = {}
    body = _describe_fields(document, known)
    known["Unavailable"] = {
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
        "$defs": dict(sorted(known.items())),
    }


def _describe_type(hint: Any, known: dict[str, Any]) -> dict[str, Any]:
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


def _describe_union(arguments: Sequence[Any], known: dict[str, Any]) -> dict[str, Any]:
    options = [_describe_type(argument, known) for argument in arguments]
    if float in arguments and Unavailable not in arguments:
        options.append(_UNAVAILABLE)
    unique = [option for at, option in enumerate(options) if option not in options[:at]]
    return unique[0] if len(unique) == 1 else {"anyOf": unique}


def _describe_plain(hint: Any, known: dict[str, Any]) -> dict[str, Any]:
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
        if hint.__name__ not in known:
            known[hint.__name__] = {}  # a type may hold itself
            known[hint.__name__] = _describe_fields(hint, known)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    raise TypeError(f"{hint!r} has no form in a schema")


def _describe_fields(cls: type, known: dict[str, Any]) -> dict[str, Any]:
    hints, texts = get_type_hints(cls), _read_docstrings(cls)
    properties = {}
    for name in _list_names(cls):
        found = _describe_type(hints[name], known)
        if name in texts:
            found = {**found, "description": texts[name]}
        properties[name] = found
    text = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
    return {
        "type": "object",
        "description": " ".join(text.split()),
        "properties": properties,
        "required": list(properties),
    }


@cache
def _read_docstrings(cls: type) -> dict[str, str]:
    """The string literal under each field says what it means."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    texts = {}
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[ast.unparse(field.target)] = " ".join(value.value.split())
    return texts
