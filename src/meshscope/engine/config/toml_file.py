"""Reads a training run's TOML file into a `TrainConfig`, and writes one out as plain values.

    config = load_config("train.toml", ["parallel.dp=4", "model.preset=gpt2-small"])
    config = from_document(to_document(config))            # for JSON, checkpoints, the recording

Strict: an unknown key, a wrong type and a value outside of its choices are errors, and one
UsageError lists all of them by their dotted path. TOML has no null, so "none" stands for it where a
value may be left out. Paths in the file are relative to the file, those of overrides to the current
folder. Whether values fit together is for `problems` to say.
"""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.presets import PRESETS, fill_model_defaults
from meshscope.core.config.timed_model_config import TimedModelConfig
from meshscope.core.config.train_config import TrainConfig
from meshscope.engine.config.problems import find_problems
from meshscope.engine.faults.kinds import Fault
from meshscope.engine.faults.text import fault_from_mapping, parse_fault, write_fault
from meshscope.errors import UsageError

_MODEL_KINDS: dict[str, type[Any]] = {"transformer": ModelConfig, "timed": TimedModelConfig}
"""`model.kind` to what the rest of the table is."""

NONE = "none"
"""Stands for a value that is left out, where a default would fill it otherwise."""

_BAD: Any = object()
_WORDS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "texts"),
    Path: ("a path", "paths"),
    type(None): (f'"{NONE}"', f'"{NONE}"'),
}


class _CommandLineText(str):
    """A text from an override: as a path it is relative to the current folder."""

    __slots__ = ()


# --- reading -------------------------------------------------------------------------------------


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> TrainConfig:
    """The configuration in a TOML file, with overrides such as `parallel.dp=4` put over it."""
    path = Path(path)
    document = _read_toml(path)
    problems: list[str] = []
    for override in overrides:
        problems += _apply_override(document, override)
    return _finish(document, path.parent, problems, source=f"{path}: ")


def from_document(document: Mapping[str, Any], *, folder: Path | None = None) -> TrainConfig:
    """From plain values as in the TOML file, or from what `to_document` gave."""
    return _finish(document, folder, [], source="")


def _finish(
    document: Mapping[str, Any], folder: Path | None, problems: list[str], *, source: str
) -> TrainConfig:
    reader = _Reader(folder, problems)
    config = reader.read(TrainConfig, document, "")
    if reader.problems:
        # What could be read is checked too, with defaults for the rest.
        more = [] if config is _BAD else find_problems(config)
        raise UsageError(source + "; ".join([*reader.problems, *more]))
    assert isinstance(config, TrainConfig), "no problems, hence a configuration"
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text; TOML files are") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} {_explain_syntax(str(error))}") from None


def _explain_syntax(text: str) -> str:
    """Moves the line number, which tomllib puts at the end, to the front."""
    match = re.fullmatch(r"(?P<what>.*) \(at (?P<where>.*)\)", text, flags=re.DOTALL)
    where, what = (match["where"], match["what"]) if match else ("some line", text)
    return f"is not TOML, {where}: {what[:1].lower()}{what[1:]}; correct it there"


def _apply_override(document: dict[str, Any], override: str) -> list[str]:
    """Puts `a.b=value` into the document; returns the reason where it cannot."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        return [f"{override!r} is not an override; write a key and a value, as in parallel.dp=4"]
    table = document
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            return [f"{key.strip()}: {name} is not a table; check the key"]
    table[names[-1]] = _mark(_parse_value(text.strip()))
    return []


def _parse_value(text: str) -> Any:
    """A value in TOML syntax; what is none is text, so quotes can be left out."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _mark(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mark(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_mark(entry) for entry in value]
    return _CommandLineText(value) if isinstance(value, str) else value


class _Reader:
    """Converts plain values by type annotations, and goes on after a problem."""

    def __init__(self, folder: Path | None, problems: list[str]) -> None:
        self._folder = folder
        self.problems = problems

    def read(self, kind: Any, value: Any, path: str) -> Any:
        """`value` as `kind`; `_BAD` after noting why not."""
        if path == "model":
            return self._read_model(value)
        if path == "faults":
            return self._read_faults(value)
        if is_dataclass(kind):
            return self._read_table(kind, value, path)
        converted = self._convert(kind, value)
        if converted is _BAD:
            self._note(path, f"got {_format_value(value)}, expected {_describe(kind)}")
        return converted

    def _note(self, path: str, text: str) -> None:
        self.problems.append(f"{path}: {text}" if path else text)

    def _read_table(self, kind: Any, value: Any, path: str, extra_names: Sequence[str] = ()) -> Any:
        if not isinstance(value, Mapping):
            self._note(path, f"got {_format_value(value)}, expected a table")
            return _BAD
        hints = get_type_hints(kind)
        names = [field.name for field in fields(kind)]
        prefix = f"{path}." if path else ""
        for key in value:
            if key not in names and key not in extra_names:
                self._note(prefix + str(key), _explain_unknown(str(key), [*extra_names, *names]))
        given = {
            name: self.read(hints[name], value[name], prefix + name)
            for name in names
            if name in value
        }
        missing = [f.name for f in fields(kind) if _is_required(f) and f.name not in value]
        for name in missing:
            self._note(prefix + name, f"is missing, expected {_describe(hints[name])}")
        required = [field.name for field in fields(kind) if _is_required(field)]
        if missing or any(given[name] is _BAD for name in required):
            return _BAD
        return kind(**{name: entry for name, entry in given.items() if entry is not _BAD})

    def _read_model(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            self._note("model", f"got {_format_value(value)}, expected a table")
            return _BAD
        kind, preset = value.get("kind", "transformer"), value.get("preset")
        if kind not in _MODEL_KINDS:
            self._note(
                "model.kind", f"got {_format_value(kind)}, expected {_choices(_MODEL_KINDS)}"
            )
            return _BAD
        own = {key: entry for key, entry in value.items() if key not in ("kind", "preset")}
        if kind == "transformer":
            if preset is not None and preset not in PRESETS:
                self._note(
                    "model.preset", f"got {_format_value(preset)}, expected {_choices(PRESETS)}"
                )
                return _BAD
            own = fill_model_defaults({**PRESETS.get(preset or "", {}), **own})
        elif preset is not None:
            self._note("model.preset", "a timed model has none, leave it out")
        return self._read_table(_MODEL_KINDS[kind], own, "model", ("kind", "preset"))

    def _read_faults(self, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            self._note("faults", f"got {_format_value(value)}, expected tables, as in [[faults]]")
            return _BAD
        found = []
        for index, entry in enumerate(value):
            try:
                found.append(_read_fault(entry))
            except UsageError as error:
                self._note(f"faults[{index}]", str(error))
        return tuple(found)

    def _convert(self, kind: Any, value: Any) -> Any:
        origin = get_origin(kind)
        if kind is Any:
            return value
        if origin in (Union, UnionType):
            return self._convert_to_one_of(get_args(kind), value)
        if origin is Literal:
            return str(value) if isinstance(value, str) and value in get_args(kind) else _BAD
        if origin is tuple:
            return self._convert_list(get_args(kind), value)
        if kind is type(None):
            return None if value is None or value == NONE else _BAD
        if kind is Path:
            return self._convert_path(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if kind is float and isinstance(value, float) and not math.isfinite(value):
            return _BAD
        if kind is str and isinstance(value, str):
            return str(value)
        # bool is an int to Python; true as a number is a mistake.
        return value if type(value) is kind else _BAD

    def _convert_to_one_of(self, kinds: Sequence[Any], value: Any) -> Any:
        # None first: its "none" would do as a path as well.
        for kind in sorted(kinds, key=lambda kind: kind is not type(None)):
            converted = self._convert(kind, value)
            if converted is not _BAD:
                return converted
        return _BAD

    def _convert_list(self, kinds: Sequence[Any], value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return _BAD
        is_any_length = len(kinds) == 2 and kinds[1] is Ellipsis
        if not is_any_length and len(value) != len(kinds):
            return _BAD
        entries = tuple(
            self._convert(kinds[0] if is_any_length else kinds[index], entry)
            for index, entry in enumerate(value)
        )
        return _BAD if any(entry is _BAD for entry in entries) else entries

    def _convert_path(self, value: Any) -> Any:
        if isinstance(value, Path):
            return value
        if not isinstance(value, str) or not value:
            return _BAD
        path = Path(value).expanduser()
        return (
            path
            if self._folder is None or isinstance(value, _CommandLineText)
            else (self._folder / path)
        )


def _read_fault(entry: Any) -> Fault:
    """From a table, or from the line that the command line takes."""
    if isinstance(entry, str):
        return parse_fault(entry)
    if not isinstance(entry, Mapping):
        raise UsageError(
            f"got {_format_value(entry)}, expected a table or a line such as 'leak mb=1'"
        )
    return fault_from_mapping(entry)


# --- writing -------------------------------------------------------------------------------------


def to_document(config: TrainConfig) -> dict[str, Any]:
    """Values that JSON can hold, every field written out; `from_document` reads them back."""
    document = _to_plain(config)
    kinds = {kind: name for name, kind in _MODEL_KINDS.items()}
    document["model"] = {"kind": kinds[type(config.model)], **document["model"]}
    document["faults"] = [write_fault(fault) for fault in config.faults]
    assert isinstance(document, dict)
    return document


def _to_plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _to_plain(getattr(value, field.name))
            for field in fields(value)
            if field.name != "faults"
        }
    if isinstance(value, tuple):
        return [_to_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


# --- words ---------------------------------------------------------------------------------------


def list_keys(kind: Any = TrainConfig, prefix: str = "") -> list[str]:
    """Every key of the file by its dotted path, those of a transformer for the model."""
    keys: list[str] = []
    for name, hint in get_type_hints(kind).items():
        table = ModelConfig if name == "model" else hint
        keys += list_keys(table, f"{prefix}{name}.") if is_dataclass(table) else [prefix + name]
    return keys


def _is_required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _explain_unknown(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, 1, 0.5)
    if near:
        return f"there is no such key, did you mean {near[0]}?"
    homes = [path for path in list_keys() if path.rpartition(".")[2] == key]
    if homes:
        return f"there is no such key here, did you mean {homes[0]}?"
    return f"there is no such key, known are {', '.join(known)}"


def _describe(kind: Any, *, is_plural: bool = False) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_describe(entry, is_plural=is_plural) for entry in arguments)
    if origin is Literal:
        return _choices(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"a list of {_describe(arguments[0], is_plural=True)}"
    if origin is tuple:
        return f"a list of {len(arguments)} {_describe(arguments[0], is_plural=True)}"
    if kind in _WORDS:
        return _WORDS[kind][is_plural]
    return "a table"


def _choices(names: Iterable[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def _format_value(value: Any) -> str:
    """Formats a value as TOML does."""
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    return "a table" if isinstance(value, Mapping) else str(value)
