"""Runs of one job against each other, in the order of their starts."""

from collections.abc import Sequence
from dataclasses import replace

from meshscope.core.unavailable import Unavailable
from meshscope.fleet.summary import FINISHED
from meshscope.report.listings import Listing, Regression

MIN_SLOWER_RATIO = 0.05
_MIN_ERRORS = 4.0
_MIN_STEPS = 20


def add_regressions(listings: Sequence[Listing]) -> list[Listing]:
    """By job and start, each with its step time against the last good run before it: the last of
    the job that finished, with as many ranks, and was not itself slower than the one before."""
    ordered = sorted(listings, key=lambda one: (one.job or "", one.started_unix_ns or 0, one.path))
    good: dict[tuple[str | None, int | None], Listing] = {}
    found = []
    for one in ordered:
        key = (one.job, one.world_size)
        regression = _compare(one, good.get(key))
        found.append(replace(one, regression=regression))
        is_slower = not isinstance(regression, Unavailable) and regression.is_slower
        if _is_good(one) and not is_slower:
            good[key] = one
    return found


def _is_good(one: Listing) -> bool:
    return one.state == FINISHED and one.step_ns is not None and (one.num_steps or 0) >= _MIN_STEPS


def _compare(one: Listing, before: Listing | None) -> Regression | Unavailable:
    if before is None:
        return Unavailable("no earlier run of this job finished with as many ranks")
    if one.step_ns is None or before.step_ns is None or (one.num_steps or 0) < _MIN_STEPS:
        return Unavailable("it has too few steps")
    ratio = one.step_ns / before.step_ns
    own = (one.step_error_ns or 0.0) / one.step_ns
    other = (before.step_error_ns or 0.0) / before.step_ns
    error = ratio * (own**2 + other**2) ** 0.5
    slower = ratio - 1
    return Regression(
        against=before.path,
        slower_ratio=slower,
        error_ratio=error,
        is_slower=slower > MIN_SLOWER_RATIO and slower > _MIN_ERRORS * error,
    )
