"""What the program was told to do: hyper-parameters and frameworks' arguments, as recorded.

They are those of the lowest rank that recorded any: ranks of one job are told the same, but for
their own numbers. Values are as the recorder stored them, secrets left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.recording import JsonFields, Recording
from meshscope.store.read.run import Attempt

MAX_GROUPS = 32
MAX_KEYS = 2000
_MAX_CHARACTERS = 1000

NOT_RECORDED = Unavailable(
    "no settings were recorded: start(config=…), or a framework under meshscope run, gives them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsGroup:
    """Settings that came together."""

    name: str
    """`config` as the program gave it, else the framework's class."""
    known_by: str
    """How the recorder came by them."""
    values: Mapping[str, str | int | float | bool | None]
    """By dotted name."""
    num_left_out: int
    """Names beyond what is stored of one group."""


def read_settings(attempt: Attempt) -> tuple[SettingsGroup, ...] | Unavailable:
    """All groups in the order in which they came."""
    for rank in sorted(attempt.ranks):
        found = read_rank_settings(attempt.ranks[rank])
        if found:
            return found
    return NOT_RECORDED


def read_rank_settings(recording: Recording) -> tuple[SettingsGroup, ...]:
    """The last line of each group counts."""
    groups: dict[str, SettingsGroup] = {}
    for update in recording.updates:
        line = update.get("settings")
        group = _read_group(line) if isinstance(line, dict) else None
        if group is not None and (group.name in groups or len(groups) < MAX_GROUPS):
            groups[group.name] = group
    return tuple(groups.values())


def _read_group(line: JsonFields) -> SettingsGroup | None:
    name, known_by, values = (line.get(key) for key in ("name", "known_by", "values"))
    num_left_out = line.get("num_left_out")
    if not (isinstance(name, str) and isinstance(values, dict)):
        return None
    kept = list(values.items())[:MAX_KEYS]
    return SettingsGroup(
        name=name[:_MAX_CHARACTERS],
        known_by=known_by[:_MAX_CHARACTERS] if isinstance(known_by, str) else "not said",
        values={str(key)[:_MAX_CHARACTERS]: _read_value(value) for key, value in kept},
        num_left_out=(num_left_out if isinstance(num_left_out, int) else 0)
        + len(values)
        - len(kept),
    )


def _read_value(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value)[:_MAX_CHARACTERS]
