"""Frozen summaries as JSON, field by field: names keep their units, what is missing its reason."""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from meshscope.core.unavailable import Unavailable
from meshscope.report.values import as_number, as_string, as_text


def as_plain(value: object) -> Any:
    """Dataclasses become objects, tuples lists, members of an enum their names in lower case."""
    if isinstance(value, Unavailable):
        return {"unavailable": as_text(value.reason)}
    if isinstance(value, Enum):
        return value.name.lower()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {as_text(str(key)): as_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(entry) for entry in value]
    if isinstance(value, str):
        return as_string(value)
    return as_number(value) if isinstance(value, float) else value


def encode_plain(document: Mapping[str, object]) -> str:
    """Indented JSON with a final newline."""
    encoded = msgspec.json.encode(as_plain(document))
    return msgspec.json.format(encoded, indent=2).decode() + "\n"
