"""Numbers that the program or its framework logged, each with its ends and extremes.

They are those of the lowest rank that logged any, as they were logged: a framework's value may be a
mean over many steps. Loss, gradient norm, rate, tokens and samples have analyses of their own and
are not here.
"""

import re
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.rank.signals import (
    BACKWARD_LOSS,
    OWN_LOSS,
    ScalarSeries,
    read_scalars,
    split_number,
)
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.schema import ScalarFlag

MAX_NAMES = 200
NOT_LOGGED = Unavailable("neither the program nor its framework logged a number")
_NOT_FINITE = Unavailable("no logged value is finite")
_SHOWN_ELSEWHERE = frozenset(
    (BACKWARD_LOSS, OWN_LOSS, "loss", "grad_norm", "lr", "tokens", "samples")
)
_BY_FRAMEWORK = re.compile(r"(.+) \(logged by (\w+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedScalar:
    """One name under which numbers were logged."""

    name: str
    recorded_name: str
    """As the recording has it; with the framework that logged it."""
    logged_by: str
    """A framework, or `the program`."""
    num_values: int
    first_step: int
    last_step: int
    first: float | Unavailable
    """First, last, lowest and highest finite value."""
    last: float | Unavailable
    lowest: float | Unavailable
    highest: float | Unavailable


def describe_logged(recording: Recording) -> tuple[LoggedScalar, ...]:
    """Of one rank, by name, at most `MAX_NAMES`."""
    if not recording.has_table("scalars"):
        return ()
    counted = _find_counters(recording)
    names = [n for n in recording.names.values() if not _is_elsewhere(n) and n not in counted]
    series = read_scalars(recording, frozenset(names))
    shown = sorted(name for name in series if name in names)[:MAX_NAMES]
    return tuple(_describe(name, series[name]) for name in shown)


def _find_counters(recording: Recording) -> frozenset[str]:
    """Names of what was counted (`Recorder.count`): their sums are among the totals."""
    columns = recording.read("scalars")
    is_count = int64_column(columns, "flags") & ScalarFlag.COUNT != 0
    return frozenset(map(recording.name_of, np.unique(columns["name_id"][is_count]).tolist()))


def _is_elsewhere(name: str) -> bool:
    return name in _SHOWN_ELSEWHERE or bool(split_number(name)[0])


def _describe(name: str, series: ScalarSeries) -> LoggedScalar:
    by = _BY_FRAMEWORK.fullmatch(name)
    values = series.value[np.isfinite(series.value)]
    some = bool(len(values))
    return LoggedScalar(
        name=by[1] if by else name,
        recorded_name=name,
        logged_by=by[2] if by else "the program",
        num_values=len(series.value),
        first_step=int(series.step[0]),
        last_step=int(series.step[-1]),
        first=float(values[0]) if some else _NOT_FINITE,
        last=float(values[-1]) if some else _NOT_FINITE,
        lowest=float(values.min()) if some else _NOT_FINITE,
        highest=float(values.max()) if some else _NOT_FINITE,
    )
