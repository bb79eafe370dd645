"""Differences of two runs before they began: code, hyper-parameters, packages, layout, machines.

Facts come from the recordings (rank 0's header and updates, hosts of all ranks), flattened to
dotted names; a command line is compared option by option. What differs between any two launches
(process ids, times, launch ids, ports, a seed nobody chose) is left out. A fact that only one side
has is a difference with the other side empty; so is a whole group of settings.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from meshscope.analyze.training.settings import read_rank_settings
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
_ARGV = "provenance.argv"
_ARGUMENTS = "arguments:"
_SETTINGS = "settings:."
_SEED = "provenance.torch.initial_seed"
_LARGEST_SEED = (1 << 32) - 1
"""Without `manual_seed` torch draws 64 bits; people and their frameworks choose at most 32."""
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_ASSIGNED = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/-]*")
_WANTED_HEADER = ("world_size", "provenance", "communication")
_WANTED_UPDATES = ("config", "host_memory", "stage_layers")


class Subject(StrEnum):
    """What a fact is about, in the order of display."""

    CODE = "code"
    ARGUMENTS = "arguments"
    HYPER_PARAMETERS = "hyper-parameters"
    """What the program was given, the engine's configuration, frameworks' arguments."""
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
    """Every difference, by subject and name; Unavailable if a side recorded no facts.

    Hyper-parameters are compared also where provenance was not wanted.
    """
    facts_a, facts_b = _collect_facts(a), _collect_facts(b)
    for one, other in ((facts_a, facts_b), (facts_b, facts_a)):
        _fold_lonely_groups(one, other)
    lacking = [side for side, run in (("A", a), ("B", b)) if not _has_provenance(run)]
    if lacking and not all(_has_settings(facts) for facts in (facts_a, facts_b)):
        return Unavailable(f"{lacking[0]}: {_NOT_RECORDED}")
    names = facts_a.keys() | facts_b.keys()
    if lacking:
        names = {name for name in names if name.startswith(_SETTINGS)}
    found = [
        Difference(
            subject=_subject_of(name),
            name=name.removeprefix("provenance.").removeprefix(_ARGUMENTS).removeprefix(_SETTINGS),
            a=facts_a.get(name),
            b=facts_b.get(name),
        )
        for name in names
        if facts_a.get(name) != facts_b.get(name)
    ]
    order = list(Subject)
    return tuple(sorted(found, key=lambda diff: (order.index(diff.subject), diff.name)))


def _has_provenance(attempt: Attempt) -> bool:
    return bool(attempt.ranks[min(attempt.ranks)].header.get("provenance"))


def _has_settings(facts: Mapping[str, str]) -> bool:
    return any(name.startswith(_SETTINGS) for name in facts)


def _collect_facts(attempt: Attempt) -> dict[str, str]:
    """Dotted name to text: the lowest rank's facts, and all hosts."""
    recording = attempt.ranks[min(attempt.ranks)]
    facts: dict[str, str] = {}
    for name in _WANTED_HEADER:
        facts.update(_flatten(name, recording.header.get(name), 0))
    provenance = recording.header.get("provenance")
    if facts.pop(_ARGV, None) is not None and isinstance(provenance, Mapping):
        facts.update(_split_arguments(provenance.get("argv")))
    for update in recording.updates:
        for name in _WANTED_UPDATES:
            facts.update(_flatten(name, update.get(name), 0))
        if "initial_seed" in update:
            facts[_SEED] = _show(update["initial_seed"])
    if facts.get(_SEED, "").isdecimal() and int(facts[_SEED]) > _LARGEST_SEED:
        facts[_SEED] = "drawn by torch"
    facts.update(_list_settings(recording))
    layout = attempt.layout
    if not isinstance(layout, Unavailable):
        facts["layout"] = layout.describe()
    hosts = sorted({_host(one) for one in attempt})
    facts["hosts"] = _show(hosts)
    return {name: text for name, text in facts.items() if name not in _VOLATILE}


def _split_arguments(argv: object) -> Iterator[tuple[str, str]]:
    """A command line by its options: `--lr 1e-3` is `--lr` with the value `1e-3`."""
    given: dict[str, list[str]] = {}
    option = ""
    for index, argument in enumerate(map(_show, argv if isinstance(argv, list) else ())):
        name, equals, value = argument.partition("=")
        is_option = bool(_OPTION.fullmatch(name))
        if is_option or (equals and _ASSIGNED.fullmatch(name)):
            given.setdefault(name, []).extend([value] if equals else [])
            option = "" if equals else name
        elif option:
            given[option].append(argument)
        else:
            given[f"argv[{index}]"] = [argument]
    for name, values in given.items():
        yield f"{_ARGUMENTS}{name}", " ".join(values)[:_MAX_VALUE_CHARACTERS] or "given"


def _list_settings(recording: Recording) -> Iterator[tuple[str, str]]:
    for group in read_rank_settings(recording):
        for name, value in group.values.items():
            yield f"{_SETTINGS}{group.name}.{name}", str(value)


def _fold_lonely_groups(facts: dict[str, str], others: Mapping[str, str]) -> None:
    """Of a group that the other side does not have at all, one line says so."""
    theirs = {name.split(".")[1] for name in others if name.startswith(_SETTINGS)}
    names = [name for name in facts if name.startswith(_SETTINGS)]
    for name in names:
        group = name.split(".")[1]
        if group not in theirs:
            del facts[name]
            facts[f"{_SETTINGS}{group}"] = "recorded"


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
    if name.startswith(_ARGUMENTS):
        return Subject.ARGUMENTS
    if name.startswith(_SETTINGS):
        return Subject.HYPER_PARAMETERS
    parts = name.split(".")
    head = parts[1] if parts[0] == "provenance" and len(parts) > 1 else parts[0]
    subjects = {
        "git": Subject.CODE,
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
