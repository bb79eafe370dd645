"""Rebuilds frozen dataclasses from plain values, such as JSON or msgpack gives, by their types.

Nothing but the classes named by a type is ever made, so that it is safe with files of others. A
mapping with nothing but a reason, where the type allows it, is `Unavailable`.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import chain
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from meshscope.core.unavailable import Unavailable

Rebuilder = Callable[[Any], Any]
_PLAIN = (int, float, str, bool, NoneType)


@cache
def make_rebuilder(hint: Any) -> Rebuilder:
    """A function from plain values to the type; it raises ValueError where they do not fit."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _rebuild_any(arguments)
    if origin is tuple:
        return _rebuild_tuple(arguments)
    if origin is list:
        return _rebuild_list(arguments[0])
    if origin is not None and issubclass(origin, Mapping):
        return _rebuild_mapping(*arguments)
    if is_dataclass(hint):
        return _rebuild_dataclass(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if hint in _PLAIN:
        return _check_plain(float | int if hint is float else hint)
    raise TypeError(f"{hint}: no plain value is of this type")


def _check_plain(kind: Any) -> Rebuilder:
    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"expected {kind}")
        return value

    return check


def _rebuild_any(options: tuple[Any, ...]) -> Rebuilder:
    plain = tuple(option for option in options if option in _PLAIN)
    if float in plain:
        plain = (*plain, int)
    others = [make_rebuilder(option) for option in options if option not in (*_PLAIN, Unavailable)]
    may_lack = Unavailable in options

    def rebuild(value: Any) -> Any:
        if plain and isinstance(value, plain):
            return value
        if may_lack and isinstance(value, dict) and value.keys() == {"reason"}:
            return Unavailable(str(value["reason"]))
        for option in others:
            try:
                return option(value)
            except ValueError:
                continue
        raise ValueError("of none of the types")

    return rebuild


def _rebuild_tuple(arguments: tuple[Any, ...]) -> Rebuilder:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        if arguments[0] == tuple[int, int]:
            return _rebuild_pairs
        each = make_rebuilder(arguments[0])
        return lambda value: tuple(map(each, _require(value, list)))
    parts = [make_rebuilder(argument) for argument in arguments]

    def rebuild(value: Any) -> Any:
        found = _require(value, list)
        return tuple(part(one) for part, one in zip(parts, found, strict=True))

    return rebuild


def _rebuild_pairs(value: Any) -> Any:
    """Pairs of whole numbers, of which there may be many: all are looked at at once."""
    found = _require(value, list)
    kinds, lengths = set(map(type, found)), {len(one) for one in found if isinstance(one, list)}
    if kinds - {list} or lengths - {2} or set(map(type, chain.from_iterable(found))) - {int}:
        raise ValueError("expected pairs of numbers")
    return tuple(map(tuple, found))


def _rebuild_list(argument: Any) -> Rebuilder:
    each = make_rebuilder(argument)
    return lambda value: list(map(each, _require(value, list)))


def _rebuild_mapping(key: Any, content: Any) -> Rebuilder:
    of_key, of_content = make_rebuilder(key), make_rebuilder(content)
    return lambda value: {
        of_key(one): of_content(other) for one, other in _require(value, dict).items()
    }


def _rebuild_dataclass(kind: Any) -> Rebuilder:
    hints = get_type_hints(kind)
    names = {field.name for field in fields(kind)}
    parts = {name: make_rebuilder(hints[name]) for name in names}

    def rebuild(value: Any) -> Any:
        if _require(value, dict).keys() != names:
            raise ValueError(f"not the fields of {kind.__name__}")
        return kind(**{name: parts[name](one) for name, one in value.items()})

    return rebuild


def _require(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected a {kind.__name__}")
    return value
