"""Findings in a trace: marks of the job, and intervals of steps on the ranks they name."""

from collections.abc import Mapping

from meshscope.core.unavailable import Unavailable
from meshscope.diagnose.finding import Finding
from meshscope.export.lanes import Lanes
from meshscope.export.trace_counters import StepTimes
from meshscope.export.trace_sink import Argument, TraceSink, Track

_ORDER = 1
_NAME = "findings"
_Span = tuple[int, int]


class FindingSpans:
    """When findings are, gathered window by window."""

    def __init__(self, findings: tuple[Finding, ...], ranks: tuple[int, ...]) -> None:
        """Those that concern these ranks."""
        chosen = frozenset(ranks)
        self._findings = [
            one for one in findings if not one.ranks or not chosen.isdisjoint(one.ranks)
        ]
        self._of_job: dict[int, _Span] = {}
        self._of_rank: dict[int, dict[int, _Span]] = {}
        """By rank, then by place in `_findings`."""

    def note(self, rank: int, times: StepTimes) -> None:
        """A rank's steps on the aligned clock."""
        for index, one in enumerate(self._findings):
            span = _find_span(one, times)
            if span is not None:
                if not one.ranks or rank in one.ranks:
                    _widen(self._of_job, index, span)
                if rank in one.ranks:
                    _widen(self._of_rank.setdefault(rank, {}), index, span)

    def put(self, sink: TraceSink, job: Track, ranks: Mapping[int, Track]) -> None:
        """Writes them: of the job as marks on its own row."""
        for index, (start, _) in self._of_job.items():
            one = self._findings[index]
            sink.put_mark(job, "finding", one.label, start, describe(one))
        for rank, spans in self._of_rank.items():
            lanes, tracks = Lanes(nests=True), dict[int, Track]()
            ordered = sorted(spans.items(), key=lambda pair: (pair[1][0], -pair[1][1]))
            for index, (start, end) in ordered:
                lane = lanes.place(start, end)
                if lane not in tracks:
                    tracks[lane] = sink.add_track(ranks[rank], _NAME, _ORDER)
                one = self._findings[index]
                sink.put_slice(tracks[lane], "finding", one.label, start, end, describe(one))


def _widen(spans: dict[int, _Span], index: int, span: _Span) -> None:
    low, high = spans.get(index, span)
    spans[index] = (min(low, span[0]), max(high, span[1]))


def _find_span(finding: Finding, times: StepTimes) -> _Span | None:
    """Where its steps are; None where none of them is."""
    first = -1 if finding.first_step is None else finding.first_step
    last = 1 << 62 if finding.last_step is None else finding.last_step
    found = [time for step, time in times.items() if first <= step <= last]
    if not found:
        return None
    return min(start for start, _ in found), max(end for _, end in found)


def describe(finding: Finding) -> list[Argument]:
    found: list[Argument] = [
        ("severity", finding.severity.word),
        ("summary", finding.summary),
        ("change", finding.change),
        ("sure", str(finding.confidence.level)),
    ]
    if isinstance(finding.gain, Unavailable):
        found.append(("saves", f"not priced: {finding.gain.reason}"))
    else:
        found.append(("saves_ns_per_step", round(finding.gain.saved_ns)))
    if finding.explained_by is not None:
        found.append(("explained_by", finding.explained_by))
    return found
