"""The JSON document of `meshscope trace`."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.analyze.communication.rank_comparison import RankComparison
from meshscope.analyze.compare.trace_diff import TraceDifference
from meshscope.analyze.device.trace_summary import TraceSummary
from meshscope.analyze.device.trace_verdict import TraceVerdict
from meshscope.core.unavailable import Unavailable
from meshscope.simulate.critical_path import CriticalPath

DOCUMENT = ("meshscope-trace", 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDocument:
    """What traces of torch.profiler say, of one rank or of many."""

    layout: Mapping[str, int | list[str]] | Unavailable
    """Degree of every axis, and their order."""
    verdicts: tuple[TraceVerdict | Unavailable, ...]
    """What limits the busiest device of each trace."""
    not_known: tuple[str, ...]
    """What these traces cannot tell: files that were left out, ranks without a trace, missing
    ends, steps that were found and not marked."""
    traces: tuple[TraceSummary, ...]
    across_ranks: RankComparison | Unavailable
    critical_path: CriticalPath | Unavailable | None
    """Over ranks; null for one trace and for a comparison."""
    difference: TraceDifference | Unavailable | None
    """What changed from the traces that were compared with; null where there are none."""
