"""JSON documents of the commands that list something: runs, rules, rows of a query."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.counterparts import Counterpart
from meshscope.diagnose.rule import Rule, describe
from meshscope.diagnose.rule_page import list_parts, name_subject
from meshscope.report.goodput import Goodput


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedReport:
    """What a list shows of a run's report."""

    worst: str | None
    """Code and title of the most urgent finding above low; None without one."""
    severity: str | None
    saved_ratio: float | Unavailable
    """Share of a step that is saved without its cause."""
    mfu_ratio: float | Unavailable
    joules: float | Unavailable
    """Energy of the devices in the steps of the last attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """A run against the last good one of its job before it."""

    against: str
    """Path of that run: it finished, with as many ranks."""
    slower_ratio: float
    """How much longer a step takes; negative where it is shorter."""
    error_ratio: float
    """Standard error of that, by the spread of both runs' steps."""
    is_slower: bool
    """More than 5 %, and more than four standard errors."""


_NOT_READ = Unavailable("the run cannot be read")
_NO_REPORT = Unavailable("not asked for: --findings")
_NO_TREND = Unavailable("not asked for: --trend")


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
    job: str | None = None
    """The job's name: the folder above one that is named by a time, else the run's own."""
    is_open: bool = False
    """Some rank of the last attempt wrote no end: it goes on, or was killed."""
    last_sign_unix_ns: int | None = None
    """When its first rank last recorded something."""
    step_ns: float | None = None
    """From one step's start to the next, median over the last 1,000 steps of the first rank."""
    step_error_ns: float | None = None
    """Standard error of that, by the spread of the steps."""
    goodput: Goodput | Unavailable = _NOT_READ
    report: ListedReport | Unavailable = _NO_REPORT
    regression: Regression | Unavailable = _NO_TREND


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
    is_pattern: bool
    """It says where or when time is lost, not why: a finding with a cause may explain it."""


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
        is_pattern=rule.is_pattern,
    )
