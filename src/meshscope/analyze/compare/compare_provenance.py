"""Differences of two runs before they began: code, packages, settings, layout, machines.

Facts come from the recordings (rank 0's header and updates, hosts of all ranks), flattened to
dotted names. What differs between any two launches (process ids, times, launch ids, ports) is left
out. A fact that only one side has is a difference with the other side empty.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt

_MAX_VALUE_CHARACTERS = 2000
MAX_DEPTH = 8
_NOT_RECORDED = "provenance was not recorded"

_VOLATILE = frozenset(
    (
        "provenance.environment.RANK",
        "provenance.environment.LOCAL_RANK",
        "provenance.environment.GROUP_RANK",
        "provenance.environment.ROLE_RANK",
        "provenance.environment.TORCHELASTIC_RUN_ID",
        "provenance.environment.SLURM_JOB_ID",
        "provenance.environment.SLURM_PROCID",
        "provenance.environment.SLURM_LOCALID",
        "provenance.environment.SLURM_NODEID",
    )
)
_WANTED_HEADER = ("world_size", "provenance", "communication")
_WANTED_UPDATES = ("config", "host_memory", "stage_layers")


class Subject(StrEnum):
    """What a fact is about, in the order of display."""

    CODE = "code"
    ARGUMENTS = "arguments"
    SETTINGS = "settings"
    LAYOUT = "layout"
    TORCH = "torch"
    ENVIRONMENT = "environment"
    MACHINES = "machines"
    PACKAGES = "packages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One fact that is not the same."""

    subject: Subject
    name: str
    a: str | None
    """None if this side does not have it."""
    b: str | None


def diff_provenance(a: Attempt, b: Attempt) -> tuple[Difference, ...] | Unavailable:
    """Every difference, by subject and name; Unavailable if a side recorded no facts."""
    facts_a, facts_b = _collect_facts(a), _collect_facts(b)
    for side, facts in (("A", facts_a), ("B", facts_b)):
        if not any(name.startswith("provenance.") for name in facts):
            return Unavailable(f"{side}: {_NOT_RECORDED}")
    found = [
        Difference(
            subject=_subject_of(name),
            name=name.removeprefix("provenance."),
            a=facts_a.get(name),
            b=facts_b.get(name),
        )
        for name in facts_a.keys() | facts_b.keys()
        if facts_a.get(name) != facts_b.get(name)
    ]
    order = list(Subject)
    return tuple(sorted(found, key=lambda diff: (order.index(diff.subject), diff.name)))


def _collect_facts(attempt: Attempt) -> dict[str, str]:
    """Dotted name to text: the lowest rank's facts, and all hosts."""
    recording = attempt.ranks[min(attempt.ranks)]
    facts: dict[str, str] = {}
    for name in _WANTED_HEADER:
        facts.update(_flatten(name, recording.header.get(name), 0))
    for update in recording.updates:
        for name in _WANTED_UPDATES:
            facts.update(_flatten(name, update.get(name), 0))
    layout = attempt.layout
    if not isinstance(layout, Unavailable):
        facts["layout"] = layout.describe()
    hosts = sorted({_host(one) for one in attempt})
    facts["hosts"] = _show(hosts)
    return {name: text for name, text in facts.items() if name not in _VOLATILE}


def _host(recording: Recording) -> str:
    host = recording.header.get("host")
    return host if isinstance(host, str) else "(unknown)"


def _flatten(name: str, value: object, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and depth < MAX_DEPTH:
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}", inner, depth + 1)
    elif value is not None:
        yield name, _show(value)


def _show(value: object) -> str:
    if isinstance(value, str):
        return value[:_MAX_VALUE_CHARACTERS]
    try:
        return json.dumps(value, sort_keys=True, default=str)[:_MAX_VALUE_CHARACTERS]
    except (ValueError, RecursionError):
        return "(cannot be shown)"


def _subject_of(name: str) -> Subject:
    parts = name.split(".")
    head = parts[1] if parts[0] == "provenance" and len(parts) > 1 else parts[0]
    subjects = {
        "git": Subject.CODE,
        "argv": Subject.ARGUMENTS,
        "packages": Subject.PACKAGES,
        "torch": Subject.TORCH,
        "environment": Subject.ENVIRONMENT,
        "layout": Subject.LAYOUT,
        "world_size": Subject.LAYOUT,
        "stage_layers": Subject.LAYOUT,
        "config": Subject.SETTINGS,
        "communication": Subject.SETTINGS,
        "cwd_name": Subject.CODE,
    }
    return subjects.get(head, Subject.MACHINES)
