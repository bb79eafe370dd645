"""JSON documents of the commands that list something: runs, rules, rows of a query."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.counterparts import Counterpart
from meshscope.diagnose.rule import Rule, describe
from meshscope.diagnose.rule_page import list_parts, name_subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One run in a line; what could not be read is None and `state` says why."""

    path: str
    run_id: str | None = None
    started_unix_ns: int | None = None
    num_attempts: int | None = None
    num_ranks: int | None = None
    world_size: int | None = None
    num_steps: int | None = None
    """Finished steps of the last attempt, on its first rank."""
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsDocument:
    """The runs below a folder, by path."""

    runs: tuple[Listing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFacts:
    """What a rule of the diagnosis looks for."""

    code: str
    name: str
    subject: str
    lowest_severity: str
    highest_severity: str
    what: str
    page: Mapping[str, str]
    """Heading to text."""
    thresholds: tuple[Threshold, ...]
    symptom_of: tuple[str, ...]
    """Codes of rules whose findings explain this one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesDocument:
    """All rules, by code."""

    rules: tuple[RuleFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterpartsDocument:
    """Rules of other monitors, and what takes their place."""

    counterparts: tuple[Counterpart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsDocument:
    """The result of a query."""

    rows: tuple[Mapping[str, object], ...]
    """Name of a column to value. What JSON has no type for (dates, infinite numbers) is text."""


RUNS = ("meshscope-ls", 1)
RULES = ("meshscope-rules", 1)
RULE = ("meshscope-rule", 1)
COUNTERPARTS = ("meshscope-counterparts", 1)
ROWS = ("meshscope-sql", 1)


def describe_rule(rule: type[Rule]) -> RuleFacts:
    return RuleFacts(
        code=rule.code,
        name=rule.name,
        subject=name_subject(rule),
        lowest_severity=rule.severities[0].word,
        highest_severity=rule.severities[1].word,
        what=describe(rule),
        page=list_parts(rule),
        thresholds=tuple(rule.thresholds),
        symptom_of=tuple(sorted(rule.symptom_of)),
    )
