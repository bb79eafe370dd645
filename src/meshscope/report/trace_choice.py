"""Which of several traces are shown in full."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshscope.core.unavailable import Unavailable

if TYPE_CHECKING:  # all of these are loaded where there is something to choose from
    from meshscope.analyze.communication.rank_comparison import RankComparison
    from meshscope.analyze.device.trace_outline import TraceOutline

MAX_IN_FULL = 2
"""Traces that are shown in full without being asked for."""


def choose_shown(
    outlines: "Sequence[TraceOutline]",
    comparison: "RankComparison | Unavailable",
    ranks: Sequence[int],
) -> list[int]:
    """Places of those to show in full: those asked for, all of two, or whoever others waited
    for."""
    wanted = [place for place, one in enumerate(outlines) if one.rank in ranks]
    if wanted:
        return wanted
    if len(outlines) <= MAX_IN_FULL:
        return list(range(len(outlines)))
    if not isinstance(comparison, Unavailable) and comparison.late:
        late = comparison.late[0].rank
        wanted = [place for place, one in enumerate(outlines) if one.rank == late]
    return wanted or [0]


def guess_shown(outlines: "Sequence[TraceOutline]", ranks: Sequence[int]) -> int:
    """The first of them as it most likely is, before ranks are compared: whoever others wait for
    waits least."""
    is_told = len(outlines) <= MAX_IN_FULL or any(one.rank in ranks for one in outlines)
    if is_told:
        return choose_shown(outlines, Unavailable("not compared yet"), ranks)[0]
    exposed = [sum(device.exposed_ns for device in one.devices) for one in outlines]
    return exposed.index(min(exposed))
